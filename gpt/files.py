"""Small files: written whole or not at all, and read whatever a killed process left of them."""

import contextlib
import errno
import hashlib
import json
import os
import secrets
from pathlib import Path


def write_synced(path: Path, content: str | bytes) -> None:
    """Writes `content` (a text: as UTF-8) and waits until the disk has it; a crash on the way leaves a part of it."""
    with open(path, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())


def write_atomic(path: Path, content: str | bytes) -> None:
    """Writes beside, syncs and renames: readers see the old content or the new one. Raises OSError."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        write_synced(beside, content)
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise


def read_json(path: Path) -> dict:
    """The object in `path`; {} where there is none, or something else, or nothing that can be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def read_json_lines(path: Path) -> tuple[list[dict], int]:
    """The objects of a file with one a line, and how many lines are none: a killed process leaves the last one torn.

    No file is a file without lines; raises OSError where there is one that cannot be read.
    """
    objects, bad = [], 0
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_bytes().split(b"\n"):  # not splitlines, which breaks at a carriage return as well
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                value = None
            if isinstance(value, dict):
                objects.append(value)
            else:
                bad += 1
    return objects, bad


def append_json_line(path: Path, value: dict) -> None:
    """`value` as one line at the end, on disk, also where several processes append at once. Raises OSError.

    A line that a killed process left torn stays torn; this one begins behind it.
    """
    from filelock import FileLock

    with FileLock(path.with_name(f".{path.name}.lock")):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            size = os.fstat(file).st_size
            torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
            line = (b"\n" if torn else b"") + json.dumps(value, allow_nan=False).encode() + b"\n"
            if os.write(file, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file)
        finally:
            os.close(file)


def seal(value: dict) -> str:
    """`value` as JSON that carries its own sha256, so that a flipped bit in it is noticed too."""
    value = json.loads(json.dumps(value, allow_nan=False))
    return json.dumps({**value, "sha256": digest(value)}, indent=1)


def digest(value: dict) -> str:
    """Of all that is in `value` but its own sha256, in hex."""
    rest = {key: one for key, one in value.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def sha256_of(path: Path) -> str:
    """Of the content, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
