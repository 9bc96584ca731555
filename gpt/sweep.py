"""The jobs of a sweep, each a process of its own, so that one that is killed does not take the others along.

    python train.py -m position=learned,rope,alibi seed=0,1,2 sweep=pos [hydra.launcher.jobs=2]

All jobs are composed and checked before the first one starts, and those that are done already are passed over.
`register` makes this known to Hydra; the entry point's YAML then chooses it:

    defaults:
      - override hydra/launcher: processes
      - override hydra/sweeper: processes
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from omegaconf import OmegaConf

from gpt.errors import ConfigError, RunError, UserError
from gpt.files import read_json, read_json_lines
from gpt.naming import run_folder
from gpt.progress import say
from gpt.run import EXIT_CODES, already_done, heeded, holder, mark_killed
from gpt.schema import plain

PLUGINS = "hydra_plugins.nanope"  # Hydra takes plugins only under a name that starts so; there is no such package
PARENT = "NANOPE_SWEEP"  # in a job's environment: the process of its sweep
POLL_SECONDS = 0.05
LAST_SECONDS = 60  # what a job gets to save its step when the sweep itself comes to grief


def register(validate: Callable[[dict, list[str]], object], root: Path = Path("runs")) -> None:
    """Makes `processes` known to Hydra as a launcher and a sweeper.

    Args:
        validate: turns a composed, plain configuration and its overrides into the final one (as dataclasses or plain),
            with its name; raises UserError.
        root: the folder of sweeps.
    """
    ProcessLauncher.validate, ProcessLauncher.root = staticmethod(validate), Path(root)
    for plugin in (ProcessLauncher, ProcessSweeper):
        Plugins.instance().class_name_to_class[f"{PLUGINS}.{plugin.__name__}"] = plugin
    launcher = {"_target_": f"{PLUGINS}.ProcessLauncher", "jobs": 1}
    sweeper = {"_target_": f"{PLUGINS}.ProcessSweeper", "params": None}
    for group, node in (("hydra/launcher", launcher), ("hydra/sweeper", sweeper)):
        ConfigStore.instance().store(group=group, name="processes", node=node, provider="nanope")


def end_with_parent() -> None:
    """In a job of a sweep: it gets SIGTERM, so that it saves its step and ends, when the sweep is gone, however."""
    parent = os.environ.pop(PARENT, None)

    def watch() -> None:
        while str(os.getppid()) == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    if parent:
        threading.Thread(target=watch, daemon=True).start()


class ProcessSweeper(Sweeper):
    """Hydra's own sweeper, without the multirun.yaml that it leaves in the working directory.

    Args:
        params: {key: values} of an experiment file; the command line's win.
    """

    def __init__(self, params: dict | None = None):
        self.params = params or {}

    def setup(self, *, hydra_context, task_function, config) -> None:
        self.loader = hydra_context.config_loader
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> list:
        from hydra._internal.core_plugins.basic_sweeper import BasicSweeper  # Hydra reloads it at its start

        arguments = [f"{key}={value}" for key, value in self.params.items()] + arguments
        overrides = OverridesParser.create(config_loader=self.loader).parse_overrides(arguments)
        (jobs,) = BasicSweeper.split_arguments(overrides, None)
        return self.launcher.launch(jobs, initial_job_idx=0)


class ProcessLauncher(Launcher):
    """Starts each job as `python <this script> <its overrides>`, `jobs` at a time, and ends with a table."""

    validate: Callable[[dict, list[str]], object]
    root: Path

    def __init__(self, jobs: int = 1):
        self.jobs = jobs

    def setup(self, *, hydra_context, task_function, config) -> None:
        self.loader, self.config = hydra_context.config_loader, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list:
        if type(self.jobs) is not int or self.jobs < 1:
            raise ConfigError("hydra.launcher.jobs", self.jobs, "a whole number >= 1")
        if (world := os.environ.get("WORLD_SIZE", "1")) != "1":  # each of its processes would be the same sweep
            raise UserError(
                f"-m/--multirun: got {world} processes of torchrun (WORLD_SIZE), allowed: one; "
                "start the sweep with python, or each of its runs with torchrun"
            )
        code = run_jobs(self.plan([list(overrides) for overrides in job_overrides]), self.jobs)
        if code:
            sys.exit(code)
        return []

    def plan(self, job_overrides: list[list[str]]) -> list["Job"]:
        """All jobs, composed and checked; raises UserError or Hydra's errors, with nothing started, if one is wrong."""
        jobs, owners = [], {}
        for overrides in job_overrides:
            shown = " ".join(overrides)
            composed = self.loader.load_sweep_config(self.config, overrides)
            composed = OmegaConf.masked_copy(composed, [key for key in composed if key != "hydra"])
            config = plain(self.validate(OmegaConf.to_container(composed, resolve=True), overrides))
            folder = run_folder(config, self.root)
            done = already_done(config, self.root)
            if folder in owners:
                raise RunError(
                    f"{folder}: two jobs of the sweep would share it: {owners[folder]!r} and {shown!r}; "
                    "leave name= out and each gets its own"
                )
            owners[folder] = shown
            jobs.append(Job(folder, self.command(overrides), "done already" if done else "not started"))
        return jobs

    def command(self, overrides: list[str]) -> list[str]:
        flags = vars(get_args_parser().parse_known_args(sys.argv[1:])[0])
        command = [sys.executable, sys.argv[0]]
        for flag in ("config_name", "config_path", "config_dir"):
            if flags[flag]:
                command += [f"--{flag.replace('_', '-')}", flags[flag]]
        own = ("hydra.mode=", "hydra.launcher.", "hydra/launcher=", "hydra.sweeper.", "hydra/sweeper=")
        for override in self.config.hydra.overrides.hydra:
            if not override.lstrip("+~").startswith(own):
                command.append(override)
        return [*command, *overrides, "hydra.mode=RUN"]  # an experiment's hydra.mode=MULTIRUN is for us, not the job


