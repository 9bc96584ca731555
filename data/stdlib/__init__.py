"""The source of Python's own standard library: real text that every installation has, about 12 MB in 700 files.

With data.site_packages also that of the packages installed beside it: hundreds of MB, but others on every machine.
Files come in the order of a hash of their name, so that any prefix is a random sample of the library, and whole files
are held out for validation and test by the same hash.
"""

import os
import platform
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from gpt.documents import Document, Skipped, Source, SourceGone, hash_share, listing, splits_of, state_of
from gpt.errors import DataError, shown
from gpt.schema import DataConfig

KEYS = {"site_packages", "val_fraction", "test_fraction"}
# Tests, and what is not the library's own.
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib-dynload"}
# Beginnings of names that differ between two installations of one version: files, and folders.
LOCAL = ("_sysconfigdata", "sitecustomize", "usercustomize", "config-")


def label(config: DataConfig) -> str:
    return "site-packages" if config.site_packages else ""


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
    folder = Path(sysconfig.get_path("stdlib"))
    found = files(folder)
    if len(found) < 2:
        raise SourceGone(f"{folder}: this Python comes without the .py files of its library; use data=text data.path=…")
    if config.site_packages:
        for place in sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}):
            found |= {f"site-packages/{name}": path for name, path in files(Path(place)).items()}
        found = {name: found[name] for name in sorted(found, key=hash_share)}
    splits = splits_of(found, config.val_fraction, config.test_fraction)

    def documents(start: int) -> Iterator[Document | Skipped]:
        for name, path in islice(found.items(), start, None):
            try:
                text = path.read_bytes().decode("utf-8")
            except UnicodeDecodeError:
                yield Skipped("not UTF-8")
                continue
            except OSError as error:
                raise DataError(f"{shown(path)}: cannot be read ({error.strerror})") from None
            if text:
                yield Document(splits[name], [text])
            else:
                yield Skipped("empty")

    version = platform.python_version()
    stats = {name: path.stat() for name, path in found.items()}
    # Packages differ between machines anyway, and are edited in place; the library is the same corpus on every machine.
    listed = ([n, s.st_size, *([s.st_mtime_ns] if n.startswith("site-packages/") else [])] for n, s in stats.items())
    fingerprint = {"python": version, **listing(listed)}
    packages = " and the packages installed beside it" if config.site_packages else ""
    description = f"standard library of Python {version} ({folder}){packages}"
    return Source(
        description,
        fingerprint,
        documents,
        size=lambda: sum(stat.st_size for stat in stats.values()),
        state=state_of(stats.values()),
    )
