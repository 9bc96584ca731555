"""Small real runs that several test files share: a text of a few words, a model of one layer."""

import json
import random
from collections import deque
from pathlib import Path

import pytest

import gpt.data
from gpt import cli
from tests.helpers import as_written

SMALL = [
    "model.n_layer=1",
    "model.n_head=2",
    "model.n_embd=32",
    "model.block_size=16",
    "model.dropout=0.2",
    "train.steps=20",
    "train.batch_size=4",
    "train.eval_every=10",
    "train.eval_tokens=64",
    "train.checkpoint_every=5",
    "train.log_every=1",
    "optim.lr=1e-2",
    "optim.warmup=3",
    "eval.tokens=512",
    "wandb.mode=disabled",
]
TEXT = ["data=text", "data.path=corpus.txt"]


def write_corpus(path: Path, words: int = 4000) -> None:
    """A text that is new each time; its seed is printed."""
    seed = random.SystemRandom().randrange(2**31)
    print(f"corpus seed {seed}")
    draw = random.Random(seed)
    known = ["".join(draw.choices("abcdefgh", k=draw.randint(1, 7))) for _ in range(200)]
    path.write_text(" ".join(draw.choices(known, k=words)), encoding="utf-8")


def composed(*overrides: str) -> tuple[dict, list[str]]:
    """What train.main takes, for a small run on corpus.txt."""
    overrides = [*TEXT, *SMALL, *overrides]
    return cli.compose("train", overrides), overrides


def in_one_layer(scheme: str) -> list[str]:
    """Overrides for a scheme whose pattern needs more layers than the small model has."""
    return ["position.layers=P", "position.window_layers=W"] if "layers" in as_written(scheme) else []


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def status(folder: Path) -> dict:
    return json.loads((folder / "status.json").read_text())


def on_batch(patch: pytest.MonkeyPatch, act) -> None:
    """Calls act(step, rows, x, y) whenever training takes a batch."""
    real, take, made = gpt.data.batch, gpt.data.Ahead.__next__, deque()

    def batch(tokens, block_size, seed, step, rows):  # on a thread, ahead of the trainer
        made.append((step, rows, *real(tokens, block_size, seed, step, rows)))
        return made[-1][2:]

    def following(ahead):
        found = take(ahead)
        act(*made.popleft())
        return found

    patch.setattr(gpt.data, "batch", batch)
    patch.setattr(gpt.data.Ahead, "__next__", following)
