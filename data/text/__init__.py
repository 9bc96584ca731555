"""Your own text: data.path is a UTF-8 file, a folder of them (read recursively, in order), or a pattern such as *.txt.

Every file is a document. A folder's files are held out for validation and test by the hash of their name; of a single
text, the end is. With data.marker a document ends wherever that text stands, which belongs to no document, and
documents are held out by the hash of their number.
"""

from collections.abc import Iterable, Iterator
from itertools import islice

from gpt.documents import Document, Skipped, Source, cut_text, read_blocks, splits_of
from gpt.errors import ConfigError
from gpt.schema import DataConfig
from gpt.sources import Files, located, path_label, stream

KEYS = {"path", "marker", "val_fraction", "test_fraction"}
# What is taken from a folder; a file that is named itself may end in anything.
PROSE = ".txt .text .md .markdown .rst .org .tex .html .htm .xml .json .jsonl .csv .tsv .yaml .yml .toml"
CODE = ".py .pyi .js .ts .c .h .cc .cpp .hpp .cu .java .go .rs .rb .lua .jl .r .hs .scala .swift .kt .sh .sql"
ALLOWED = "a UTF-8 text file, a folder of them, or a pattern such as texts/*.txt"


def label(config: DataConfig) -> str:
    return path_label(located(config, ALLOWED), config.marker)


def source(config: DataConfig) -> Source:
    path = located(config, ALLOWED)
    if config.marker == "":
        raise ConfigError("data.marker", "", "a text between two documents, or null")
    files = Files(path, f"{PROSE} {CODE}".split(), f"{ALLOWED}; of a folder the files ending in {PROSE} {CODE}")

    def whole(start: int) -> Iterator[Document]:
        if len(files.paths) == 1:
            parts = cut_text(*files.paths.values(), config.val_fraction, config.test_fraction)
            yield from islice(parts, start, None)
            return
        splits = splits_of(files.paths, config.val_fraction, config.test_fraction)
        for name, file in islice(files.paths.items(), start, None):
            yield Document(splits[name], read_blocks(file), file=str(file))

    def texts() -> Iterator[Iterable[str]]:
        for file in files.paths.values():
            yield from cut_at(read_blocks(file), config.marker)

    def marked(start: int) -> Iterator[Document | Skipped]:
        return stream(lambda start: islice(texts(), start, None), start, config)

    documents = whole if config.marker is None else marked
    fingerprint = files.fingerprint() | ({} if config.marker is None else {"marker": config.marker})
    return Source(str(path), fingerprint, documents, files.skipped, lambda: files.size, state=files.state)


def cut_at(blocks: Iterable[str], marker: str) -> Iterator[Iterator[str]]:
    """The blocks of each text that ends at `marker` or with the last block; nothing behind a last marker is no text.

    A text is read before the next is asked for.
    """
    blocks, held, at, more = iter(blocks), "", 0, True  # of `held` what begins at `at` is not given out yet

    def text() -> Iterator[str]:
        nonlocal held, at, more
        while (end := held.find(marker, at)) < 0:
            safe = max(at, len(held) - len(marker) + 1)  # behind it a marker may have begun
            if safe > at:
                yield held[at:safe]
            new = next(blocks, None)
            if new is None:
                more = False
                if held[safe:]:
                    yield held[safe:]
                held, at = "", 0
                return
            held, at = held[safe:] + new, 0
        if end > at:
            yield held[at:end]
        at = end + len(marker)

    while more:
        current = text()
        first = next(current, None)
        if first is not None:
            yield _begun(first, current)
        elif more:
            yield iter(())
        for _ in current:  # what the reader left of it
            pass


def _begun(first: str, rest: Iterator[str]) -> Iterator[str]:
    yield first
    yield from rest
