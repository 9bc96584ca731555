"""Errors that are the user's to mend: one line, no traceback, exit code 2."""


class UserError(Exception):
    """Says what is wrong, what was given and allowed, and the next command, in one line."""

    def __init__(self, message: str):
        super().__init__(" ".join(message.split()))


class ConfigError(UserError):
    """A configuration key with a value that is not allowed."""

    def __init__(self, key: str, given: object, allowed: str, next_step: str = ""):
        self.key = key
        shown = repr(given)
        shown = shown if len(shown) <= 120 else shown[:117] + "..."
        super().__init__(f"{key}: got {shown}, allowed: {allowed}" + (f"; {next_step}" if next_step else ""))


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
