"""Which code a run was made by: the source revision and the versions of what its numbers depend on."""

import contextlib
import importlib.metadata
import platform
import subprocess
from pathlib import Path


def versions() -> dict:
    found = {"python": platform.python_version()}
    for package in ("torch", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return {**found, "nanope": source_revision()}


def source_revision() -> dict | None:
    """{"commit", "dirty"} of the code that runs, None where it is no git checkout."""
    here = Path(__file__).resolve().parent.parent

    def git(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=here, capture_output=True, text=True, check=True, timeout=10).stdout

    try:
        return {"commit": git("rev-parse", "HEAD").strip(), "dirty": bool(git("status", "--porcelain").strip())}
    except (OSError, subprocess.SubprocessError):
        return None
