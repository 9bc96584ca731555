"""tokenizer=hf: a tokenizer.json of Hugging Face's `tokenizers`."""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator

import numpy as np

from gpt.documents import WORD_END
from gpt.errors import ConfigError, DataError
from gpt.tokenizer.base import Tokenizer, content_of, id_dtype, utf8
from gpt.tokenizer.bpe import BYTES, symbols_to_bytes, without_long_space

# Patterns of words of which, as of GPT-2's, none runs from a non-space into a space: Llama 3's and Qwen's.
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORDS = (CL100K, CL100K.replace("{1,3}", ""))
NOWHERE = re.compile("(?!)")
SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")  # the first of them that there is


class FileTokenizer(Tokenizer):
    """A byte-level BPE from a tokenizer.json, as GPT-2, Llama 3, OLMo and many others have: the kind that gives back
    every text byte for byte. Others (lower case, Unicode normal forms, unknown words) change the text and are refused.

    Special tokens are never made from text. The separator is the first of SEPARATORS among them.
    """

    name = "hf"

    def __init__(self, content: str):
        """`content`: that of the file. Raises ValueError with what is wrong in a few words."""
        from tokenizers import Tokenizer as Loaded

        self.content = content
        try:
            parsed = _json(content)
            check_lossless(parsed)
            with panics_as_errors():
                self.loaded = Loaded.from_str(content)
            self.loaded.no_truncation()
            self.loaded.no_padding()
            self.loaded.encode_special_tokens = True  # they are ordinary text where a text has them
            self.boundary = boundary_of(parsed)
            self.vocabulary = self.loaded.get_vocab(with_added_tokens=True)
            self.vocab_size = max(self.vocabulary.values()) + 1
            # by the ids that they get, which can be others than those that the file says
            self.added = {self.vocabulary[token["content"]]: token for token in parsed.get("added_tokens") or []}
        except ValueError:
            raise
        except Exception as error:  # what `tokenizers` raises has no class of its own
            raise ValueError(f"is no tokenizer of Hugging Face ({shortened(error)})") from None
        if self.vocab_size > 2 * len(self.vocabulary):  # a model would have a row of weights for each
            raise ValueError(
                f"has {len(self.vocabulary):,} tokens with ids up to {self.vocab_size - 1:,}; "
                f"allowed: below {2 * len(self.vocabulary):,}, twice as many"
            )
        special = {token["content"]: index for index, token in self.added.items() if token["special"]}
        self.separator = next((special[name] for name in SEPARATORS if name in special), None)

    @classmethod
    def new(cls, config, documents):
        try:
            return cls(_content(config))
        except ValueError as error:
            raise DataError(f"tokenizer.file: {config.file} {error}") from None

    @classmethod
    def load(cls, state):
        return cls(state["json"])

    @classmethod
    def label(cls, config) -> str:
        return "hf" + hashlib.sha256(_content(config).encode()).hexdigest()[:8]

    def encode(self, text: str) -> np.ndarray:
        data, parts = utf8(text), without_long_space(text)
        try:
            with panics_as_errors():  # fast: without the place of each token in the text
                encoded = self.loaded.encode_batch_fast(parts, add_special_tokens=False)
        except Exception as error:
            raise DataError(f"tokenizer=hf: it cannot encode the text {text[:40]!r}… ({shortened(error)})") from None
        ids = np.concatenate([np.array(part.ids, dtype=id_dtype(self.vocab_size)) for part in encoded])
        if self.decode_bytes(ids) != data:
            raise DataError(
                f"tokenizer=hf: it does not give back the text {text[:40]!r}…; allowed: a byte-level BPE that does; "
                "tokenizer=bpe trains one"
            )
        return ids

    def table(self) -> list[bytes]:
        table = [b""] * self.vocab_size
        for token, index in self.vocabulary.items():
            if index not in self.added:
                # An entry of other characters is never reached from bytes.
                table[index] = symbols_to_bytes(token) if BYTES.keys() >= set(token) else b""
            elif not self.added[index]["special"]:
                table[index] = utf8(self.added[index]["content"])
        return table

    def state(self) -> dict:
        return {"name": self.name, "json": self.content}


