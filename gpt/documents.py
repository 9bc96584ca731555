"""Texts as documents: what a corpus is made of, which of it is held out, and how UTF-8 files are read.

The packages in `data/` say what a corpus is: a `Source` of `Document`s each.
"""

import codecs
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from gpt.errors import DataError, shown

BLOCK = 2**20  # bytes of text read at a time, so that memory does not grow with the corpus
LONGEST = 2**21  # characters that are encoded together at most


@dataclass(frozen=True)
class Document:
    """One text of a corpus, or a part of one: `ends` is False where it goes on in another split."""

    split: str  # "train", "val" or "test"
    blocks: Iterable[str] | Iterable[np.ndarray]  # text, or ids where a source has these
    ends: bool = True
    file: str = ""  # where one file is one document: for errors


@dataclass(frozen=True)
class Skipped:
    """A document that is left out, and why in a few words: counted in meta.json, and shown."""

    why: str


@dataclass(frozen=True)
class Source:
    """Where a corpus comes from.

    `documents(start)` yields the documents from number `start` on, and with 0 all of them; what is left out has a
    number too. It can be called again, and gives the same each time: a preparation that was killed goes on with the
    number it had reached, so a source that can jump there should (a list of files does; a stream reads over them).
    One process reads; tokenizing is what is spread over several.
    """

    description: str
    fingerprint: dict  # plain JSON, cheap to take: another one is another corpus, prepared beside this one
    documents: Callable[[int], Iterator[Document | Skipped]]
    skipped: dict[str, int] = field(default_factory=dict)  # why -> how many files that never became documents
    size: Callable[[], int | None] = lambda: None  # bytes to read, about, for the progress bar; None: nobody knows yet
    ids_at: dict[str, Path] = field(default_factory=dict)  # split -> its file, of documents that are ids of two bytes
    settled: dict = field(default_factory=dict)  # plain JSON that `documents` looks up once: kept for who goes on
    state: str = ""  # `state_of` its files, which are to stay the same ones while they are read
    vocabulary: tuple[str, str] | None = None  # of documents that are ids: the only tokenizer, and what to do about it


class SourceGone(DataError):
    """The text is not there (any more); what was prepared from it can still be used."""


def hash_share(name: str) -> float:
    """A number in [0, 1) from the hash of a document's name: orders the documents and decides which are held out."""
    return int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:6], "big") / 2**48


def splits_of(names: Iterable[str], val_fraction: float, test_fraction: float) -> dict[str, str]:
    """Name -> "val" for shares from 0 to `val_fraction`, "test" for the next `test_fraction`, "train" for the others.

    At least one document is held out for validation and one stays to train on; at least one is for the test (of a
    fraction above 0), where there are three or more. Which are for validation does not depend on `test_fraction`.
    """
    ordered = sorted(names, key=hash_share)  # as split_of says, but for the counts
    if not ordered:
        return {}
    below = [
        sum(hash_share(name) < share for name in ordered) for share in (val_fraction, val_fraction + test_fraction)
    ]
    n_val = min(max(below[0], 1), len(ordered) - 1)
    n_held = min(max(below[1], n_val + (test_fraction > 0)), len(ordered) - 1)
    splits = ["val"] * n_val + ["test"] * (n_held - n_val) + ["train"] * (len(ordered) - n_held)
    return dict(zip(ordered, splits, strict=True))


def split_of(name: str, val_fraction: float, test_fraction: float) -> str:
    """What `splits_of` says of one document of many, for sources that do not know all their names beforehand."""
    share = hash_share(name)
    return "val" if share < val_fraction else "test" if share < val_fraction + test_fraction else "train"


def listing(entries: Iterable[list]) -> dict:
    """A fingerprint of files: how many, and the sha256 of what `entries` tell of each."""
    entries = list(entries)
    return {"files": len(entries), "sha256": hashlib.sha256(json.dumps(entries).encode()).hexdigest()}


def state_of(stats: Iterable[os.stat_result]) -> str:
    """A hash that is another one where a file was written to, or replaced even by one of the same size and time."""
    told = [(stat.st_ino, stat.st_ctime_ns, stat.st_size, stat.st_mtime_ns) for stat in stats]
    return hashlib.sha256(repr(told).encode()).hexdigest()


