"""What a tokenizer is. Text is always ordinary text: "<|endoftext|>" in it is letters and punctuation, no separator."""

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator
from functools import cached_property

import numpy as np

from gpt.documents import WORD_END, Document
from gpt.errors import DataError
from gpt.schema import TokenizerConfig

LARGEST = 2**26  # bytes of a file that holds a vocabulary: about twice the largest that are published


def id_dtype(vocab_size: int) -> np.dtype:
    """The smallest unsigned type that holds every id below `vocab_size`: uint16 up to 65,536 ids, then uint32."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


class Unencodable(DataError):
    """A character that has no id: its `position` in the text, and in `why` which one it is."""

    def __init__(self, position: int, why: str):
        super().__init__(f"text: character {position:,} is {why}")
        self.position, self.why = position, why


def utf8(text: str) -> bytes:
    """The bytes of `text`. Raises Unencodable at half a surrogate pair, which no valid text file can hold."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        why = f"U+{ord(text[error.start]):04X}, half a surrogate pair; allowed: Unicode"
        raise Unencodable(error.start, why) from None


def blocks_of(document: Document) -> Iterator[str]:
    """The blocks of a document's text. Raises DataError where it is made of ids, which no vocabulary is made from."""
    for block in document.blocks:
        if not isinstance(block, str):
            raise DataError(
                "tokenizer: this corpus holds ids, not text, so no vocabulary can be made from it; allowed: the one of "
                "its ids, as tokenizer=gpt2, or tokenizer=char tokenizer.file=<a JSON file of its characters>"
            )
        yield block


def content_of(path: str, what: str) -> str:
    """The text of the file that tokenizer.file names. Raises DataError where it is no `what`."""
    try:
        with open(os.path.expanduser(path), "rb", opener=_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise DataError(f"tokenizer.file: {path} is no plain file; allowed: a {what}")
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise DataError(f"tokenizer.file: {path} is larger than {LARGEST:,} bytes; allowed: a {what}")
        return content.decode("utf-8")
    except OSError as error:
        raise DataError(f"tokenizer.file: {path} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise DataError(f"tokenizer.file: {path} is no {what} (not UTF-8)") from None
    except ValueError:  # a path with a NUL
        raise DataError(f"tokenizer.file: got {path!r}, which is no path; allowed: a {what}") from None


def _without_waiting(path: str, flags: int) -> int:
    """Opens also a named pipe to which nobody writes."""
    return os.open(path, flags | os.O_NONBLOCK)


class Tokenizer:
    """What every tokenizer offers. A subclass sets name, vocab_size and separator, and says how to encode."""

    name: str  # as in tokenizer=<name>
    vocab_size: int
    separator: int | None  # the id between documents; None where the vocabulary has none
    boundary: re.Pattern | None = WORD_END  # where a text may be cut without changing its ids; None: anywhere
    longest = 1  # characters that a token stands for at most, of a kind that is made from a corpus

    @classmethod
    def new(cls, config: TokenizerConfig, documents: Iterable[Document]) -> "Tokenizer":
        """The tokenizer that `config` names; `documents` are read only by those that are made from a corpus."""
        raise NotImplementedError

    @classmethod
    def load(cls, state: dict) -> "Tokenizer":
        """The tokenizer whose `state()` this is. May raise anything where it is none."""
        raise NotImplementedError

    @classmethod
    def label(cls, config: TokenizerConfig) -> str:
        """A word for a folder's name that differs where two tokenizers do. Raises UserError for a key or a file."""
        return config.name

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text`, (n,) uint16 or uint32. Raises Unencodable for a character that has no id."""
        raise NotImplementedError

    def table(self) -> list[bytes]:
        """(vocab_size,) what each id stands for; nothing for separators, special ids and ids that are not used."""
        raise NotImplementedError

    @cached_property
    def _table(self) -> list[bytes]:
        return self.table()

    def decode_bytes(self, ids) -> bytes:
        """The exact bytes that `ids` stand for; the separator stands for none. Raises DataError for an unknown id."""
        ids = np.asarray(ids, dtype=np.int64).reshape(-1)
        wrong = np.flatnonzero((ids < 0) | (ids >= self.vocab_size))
        if len(wrong):
            first = int(wrong[0])
            raise DataError(
                f"token id {ids[first]} at index {first:,}: the {self.name} vocabulary is 0 to {self.vocab_size - 1:,}"
            )
        return b"".join(map(self._table.__getitem__, ids.tolist()))

    def decode(self, ids) -> str:
        """`decode_bytes` as text; what is not valid UTF-8 becomes U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    @cached_property
    def _token_bytes(self) -> np.ndarray:
        lengths = np.array([len(token) for token in self._table])
        lengths.setflags(write=False)
        return lengths

    def token_bytes(self) -> np.ndarray:
        """(vocab_size,) int64, read only: how many bytes each id stands for; 0 for the separator."""
        return self._token_bytes

    def state(self) -> dict:
        """Plain JSON from which `load_tokenizer` rebuilds this tokenizer."""
        return {"name": self.name}

    @cached_property
    def sha256(self) -> str:
        """Of the state: equal for two tokenizers exactly when they give the same ids."""
        return hashlib.sha256(json.dumps(self.state(), sort_keys=True).encode()).hexdigest()
