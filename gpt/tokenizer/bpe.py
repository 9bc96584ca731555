"""Byte-pair encodings that run through tiktoken: OpenAI's, and tokenizer=bpe, trained here on the corpus itself."""

import hashlib
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from gpt.documents import Document, pieces
from gpt.download import download
from gpt.errors import ConfigError, DataError
from gpt.files import sha256_of
from gpt.tokenizer.base import Tokenizer, blocks_of, id_dtype, utf8

# The pattern that cuts text into words, within which pairs are merged: Radford et al. 2019 (GPT-2), as tiktoken has it.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
TRAINED_ON = 100 * 2**20  # characters of text that a vocabulary is trained on at most
WORD = 1000  # characters of one word in training at most: its time grows with the square of them
SPACE = 65536  # characters of white space in a row at most: more overflow tiktoken's stack, with the pattern of o200k
# Tried at the beginning of a run only, or the time would grow with the square of its length.
LONG_RUN = re.compile(rf"(?<!\S)\S{{{WORD},}}+|(?<!\s)\s{{{WORD},}}+")
LONG_SPACE = re.compile(rf"(?<!\s)\s{{{SPACE},}}+")


def cut_runs(runs: re.Pattern, longest: int, text: str) -> list[str]:
    """`text` in parts: what `runs` matches is cut behind every `longest` characters of it."""
    cuts = [at for run in runs.finditer(text) for at in range(run.start() + longest, run.end() + 1, longest)]
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def without_long_space(text: str) -> list[str]:
    """`text` in parts that tiktoken can encode."""
    # A run that is too long fills one of these; to search all of a text would take a fifth of the time of encoding it.
    if not any(text[at : at + 64].isspace() for at in range(0, len(text), 2**15)):
        return [text]
    return cut_runs(LONG_SPACE, SPACE, text)


class MergeTokenizer(Tokenizer):
    """A byte-pair encoding that tiktoken runs. A subclass provides `encoding`, made when it is first needed."""

    @cached_property
    def encoding(self):
        raise NotImplementedError

    def encode(self, text: str) -> np.ndarray:
        utf8(text)  # tiktoken would put U+FFFD in place of half a surrogate pair, unasked
        parts = [self.encoding.encode_to_numpy(part, disallowed_special=()) for part in without_long_space(text)]
        return np.concatenate(parts).astype(id_dtype(self.vocab_size))

    def table(self) -> list[bytes]:
        special = {self.encoding.encode_single_token(token) for token in self.encoding.special_tokens_set}
        table = []
        for token in range(self.vocab_size):
            try:
                table.append(b"" if token in special else self.encoding.decode_single_token_bytes(token))
            except KeyError:  # an id that is not used: cl100k_base has 16 of them
                table.append(b"")
        return table


@dataclass(frozen=True)
class Published:
    """One of OpenAI's encodings: known before its files are there."""

    vocab_size: int
    separator: int
    url: str  # of the folder of its files
    files: dict[str, str]  # name -> sha256


_GPT2 = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
_URL = "https://openaipublic.blob.core.windows.net/encodings/"
_R50K = {"r50k_base.tiktoken": "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"}
_P50K = {"p50k_base.tiktoken": "94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069"}
_CL100K = {"cl100k_base.tiktoken": "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7"}
_O200K = {"o200k_base.tiktoken": "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"}
ENCODINGS = {
    "gpt2": Published(
        50257,
        50256,
        _GPT2,
        {
            "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
            "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
        },
    ),
    "r50k_base": Published(50257, 50256, _URL, _R50K),
    "p50k_base": Published(50281, 50256, _URL, _P50K),
    "p50k_edit": Published(50284, 50256, _URL, _P50K),
    "cl100k_base": Published(100277, 100257, _URL, _CL100K),
    "o200k_base": Published(200019, 199999, _URL, _O200K),
    "o200k_harmony": Published(201088, 199999, _URL, _O200K),
}


