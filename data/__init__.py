"""The corpora. One folder each, whose package says what the corpus is made of; a new one is a folder and a row here.

Each package has
    label(config) -> str       what tells this corpus from another of the same name ("" where there is only one)
    source(config) -> Source   its documents; raises ConfigError for a key, DataError where the text is not there
"""

from data import shakespeare_char, stdlib, text

CORPORA = {"stdlib": stdlib, "shakespeare_char": shakespeare_char, "text": text}
