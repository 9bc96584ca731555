"""train.py as real processes: kill -9, signals, two processes on one run, and one line for an error."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import train
from gpt import runtime
from gpt.checkpoint import latest
from gpt.errors import ConfigError, RunError
from gpt.run import read_status
from gpt.runtime import Runtime
from tests.runs import SMALL, TEXT, composed, metrics, on_batch, status, write_corpus

ROOT = Path(__file__).parents[1]
RUN = Path("runs/default/a")
STEPS = ["name=a", "train.steps=60", "train.checkpoint_every=2", "train.eval_every=20"]

# train.py, whose batches take their time, so that a signal finds it at work
SLOW = f"""
import os, runpy, sys, time
sys.path.insert(0, {str(ROOT)!r})
import gpt.data

take, delays = gpt.data.Ahead.__next__, [float(one) for one in os.environ["DELAYS"].split()]

def following(ahead):
    time.sleep(delays.pop(0) if len(delays) > 1 else delays[0])
    return take(ahead)

gpt.data.Ahead.__next__ = following
if "SLOW_TEXT" in os.environ:
    import gpt.encode

    encode, gpt.encode.TASK = gpt.encode.encode, 1  # validation, test and training text: three tasks

    def encode_slowly(*task):
        open("tasks", "a").write("x")
        time.sleep(3)
        return encode(*task)

    gpt.encode.encode = encode_slowly
runpy.run_path({str(ROOT / "train.py")!r}, run_name="__main__")
"""


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_corpus(Path("corpus.txt"))
    Path("slow.py").write_text(SLOW)


@contextlib.contextmanager
def started(*overrides: str, delays: str = "0.05", launcher: tuple = ()):
    """The process of a slow train.py, which does not outlive the `with`."""
    command = [sys.executable, *launcher, "slow.py", *TEXT, *SMALL, *overrides]
    with open("err.txt", "w") as err:
        process = subprocess.Popen(
            command, env=os.environ | {"DELAYS": delays}, stdout=subprocess.DEVNULL, stderr=err, start_new_session=True
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for(condition, process: subprocess.Popen, seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, (process.returncode, Path("err.txt").read_text())
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.005)


def reached(step: int):
    """Whether the run has logged `step`."""

    def check() -> bool:
        try:
            lines = (RUN / "metrics.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return False
        return f'{{"step": {step},' in "".join(line[:20] for line in lines)

    return check


def training(folder: Path) -> list[tuple]:
    return [(line["step"], line["tokens"], line["loss"], line.get("val_loss")) for line in metrics(folder)]


def test_kill_9_and_signals_at_random_moments():
    step = 0
    for number, code in ((signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 0)):
        with started(*STEPS) as process:
            wait_for(reached(step + random.SystemRandom().randint(3, 9)), process)
            time.sleep(random.SystemRandom().uniform(0, 0.06))
            process.send_signal(number)
            assert process.wait(60) == code
        assert Path("err.txt").read_text() == ""
        assert read_status(RUN)["status"] == "interrupted"
        saved = latest(RUN / "checkpoints").step
        if number == signal.SIGKILL:
            assert status(RUN)["status"] == "running" and saved >= step
        else:  # the step was finished and saved
            assert saved == status(RUN)["step"] == metrics(RUN)[-1]["step"] > step
        step = saved
    assert train.main(*composed(*STEPS)) == 0
    assert train.main(*composed(*STEPS[1:], "name=straight")) == 0
    assert [line["step"] for line in metrics(RUN)] == list(range(1, 61))
    assert training(RUN) == training(RUN.parent / "straight")
    ours, theirs = (latest(folder / "checkpoints") for folder in (RUN, RUN.parent / "straight"))
    for kind in ("model_state", "optimizer_state"):
        a, b = getattr(ours, kind)(), getattr(theirs, kind)()
        assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_one_process_a_folder_and_a_second_signal():
    with started(*STEPS, delays="0 0 0 0 0 100") as process:
        wait_for(reached(5), process)
        with pytest.raises(RunError, match=f"process {process.pid} on {socket.gethostname()} is at work in it"):
            train.main(*composed(*STEPS))
        assert [line["step"] for line in metrics(RUN)] == list(range(1, 6))
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert process.poll() is None  # the step goes on
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 143
    assert status(RUN)["status"] == "interrupted" and latest(RUN / "checkpoints").step == 4


def test_a_signal_ends_a_preparation_that_the_next_run_goes_on_with(monkeypatch):
    with monkeypatch.context() as slow:
        slow.setenv("SLOW_TEXT", "1")
        with started(*STEPS) as process:
            wait_for(lambda: Path("tasks").exists() and len(Path("tasks").read_text()) >= 2, process)
            process.send_signal(signal.SIGTERM)
            assert process.wait(15) == 143
    assert Path("err.txt").read_text() == "" and status(RUN)["status"] == "interrupted"
    (draft,) = Path("data").rglob("progress.json")
    assert json.loads(draft.read_text())["reached"] != [0, 0]
    assert train.main(*composed(*STEPS)) == 0
    assert len(list(Path("data").rglob("meta.json"))) == 1 and not draft.exists()


def test_two_processes_are_one():
    """Same losses and weights as one process has; one folder with one writer; SIGTERM saves and stops both."""
    sizes = "train.batch_size=4", "train.accumulate=2", "model.dropout=0", "train.eval_every=4"
    torchrun = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"
    with started(*STEPS, *sizes, delays="0.02", launcher=torchrun) as process:
        wait_for(reached(9), process)
        process.terminate()
        process.wait(60)
    assert status(RUN)["status"] == "interrupted", Path("err.txt").read_text()
    saved = latest(RUN / "checkpoints")
    lines = metrics(RUN)
    assert [line["step"] for line in lines] == list(range(1, saved.step + 1)) and status(RUN)["step"] == saved.step >= 9
    assert [path.name for path in RUN.parent.iterdir()] == ["a"]

    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, saved.step)
        train.main(*composed(*STEPS[1:], *sizes, "name=one"))
    one = latest(RUN.parent / "one/checkpoints")
    assert one.step == saved.step
    for line, other in zip(lines, metrics(RUN.parent / "one"), strict=True):
        for key in ("step", "tokens", "loss", "lr", "grad_norm", "val_loss"):
            assert line.get(key) == pytest.approx(other.get(key), abs=1e-6), (line["step"], key)
    for key, value in one.model_state().items():
        torch.testing.assert_close(saved.model_state()[key], value, atol=1e-5, rtol=0)  # of ten steps of AdamW


def stop_at(patch: pytest.MonkeyPatch, step: int) -> None:
    on_batch(patch, lambda at, rows, *_: at == step - 1 and not rows.start and signal.raise_signal(signal.SIGTERM))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_batch_that_does_not_divide(monkeypatch, rank):
    monkeypatch.setattr(runtime, "start", lambda config: Runtime(torch.device("cpu"), torch.float32, rank, 2))
    with pytest.raises(ConfigError, match="train.batch_size: got 5, allowed: a multiple of the 2 processes"):
        train.main(*composed("train.batch_size=5"))
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["trian.steps=3"], "error: trian.steps: there is no such key; did you mean train.steps?"),
        (["position=rope", "model.n_layer=two"], "error: model.n_layer: got 'two', allowed: a whole number >= 1"),
    ],
)
def test_an_error_is_one_line_and_leaves_nothing(overrides, message):
    command = [sys.executable, str(ROOT / "train.py"), *overrides]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", message + "\n")
    assert sorted(path.name for path in Path().iterdir()) == ["corpus.txt", "slow.py"]
