"""What several corpora share: the files at data.path, and streams of documents whose number nobody knows beforehand."""

import codecs
import glob
import gzip
import hashlib
import io
import os
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import count, takewhile
from pathlib import Path

from gpt.documents import BLOCK, Document, Skipped, SourceGone, listing, read_blocks, split_of, splits_of
from gpt.errors import ConfigError, DataError
from gpt.schema import DataConfig
from gpt.tokenizer.base import Unencodable, utf8

PACKED = (".gz", ".zst")
UNREADABLE = (OSError, EOFError, zlib.error)  # what a damaged file raises


def located(config: DataConfig, allowed: str) -> Path:
    """data.path as an absolute path, which need not exist. Raises ConfigError where it is not given."""
    if not config.path:
        raise ConfigError("data.path", config.path, allowed, "say data.path=<path>")
    return Path(os.path.abspath(os.path.expanduser(config.path)))


def path_label(path: Path, *more: object) -> str:
    """For a folder's name: the end of the path, readable, and a hash of all of it and of what else matters."""
    stem = re.sub(r"[^A-Za-z0-9_]+", "-", path.stem).strip("-")[:40] or "text"
    told = [os.fsencode(path), *([repr(more).encode()] if any(one is not None for one in more) else [])]
    return f"{stem}-{hashlib.sha256(b'|'.join(told)).hexdigest()[:8]}"


class Files:
    """The files at `path`: one file, those of a folder that end in `suffixes`, or those that a pattern such as *.txt
    matches.

    `paths` has them by their name: below the folder, or below what of a pattern is no pattern, so that the names, which
    decide what is held out, are the same wherever the folder is. Raises SourceGone where there is none, DataError for a
    path that is no plain file.
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
            fixed = Path(*takewhile(lambda part: not glob.has_magic(part), path.parts))
            self.paths = {file.relative_to(fixed).as_posix(): file for file in found if self._usable(file)}
            if not found:
                raise SourceGone(f"data.path: got {str(path)!r}, which is not there; allowed: {allowed}")
        if not self.paths:
            raise SourceGone(f"data.path: {path} holds no text; allowed: {allowed}")
        self.stats = {name: file.stat() for name, file in self.paths.items()}
        if not self.size:
            raise SourceGone(f"data.path: {path} is empty; allowed: {allowed}")

    def _walk(self, folder: Path, suffixes: tuple[str, ...]) -> dict[str, Path]:
        def refuse(error: OSError):
            raise DataError(f"{error.filename}: cannot be read ({error.strerror})")

        found = {}
        for at, folders, names in os.walk(folder, onerror=refuse):
            hidden = {name for name in folders if name.startswith(".") or name == "__pycache__"}
            linked = {name for name in folders if Path(at, name).is_symlink()} - hidden  # they may lead in a circle
            folders[:] = [name for name in folders if name not in hidden | linked]
            self._skip("hidden folders", len(hidden))
            self._skip("linked folders", len(linked))
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

    def keep(self, names: Collection[str], why: str) -> None:
        """Leaves out all but `names`, and counts those."""
        self._skip(why, len(self.paths) - len(names))
        self.paths = {name: file for name, file in self.paths.items() if name in names}
        self.stats = {name: stat for name, stat in self.stats.items() if name in names}

    @property
    def size(self) -> int:
        """In bytes."""
        return sum(stat.st_size for stat in self.stats.values())

    def text_size(self) -> int:
        """Bytes of text, about: of packed files as many as their first megabytes promise."""
        packed = [name for name in self.paths if name.lower().endswith(PACKED)]
        size_packed = sum(self.stats[name].st_size for name in packed)
        if not packed:
            return self.size
        return self.size - size_packed + int(size_packed * _swelling(self.paths[packed[0]]))

    def fingerprint(self) -> dict:
        return listing([name, stat.st_size, stat.st_mtime_ns] for name, stat in self.stats.items())


def unpacked(path: Path) -> io.BufferedIOBase:
    """The open file, unpacked as its name says. What is damaged raises one of UNREADABLE when it is read."""
    if path.name.lower().endswith(".gz"):
        return gzip.open(path, "rb")
    if path.name.lower().endswith(".zst"):
        import pyarrow  # which says when a file stops half-way

        return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))
    return open(path, "rb")


def _swelling(path: Path) -> float:
    """How many bytes a byte of a packed file becomes, by its beginning; 1 where that cannot be read."""
    import pyarrow

    try:
        with open(path, "rb") as raw:
            kind = "gzip" if path.name.lower().endswith(".gz") else "zstd"
            with pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, "r"), kind) as file:
                size = len(file.read(2**22))
                return size / max(1, raw.tell())
    except (*UNREADABLE, pyarrow.ArrowException):
        return 1.0


def read_text(path: Path) -> Iterator[str]:
    """`read_blocks` of a whole file, which may be packed. Raises DataError naming the file and the byte of the text."""
    if not path.name.lower().endswith(PACKED):
        yield from read_blocks(path)
        return
    decoder, at = codecs.getincrementaldecoder("utf-8")(), 0
    try:
        with unpacked(path) as file:
            while new := file.read(BLOCK):
                begin, at = at - len(decoder.getstate()[0]), at + len(new)
                if text := decoder.decode(new):
                    yield text
            begin = at - len(decoder.getstate()[0])
            decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {begin + error.start:,} of its text is not UTF-8; allowed: UTF-8 text") from None
    except UNREADABLE as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path}: cannot be read behind byte {at:,} of its text ({reason})") from None


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
        utf8(text or "")
    except Unencodable as error:
        raise DataError(f"{where}: character {error.position:,} of {field!r} is {error.why}") from None
    return text
