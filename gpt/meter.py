"""What a person watches while a corpus is prepared."""

import sys
import time
from collections.abc import Callable


class Meter:
    """How far a preparation is: a bar in a terminal (bytes, documents, time left), else a line now and then."""

    def __init__(self, total: int | None, log: Callable[[str], None]):
        self.total, self.log, self.bar, self.said = total, log, None, time.monotonic()

    def __enter__(self) -> "Meter":
        if sys.stdout.isatty():
            from rich import progress

            self.bar = progress.Progress(
                progress.TextColumn("[bold]{task.description}"),
                progress.BarColumn(bar_width=None),
                progress.DownloadColumn(),
                progress.TextColumn("{task.fields[documents]:,} documents"),
                progress.TransferSpeedColumn(),
                progress.TimeRemainingColumn(compact=True),
                progress.TextColumn("left"),
            )
            self.bar.start()
            self.task = None
        return self

    def __exit__(self, *_) -> None:
        if self.bar:
            self.bar.stop()

    def update(self, n_bytes: int, documents: int) -> None:
        if self.bar and self.task is None:  # at the first: what a resumed one has done already is no speed
            self.task = self.bar.add_task("preparing", total=self.total, completed=n_bytes, documents=documents)
        elif self.bar:
            self.bar.update(self.task, completed=n_bytes, documents=documents)
        elif time.monotonic() - self.said > 5:
            self.said = time.monotonic()
            share = f" ({min(1.0, n_bytes / self.total):.0%})" if self.total else ""
            self.log(f"  {n_bytes / 1e6:,.0f} MB{share}, {documents:,} documents so far")
