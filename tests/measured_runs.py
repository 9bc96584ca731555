"""Made-up folders of measured runs, with known losses, that several test files share."""

import json
import math
from pathlib import Path

import yaml

from gpt import comparison

L = 64


def config(scheme: str, seed: int, **changes) -> dict:
    """A run's configuration, plain; changes by dotted key with __ for the dot."""
    made = {
        "seed": seed,
        "sweep": "pos",
        "name": "",
        "model": {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": L, "dropout": 0.0, "bias": False},
        "position": {"name": scheme, "layers": "P", **({"base": 10000.0} if scheme == "rope" else {})},
        "data": {"name": "stdlib", "path": None, "val_fraction": 0.1},
        "tokenizer": {"name": "byte"},
        "optim": {"lr": 0.001, "weight_decay": 0.1},
        "train": {"steps": 2000, "batch_size": 12, "accumulate": 1, "eval_every": 250},
        "eval": {"tokens": 131072, "stride": None},
        "runtime": {"device": "auto", "dtype": "auto", "compile": False},
        "wandb": {"mode": "auto", "project": "nanope"},
    }
    for key, value in changes.items():
        *path, last = key.split("__")
        place = made
        for part in path:
            place = place[part]
        place[last] = value
    return made


def row(scheme: str, seed: int, factor: int, loss: float | None, protocol: str = "disjoint", **changes) -> dict:
    """A measurement as eval.py writes it; loss None: unsupported."""
    good, flat, length = loss is not None, protocol == "disjoint", changes.get("train_length", L)
    made = {
        "run": f"{scheme}-s{seed}",
        "position": scheme,
        "seed": seed,
        "step": 2000,
        "tokens": 2000 * 12 * length,
        "train_length": length,
        "eval_length": factor * length,
        "factor": factor,
        "protocol": protocol,
        "stride": None if flat else length // 2,
        "scaling": "none",
        "scaling_factor": None,
        "scaling_parameters": None,
        "rope_base": None,
        "overflow": None,
        "ids": None,
        "block_length": 4 * length,
        "n_blocks": 512,
        "n_dropped": 7,
        "documents": "concat",
        "split": "val",
        "dtype": "float32",
        "loss": loss,
        "loss_se": 0.01 if good else None,
        "tail_loss": loss + 0.05 if good and flat and factor > 1 else None,
        "tail_loss_se": 0.01 if good and flat and factor > 1 else None,
        "perplexity": math.exp(loss) if good else None,
        "bits_per_byte": loss / math.log(2) if good else None,
        "n_targets": (512 * (4 * length if flat else length // 2)) if good else None,
        "n_bytes": 131072 if good else None,
        "tokens_per_second": 50000.0 if good else None,
        "parameters": 828000 + (8192 if scheme == "learned" else 0),
        "position_parameters": 8192 if scheme == "learned" else 0,
        "data": "stdlib",
        "data_sha256": "ab" * 32,
        "train_sha256": None,  # of rows from before it was written down
        "tokenizer": "byte",
        "checkpoint": "checkpoints/step-002000",
        "checkpoint_sha256": f"{scheme}-{seed}",
        "status": "ok" if good else "unsupported",
        "reason": None if good else f"the table has {L} rows",
        "measured": "2026-01-02T03:04:05+00:00",
        "position_curve": [loss + 0.1 * (i == 0) for i in range(16 * factor)] if good and flat else None,
        "position_bins": [i * length // 16 for i in range(16 * factor + 1)] if good and flat else None,
    }
    return made | changes


def write_run(folder: Path, values: dict, rows: list[dict], status: str | dict = "done", metrics: int = 20) -> Path:
    """A run's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    status = status if isinstance(status, dict) else {"status": status, "step": 2000, "error": None}
    (folder / "status.json").write_text(json.dumps(status))
    lines = [
        {"step": 10 * i, "tokens": 7680 * i, "loss": 5 / i, "tokens_per_second": 50000.0} for i in range(1, metrics)
    ]
    lines += [{"step": 2000, "val_loss": rows[0]["loss"] or 2.0}] if rows else []
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if rows:
        (folder / "eval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rows))
    return folder


def simple(
    root: Path, scheme: str, seed: int, losses: list, sliding: list | None = None, name: str = "", **changes
) -> Path:
    """A run measured at 1x, 2x, 4x."""
    rows = [row(scheme, seed, f, loss) for f, loss in zip((1, 2, 4), losses, strict=True)]
    rows += [row(scheme, seed, f, loss, "sliding") for f, loss in zip((1, 2, 4), sliding or [], strict=False)]
    return write_run(root / (name or f"{scheme}-s{seed}"), config(scheme, seed, **changes), rows)


def only(folder: Path) -> comparison.Comparison:
    found = comparison.compare([folder])
    assert len(found.comparisons) == 1, found.warnings
    return found.comparisons[0]


def line(found: comparison.Comparison, label: str) -> comparison.Line:
    return {one.label: one for one in found.lines}[label]


def ablation(root: Path, seeds: int = 2) -> Path:
    table = {
        "learned": ([1.62, None, None], [1.55, None, None]),
        "rope": ([1.52, 1.57, 1.80], [1.45, 1.49, 1.8]),
        "alibi": ([1.54, 1.53, 1.52], [1.47, 1.45, 1.43]),
    }
    for scheme, (flat, sliding) in table.items():
        for seed in range(seeds):
            extra = 0.01 * seed
            moved = [[None if x is None else x + extra for x in xs] for xs in (flat, sliding)]
            simple(root, scheme, seed, *moved)
    return root
