"""A run's folder: its name, who holds it, what a second start does, and a status that is honest on every way out."""

import copy
import errno
import itertools
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest
import yaml

from gpt import mirror
from gpt import run as run_module
from gpt.errors import ConfigError, NonFiniteError, RunError
from gpt.run import Run, already_done, folder_name, mark_killed, mirror_evaluation, read_status

CONFIG = {
    "seed": 1,
    "sweep": "pos",
    "name": "rope-s1",
    "model": {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64, "dropout": 0.0, "bias": False},
    "position": {"name": "rope", "layers": "P", "base": 10000.0},
    "data": {"name": "stdlib", "path": None},
    "tokenizer": {"name": "byte"},
    "optim": {"lr": 1e-3, "min_lr": 1e-4, "beta1": 0.9, "schedule": "cosine"},
    "train": {"steps": 100, "batch_size": 12, "accumulate": 1, "eval_every": 50, "checkpoint_every": 50}
    | {"log_every": 10, "eval_tokens": 1024},
    "eval": {"tokens": 4096, "stride": None},
    "runtime": {"device": "auto"},
    "wandb": {"mode": "disabled", "project": "nanope", "entity": None, "tags": ["mine"]},
}


def config(**changes) -> dict:
    """CONFIG with dotted keys changed (two underscores for a dot)."""
    made = copy.deepcopy(CONFIG)
    for key, value in changes.items():
        *path, last = key.split("__")
        section = made
        for part in path:
            section = section[part]
        section[last] = value
    return made


def quiet(line: str) -> None:
    pass


def status(folder: Path) -> dict:
    return json.loads((folder / "status.json").read_text())


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def fake_checkpoint(folder: Path, step: int) -> None:
    (folder / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)


def finish(root: Path, made: dict, steps: int | None = None) -> Path:
    steps = steps or made["train"]["steps"]
    with Run(made, root, quiet) as run:
        if run.decision == "resume":
            run.resume_at(0)
        fake_checkpoint(run.folder, steps)
        run.log(steps, loss=1.0)
        run.done(steps)
    return run.folder


# Names


@pytest.mark.parametrize(
    "overrides, changes, expected",
    [
        ([], {}, "rope-s1"),
        (["position=rope", "seed=1"], {}, "rope-s1"),
        (["optim.lr=1e-4"], {"optim__lr": 1e-4}, "rope-s1-lr1e-4"),
        (["optim.lr=0.0001"], {"optim__lr": 1e-4}, "rope-s1-lr1e-4"),
        (["++optim.lr=0.0001"], {"optim__lr": 1e-4}, "rope-s1-lr1e-4"),
        (["model=small"], {}, "rope-s1-modelsmall"),
        (["position.base=500000"], {"position__base": 500000.0}, "rope-s1-base500000"),
        (["position.layers=PPPN"], {"position__layers": "PPPN"}, "rope-s1-layersPPPN"),
        (
            ["model.dropout=0.2", "optim.lr=2e-3"],
            {"model__dropout": 0.2, "optim__lr": 2e-3},
            "rope-s1-dropout0.2-lr2e-3",
        ),
        (["model.bias=true"], {"model__bias": True}, "rope-s1-biastrue"),
        (["model=gpt2-medium"], {}, "rope-s1-modelgpt2-medium"),
        (["data.name=text"], {"data__name": "text"}, "rope-s1-data.nametext"),
    ],
)
def test_folder_names(overrides, changes, expected):
    assert folder_name(config(name="", **changes), overrides) == expected


def test_what_does_not_change_the_run_does_not_change_its_name():
    ignored = ["position=rope", "seed=3", "sweep=x", "name=", "experiment=smoke", "wandb.mode=offline", "wandb=off"]
    ignored += ["runtime.device=cpu", "eval.tokens=1", "train.log_every=1", "train.eval_every=1", "train.eval_tokens=7"]
    ignored += ["train.checkpoint_every=1", "hydra.mode=RUN", "hydra/launcher=processes", "+experiment=smoke"]
    for n in (0, 1, len(ignored)):
        assert folder_name(config(name=""), random.sample(ignored, n)) == "rope-s1"


