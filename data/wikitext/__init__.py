"""WikiText-2 and -103, raw (Merity et al. 2016): the articles, each a document, in the three splits as published.

The hub has them as one line a row. Lines are put together again to articles, which begin at a heading of the first
level (" = Title = "), and blank lines, which are empty rows there, are " \\n" as in the published files.
"""

import re
from collections.abc import Iterator
from itertools import islice

from data import hf
from gpt.documents import Document, Skipped, Source
from gpt.schema import DataConfig

KEYS = hf.KEYS
TITLE = re.compile(r" = [^=\s].* = \n?")
BLANK = " \n"

label = hf.label


def source(config: DataConfig) -> Source:
    label(config)
    return hf.source_of(config, lambda start: islice(documents(config), start, None))


def documents(config: DataConfig) -> Iterator[Document]:
    for split, theirs in hf.splits(config).items():
        rows = hf.rows(config, theirs)
        for article in articles(BLANK if isinstance(row, Skipped) else "".join(row) for row in rows):
            yield Document(split, article)


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
