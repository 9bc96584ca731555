"""What the training step reads: windows of the tokens, each a function of its address (seed, step, row).

`tokens` is what has a length and can be cut as tokens[a:b]: Tokens of a prepared corpus, or an array.
"""

import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from gpt.errors import DataError
from gpt.tokens import Tokens

if TYPE_CHECKING:
    from torch import Tensor

BATCHES = 0x6E616E6F5045  # the Philox stream that batches are drawn from: no other use of the seed shares it
ORDER = 0x6F72646572  # the stream that orders of windows are drawn from
AHEAD = 4  # batches that are prepared before they are asked for
MOMENT = 0.001  # seconds in which the trainer goes on: else both want the interpreter's lock as it gets its batch
LEAVING = 10  # seconds that the end of training waits for what is being prepared
NO_TARGET = -100  # where a row is longer than what is left of its document; the loss leaves it out


def batch(tokens: Tokens | np.ndarray, block_size: int, seed: int, step: int, rows: range) -> tuple["Tensor", "Tensor"]:
    """Rows `rows` of the global batch of step `step`: inputs and targets, each (len(rows), block_size) int64.

    A row is a window of `tokens`, every start as likely as any other; targets are the inputs shifted by one. It is a
    function of (seed, step, row) alone: not of what was drawn before, nor of which other rows are asked for.
    Raises DataError where `tokens` is shorter than block_size + 1.
    """
    check_length(len(tokens), block_size)
    starts = len(tokens) - block_size  # how many windows there are
    drawn = philox(seed, BATCHES, step, rows.stop)[rows.start : rows.stop : rows.step]
    offsets = (drawn % np.uint64(starts)).astype(np.int64)  # (rows,); of 2^64 values, so the remainder is even enough
    return window(tokens, offsets, block_size)


def check_length(n_tokens: int, block_size: int) -> None:
    if n_tokens <= block_size:
        raise DataError(
            f"model.block_size: got {block_size:,}, which needs {block_size + 1:,} tokens to train on; the split has "
            f"{n_tokens:,}; give a longer text or a smaller model.block_size"
        )