def test_the_order_of_overrides_does_not_matter():
    made = config(name="", optim__lr=1e-4, model__dropout=0.1, data__path="/a b/c")
    overrides = ["optim.lr=1e-4", "model.dropout=0.1", "data.path='/a b/c'", "seed=1"]
    assert len({folder_name(made, list(order)) for order in itertools.permutations(overrides)}) == 1


def test_other_configurations_never_share_a_name():
    """Lists, slashes, =, spaces, long and tricky values: short names of plain characters, all different."""
    values = [
        "a",
        "a/b",
        "a_b",
        "a b",
        "a=b",
        "a-lr2",
        "ab",
        "a,b",
        "[a]",
        "é",
        "ê",
        "x" * 200,
        "x" * 201,
        "../a",
        "A.b",
    ]
    names = {}
    for path, lr, name in itertools.product(values, (1e-3, 2.5e-4, 1 / 3), ("stdlib", "a")):
        overrides = [f"data.path={path}", f"optim.lr={lr}", f"data.name={name}"]
        made = config(name="", data__path=path, optim__lr=lr, data__name=name)
        names.setdefault(folder_name(made, overrides), set()).add((path, lr, name))
    assert all(len(which) == 1 for which in names.values())
    for name in names:
        assert len(name) <= 60 and set(name) <= set(
            "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-"
        ), name
    tags = [folder_name(config(name=""), [f"tokenizer={t}"]) for t in ("byte", "'byte'", "gpt2")]
    assert len(set(tags)) == 3


def test_a_name_given_wins_and_is_checked(tmp_path):
    assert folder_name(config(name="my run"), ["optim.lr=1"]) == "my run"
    for bad in ("a/b", "..", ".", "\\x", "a\0b", "a\nb", "x" * 101, " a", "...", 3):
        with pytest.raises(ConfigError, match="^name: got"):
            folder_name(config(name=bad), [])
    for bad in ("", "..", "a/b", None, 3):
        with pytest.raises(ConfigError, match="^sweep: got"):
            Run(config(sweep=bad), tmp_path)
    assert not list(tmp_path.iterdir())


# Decisions


def test_fresh_then_skip(tmp_path):
    made = config()
    with Run(made, tmp_path, quiet) as run:
        assert run.decision == "fresh" and run.folder == tmp_path / "pos" / "rope-s1"
        run.note(device="cpu", threads=2)
        found = status(run.folder)
        assert found["status"] == "running" and found["pid"] == os.getpid() and found["device"] == "cpu"
        assert not already_done(made, tmp_path)
        run.log(100, loss=1.0)
        run.done(100)
    assert run.exit_code == 0
    assert yaml.safe_load((run.folder / "config.yaml").read_text()) == made
    found = status(run.folder)
    assert found["status"] == "done" and found["step"] == 100 and found["error"] is None and found["seconds"] >= 0
    assert {"python", "torch", "numpy", "nanope"} == set(found["versions"])
    assert already_done(made, tmp_path)
    before = {p.name: p.read_bytes() for p in run.folder.iterdir() if p.is_file()}
    with Run(made, tmp_path, quiet) as again:
        assert again.decision == "skip"
    assert again.exit_code == 0
    assert before == {p.name: p.read_bytes() for p in run.folder.iterdir() if p.is_file()}


@pytest.mark.parametrize("how", ["interrupted", "failed", "killed"])
def test_what_did_not_finish_goes_on(tmp_path, how):
    made = config()
    for attempt, decision in enumerate(("fresh", "fresh", "resume")):
        if how == "killed":
            child = os.fork()
            if child == 0:
                run = Run(made, tmp_path, quiet).__enter__()
                if run.decision == "resume":
                    run.resume_at(50)
                run.log(60, loss=1.0)
                os.kill(os.getpid(), signal.SIGKILL)
            os.waitpid(child, 0)
            folder = tmp_path / "pos" / "rope-s1"
            assert status(folder)["status"] == "running" and read_status(folder)["status"] == "interrupted"
        else:
            try:
                with Run(made, tmp_path, quiet) as run:
                    assert run.decision == decision
                    if decision == "resume":
                        run.resume_at(50)
                    run.log(60, loss=1.0)
                    if how == "failed":
                        raise NonFiniteError("loss is nan at step 61")
            except NonFiniteError:
                pass
            folder = run.folder
            assert status(folder)["status"] == how
        if attempt == 1:
            fake_checkpoint(folder, 50)
    assert len(metrics(folder)) == 1