@contextlib.contextmanager
def panics_as_errors() -> Iterator[None]:
    """Makes of a panic of `tokenizers`, whose class no `except Exception` catches, a RuntimeError, and keeps back the
    fifty lines that it writes to the standard error."""
    sink, shown = os.open(os.devnull, os.O_WRONLY), os.dup(2)
    os.dup2(sink, 2)
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise RuntimeError(str(error)) from None
    finally:
        os.dup2(shown, 2)
        os.close(sink)
        os.close(shown)


def _json(content: str) -> object:
    try:
        return json.loads(content)
    except ValueError as error:
        raise ValueError(f"is no tokenizer.json ({shortened(error)})") from None


def shortened(said: object) -> str:
    return str(said)[:100] or type(said).__name__


def check_lossless(parsed: object) -> None:
    """Raises ValueError where a tokenizer.json is none of a byte-level BPE without any change of the text."""
    if not isinstance(parsed, dict) or not isinstance(parsed.get("model"), dict):
        raise ValueError("is no tokenizer.json of Hugging Face (it has no model)")
    model, words = parsed["model"], parsed.get("pre_tokenizer") or {}
    words = words.get("pretokenizers", [words])
    remedy = "; allowed: a byte-level BPE without a normalizer, which gives back every byte; tokenizer=bpe trains one"
    if model.get("type") != "BPE" or model.get("dropout"):
        raise ValueError(
            f"holds a {shortened(model.get('type'))} model{' with dropout' if model.get('dropout') else ''}{remedy}"
        )
    for affix in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(affix):
            raise ValueError(f"has a {affix} ({shortened(model[affix])}){remedy}")
    if any(token["content"] == "" for token in parsed.get("added_tokens") or []):
        raise ValueError(f"adds a token without text{remedy}")
    if parsed.get("normalizer"):
        raise ValueError(f"changes texts by a normalizer ({shortened(parsed['normalizer'].get('type'))}){remedy}")
    for part in words:
        lossless = part.get("type") in ("ByteLevel", "Split", "Digits", "Punctuation")
        if not lossless or part.get("add_prefix_space") or part.get("behavior") == "Removed":
            raise ValueError(f"changes texts by a pre-tokenizer ({shortened(part.get('type'))}){remedy}")
    if not any(part.get("type") == "ByteLevel" for part in words) or not set(BYTES) <= set(model["vocab"]):
        raise ValueError(f"is not byte-level, or lacks some of the 256 bytes{remedy}")


def boundary_of(parsed: dict) -> re.Pattern:
    """WORD_END where texts can be cut there without changing the ids; else NOWHERE, then about LONGEST characters are
    encoded together."""
    words = parsed["pre_tokenizer"]
    parts = words.get("pretokenizers", [words])
    cuts = False
    for part in parts:
        if part["type"] == "Split":
            isolated = part.get("behavior") == "Isolated" and not part.get("invert")
            if not isolated or part.get("pattern", {}).get("Regex") not in WORDS:
                return NOWHERE  # its matches may lie across any place
            cuts = True
        elif part["type"] == "ByteLevel":
            cuts |= part.get("use_regex", True)  # GPT-2's pattern
        # Digits and Punctuation look at a character alone
    # These are looked for in the text as it is, before it is split.
    across = any(
        WORD_END.search(token["content"]) or token.get("rstrip")
        for token in parsed.get("added_tokens", [])
        if not token["special"]
    )
    return WORD_END if cuts and not across else NOWHERE


def _content(config) -> str:
    """Of the file tokenizer.file. Raises ConfigError, DataError."""
    if not config.file:
        raise ConfigError("tokenizer.file", config.file, "a tokenizer.json", "say tokenizer.file=<file>")
    return content_of(config.file, "tokenizer.json")
