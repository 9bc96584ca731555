"""The internet: a file is checked by sha256 and kept only when whole, and nobody who does not answer is waited for."""

import hashlib
import queue
import threading
import urllib.error
import urllib.request
from pathlib import Path

from gpt.files import write_atomic

PATIENCE = 2.5  # seconds until the server must have answered; after that, the longest pause between two packets


def download(url: str, sha256: str, target: Path) -> None:
    """Puts what `url` holds into the file `target`. Raises OSError with the reason in a few words."""
    content = _said(_ask(url).get())
    if hashlib.sha256(content).hexdigest() != sha256:
        raise OSError("what came is not the expected file (its sha256 differs)")
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(target, content)


def reach(url: str) -> None:
    """Returns when a server answers, whatever it says. Raises OSError with the reason in a few words."""
    try:
        _ask(url)
    except Refused:
        pass


class Refused(OSError):
    """The server is there, but does not give the file."""


def _ask(url: str) -> queue.Queue:
    """Returns when the server begins to send; what it sends, or an error, will be in the queue. Raises OSError."""
    answers: queue.Queue = queue.Queue()

    def work():
        try:
            with urllib.request.urlopen(url, timeout=PATIENCE) as response:
                answers.put(b"")
                answers.put(response.read())
        except Exception as error:  # whatever it was, the caller must hear of it
            answers.put(error)

    # In a thread, because the name look-up obeys no timeout.
    threading.Thread(target=work, daemon=True).start()
    try:
        _said(answers.get(timeout=PATIENCE))
    except queue.Empty:
        raise OSError(f"no answer in {PATIENCE:g} s") from None
    return answers


def _said(answer: bytes | Exception) -> bytes:
    """`answer`, or OSError with the reason where it is an error."""
    if isinstance(answer, urllib.error.HTTPError):
        raise Refused(f"HTTP {answer.code}")
    if isinstance(answer, Exception):
        reason = getattr(answer, "reason", None) or answer
        raise OSError(str(getattr(reason, "strerror", None) or reason))
    return answer
