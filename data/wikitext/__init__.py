"""WikiText-2 and -103, raw (Merity et al. 2016): the articles, each a document, in the three splits as published.

The hub has them as one line a row, the published files (wiki.train.raw) as text. Lines are put together again to
articles, which begin at a heading of the first level (" = Title = "), and blank lines, which are empty rows on the hub,
are " \\n" as in the published files.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import chain, islice

from data import hf
from gpt.documents import Document, Skipped, Source
from gpt.errors import ConfigError
from gpt.schema import DataConfig

KEYS = hf.KEYS - {"val_fraction", "test_fraction"}
TITLE = re.compile(r" = [^=\s].* = \n?")
BLANK = " \n"

label = hf.label


def source(config: DataConfig) -> Source:
    if config.val_split is None:
        raise ConfigError("data.val_split", None, "validation: whole articles are held out, as published")
    return hf.source_of(config, lambda rows, start: islice(documents(rows), start, None))


def documents(rows: dict[str, hf.Rows]) -> Iterator[Document]:
    for split, of_split in rows.items():
        lines = chain.from_iterable([BLANK] if isinstance(row, Skipped) else lines_of(row) for row in of_split(0))
        for article in articles(lines):
            yield Document(split, article)


def lines_of(blocks: Iterable[str]) -> Iterator[str]:
    """The lines of a text, with their ends."""
    held = ""
    for block in blocks:
        *whole, held = (held + block).split("\n")
        yield from (f"{line}\n" for line in whole)
    if held:
        yield held


def articles(lines: Iterator[str]) -> Iterator[list[str]]:
    """The lines of each article. A title stands between blank lines; what is before the first belongs to the first."""
    article: list[str] = []
    titled = False
    for line in lines:
        if TITLE.fullmatch(line) and (not article or not article[-1].strip()):
            if titled:
                yield article[:-1]  # the blank line before a title belongs to it, as at the beginning of the files
                article = article[-1:]
            titled = True
        article.append(line)
    if article:
        yield article