def left_out(skipped: dict[str, int]) -> str:
    """How many of each kind, in words; "" where nothing was."""
    return ", ".join(f"{count:,} {why}" for why, count in skipped.items())


MARKS = {  # how a text in another encoding may begin; two bytes are the beginning of four
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


def check_mark(path: Path, head: bytes) -> None:
    """Raises DataError where `head`, the first bytes of a text, say that it is UTF-16 or UTF-32."""
    for mark, encoding in MARKS.items():
        if head.startswith(mark):
            raise DataError(
                f"{shown(path)}: byte 0 (0x{head[0]:02x}) is not UTF-8; allowed: UTF-8 text; it begins with the "
                f"byte-order mark of another encoding: iconv -f {encoding} -t utf-8"
            )


def read_blocks(path: Path, start: int = 0, stop: int | None = None) -> Iterator[str]:
    """The UTF-8 text of the bytes start..stop of a file, about a megabyte at a time.

    Exactly that text: line ends, NUL and a byte-order mark stay what they are. Raises DataError naming the file and the
    byte where it is not UTF-8, and where the file changes before it has been read to the end.
    """
    try:
        with open(path, "rb") as file:
            before = os.fstat(file.fileno())
            check_mark(path, file.read(4))  # whatever is read first: half of such a text can pass for UTF-8
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
                            f"{shown(path)}: byte {at + error.start:,} (0x{data[error.start]:02x}) is not UTF-8; "
                            "allowed: UTF-8 text; convert it: iconv -f <its encoding> -t utf-8"
                        ) from None
                    text, rest = data[: error.start].decode("utf-8"), data[error.start :]
                at += len(data) - len(rest)
                if text:
                    yield text
                if not new:
                    break
            if state_of([os.fstat(file.fileno())]) != state_of([before]):
                raise DataError(
                    f"{shown(path)}: changed while it was read; run the same command again when it is at rest"
                )
    except OSError as error:
        raise DataError(f"{shown(path)}: cannot be read ({error.strerror})") from None


def cut_text(path: Path, val_fraction: float, test_fraction: float) -> Iterator[Document]:
    """A single text: its last `val_fraction`, in bytes but whole characters, is for validation, and for the test the
    stretch before that. What is held out comes first, for preparations that end early."""
    size = path.stat().st_size
    test, val = (_character(path, int(size * (1 - share))) for share in (val_fraction + test_fraction, val_fraction))
    yield Document("val", read_blocks(path, val, size))
    if test < val:
        yield Document("test", read_blocks(path, test, val), ends=False)
    yield Document("train", read_blocks(path, 0, test), ends=False)


def _character(path: Path, at: int) -> int:
    """The first byte of a character from byte `at` on."""
    with open(path, "rb") as file:
        file.seek(at)
        for byte in file.read(3):
            if byte & 0xC0 != 0x80:
                break
            at += 1
    return at


# What stands before a space is tokenized the same whatever follows, and the other way round, by GPT-2's pattern and its
# successors: none of them runs from a non-space into a space.
WORD_END = re.compile(r"\S(?= )")


def pieces(blocks: Iterable, boundary: re.Pattern | None = WORD_END) -> Iterator:
    """`blocks` cut anew behind matches of `boundary`, where encoding piece by piece equals encoding the whole.

    None: they can be cut anywhere. Blocks of ids instead of text stay as they are. A text of LONGEST characters without
    a boundary is cut all the same, so that memory is bounded; it stays the same text, but for a token or two.
    """
    return iter(blocks) if boundary is None else _cut(blocks, boundary)


def _cut(blocks: Iterable, boundary: re.Pattern) -> Iterator:
    held: list[str] = []
    size = 0
    for block in blocks:
        if not isinstance(block, str):
            yield block
            continue
        cut = boundary.search(block) if held else None
        if cut:
            yield "".join(held) + block[: cut.end()]
            held, size = [block[cut.end() :]], len(block) - cut.end()
        elif size + len(block) > LONGEST:
            yield "".join(held)
            held, size = [block], len(block)
        else:
            held.append(block)
            size += len(block)
    if held:
        yield "".join(held)