FREE = {
    "wandb__mode": "auto",
    "runtime__device": "cpu",
    "eval__tokens": 1,
    "train__log_every": 1,
    "train__eval_every": 1,
    "train__checkpoint_every": 7,
    "train__eval_tokens": 9,
}
TUNABLE = {"optim__lr": 5e-4, "optim__schedule": "wsd", "train__batch_size": 6, "train__accumulate": 2}
STRUCTURE = {
    "seed": 2,
    "model__n_embd": 64,
    "model__bias": True,
    "position__name": "alibi",
    "position__base": 5e5,
    "data__path": "/x",
    "tokenizer__name": "char",
}


@pytest.mark.parametrize("done", [False, True])
def test_free_keys_may_differ(tmp_path, monkeypatch, done):
    monkeypatch.setitem(sys.modules, "wandb", None)
    lines = []
    folder = interrupted(tmp_path) if not done else finish(tmp_path, config())
    made = config(**FREE)
    assert already_done(made, tmp_path) == done
    with Run(made, tmp_path, lines.append) as run:
        assert run.decision == ("skip" if done else "resume")
        if not done:
            run.resume_at(50)
            assert yaml.safe_load((folder / "config.yaml").read_text()) == made
    assert not any("->" in line for line in lines) and status(folder)["changes"] == []


def interrupted(root: Path) -> Path:
    with Run(config(), root, quiet) as run:
        fake_checkpoint(run.folder, 50)
        run.log(50, loss=1.0)
    return run.folder


def test_tunable_keys_are_applied_and_logged(tmp_path):
    folder, lines = interrupted(tmp_path), []
    made = config(train__steps=200, **TUNABLE)
    with Run(made, tmp_path, lines.append) as run:
        assert run.decision == "resume"
        assert yaml.safe_load((folder / "config.yaml").read_text()) == CONFIG, "not before the checkpoint is loaded"
        run.resume_at(50)
    assert yaml.safe_load((folder / "config.yaml").read_text()) == made
    changes = {one["key"]: (one["step"], one["old"], one["new"]) for one in status(folder)["changes"]}
    assert changes == {
        "optim.lr": (50, 1e-3, 5e-4),
        "optim.schedule": (50, "cosine", "wsd"),
        "train.steps": (50, 100, 200),
        "train.batch_size": (50, 12, 6),
        "train.accumulate": (50, 1, 2),
    }
    assert any("optim.lr" in line and "0.001 -> 0.0005" in line for line in lines)
    with Run(made, tmp_path, quiet) as run:
        run.resume_at(50)
    assert len(status(folder)["changes"]) == 5, "kept, and not again"


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("key", STRUCTURE)
def test_structure_is_refused(tmp_path, done, key):
    folder = finish(tmp_path, config()) if done else interrupted(tmp_path)
    before = (folder / "config.yaml").read_text(), (folder / "status.json").read_text()
    dotted, old = key.replace("__", "."), str(run_module.flatten(CONFIG)[key.replace("__", ".")])
    for act in (lambda made: Run(made, tmp_path, quiet).__enter__(), lambda made: already_done(made, tmp_path)):
        with pytest.raises(RunError, match="another configuration") as error:
            act(config(optim__lr=7.0, **{key: STRUCTURE[key]}))
        line = str(error.value)
        assert f"{dotted}: " in line and old in line and str(STRUCTURE[key]) in line and "optim" not in line
    assert before == ((folder / "config.yaml").read_text(), (folder / "status.json").read_text())
    if not done:
        with Run(config(), tmp_path, quiet) as run:  # the refused one let go of the lock
            run.resume_at(50)


