"""How an entry point ends: what the user can mend is one line on stderr, an interrupt or a closed pipe no traceback."""

import os
import sys
from collections.abc import Callable
from typing import NoReturn

from gpt.errors import UserError


def guard(main: Callable[[], object]) -> None:
    """Calls main. Exit codes: 2 where it raises UserError, 130 for Ctrl-C, 1 where nobody reads its output any more.

    A character that the terminal does not have is printed as a question mark.
    """
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            main()
        finally:
            sys.stdout.flush()
    except UserError as error:
        fail(str(error))
    except BrokenPipeError:  # the reader of our output went away: | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:  # before a run is there to save anything
        sys.exit(130)


def fail(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)
