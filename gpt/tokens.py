"""Token files: ids in shards that a killed process can go on with, and that are read where they are asked for.

A shard `<stem>-00000.bin` is a header of 32 bytes and `count` unsigned little-endian numbers of 2, 4 or 8 bytes:

    8 bytes   "nanoPE" and a line end of two bytes, which a copy in text mode would spoil
    4 bytes   version of this layout
    4 bytes   bytes a number
    8 bytes   count
    8 bytes   zero
"""

import bisect
import hashlib
import os
import struct
import weakref
from pathlib import Path

import numpy as np

from gpt.errors import DataError

MAGIC, VERSION = b"nanoPE\r\n", 1
HEADER = struct.Struct("<8sIIQ8x")
SHARD = 2**29  # numbers a shard: 1 GiB of uint16
BLOCK = 2**20  # numbers looked at in one go


def shard_path(folder: Path, stem: str, n: int) -> Path:
    return folder / f"{stem}-{n:05}.bin"


def header(dtype: np.dtype, count: int) -> bytes:
    return HEADER.pack(MAGIC, VERSION, dtype.itemsize, count)


class TokenWriter:
    """Shards that grow. Ids that the vocabulary lacks are refused, never wrapped.

    With `count` the numbers that are there already are kept up to that many, and those behind them forgotten.
    Raises DataError where there are fewer.
    """

    def __init__(self, folder: Path, stem: str, dtype: np.dtype, vocab_size: int | None = None, count: int = 0):
        self.folder, self.stem, self.dtype, self.vocab_size, self.count = folder, stem, dtype, vocab_size, count
        self.file = None
        whole, rest = divmod(count, SHARD)
        for n, kept in enumerate([SHARD] * whole + [rest] * (rest > 0)):
            path = shard_path(folder, stem, n)
            size = HEADER.size + kept * dtype.itemsize
            if not path.is_file() or path.stat().st_size < size:
                raise DataError(f"{path}: shorter than {size:,} bytes, as if it had lost its end")
            os.truncate(path, size)
        if rest:
            self.file = open(shard_path(folder, stem, whole), "r+b")
            self.file.seek(0, os.SEEK_END)

    def write(self, ids: np.ndarray) -> None:
        """Appends (n,) numbers of any integer type."""
        if self.vocab_size is not None:
            check_ids(f"{self.folder / self.stem}", ids, self.vocab_size, self.count)
        while len(ids):
            n, filled = divmod(self.count, SHARD)
            if self.file is None:
                self.file = open(shard_path(self.folder, self.stem, n), "wb")
                self.file.write(header(self.dtype, 0))
            part, ids = ids[: SHARD - filled], ids[SHARD - filled :]
            self.file.write(part.astype(self.dtype, copy=False).tobytes())
            self.count += len(part)
            if self.count % SHARD == 0:
                self.close()

    def sync(self) -> None:
        """Waits until the disk has what was written."""
        if self.file:
            self.file.flush()
            os.fsync(self.file.fileno())

    def close(self) -> None:
        """Ends the shard: its header gets the count. Nothing where none is open."""
        if self.file:
            file, self.file = self.file, None
            with file:
                file.seek(0)
                file.write(header(self.dtype, self.count % SHARD or SHARD))
                file.flush()
                os.fsync(file.fileno())

    def finish(self) -> tuple[dict, str]:
        """Closes, and tells what meta.json keeps of each file, and the sha256 of all numbers whatever the shards."""
        self.close()
        files, whole = {}, hashlib.sha256()
        for n in range(-(-self.count // SHARD)):
            path = shard_path(self.folder, self.stem, n)
            count = min(SHARD, self.count - n * SHARD)
            sha256 = numbers_sha256(path, also=whole)
            files[path.name] = {"dtype": self.dtype.name, "count": count, "sha256": sha256}
        return files, whole.hexdigest()


def numbers_sha256(path: Path, also=None) -> str:
    """Of what follows the header, in hex; `also` is another hash that takes it in."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        file.seek(HEADER.size)
        while block := file.read(2**20):
            digest.update(block)
            if also:
                also.update(block)
    return digest.hexdigest()


class Tokens:
    """The numbers of the shards `paths` as one array of one dimension. tokens[a:b] and tokens[i] read just these.

    Nothing is mapped or kept, so memory stays flat however much is read. np.asarray(tokens) reads all.
    Raises DataError at opening where a shard is not what `counts` and `dtype` say, and later where it lost its end.
    """

    def __init__(self, paths: list[Path], counts: list[int], dtype: np.dtype):
        self.paths, self.dtype = paths, dtype
        self.ends = np.cumsum(counts).tolist()  # of each shard, where in the whole it ends
        self.files: list[int] = []
        weakref.finalize(self, _close, self.files)
        for path, count in zip(paths, counts, strict=True):
            self.files.append(_open(path, count, dtype))

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    @property
    def nbytes(self) -> int:
        return len(self) * self.dtype.itemsize

    def __getitem__(self, key: int | slice):
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            return self._read(start, max(start, stop)) if step == 1 else self._read(0, len(self))[key]
        index = range(len(self))[key]  # negative ones from the end; IndexError outside
        return self._read(index, index + 1)[0]

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return self[:].astype(dtype or self.dtype, copy=False)

    def _read(self, start: int, stop: int) -> np.ndarray:
        size, parts = self.dtype.itemsize, []
        at, end = start * size, stop * size  # bytes, as if all shards were one
        while at < end:
            n = bisect.bisect_right(self.ends, at // size)
            first = self.ends[n - 1] * size if n else 0
            part = os.pread(self.files[n], min(end, self.ends[n] * size) - at, HEADER.size + at - first)
            if not part:
                raise DataError(f"{self.paths[n]}: ends at byte {HEADER.size + at - first:,}, was longer when opened")
            parts.append(part)
            at += len(part)
        return np.frombuffer(parts[0] if len(parts) == 1 else b"".join(parts), self.dtype)


def _close(files: list[int]) -> None:
    for file in files:
        os.close(file)


def _open(path: Path, count: int, dtype: np.dtype) -> int:
    """A file descriptor of the shard; raises DataError where it is another file than expected."""
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        raise DataError(f"{path}: not there") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        size, expected = os.fstat(file).st_size, HEADER.size + count * dtype.itemsize
        if size != expected:
            raise DataError(f"{path}: {size:,} bytes, expected {expected:,}, as meta.json says")
        found = os.pread(file, HEADER.size, 0)
        magic, version, itemsize, said = HEADER.unpack(found)
        if (magic, version) != (MAGIC, VERSION):
            raise DataError(f"{path}: begins with {magic!r} {version}, expected {MAGIC!r} {VERSION}: no token file")
        if (itemsize, said) != (dtype.itemsize, count):
            raise DataError(
                f"{path}: its header says {said:,} numbers of {itemsize} bytes, expected {count:,} of {dtype.itemsize}"
            )
        if found != header(dtype, count):
            raise DataError(f"{path}: its header ends in {found[-8:]!r}, expected zeros")
    except OSError as error:
        os.close(file)
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except DataError:
        os.close(file)
        raise
    return file


def check_ids(place: object, ids, vocab_size: int, start: int = 0) -> None:
    """Raises DataError with the index where an id is outside of 0 .. vocab_size - 1. `ids`: an array or Tokens."""
    for at in range(0, len(ids), BLOCK):
        block = ids[at : at + BLOCK]
        if block.max() >= vocab_size or (block.dtype.kind != "u" and block.min() < 0):
            wrong = int(np.argmax((block >= vocab_size) | (block < 0)))
            raise DataError(
                f"{place}: token id {int(block[wrong]):,} at index {start + at + wrong:,}, "
                f"allowed: 0 to {vocab_size - 1:,} (the vocabulary)"
            )
