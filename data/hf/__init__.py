"""Texts of the Hugging Face hub, through `datasets`: data.repo, its data.config and data.split, a text in each row.

Every row of data.text_field is a document. Where the repository has a validation and a test split of its own
(data.val_split, data.test_split) these are held out, else a share of data.split is, by the hash of a row's number.
With data.max_tokens nothing is downloaded beyond that (a stream), else all of it is, once. Code in a repository is
never run. With data.path the same reads a copy of it, or any folder or file of Parquet, JSON lines or text.
"""

import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from gpt.documents import Document, Skipped, Source, read_blocks
from gpt.download import reach
from gpt.errors import ConfigError, DataError
from gpt.schema import DataConfig
from gpt.sources import Files, checked_text, in_blocks, located, path_label, stream

KEYS = {"path", "repo", "config", "split", "val_split", "test_split", "text_field"}
BUILDERS = {"parquet": "parquet", "jsonl": "json", "json": "json", "ndjson": "json", "txt": "text"}  # by a file's end
SUFFIXES = [f".{end}{packed}" for end in BUILDERS for packed in ("", ".gz", ".zst")]
ALLOWED = f"a folder of {' '.join(BUILDERS)} files, such as a copy of the repository, or one of them"


def label(config: DataConfig) -> str:
    told = (config.config, config.split, config.val_split, config.test_split, config.text_field)
    if config.path is not None:
        return path_label(located(config, ALLOWED), *told)
    if not config.repo:
        raise ConfigError("data.repo", config.repo, "a dataset of the Hugging Face hub, as owner/name, or data.path=…")
    return path_label(Path(config.repo), *told)


def source(config: DataConfig) -> Source:
    label(config)  # which checks the keys
    return source_of(config, lambda start: documents(config, start))


def source_of(config: DataConfig, documents) -> Source:
    """The Source whose documents are made of these rows. It asks the hub for nothing: what is prepared needs none."""
    told = {key: getattr(config, key) for key in sorted(KEYS - {"path", "repo"})}
    if config.path is None:
        return Source(f"hub: {config.repo}", {"repo": config.repo, **told}, documents)
    path = located(config, ALLOWED)
    files = Files(path, SUFFIXES, ALLOWED)
    return Source(str(path), files.fingerprint() | told, documents, files.skipped)


def documents(config: DataConfig, start: int) -> Iterator[Document | Skipped]:
    """One a row."""
    if config.val_split is None:
        yield from stream(lambda first: rows(config, config.split, first), start, config)
        return
    for split, theirs in splits(config).items():
        for text in rows(config, theirs):
            if start > 0:
                start -= 1
            else:
                yield text if isinstance(text, Skipped) else Document(split, text)


def splits(config: DataConfig) -> dict[str, str]:
    """Our name of each split -> the repository's; the small ones come first, for those that end early."""
    theirs = {"val": config.val_split, "test": config.test_split, "train": config.split}
    return {ours: split for ours, split in theirs.items() if split is not None}


def rows(config: DataConfig, split: str, start: int = 0) -> Iterator[Iterable[str] | Skipped]:
    """The text of each row of a split from `start` on, in blocks. Raises DataError."""
    where, row = config.path or config.repo, start
    try:
        for row, value in enumerate(opened(config, split, start), start=start):
            if isinstance(value, Path):  # a file of plain text, as it is
                yield read_blocks(value)
                continue
            text = checked_text(value, config.text_field, f"{where}: row {row:,} of {split}")
            yield in_blocks(text) if text else Skipped("empty texts")
    except (DataError, ConfigError):
        raise
    except Exception as error:  # `datasets` lets those of a dozen libraries through
        message = " ".join(str(error).split())[:300]
        hint = "data=jsonl and data=parquet name the place" if config.path else "data.path=<a copy of it> needs no hub"
        raise DataError(f"{where}: {split} cannot be read at row {row:,} ({message}); {hint}") from None


def opened(config: DataConfig, split: str, start: int) -> Iterable[dict | Path]:
    """The rows of a split from `start` on, as `datasets` gives them; of text only the files: it changes line ends."""
    if config.path is None:
        _reach_hub(config)
    import datasets

    if config.path is None:
        loaded = datasets.load_dataset(config.repo, config.config, split=split, streaming=bool(config.max_tokens))
        return loaded.skip(start)
    builder = local_builder(located(config, ALLOWED), config.config)
    if split not in builder.config.data_files:
        raise ConfigError(
            "data.split", split, f"what there is at {config.path}: {', '.join(map(str, builder.config.data_files))}"
        )
    if type(builder.config).__name__ == "TextConfig":
        return islice((Path(file) for file in builder.config.data_files[split]), start, None)
    return builder.as_streaming_dataset(split).skip(start)


def local_builder(path: Path, name: str | None):
    """What `datasets` makes of a local file or folder; of a folder with several configurations the one of that name."""
    import datasets

    if path.is_file():
        kind = next((builder for end, builder in BUILDERS.items() if f".{end}" in path.suffixes), None)
        if kind is None:
            raise DataError(f"data.path: got {str(path)!r}, allowed: {ALLOWED}")
        return datasets.load_dataset_builder(kind, data_files={"train": str(path)})
    names = datasets.get_dataset_config_names(str(path))
    return datasets.load_dataset_builder(str(path), name if name in names else None)


def _reach_hub(config: DataConfig) -> None:
    """Raises DataError soon where the hub cannot be reached: left alone, `datasets` would try for half a minute."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return  # it then takes its own cache and asks nobody
    hub = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    try:
        reach(hub)
    except OSError as error:
        raise DataError(
            f"data.repo: {config.repo} cannot be had from {hub} ({error}); say data.path=<a copy of it>, "
            "HF_HUB_OFFLINE=1 if it was downloaded here before, or data=stdlib, which needs no network"
        ) from None