def test_a_done_run_changes_only_by_more_steps(tmp_path):
    folder = finish(tmp_path, config())
    for changes in (TUNABLE, {"train__steps": 50}):
        with pytest.raises(RunError, match="is done after 100 steps") as error:
            Run(config(**changes), tmp_path, quiet).__enter__()
        assert all(key.replace("__", ".") in str(error.value) for key in changes)
    with Run(config(train__steps=150, optim__lr=2e-3), tmp_path, quiet) as run:
        assert run.decision == "resume"
        run.resume_at(100)
        run.log(150, loss=0.5)
        run.done(150)
    assert [line["step"] for line in metrics(folder)] == [100, 150]
    (folder / "checkpoints" / "step-000100").rmdir()
    with pytest.raises(RunError, match="checkpoints are gone"):
        Run(config(train__steps=200, optim__lr=2e-3), tmp_path, quiet).__enter__()


def test_fewer_steps_than_reached_are_refused(tmp_path):
    interrupted(tmp_path)
    with pytest.raises(RunError, match="train.steps: got 40.*at least 50"):
        Run(config(train__steps=40), tmp_path, quiet).__enter__()


@pytest.mark.parametrize("content", ["{", "[1]", "\0", "!!python/object/apply:os.mkdir ['boom']"])
def test_a_spoilt_config_is_refused(tmp_path, content, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = interrupted(tmp_path)
    (folder / "config.yaml").write_text(content)
    with pytest.raises(RunError, match="config.yaml: cannot be read") as error:
        Run(config(), tmp_path, quiet).__enter__()
    assert "\n" not in str(error.value) and not Path("boom").exists()
    (folder / "config.yaml").unlink()
    with pytest.raises(RunError, match="missing beside checkpoints"):
        Run(config(), tmp_path, quiet).__enter__()


# The lock


def test_one_process_holds_a_folder(tmp_path):
    with Run(config(), tmp_path, quiet) as run:
        with pytest.raises(RunError, match=f"process {os.getpid()} on .* is at work"):
            Run(config(), tmp_path, quiet).__enter__()
        out, into = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                Run(config(), tmp_path, quiet).__enter__()
                os.write(into, b"entered")
            except RunError as error:
                os.write(into, str(error).encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert f"process {os.getpid()} " in os.read(out, 1000).decode()
        assert status(run.folder)["status"] == "running"
        run.done(100)
    with Run(config(), tmp_path, quiet) as run:
        assert run.decision == "skip"


def test_folders_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "pos").mkdir()
    (tmp_path / "pos" / "rope-s1").write_text("")
    for root in (tmp_path / "file", tmp_path, Path("/proc/nanope")):
        with pytest.raises(RunError, match="cannot be written") as error:
            Run(config(), root, quiet).__enter__()
        assert "\n" not in str(error.value) and str(root) in str(error.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_folder(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(RunError, match="cannot be written: Permission denied"):
        Run(config(), tmp_path, quiet).__enter__()
    tmp_path.chmod(0o700)


def test_a_full_disk_is_one_line_and_a_vanished_folder_hides_no_error(tmp_path, monkeypatch):
    def full(path, text):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_module.checkpoint, "write_synced", full)
    with pytest.raises(RunError, match="No space left on device"):
        Run(config(), tmp_path, quiet).__enter__()
    monkeypatch.undo()
    lines = []
    with pytest.raises(ZeroDivisionError):
        with Run(config(), tmp_path, lines.append) as run:
            (tmp_path / "pos").rename(tmp_path / "gone")
            raise ZeroDivisionError
    assert any("cannot be written" in line for line in lines) and run.exit_code == 1


# metrics.jsonl


def test_lines_are_on_disk_at_once_and_strict_json(tmp_path):
    class Tensor:
        def item(self):
            return 2.5

    with Run(config(), tmp_path, quiet) as run:
        run.log(1, tokens=768, loss=Tensor(), grad_norm=float("inf"), lr=1e-3)
        text = (run.folder / "metrics.jsonl").read_text()
        assert json.loads(text) == {"step": 1, "tokens": 768, "loss": 2.5, "grad_norm": None, "lr": 1e-3}
        assert text.endswith("\n") and "Infinity" not in text


@pytest.mark.parametrize("torn", ["", '{"step": 30, "lo', "\0\0\0", "[]\n"])
def test_resume_has_no_duplicates_and_no_gaps(tmp_path, torn):
    with Run(config(), tmp_path, quiet) as run:
        fake_checkpoint(run.folder, 20)
        for step in range(1, 28):
            run.log(step, loss=step / 7)
            if step % 10 == 0:
                run.log(step, val_loss=step / 3)
    first = metrics(run.folder)
    with open(run.folder / "metrics.jsonl", "a") as file:
        file.write(torn)
    with Run(config(), tmp_path, quiet) as run:
        with pytest.raises(RuntimeError, match="resume_at"):
            run.log(21, loss=0.0)
        run.resume_at(20)
        assert metrics(run.folder) == [line for line in first if line["step"] <= 20]
        for step in range(21, 28):
            run.log(step, loss=step / 7)
    assert metrics(run.folder) == first


# How it ended


def test_failures_say_why(tmp_path):
    with pytest.raises(NonFiniteError):
        with Run(config(), tmp_path, quiet) as run:
            raise NonFiniteError("loss: got nan at step 3; lower optim.lr")
    found = status(run.folder)
    assert found["status"] == "failed" and found["error"] == "loss: got nan at step 3; lower optim.lr"
    assert found["traceback"] is None and run.exit_code == 1
    with pytest.raises(ValueError):
        with Run(config(), tmp_path, quiet) as run:
            raise ValueError("two\nlines")
    found = status(run.folder)
    assert found["status"] == "failed" and found["error"] == "ValueError: two lines"
    assert "test_run.py" in found["traceback"]
    with Run(config(), tmp_path, quiet) as run:
        found = status(run.folder)
        assert found["status"] == "running" and found["error"] is None and found["traceback"] is None
        run.done(100)


def test_errors_after_done_and_exits(tmp_path):
    with pytest.raises(SystemExit):
        with Run(config(), tmp_path, quiet) as run:
            sys.exit(3)
    assert status(run.folder)["status"] == "failed"
    with pytest.raises(KeyboardInterrupt):
        with Run(config(), tmp_path, quiet) as run:
            raise KeyboardInterrupt
    assert status(run.folder)["status"] == "interrupted"
    with Run(config(), tmp_path, quiet) as run:
        pass
    assert status(run.folder)["status"] == "interrupted"


def test_who_started_it_may_say_how_it_died(tmp_path):
    folder = tmp_path / "pos" / "a"
    mark_killed(folder, "killed by SIGKILL")
    assert status(folder)["status"] == "failed" and status(folder)["error"] == "killed by SIGKILL"
    done = finish(tmp_path, config())
    mark_killed(done, "x")
    assert status(done)["status"] == "done"
    with Run(config(name="b"), tmp_path, quiet) as run:
        mark_killed(run.folder, "x")
        assert status(run.folder)["status"] == "running"


SIGNALLED = """
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, {repo!r})
from gpt.run import Run
import json
with Run(json.loads({config!r}), Path({root!r}), print) as run:
    print("ready", flush=True)
    step = 0
    while not run.stop and step < 2000:
        step += 1
        run.log(step, loss=1.0)
        time.sleep(0.005)
    if {hang}:
        print("stopping", flush=True)
        time.sleep(30)
sys.exit(run.exit_code)
"""


def start(tmp_path: Path, hang: bool, **environment) -> subprocess.Popen:
    code = SIGNALLED.format(
        repo=str(Path(__file__).resolve().parent.parent), config=json.dumps(CONFIG), root=str(tmp_path), hang=hang
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )
    assert child.stdout.readline() == "ready\n"
    return child


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 0)])
def test_signals(tmp_path, number, code):
    child = start(tmp_path, hang=False)
    child.send_signal(number)
    assert child.wait(20) == code
    found = status(tmp_path / "pos" / "rope-s1")
    logged = [0, *(line["step"] for line in metrics(tmp_path / "pos" / "rope-s1"))]  # the signal may come before step 1
    assert found["status"] == "interrupted" and found["step"] == logged[-1]


