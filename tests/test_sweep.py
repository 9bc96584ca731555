"""A sweep: checked whole before it starts, one process a job, and nobody's death is another's."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpt import sweep
from gpt.run import Run
from gpt.sweep import Job
from tests.folders import config, quiet
from tests.test_progress import Terminal

REPO = Path(__file__).resolve().parent.parent

# The entry point's shape without its model: what a job does is chosen by `act`.
APP = f"""
import os, signal, sys, time
sys.path.insert(0, {str(REPO)!r})
from gpt import run as run_module
from gpt.naming import folder_name
from gpt.errors import ConfigError, UserError

def final(raw, overrides):
    if not 0 < raw["optim"]["lr"] < 1:
        raise ConfigError("optim.lr", raw["optim"]["lr"], "a number > 0 and < 1")
    return {{**raw, "name": folder_name(raw, overrides)}}

def job(raw, overrides):
    act = raw["act"]
    if act == "crash":
        sys.exit("no such thing")
    with run_module.Run(final(raw, overrides)) as run:
        if run.decision == "skip":
            return 0
        if run.decision == "resume":
            run.resume_at(1)
        run.note(threads=os.environ["OMP_NUM_THREADS"], argv=sys.argv)
        run.note(device=os.environ.get("CUDA_VISIBLE_DEVICES"))
        run.say("working")
        first = run.decision == "fresh"
        run.log(1, loss=1.0, val_loss=1.25 + raw["seed"])
        (run.folder / "checkpoints" / "step-000001").mkdir(parents=True, exist_ok=True)
        run.patient = True
        if act == "wait" and first:
            while not run.stop:
                time.sleep(0.01)
        elif act == "refuse" and first:
            raise UserError("the corpus has 3 tokens, needed: 65")
        elif act == "raise" and first:
            raise ValueError("[red]boom")
        elif act == "kill" and first:
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            if act.startswith("sleep"):
                time.sleep(float(act[5:]))
            run.log(2, loss=0.5)
            run.done(2)
    return run.exit_code

if "act=wait" in sys.argv:
    from gpt.sweep import end_with_parent
    end_with_parent()

if os.environ.get("QUICK") and "hydra.mode=RUN" in sys.argv:  # composed by hand, which is faster
    import yaml
    raw, overrides = yaml.safe_load(open("conf/config.yaml")), sys.argv[1:-1]
    del raw["defaults"], raw["hydra"]
    raw["position"] = {{"name": "rope"}}
    raw.update({{key: yaml.safe_load(text) for key, text in (one.split("=") for one in overrides)}})
    try:
        sys.exit(job(raw, overrides))
    except UserError as error:
        print(f"error: {{error}}", file=sys.stderr)
        sys.exit(2)

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from gpt import cli, sweep

@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(composed):
    sys.exit(job(OmegaConf.to_container(composed, resolve=True), list(HydraConfig.get().overrides.task)))

sweep.register(final)
cli.report_errors(main)
"""

CONFIG = """
defaults:
  - _self_
  - position: rope
  - optional experiment: null
  - override hydra/launcher: processes
  - override hydra/sweeper: processes
  - override hydra/job_logging: disabled
  - override hydra/hydra_logging: disabled
seed: 0
sweep: main
name: ""
act: ok
optim: {lr: 0.1}
data: {name: stdlib, path: null}
train: {steps: 2}
wandb: {mode: disabled}
hydra:
  run: {dir: .}
  sweep: {dir: .}
  output_subdir: null
"""

EXPERIMENT = """
# @package _global_
sweep: exp
hydra:
  mode: MULTIRUN
  sweeper:
    params:
      position: rope,alibi
      seed: 0,1
