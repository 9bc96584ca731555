"""tokenizer=char: the characters of one corpus."""

import hashlib
import json
import reprlib

import numpy as np

from gpt.errors import DataError
from gpt.tokenizer.base import Tokenizer, Unencodable, blocks_of, content_of, id_dtype


class CharTokenizer(Tokenizer):
    """The characters of one corpus by code point, those of the test split too, as nanoGPT takes them for
    shakespeare_char. No separator.

    With tokenizer.file they are those of a JSON file: one text, or a list of one-letter texts, in the order of the ids.
    """

    name = "char"
    separator = None
    boundary = None

    def __init__(self, characters: str):
        if not is_vocabulary(characters):
            raise DataError("tokenizer char: its characters must be at least one, each once, in order of code points")
        self.characters = characters
        self.vocab_size = len(characters)
        self._ids = np.full(0x110000, -1, np.int32)  # code point -> id
        self._ids[[ord(c) for c in characters]] = np.arange(self.vocab_size)

    @classmethod
    def new(cls, config, documents):
        if config.file is not None:
            return cls(_characters(config.file))
        characters: set[str] = set()
        for document in documents:
            for block in blocks_of(document):
                characters.update(block)
        if not characters:
            raise DataError("tokenizer=char: the texts are empty, so there are no characters to take")
        return cls("".join(sorted(characters)))

    @classmethod
    def load(cls, state):
        return cls(state["characters"])

    @classmethod
    def label(cls, config) -> str:
        if config.file is None:
            return "char"
        return "char" + hashlib.sha256(_characters(config.file).encode()).hexdigest()[:8]

    def encode(self, text: str) -> np.ndarray:
        codes = np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype=np.uint32)
        ids = self._ids[codes]
        if len(ids) and ids.min() < 0:
            first = int(np.argmax(ids < 0))
            shown = self.characters if self.vocab_size <= 100 else self.characters[:100] + "…"
            raise Unencodable(
                first,
                f"{text[first]!r} (U+{ord(text[first]):04X}), which is not among the {self.vocab_size} characters of "
                f"tokenizer=char {shown!r}; tokenizer=byte knows every text",
            )
        return ids.astype(id_dtype(self.vocab_size))

    def table(self) -> list[bytes]:
        return [c.encode("utf-8") for c in self.characters]

    def state(self) -> dict:
        return {"name": self.name, "characters": self.characters}


def _characters(path: str) -> str:
    """The characters in the JSON file `path`. Raises DataError."""
    content = content_of(path, "JSON file of characters")
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"tokenizer.file: {path} is no JSON ({error})") from None
    if isinstance(value, list) and all(isinstance(c, str) and len(c) == 1 for c in value):
        value = "".join(value)
    if not is_vocabulary(value):
        raise DataError(
            f"tokenizer.file: {path} holds {reprlib.repr(value)}; allowed: the characters of the vocabulary as one "
            "JSON text or a list, each once, in order of code points"
        )
    return value


def is_vocabulary(value: object) -> bool:
    """Whether it is characters, at least one, each once, in order of code points, and none is half a surrogate pair."""
    if not isinstance(value, str) or not 0 < len(value) <= 0x110000:
        return False
    return list(value) == sorted(set(value)) and not any("\ud800" <= character <= "\udfff" for character in value)
