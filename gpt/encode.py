"""Documents to ids: read in one process, tokenized in several, in order, so that the ids are the same for any number.

A preparation that was killed goes on from the `Place` it had reached.
"""

import os
import re
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from multiprocessing import get_context, parent_process
from typing import NamedTuple

import numpy as np

from gpt.documents import Skipped, Source, pieces
from gpt.errors import DataError
from gpt.tokenizer import Tokenizer, Unencodable, id_dtype, load_tokenizer

TASK = 2**20  # characters (or ids) that are tokenized at a time
MANY = 2**16  # parts that are tokenized at a time
ALONE = 4  # tasks that the reading process does itself: a small text is done before others have started


class Place(NamedTuple):
    """How far the documents are read: `documents` of them, left out ones included, and `pieces` of the next one."""

    documents: int = 0
    pieces: int = 0


class Part(NamedTuple):
    """A piece of a document, never empty."""

    split: str
    text: str | np.ndarray  # or ids, where a source has these
    begins: bool  # whether the document begins with it
    ends: bool  # whether the document ends with it, and a separator follows
    where: str  # the document, for errors
    at: int  # characters of the document before it


class Encoded(NamedTuple):
    """The ids of the parts of a task."""

    ids: np.ndarray  # (n,) of all parts, separators included
    counts: np.ndarray  # (parts,) how many of them are each one's
    n_bytes: np.ndarray  # (parts,) bytes of text that these stand for


def parts_of(
    source: Source, boundary: re.Pattern | None, start: Place, left: int | None = None
) -> Iterator[tuple[Part | Skipped, Place]]:
    """The parts of the documents from `start` on, and what is left out, each with the place behind it.

    Where a text may be cut anywhere they are no more than `left` characters, if it is told: so many tokens are wanted,
    and none stands for more than one.
    """
    number, done = start
    for document in source.documents(number):
        if left == 0:
            return
        if isinstance(document, Skipped):
            yield document, Place(number + 1)
        else:
            where = document.file or f"{source.description}: document {number + 1:,} ({document.split})"
            texts = filter(len, pieces(document.blocks, boundary))
            text, n, at = next(texts, None), 0, 0
            if text is None:
                yield Skipped("empty"), Place(number + 1)
            while text is not None:
                following, n = next(texts, None), n + 1
                if n > done:
                    if boundary is None and left is not None:
                        text = text[:left]
                        left -= len(text)
                    last = following is None
                    part = Part(document.split, text, n == 1, last and document.ends, where, at)
                    yield part, Place(number + 1) if last else Place(number, n)
                    if left == 0:
                        return
                at, text = at + len(text), following
        number, done = number + 1, 0


def tasks_of(parts: Iterable[tuple[Part | Skipped, Place]]) -> Iterator[tuple[list[Part | Skipped], Place]]:
    """Lists of about TASK characters, each with the place behind it, from which one can go on."""
    task, size, place = [], 0, None
    for part, place in parts:
        task.append(part)
        size += 0 if isinstance(part, Skipped) else len(part.text)
        if size >= TASK or len(task) >= MANY:
            yield task, place
            task, size = [], 0
    if task:
        yield task, place


def encode(tokenizer: Tokenizer, task: list[Part | Skipped]) -> Encoded:
    """The ids of each part, and behind each document a separator, where the vocabulary has one; none of what is left
    out. Raises DataError naming the document and the character that has no id."""
    dtype = id_dtype(tokenizer.vocab_size)
    end = np.array([] if tokenizer.separator is None else [tokenizer.separator], dtype)
    found, counts, sizes, of_ids = [np.empty(0, dtype)], [], [], False
    for part in task:
        n = size = 0
        if not isinstance(part, Skipped):
            ids = text = part.text
            if isinstance(text, str):
                try:
                    ids = tokenizer.encode(text)
                except Unencodable as error:
                    raise DataError(f"{part.where}: character {part.at + error.position:,} is {error.why}") from None
                size = len(text) if text.isascii() else len(text.encode("utf-8"))
            else:
                of_ids = True
            found.append(ids)
            n = len(ids)
            if part.ends:
                found.append(end)
                n += len(end)
        counts.append(n)
        sizes.append(size)
    ids, counts, n_bytes = np.concatenate(found), np.array(counts), np.array(sizes)
    if of_ids:
        sums = np.append(0, bytes_of(tokenizer, ids).cumsum())
        n_bytes = sums[counts.cumsum()] - sums[counts.cumsum() - counts]
    return Encoded(ids, counts, n_bytes)


def bytes_of(tokenizer: Tokenizer, ids: np.ndarray) -> np.ndarray:
    """(n,) how many bytes of text each id stands for; 0 for those that the vocabulary lacks, which are refused where
    they are written."""
    known = (ids >= 0) & (ids < tokenizer.vocab_size)
    return np.where(known, tokenizer.token_bytes()[np.where(known, ids, 0)], 0)


def encode_all(
    tokenizer: Tokenizer, tasks: Iterator[tuple[list[Part | Skipped], Place]], workers: int
) -> Iterator[tuple[list[Part | Skipped], Encoded, Place]]:
    """Each task, what `encode` makes of it, and the place behind it, in order. Raises WorkerDied."""
    quick = tokenizer.boundary is None  # character by character: done before another process has the text
    for task, place in islice(tasks, None if quick or workers == 1 else ALONE):
        yield task, encode(tokenizer, task), place
    first = next(tasks, None)
    if first is None:
        return
    # Not forked: a fork of a process with threads holds their locks for ever.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start, (tokenizer.state(),))
    waiting: deque = deque()
    try:
        for task, place in chain([first], tasks):
            waiting.append((task, pool.submit(_work, task), place))
            if len(waiting) > 2 * workers:
                task, future, place = waiting.popleft()
                yield task, future.result(), place
        for task, future, place in waiting:
            yield task, future.result(), place
    except BrokenProcessPool:
        raise WorkerDied(
            "a process that tokenizes died, killed or out of memory; the same command goes on from where it was"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


class WorkerDied(DataError):
    """Not the text's fault."""


def _start(state: dict) -> None:
    """In a new worker: it leaves Ctrl-C to its parent, and ends when that does, however that ends."""
    global _tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=lambda: (parent_process().join(), os._exit(1)), daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _tokenizer = load_tokenizer(state)


def _work(task: list[Part | Skipped]) -> Encoded:
    return encode(_tokenizer, task)
