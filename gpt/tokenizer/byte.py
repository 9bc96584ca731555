"""tokenizer=byte: the bytes of UTF-8."""

import numpy as np

from gpt.tokenizer.base import Tokenizer, utf8


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8, and 256 as separator. Needs no files and knows every text."""

    name = "byte"
    vocab_size = 257
    separator = 256
    boundary = None

    @classmethod
    def new(cls, config, documents):
        return cls()

    @classmethod
    def load(cls, state):
        return cls()

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(utf8(text), dtype=np.uint8).astype(np.uint16)

    def table(self) -> list[bytes]:
        return [*(bytes([byte]) for byte in range(256)), b""]
