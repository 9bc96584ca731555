"""The corpora. A folder each, whose package says what the corpus is made of; a new one is a folder and a row here.

Each package has
    KEYS                       the keys of DataConfig that it reads, beside COMMON
    label(config) -> str       what tells this corpus from another of the same name ("" where there is only one)
    source(config) -> Source   its documents; raises ConfigError for a key, DataError where the text is not there

Datasets of the Hugging Face hub that need no more than keys have only their YAML in configs/data.
"""

from dataclasses import fields
from types import ModuleType

from data import hf, jsonl, nanogpt, parquet, shakespeare_char, stdlib, text, wikitext
from gpt.errors import ConfigError
from gpt.schema import DataConfig

CORPORA: dict[str, ModuleType] = {
    "stdlib": stdlib,
    "shakespeare_char": shakespeare_char,
    "tinyshakespeare": shakespeare_char,
    "text": text,
    "jsonl": jsonl,
    "parquet": parquet,
    "nanogpt": nanogpt,
    "hf": hf,
    "wikitext2": wikitext,
    "wikitext103": wikitext,
    **dict.fromkeys(("openwebtext", "fineweb_edu", "pg19", "tinystories"), hf),
}
COMMON = {"name", "max_tokens", "packing"}


def package(config: DataConfig) -> ModuleType:
    """That of the corpus which `config` names. Raises ConfigError for a name that is not there, or a key."""
    if config.name not in CORPORA:
        raise ConfigError("data.name", config.name, " | ".join(CORPORA))
    found = CORPORA[config.name]
    for key in fields(config):
        given = getattr(config, key.name)
        if key.name not in COMMON | found.KEYS and given != key.default:
            default = {None: "null", False: "false"}.get(key.default, key.default)
            raise ConfigError(f"data.{key.name}", given, f"{default}, since data={config.name} does not read it")
    return found