def philox(seed: int, stream: int, number: int, n: int) -> np.ndarray:
    """(n,) uint64: the first random numbers of the address (seed, stream, number)."""
    key, counter = np.array([seed, stream], dtype=np.uint64), np.array([0, 0, 0, number], dtype=np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(n)


def window(tokens: Tokens | np.ndarray, starts: np.ndarray, length: int) -> tuple["Tensor", "Tensor"]:
    """Inputs tokens[s : s + length] and targets, one further, for each start: each (len(starts), length) int64."""
    import torch

    windows = np.empty((len(starts), length + 1), dtype=np.int64)
    for row, start in zip(windows, starts.tolist(), strict=True):
        row[:] = tokens[start : start + length + 1]
    both = torch.from_numpy(windows)
    return both[:, :-1].contiguous(), both[:, 1:].contiguous()


class Windows:
    """The training windows of a corpus, laid over it as data.packing says; `rows_a_step` of them make a step.

    random: as `batch`. sequential: the text is cut into windows one after the other, and each epoch takes every one of
    them once, in an order of its own. documents: the same with each document cut by itself, so that no window crosses
    its end; what is left of a row behind the end has no targets.
    Each row is a function of (seed, step, row) and, in epochs, of how many rows came before: `done` before step
    `first`, so that a run which goes on with another `rows_a_step` leaves no window out and repeats none.
    """

    def __init__(
        self,
        packing: str,
        tokens: Tokens | np.ndarray,
        documents,
        block_size: int,
        seed: int,
        rows_a_step: int,
        first: int = 0,
        done: int = 0,
    ):
        check_length(len(tokens), block_size)
        self.done = done - first * rows_a_step  # and from now on rows_a_step more at each step
        self.latest = (-1, None)
        self.packing, self.tokens, self.block_size = packing, tokens, block_size
        self.seed, self.rows_a_step = seed, rows_a_step
        if packing == "documents":
            self.starts = np.append(np.asarray(documents), np.uint64(len(tokens))).astype(np.int64)
            targets = np.diff(self.starts) - 1  # the first token of a document is nobody's
            self.until = np.cumsum(-(-targets // block_size))  # (documents,) windows up to the end of each document
            if self.until[-1] == 0:
                raise DataError("data.packing=documents: no document has two tokens; use data.packing=random")
        self.count = {
            "random": len(tokens) - block_size,
            "sequential": (len(tokens) - 1) // block_size,
            "documents": int(self.until[-1]) if packing == "documents" else 0,
        }[packing]

    def batch(self, step: int, rows: range) -> tuple["Tensor", "Tensor"]:
        """Inputs and targets of rows `rows` of the global batch of `step`, each (len(rows), block_size) int64."""
        if self.packing == "random":
            return batch(self.tokens, self.block_size, self.seed, step, rows)
        if self.packing == "sequential":
            return window(self.tokens, self._chosen(step, rows) * self.block_size, self.block_size)
        return self._of_documents(self._spans(step)[rows.start : rows.stop : rows.step])

    def _chosen(self, step: int, rows: range) -> np.ndarray:
        """(rows,) which windows these are, of `count`; what is counted through is rows, over all steps."""
        epochs, numbers = np.divmod(self.done + step * self.rows_a_step + np.array(rows), self.count)
        for epoch in np.unique(epochs).tolist():
            numbers[epochs == epoch] = shuffled(numbers[epochs == epoch], self.count, self.seed, epoch)
        return numbers

    def _spans(self, step: int) -> np.ndarray:
        """(rows_a_step, 2) where the inputs of windows of documents begin and end; targets are one further.

        Kept until another step is asked for: its micro-steps come one after the other.
        """
        if self.latest[0] != step:
            self.latest = (step, self._laid(self._chosen(step, range(self.rows_a_step))))
        return self.latest[1]

    def _laid(self, chosen: np.ndarray) -> np.ndarray:
        document = np.searchsorted(self.until, chosen, side="right")
        before = np.where(document > 0, self.until[document - 1], 0)  # windows of the documents before
        starts = self.starts[document] + (chosen - before) * self.block_size
        return np.stack([starts, np.minimum(starts + self.block_size, self.starts[document + 1] - 1)], axis=1)

    def worth(self, step: int, rows: range) -> float:
        """How many times the targets of rows `rows` go into those of the whole step: what a mean over them weighs."""
        if self.packing != "documents":
            return self.rows_a_step / len(rows)
        return self.targets(step) / int(np.diff(self._spans(step)[rows.start : rows.stop : rows.step]).sum())

    def targets(self, step: int) -> int:
        """How many tokens the whole step is trained on: what is padded is none."""
        if self.packing != "documents":
            return self.rows_a_step * self.block_size
        return int(np.diff(self._spans(step)).sum())

    def _of_documents(self, spans: np.ndarray) -> tuple["Tensor", "Tensor"]:
        import torch

        inputs = np.zeros((len(spans), self.block_size), dtype=np.int64)
        targets = np.full_like(inputs, NO_TARGET)
        for n, (start, end) in enumerate(spans.tolist()):
            found = self.tokens[start : end + 1]
            inputs[n, : end - start], targets[n, : end - start] = found[:-1], found[1:]
        return torch.from_numpy(inputs), torch.from_numpy(targets)


def shuffled(numbers: np.ndarray, count: int, seed: int, epoch: int) -> np.ndarray:
    """(n,) int64: where `numbers` of 0 .. count-1 come in the order of an epoch: a permutation that takes no memory.

    A Feistel network over the next power of four, walked until it lands below `count` (Black and Rogaway 2002, "Ciphers
    with arbitrary finite domains"); its round function is the finalizer of SplitMix64.
    """
    half = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
    mask = np.uint64(2 ** int(half) - 1)
    keys = philox(seed, ORDER, epoch, 6)
    found = numbers.astype(np.uint64)
    outside = np.ones(len(found), dtype=bool)
    while outside.any():
        left, right = found[outside] >> half, found[outside] & mask
        for key in keys:
            left, right = right, left ^ (mixed(right + key) & mask)
        found[outside] = left << half | right
        outside = found >= count
    return found.astype(np.int64)


def mixed(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer: 64 bits in which each depends on all of `x`, uint64 that wraps."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Ahead:
    """make(first), make(first + 1), ... below `stop`, in order, each made on a thread before it is asked for.

    So the trainer waits for no disk. next() raises what `make` raised.

    with Ahead(lambda step: windows.batch(step, rows), first, stop) as batches:
        x, y = next(batches)
    """

    def __init__(self, make: Callable[[int], object], first: int, stop: int):
        self.make, self.numbers, self.left = make, range(first, stop), stop - first
        self.ready: queue.Queue = queue.Queue()
        self.room = threading.Semaphore(AHEAD)
        self.closed = False
        self.thread = threading.Thread(target=self._work, name="batches ahead", daemon=True)

    def __enter__(self) -> "Ahead":
        self.thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.closed = True
        self.room.release()
        self.thread.join(LEAVING)  # not for ever: the disk may not answer

    def __iter__(self) -> "Ahead":
        return self

    def __next__(self):
        if self.left <= 0:
            raise StopIteration
        value, error = self.ready.get()
        self.room.release()
        if error is not None:
            self.left = 0
            raise error
        self.left -= 1
        return value

    def _work(self) -> None:
        for n in self.numbers:
            self.room.acquire()
            if self.closed:
                return
            time.sleep(MOMENT)
            try:
                self.ready.put((self.make(n), None))
            except BaseException as error:  # whatever it was, the trainer must hear of it
                self.ready.put((None, error))
                return