class TiktokenTokenizer(MergeTokenizer):
    """One of OpenAI's encodings. Its files are read when first needed, not before."""

    def __init__(self, name: str):
        self.name, self.published = name, ENCODINGS[name]
        self.vocab_size, self.separator = self.published.vocab_size, self.published.separator

    @classmethod
    def new(cls, config, documents):
        return cls(config.name)

    @classmethod
    def load(cls, state):
        return cls(state["name"])

    @cached_property
    def encoding(self):
        self._provide_files()
        import tiktoken

        return tiktoken.get_encoding(self.name)

    def _provide_files(self) -> None:
        """Sees to it that tiktoken finds its files in its cache: left alone it would wait for a network for minutes."""
        variables = [v for v in ("TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR") if v in os.environ]
        folder = os.environ[variables[0]] if variables else os.path.join(tempfile.gettempdir(), "data-gym-cache")
        if not folder:  # tiktoken takes this for "never cache"
            raise DataError(
                f"{variables[0]}: got an empty text, allowed: a folder for the files of tokenizer={self.name}"
            )
        for file, sha256 in self.published.files.items():
            url = self.published.url + file
            cached = Path(folder) / hashlib.sha1(url.encode()).hexdigest()
            there = cached.is_file()
            try:
                if there and sha256_of(cached) == sha256:
                    continue
                download(url, sha256, cached)
            except OSError as error:
                raise DataError(
                    f"tokenizer={self.name}: its file {file} is {'damaged' if there else 'not'} at {cached} and cannot "
                    f"be had from {url} ({error}); put it there, or set TIKTOKEN_CACHE_DIR to a folder that has it; "
                    "without a network use tokenizer=byte or tokenizer=bpe"
                ) from None

    def state(self) -> dict:
        return {"name": self.name, "files": self.published.files}


class TrainedTokenizer(MergeTokenizer):
    """A byte-level BPE trained on a corpus (Sennrich et al. 2016 on bytes, Radford et al. 2019).

    Ids below 256 are the bytes, then come the merged tokens in the order in which they were found, then the separator.
    """

    name = "bpe"
    longest = 64

    def __init__(self, tokens: list[bytes]):
        self.tokens = tokens  # the merged ones
        self.vocab_size = 256 + len(tokens) + 1
        self.separator = self.vocab_size - 1

    @classmethod
    def new(cls, config, documents):
        cls.label(config)
        tokens = train(documents, config.vocab_size - 257)
        if len(tokens) < config.vocab_size - 257:
            raise ConfigError(
                "tokenizer.vocab_size", config.vocab_size, f"at most {len(tokens) + 257:,} for so little training text"
            )
        return cls(tokens)

    @classmethod
    def load(cls, state):
        tokens = [symbols_to_bytes(token) for token in state["tokens"]]
        known = {bytes([byte]) for byte in range(256)}
        for token in tokens:  # each is two that come before it, or it could never be reached
            if token in known or not any(token[:n] in known and token[n:] in known for n in range(1, len(token))):
                raise ValueError(f"{token!r} is no pair of earlier tokens")
            known.add(token)
        return cls(tokens)

    @classmethod
    def label(cls, config) -> str:
        if config.vocab_size is None or config.vocab_size < 258:
            raise ConfigError("tokenizer.vocab_size", config.vocab_size, "at least 258: the bytes, a pair, a separator")
        return f"bpe{config.vocab_size}"

    @cached_property
    def encoding(self):
        import tiktoken

        ranks = {bytes([byte]): byte for byte in range(256)} | {t: 256 + n for n, t in enumerate(self.tokens)}
        special = {"<|endoftext|>": self.separator}
        return tiktoken.Encoding("bpe", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=special)

    def state(self) -> dict:
        return {"name": self.name, "tokens": [bytes_to_symbols(token) for token in self.tokens]}


def train(documents: Iterable[Document], merges: int) -> list[bytes]:
    """The first `merges` pairs, the most frequent first, of the training split: its first TRAINED_ON characters.

    A function of the text alone, whatever the number of threads. Fewer where the text has no more pairs.
    """
    from tokenizers import Tokenizer as Trained
    from tokenizers import models, pre_tokenizers, trainers

    def words() -> Iterator[str]:
        left = TRAINED_ON
        for document in documents:
            if document.split == "train":
                for piece in pieces(blocks_of(document)):
                    left -= len(piece)
                    if left < 0:
                        return
                    yield from cut_runs(LONG_RUN, WORD, piece)

    model = Trained(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = list(SYMBOLS.values())
    trainer = trainers.BpeTrainer(
        vocab_size=256 + merges,
        initial_alphabet=alphabet,
        max_token_length=TrainedTokenizer.longest,
        show_progress=False,
    )
    model.train_from_iterator(words(), trainer)
    ids = model.get_vocab()
    return [symbols_to_bytes(token) for token in sorted(ids, key=ids.get)[256:]]


def _symbols() -> dict[int, str]:
    """Byte -> a character that can be seen, as in GPT-2's vocabulary: itself in Latin-1, or one from U+0100 on."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in seen]
    return {byte: chr(byte) for byte in seen} | {byte: chr(0x100 + n) for n, byte in enumerate(hidden)}


SYMBOLS = _symbols()
BYTES = {symbol: byte for byte, symbol in SYMBOLS.items()}


def bytes_to_symbols(token: bytes) -> str:
    return "".join(SYMBOLS[byte] for byte in token)


def symbols_to_bytes(token: str) -> bytes:
    """Raises KeyError for a character that stands for no byte."""
    return bytes(BYTES[symbol] for symbol in token)
