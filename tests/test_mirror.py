"""The wandb mirror: a line each, nothing twice, nothing lost, no secret, and never in the way of training."""

import json
import os
import secrets
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest

from gpt import mirror
from gpt.errors import NonFiniteError
from gpt.mirror import mirror_evaluation
from gpt.run import Run
from tests.folders import config, fake_checkpoint, finish, metrics, quiet, status


class FakeRun:
    url = "https://wandb.example/run"

    def __init__(self, world, **arguments):
        self.world, self.arguments = world, arguments
        self.lines, self.defined, self.exit_code = [], {}, None
        resumed = arguments["mode"] == "online" and arguments["resume"] == "allow"
        self.step = world.steps.get(arguments["id"], 0) if resumed else 0  # the server knows where to count on

    def define_metric(self, name, step_metric=None):
        self.defined[name] = step_metric

    def log(self, values, step=None):
        if self.world.broken:
            raise ConnectionResetError("Connection lost")
        if step is not None and step < self.step:
            return  # wandb drops such a line with no more than a warning
        self.step = self.step if step is None else step
        self.lines.append((self.step, values))
        self.step += step is None
        self.world.steps[self.arguments["id"]] = self.step + (step is not None)

    def finish(self, exit_code=None):
        self.world.pass_(self.world.hang_at_end)
        assert self.exit_code is None, "finished twice"
        self.exit_code = exit_code


class FakeWandb(types.ModuleType):
    def __init__(self):
        super().__init__("wandb")
        self.runs, self.steps, self.broken, self.error = [], {}, False, None
        self.hang = self.hang_at_end = False
        self.free = threading.Event()  # ends what hangs

    def pass_(self, hang):
        if hang:
            assert self.free.wait(60)

    def Settings(self, **settings):
        return settings

    def Table(self, columns, data):
        return {"columns": columns, "data": data}

    def setup(self, settings):
        pass

    def init(self, **arguments):
        self.pass_(self.hang)
        if self.error:
            raise self.error
        self.runs.append(FakeRun(self, **arguments))
        return self.runs[-1]


@pytest.fixture
def wandb(monkeypatch, tmp_path):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    return fake


def test_wandb_gets_the_run(tmp_path, wandb):
    lines = []
    made = config(wandb__mode="offline")
    with Run(made, tmp_path, lines.append) as run:
        run.log(10, tokens=7680, loss=2.0, grad_norm=float("nan"))
        run.log(10, tokens=7680, val_loss=2.1)
        run.done(10)
    (mirror,) = wandb.runs
    asked = mirror.arguments
    assert asked["group"] == "pos" and asked["name"] == "rope-s1" and asked["project"] == "nanope"
    assert asked["tags"] == ["rope", "stdlib", "mine"] and asked["config"] == made and asked["mode"] == "offline"
    assert asked["resume"] == "allow" and asked["dir"] == str(run.folder) and asked["id"] == status(run.folder)["wandb"]
    assert mirror.lines == [
        (10, {"step": 10, "tokens": 7680, "loss": 2.0}),
        (10, {"step": 10, "tokens": 7680, "val_loss": 2.1}),
    ]
    assert mirror.defined["loss"] == mirror.defined["val_loss"] == "tokens"
    assert mirror.defined["tokens"] is None and mirror.defined["eval/*"] == "eval_length"
    assert mirror.exit_code == 0 and len(lines) == 1


@pytest.mark.parametrize(
    "asked, environment, expected",
    [
        ("auto", {}, "offline"),
        ("auto", {"WANDB_API_KEY": "x" * 40}, "online"),
        ("auto", {"netrc": "api.wandb.ai"}, "online"),
        ("auto", {"netrc": "example.org"}, "offline"),
        ("auto", {"netrc": "wandb.me.org", "WANDB_BASE_URL": "https://wandb.me.org:8080"}, "online"),
        ("auto", {"WANDB_API_KEY": "x" * 40, "WANDB_MODE": "offline"}, "offline"),
        ("auto", {"WANDB_MODE": "disabled"}, None),
        ("online", {"WANDB_API_KEY": "x" * 40}, "online"),
        ("offline", {"WANDB_API_KEY": "x" * 40}, "offline"),
        ("disabled", {"WANDB_API_KEY": "x" * 40}, None),
        ("online", {}, None),
    ],
)
def test_wandb_modes(tmp_path, wandb, monkeypatch, asked, environment, expected):
    for key, value in environment.items():
        if key == "netrc":
            (tmp_path / "netrc").write_text(f"machine {value} login user password secret\n")
            (tmp_path / "netrc").chmod(0o600)
        else:
            monkeypatch.setenv(key, value)
    lines = []
    with Run(config(wandb__mode=asked), tmp_path, lines.append) as run:
        run.done(100)
    assert [one.arguments["mode"] for one in wandb.runs] == ([expected] if expected else [])
    assert any("warning" in line for line in lines) == (asked == "online" and not expected)


