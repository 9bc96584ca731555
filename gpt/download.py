"""A file from the internet: checked by sha256, kept only when whole, and never waited for when nobody answers."""

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
    answers: queue.Queue = queue.Queue()

    def work():
        try:
            with urllib.request.urlopen(url, timeout=PATIENCE) as response:
                answers.put(None)
                answers.put(response.read())
        except Exception as error:  # whatever it was, the caller must hear of it
            answers.put(error)

    # In a thread, because the name look-up obeys no timeout.
    threading.Thread(target=work, daemon=True).start()
    try:
        answer = answers.get(timeout=PATIENCE)
    except queue.Empty:
        raise OSError(f"no answer in {PATIENCE:g} s") from None
    if answer is None:
        answer = answers.get()
    if isinstance(answer, urllib.error.HTTPError):
        raise OSError(f"HTTP {answer.code}")
    if isinstance(answer, Exception):
        reason = getattr(answer, "reason", None) or answer
        raise OSError(str(getattr(reason, "strerror", None) or reason))
    if hashlib.sha256(answer).hexdigest() != sha256:
        raise OSError("what came is not the expected file (its sha256 differs)")
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(target, answer)