"""


@pytest.fixture
def app(tmp_path):
    for folder in ("position", "experiment"):
        (tmp_path / "conf" / folder).mkdir(parents=True)
    for name in ("rope", "alibi", "learned"):
        (tmp_path / "conf" / "position" / f"{name}.yaml").write_text(f"name: {name}\n")
    (tmp_path / "conf" / "config.yaml").write_text(CONFIG)
    (tmp_path / "conf" / "experiment" / "both.yaml").write_text(EXPERIMENT)
    (tmp_path / "app.py").write_text(APP)
    return tmp_path


def environment(**changes) -> dict:
    return {**os.environ, "OMP_NUM_THREADS": "4", "COLUMNS": "200", **changes}


def call(app: Path, *overrides: str, **changes) -> subprocess.CompletedProcess:
    command = [sys.executable, "app.py", *overrides]
    return subprocess.run(command, cwd=app, capture_output=True, text=True, timeout=180, env=environment(**changes))


def statuses(app: Path, sweep: str) -> dict:
    return {path.parent.name: json.loads(path.read_text()) for path in sorted(app.glob(f"runs/{sweep}/*/status.json"))}


def untouched(app: Path) -> bool:
    """Nothing beside the app itself and runs/: no outputs, multirun, multirun.yaml or .hydra."""
    return {path.name for path in app.iterdir()} <= {"app.py", "conf", "runs"}


def test_a_sweep_and_the_same_again(app):
    done = call(app, "-m", "seed=0,1", "sweep=pos")
    assert done.returncode == 0, done.stderr
    found = statuses(app, "pos")
    assert set(found) == {"rope-s0", "rope-s1"} and untouched(app)
    assert all(one["status"] == "done" and one["threads"] == "4" for one in found.values())
    assert len({one["pid"] for one in found.values()}) == 2
    assert done.stdout.count("working") == 2 and not list(app.glob("runs/pos/*/output.log"))
    table = done.stdout[done.stdout.index("status") :]
    assert all(name in table for name in found) and "2.2500" in table and "1.2500" in table

    again = call(app, "-m", "seed=0,1", "sweep=pos")
    assert again.returncode == 0 and "working" not in again.stdout and again.stdout.count("done already") == 4
    assert statuses(app, "pos") == found


@pytest.mark.parametrize("jobs", [1, 2])
def test_one_that_fails_stops_no_other(app, jobs):
    acts = ["ok", "refuse", "raise", "kill", "crash", "sleep0"]
    asked = ["-m", f"act={','.join(acts)}", "sweep=mixed", f"hydra.launcher.jobs={jobs}"]
    done = call(app, *asked, QUICK="1")
    assert done.returncode == 1 and untouched(app)
    found = {one["error"] or name: one["status"] for name, one in statuses(app, "mixed").items()}
    assert found == {
        "rope-s0-actok": "done",
        "rope-s0-actsleep0": "done",
        "the corpus has 3 tokens, needed: 65": "failed",
        "ValueError: [red]boom": "failed",
        "killed by SIGKILL, out of memory?": "failed",
    }
    table = done.stdout[done.stdout.rindex("status") :]
    for text in ("the corpus has 3 tokens", "ValueError: [red]boom", "killed by SIGKILL", "rope-s0-actcrash"):
        assert text in table
    assert ("no such thing" if jobs > 1 else "ended with exit code 1") in table
    assert table.count("failed") == 4 and table.count("done") == 2
    if jobs == 2:
        assert {one.get("threads") for one in statuses(app, "mixed").values() if one["status"] == "done"} == {"2"}
        assert "working" not in done.stdout
        assert "working" in (app / "runs" / "mixed" / "rope-s0-actok" / "output.log").read_text()
        again = call(app, *asked, QUICK="1")  # failed ones go on
        assert again.returncode == 1 and again.stdout.count("done already") == 4
        assert sorted(one["status"] for one in statuses(app, "mixed").values()) == ["done"] * 5
    assert untouched(app)


@pytest.mark.parametrize(
    "overrides, words",
    [
        (["position=rope,banana,alibi"], ["position: got 'banana'", "alibi", "learned", "rope"]),
        (["optim.lr=0.1,7,0.2"], ["optim.lr: got 7", "< 1"]),
        (["optim.rl=0.1,0.2"], ["optim.rl"]),
        (["seed=0,1", "name=same"], ["runs/main/same", "seed=0", "seed=1"]),
        (["seed=0,1", "hydra.launcher.jobs=0"], ["hydra.launcher.jobs: got 0"]),
        (["seed=0,1", "sweep=a/b"], ["sweep: got 'a/b'"]),
        (["seed=interval(0,1)"], ["INTERVAL"]),
    ],
)
def test_a_wrong_job_starts_none(app, overrides, words):
    done = call(app, "-m", *overrides)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ") and all(word in line for word in words), line
    assert {path.name for path in app.iterdir()} == {"app.py", "conf"}


def test_torchrun_starts_no_sweep(app):
    done = call(app, "-m", "seed=0,1", WORLD_SIZE="2", RANK="1")
    assert done.returncode == 2 and done.stdout == ""
    assert re.fullmatch(r"error: -m/--multirun: got 2 processes of torchrun .*, allowed: one; .*\n", done.stderr)
    assert {path.name for path in app.iterdir()} == {"app.py", "conf"}
    assert call(app, "-m", "seed=0", WORLD_SIZE="1", RANK="0").returncode == 0


def test_another_configuration_in_a_folder_starts_none(app):
    (app / "conf" / "position" / "alibi.yaml").write_text("name: alibi\nslope: 1\n")
    assert call(app, "position=alibi", "seed=1", "sweep=pos").returncode == 0
    (app / "conf" / "position" / "alibi.yaml").write_text("name: alibi\nslope: 2\n")
    done = call(app, "-m", "position=rope,alibi", "seed=1", "sweep=pos")
    assert done.returncode == 2 and "position.slope: 1 -> 2" in done.stderr
    assert set(statuses(app, "pos")) == {"alibi-s1"}


def test_an_experiment_brings_its_sweep(app):
    done = call(app, "experiment=both", "seed=3", "+data.kind='a, b/c=d'")
    assert done.returncode == 0, done.stderr
    found = statuses(app, "exp")
    assert sorted(name[:8] for name in found) == ["alibi-s3", "rope-s3-"]
    assert untouched(app)
    for path in app.glob("runs/exp/*/config.yaml"):
        assert "a, b/c=d" in path.read_text()
    assert call(app, "experiment=both", "seed=3", "+data.kind='a, b/c=d'").stdout.count("done already") == 4


def test_flags_reach_the_jobs(app):
    (app / "conf" / "other.yaml").write_text(CONFIG.replace("sweep: main", "sweep: other"))
    done = call(app, "-m", "-cn", "other", "seed=0,1", "hydra.verbose=true", "hydra.launcher.jobs=2")
    assert done.returncode == 0, done.stderr
    argv = statuses(app, "other")["rope-s0"]["argv"]
    assert "hydra.verbose=true" in argv and "hydra.mode=RUN" in argv and not any("jobs" in one for one in argv)


def test_gpus_are_shared_out(app):
    call(app, "-m", "seed=0,1,2", "act=sleep0.5", "hydra.launcher.jobs=3", CUDA_VISIBLE_DEVICES="4,6", QUICK="1")
    assert sorted(one["device"] for one in statuses(app, "main").values()) == ["4", "4", "6"]
    assert {one["threads"] for one in statuses(app, "main").values()} == {"1"}


@pytest.mark.parametrize(
    "number, code, jobs",
    [(signal.SIGINT, 130, 1), (signal.SIGTERM, 143, 2), (signal.SIGHUP, 129, 1), (signal.SIGUSR1, 0, 1)],
)
def test_a_signal_reaches_the_jobs_and_starts_no_more(app, number, code, jobs):
    command = [sys.executable, "app.py", "-m", "seed=0,1,2,3", "act=wait", "sweep=s", f"hydra.launcher.jobs={jobs}"]
    parent = subprocess.Popen(
        command,
        cwd=app,
        env=environment(QUICK="1"),
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # these tests may be under nohup themselves
    )
    deadline = time.monotonic() + 120
    while (
        len(list(app.glob("runs/s/*/checkpoints/step-000001"))) < jobs
        and parent.poll() is None
        and time.monotonic() < deadline
    ):
        time.sleep(0.02)
    parent.send_signal(number)
    output, _ = parent.communicate(timeout=120)
    assert parent.returncode == code
    found = statuses(app, "s")
    assert len(found) == jobs and all(one["status"] == "interrupted" for one in found.values())
    assert output.count("not started") == 4 - jobs and "interrupted" in output
    if number == signal.SIGINT:
        again = call(app, "-m", "seed=0", "act=wait", "sweep=s")  # goes on, and this time does not wait
        assert again.returncode == 0 and statuses(app, "s")["rope-s0-actwait"]["status"] == "done"


def test_nohup_keeps_a_sweep_going(app):
    command = ["nohup", sys.executable, "app.py", "-m", "seed=0,1", "act=sleep2", "sweep=s"]
    parent = subprocess.Popen(command, cwd=app, env=environment(QUICK="1"), stdout=subprocess.PIPE)
    while b"started" not in parent.stdout.readline():
        assert parent.poll() is None
    parent.send_signal(signal.SIGHUP)
    parent.communicate(timeout=120)
    assert parent.returncode == 0 and [one["status"] for one in statuses(app, "s").values()] == ["done", "done"]


def test_no_job_outlives_a_sweep_that_is_killed(app):
    """It saves its step, and the same command goes on from there."""
    command = [sys.executable, "app.py", "-m", "seed=0", "act=wait", "sweep=s"]
    parent = subprocess.Popen(command, cwd=app, env=environment(QUICK="1"), stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list(app.glob("runs/s/*/checkpoints/step-000001")):
        assert parent.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    parent.kill()
    parent.wait()
    while statuses(app, "s")["rope-s0-actwait"]["status"] != "interrupted":
        assert time.monotonic() < deadline
        time.sleep(0.02)
    again = call(app, "-m", "seed=0", "act=wait", "sweep=s", QUICK="1")
    assert again.returncode == 0 and "rope-s0-actwait: done, val loss" in again.stdout


@pytest.mark.parametrize("at_once", [1, 2])
def test_a_run_that_another_process_ended_meanwhile_is_done_already(tmp_path, capsys, at_once):
    """Its seconds are those of its training, as in every table."""
    jobs = [made_job(tmp_path / name, "import time; time.sleep(0.2)") for name in "ab"]
    for job in jobs:
        job.folder.mkdir()
        (job.folder / "status.json").write_text('{"status": "done", "pid": 0, "step": 7, "seconds": 1234.5}')
    assert sweep.run_jobs(jobs, at_once) == 0
    assert [(job.result, job.step, job.seconds) for job in jobs] == [("done already", 7, 1234.5)] * 2
    text = capsys.readouterr().out
    assert "b: done already, 20.6 min" in text and "1234" in text[text.index("seconds") :]


def test_a_run_that_another_process_still_works_on_is_not_done(tmp_path):
    with Run(config(), tmp_path, quiet) as run:
        job = made_job(run.folder, "")
        assert sweep.run_jobs([job], 1) == 1 and job.result == "running elsewhere"


def made_job(folder: Path, code: str) -> Job:
    return Job(folder, [sys.executable, "-c", code], "not started")


def test_a_folder_that_cannot_be_written_stops_no_other(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    jobs = [made_job(tmp_path / "file" / "a", "pass"), made_job(tmp_path / "b", "print('at work')")]
    assert sweep.run_jobs(jobs, 2) == 1
    assert [job.result for job in jobs] == ["failed", "done"]
    assert "[1/2] a: failed: cannot be started: Not a directory\n" in capsys.readouterr().out
    assert (tmp_path / "b" / "output.log").read_text() == "at work\n"


def test_no_job_outlives_a_sweep_that_ends_on_an_error(tmp_path, monkeypatch):
    """Such as a closed output. Jobs get the time to save, and no more."""
    code = "import signal, sys, time; from pathlib import Path; signal.signal(signal.SIGTERM, {}); "
    code += "Path({!r}).touch(); time.sleep(300)"
    here = {name: tmp_path / f"{name}.txt" for name in "ab"}
    acts = {"a": f"lambda *_: (Path({str(here['a'])!r}).write_text('saved'), sys.exit())", "b": "signal.SIG_IGN"}
    jobs = [made_job(tmp_path / name, code.format(acts[name], str(here[name]))) for name in "ab"]
    started, processes, handlers = [], [], signal.getsignal(signal.SIGTERM)

    def broken(line):
        started.append(line)
        if len(started) == 2:
            while not all(path.exists() for path in here.values()):
                time.sleep(0.01)
            processes.extend(job.process for job in jobs)
            raise BrokenPipeError

    monkeypatch.setattr(sweep, "say", broken)
    monkeypatch.setattr(sweep, "LAST_SECONDS", 2)
    with pytest.raises(BrokenPipeError):
        sweep.run_jobs(jobs, 2)
    assert [process.returncode for process in processes] == [0, -signal.SIGKILL]
    assert here["a"].read_text() == "saved"
    assert json.loads((tmp_path / "b" / "status.json").read_text())["status"] == "failed"
    assert signal.getsignal(signal.SIGTERM) == handlers


@pytest.mark.parametrize("at_once", [1, 2])
def test_a_run_that_another_process_works_on_runs_elsewhere(tmp_path, capsys, at_once):
    with Run(config(), tmp_path, quiet) as run:
        code = f"from pathlib import Path; Path({str(tmp_path / 'b')!r}).mkdir(exist_ok=True); raise SystemExit(2)"
        jobs = [made_job(run.folder, code), made_job(tmp_path / "b", code)]
        assert sweep.run_jobs(jobs, at_once) == 1
    assert [job.result for job in jobs] == ["running elsewhere", "failed"]
    assert jobs[0].error.startswith(f"process {os.getpid()} on ") and jobs[0].error in capsys.readouterr().out


def test_the_last_words_are_those_of_the_job(tmp_path):
    (tmp_path / "output.log").write_text("error: of the day before\n")
    job = made_job(tmp_path, "print('at work\\nerror: no text\\nstep 7 of another sweep'); raise SystemExit(2)")
    other = made_job(tmp_path / "b", "print('at work'); raise SystemExit(2)")
    assert sweep.run_jobs([job, other], 2) == 1
    assert (job.error, other.error) == ("error: no text", "at work")


def test_what_a_run_says_of_its_end_counts(tmp_path):
    """Such as one that has saved its step, and gets the next signal when its handlers are gone."""
    code = "import json, os, signal; from pathlib import Path; status = {'pid': os.getpid(), 'status': 'interrupted'}; "
    code += f"Path({str(tmp_path / 'status.json')!r}).write_text(json.dumps(status | {{'seconds': 'x', 'error': 3}})); "
    code += "os.kill(os.getpid(), signal.SIGTERM)"
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "val_loss": "low"}\n')
    job = made_job(tmp_path, code)
    assert sweep.run_jobs([job], 1) == 1 and job.result == "interrupted"
    assert json.loads((tmp_path / "status.json").read_text())["status"] == "interrupted"
    job.seconds = None
    sweep.print_jobs([job])  # a status that a person damaged breaks no table


@pytest.mark.parametrize("columns", [80, 120])
def test_the_table_is_whole_in_a_narrow_terminal(tmp_path, monkeypatch, columns):
    name = "rope-s0-base500000-block_size256-batch_size8-steps80-1234abcd"
    jobs = []
    for result, error in (("done already", ""), ("running elsewhere", "process 123 on a-machine is at work in it")):
        job = Job(tmp_path / result / name, [], result, error)
        job.folder.mkdir(parents=True)
        (job.folder / "status.json").write_text('{"step": 20000, "seconds": 12345.6}')
        (job.folder / "metrics.jsonl").write_text('{"step": 20000, "val_loss": 4.35801}\n')
        jobs.append(job)
    screen = Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setenv("COLUMNS", str(columns))
    sweep.print_jobs(jobs)
    text = re.sub(r"\x1b\[[0-9;]*m", "", screen.getvalue())
    assert max(map(len, text.splitlines())) <= columns and "…" not in text
    for word in ("status", "step", "val loss", "seconds", "done already", "running elsewhere"):
        assert word in text
    assert all(text.count(word) == 2 for word in ("20000", "4.3580", "12346"))
    cells = ["".join(row.split("│")[n].strip() for row in text.splitlines() if row.count("│") == 7) for n in (1, 6)]
    assert cells[0] == 2 * name and cells[1].replace(" ", "") == jobs[1].error.replace(" ", "")


def test_a_reader_that_goes_away_stops_no_sweep(app):
    command = [sys.executable, "app.py", "-m", "seed=0,1", "sweep=s"]
    parent = subprocess.Popen(command, cwd=app, env=environment(QUICK="1"), stdout=subprocess.PIPE)
    parent.stdout.close()
    assert parent.wait(120) == 0
    assert [one["status"] for one in statuses(app, "s").values()] == ["done", "done"]


def test_threads_without_a_wish(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert 1 <= sweep.machine_threads() <= os.cpu_count()
    for text in ("", "x", "0", "-2"):
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        assert 1 <= sweep.machine_threads() <= os.cpu_count()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert sweep.visible_gpus() == []
