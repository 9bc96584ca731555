"""A run's folder: who holds it, what is in it, and a status that is honest on every way out."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

from gpt.errors import NonFiniteError, RunError
from gpt.run import Run, already_done, mark_killed, read_status
from tests.folders import CONFIG, config, fake_checkpoint, finish, metrics, quiet, status


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


def test_a_fresh_start_keeps_no_measurement_of_the_weights_before(tmp_path):
    made = config()
    with Run(made, tmp_path, quiet) as run:
        run.log(10, loss=1.0)
    measured = run.folder / "eval.jsonl"
    measured.write_text('{"step": 10}\n')
    with Run(made, tmp_path, quiet) as run:
        assert run.decision == "fresh"
    assert not measured.read_text() and not metrics(run.folder)
    fake_checkpoint(run.folder, 10)
    measured.write_text('{"step": 10}\n{"step": 20}\n')
    with Run(made, tmp_path, quiet) as run:
        assert run.decision == "resume"
        run.resume_at(10)
    assert measured.read_text() == '{"step": 10}\n'


def test_what_a_run_began_with_is_still_known_when_it_went_on(tmp_path):
    with Run(config(), tmp_path, quiet) as run:
        run.note(init_from={"checkpoint": "x", "sha256": "ab"})
    fake_checkpoint(run.folder, 10)
    with Run(config(), tmp_path, quiet) as run:
        run.resume_at(10)
    assert status(run.folder)["init_from"] == {"checkpoint": "x", "sha256": "ab"}


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
    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
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


def test_another_precision_on_the_way_is_a_change(tmp_path):
    for dtype in ("float32", None, "bfloat16", "bfloat16"):  # one process may end before it can tell
        lines = []
        with Run(config(), tmp_path, lines.append) as run:
            fake_checkpoint(run.folder, 20) if run.decision == "fresh" else run.resume_at(20)
            if dtype:
                run.note(dtype=dtype, world=1)
            run.log(20, loss=1.0)
            run.note(threads=2)
    found = status(run.folder)
    assert found["dtype"] == "bfloat16" and found["world"] == 1
    assert found["changes"] == [{"step": 20, "key": "dtype", "old": "float32", "new": "bfloat16"}]
    with Run(config(), tmp_path, lines.append) as run:
        run.resume_at(20)
        run.note(dtype="float32")
    assert lines == ["dtype: bfloat16 -> float32 from step 20 on"]


@pytest.mark.parametrize("kept, missing", [(0, "1 to 20"), (1, "11 to 20"), (2, None)])
def test_lines_that_are_gone_are_said_to_be(tmp_path, kept, missing):
    with Run(config(), tmp_path, quiet) as run:
        fake_checkpoint(run.folder, 20)
        for step in (10, 20):
            run.log(step, loss=1.0)
    path, lines = run.folder / "metrics.jsonl", []
    text = path.read_text().splitlines(keepends=True)[:kept]
    path.write_text("".join(text) + '{"step": true}\n') if kept else path.unlink()
    with Run(config(), tmp_path, lines.append) as run:
        run.resume_at(20)
    assert lines == ([f"warning: {path}: steps {missing} are not in it, and do not come back"] if missing else [])
    assert [line["step"] for line in metrics(run.folder)] == [10, 20][:kept]


def test_a_folder_in_place_of_the_metrics_is_named(tmp_path):
    (tmp_path / "pos" / "rope-s1" / "metrics.jsonl").mkdir(parents=True)
    with pytest.raises(RunError, match="rope-s1: cannot be written: metrics.jsonl is a folder"):
        Run(config(), tmp_path, quiet).__enter__()


@pytest.mark.parametrize("value", ["x", None, 10**400, -1, 0, True, [3], {}])
def test_a_damaged_status_stops_no_run(tmp_path, value):
    with Run(config(), tmp_path, quiet) as run:
        fake_checkpoint(run.folder, 20)
    keys = ("step", "pid", "started", "seconds", "changes", "dtype", "wandb", "error")
    damaged = {**status(run.folder), "status": "running", **dict.fromkeys(keys, value)}
    for found in (damaged, {**damaged, "host": value, "status": value}):
        (run.folder / "status.json").write_text(json.dumps(found))
        assert read_status(run.folder)["status"] == ("interrupted" if found is damaged else value)
        with Run(config(optim__lr=0.5), tmp_path, quiet) as run:
            run.note(dtype="float32")
            run.resume_at(20)
            run.log(30, loss=1.0)
        assert status(run.folder)["status"] == "interrupted" and status(run.folder)["step"] == 30


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


CODES = [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129), (signal.SIGUSR1, 0)]

SIGNALLED = """
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, {repo!r})
from gpt.run import Run
import json
with Run(json.loads({config!r}), Path({root!r})) as run:
    run.patient = {patient}
    print("ready", flush=True)
    if not run.patient:
        time.sleep(90)
    step = 0
    while not run.stop and step < 2000:
        step += 1
        run.log(step, loss=1.0)
        if "SAY_LINES" in os.environ:
            run.say("a line")
        else:
            time.sleep(0.005)
    if "SAY_LINES" in os.environ:
        run.done(step)
    if {hang}:
        print("stopping", flush=True)
        time.sleep(90)
