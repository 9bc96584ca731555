"""Texts of the Hugging Face hub, through `datasets`: data.repo, its data.config and data.split, a text in each row.

Every row of data.text_field is a document. Where the repository has a validation and a test split of its own
(data.val_split, data.test_split) these are held out, else a share of data.split is, by the hash of a row's number.
With data.max_tokens nothing is downloaded beyond that (a stream), else all of it is, once. Code in a repository is
never run. All is of one commit: that of data.revision when the preparation began.

With data.path a copy of it is read without `datasets`, or any folder, file or pattern of Parquet, JSON lines or text. A
file belongs to the split that its name tells, or a folder's: train-00000-of-00002.parquet, test.jsonl, dev/1.txt.
Where no name tells one, all files are the split train. Of a copy with several configurations data.config chooses the
folder, with - for /.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path, PurePosixPath

from data import jsonl, parquet
from gpt.documents import Document, Skipped, Source
from gpt.download import reach
from gpt.errors import ConfigError, DataError, shown
from gpt.schema import DataConfig
from gpt.sources import PACKED, Files, checked_text, in_blocks, located, path_label, read_text, stream

Rows = Callable[[int], Iterator[Iterable[str] | Skipped]]  # the texts of a split from a number on, in blocks

ROWS = {"repo", "revision", "config", "split", "val_split", "test_split", "text_field"}  # which they are
KEYS = ROWS | {"path", "val_fraction", "test_fraction"}
PLAIN = [f".{end}{packed}" for end in ("txt", "raw", "tokens") for packed in ("", *PACKED)]
KINDS = {"Parquet": parquet.SUFFIXES, "JSON lines": jsonl.SUFFIXES, "text": PLAIN}
ALLOWED = f"a file, folder or pattern of {', '.join(KINDS)} ({' '.join(sum(map(list, KINDS.values()), []))})"
ABOUT = ("dataset_info.json", "dataset_infos.json")  # files of a repository that are no texts
WORDS = {"train": "train", "training": "train", "test": "test", "testing": "test", "eval": "test", "evaluation": "test"}
WORDS |= dict.fromkeys(("validation", "valid", "val", "dev"), "validation")
OURS = {"val": "val_split", "test": "test_split", "train": "split"}  # small ones first, for those that end early


def label(config: DataConfig) -> str:
    _check(config)
    told = (config.config, config.split, config.val_split, config.test_split, config.text_field, config.revision)
    return path_label(Path(config.repo) if config.path is None else located(config, ALLOWED), *told)


def source(config: DataConfig) -> Source:
    return source_of(config, partial(a_document_a_row, config))


def source_of(config: DataConfig, documents: Callable[[dict[str, Rows], int], Iterator[Document | Skipped]]) -> Source:
    """The Source whose `documents` are made of the rows of each split. What is prepared needs the hub no more."""
    _check(config)
    told = {key: getattr(config, key) for key in sorted(ROWS)}
    theirs = {ours: getattr(config, key) for ours, key in OURS.items() if getattr(config, key) is not None}
    if config.path is None:
        settled: dict = {}
        sizes: dict[str, int] = {}  # of the splits that are read so far
        rows = {ours: partial(hub_rows, config, split, settled, sizes) for ours, split in theirs.items()}
        return Source(
            f"hub: {config.repo}",
            told,
            partial(documents, rows),
            size=lambda: sum(sizes.values()) if len(sizes) == len(theirs) else None,
            settled=settled,
        )
    path = located(config, ALLOWED)
    files = Files(path, sum(map(list, KINDS.values()), []), ALLOWED)
    if path.is_dir():
        _choose_config(config, files)
    texts, text_size = _reader(path, files)
    rows = {
        ours: partial(texts, paths, config.text_field) for ours, paths in _split(config, path, files, theirs).items()
    }
    told = {key: value for key, value in told.items() if key not in ("repo", "revision")}
    return Source(
        str(path),
        files.fingerprint() | told,
        partial(documents, rows),
        files.skipped,
        size=partial(text_size, files, config.text_field),
        state=files.state,
    )


def a_document_a_row(config: DataConfig, rows: dict[str, Rows], start: int) -> Iterator[Document | Skipped]:
    if config.val_split is None:
        yield from stream(rows["train"], start, config)
        return
    for split, of_split in rows.items():
        for text in of_split(0):
            if start > 0:
                start -= 1
            else:
                yield text if isinstance(text, Skipped) else Document(split, text)


def _check(config: DataConfig) -> None:
    """Raises ConfigError where keys do not go together."""
    if config.path is None and not config.repo:
        raise ConfigError("data.repo", config.repo, "a dataset of the Hugging Face hub, as owner/name, or data.path=…")
    if config.path is not None and config.revision is not None:
        raise ConfigError("data.revision", config.revision, "null with data.path, which is read as it is")
    if config.val_split is None:
        if config.test_split is not None:
            raise ConfigError("data.test_split", config.test_split, "null, since data.val_split is", "name both")
        return
    theirs = [config.split, config.val_split, config.test_split]
    for key, given in (("val_split", config.val_split), ("test_split", config.test_split)):
        if theirs.count(given) > 1 and given is not None:
            raise ConfigError(f"data.{key}", given, "a split of its own: nobody is tested on what they were trained on")
    for key in ("val_fraction", "test_fraction"):
        default = DataConfig.__dataclass_fields__[key].default
        if getattr(config, key) != default:
            allowed = f"{default}, since data.val_split says what is held out"
            raise ConfigError(f"data.{key}", getattr(config, key), allowed, "say data.val_split=null for a share")


# --------------------------------------------------------------------------------------------------------- local files


def _reader(path: Path, files: Files) -> tuple[Callable[[Iterable[Path], str, int], Iterator], Callable]:
    """What reads the files, and what tells their size; they are of one kind. Raises DataError where they are not."""
    counts = {kind: sum(name.lower().endswith(tuple(ends)) for name in files.paths) for kind, ends in KINDS.items()}
    counts["another kind"] = len(files.paths) - sum(counts.values())
    found = [f"{count} of {kind}" for kind, count in counts.items() if count]
    if len(found) > 1 or counts["another kind"]:
        ends = [end for kind in KINDS.values() for end in kind]
        suffixes = Counter(end for name in files.paths for end in ends if name.lower().endswith(end))
        say = f"say which: data.path='{shown(path)}/**/*{suffixes.most_common(1)[0][0]}'" if path.is_dir() else ""
        raise DataError(
            f"data.path: {shown(path)} has {' and '.join(found)}; allowed: {ALLOWED}, all of one kind; {say}"
        )
    readers = {
        "Parquet": (parquet.texts, parquet.text_size),
        "JSON lines": (jsonl.texts, jsonl.text_size),
        "text": (_texts, lambda files, field: files.text_size()),
    }
    return readers[next(kind for kind in counts if counts[kind])]


def _texts(paths: Iterable[Path], field: str, start: int) -> Iterator[Iterable[str]]:
    """A file each."""
    return (read_text(path) for path in islice(paths, start, None))


def _choose_config(config: DataConfig, files: Files) -> None:
    """Of a folder with several configurations keeps the chosen one's. Raises ConfigError where that is not there."""
    files.keep([name for name in files.paths if PurePosixPath(name).name not in ABOUT], "files about the dataset")
    folders = {name: PurePosixPath(name).parent.parts for name in files.paths}
    if config.config is not None:
        chosen = [name for name, parts in folders.items() if config.config in _joined(parts)]
        if chosen:
            files.keep(chosen, "files of another configuration")
            return
        above = _joined(located(config, ALLOWED).parts)
        if config.config in above or not any(map(_of_configuration, folders.values())):
            return
        allowed = (
            f"null for all files of {shown(config.path)}, or a folder there, with - for /: {_listed(folders.values())}"
        )
        raise ConfigError("data.config", config.config, allowed)
    twice: dict[str, set] = {}
    for name, parts in folders.items():
        twice.setdefault(PurePosixPath(name).name, set()).add(parts)
    for name, places in twice.items():
        if len(places) > 1 and split_told(name) is not None:
            allowed = f"the folder of one configuration, since several hold {name}: {_listed(places)}"
            raise ConfigError("data.config", None, allowed)


