"""From texts to token files, and from token files to batches.

A corpus is prepared once into `data/<name>/<key>/` and opened as read-only memory maps:

    train.npy, val.npy                        (n,) uint16 or uint32 ids, one document after the other
    train_documents.npy, val_documents.npy    (documents,) uint64, where in the ids each document starts
    meta.json                                 source, tokenizer, counts, size and sha256 of the files; written last

What a corpus is made of is told by the packages in `data/`: a `Source` of `Document`s each.
"""

import hashlib
import json
import mmap
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gpt.errors import ConfigError, DataError
from gpt.schema import DataConfig, TokenizerConfig
from gpt.tokenizer import Tokenizer, id_dtype, load_tokenizer, new_tokenizer

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 1  # of a prepared folder; another one is prepared again
SPLITS = ("train", "val")
BLOCK = 2**20  # bytes of text, or ids, handled at a time, so that memory does not grow with the corpus
LARGE = 2**28  # bytes; larger files are verified once, not at every opening, and leave resident memory after each batch
BATCHES = 0x6E616E6F5045  # the Philox stream that batches are drawn from: no other use of the seed shares it


# ---------------------------------------------------------------------------------------------------------- documents


@dataclass(frozen=True)
class Document:
    """One text of a corpus, or a part of one: `ends` is False where it goes on in the other split."""

    split: str  # "train" or "val"
    blocks: Iterable[str]
    ends: bool = True


@dataclass(frozen=True)
class Source:
    """Where a corpus comes from. `documents()` can be called again, and gives the same each time."""

    description: str
    fingerprint: dict  # plain JSON, cheap to take: when it changes, the corpus is prepared again
    documents: Callable[[], Iterator[Document]]
    skipped: dict[str, int] = field(default_factory=dict)  # why -> how many files; complete after documents()


class SourceGone(DataError):
    """The text is not there (any more); what was prepared from it can still be used."""


def share(name: str) -> float:
    """A number in [0, 1) from the hash of a document's name: orders the documents and decides which are held out."""
    return int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:6], "big") / 2**48


def held_out(names: Iterable[str], val_fraction: float) -> set[str]:
    """The documents for validation: those whose share is below `val_fraction`, but at least one and not all."""
    ordered = sorted(names, key=share)
    chosen = sum(share(name) < val_fraction for name in ordered)
    return set(ordered[: min(max(chosen, 1), len(ordered) - 1)])


def listing(entries: Iterable[list]) -> dict:
    """A fingerprint of files: how many, and the sha256 of what `entries` tell of each."""
    entries = list(entries)
    return {"files": len(entries), "sha256": hashlib.sha256(json.dumps(entries).encode()).hexdigest()}


def read_blocks(path: Path, start: int = 0, stop: int | None = None) -> Iterator[str]:
    """The UTF-8 text of the bytes start..stop of a file, about a megabyte at a time, line ends as they are.

    Raises DataError naming the file and the byte where it is not UTF-8.
    """
    try:
        with open(path, "rb") as file:
            file.seek(start)
            at, rest = start, b""  # `rest`: the beginning of a character that the block cut in two
            while True:
                new = file.read(BLOCK if stop is None else min(BLOCK, stop - at - len(rest)))
                data = rest + new
                try:
                    text, rest = data.decode("utf-8"), b""
                except UnicodeDecodeError as error:
                    if not new or error.reason != "unexpected end of data":
                        raise DataError(
                            f"{path}: byte {at + error.start:,} (0x{data[error.start]:02x}) is not UTF-8; "
                            "allowed: UTF-8 text; convert it: iconv -f <its encoding> -t utf-8"
                        ) from None
                    text, rest = data[: error.start].decode("utf-8"), data[error.start :]
                at += len(data) - len(rest)
                if text:
                    yield text
                if not new:
                    return
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None


def cut_in_two(path: Path, val_fraction: float) -> Iterator[Document]:
    """A single text: its last `val_fraction`, in bytes but whole characters, is held out."""
    size = path.stat().st_size
    cut = int(size * (1 - val_fraction))
    with open(path, "rb") as file:
        file.seek(cut)
        for byte in file.read(3):
            if byte & 0xC0 != 0x80:  # the first byte of a character
                break
            cut += 1
    yield Document("train", read_blocks(path, 0, cut), ends=False)
    yield Document("val", read_blocks(path, cut, size))


# Text before a space or newline is tokenized the same whatever follows, and the other way round, by every tokenizer
# here: GPT-2's pattern never runs from a non-space into a space.
WORD_END = re.compile(r"\S(?=[ \n])")