def test_steps_are_not_sent_twice(tmp_path, wandb):
    made = config(wandb__mode="offline")
    with Run(made, tmp_path, quiet) as run:
        fake_checkpoint(run.folder, 20)
        for step in range(1, 28):
            run.log(step, loss=step / 7)
        # killed before the val_loss line of step 27
    with Run(made, tmp_path, quiet) as run:
        run.resume_at(20)
        for step in range(21, 31):
            run.log(step, loss=step / 7)
            if step == 27:
                run.log(step, val_loss=1.0)
        run.done(30)
    first, second = wandb.runs
    assert first.arguments["id"] == second.arguments["id"] and first.exit_code == 1 and second.exit_code == 0
    sent = [(step, "val_loss" in values) for step, values in first.lines + second.lines]
    assert sent == [(step, False) for step in range(1, 28)] + [(27, True)] + [(step, False) for step in range(28, 31)]
    assert [(line["step"], "val_loss" in line) for line in metrics(run.folder)] == sorted(sent)


def test_a_repeated_start_from_nothing_is_another_wandb_run(tmp_path, wandb):
    for _ in range(2):
        with Run(config(wandb__mode="offline"), tmp_path, quiet) as run:
            assert run.decision == "fresh"
            run.log(1, loss=1.0)
    assert wandb.runs[0].arguments["id"] != wandb.runs[1].arguments["id"]
    assert [len(one.lines) for one in wandb.runs] == [1, 1]


def test_runs_of_one_process_are_finished_each(tmp_path, wandb):
    for name in ("a", "b", "c"):
        try:
            with Run(config(name=name, wandb__mode="offline"), tmp_path, quiet) as run:
                run.log(1, loss=1.0)
                if name == "b":
                    raise NonFiniteError("nan")
                run.done(1)
        except NonFiniteError:
            pass
    assert [one.exit_code for one in wandb.runs] == [0, 1, 0]
    assert len({one.arguments["id"] for one in wandb.runs}) == 3


@pytest.mark.parametrize("fault", ["missing", "error", "exit", "hang", "broken", "hang at end"])
def test_wandb_never_hurts_training(tmp_path, wandb, monkeypatch, fault):
    monkeypatch.setattr(mirror, "WANDB_SECONDS", 0.3)
    if fault == "missing":
        monkeypatch.setitem(sys.modules, "wandb", None)
    wandb.error = {"error": RuntimeError("no\nnet"), "exit": SystemExit(1)}.get(fault)
    wandb.hang, wandb.hang_at_end = fault == "hang", fault == "hang at end"
    lines = []
    with Run(config(wandb__mode="offline"), tmp_path, lines.append) as run:
        for step in range(1, 11):
            wandb.broken = fault == "broken" and step > 5
            run.log(step, loss=1.0)
            time.sleep(0.01)
        run.done(10)
    assert not wandb.free.is_set()  # what hangs has hung all the while
    wandb.free.set()
    warnings = [line for line in lines if "warning" in line]
    assert len(warnings) == 1 and "wandb" in warnings[0] and "\n" not in warnings[0]
    assert len(metrics(run.folder)) == 10 and status(run.folder)["status"] == "done" and run.exit_code == 0
    if fault == "hang":  # what comes up too late is closed, not left running
        until = time.monotonic() + 60
        while [one.exit_code for one in wandb.runs] != [1]:
            assert time.monotonic() < until
            time.sleep(0.01)


