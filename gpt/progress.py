"""What a person watches while a run goes on: a bar in a terminal, plain lines elsewhere."""

import contextlib
import os
import sys
import time

PLAIN_SECONDS = 10  # at most one plain line in this time, evaluations aside
SPEED_COLUMNS = 100  # narrower terminals have no room for tokens/s


class Progress:
    """Step, losses, tokens/s and time left of one run; `say` prints a line beside them.

    with Progress("rope-s0", first=0, steps=2000) as progress:
        progress.update(10, loss=3.1, tokens_per_second=25000)
    """

    def __init__(self, name: str, first: int, steps: int, shown: bool = True):
        self.name, self.first, self.steps = name, first, steps
        self.shown = shown
        self.bar = None
        self.values: dict[str, float] = {}
        self.began = self.said = time.monotonic()

    def __enter__(self) -> "Progress":
        if self.shown and sys.stdout.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, RenderableColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar
            from rich.table import Column
            from rich.text import Text

            # rich narrows the columns that may wrap, the widest first: the name and the bar, never the numbers
            self.bar = Bar(
                RenderableColumn(Text(self.name, style="bold", no_wrap=True, overflow="ellipsis")),
                BarColumn(bar_width=None),
                MofNCompleteColumn(table_column=Column(no_wrap=True)),
                TextColumn("{task.fields[values]}"),
                TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
                TextColumn("left"),
                console=Console(file=Screen()),
            )
            self.bar.start()
            self.task = self.bar.add_task("", total=self.steps, completed=self.first, values="")
        return self

    def __exit__(self, *_) -> None:
        if self.bar:
            self.bar.stop()

    def update(self, step: int, **values: float | None) -> None:
        """Move to `step`; values that are not given keep what they were."""
        self.values |= {key: value for key, value in values.items() if value is not None}
        if self.bar:
            values = self.text(speed=self.bar.console.width >= SPEED_COLUMNS)
            self.bar.update(self.task, completed=step, values=values)
            return
        now = time.monotonic()
        if self.values and ("val_loss" in values or step == self.steps or now - self.said > PLAIN_SECONDS):
            self.said = now
            left = (now - self.began) / max(1, step - self.first) * (self.steps - step)
            after = f"  left {duration(left)}" if step > self.first else ""
            self.say(f"{self.name}  step {step:>{len(str(self.steps))}}/{self.steps}  {self.text()}{after}")

    def text(self, speed: bool = True) -> str:
        parts = {"loss": "loss {:.4f}", "val_loss": "val {:.4f}"}
        parts |= {"tokens_per_second": "{:,.0f} tok/s"} if speed else {}
        return "  ".join(form.format(self.values[key]) for key, form in parts.items() if key in self.values)

    def say(self, line: str) -> None:
        if not self.shown:
            return
        if self.bar:
            self.bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            say(line)


class Screen:
    """Standard output as it is now, whose loss stops no work: with `| head` gone or the terminal closed, the work goes
    on without words; metrics.jsonl has them all."""

    def __init__(self):
        self.output = sys.stdout  # not looked up later: a bar puts itself in its place

    def __getattr__(self, name: str):
        return getattr(self.output, name)

    def write(self, text: str) -> None:
        self._safely(self.output.write, text)

    def flush(self) -> None:
        self._safely(self.output.flush)

    def _safely(self, act, *values) -> None:
        try:
            act(*values)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.output.fileno())


def say(line: str) -> None:
    """Prints a line."""
    print(line, file=Screen(), flush=True)


class Clock:
    """Tokens a second, pauses left out."""

    def __init__(self):
        self.tokens = 0
        self.since = time.perf_counter()

    def speed(self) -> float:
        """Of the tokens counted since it was last asked."""
        now = time.perf_counter()
        speed = self.tokens / (now - self.since)
        self.tokens, self.since = 0, now
        return speed

    @contextlib.contextmanager
    def paused(self):
        """Around what is not training."""
        began = time.perf_counter()
        yield
        self.since += time.perf_counter() - began


def duration(seconds: float) -> str:
    """1:02 or 1:02:03"""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