def test_a_second_signal_exits_at_once(tmp_path):
    child = start(tmp_path, hang=True)
    child.send_signal(signal.SIGTERM)
    assert child.stdout.readline() == "stopping\n"
    assert child.poll() is None
    before = time.monotonic()
    child.send_signal(signal.SIGINT)
    assert child.wait(20) == 130 and time.monotonic() - before < 5
    assert status(tmp_path / "pos" / "rope-s1")["status"] == "interrupted"


def test_slurm_is_asked_to_requeue(tmp_path):
    tool = tmp_path / "bin" / "scontrol"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n')
    tool.chmod(0o755)
    child = start(tmp_path, hang=False, PATH=f"{tool.parent}:{os.environ['PATH']}", SLURM_JOB_ID="77")
    child.send_signal(signal.SIGUSR1)
    assert child.wait(20) == 0
    assert (tmp_path / "asked").read_text() == "requeue 77\n"


def test_handlers_come_back(tmp_path):
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    with Run(config(), tmp_path, quiet) as run:
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.01)
        assert run.stop == signal.SIGUSR1
    assert [signal.getsignal(number) for number in numbers] == before and run.exit_code == 0
    with Run(config(), tmp_path, quiet) as run:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        run.done(100)
    assert run.exit_code == 0 and status(run.folder)["status"] == "done"