def _of_configuration(parts: tuple[str, ...]) -> bool:
    """Whether a folder's name tells more than a split."""
    return any(part != "data" and split_told(part) is None for part in parts)


def _joined(parts: tuple[str, ...]) -> set[str]:
    """The names that a folder, or one around it, has as a configuration: sample/10BT is sample-10BT."""
    return {"-".join(parts[i:j]) for j in range(1, len(parts) + 1) for i in range(max(0, j - 3), j)}


def _listed(folders: Iterable[tuple[str, ...]]) -> str:
    found = sorted({"-".join(parts) for parts in folders if parts})
    return ", ".join(found[:10]) + (" …" if len(found) > 10 else "") or "there are none"


def _split(config: DataConfig, path: Path, files: Files, theirs: dict[str, str]) -> dict[str, list[Path]]:
    """The files of each split that is asked for; the others are counted. Raises ConfigError for one without files."""
    if path.is_file():
        told = dict.fromkeys(files.paths, config.split)
    else:
        told = {name: split_told(name, theirs.values()) for name in files.paths}
        if not any(told.values()):
            if len(theirs) > 1:
                allowed = f"files named train, validation and test; no name at {shown(config.path)} tells its split"
                raise ConfigError("data.path", shown(config.path), allowed, "data=hf takes all of them to train on")
            told = dict.fromkeys(told, "train")
    found = {}
    for ours, split in theirs.items():
        found[ours] = [name for name, of in told.items() if of is not None and _meant(of) == _meant(split)]
        if not found[ours]:
            there = ", ".join(sorted({of for of in told.values() if of}))
            raise ConfigError(f"data.{OURS[ours]}", split, f"what the names at {shown(config.path)} tell: {there}")
    files.keep([name for name, of in told.items() if of is not None], "files whose name tells no split")
    files.keep(sum(found.values(), []), "files of other splits than data.split, val_split and test_split")
    return {ours: [files.paths[name] for name in names] for ours, names in found.items()}


