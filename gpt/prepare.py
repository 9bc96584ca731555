"""From texts to token files. A corpus is prepared once, whole or not at all, and never in place of another one."""

import hashlib
import json
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path

import numpy as np

from gpt.corpus import FORMAT, SPLITS, Corpus, check_ids, open_checked
from gpt.documents import BLOCK, Document, Skipped, Source, SourceGone, pieces
from gpt.errors import ConfigError, DataError
from gpt.files import sha256_of, write_atomic
from gpt.schema import DataConfig, TokenizerConfig
from gpt.tokenizer import Tokenizer, id_dtype, new_tokenizer, tokenizer_label


class TokenFile:
    """A one-dimensional .npy file that grows. Ids that the vocabulary lacks are refused, never wrapped."""

    def __init__(self, path: Path, dtype: np.dtype, vocab_size: int | None = None):
        self.path, self.dtype, self.vocab_size, self.count = path, dtype, vocab_size, 0
        self.file = open(path, "wb")
        self.offset = self._write_header()

    def _write_header(self) -> int:
        self.file.seek(0)
        header = {"descr": self.dtype.str, "fortran_order": False, "shape": (self.count,)}
        np.lib.format.write_array_header_1_0(self.file, header)  # padded: any count takes the same room
        return self.file.tell()

    def write(self, ids: np.ndarray) -> None:
        if self.vocab_size is not None:
            check_ids(self.path, ids, self.vocab_size, self.count)
        self.file.write(ids.astype(self.dtype).tobytes())
        self.count += len(ids)

    def finish(self) -> dict:
        """Writes the count, closes the file, and tells what meta.json keeps of it."""
        assert self._write_header() == self.offset, (self.path, self.count)
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        size, sha256 = self.path.stat().st_size, sha256_of(self.path)
        return {"size": size, "sha256": sha256, "dtype": self.dtype.name, "count": self.count}


def encoded(documents: Iterable[Document], tokenizer: Tokenizer, log) -> Iterator[tuple[str, str, str, np.ndarray]]:
    """(split, what, text, ids), in order: what is "begin" or "end" of a document (no text) or a "piece" of it."""

    def parts():
        for document in documents:
            if isinstance(document, Skipped):
                yield document.why, "skipped", ""
                continue
            yield document.split, "begin", ""
            for piece in pieces(document.blocks):
                yield document.split, "piece", piece
            if document.ends:
                yield document.split, "end", ""

    def flush():  # many pieces at a time, since a tokenizer may have threads
        for part, ids in zip(waiting, tokenizer.encode_batch([text for *_, text in waiting]), strict=True):
            yield *part, ids

    waiting, size, total, said = [], 0, 0, time.monotonic()
    for part in parts():
        waiting.append(part)
        size += len(part[2])
        if size >= 4 * BLOCK:
            yield from flush()
            total, waiting, size = total + size, [], 0
            if time.monotonic() - said > 5:
                said = time.monotonic()
                log(f"  {total / 1e6:,.0f} million characters so far")
    yield from flush()


def write_corpus(folder: Path, data: DataConfig, tokenizer: TokenizerConfig, source: Source, log=print) -> None:
    """Tokenizes `source` into the empty `folder`; meta.json, without which it does not count, comes last."""
    kind = new_tokenizer(tokenizer, (one for one in source.documents(0) if isinstance(one, Document)))
    files, skipped = {}, Counter(source.skipped)
    try:
        for split in SPLITS:
            files[split] = TokenFile(folder / f"{split}.npy", id_dtype(kind.vocab_size), kind.vocab_size)
            files[f"{split}_documents"] = TokenFile(folder / f"{split}_documents.npy", np.dtype(np.uint64))
        n_bytes = dict.fromkeys(SPLITS, 0)
        for split, what, text, ids in encoded(source.documents(0), kind, log):
            if what == "begin":
                files[f"{split}_documents"].write(np.array([files[split].count]))
            elif what == "skipped":
                skipped[split] += 1
            elif what == "piece":
                files[split].write(ids)
                n_bytes[split] += len(text.encode("utf-8"))
            elif kind.separator is not None:
                files[split].write(np.array([kind.separator]))
        for split in ("train", "val"):
            if not n_bytes[split]:
                raise DataError(f"{source.description}: too little text, the {split} split is empty; give a longer one")
        meta = {
            "format": FORMAT,
            "name": data.name,
            "source": source.description,
            "fingerprint": source.fingerprint,
            "val_fraction": data.val_fraction,
            "test_fraction": data.test_fraction,
            "skipped": dict(skipped),
            "tokenizer": kind.state(),
            "tokenizer_sha256": kind.sha256,
            "splits": {
                split: {
                    "documents": files[f"{split}_documents"].count,
                    "tokens": files[split].count,
                    "bytes": n_bytes[split],
                }
                for split in SPLITS
            },
            "files": {f"{name}.npy": file.finish() for name, file in files.items() if file.count},
        }
        for file in files.values():
            if not file.count:  # no test split
                file.path.unlink()
        write_atomic(folder / "meta.json", json.dumps(meta, indent=1))
    finally:
        for file in files.values():
            file.file.close()


