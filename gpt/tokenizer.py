"""Tokenizers: text to ids and back, exactly. One class a kind; `new_tokenizer` makes one, `load_tokenizer` rebuilds it.

Text is always ordinary text: "<|endoftext|>" in it is eleven letters and punctuation, never the separator.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import numpy as np

from gpt.download import download
from gpt.errors import DataError
from gpt.files import sha256_of
from gpt.schema import TokenizerConfig


def id_dtype(vocab_size: int) -> np.dtype:
    """The smallest unsigned type that holds every id below `vocab_size`: uint16 up to 65,536 ids, then uint32."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def utf8(text: str) -> bytes:
    """The bytes of `text`. Raises DataError at half a surrogate pair, which no valid text file can hold."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        lone = f"U+{ord(text[error.start]):04X}"
        raise DataError(
            f"text: position {error.start:,} holds {lone}, half a surrogate pair; allowed: Unicode"
        ) from None


class Tokenizer:
    """What every tokenizer offers. A subclass sets name, vocab_size and separator."""

    name: str
    vocab_size: int
    separator: int | None  # the id between documents; None where the vocabulary has none

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text`, (n,) uint16 or uint32. Raises DataError for a character that has no id."""
        raise NotImplementedError

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """`encode` of each text."""
        return [self.encode(text) for text in texts]

    def decode_bytes(self, ids) -> bytes:
        """The exact bytes that `ids` stand for; the separator stands for none. Raises DataError for an unknown id."""
        raise NotImplementedError

    def decode(self, ids) -> str:
        """`decode_bytes` as text; what is not valid UTF-8 becomes U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def token_bytes(self) -> np.ndarray:
        """(vocab_size,) int64: how many bytes each id stands for; 0 for the separator."""
        raise NotImplementedError

    def state(self) -> dict:
        """Plain JSON from which `load_tokenizer` rebuilds this tokenizer."""
        return {"name": self.name}

    @cached_property
    def sha256(self) -> str:
        """Of the state: equal for two tokenizers exactly when they give the same ids."""
        return hashlib.sha256(json.dumps(self.state(), sort_keys=True).encode()).hexdigest()

    def _checked(self, ids) -> np.ndarray:
        """`ids` as (n,) int64 without separators; raises DataError for one outside of the vocabulary."""
        ids = np.asarray(ids, dtype=np.int64).reshape(-1)
        wrong = np.flatnonzero((ids < 0) | (ids >= self.vocab_size))
        if len(wrong):
            first = int(wrong[0])
            raise DataError(
                f"token id {ids[first]} at index {first:,}: the {self.name} vocabulary is 0 to {self.vocab_size - 1:,}"
            )
        return ids if self.separator is None else ids[ids != self.separator]


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8, and 256 as separator. Needs no files and knows every text."""

    name = "byte"
    vocab_size = 257
    separator = 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(utf8(text), dtype=np.uint8).astype(np.uint16)

    def decode_bytes(self, ids) -> bytes:
        return self._checked(ids).astype(np.uint8).tobytes()

    def token_bytes(self) -> np.ndarray:
        return np.array([1] * 256 + [0])


class CharTokenizer(Tokenizer):
    """The characters of one corpus by code point, as in nanoGPT's shakespeare_char. No separator."""

    name = "char"
    separator = None

    def __init__(self, characters: str):
        if not characters or list(characters) != sorted(set(characters)):
            raise DataError("tokenizer char: its characters must be at least one, each once, in order of code points")
        utf8(characters)
        self.characters = characters
        self.vocab_size = len(characters)
        self._codes = np.array([ord(c) for c in characters])  # (vocab_size,)
        self._ids = np.full(self._codes[-1] + 1, -1)  # code point -> id
        self._ids[self._codes] = np.arange(self.vocab_size)

    def encode(self, text: str) -> np.ndarray:
        codes = np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype=np.uint32)
        known = codes < len(self._ids)
        ids = np.where(known, self._ids[np.where(known, codes, 0)], -1)
        if len(ids) and ids.min() < 0:
            first = int(np.argmax(ids < 0))
            shown = self.characters if self.vocab_size <= 100 else self.characters[:100] + "…"
            raise DataError(
                f"tokenizer char: {text[first]!r} (U+{ord(text[first]):04X}) at position {first:,} is not among its "
                f"{self.vocab_size} characters {shown!r}; tokenizer=byte knows every text"
            )
        return ids.astype(id_dtype(self.vocab_size))

    def decode_bytes(self, ids) -> bytes:
        codes = self._codes[self._checked(ids)]
        return codes.astype("<u4").tobytes().decode("utf-32-le").encode("utf-8")

    def token_bytes(self) -> np.ndarray:
        return np.array([len(c.encode("utf-8")) for c in self.characters])

    def state(self) -> dict:
        return {"name": self.name, "characters": self.characters}


