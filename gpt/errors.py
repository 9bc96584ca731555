"""Errors that are the user's to mend: one line, no traceback, exit code 2."""

import difflib


def shown(value: object, most: int = 200) -> str:
    """For a message: characters that cannot be printed are escaped, and of a long text the middle is left out."""
    text = str(value)
    if len(text) > most:
        text = f"{text[: most // 2]}…{text[1 - most // 2 :]}"
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class UserError(Exception):
    """Says what is wrong, what was given and allowed, and the next command, in one line."""

    def __init__(self, message: str):
        super().__init__(shown(" ".join(message.split()), 2000))


class ConfigError(UserError):
    """A configuration key with a value that is not allowed."""

    def __init__(self, key: str, given: object, allowed: str, next_step: str = ""):
        self.key = key
        words = {"None": "null", "True": "true", "False": "false"}  # as YAML says it
        shown = words.get(repr(given), repr(given))
        shown = shown if len(shown) <= 120 else shown[:117] + "..."
        super().__init__(f"{key}: got {shown}, allowed: {allowed}" + (f"; {next_step}" if next_step else ""))


class UnknownKey(ConfigError):
    """A configuration key that does not exist."""

    def __init__(self, key: str, keys: list[str]):
        self.key = key
        close = difflib.get_close_matches(key.rsplit(".", 1)[-1], keys, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        UserError.__init__(self, f"{shown(key)}: there is no such key; {hint}the keys are {', '.join(keys)}")


class DataError(UserError):
    """A text, a tokenizer or a token file that cannot be used."""


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged, or belongs to something else."""


class RunError(UserError):
    """A run folder that cannot be used."""


class LengthError(UserError):
    """A sequence longer than the position scheme reaches."""


class NonFiniteError(UserError):
    """A loss or gradient that is NaN or infinite."""
