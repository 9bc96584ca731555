"""Tokenizers: text to ids and back, exactly. One module a kind; KINDS is the table of them.

`new_tokenizer` makes the one that a configuration names, `load_tokenizer` rebuilds one from what a corpus or a
checkpoint holds of it. Text is always ordinary text: no text is ever taken for a separator or another special token.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from gpt.documents import Document
from gpt.errors import ConfigError, DataError
from gpt.schema import TokenizerConfig
from gpt.tokenizer.base import Tokenizer, Unencodable, id_dtype
from gpt.tokenizer.bpe import ENCODINGS, TiktokenTokenizer, TrainedTokenizer
from gpt.tokenizer.byte import ByteTokenizer
from gpt.tokenizer.char import CharTokenizer
from gpt.tokenizer.hf import FileTokenizer

KINDS: dict[str, type[Tokenizer]] = {
    "byte": ByteTokenizer,
    "char": CharTokenizer,
    **dict.fromkeys(ENCODINGS, TiktokenTokenizer),
    "bpe": TrainedTokenizer,
    "hf": FileTokenizer,
}

__all__ = [
    "KINDS",
    "ByteTokenizer",
    "CharTokenizer",
    "FileTokenizer",
    "TiktokenTokenizer",
    "Tokenizer",
    "TrainedTokenizer",
    "Unencodable",
    "id_dtype",
    "load_tokenizer",
    "new_tokenizer",
    "tokenizer_label",
]


def tokenizer_label(config: TokenizerConfig) -> str:
    """A word for a folder's name: equal for two configurations exactly when they give the same tokenizer of a corpus.

    Raises ConfigError for a key that this tokenizer does not have, DataError for a file that cannot be used.
    """
    keys = {"file": ("char", "hf"), "vocab_size": ("bpe",)}
    for key, names in keys.items():
        if getattr(config, key) is not None and config.name not in names:
            allowed = f"null with tokenizer={config.name}; it belongs to tokenizer={' and '.join(names)}"
            raise ConfigError(f"tokenizer.{key}", getattr(config, key), allowed)
    return KINDS[config.name].label(config)


def new_tokenizer(config: TokenizerConfig, documents: Iterable[Document], limit: int | None = None) -> Tokenizer:
    """The tokenizer that `config` names.

    char takes its vocabulary from all of `documents`, bpe is trained on those of the training split; the others read
    none. Where only the first `limit` tokens are wanted, nothing is read that is certainly behind them.
    """
    kind = KINDS[config.name]
    return kind.new(config, documents if limit is None else _beginning(documents, limit * kind.longest))


def _beginning(documents: Iterable[Document], left: int) -> Iterator[Document]:
    """The first `left` characters of what is read of `documents`."""

    def blocks(document: Document) -> Iterator:
        nonlocal left
        for block in document.blocks:
            yield block[:left]
            left -= min(left, len(block))
            if not left:
                return

    for document in documents:
        yield replace(document, blocks=blocks(document))
        if not left:
            return


def load_tokenizer(state: dict) -> Tokenizer:
    """The tokenizer whose `state()` this is. Raises DataError where it is none."""
    name = state.get("name") if isinstance(state, dict) else None
    if not isinstance(name, str) or name not in KINDS:
        raise DataError(f"tokenizer: got the state {str(state)[:100]!r}, allowed: that of {', '.join(KINDS)}")
    try:
        tokenizer = KINDS[name].load(state)
    except DataError:
        raise
    except Exception as error:  # a stored state may be anything
        raise DataError(f"tokenizer {name}: the stored state is none ({str(error)[:100]})") from None
    if tokenizer.state() != state:
        raise DataError(f"tokenizer {name}: the stored state is not that of this version; prepare the data again")
    return tokenizer
