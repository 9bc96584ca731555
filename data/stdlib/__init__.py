"""The source of Python's own standard library: real text that every installation has, about 12 MB in 700 files.

Files come in the order of a hash of their name, so that any prefix is a random sample of the library, and whole files
are held out for validation and test by the same hash.
"""

import os
import platform
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from gpt.documents import Document, Skipped, Source, SourceGone, hash_share, listing, splits_of
from gpt.errors import ConfigError, DataError
from gpt.schema import DataConfig

# Tests, and what is not the library's own.
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib-dynload"}
# Beginnings of names that differ between two installations of one version: files, and folders.
LOCAL = ("_sysconfigdata", "sitecustomize", "usercustomize", "config-")


def label(config: DataConfig) -> str:
    return ""


def files(folder: Path) -> dict[str, Path]:
    """Name with forward slashes -> path of each .py file of the library, in the order of the names' hashes."""
    found = {}
    for at, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in LEFT_OUT and not name.startswith(LOCAL)]
        for name in names:
            path = Path(at, name)
            if name.endswith(".py") and not name.startswith(LOCAL) and path.is_file():
                found[path.relative_to(folder).as_posix()] = path
    return {name: found[name] for name in sorted(found, key=hash_share)}


def source(config: DataConfig) -> Source:
    if config.path is not None:
        raise ConfigError("data.path", config.path, "null with data=stdlib", "for a text of your own: data=text")
    folder = Path(sysconfig.get_path("stdlib"))
    found = files(folder)
    if len(found) < 2:
        raise SourceGone(f"{folder}: this Python comes without the .py files of its library; use data=text data.path=…")
    splits = splits_of(found, config.val_fraction, config.test_fraction)

    def documents(start: int) -> Iterator[Document | Skipped]:
        for name, path in islice(found.items(), start, None):
            try:
                text = path.read_bytes().decode("utf-8")
            except UnicodeDecodeError:
                yield Skipped("not UTF-8")
                continue
            except OSError as error:
                raise DataError(f"{path}: cannot be read ({error.strerror})") from None
            if text:
                yield Document(splits[name], [text])
            else:
                yield Skipped("empty")

    version = platform.python_version()
    sizes = {name: path.stat().st_size for name, path in found.items()}
    fingerprint = {"python": version, **listing([name, size] for name, size in sizes.items())}
    description = f"standard library of Python {version} ({folder})"
    return Source(description, fingerprint, documents, size=sum(sizes.values()))
