"""The length protocol: the same target tokens at every factor, only the window changes.

L is the training length, f a factor, f L the evaluation length, all in tokens; losses in nats a token.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gpt.data import window
from gpt.errors import ConfigError, LengthError
from gpt.model import GPT
from gpt.runtime import Runtime
from gpt.tokens import Tokens

Ids = Tokens | np.ndarray  # (n,) what has a length and can be cut
BINS_PER_LENGTH = 16  # of the loss by position: bins in each stretch of L


@dataclass(frozen=True)
class Blocks:
    """A text cut into blocks of `length` targets, and which of them are scored: `count` of `total`."""

    length: int  # targets a block, a multiple of every evaluation length
    count: int
    total: int
    dropped: int  # targets of the text that are not scored
    within: np.ndarray | None = None  # (total,) where each block begins, if not one after the other

    @property
    def starts(self) -> np.ndarray:
        """(count,) index of the token before each scored block's first target: spread evenly over the text."""
        chosen = np.arange(self.count) * self.total // self.count
        return chosen * self.length if self.within is None else self.within[chosen]


def cut(
    n_tokens: int,
    train_length: int,
    factors: Sequence[int],
    limit: int | None = None,
    documents: np.ndarray | None = None,
) -> Blocks:
    """Blocks of F L targets, F the least common multiple of the factors (the largest, for powers of two).

    Of a text of n_tokens all whole blocks are scored, or as many as hold at most `limit` targets: then they are spread
    evenly over the text, since its first files are no fair sample of it.
    With the starts of its `documents` each document is cut by itself: no block, so no window, crosses an end.

    Raises LengthError where the text is too short for one block, ConfigError where the limit is.
    """
    length = math.lcm(*factors) * train_length
    available = n_tokens - 1  # the first token is nobody's target
    if reach(n_tokens, documents) < length:
        raise LengthError(
            f"the {shortage(n_tokens, documents)}, {length + 1} are needed for {length} targets; take a longer "
            "text, raise data.val_fraction or lower model.block_size"
        )
    if limit is not None and limit < length:
        raise ConfigError("eval.tokens", limit, f"at least {length}, one block of the factors {list(factors)}")
    within = None
    if documents is not None:
        counts = (_lengths(n_tokens, documents) - 1) // length  # (documents,) whole blocks of each
        numbers = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # of a block in its document
        within = np.repeat(documents.astype(np.int64), counts) + numbers * length
    total = available // length if within is None else len(within)
    count = min(total, (limit or available) // length)
    return Blocks(length, count, total, available - count * length, within)


def fitting(n_tokens: int, train_length: int, factors: Sequence[int], documents: np.ndarray | None = None) -> list[int]:
    """The factors that a text of n_tokens, or one of its documents, can serve together, the largest left out first."""
    kept = sorted(set(factors))
    while kept and math.lcm(*kept) * train_length > reach(n_tokens, documents):
        kept.pop()
    return kept


def reach(n_tokens: int, documents: np.ndarray | None = None) -> int:
    """Targets that the longest window can have: of the text, or of its longest document."""
    return (n_tokens if documents is None else int(_lengths(n_tokens, documents).max(initial=0))) - 1


def shortage(n_tokens: int, documents: np.ndarray | None, split: str = "validation") -> str:
    """How long a text is, for the message that it is too short."""
    what = f"{split} split" if documents is None else f"longest document of the {split} split"
    return f"{what} has {reach(n_tokens, documents) + 1} tokens"


def _lengths(n_tokens: int, documents: np.ndarray) -> np.ndarray:
    """(documents,) tokens of each."""
    return np.diff(np.append(documents.astype(np.int64), n_tokens))


def window_losses(model: GPT, tokens: Ids, starts: np.ndarray, length: int, last: int, runtime: Runtime):
    """(len(starts), last) float64 losses of the `last` targets of each window of `length` tokens from `starts`."""
    found = np.empty((len(starts), last))
    # few enough windows at once that logits stay below 2^26 numbers, and a CPU's caches stay warm
    tokens_at_once = 4096 if runtime.device.type == "cpu" else 65536
    batch = max(1, min(tokens_at_once // length, 2**26 // (model.vocab_size * last)))
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode(), runtime.autocast():
            for n in range(0, len(starts), batch):
                x, y = runtime.to_device(*window(tokens, starts[n : n + batch], length))
                found[n : n + batch] = model.losses(x, y, last).cpu().numpy()
    finally:
        model.train(was_training)
    return found


def validation_loss(model: GPT, tokens: Ids, limit: int, runtime: Runtime) -> float:
    """Loss at the training length (disjoint, factor 1) on at most `limit` targets of a text: what training reports."""
    L = model.config.block_size
    blocks = cut(len(tokens), L, [1], max(L, limit))
    return float(window_losses(model, tokens, blocks.starts, L, L, runtime).mean())


def disjoint(model: GPT, tokens: Ids, blocks: Blocks, factor: int, token_bytes: np.ndarray, runtime: Runtime) -> dict:
    """Each block as F/f separate windows of f L: every target once, at every factor."""
    L = model.config.block_size
    length = factor * L
    model.check_length(length)
    starts = (blocks.starts[:, None] + np.arange(0, blocks.length, length)).ravel()
    began = time.perf_counter()
    losses = window_losses(model, tokens, starts, length, length, runtime)
    seconds = time.perf_counter() - began

    row = statistics(losses.reshape(blocks.count, -1), targets_before(tokens, starts + length, length), token_bytes)
    tail = losses[:, L:] if factor > 1 else None
    edges = np.unique(np.linspace(0, length, BINS_PER_LENGTH * factor + 1).round().astype(int))
    by_position = losses.mean(axis=0)
    return row | {
        "tail_loss": None if tail is None else float(tail.mean()),
        "tail_loss_se": None if tail is None else standard_error(tail.reshape(blocks.count, -1).mean(axis=1)),
        "position_curve": [float(by_position[a:b].mean()) for a, b in zip(edges[:-1], edges[1:], strict=True)],
        "position_bins": edges.tolist(),
        "tokens_per_second": len(starts) * length / seconds,
    }


def sliding(
    model: GPT, tokens: Ids, blocks: Blocks, factor: int, stride: int, token_bytes: np.ndarray, runtime: Runtime
) -> dict:
    """The last `stride` targets of each block, from a window of f L that ends with the block.

    Each has at least f L - stride tokens before it, all of its own block, and the targets are the same at every factor.
    """
    length = factor * model.config.block_size
    model.check_length(length)
    ends = blocks.starts + blocks.length
    began = time.perf_counter()
    losses = window_losses(model, tokens, ends - length, length, stride, runtime)
    seconds = time.perf_counter() - began
    return statistics(losses, targets_before(tokens, ends, stride), token_bytes) | {
        "tail_loss": None,
        "tail_loss_se": None,
        "position_curve": None,
        "position_bins": None,
        "tokens_per_second": blocks.count * length / seconds,
    }


def targets_before(tokens: Ids, ends: np.ndarray, n: int) -> np.ndarray:
    """(len(ends), n) ids of the last n targets of windows whose inputs end before token `ends`."""
    return np.stack([np.asarray(tokens[end - n + 1 : end + 1]) for end in ends])


def statistics(losses: np.ndarray, targets: np.ndarray, token_bytes: np.ndarray) -> dict:
    """Loss over all targets from (blocks, targets of a block) losses: sums over counted targets, error over blocks."""
    n_bytes = int(token_bytes[targets].sum())
    loss = float(losses.sum() / losses.size)
    return {
        "loss": loss,
        "loss_se": standard_error(losses.mean(axis=1)),
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_byte": float(losses.sum() / math.log(2) / n_bytes) if n_bytes else None,
        "n_targets": losses.size,
        "n_bytes": n_bytes,
    }


def standard_error(values: np.ndarray) -> float | None:
    """Of the mean; None for a single value, which says nothing about its spread."""
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None
