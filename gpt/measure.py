"""Evaluation of one checkpoint into rows of eval.jsonl; what stands there already is not measured again."""

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch

from gpt.checkpoint import Checkpoint, candidates
from gpt.config import EvaluationConfig, RunConfig
from gpt.corpus import Corpus
from gpt.errors import ConfigError, LengthError, RunError
from gpt.evaluate import Blocks, cut, disjoint, fitting, reach, shortage, sliding
from gpt.files import append_json_line, read_json_lines
from gpt.model import GPT
from gpt.position.scaling import ScalingConfig, describe
from gpt.restore import corpus_of, named, restore
from gpt.results import DIVERGED, find_runs, identity, is_number, ok, whole
from gpt.runtime import Runtime, out_of_memory
from gpt.schema import AskedPosition, DataConfig
from gpt.tokens import Tokens

MEMORY = "out of memory"  # how such a reason begins
# What a row without a value leaves empty.
NUMBERS = (
    "loss",
    "loss_se",
    "tail_loss",
    "tail_loss_se",
    "perplexity",
    "bits_per_byte",
    "n_targets",
    "n_bytes",
    "tokens_per_second",
    "position_curve",
    "position_bins",
)


@dataclass(frozen=True)
class Text:
    """What is read: the tokens of a split, and where its documents start if windows lie within one document."""

    split: str  # "val" or "test"
    tokens: Tokens
    starts: np.ndarray | None
    sha256: str
    token_bytes: np.ndarray  # (vocabulary,)

    @classmethod
    def of(cls, corpus: Corpus, split: str, documents: str, data: DataConfig) -> "Text":
        """Raises ConfigError where the corpus, prepared as `data` says, has no such split."""
        tokens = getattr(corpus, split)
        if not len(tokens):
            why = "was prepared with data.test_fraction=0"
            if data.test_fraction:
                why = f"has no {split} split: data={data.name} has none, or too few documents to hold one out"
            raise ConfigError("eval.split", split, f"val: {corpus.folder} {why}")
        starts = np.asarray(getattr(corpus, f"{split}_documents")) if documents == "within" else None
        return cls(split, tokens, starts, getattr(corpus, f"{split}_sha256"), corpus.tokenizer.token_bytes())

    def facts(self) -> dict:
        """What rows tell of it."""
        documents = "concat" if self.starts is None else "within"
        return {"split": self.split, "documents": documents, "data_sha256": self.sha256}


@dataclass(frozen=True)
class Measured:
    """All rows asked for, and those of them that are new."""

    folder: Path  # where eval.jsonl is
    rows: list[dict]
    new: list[dict]
    unread: dict[str, object]  # what was asked for that this scheme does not have: it changed nothing


def run_folders(config: EvaluationConfig, log: Callable[[str], None] = print) -> list[Path]:
    """The folders to evaluate: the one checkpoint, or each run below `runs`; raises ConfigError where there is none."""
    asked = config.asked
    if (asked.runs is None) == (asked.checkpoint is None):
        raise ConfigError("runs", asked.runs, "exactly one of runs=<folder of runs> and checkpoint=<folder>")
    if asked.checkpoint is not None:
        return [named(asked.checkpoint)]
    root = Path(asked.runs)
    found = []
    for path in find_runs([root]) if root.is_dir() else ():
        if (path / "config.yaml").is_file():
            found.append(path)
        elif candidates(path / "checkpoints"):
            log(f"{path}: skipped, its config.yaml is missing; alone it is measured: python eval.py checkpoint={path}")
    if not found:
        raise ConfigError("runs", asked.runs, "a folder with runs in it; train one: python train.py position=rope")
    return found