sys.exit(run.exit_code)
"""


def start(tmp_path: Path, hang: bool, patient: bool = True, launcher: tuple = (), **environment) -> subprocess.Popen:
    repo, made = str(Path(__file__).resolve().parent.parent), json.dumps(CONFIG)
    code = SIGNALLED.format(repo=repo, config=made, root=str(tmp_path), hang=hang, patient=patient)
    command = [*launcher, sys.executable, "-c", code]
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # these tests may be under nohup themselves
    )
    assert child.stdout.readline() == "ready\n"
    return child


@pytest.mark.parametrize("number, code", CODES)
def test_signals(tmp_path, number, code):
    child = start(tmp_path, hang=False)
    child.send_signal(number)
    assert child.wait(60) == code
    found = status(tmp_path / "pos" / "rope-s1")
    logged = [0, *(line["step"] for line in metrics(tmp_path / "pos" / "rope-s1"))]  # the signal may come before step 1
    assert found["status"] == "interrupted" and found["step"] == logged[-1]


def test_nohup_is_heeded(tmp_path):
    child = start(tmp_path, hang=False, launcher=("nohup",))
    child.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert child.poll() is None
    child.send_signal(signal.SIGTERM)
    assert child.wait(60) == 143


@pytest.mark.parametrize("number, code", CODES)
def test_a_signal_before_training_ends_the_run_at_once(tmp_path, number, code):
    child = start(tmp_path, hang=False, patient=False)
    child.send_signal(number)
    assert child.wait(20) == code
    folder = tmp_path / "pos" / "rope-s1"
    assert child.stdout.read().endswith("rope-s1: stopped before the first step; the same command goes on\n")
    assert status(folder)["status"] == "interrupted" and status(folder)["error"] is None
    with Run(config(), tmp_path, quiet) as run:  # and holds the folder no more
        assert run.decision == "fresh"


@pytest.mark.parametrize("error, ended", [(SystemExit(143), "interrupted"), (OSError("no net"), "failed")])
def test_what_ends_a_run_as_it_opens_its_mirror_is_in_its_status(tmp_path, monkeypatch, error, ended):
    def broken(*_):
        raise error

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("gpt.run.Mirror", broken)
    with pytest.raises(type(error)):
        Run(config(), tmp_path, quiet).__enter__()
    assert status(tmp_path / "pos" / "rope-s1")["status"] == ended
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_second_signal_exits_at_once(tmp_path):
    child = start(tmp_path, hang=True)
    child.send_signal(signal.SIGTERM)
    assert child.stdout.readline() == "stopping\n"
    assert child.poll() is None
    child.send_signal(signal.SIGHUP)  # says what the first one may have said
    time.sleep(0.2)
    assert child.poll() is None
    child.send_signal(signal.SIGINT)
    assert child.wait(60) == 130  # and does not wait for the end of what hangs
    assert status(tmp_path / "pos" / "rope-s1")["status"] == "interrupted"


def test_slurm_is_asked_to_requeue(tmp_path):
    tool = tmp_path / "bin" / "scontrol"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n')
    tool.chmod(0o755)
    child = start(tmp_path, hang=False, PATH=f"{tool.parent}:{os.environ['PATH']}", SLURM_JOB_ID="77")
    child.send_signal(signal.SIGUSR1)
    assert child.wait(60) == 0
    assert (tmp_path / "asked").read_text() == "requeue 77\n"


def test_a_reader_that_goes_away_stops_no_run(tmp_path):
    child = start(tmp_path, hang=False, SAY_LINES="1")
    child.stdout.close()
    assert child.wait(60) == 0
    assert status(tmp_path / "pos" / "rope-s1")["status"] == "done"


def test_handlers_come_back(tmp_path):
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    with Run(config(), tmp_path, quiet) as run:
        run.patient = True
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.01)
        assert run.stop == signal.SIGUSR1
    assert [signal.getsignal(number) for number in numbers] == before and run.exit_code == 0
    with Run(config(), tmp_path, quiet) as run:
        run.patient = True
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        run.done(100)
    assert run.exit_code == 0 and status(run.folder)["status"] == "done"


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
