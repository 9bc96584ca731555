"""Tiny Shakespeare: exactly the text and the split of nanoGPT's shakespeare_char, 1,115,394 characters.

Looked for at data.path if that is given; else as data/shakespeare_char/input.txt below the working directory, then in
this folder, then beside the repository; else downloaded below the working directory. The sha256 decides that it is it.
"""

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from gpt.documents import Document, Source, SourceGone, cut_text
from gpt.download import download
from gpt.errors import DataError, shown
from gpt.files import sha256_of
from gpt.schema import DataConfig

KEYS = {"path", "val_fraction", "test_fraction"}
URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
HERE = Path("data/shakespeare_char/input.txt")
ELSEWHERE = (Path(__file__).parent / "input.txt", Path(__file__).parents[3] / "shared/data/tinyshakespeare.txt")


def label(config: DataConfig) -> str:
    return ""


def source(config: DataConfig) -> Source:
    if config.path is not None:
        given = Path(os.path.expanduser(config.path))
        if not given.is_file():
            raise SourceGone(f"data.path: got {config.path!r}, which is no file; allowed: tiny Shakespeare, from {URL}")
        if not is_it(given):
            raise DataError(
                f"data.path: {shown(given)} is not the tiny Shakespeare of {URL} (its sha256 differs); "
                f"for any other text: data=text data.path={shown(given)} tokenizer=char"
            )
    # The text cannot change, so what is prepared stays good wherever it came from, and nothing is downloaded for it.
    return Source(
        "tiny Shakespeare, as in nanoGPT", {"sha256": SHA256}, lambda start: islice(documents(config), start, None)
    )


def documents(config: DataConfig) -> Iterator[Document]:
    # The last tenth is held out: of the bytes, which here are characters, since the text is ASCII.
    return cut_text(find(config), config.val_fraction, config.test_fraction)


def find(config: DataConfig) -> Path:
    """Where the text is; downloads it where it is nowhere. Raises DataError where that fails."""
    if config.path is not None:
        return Path(os.path.expanduser(config.path))
    for path in (HERE, *ELSEWHERE):
        if is_it(path):
            return path
    try:
        download(URL, SHA256, HERE)
    except OSError as error:
        raise DataError(
            f"data=shakespeare_char: {URL} cannot be had ({error}); put that file at {HERE}, or say data.path=<file>; "
            "data=stdlib needs no network"
        ) from None
    return HERE


def is_it(path: Path) -> bool:
    try:
        return path.is_file() and sha256_of(path) == SHA256
    except OSError:
        return False