def pieces(blocks: Iterable[str]) -> Iterator[str]:
    """`blocks` cut anew at ends of words, so that encoding piece by piece equals encoding the whole."""
    held: list[str] = []
    for block in blocks:
        cut = WORD_END.search(block) if held else None
        if cut:
            yield "".join(held) + block[: cut.end()]
            held = [block[cut.end() :]]
        else:
            held.append(block)
    if held:
        yield "".join(held)


# ------------------------------------------------------------------------------------------------------------ writing


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


def check_ids(path: Path, ids: np.ndarray, vocab_size: int, start: int = 0) -> None:
    """Raises DataError with the index where an id is outside of 0 .. vocab_size - 1."""
    for at in range(0, len(ids), BLOCK):
        block = ids[at : at + BLOCK]
        if block.max() >= vocab_size or block.min() < 0:
            wrong = int(np.argmax((block >= vocab_size) | (block < 0)))
            raise DataError(
                f"{path}: token id {int(block[wrong]):,} at index {start + at + wrong:,}, "
                f"allowed: 0 to {vocab_size - 1:,} (the vocabulary)"
            )


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path: Path, value: dict) -> None:
    """Atomically: the file is whole or is not there."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with open(beside, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def encoded(documents: Iterable[Document], tokenizer: Tokenizer, log) -> Iterator[tuple[str, str, str, np.ndarray]]:
    """(split, what, text, ids), in order: what is "begin" or "end" of a document (no text) or a "piece" of it."""

    def parts():
        for document in documents:
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
    kind = new_tokenizer(tokenizer, (text for document in source.documents() for text in document.blocks))
    files = {}
    try:
        for split in SPLITS:
            files[split] = TokenFile(folder / f"{split}.npy", id_dtype(kind.vocab_size), kind.vocab_size)
            files[f"{split}_documents"] = TokenFile(folder / f"{split}_documents.npy", np.dtype(np.uint64))
        n_bytes = dict.fromkeys(SPLITS, 0)
        for split, what, text, ids in encoded(source.documents(), kind, log):
            if what == "begin":
                files[f"{split}_documents"].write(np.array([files[split].count]))
            elif what == "piece":
                files[split].write(ids)
                n_bytes[split] += len(text.encode("utf-8"))
            elif kind.separator is not None:
                files[split].write(np.array([kind.separator]))
        for split in SPLITS:
            if not n_bytes[split]:
                raise DataError(f"{source.description}: too little text, the {split} split is empty; give a longer one")
        meta = {
            "format": FORMAT,
            "name": data.name,
            "source": source.description,
            "fingerprint": source.fingerprint,
            "val_fraction": data.val_fraction,
            "skipped": source.skipped,
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
            "files": {f"{name}.npy": file.finish() for name, file in files.items()},
        }
        write_json(folder / "meta.json", meta)
    finally:
        for file in files.values():
            file.file.close()


# ------------------------------------------------------------------------------------------------------------ opening


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus, opened and checked."""

    name: str
    folder: Path
    tokenizer: Tokenizer
    meta: dict  # what meta.json holds
    train: np.ndarray  # (n,) ids, a read-only memory map
    val: np.ndarray
    train_documents: np.ndarray  # (documents,) uint64, where in `train` each document starts
    val_documents: np.ndarray
    train_sha256: str  # of the token files
    val_sha256: str

    def summary(self) -> str:
        """A few lines for a person: what it was made of, and how much of it."""
        lines = [f"{self.folder}", f"  source     {self.meta['source']}"]
        lines += [f"  tokenizer  {self.tokenizer.name}, {self.tokenizer.vocab_size:,} ids", ""]
        lines += [f"  {'':9}{'documents':>11}{'bytes':>15}{'tokens':>15}{'share':>9}"]
        total = sum(split["tokens"] for split in self.meta["splits"].values())
        for name, split in self.meta["splits"].items():
            counts = f"{split['documents']:>11,}{split['bytes']:>15,}{split['tokens']:>15,}"
            lines += [f"  {name:9}{counts}{split['tokens'] / total:>9.1%}"]
        skipped = ", ".join(f"{count:,} {why}" for why, count in self.meta["skipped"].items())
        return "\n".join(lines + ["", f"  skipped    {skipped or 'nothing'}"])


def open_corpus(folder: Path) -> Corpus:
    """Opens a prepared corpus and checks all of it against meta.json.

    Raises DataError naming the file, what was expected and what was found.
    """
    folder = Path(folder)
    try:
        return _open(folder)
    except DataError as error:
        path = " data.path=<file or folder>" if folder.parent.name == "text" else ""
        command = f"python data/prepare.py data={folder.parent.name or '<name>'}{path}"
        raise DataError(f"{error}; prepare it again: {command}") from None


