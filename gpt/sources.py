"""What several corpora share: the files at data.path, and streams of documents whose number nobody knows beforehand."""

import glob
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from pathlib import Path

from gpt.documents import BLOCK, Document, Skipped, SourceGone, listing, split_of, splits_of
from gpt.errors import ConfigError, DataError
from gpt.schema import DataConfig


def located(config: DataConfig, allowed: str) -> Path:
    """data.path as an absolute path, which need not exist. Raises ConfigError where it is not given."""
    if not config.path:
        raise ConfigError("data.path", config.path, allowed, "say data.path=<path>")
    return Path(os.path.abspath(os.path.expanduser(config.path)))


def path_label(path: Path, *more: object) -> str:
    """For a folder's name: the end of the path, readable, and a hash of all of it and of what else matters."""
    stem = re.sub(r"[^A-Za-z0-9_]+", "-", path.stem).strip("-")[:40] or "text"
    told = [os.fsencode(path), *(repr(one).encode() for one in more if one is not None)]
    return f"{stem}-{hashlib.sha256(b'|'.join(told)).hexdigest()[:8]}"


class Files:
    """The files at `path`: one file, those of a folder that end in `suffixes`, or those that a pattern such as *.txt
    matches.

    Raises SourceGone where there is none, DataError for a path that is no plain file.
    """

    def __init__(self, path: Path, suffixes: Iterable[str], allowed: str):
        self.skipped: dict[str, int] = {}  # why -> how many
        suffixes = tuple(suffixes)
        if path.is_dir():
            self.paths = self._walk(path, suffixes)
        elif path.is_file():
            self.paths = {path.name: path}
        elif path.exists():
            raise DataError(f"data.path: got {str(path)!r}, which is neither a file nor a folder; allowed: {allowed}")
        else:
            found = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]
            self.paths = {str(file): file for file in found if self._usable(file)}
            if not found:
                raise SourceGone(f"data.path: got {str(path)!r}, which is not there; allowed: {allowed}")
        if not self.paths:
            raise SourceGone(f"data.path: {path} holds no text; allowed: {allowed}")
        self.stats = {name: file.stat() for name, file in self.paths.items()}
        self.size = sum(stat.st_size for stat in self.stats.values())
        if not self.size:
            raise SourceGone(f"data.path: {path} is empty; allowed: {allowed}")

    def _walk(self, folder: Path, suffixes: tuple[str, ...]) -> dict[str, Path]:
        def refuse(error: OSError):
            raise DataError(f"{error.filename}: cannot be read ({error.strerror})")

        found = {}
        for at, folders, names in os.walk(folder, onerror=refuse):
            hidden = [name for name in folders if name.startswith(".") or name == "__pycache__"]
            folders[:] = [name for name in folders if name not in hidden]
            self._skip("hidden folders", len(hidden))
            for name in names:
                path = Path(at, name)
                if name.startswith("."):
                    self._skip("hidden files")
                elif not name.lower().endswith(suffixes):
                    self._skip("files of another kind")
                elif self._usable(path):
                    found[path.relative_to(folder).as_posix()] = path
        return dict(sorted(found.items()))

    def _usable(self, path: Path) -> bool:
        if not path.is_file():
            self._skip("broken links or no plain files")
        elif path.stat().st_size == 0:
            self._skip("empty files")
        else:
            return True
        return False

    def _skip(self, why: str, n: int = 1) -> None:
        if n:
            self.skipped[why] = self.skipped.get(why, 0) + n

    def fingerprint(self) -> dict:
        return listing([name, stat.st_size, stat.st_mtime_ns] for name, stat in self.stats.items())


def in_blocks(text: str) -> Iterator[str]:
    """A text in blocks of a size at which memory stays bounded."""
    for at in range(0, len(text), BLOCK):
        yield text[at : at + BLOCK]


def stream(texts: Callable[[int], Iterator], start: int, config: DataConfig) -> Iterator[Document | Skipped]:
    """The documents from number `start` on of a stream, each held out or not by the hash of its number.

    `texts(n)` gives from number n on the blocks of each text, or a Skipped. Of a stream so short that its hashes leave
    a split empty, some are held out all the same, as `splits_of` says.
    """
    fractions = config.val_fraction, config.test_fraction
    needed = {"train", "val", "test"} if config.test_fraction else {"train", "val"}
    seen: dict[str, str] = {}  # number -> split, of the first texts
    for number, text in zip(map(str, count()), texts(0), strict=False):
        if needed <= set(seen.values()):
            break
        if not isinstance(text, Skipped):
            seen[number] = split_of(number, *fractions)
    else:
        seen = splits_of(seen, *fractions)
    for number, text in zip(map(str, count(start)), texts(start), strict=False):
        if isinstance(text, Skipped):
            yield text
        else:
            yield Document(seen.get(number) or split_of(number, *fractions), text)


def checked_text(row: dict, field: str, where: str) -> str | None:
    """What a row has as its text; None where that is null. Raises DataError for any other value, and for no text."""
    if field not in row:
        fields = ", ".join(list(map(str, row))[:20])
        raise DataError(f"{where}: has no {field!r}; allowed as data.text_field: {fields or 'nothing, it is empty'}")
    text = row[field]
    if text is not None and not isinstance(text, str):
        raise DataError(f"{where}: {field!r} is a {type(text).__name__}, allowed: a text or null")
    try:
        (text or "").encode()
    except UnicodeEncodeError as error:
        lone = f"U+{ord(text[error.start]):04X}"
        raise DataError(
            f"{where}: character {error.start:,} of {field!r} is {lone}, half a surrogate pair; allowed: Unicode"
        ) from None
    return text
