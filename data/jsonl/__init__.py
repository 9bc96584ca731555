"""JSON lines: data.path is a file, a folder of them, or a pattern; each line an object whose data.text_field is a text.

.jsonl, .ndjson or .json, as they are or compressed (.gz, .zst). Every line is a document, held out by the hash of its
number. Blank lines and texts that are null or empty are left out and counted; anything else is refused with its line.
"""

import json
import re
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain, islice
from pathlib import Path

from gpt.documents import Skipped, Source, check_mark
from gpt.errors import DataError, shown
from gpt.schema import DataConfig
from gpt.sources import (
    PACKED,
    UNREADABLE,
    Files,
    checked_text,
    in_blocks,
    located,
    path_label,
    source_of_rows,
    unpacked,
)

KEYS = {"path", "text_field", "val_fraction", "test_fraction"}
SUFFIXES = [f".{kind}{packed}" for kind in ("jsonl", "ndjson", "json") for packed in ("", *PACKED)]
ALLOWED = f"a file of JSON lines, a folder of them, or a pattern ({' '.join(SUFFIXES)})"


LINE = 2**26  # bytes of a line at most: it is read whole, and takes a dozen times as much memory
NO_OBJECT = re.compile(r"\s*([^\s{])")


def label(config: DataConfig) -> str:
    return path_label(located(config, ALLOWED), config.text_field)


def source(config: DataConfig) -> Source:
    return source_of_rows(config, SUFFIXES, ALLOWED, texts, text_size)


def text_size(files: Files, field: str) -> int:
    """Bytes of text, about: as large a share of the files as of their first megabytes."""
    try:
        with unpacked(next(iter(files.paths.values()))) as file:
            lines = [line for line in file.read(2**22).split(b"\n")[:-1] if line.strip()]
        share = sum(len((json.loads(line)[field] or "").encode()) for line in lines) / sum(map(len, lines))
    except (*UNREADABLE, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
        share = 1.0  # nobody knows
    return int(share * files.text_size())


def texts(paths: Iterable[Path], field: str, start: int) -> Iterator[Iterable[str] | Skipped]:
    """The lines of all files, from number `start` on."""
    return islice(chain.from_iterable(read(path, field) for path in paths), start, None)


def read(path: Path, field: str) -> Iterator[Iterable[str] | Skipped]:
    """The text of each line, in blocks. Raises DataError naming the file, the line and the byte."""
    number = at = 0
    try:
        with unpacked(path) as file:
            for line in iter(partial(file.readline, LINE + 2), b""):
                number, begin, at = number + 1, at, at + len(line)
                where = f"{shown(path)}: line {number:,}"
                if begin == 0:
                    check_mark(path, line)
                    if line.startswith(b"\xef\xbb\xbf"):  # a byte-order mark, which JSON does not have
                        line, begin = line[3:], 3
                if len(line) > LINE + line.endswith(b"\n"):
                    raise DataError(
                        f"{where} (byte {begin:,}) has more than {LINE:,} bytes; allowed: an object with a text in "
                        "each line, of at most that; a longer text can be a file of its own, for data=text"
                    )
                if not line.strip():
                    yield Skipped("blank lines")
                    continue
                try:
                    line = line.decode("utf-8")  # the bytes are freed: a line may be large
                except UnicodeDecodeError as error:
                    raise DataError(
                        f"{where}, byte {begin + error.start:,} (0x{line[error.start]:02x}) is not UTF-8; "
                        "allowed: JSON in UTF-8"
                    ) from None
                row = parsed(line, where, begin)
                del line
                text = checked_text(row, field, f"{where} (byte {begin:,})")
                del row
                yield in_blocks(text) if text else Skipped("empty texts")
    except UNREADABLE as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{shown(path)}: cannot be read behind line {number:,} ({reason})") from None


def parsed(line: str, where: str, begin: int) -> dict:
    """The object of a line that begins at byte `begin`. Raises DataError where there is none."""
    if other := NO_OBJECT.match(line):
        held = shown(line[other.start(1) :][:40].rstrip())
        raise DataError(f"{where} (byte {begin:,}) holds '{held}'; allowed: an object with a text")
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        at = begin + len(line[: error.pos].encode())
        raise DataError(f"{where}, byte {at:,} is no JSON ({error.msg})") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} (byte {begin:,}) is no JSON that can be read ({error})") from None
