"""Small corpora that several test files share."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, settings

from gpt.prepare import prepare
from gpt.schema import DataConfig, TokenizerConfig

ROOT = Path(__file__).parents[1]
BYTE, CHAR = TokenizerConfig("byte"), TokenizerConfig("char")
relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def random_text(rng: np.random.Generator, size: int) -> str:
    return "".join(rng.choice(list("abc é漢👩\n "), size))


def text_corpus(tmp_path: Path, documents: dict[str, str], tokenizer=BYTE, log=None, **config):
    """A corpus prepared from files of these names and texts."""
    folder = tmp_path / "texts"
    for name, text in documents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text.encode())
    said = [] if log is None else log
    return prepare(DataConfig("text", path=str(folder), **config), tokenizer, tmp_path / "data", said.append)


def run_python(code: str, *arguments: object, timeout: float = 300) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)


DOCUMENTS = {f"{i}.txt": f"document {i} with some words in it\n" * 5 for i in range(12)}


def size(corpus) -> int:
    return sum(len(getattr(corpus, split)) for split in ("train", "val", "test"))