def prepare(data: DataConfig, tokenizer: TokenizerConfig, root: Path = Path("data"), log=print) -> Corpus:
    """The corpus that `data` and `tokenizer` name, from `root/<name>/<key>-<hash>`; made first if need be.

    The hash is that of the source's fingerprint: when the text changes, a new folder comes beside the old one, since
    runs were trained on that. Where the text is gone, the newest folder is used, with a notice. Processes that prepare
    the same wait for each other. Raises ConfigError for a key, DataError for a text that cannot be used.
    """
    place = _place(data, tokenizer, root)
    try:
        source = _source(data)
    except SourceGone as gone:
        return _newest(place, tokenizer, gone, log)
    folder = place.with_name(f"{place.name}-{_hash(source)}")
    corpus, _ = _existing(folder, tokenizer, source)
    if corpus is not None:
        return corpus

    from filelock import FileLock, Timeout

    # One lock and one place to write, whatever the source: who prepares next clears up what a killed process left.
    beside = place.parent / ".preparing"
    try:
        beside.mkdir(parents=True, exist_ok=True)
        lock = FileLock(beside / f"{place.name}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            log(f"{folder}: another process is preparing it, waiting")
            lock.acquire()
        try:
            corpus, why = _existing(folder, tokenizer, source)
            if corpus is None:
                others = _prepared(place)
                if why:
                    log(f"{folder}: preparing again, because {why}")
                elif others:
                    log(f"{folder}: preparing; its source is another than that of {others[0].name}, which stays")
                else:
                    log(f"{folder}: preparing")
                _build(folder, beside / place.name, data, tokenizer, source, log)
                corpus = open_checked(folder)
        finally:
            lock.release()
    except OSError as error:
        raise DataError(
            f"{folder}: cannot be prepared ({error.strerror or error}); make room or rights there"
        ) from None
    return corpus


def check_source(data: DataConfig, tokenizer: TokenizerConfig, root: Path = Path("data")) -> None:
    """Raises what `prepare` would say about the keys and the place of the text, and writes nothing."""
    place = _place(data, tokenizer, root)
    try:
        _source(data)
    except SourceGone:
        if not _prepared(place):
            raise


def _place(data: DataConfig, tokenizer: TokenizerConfig, root: Path) -> Path:
    """Where the corpus is prepared, but for the hash of its source."""
    from data import CORPORA

    if data.name not in CORPORA:
        raise ConfigError("data.name", data.name, " | ".join(CORPORA))
    data.check()
    default = {f.name: f.default for f in fields(DataConfig)}
    held = [
        f"{split}{getattr(data, f'{split}_fraction')!r}"
        for split in ("val", "test")
        if getattr(data, f"{split}_fraction") != default[f"{split}_fraction"]
    ]
    key = "-".join(part for part in (CORPORA[data.name].label(data), tokenizer_label(tokenizer), *held) if part)
    return Path(root) / data.name / key


def _source(data: DataConfig) -> Source:
    from data import CORPORA

    try:
        return CORPORA[data.name].source(data)
    except OSError as error:
        raise DataError(f"data.path: {error.filename} cannot be read ({error.strerror})") from None


def _hash(source: Source) -> str:
    return hashlib.sha256(json.dumps([FORMAT, source.fingerprint], sort_keys=True).encode()).hexdigest()[:8]


def _prepared(place: Path) -> list[Path]:
    """The folders of this corpus, whatever their source was, the newest first."""
    name = re.compile(re.escape(place.name) + "-[0-9a-f]{8}")
    found = [meta for meta in place.parent.glob("*/meta.json") if name.fullmatch(meta.parent.name)]
    return [meta.parent for meta in sorted(found, key=lambda meta: meta.stat().st_mtime_ns, reverse=True)]


def _newest(place: Path, tokenizer: TokenizerConfig, gone: SourceGone, log) -> Corpus:
    """What was prepared last and can be used, with a notice; raises `gone` where nothing can."""
    for folder in _prepared(place):
        corpus, _ = _existing(folder, tokenizer)
        if corpus is not None:
            log(f"{folder}: its source is gone, what was prepared from it is used ({gone})")
            return corpus
    raise gone


def _existing(folder: Path, tokenizer: TokenizerConfig, source: Source | None = None) -> tuple[Corpus | None, str]:
    """What is prepared in `folder` if it can be used, else why not ("" where there is nothing)."""
    if not folder.exists():
        return None, ""
    try:
        corpus = open_checked(folder)
    except DataError as error:
        return None, str(error)
    if corpus.tokenizer.name != tokenizer.name:
        return None, f"it holds tokenizer={corpus.tokenizer.name}"
    if source is not None and corpus.meta["fingerprint"] != source.fingerprint:
        return None, f"it holds another source: {corpus.meta['source']}"
    return corpus, ""


def _build(folder: Path, new: Path, data: DataConfig, tokenizer: TokenizerConfig, source: Source, log) -> None:
    """Prepares in `new`, then puts it in place of `folder`. What a killed process left in `new` is thrown away."""
    old = new.with_name(f"{new.name}.old")
    for leftover in (new, old):
        shutil.rmtree(leftover, ignore_errors=True)
    new.mkdir()
    try:
        write_corpus(new, data, tokenizer, source, log)
        if folder.exists():
            os.rename(folder, old)
        os.rename(new, folder)
    finally:
        for leftover in (new, old):
            shutil.rmtree(leftover, ignore_errors=True)
