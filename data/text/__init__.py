"""Your own text: data.path is a UTF-8 file, or a folder of them (every file a document, read recursively, in order).

A folder's files are held out for validation and test by the hash of their name; of a single text, the end is.
"""

import hashlib
import os
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from gpt.documents import Document, Source, SourceGone, cut_text, listing, read_blocks, splits_of
from gpt.errors import ConfigError, DataError
from gpt.schema import DataConfig

# What is taken from a folder; a file that is named itself may end in anything.
PROSE = ".txt .text .md .markdown .rst .org .tex .html .htm .xml .json .jsonl .csv .tsv .yaml .yml .toml"
CODE = ".py .pyi .js .ts .c .h .cc .cpp .hpp .cu .java .go .rs .rb .lua .jl .r .hs .scala .swift .kt .sh .sql"
SUFFIXES = set(f"{PROSE} {CODE}".split())


def located(config: DataConfig) -> Path:
    if not config.path:
        raise ConfigError("data.path", config.path, "a UTF-8 text file, or a folder of them", "say data.path=<path>")
    return Path(os.path.abspath(os.path.expanduser(config.path)))


def label(config: DataConfig) -> str:
    """The end of the path, readable, and a hash of all of it."""
    path = located(config)
    stem = re.sub(r"[^A-Za-z0-9_]+", "-", path.stem).strip("-")[:40] or "text"
    return f"{stem}-{hashlib.sha256(os.fsencode(path)).hexdigest()[:8]}"


def files(folder: Path, skipped: dict[str, int]) -> dict[str, Path]:
    """Name with forward slashes -> path of each text in `folder`, sorted by name; counts what it leaves out."""

    def refuse(error: OSError):
        raise DataError(f"{error.filename}: cannot be read ({error.strerror})")

    found = {}
    for at, folders, names in os.walk(folder, onerror=refuse):
        hidden = [name for name in folders if name.startswith(".") or name == "__pycache__"]
        folders[:] = [name for name in folders if name not in hidden]
        for name in names:
            path = Path(at, name)
            if name.startswith("."):
                why = "hidden files"
            elif path.suffix.lower() not in SUFFIXES:
                why = "files of another kind"
            elif not path.is_file():
                why = "broken links or no plain files"
            elif path.stat().st_size == 0:
                why = "empty files"
            else:
                found[path.relative_to(folder).as_posix()] = path
                continue
            skipped[why] = skipped.get(why, 0) + 1
        if hidden:
            skipped["hidden folders"] = skipped.get("hidden folders", 0) + len(hidden)
    return dict(sorted(found.items()))


def source(config: DataConfig) -> Source:
    path = located(config)
    skipped: dict[str, int] = {}
    if path.is_dir():
        found = files(path, skipped)
    elif path.is_file():
        found = {path.name: path}
    else:
        what, kind = ("neither a file nor a folder", DataError) if path.exists() else ("not there", SourceGone)
        raise kind(f"data.path: got {config.path!r}, which is {what}; allowed: a UTF-8 text file, or a folder of them")
    if not found:
        raise SourceGone(f"data.path: {path} holds no text; allowed in a folder: files ending in {PROSE} {CODE}")
    stats = {name: file.stat() for name, file in found.items()}
    if not any(stat.st_size for stat in stats.values()):
        raise SourceGone(f"data.path: {path} is empty; allowed: a UTF-8 text file, or a folder of them")
    splits = splits_of(found, config.val_fraction, config.test_fraction)

    def documents(start: int) -> Iterator[Document]:
        if len(found) == 1:
            parts = cut_text(*found.values(), config.val_fraction, config.test_fraction)
            yield from islice(parts, start, None)
            return
        for name, file in islice(found.items(), start, None):
            yield Document(splits[name], read_blocks(file))

    fingerprint = listing([name, stat.st_size, stat.st_mtime_ns] for name, stat in stats.items())
    size = sum(stat.st_size for stat in stats.values())
    return Source(str(path), fingerprint, documents, skipped, size)
