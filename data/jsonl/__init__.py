"""JSON lines: data.path is a file, a folder of them, or a pattern; each line an object whose data.text_field is a text.

.jsonl, .ndjson or .json, as they are or compressed (.gz, .zst). Every line is a document, held out by the hash of its
number. Blank lines and texts that are null or empty are left out and counted; anything else is refused with its line.
"""

import json
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path

from gpt.documents import Skipped, Source
from gpt.errors import DataError
from gpt.schema import DataConfig
from gpt.sources import PACKED, UNREADABLE, Files, checked_text, in_blocks, located, path_label, stream, unpacked

KEYS = {"path", "text_field"}
SUFFIXES = [f".{kind}{packed}" for kind in ("jsonl", "ndjson", "json") for packed in ("", *PACKED)]
ALLOWED = f"a file of JSON lines, a folder of them, or a pattern ({' '.join(SUFFIXES)})"


def label(config: DataConfig) -> str:
    return path_label(located(config, ALLOWED), config.text_field)


def source(config: DataConfig) -> Source:
    path = located(config, ALLOWED)
    files = Files(path, SUFFIXES, ALLOWED)
    return Source(
        str(path),
        files.fingerprint() | {"text_field": config.text_field},
        lambda start: stream(lambda first: texts(files.paths.values(), config.text_field, first), start, config),
        files.skipped,
        files.text_size,
    )


def texts(paths: Iterable[Path], field: str, start: int) -> Iterator[Iterable[str] | Skipped]:
    """The lines of all files, from number `start` on."""
    return islice(chain.from_iterable(read(path, field) for path in paths), start, None)


def read(path: Path, field: str) -> Iterator[Iterable[str] | Skipped]:
    """The text of each line, in blocks. Raises DataError naming the file, the line and the byte."""
    number = at = 0
    try:
        with unpacked(path) as file:
            for line in file:
                number, begin, at = number + 1, at, at + len(line)
                where = f"{path}: line {number:,}"
                if begin == 0:
                    line = line.removeprefix(b"\xef\xbb\xbf")  # a byte-order mark, which JSON does not have
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
                text = checked_text(parsed(line, where, begin), field, f"{where} (byte {begin:,})")
                del line
                yield in_blocks(text) if text else Skipped("empty texts")
    except UNREADABLE as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path}: cannot be read behind line {number:,} ({reason})") from None


def parsed(line: str, where: str, begin: int) -> dict:
    """The object of a line that begins at byte `begin`. Raises DataError where there is none."""
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        at = begin + len(line[: error.pos].encode())
        raise DataError(f"{where}, byte {at:,} is no JSON ({error.msg})") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} (byte {begin:,}) is no JSON that can be read ({error})") from None
    if not isinstance(value, dict):
        raise DataError(f"{where} (byte {begin:,}) holds {str(value)[:40]!r}; allowed: an object with a text")
    return value
