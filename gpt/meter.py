"""What a person watches while a corpus is prepared."""

import sys
import time
from collections.abc import Callable

from gpt.progress import Screen


class Meter:
    """How far a preparation is: a bar in a terminal (bytes, documents, time left), else a line now and then."""

    def __init__(self, log: Callable[[str], None]):
        self.log, self.bar, self.said = log, None, time.monotonic()

    def __enter__(self) -> "Meter":
        if sys.stdout.isatty():
            from rich import console, progress

            self.bar = progress.Progress(
                progress.TextColumn("[bold]{task.description}"),
                progress.BarColumn(bar_width=None),
                progress.TaskProgressColumn(),
                progress.TextColumn("{task.fields[told]}"),
                progress.TimeRemainingColumn(compact=True),
                progress.TextColumn("left"),
                console=console.Console(file=Screen()),
            )
            self.bar.start()
            self.task = None
        return self

    def __exit__(self, *_) -> None:
        if self.bar:
            self.bar.stop()

    def update(self, n_bytes: int, documents: int, share: float | None) -> None:
        """So much is read; `share` of all, None where nobody knows."""
        told = f"{n_bytes / 1e6:,.0f} MB, {documents:,} document{'s' * (documents != 1)}"
        if self.bar:
            # What a resumed preparation has done already is no speed: the first share is where the bar begins.
            if self.task is None:
                self.task = self.bar.add_task("preparing", completed=share or 0, total=None, told=told)
            self.bar.update(self.task, completed=share or 0, total=None if share is None else 1, told=told)
        elif time.monotonic() - self.said > 5:
            self.said = time.monotonic()
            self.log(f"  {told} so far" if share is None else f"  {told} so far ({share:.0%})")