def split_told(name: str, asked: Iterable[str] = ()) -> str | None:
    """The split that a file's name tells, or else the innermost folder's that tells one; None where none does.

    That of a shard (train_sft-00000-of-00004), a name that is `asked` for, or one of WORDS as a word in it.
    """
    for part in reversed(PurePosixPath(name).parts):
        stem = part.split(".")[0]
        shard = re.fullmatch(r"(.+)-\d{5}-of-\d{5}(-\w+)?", stem)
        if shard or stem in asked:
            return shard[1] if shard else stem
        for word in re.findall("[a-z]+", part.lower()):
            if word in WORDS:
                return WORDS[word]
    return None


def _meant(split: str) -> str:
    return WORDS.get(split, split)


# -------------------------------------------------------------------------------------------------------------- the hub


def hub_rows(
    config: DataConfig, split: str, settled: dict, sizes: dict[str, int], start: int
) -> Iterator[Iterable[str] | Skipped]:
    """The text of each row of a split from `start` on, in blocks. Raises DataError."""
    row = start
    try:
        rows = opened(config, split, settled)
        if not config.max_tokens and config.text_field in rows.column_names:
            sizes[split] = rows.data.column(config.text_field).nbytes
        for row, value in enumerate(rows.skip(start), start=start):
            text = checked_text(value, config.text_field, f"{config.repo}: row {row:,} of {split}")
            yield in_blocks(text) if text else Skipped("empty texts")
    except DataError:
        raise
    except Exception as error:  # `datasets` lets those of a dozen libraries through
        message = " ".join(str(error).split())[:300]
        raise DataError(
            f"{config.repo}: {split} cannot be read at row {row:,} ({message}); data.path=<a copy of it> needs no hub"
        ) from None


def opened(config: DataConfig, split: str, settled: dict):
    """A split as `datasets` gives it, a stream or not, of the commit that `settled` has or gets."""
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")  # its cache, and asks nobody
    if not offline:
        _reach_hub(config)
    if "revision" not in settled:
        settled["revision"] = config.revision if offline else commit(config)
    import datasets

    how = {"streaming": bool(config.max_tokens), "revision": settled["revision"]}
    return datasets.load_dataset(config.repo, config.config, split=split, **how)


def commit(config: DataConfig) -> str:
    """That of data.revision, or the newest."""
    from huggingface_hub import HfApi

    return HfApi().dataset_info(config.repo, revision=config.revision, timeout=10).sha


def _reach_hub(config: DataConfig) -> None:
    """Raises DataError soon where the hub cannot be reached: left alone, `datasets` would try for half a minute."""
    hub = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    try:
        reach(hub)
    except OSError as error:
        raise DataError(
            f"data.repo: {config.repo} cannot be had from {hub} ({error}); say data.path=<a copy of it>, "
            "HF_HUB_OFFLINE=1 if it was downloaded here before, or data=stdlib, which needs no network"
        ) from None