class TiktokenTokenizer(Tokenizer):
    """GPT-2's byte-pair encoding through tiktoken. Its two files are read when first needed, not before."""

    name = "gpt2"
    vocab_size = 50257
    separator = 50256
    url = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
    files = {
        "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
        "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    }

    @cached_property
    def encoding(self):
        self._provide_files()
        import tiktoken

        return tiktoken.get_encoding("gpt2")

    def _provide_files(self) -> None:
        """Sees to it that tiktoken finds its files in its cache: left alone it would wait for a network for minutes."""
        variables = [v for v in ("TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR") if v in os.environ]
        folder = os.environ[variables[0]] if variables else os.path.join(tempfile.gettempdir(), "data-gym-cache")
        if not folder:  # tiktoken takes this for "never cache"
            raise DataError(f"{variables[0]}: got an empty text, allowed: a folder for the files of tokenizer=gpt2")
        for file, sha256 in self.files.items():
            cached = Path(folder) / hashlib.sha1((self.url + file).encode()).hexdigest()
            try:
                if cached.is_file() and sha256_of(cached) == sha256:
                    continue
                download(self.url + file, sha256, cached)
            except OSError as error:
                raise DataError(
                    f"tokenizer=gpt2: its file {file} is not at {cached} and cannot be had from {self.url}{file} "
                    f"({error}); put it there, or set TIKTOKEN_CACHE_DIR to a folder that has it; "
                    "without a network use tokenizer=byte"
                ) from None

    def encode(self, text: str) -> np.ndarray:
        utf8(text)  # tiktoken would put U+FFFD in place of half a surrogate pair, unasked
        return np.array(self.encoding.encode_ordinary(text), dtype=np.uint16)

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        for text in texts:
            utf8(text)
        ids = self.encoding.encode_ordinary_batch(texts, num_threads=os.cpu_count() or 1)
        return [np.array(one, dtype=np.uint16) for one in ids]

    def decode_bytes(self, ids) -> bytes:
        return self.encoding.decode_bytes(self._checked(ids).tolist())

    def token_bytes(self) -> np.ndarray:
        ordinary = [len(self.encoding.decode_single_token_bytes(i)) for i in range(self.separator)]
        return np.array(ordinary + [0])

    def state(self) -> dict:
        return {"name": self.name, "files": self.files}


def new_tokenizer(config: TokenizerConfig, texts: Iterable[str]) -> Tokenizer:
    """The tokenizer that `config` names; char takes its vocabulary from `texts`, the others do not read them."""
    if config.name == "byte":
        return ByteTokenizer()
    if config.name == "gpt2":
        return TiktokenTokenizer()
    characters: set[str] = set()
    for text in texts:
        characters.update(text)
    if not characters:
        raise DataError("tokenizer=char: the texts are empty, so there are no characters to take")
    return CharTokenizer("".join(sorted(characters)))


def load_tokenizer(state: dict) -> Tokenizer:
    """The tokenizer whose `state()` this is. Raises DataError where it is none."""
    name = state.get("name") if isinstance(state, dict) else None
    if name == "char" and isinstance(state.get("characters"), str):
        tokenizer: Tokenizer = CharTokenizer(state["characters"])
    elif name == "byte":
        tokenizer = ByteTokenizer()
    elif name == "gpt2":
        tokenizer = TiktokenTokenizer()
    else:
        raise DataError(f"tokenizer: got the state {str(state)[:100]!r}, allowed: that of byte, char or gpt2")
    if tokenizer.state() != state:
        raise DataError(f"tokenizer {name}: the stored state is not that of this version; prepare the data again")
    return tokenizer
