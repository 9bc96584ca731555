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
from gpt.tokenizer import Tokenizer, id_dtype, load_tokenizer

TASK = 2**20  # characters (or ids) that are tokenized at a time
MANY = 2**16  # parts that are tokenized at a time
ALONE = 4  # tasks that the reading process does itself: a small text is done before others have started


class Place(NamedTuple):
    """How far the documents are read: `documents` of them, left out ones included, and `pieces` of the next one."""

    documents: int = 0
    pieces: int = 0


class Part(NamedTuple):
    """What follows in the corpus: "begin" or "end" of a document, a piece of its "text", or one that was "skipped"."""

    what: str
    split: str
    text: str | np.ndarray = ""  # of "text": text, or ids where a source has these; of "skipped": why


def parts_of(source: Source, boundary: re.Pattern | None, start: Place) -> Iterator[tuple[Part, Place]]:
    """The parts of the documents from `start` on, each with the place behind it."""
    number, done = start.documents, start.pieces
    for document in source.documents(number):
        if isinstance(document, Skipped):
            yield Part("skipped", "", document.why), Place(number + 1)
        else:
            texts = (piece for piece in pieces(document.blocks, boundary) if len(piece))
            first = next(texts, None)
            if first is None:
                yield Part("skipped", "", "empty"), Place(number + 1)
            else:
                if not done:
                    yield Part("begin", document.split), Place(number)
                for n, text in islice(enumerate(chain([first], texts), start=1), done, None):
                    yield Part("text", document.split, text), Place(number, n)
                if document.ends:
                    yield Part("end", document.split), Place(number + 1)
        number, done = number + 1, 0


def tasks_of(parts: Iterable[tuple[Part, Place]]) -> Iterator[tuple[list[Part], Place]]:
    """Lists of about TASK characters, each with the place behind it, from which one can go on: never after "begin"."""
    task, size, place = [], 0, None
    for part, place in parts:
        task.append(part)
        size += len(part.text)
        if (size >= TASK or len(task) >= MANY) and part.what != "begin":
            yield task, place
            task, size = [], 0
    if task:
        yield task, place


def encode(tokenizer: Tokenizer, task: list[Part]) -> list[tuple[np.ndarray, int]]:
    """Of each part the ids, (n,), and how many bytes of text they stand for.

    The end of a document is a separator, where the vocabulary has one.
    """
    nothing = np.empty(0, np.uint16)
    end = nothing if tokenizer.separator is None else np.array([tokenizer.separator], id_dtype(tokenizer.vocab_size))
    results = []
    for what, _, text in task:
        if what != "text":
            results.append((end if what == "end" else nothing, 0))
        elif isinstance(text, str):
            ids = tokenizer.encode(text)
            results.append((ids, len(text) if text.isascii() else len(text.encode("utf-8"))))
        else:
            known = text[(text >= 0) & (text < tokenizer.vocab_size)]  # others are refused where they are written
            results.append((text, int(tokenizer.token_bytes()[known].sum())))
    return results


def encode_all(tokenizer: Tokenizer, tasks: Iterator[tuple[list[Part], Place]], workers: int) -> Iterator[tuple]:
    """(task, what `encode` makes of it, place) in order. Raises WorkerDied."""
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


def _work(task: list[Part]) -> list[tuple[np.ndarray, int]]:
    return encode(_tokenizer, task)