ROWS = [
    {"run": "rope-s1", "eval_length": 64, "protocol": "disjoint", "scaling": "none", "overflow": None, "status": "ok"}
    | {"loss": 2.0, "tail_loss": None, "bits_per_byte": 2.9, "position_curve": [2.5, 1.5]},
    {"run": "rope-s1", "eval_length": 128, "protocol": "disjoint", "scaling": "none", "overflow": "clamp"}
    | {"status": "ok", "loss": 2.5, "tail_loss": 3.0, "bits_per_byte": 3.1},
    {"run": "rope-s1", "eval_length": 256, "protocol": "sliding", "scaling": "none", "status": "unsupported"}
    | {"loss": None, "reason": "table has 64 rows"},
]


def test_evaluation_rows_are_a_table_and_points(tmp_path, wandb, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    folder = finish(tmp_path, config(wandb__mode="online"))
    mirror_evaluation(folder, ROWS, quiet)
    training, mirror = wandb.runs
    assert mirror.arguments["id"] == training.arguments["id"] and mirror.exit_code == 0
    (_, table), *points = mirror.lines
    assert table["eval/rows"]["columns"][:2] == ["run", "eval_length"] and len(table["eval/rows"]["data"]) == 3
    assert [values for _, values in points] == [
        {"eval_length": 64, "eval/disjoint/loss": 2.0, "eval/disjoint/bits_per_byte": 2.9},
        {
            "eval_length": 128,
            "eval/disjoint-clamp/loss": 2.5,
            "eval/disjoint-clamp/tail_loss": 3.0,
            "eval/disjoint-clamp/bits_per_byte": 3.1,
        },
    ]
    steps = [step for step, _ in mirror.lines]
    assert steps == sorted(set(steps)) and steps[0] > 100, "after training's steps, each its own"


def test_a_second_evaluation_loses_nothing(tmp_path, wandb, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    folder = finish(tmp_path, config(wandb__mode="online"))
    mirror_evaluation(folder, ROWS[:1], quiet)
    mirror_evaluation(folder, ROWS, quiet)
    _, first, second = wandb.runs
    assert [len(one.lines) for one in (first, second)] == [1 + 1, 1 + 2]
    assert [len(one.lines[0][1]["eval/rows"]["data"]) for one in (first, second)] == [1, 3]
    steps = [step for step, _ in first.lines + second.lines]
    assert steps == sorted(set(steps)), "each its own"


def test_evaluation_of_an_unmirrored_run_starts_no_wandb(tmp_path, wandb):
    folder = finish(tmp_path, config(wandb__mode="disabled"))
    mirror_evaluation(folder, ROWS, quiet)
    mirror_evaluation(tmp_path / "no such run", ROWS, quiet)
    assert wandb.runs == []


def test_a_real_offline_run_keeps_secrets(tmp_path):
    """The real wandb in a process of its own, two secrets in its environment, and an error that shows both."""
    pytest.importorskip("wandb")
    key, other = "secret-" + secrets.token_hex(20), secrets.token_urlsafe(16)
    code = f"""
import json, os, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).resolve().parent.parent)!r})
from gpt.mirror import mirror_evaluation
from gpt.run import Run
made, rows = json.loads({json.dumps(config(wandb__mode="offline"))!r}), json.loads({json.dumps(ROWS)!r})
try:
    with Run(made, Path({str(tmp_path)!r})) as run:
        for step in range(1, 6):
            run.log(step, tokens=step * 768, loss=1 / step)
        raise ValueError("token was " + os.environ["MY_SECRET"] + " and " + os.environ["WANDB_API_KEY"])
except ValueError:
    mirror_evaluation(run.folder, rows)
"""
    environment = {**os.environ, "WANDB_API_KEY": key, "MY_SECRET": other, "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    output = done.stdout + done.stderr
    assert len(output.splitlines()) == 1 and "wandb sync" in output, output
    folder = tmp_path / "pos" / "rope-s1"
    logs = list((folder / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(logs) == 2 and all(log.stat().st_size > 500 for log in logs)
    assert {log.stem for log in logs} == {f"run-{status(folder)['wandb']}"}
    assert "***" in status(folder)["error"]
    for path in tmp_path.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert key.encode() not in content and other.encode() not in content, path
    assert key not in output and other not in output
