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
import io
import os
import stat
import struct
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from gpt.errors import DataError

MAGIC, VERSION = b"nanoPE\r\n", 1
HEADER = struct.Struct("<8sIIQ8x")
SHARD = 2**29  # numbers a shard: 1 GiB of uint16
BLOCK = 2**20  # numbers looked at in one go
WAITING = 2  # writes that may wait for their hash
HASHING = ThreadPoolExecutor(1, "sha256")  # a thread of its own, since hashing takes as long as tokenizing by bytes


def shard_path(folder: Path, stem: str, n: int) -> Path:
    return folder / f"{stem}-{n:05}.bin"


def header(dtype: np.dtype, count: int) -> bytes:
    return HEADER.pack(MAGIC, VERSION, dtype.itemsize, count)


def npy_header(dtype: np.dtype, count: int) -> bytes:
    """What stands before as many numbers in a .npy file, which token files once were."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": dtype.str, "fortran_order": False, "shape": (count,)})
    return file.getvalue()


class Digest:
    """The sha256 of numbers as they come, of each shard and of all together, taken on a thread beside."""

    def __init__(self):
        self.shards: list[str] = []  # of those that are full
        self.shard, self.whole = hashlib.sha256(), hashlib.sha256()
        self.waiting: deque = deque()

    def update(self, numbers: bytes) -> None:
        self._later(self._take, numbers)

    def end_shard(self) -> None:
        self._later(self._end)

    def so_far(self) -> Future:
        """The sha256 of all numbers up to now, in hex, as soon as it is known."""
        return HASHING.submit(lambda: (self.whole if self.shards else self.shard).hexdigest())

    def wait(self) -> None:
        while self.waiting:
            self.waiting.popleft().result()

    def _later(self, what: Callable, *given) -> None:
        if len(self.waiting) >= WAITING:
            self.waiting.popleft().result()
        self.waiting.append(HASHING.submit(what, *given))

    def _take(self, numbers: bytes) -> None:
        self.shard.update(numbers)
        if self.shards:  # before, there is nothing else in the whole
            self.whole.update(numbers)

    def _end(self) -> None:
        if not self.shards:
            self.whole = self.shard.copy()
        self.shards.append(self.shard.hexdigest())
        self.shard = hashlib.sha256()


class TokenWriter:
    """Shards that grow. Ids that the vocabulary lacks are refused, never wrapped.

    With `count` the numbers that are there already are kept up to that many, and those behind them forgotten.
    Raises DataError where there are fewer. `place` is what an error about an id names: else the shards.
    """

    def __init__(
        self,
        folder: Path,
        stem: str,
        dtype: np.dtype,
        vocab_size: int | None = None,
        count: int = 0,
        place: Path | None = None,
    ):
        self.folder, self.stem, self.dtype, self.vocab_size, self.count = folder, stem, dtype, vocab_size, count
        self.place = place or folder / stem
        self.file = None
        self.digest = Digest()
        whole, rest = divmod(count, SHARD)
        for n, kept in enumerate([SHARD] * whole + [rest] * (rest > 0)):
            path = shard_path(folder, stem, n)
            size = HEADER.size + kept * dtype.itemsize
            if not path.is_file() or path.stat().st_size < size:
                raise DataError(f"{path}: shorter than {size:,} bytes, as if it had lost its end")
            os.truncate(path, size)
            for block in blocks_of(path):
                self.digest.update(block)
            if kept == SHARD:
                self.digest.end_shard()
        if rest:
            self.file = open(shard_path(folder, stem, whole), "r+b")
            self.file.seek(0, os.SEEK_END)

    def write(self, ids: np.ndarray) -> None:
        """Appends (n,) numbers of any integer type."""
        if self.vocab_size is not None:
            check_ids(self.place, ids, self.vocab_size, self.count)
        while len(ids):
            n, filled = divmod(self.count, SHARD)
            if self.file is None:
                self.file = open(shard_path(self.folder, self.stem, n), "wb")
                self.file.write(header(self.dtype, 0))
            part, ids = ids[: SHARD - filled], ids[SHARD - filled :]
            numbers = part.astype(self.dtype, copy=False).tobytes()
            self.file.write(numbers)
            self.digest.update(numbers)
            self.count += len(part)
            if self.count % SHARD == 0:
                self.close()
                self.digest.end_shard()

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
        if self.count % SHARD:
            self.digest.end_shard()
        self.digest.wait()
        files = {}
        for n, sha256 in enumerate(self.digest.shards):
            count = min(SHARD, self.count - n * SHARD)
            files[shard_path(self.folder, self.stem, n).name] = {
                "dtype": self.dtype.name,
                "count": count,
                "sha256": sha256,
            }
        return files, self.digest.whole.hexdigest()


def npy_sha256(tokens: "Tokens") -> str:
    """Of a .npy file with these numbers, in hex."""
    digest = hashlib.sha256(npy_header(tokens.dtype, len(tokens)))
    for at in range(0, len(tokens), BLOCK):
        digest.update(tokens[at : at + BLOCK].tobytes())
    return digest.hexdigest()


def numbers_sha256(path: Path) -> str:
    """Of what follows the header, in hex."""
    digest = hashlib.sha256()
    for block in blocks_of(path):
        digest.update(block)
    return digest.hexdigest()


def blocks_of(path: Path) -> Iterator[bytes]:
    """What follows the header of a shard, a megabyte at a time."""
    with open(path, "rb") as file:
        file.seek(HEADER.size)
        while block := file.read(2**20):
            yield block


class Tokens:
    """The numbers of the shards `paths` as one array of one dimension. tokens[a:b] and tokens[i] read just these.

    `head(dtype, count)` is the header that a shard must have. Nothing is mapped or kept, so memory stays flat however
    much is read. np.asarray(tokens) reads all.
    Raises DataError at opening where a shard is not what `counts` and `dtype` say, and later where it lost its end.
    """

    def __init__(self, paths: list[Path], counts: list[int], dtype: np.dtype, head: Callable = header):
        self.paths, self.dtype, self.offset = paths, dtype, len(head(dtype, 0))
        self.ends = np.cumsum(counts).tolist()  # of each shard, where in the whole it ends
        self.files: list[int] = []
        weakref.finalize(self, _close, self.files)
        for path, count in zip(paths, counts, strict=True):
            self.files.append(_open(path, count, dtype, head))

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
            part = os.pread(self.files[n], min(end, self.ends[n] * size) - at, self.offset + at - first)
            if not part:
                raise DataError(f"{self.paths[n]}: ends at byte {self.offset + at - first:,}, was longer when opened")
            parts.append(part)
            at += len(part)
        return np.frombuffer(parts[0] if len(parts) == 1 else b"".join(parts), self.dtype)


def _close(files: list[int]) -> None:
    for file in files:
        os.close(file)


def _open(path: Path, count: int, dtype: np.dtype, head: Callable) -> int:
    """A file descriptor of the shard; raises DataError where it is another file than expected."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # at once, whatever it is
    except FileNotFoundError:
        raise DataError(f"{path}: not there") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise DataError(f"{path}: cannot be read (no plain file)")
        wanted = head(dtype, count)
        size, expected = os.fstat(file).st_size, len(wanted) + count * dtype.itemsize
        if size != expected:
            raise DataError(f"{path}: {size:,} bytes, expected {expected:,}, as meta.json says")
        found = os.pread(file, len(wanted), 0)
        if head is npy_header and found != wanted:
            raise DataError(f"{path}: its header is not that of {count:,} numbers of {dtype}")
        if head is npy_header:
            return file
        magic, version, itemsize, said = HEADER.unpack(found)
        if (magic, version) != (MAGIC, VERSION):
            raise DataError(f"{path}: begins with {magic!r} {version}, expected {MAGIC!r} {VERSION}: no token file")
        if (itemsize, said) != (dtype.itemsize, count):
            raise DataError(
                f"{path}: its header says {said:,} numbers of {itemsize} bytes, expected {count:,} of {dtype.itemsize}"
            )
        if found != wanted:
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
