"""What the training step reads: windows of the tokens, drawn by their address (seed, step, row)."""

import mmap
from typing import TYPE_CHECKING

import numpy as np

from gpt.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

BATCHES = 0x6E616E6F5045  # the Philox stream that batches are drawn from: no other use of the seed shares it
LARGE = 2**28  # bytes; larger files are verified once, not at every opening, and leave resident memory after each batch


def batch(tokens: np.ndarray, block_size: int, seed: int, step: int, rows: range) -> tuple["Tensor", "Tensor"]:
    """Rows `rows` of the global batch of step `step`: inputs and targets, each (len(rows), block_size) int64.

    A row is a window of `tokens`, every start as likely as any other; targets are the inputs shifted by one. It is a
    function of (seed, step, row) alone: not of what was drawn before, nor of which other rows are asked for.
    Raises DataError where `tokens` is shorter than block_size + 1.
    """
    starts = len(tokens) - block_size  # how many windows there are
    if starts < 1:
        raise DataError(
            f"model.block_size: got {block_size:,}, which needs {block_size + 1:,} tokens to train on; the split has "
            f"{len(tokens):,}; give a longer text or a smaller model.block_size"
        )
    key, counter = np.array([seed, BATCHES], dtype=np.uint64), np.array([0, 0, 0, step], dtype=np.uint64)
    drawn = np.random.Philox(key=key, counter=counter).random_raw(rows.stop)[rows.start : rows.stop : rows.step]
    offsets = (drawn % np.uint64(starts)).astype(np.int64)  # (rows,); of 2^64 values, so the remainder is even enough
    return window(tokens, offsets, block_size)


def window(tokens: np.ndarray, starts: np.ndarray, length: int) -> tuple["Tensor", "Tensor"]:
    """Inputs tokens[s : s + length] and targets, one further, for each start: each (len(starts), length) int64."""
    import torch

    windows = np.asarray(tokens)[starts[:, None] + np.arange(length + 1)]  # (starts, length + 1)
    if tokens.nbytes > LARGE:
        forget(tokens)
    return torch.from_numpy(windows[:, :-1].astype(np.int64)), torch.from_numpy(windows[:, 1:].astype(np.int64))


def forget(tokens: np.ndarray) -> None:
    """Takes the pages of a read-only memory map out of resident memory; they stay in the system's cache."""
    if isinstance(tokens, np.memmap) and tokens.mode == "r" and hasattr(mmap, "MADV_DONTNEED"):
        tokens._mmap.madvise(mmap.MADV_DONTNEED)