# wandb


class FakeRun:
    url = "https://wandb.example/run"

    def __init__(self, world, **arguments):
        self.world, self.arguments = world, arguments
        self.lines, self.defined, self.exit_code = [], {}, None

    def define_metric(self, name, step_metric=None):
        self.defined[name] = step_metric

    def log(self, values, step=None):
        if self.world.broken:
            raise ConnectionResetError("Connection lost")
        self.lines.append((step, values))

    def finish(self, exit_code=None):
        if self.world.hang_at_end:
            time.sleep(5)
        assert self.exit_code is None, "finished twice"
        self.exit_code = exit_code


class FakeWandb(types.ModuleType):
    def __init__(self):
        super().__init__("wandb")
        self.runs, self.broken, self.hang, self.hang_at_end, self.error = [], False, 0.0, False, None

    def Settings(self, **settings):
        return settings

    def Table(self, columns, data):
        return {"columns": columns, "data": data}

    def setup(self, settings):
        pass

    def init(self, **arguments):
        time.sleep(self.hang)
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
    wandb.hang = 1.0 if fault == "hang" else 0.0
    wandb.hang_at_end = fault == "hang at end"
    lines, before = [], time.monotonic()
    with Run(config(wandb__mode="offline"), tmp_path, lines.append) as run:
        for step in range(1, 11):
            wandb.broken = fault == "broken" and step > 5
            run.log(step, loss=1.0)
            time.sleep(0.01)
        run.done(10)
    assert time.monotonic() - before < 3
    warnings = [line for line in lines if "warning" in line]
    assert len(warnings) == 1 and "wandb" in warnings[0] and "\n" not in warnings[0]
    assert len(metrics(run.folder)) == 10 and status(run.folder)["status"] == "done" and run.exit_code == 0
    if fault == "hang":  # what comes up too late is closed, not left running
        time.sleep(1.0)
        assert [one.exit_code for one in wandb.runs] == [1]


ROWS = [
    {"run": "rope-s1", "eval_length": 64, "protocol": "disjoint", "scaling": "none", "overflow": None, "status": "ok"}
    | {"loss": 2.0, "tail_loss": None, "bits_per_byte": 2.9, "position_curve": [2.5, 1.5]},
    {"run": "rope-s1", "eval_length": 128, "protocol": "disjoint", "scaling": "none", "overflow": "clamp"}
    | {"status": "ok", "loss": 2.5, "tail_loss": 3.0, "bits_per_byte": 3.1},
    {"run": "rope-s1", "eval_length": 256, "protocol": "sliding", "scaling": "none", "status": "unsupported"}
    | {"loss": None, "reason": "table has 64 rows"},
]


def test_evaluation_rows_are_a_table_and_points(tmp_path, wandb):
    folder = finish(tmp_path, config(wandb__mode="offline"))
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
from gpt.run import Run, mirror_evaluation
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


def test_nothing_heavy_is_imported():
    """A sweep decides in milliseconds which runs are done: no torch, no wandb."""
    code = "import sys, gpt.run; print([m for m in ('torch', 'wandb', 'hydra', 'numpy') if m in sys.modules])"
    root = Path(__file__).resolve().parent.parent
    assert subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True).stdout == "[]\n"


def test_a_run_in_another_thread_leaves_signals_alone(tmp_path):
    before, found = signal.getsignal(signal.SIGTERM), []

    def work():
        found.append(finish(tmp_path, config()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) == before and status(found[0])["status"] == "done"
