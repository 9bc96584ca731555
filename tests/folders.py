"""Made-up run folders, without a model, that several test files share."""

import copy
import json
from pathlib import Path

from gpt.run import Run

CONFIG = {
    "seed": 1,
    "sweep": "pos",
    "name": "rope-s1",
    "model": {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64, "dropout": 0.0, "bias": False},
    "position": {"name": "rope", "layers": "P", "base": 10000.0},
    "data": {"name": "stdlib", "path": None},
    "tokenizer": {"name": "byte"},
    "optim": {"lr": 1e-3, "min_lr": 1e-4, "beta1": 0.9, "schedule": "cosine"},
    "train": {"steps": 100, "batch_size": 12, "accumulate": 1, "eval_every": 50, "checkpoint_every": 50}
    | {"log_every": 10, "eval_tokens": 1024},
    "eval": {"tokens": 4096, "stride": None},
    "runtime": {"device": "auto", "dtype": "auto", "compile": False},
    "wandb": {"mode": "disabled", "project": "nanope", "entity": None, "tags": ["mine"]},
}


def config(**changes) -> dict:
    """CONFIG with dotted keys changed (two underscores for a dot)."""
    made = copy.deepcopy(CONFIG)
    for key, value in changes.items():
        *path, last = key.split("__")
        section = made
        for part in path:
            section = section[part]
        section[last] = value
    return made


def quiet(line: str) -> None:
    pass


def status(folder: Path) -> dict:
    return json.loads((folder / "status.json").read_text())


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def fake_checkpoint(folder: Path, step: int) -> None:
    (folder / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)


def finish(root: Path, made: dict, steps: int | None = None) -> Path:
    steps = steps or made["train"]["steps"]
    with Run(made, root, quiet) as run:
        if run.decision == "resume":
            run.resume_at(0)
        fake_checkpoint(run.folder, steps)
        run.log(steps, loss=1.0)
        run.done(steps)
    return run.folder