def _open(folder: Path) -> Corpus:
    meta = _read_meta(folder / "meta.json")
    try:
        tokenizer = load_tokenizer(meta["tokenizer"])
        if tokenizer.sha256 != meta["tokenizer_sha256"]:
            raise DataError(f"{folder / 'meta.json'}: its tokenizer does not have the sha256 that is written beside it")
        opened = {}
        for split in SPLITS:
            for name, vocab_size in ((split, tokenizer.vocab_size), (f"{split}_documents", None)):
                opened[name] = _open_file(folder / f"{name}.npy", meta["files"][f"{name}.npy"], vocab_size)
            starts, count = opened[f"{split}_documents"], len(opened[split])
            if starts[0] != 0 or np.any(starts[1:] < starts[:-1]) or starts[-1] >= count:
                raise DataError(f"{folder}/{split}_documents.npy: starts must rise from 0 and stay below {count:,}")
            counts = meta["splits"][split]
            if (counts["documents"], counts["tokens"]) != (len(starts), count) or counts["bytes"] < 1:
                raise DataError(f"{folder / 'meta.json'}: the counts of {split} are not those of its files")
        sha256 = {split: meta["files"][f"{split}.npy"]["sha256"] for split in SPLITS}
        _ = meta["source"], meta["fingerprint"], meta["skipped"].items()
        return Corpus(
            meta["name"], folder, tokenizer, meta, **opened, train_sha256=sha256["train"], val_sha256=sha256["val"]
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{folder / 'meta.json'}: something is missing or of another type ({error})") from None


def _read_meta(path: Path) -> dict:
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{path}: not there, so this is no prepared corpus") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise DataError(f"{path}: not whole ({error})") from None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        given = meta.get("format") if isinstance(meta, dict) else meta
        raise DataError(f"{path}: format {str(given)[:40]!r}, expected {FORMAT}")
    return meta


def _open_file(path: Path, said: dict, vocab_size: int | None) -> np.ndarray:
    """The array in `path`, memory-mapped, if it is what meta.json `said`: size, type, count, sha256, ids."""
    dtype = np.dtype(np.uint64) if vocab_size is None else id_dtype(vocab_size)
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            if np.lib.format.read_magic(file) != (1, 0):
                raise ValueError("not version 1.0")
            shape, _, found = np.lib.format.read_array_header_1_0(file)
            offset = file.tell()
    except FileNotFoundError:
        raise DataError(f"{path}: not there") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise DataError(f"{path}: {size:,} bytes, but no .npy file ({error})") from None
    if found != dtype:
        raise DataError(f"{path}: holds {found}, expected {dtype}")
    if len(shape) != 1 or shape[0] < 1:
        raise DataError(f"{path}: has the shape {shape}, expected one dimension and at least one entry")
    count = shape[0]
    if size != offset + count * dtype.itemsize:
        expected = f"{offset + count * dtype.itemsize:,} bytes ({count:,} entries of {dtype})"
        raise DataError(f"{path}: {size:,} bytes, expected {expected}")
    if (size, count, dtype.name) != (said["size"], said["count"], said["dtype"]):
        raise DataError(
            f"{path}: {size:,} bytes, {count:,} entries of {dtype}; meta.json says {said['size']:,} bytes, "
            f"{said['count']:,} entries of {said['dtype']}"
        )
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    if size > LARGE and _verified(path) == [size, path.stat().st_mtime_ns, said["sha256"]]:
        return array
    sha256 = sha256_of(path)
    if sha256 != said["sha256"]:
        raise DataError(f"{path}: damaged, its sha256 is {sha256[:12]}…, meta.json says {said['sha256'][:12]}…")
    if vocab_size is not None:
        check_ids(path, array, vocab_size)
    if size > LARGE:
        forget(array)
        try:
            write_json(_sidecar(path), {"verified": [size, path.stat().st_mtime_ns, sha256]})
        except OSError:
            pass  # a read-only folder: it is verified again next time
    return array


def _sidecar(path: Path) -> Path:
    return path.with_suffix(".verified.json")


def _verified(path: Path) -> list | None:
    """[size, mtime in ns, sha256] of a large file when it was last found good."""
    try:
        return json.loads(_sidecar(path).read_text())["verified"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


# ---------------------------------------------------------------------------------------------------------- preparing


def prepare(data: DataConfig, tokenizer: TokenizerConfig, root: Path = Path("data"), log=print) -> Corpus:
    """The corpus that `data` and `tokenizer` name, from `root/<name>/<key>`; prepared first where that is needed.

    Prepared tokens whose source is gone are still used, with a notice. Processes that prepare the same wait for each
    other. Raises ConfigError for a key, DataError for a text that cannot be used.
    """
    folder, source, gone = _locate(data, tokenizer, root)
    key = folder.name
    corpus, why = _existing(folder, tokenizer, source)
    if corpus is not None:
        if gone:
            log(f"{folder}: its source is gone, what was prepared from it is used ({gone})")
        return corpus
    if gone:
        raise gone

    from filelock import FileLock, Timeout

    beside = folder.parent / ".preparing"
    try:
        beside.mkdir(parents=True, exist_ok=True)
        lock = FileLock(beside / f"{key}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            log(f"{folder}: another process is preparing it, waiting")
            lock.acquire()
        try:
            corpus, why = _existing(folder, tokenizer, source)
            if corpus is None:
                log(f"{folder}: preparing" + (f" again, because {why}" if why else ""))
                _build(folder, beside / key, data, tokenizer, source, log)
                corpus = _open(folder)
        finally:
            lock.release()
    except OSError as error:
        raise DataError(
            f"{folder}: cannot be prepared ({error.strerror or error}); make room or rights there"
        ) from None
    return corpus


def check_source(data: DataConfig, tokenizer: TokenizerConfig, root: Path = Path("data")) -> None:
    """Raises what `prepare` would say about the keys and the place of the text, and writes nothing."""
    folder, _, gone = _locate(data, tokenizer, root)
    if gone and not folder.exists():
        raise gone


def _locate(data: DataConfig, tokenizer: TokenizerConfig, root: Path) -> tuple[Path, Source | None, SourceGone | None]:
    """Where the corpus is prepared, and its source, or why there is none."""
    from data import CORPORA

    if data.name not in CORPORA:
        raise ConfigError("data.name", data.name, " | ".join(CORPORA))
    default = {f.name: f.default for f in fields(DataConfig)}["val_fraction"]
    held = "" if data.val_fraction == default else f"val{data.val_fraction:g}"
    key = "-".join(part for part in (CORPORA[data.name].label(data), tokenizer.name, held) if part)
    folder = Path(root) / data.name / key
    try:
        return folder, CORPORA[data.name].source(data), None
    except SourceGone as error:
        return folder, None, error


def _existing(folder: Path, tokenizer: TokenizerConfig, source: Source | None) -> tuple[Corpus | None, str]:
    """What is prepared in `folder` if it can be used, else why not ("" where there is nothing)."""
    if not folder.exists():
        return None, ""
    try:
        corpus = _open(folder)
    except DataError as error:
        return None, str(error)
    if corpus.tokenizer.name != tokenizer.name:
        return None, f"it holds tokenizer={corpus.tokenizer.name}"
    if source is not None and corpus.meta["fingerprint"] != source.fingerprint:
        return None, f"its source changed: {corpus.meta['source']} -> {source.description}"
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


# ------------------------------------------------------------------------------------------------------------ batches


def batch(tokens: np.ndarray, block_size: int, seed: int, step: int, rows: range) -> tuple["Tensor", "Tensor"]:
    """Rows `rows` of the global batch of step `step`: inputs and targets, each (len(rows), block_size) int64.

    A row is a window of `tokens`, every start as likely as any other; targets are the inputs shifted by one. It is a
    function of (seed, step, row) alone: not of what was drawn before, nor of which other rows are asked for.
    Raises DataError where `tokens` is shorter than block_size + 1.
    """
    starts = len(tokens) - block_size  # how many windows there are
    if starts < 1:
        raise DataError(
            f"model.block_size: got {block_size:,}, which needs {block_size + 1:,} tokens to train on; the split has "
            f"{len(tokens):,}; give a longer text or a smaller model.block_size"
        )
    key, counter = np.array([seed, BATCHES], dtype=np.uint64), np.array([0, 0, 0, step], dtype=np.uint64)
    drawn = np.random.Philox(key=key, counter=counter).random_raw(rows.stop)[rows.start : rows.stop : rows.step]
    offsets = (drawn % np.uint64(starts)).astype(np.int64)  # (rows,); of 2^64 values, so the remainder is even enough
    return window(tokens, offsets, block_size)


def window(tokens: np.ndarray, starts: np.ndarray, length: int) -> tuple["Tensor", "Tensor"]:
    """Inputs tokens[s : s + length] and targets, one further, for each start: each (len(starts), length) int64."""
    import torch

    windows = np.asarray(tokens)[starts[:, None] + np.arange(length + 1)]  # (starts, length + 1)
    if tokens.nbytes > LARGE:
        forget(tokens)
    return torch.from_numpy(windows[:, :-1].astype(np.int64)), torch.from_numpy(windows[:, 1:].astype(np.int64))


def forget(tokens: np.ndarray) -> None:
    """Takes the pages of a read-only memory map out of resident memory; they stay in the system's cache."""
    if isinstance(tokens, np.memmap) and tokens.mode == "r" and hasattr(mmap, "MADV_DONTNEED"):
        tokens._mmap.madvise(mmap.MADV_DONTNEED)
