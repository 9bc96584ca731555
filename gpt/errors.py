"""Errors that are the user's to mend: one line, no traceback, exit code 2."""

import difflib


class UserError(Exception):
    """Says what is wrong, what was given and allowed, and the next command, in one line."""

    def __init__(self, message: str):
        super().__init__(" ".join(message.split()))


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
        UserError.__init__(self, f"{key}: there is no such key; {hint}the keys are {', '.join(keys)}")


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