def measure(
    checkpoint: Checkpoint, config: EvaluationConfig, runtime: Runtime, log: Callable[[str], None] = print
) -> Measured:
    """The length protocol on a checkpoint: a row for each rescaling, protocol and factor, appended as it is done.

    What the scheme or the text does not support, a length or a rescaling, is a row with status `unsupported` and the
    reason; one whose loss is no finite number is `diverged`. So is `unsupported` what the memory does not suffice for,
    and that is tried again whenever it is asked for.
    Raises CheckpointError where the text on disk is not the one of the checkpoint, RunError where the rows cannot be
    written.
    """
    model, run = restore(checkpoint, runtime.device)
    unread = read_as(model, config.position)
    corpus = corpus_of(run, checkpoint, log=log)

    folder = eval_folder(checkpoint)
    path = folder / "eval.jsonl"
    known = {identity(row): row for row in read_json_lines(path)[0] if settled(row)}
    L = model.config.block_size
    stride = config.eval.stride or run.eval.stride or L // 2
    if stride > L:
        raise ConfigError("eval.stride", stride, f"at most the training length {L}")
    split, documents = config.eval.split or run.eval.split, config.eval.documents or run.eval.documents
    text = Text.of(corpus, split, documents, run.data)
    factors = fitting(len(text.tokens), L, config.asked.factors, text.starts)
    limit = config.eval.tokens or run.eval.tokens
    blocks = cut(len(text.tokens), L, factors, limit, text.starts) if factors else None
    base = config.position.base if model.position.rescalable else None

    rows, new = [], []
    shared = header(checkpoint, run, model, corpus, runtime) | text.facts()
    kinds, wanted = dict.fromkeys(config.asked.scaling), sorted(set(config.asked.factors))
    for kind, protocol, factor in itertools.product(kinds, ("disjoint", "sliding"), wanted):
        scaling = config.scaling(kind, factor)
        row = shared | {
            "eval_length": factor * L,
            "factor": factor,
            "protocol": protocol,
            "stride": stride if protocol == "sliding" else None,
            "scaling": kind,
            "scaling_factor": None if kind == "none" else scaling.factor,
            "scaling_parameters": parameters(scaling, config.fixed_factor),
            "rope_base": base,
            "overflow": policy(model, factor * L),
            "block_length": blocks.length if factor in factors else None,
            "n_blocks": blocks.count if factor in factors else None,
            "n_dropped": blocks.dropped if factor in factors else None,
        }
        short = None if factor in factors else too_short(text, row, config.asked.factors)
        stored = known.get(identity(row))
        if stored is None or (short and stored["reason"] != short):  # that one was the reason of another command
            unscaled = row | {"scaling": "none", "scaling_factor": None, "scaling_parameters": None}
            plain = known.get(identity(unscaled))
            can = model.position.rescalable and model.position.config.randomized is None
            if short:
                row |= dict.fromkeys(NUMBERS) | {"status": "unsupported", "reason": short}
            elif plain and can and not scaling.changes(L, factor * L):
                row |= {name: plain[name] for name in (*NUMBERS, "status", "reason")}
            else:
                row |= numbers(model, text, blocks, row, scaling, runtime)
            row["measured"] = datetime.now(UTC).isoformat(timespec="seconds")
            try:
                append_json_line(path, row)
            except (OSError, NotImplementedError) as error:  # the latter from a file system without locks
                raise RunError(f"{path}: cannot be written: {getattr(error, 'strerror', '') or error}") from None
            known[identity(row)] = row
            new.append(row)
        rows.append(known[identity(row)])
    return Measured(folder, rows, new, unread)


def read_as(model: GPT, asked: AskedPosition) -> dict[str, object]:
    """Applies what was asked for beyond the trained ids, where the scheme has such a choice; returns what it lacks."""
    position = model.position
    has = {
        "overflow": hasattr(position.config, "overflow"),
        "ids": position.config.randomized is not None,
        "base": position.rescalable,
    }
    given = {key: getattr(asked, key) for key in has if getattr(asked, key) is not None}
    chosen = {key: value for key, value in given.items() if has[key] and key != "base"}  # a base is the protocol's
    if chosen:
        position.config = replace(position.config, **chosen)
    plain = {"overflow": "error", "ids": "spaced"}  # what is so anyway
    return {f"position.{key}": value for key, value in given.items() if not has[key] and value != plain.get(key)}


