"""The bar of a run, as terminals of several widths show it."""

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpt.progress import Progress

LONG = "rope-s0-datatext-path_home_me_texts_my_pride-and-prejudice-0123abcd"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch, columns: int, name: str) -> str:
    """The last state of the bar of a run at half of 20,000 steps."""
    screen = Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("rich._console", None)  # the one that rich keeps has the width of its first day
    with Progress(name, first=0, steps=20000) as progress:
        progress.update(9000, loss=5.1149, val_loss=4.6237, tokens_per_second=123456)
        progress.update(10000)
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue()))
    return [line for line in lines if line.strip()][-1]


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("name", [LONG, "rope-s0", "[red] my run of " + 5 * "many words "])
def test_the_name_is_cut_before_anything_else(monkeypatch, columns, name):
    line = shown(monkeypatch, columns, name)
    assert len(line) <= columns
    for word in ("10000/20000", "loss 5.1149  val 4.6237", " left"):
        assert word in line
    assert re.search(r"(\d:\d\d|-:--) left$", line.rstrip())
    assert len(re.findall("[━╸╺]", line)) >= 6  # the bar itself
    assert ("123,456 tok/s" in line) == (columns >= 100)
    cut = line.partition("…" if "…" in line else " ━")[0]
    assert name.startswith(cut) and len(cut) >= 4


def test_a_short_name_is_whole(monkeypatch):
    assert shown(monkeypatch, 80, "alibi-s12").startswith("alibi-s12 ━")


CLOSED = """
import os, sys, time
from gpt.meter import Meter
from gpt.progress import Progress, say
watched = {watched}
with watched as bar:
    {update}
    time.sleep(0.3)
    print("open", file=sys.__stderr__, flush=True)  # not the one that the bar has put there
    sys.stdin.readline()
    for step in range(5):
        {update}
        time.sleep(0.1)
print("went on", file=sys.stderr)
"""


@pytest.mark.parametrize(
    "watched, update",
    [
        ('Progress("a", 0, 9)', "bar.update(3, val_loss=1.0); bar.say('words'); say('more')"),
        ("Meter(say)", "bar.update(10, 1, 0.5)"),
    ],
)
def test_a_terminal_that_is_closed_stops_no_work(watched, update):
    here, there = pty.openpty()
    command = [sys.executable, "-c", CLOSED.format(watched=watched, update=update)]
    root = Path(__file__).parents[1]
    child = subprocess.Popen(
        command,
        cwd=root,
        stdin=subprocess.PIPE,
        stdout=there,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TERM": "xterm"},
    )
    os.close(there)
    assert child.stderr.readline() == "open\n"
    assert "━" in os.read(here, 10000).decode()
    os.close(here)
    _, error = child.communicate("\n", timeout=30)
    assert (child.returncode, error) == (0, "went on\n")
