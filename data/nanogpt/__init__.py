"""nanoGPT's own token files: data.path is a folder with train.bin and val.bin, uint16 ids, which are taken as they are.

A document ends behind nanoGPT's end of text (id 50,256), where there is one. The vocabulary is to be told: the default
is tokenizer=gpt2. Beside character-level files nanoGPT keeps it in meta.pkl, a pickle, which is never opened, since
that can run anything; then it is tokenizer=char with its characters in a JSON file.
"""

import os
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from gpt.documents import BLOCK, Document, Source, SourceGone, listing, state_of
from gpt.errors import DataError, shown
from gpt.schema import DataConfig
from gpt.sources import located, path_label

KEYS = {"path"}
ALLOWED = "a folder with nanoGPT's train.bin and val.bin"
SPLITS = ("train", "val")
END = 50256  # of a document


def label(config: DataConfig) -> str:
    return path_label(located(config, ALLOWED))


def source(config: DataConfig) -> Source:
    folder = located(config, ALLOWED)
    stats = {}
    for split in SPLITS:
        path = folder / f"{split}.bin"
        if not path.is_file():
            raise SourceGone(f"data.path: {shown(path)} is not there; allowed: {ALLOWED}")
        stats[split] = path.stat()
        if not stats[split].st_size or stats[split].st_size % 2:
            raise DataError(
                f"{shown(path)}: {stats[split].st_size:,} bytes; allowed: ids of two bytes each, at least one"
            )

    def documents(start: int) -> Iterator[Document]:
        held_out_first = reversed(SPLITS)  # for preparations that end early
        found = (Document(s, blocks, ends=False) for s in held_out_first for blocks in read(folder / f"{s}.bin"))
        yield from islice(found, start, None)

    pickled = folder / "meta.pkl"
    remedy = (
        f"{pickled} holds the vocabulary as a pickle, which is not opened since it can run anything; write the "
        f'characters as JSON, for example from the text: python -c "import json; '
        f'print(json.dumps(sorted(set(open({str(folder / "input.txt")!r}).read()))))" > characters.json, and say '
        "tokenizer=char tokenizer.file=characters.json"
    )
    return Source(
        f"nanoGPT's {folder}",
        listing([split, stat.st_size, stat.st_mtime_ns] for split, stat in stats.items()),
        documents,
        size=lambda: sum(stat.st_size for stat in stats.values()),
        ids_at={split: folder / f"{split}.bin" for split in SPLITS},
        state=state_of(stats.values()),
        vocabulary=("char", remedy) if pickled.exists() else None,
    )


def read(path: Path) -> Iterator[Iterator[np.ndarray]]:
    """The blocks of ids of each document, its END included. A document is read before the next is asked for.

    Read, not mapped: a mapped file that is cut short meanwhile kills the process. Raises DataError where it changes.
    """
    changed = DataError(f"{shown(path)}: changed while it was read; run the same command again when it is at rest")
    try:
        with open(path, "rb") as file:
            before = os.fstat(file.fileno())

            def ids(start: int, stop: int) -> np.ndarray:
                found = os.pread(file.fileno(), 2 * (stop - start), 2 * start)
                if len(found) < 2 * (stop - start):
                    raise changed
                return np.frombuffer(found, "<u2")

            start, count = 0, before.st_size // 2
            for at in range(0, count, BLOCK):
                for end in at + 1 + np.flatnonzero(ids(at, min(at + BLOCK, count)) == END):
                    yield _blocks(ids, start, int(end))
                    start = int(end)
            if start < count:
                yield _blocks(ids, start, count)
            if state_of([os.fstat(file.fileno())]) != state_of([before]):
                raise changed
    except OSError as error:
        raise DataError(f"{shown(path)}: cannot be read ({error.strerror})") from None


def _blocks(ids: Callable[[int, int], np.ndarray], start: int, stop: int) -> Iterator[np.ndarray]:
    for at in range(start, stop, BLOCK):
        yield ids(at, min(at + BLOCK, stop))