@dataclass
class Job:
    """One job: `result` is "done already", "not started", "running" or what its status.json said at the end.

    "running elsewhere" where another process is at work in its folder.
    """

    folder: Path
    command: list[str]
    result: str
    error: str = ""
    step: int | None = None
    val_loss: float | None = None
    seconds: float | None = None
    said: int = 0  # where in output.log this process begins
    process: subprocess.Popen | None = None

    def start(self, environment: dict, quiet: bool) -> None:
        """Starts the process: `quiet` ones write to <folder>/output.log, others where we do. Raises OSError."""
        output = None
        if quiet:
            self.folder.mkdir(parents=True, exist_ok=True)
            output = open(self.folder / "output.log", "ab")  # noqa: SIM115 (closed below)
            self.said = output.tell()
        try:
            self.process = subprocess.Popen(
                self.command,
                env={**os.environ, PARENT: str(os.getpid()), **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if quiet else None,
                start_new_session=True,  # Ctrl-C comes to us alone; the job gets it from us, once
            )
        finally:
            if output:
                output.close()
        self.result = "running"

    def end(self, stopped: bool) -> None:
        """Reads how the ended process went; one that could not say so itself gets its status written."""
        code, pid, self.process = self.process.returncode, self.process.pid, None
        status = read_json(self.folder / "status.json")
        if status.get("pid") != pid:  # it never came to hold its folder
            status = {}
        why = f"ended with exit code {code}"
        if code < 0:
            why = f"killed by {signal.Signals(-code).name}" + (", out of memory?" if code == -signal.SIGKILL else "")
        if code < 0 and stopped and not status:
            self.result, self.error = "interrupted", ""
        elif not status and (other := holder(self.folder)):
            self.result, self.error = "running elsewhere", other
        elif (code < 0 and not status) or status.get("status") == "running":
            mark_killed(self.folder, why)
            self.result, self.error = "failed", why
        elif code and not status:
            self.result, self.error = "failed", self.last_words() or why
        elif not status and read_json(self.folder / "status.json").get("status") == "done":
            self.result, self.error = "done already", ""  # by another process, while this one began
        else:
            self.result, self.error = str(status.get("status", "done")), str(status.get("error") or "")
            if self.result == "done" and code:
                self.result, self.error = "failed", why

    def last_words(self) -> str:
        """The error in its output, else its last line; another sweep's job may write there too."""
        try:
            text = (self.folder / "output.log").read_bytes()[self.said :].decode("utf-8", errors="replace")
        except OSError:
            return ""
        lines = [line.strip() for line in text.split("\n") if line.strip()]
        errors = [line for line in lines if line.startswith("error: ")]
        return (errors or lines or [""])[-1]

    def look(self) -> None:
        """Takes step, seconds (of all its processes) and validation loss from the run's folder."""
        status = read_json(self.folder / "status.json")
        self.step = status.get("step")
        self.seconds = status["seconds"] if isinstance(status.get("seconds"), float) else None
        with contextlib.suppress(OSError):
            lines, _ = read_json_lines(self.folder / "metrics.jsonl")
            losses = [line["val_loss"] for line in lines if isinstance(line.get("val_loss"), float)]
            self.val_loss = losses[-1] if losses else None


def run_jobs(jobs: list[Job], at_once: int) -> int:
    """Runs what is not done, `at_once` at a time, prints the table and returns the exit code."""
    waiting = [job for job in jobs if job.result == "not started"]
    at_once = max(1, min(at_once, len(waiting)))
    quiet = at_once > 1
    number = {id(job): f"[{n}/{len(jobs)}] {job.folder.name}" for n, job in enumerate(jobs, 1)}
    for job in jobs:
        if job not in waiting:
            say(f"{number[id(job)]}: done already")
    threads, gpus = max(1, machine_threads() // at_once), visible_gpus() if quiet else []
    slots: list[Job | None] = [None] * at_once
    signals: list[int] = []
    handlers = {n: signal.signal(n, lambda n, frame: signals.append(n)) for n in heeded()}
    stop = None
    try:
        while (waiting and not stop) or any(slots):
            while signals:
                received = signals.pop(0)
                stop = stop or received
                for job in filter(None, slots):
                    job.process.send_signal(received)
            for slot, job in enumerate(slots):
                if job and job.process.poll() is not None:
                    job.end(stopped=bool(stop))
                    job.look()
                    loss = "" if job.val_loss is None else f", val loss {job.val_loss:.4f}"
                    error = f": {job.error}" if job.error else ""
                    minutes = "" if job.seconds is None else f", {job.seconds / 60:.1f} min"
                    say(f"{number[id(job)]}: {job.result}{loss}{minutes}{error}")
                    slots[slot] = None
                if slots[slot] is None and waiting and not stop and not signals:
                    slots[slot] = job = waiting.pop(0)
                    environment = {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
                    if gpus:
                        environment["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
                    try:
                        job.start(environment, quiet)
                    except OSError as error:  # a folder that cannot be written, no more processes
                        job.result, job.error = "failed", f"cannot be started: {error.strerror or error}"
                        slots[slot] = None
                        say(f"{number[id(job)]}: failed: {job.error}")
                    else:
                        say(f"{number[id(job)]}: started" + (f", {job.folder}/output.log" if quiet else ""))
            time.sleep(POLL_SECONDS)
    finally:
        end_all([job for job in slots if job and job.process])
        for n, handler in handlers.items():
            signal.signal(n, handler)
    print_jobs(jobs)
    if stop:
        return EXIT_CODES[stop]
    return 0 if all(job.result in ("done", "done already") for job in jobs) else 1


def end_all(jobs: list[Job]) -> None:
    """For jobs that are at work though the sweep ends on an error of its own: they save their step and end."""
    for job in jobs:
        job.process.terminate()
    until = time.monotonic() + LAST_SECONDS
    for job in jobs:
        try:
            job.process.wait(max(0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            job.process.kill()
            job.process.wait()
            mark_killed(job.folder, "killed, since the sweep ended and it did not")
    if jobs:
        with contextlib.suppress(OSError):  # a closed output may be the very reason
            say(f"the sweep ended on an error; stopped: {', '.join(job.folder.name for job in jobs)}")


def print_jobs(jobs: list[Job]) -> None:
    """The table at the end, one line a job."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table()
    table.add_column("run", overflow="fold")  # in a narrow terminal, names and errors take more lines
    table.add_column("status", no_wrap=True)
    for name in ("step", "val loss", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("error", overflow="fold")
    for job in jobs:
        job.look()
        table.add_row(
            escape(job.folder.name),
            job.result,
            "" if job.step is None else str(job.step),
            "" if job.val_loss is None else f"{job.val_loss:.4f}",
            "" if job.seconds is None else f"{job.seconds:.0f}",
            escape(job.error),
        )
    console = Console(width=None if sys.stdout.isatty() else 160)
    with console.capture() as shown:
        console.print(table)
    say(shown.get().rstrip("\n"))


def machine_threads() -> int:
    """What the user allows, else the cores that this process may use."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdecimal() and int(asked) > 0:
        return int(asked)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def visible_gpus() -> list[str]:
    """Names of the CUDA devices that this process may use, found without importing torch."""
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    if asked is not None:
        return [one.strip() for one in asked.split(",") if one.strip()]
    if not shutil.which("nvidia-smi"):
        return []
    found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return [str(n) for n in range(sum(line.startswith("GPU ") for line in found.stdout.splitlines()))]
