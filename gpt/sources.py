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
from fnmatch import fnmatchcase
from itertools import count
from pathlib import Path

from gpt.documents import (
    BLOCK,
    Document,
    Skipped,
    Source,
    SourceGone,
    check_mark,
    left_out,
    listing,
    read_blocks,
    split_of,
    splits_of,
    state_of,
)
from gpt.errors import ConfigError, DataError, shown
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


def _step(pattern: tuple[str, ...], reached: set[int], name: str) -> set[int]:
    """How many parts of a pattern the folders on the way have used up, each way to match them, behind one more name."""
    stay = {n for n in reached if n < len(pattern) and pattern[n] == "**"}
    matched = {n + 1 for n in reached - stay - {len(pattern)} if fnmatchcase(name, pattern[n])}
    return _begin(pattern, stay | matched)


def _begin(pattern: tuple[str, ...], reached: set[int]) -> set[int]:
    """`reached`, and what is reached from there since ** may stand for no folder at all."""
    for n, part in enumerate(pattern):
        if n in reached and part == "**":
            reached = reached | {n + 1}
    return reached


class Files:
    """The files at `path`: one file, those of a folder that end in `suffixes`, or those that a pattern such as *.txt
    matches.

    `paths` has them by their name: below the folder, or below what of a pattern is no pattern, so that the names, which
    decide what is held out, are the same wherever the folder is. Raises SourceGone where there is none, DataError for a
    path that is no plain file.
    """

    def __init__(self, path: Path, suffixes: Iterable[str], allowed: str):
        self.skipped: dict[str, int] = {}  # why -> how many
        if path.is_dir():
            self.paths = self._walk(path, ("**",), tuple(suffixes))
        elif path.is_file():
            self.paths = {path.name: path}
        elif path.exists():
            raise DataError(f"data.path: got '{shown(path)}', which is neither a file nor a folder; allowed: {allowed}")
        else:
            # The folder of a pattern; brackets in the name of one that is there are no pattern.
            fixed, *pattern = Path(path.parts[0]), *path.parts[1:]
            while pattern and (not glob.has_magic(pattern[0]) or (fixed / pattern[0]).is_dir()):
                fixed = fixed / pattern.pop(0)
            self.paths = self._walk(fixed, tuple(pattern)) if pattern and fixed.is_dir() else {}
            if not self.paths and not self.skipped:
                raise SourceGone(f"data.path: got '{shown(path)}', which is not there; allowed: {allowed}")
        if not self.paths:
            why = f" (left out: {left_out(self.skipped)})" if self.skipped else ""
            raise SourceGone(f"data.path: {shown(path)} holds no text{why}; allowed: {allowed}")
        self.stats = {name: file.stat() for name, file in self.paths.items()}
        if not self.size:
            raise SourceGone(f"data.path: {shown(path)} is empty; allowed: {allowed}")

    def _walk(self, folder: Path, pattern: tuple[str, ...], suffixes: tuple[str, ...] = ("",)) -> dict[str, Path]:
        """The files below `folder` whose names from there on match `pattern`, a part a folder, ** for any number.

        Folders that are hidden or linked, which may lead in a circle, are not entered, whatever the pattern.
        """

        def refuse(error: OSError):
            raise DataError(f"{shown(error.filename)}: cannot be read ({error.strerror})")

        found, reached = {}, {str(folder): _begin(pattern, {0})}
        for at, folders, names in os.walk(folder, onerror=refuse):
            here = reached.pop(at)
            below = {name: _step(pattern, here, name) for name in folders}
            entered = {name for name in folders if below[name] - {len(pattern)}}
            hidden = {name for name in entered if name.startswith(".") or name == "__pycache__"}
            linked = {name for name in entered if Path(at, name).is_symlink()} - hidden
            folders[:] = [name for name in folders if name in entered - hidden - linked]
            reached |= {os.path.join(at, name): below[name] for name in folders}
            self._skip("hidden folders", len(hidden))
            self._skip("linked folders", len(linked))
            for name in names:
                path = Path(at, name)
                if len(pattern) not in _step(pattern, here, name):
                    continue
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

    @property
    def state(self) -> str:
        return state_of(self.stats.values())

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
                if at == 0:
                    check_mark(path, new)
                begin, at = at - len(decoder.getstate()[0]), at + len(new)
                if text := decoder.decode(new):
                    yield text
            begin = at - len(decoder.getstate()[0])
            decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{shown(path)}: byte {begin + error.start:,} of its text is not UTF-8; allowed: UTF-8 text"
        ) from None
    except UNREADABLE as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{shown(path)}: cannot be read behind byte {at:,} of its text ({reason})") from None


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


def source_of_rows(
    config: DataConfig, suffixes: Iterable[str], allowed: str, texts: Callable, text_size: Callable[[Files, str], int]
) -> Source:
    """The Source of files that have a text in each line or row, each held out or not by its number.

    `texts(paths, field, n)` gives from number n on the blocks of each text, or a Skipped.
    """
    path = located(config, allowed)
    files, field = Files(path, suffixes, allowed), config.text_field
    return Source(
        str(path),
        files.fingerprint() | {"text_field": field},
        lambda start: stream(lambda first: texts(files.paths.values(), field, first), start, config),
        files.skipped,
        size=lambda: text_size(files, field),
        state=files.state,
    )


def checked_text(row: dict, field: str, where: str) -> str | None:
    """What a row has as its text; None where that is null. Raises DataError for any other value, and for no text."""
    if field not in row:
        fields = ", ".join(shown(key, 40) for key in list(row)[:20])
        raise DataError(f"{where}: has no {field!r}; allowed as data.text_field: {fields or 'nothing, it is empty'}")
    text = row[field]
    if text is not None and not isinstance(text, str):
        raise DataError(f"{where}: {field!r} is a {type(text).__name__}, allowed: a text or null")
    try:
        utf8(text or "")
    except Unencodable as error:
        raise DataError(f"{where}: character {error.position:,} of {field!r} is {error.why}") from None
    return text