def parameters(scaling: ScalingConfig, fixed: bool) -> str | None:
    """What the rule reads, as text; its factor only where it was fixed and does not follow the evaluation's."""
    words = [word for word in describe(scaling).split() if fixed or not word.startswith("factor=")]
    return " ".join(words) or None


def header(checkpoint: Checkpoint, run: RunConfig, model: GPT, corpus: Corpus, runtime: Runtime) -> dict:
    """What is measured and with what: the part of a row that all lengths share."""
    count = model.count_parameters()
    return {
        "run": run.name,
        "position": run.position.name,
        "seed": run.seed,
        "step": checkpoint.step,
        "tokens": checkpoint.state["tokens"],
        "train_length": run.model.block_size,
        "ids": model.position.config.ids if model.position.config.randomized else None,
        "parameters": count["total"],
        "position_parameters": count["position"],
        "data": run.data.name,
        "train_sha256": corpus.train_sha256,
        "tokenizer": run.tokenizer.name,
        "checkpoint": str(checkpoint.path),
        "checkpoint_sha256": checkpoint.sha256,
        "dtype": runtime.precision,
    }


def numbers(
    model: GPT,
    text: Text,
    blocks: Blocks,
    row: dict,
    scaling: ScalingConfig,
    runtime: Runtime,
) -> dict:
    """The measured part of a row, or the reason why there is none."""
    empty = dict.fromkeys(NUMBERS)
    as_trained = scaling.kind == "none" and row["rope_base"] is None
    try:
        with nullcontext() if as_trained else model.position.scaled(scaling, row["rope_base"]):
            if row["protocol"] == "disjoint":
                found = disjoint(model, text.tokens, blocks, row["factor"], text.token_bytes, runtime)
            else:
                stride, token_bytes = row["stride"], text.token_bytes
                found = sliding(model, text.tokens, blocks, row["factor"], stride, token_bytes, runtime)
    except (LengthError, ConfigError) as error:
        return empty | {"status": "unsupported", "reason": str(error)}
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        if runtime.device.type == "cuda":
            torch.cuda.empty_cache()
        return empty | {"status": "unsupported", "reason": f"{MEMORY} at {row['eval_length']} tokens"}
    if not math.isfinite(found["loss"]):
        return empty | {"status": DIVERGED, "reason": f"the loss is {found['loss']}"}
    return empty | found | {"status": "ok", "reason": None}


def too_short(text: Text, row: dict, factors: Sequence[int]) -> str:
    """Why a row has no blocks: how long the text is, and how long these factors need it."""
    n_tokens, name = len(text.tokens), {"val": "validation"}.get(text.split, text.split)
    need = math.lcm(*factors) * row["train_length"] + 1
    reason = f"the {shortage(n_tokens, text.starts, name)}, factors {list(factors)} need {need}"
    if row["eval_length"] <= reach(n_tokens, text.starts):
        reason += f"; alone, factors=[{row['factor']}], it needs {row['eval_length'] + 1}"
    return reason


def settled(row: dict) -> bool:
    """Whether a row of eval.jsonl is a measurement: not damaged, and not for want of memory, which may be there now."""
    if not whole(row):
        return False
    if ok(row):
        return is_number(row.get("loss"))
    return row["status"] in ("unsupported", DIVERGED) and not str(row.get("reason")).startswith(MEMORY)


def policy(model: GPT, length: int) -> str | None:
    """What a learned table does at this length, where it is past its end."""
    overflow = getattr(model.position.config, "overflow", "error")
    return overflow if overflow != "error" and length > model.position.trained_ids else None


def eval_folder(checkpoint: Checkpoint) -> Path:
    """The run's folder; a checkpoint that was taken out of its run keeps its own rows."""
    path = checkpoint.path.resolve()
    return path.parent.parent if path.parent.name == "checkpoints" else checkpoint.path
