"""One run's folder: what was chosen, what was measured, how it ended, and who works in it now.

    runs/<sweep>/<name>/config.yaml      the configuration, resolved and plain
                        metrics.jsonl    one object a line, the truth; wandb is a mirror of it
                        status.json      running | done | failed | interrupted, the step, the error, the versions
                        checkpoints/     see checkpoint.py
                        eval.jsonl       what eval.py measured

Nothing here knows a model, and nothing imports torch: a sweep asks here which of its runs are done.
"""

import contextlib
import errno
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import yaml

from gpt.decide import decide
from gpt.errors import RunError, UserError
from gpt.files import read_json, read_json_lines, write_atomic
from gpt.mirror import Mirror, hide_secrets, line_key, new_wandb_id
from gpt.naming import run_folder
from gpt.progress import say
from gpt.schema import plain
from gpt.versions import versions

EXIT_CODES = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGHUP: 129, signal.SIGUSR1: 0}
STATUS_SECONDS = 5  # status.json follows the step at most this late


class Run:
    """Holds a run's folder for one process, from `with` to its end, and keeps its status honest on every way out.

        with Run(config) as run:
            if run.decision == "resume":
                run.resume_at(step of the loaded checkpoint)
            run.patient = True
            ... run.log(step, loss=...), stop where run.stop is set ...
            run.done(step)
        sys.exit(run.exit_code)

    Args:
        config: the final, plain configuration; `sweep` and `name` say where the folder is.
        root: the folder of sweeps.
        log: where lines for the user go.

    `decision` is "fresh", "resume" (a checkpoint is there) or "skip" (done already). Entering raises RunError where the
    folder holds another configuration, another process works in it, or it cannot be written.
    """

    def __init__(self, config: dict, root: Path = Path("runs"), log: Callable[[str], None] = say):
        self.config = plain(config)
        self.folder = run_folder(self.config, root)
        self.decision: str | None = None
        self.stop: int | None = None  # the signal that asked to stop
        self.patient = False  # whether that waits for the end of a step; before training it ends the run at once
        self.say = log  # where lines for the user go; a progress bar may take over
        self._status: dict = {}
        self._changes: dict = {}
        self._metrics = None
        self._mirror: Mirror | None = None
        self._old_handlers: dict = {}
        self._clock = self._written = 0.0

    def __enter__(self) -> "Run":
        self._lock = hold(self.folder)
        try:
            self.decision, self._changes = decide(self.folder, self.config)
            if self.decision != "skip":
                self._start()
        except BaseException as error:
            if self._old_handlers:
                self.__exit__(type(error), error, error.__traceback__)
            else:
                self._lock.release()
            raise
        return self

    def __exit__(self, kind, error, trace) -> None:
        early, self.patient = self.stop and not self.patient, True  # the status is written, whatever comes now
        try:
            if self.decision != "skip":
                self._finish(error)
        finally:
            for number, handler in self._old_handlers.items():
                signal.signal(number, handler)
            self._lock.release()
        if early:
            self.say(f"{self.folder}: stopped before the first step; the same command goes on")
        if self.stop == signal.SIGUSR1 and self._status["status"] == "interrupted":
            requeue(self.say)

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def exit_code(self) -> int:
        """0 where the run is done (or skipped), that of the signal that stopped it, else 1."""
        if self.decision == "skip" or self._status.get("status") == "done":
            return 0
        return EXIT_CODES.get(self.stop, 1)

    def resume_at(self, step: int) -> None:
        """Goes on after `step`: forgets what was logged and measured later, and takes over and reports changed keys."""
        self._record(step, self._changes)
        with writing(self.folder):
            write_atomic(self.folder / "config.yaml", yaml.safe_dump(self.config, sort_keys=False))
            dropped = self._open_metrics(step)
            self._forget_rows(step)
        self._update(step=step)
        # Lines that this run's earlier process sent to wandb already are not sent again.
        self._open_mirror(sent=dropped if self._status["wandb"] else set())

    def log(self, step: int, **values) -> None:
        """A line of metrics.jsonl, on disk at once, then wandb. Lines of a step come before its checkpoint is saved."""
        if self._metrics is None:
            raise RuntimeError("a resumed run calls resume_at(step) before it logs")
        line = {"step": step, **{key: json_number(value) for key, value in values.items()}}
        with writing(self.folder):
            if os.fstat(self._metrics.fileno()).st_nlink == 0:  # written on, it would be lost without a word
                raise FileNotFoundError(errno.ENOENT, "metrics.jsonl was removed while the run was at work")
            self._metrics.write(json.dumps(line, allow_nan=False) + "\n")
            self._metrics.flush()
        self._status["step"] = step
        if time.monotonic() - self._written > STATUS_SECONDS:
            self._update()
        self._mirror.log(line)

    def note(self, **fields) -> None:
        """Adds fields to status.json, such as device and threads. Another `dtype` than before is a recorded change."""
        old = self._status["dtype"]
        if "dtype" in fields and old not in (None, fields["dtype"]):
            self._record(self._status["step"], {"dtype": (old, fields["dtype"])})
        self._update(**fields)

    def done(self, step: int) -> None:
        """Says that all steps are taken and saved."""
        self._update(status="done", step=step)

    # What is below serves the methods above.

    def _start(self) -> None:
        before = read_json(self.folder / "status.json")
        fresh = self.decision == "fresh"
        self._clock = time.monotonic()

        def told(key: str, kind: type, default: object) -> object:  # a person or a disk may have put anything there
            return before[key] if not fresh and type(before.get(key)) is kind else default

        self._before = told("seconds", float, 0.0)
        self._status = {
            "status": "running",
            "step": told("step", int, 0),
            "error": None,
            "traceback": None,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": told("started", str, now()),
            "updated": now(),
            "seconds": self._before,
            "changes": told("changes", list, []),
            "versions": versions(),
            "threads": None,
            "device": None,
            "dtype": told("dtype", str, None),  # what it was trained in so far
            "wandb": told("wandb", str, None),  # the id of the wandb run, once there is one
            "init_from": told("init_from", dict, None),  # what it began with, where that is another run
        }
        if fresh:
            with writing(self.folder):
                write_atomic(self.folder / "config.yaml", yaml.safe_dump(self.config, sort_keys=False))
                self._open_metrics(-1)
                self._forget_rows(-1)
        self._update()
        if threading.current_thread() is threading.main_thread():
            self._old_handlers = {number: signal.signal(number, self._on_signal) for number in heeded()}
        if fresh:
            self._open_mirror()

    def _record(self, step: int, changes: dict) -> None:
        for key, (old, new) in changes.items():
            self.say(f"{key}: {old} -> {new} from step {step} on")
            self._status["changes"].append({"step": step, "key": key, "old": old, "new": new})

    def _finish(self, error: BaseException | None) -> None:
        ending = {}
        if error is None or isinstance(error, KeyboardInterrupt):
            if self._status["status"] != "done":
                ending = {"status": "interrupted"}
        elif isinstance(error, UserError):
            ending = {"status": "failed", "error": hide_secrets(str(error))}
        elif isinstance(error, SystemExit) and error.code in (None, *EXIT_CODES.values()):
            ending = {"status": "interrupted"} if self._status["status"] != "done" else {}
        else:
            line = " ".join(f"{type(error).__name__}: {error}".split())[:500]
            text = "".join(traceback.format_exception(error))
            ending = {"status": "failed", "error": hide_secrets(line), "traceback": hide_secrets(text)}
        try:
            self._update(**ending)
        except RunError as failure:  # the error that brought us here is the one to show
            self.say(f"warning: {failure}")
        if self._metrics:
            with contextlib.suppress(OSError):
                self._metrics.close()
        if self._mirror:
            self._mirror.finish(0 if self._status["status"] == "done" else 1)

    def _update(self, **fields) -> None:
        self._status.update(fields)
        self._status["updated"] = now()
        self._status["seconds"] = round(self._before + time.monotonic() - self._clock, 3)
        with writing(self.folder):
            write_atomic(self.folder / "status.json", json.dumps(self._status, indent=1))
        self._written = time.monotonic()

    def _on_signal(self, number: int, frame) -> None:
        if self.stop is None:
            self.stop = number
            if not self.patient:
                sys.exit(EXIT_CODES[number])
            return
        if number == signal.SIGHUP:  # comes twice from one terminal: the shell and the kernel both tell its end
            return
        if self._status["status"] == "running":
            with contextlib.suppress(RunError):
                self._update(status="interrupted")
        os._exit(128 + number)

    def _open_metrics(self, step: int) -> set:
        """Keeps the lines up to `step` (whole ones), opens the file behind them and returns the marks of the others."""
        path = self.folder / "metrics.jsonl"
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "metrics.jsonl is a folder")
        lines = [line for line in read_json_lines(path)[0] if type(line.get("step")) is int]
        kept = [line for line in lines if line["step"] <= step]
        write_atomic(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._metrics = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed at the end of the run)
        last = max((line["step"] for line in kept), default=0)
        if step - last >= self.config.get("train", {}).get("log_every", 1):
            self.say(f"warning: {path}: steps {last + 1} to {step} are not in it, and do not come back")
        return {line_key(line) for line in lines if line["step"] > step}

    def _forget_rows(self, step: int) -> None:
        """Takes the rows of weights after `step`, which are no more, out of eval.jsonl."""
        path = self.folder / "eval.jsonl"
        rows = read_json_lines(path)[0]
        kept = [row for row in rows if type(row.get("step")) is int and row["step"] <= step]
        if len(kept) < len(rows):
            write_atomic(path, "".join(json.dumps(row) + "\n" for row in kept))

    def _open_mirror(self, sent: set = frozenset()) -> None:
        identity = self._status["wandb"] or new_wandb_id(self.config)
        self._mirror = Mirror(self.folder, self.config, identity, lambda line: self.say(line), sent)
        if self._mirror.on:
            self.say(f"wandb: {self._mirror.where}")
            self._update(wandb=identity)


class Follower:
    """The run as the other processes of a torchrun see it: the same folder, but only process 0 writes and speaks."""

    decision = stop = None
    exit_code = 0

    def __init__(self, config: dict, root: Path = Path("runs")):
        self.folder = run_folder(config, root)
        self.checkpoints = self.folder / "checkpoints"

    def __enter__(self) -> "Follower":
        for number in EXIT_CODES:  # process 0 gets them too, finishes the step and tells
            signal.signal(number, signal.SIG_IGN)
        return self

    def __exit__(self, *_) -> None:
        pass

    def say(self, line: str) -> None:
        pass

    def nothing(self, *_, **__) -> None:
        pass

    log = note = resume_at = done = nothing


def heeded() -> list[int]:
    """The signals that ask to stop. nohup ignores SIGHUP, the end of the terminal, for what it starts."""
    return [n for n in EXIT_CODES if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]


# Folders: whose, and how they end


def already_done(config: dict, root: Path = Path("runs")) -> bool:
    """Whether this very run is done. Raises RunError where its folder holds another configuration."""
    config = plain(config)
    return decide(run_folder(config, root), config)[0] == "skip"


class HeldError(RunError):
    """Another process is at work in the folder."""


def hold(folder: Path):
    """The lock of a run's folder, which is made if missing. Dies with its process, so a dead holder's is free."""
    from filelock import FileLock, Timeout

    lock = FileLock(folder / ".lock")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            status = read_json(folder / "status.json")
            raise HeldError(
                f"{folder}: process {status.get('pid', '?')} on {status.get('host', '?')} is at work in it; "
                "wait for its end or choose another sweep= or name="
            ) from None
    return lock


def read_status(folder: Path) -> dict:
    """status.json, {} if there is none; a run whose process is gone is interrupted, whatever it last wrote."""
    status = read_json(Path(folder) / "status.json")
    here = status.get("status") == "running" and status.get("host") == socket.gethostname()
    if here and not alive(status.get("pid")):
        status.update(status="interrupted", error=f"process {str(status.get('pid'))[:20]} was killed")
    return status


def holder(folder: Path) -> str:
    """Which process is at work in a run's folder, in words; "" where none is."""
    status = read_status(folder)
    if status.get("status") == "running":
        with contextlib.suppress(RunError):
            try:
                hold(folder).release()
            except HeldError:
                return f"process {status.get('pid', '?')} on {status.get('host', '?')} is at work in it"
    return ""


def mark_killed(folder: Path, error: str) -> None:
    """For who started a run that died without a word: its status becomes failed, with `error`."""
    with contextlib.suppress(RunError):  # someone else took the run over, or the folder is gone
        lock = hold(folder)
        try:
            status = read_json(folder / "status.json")
            if status.get("status") in (None, "running"):
                status = {"step": 0, "traceback": None, **status, "status": "failed", "error": error, "updated": now()}
                with writing(folder):
                    write_atomic(folder / "status.json", json.dumps(status, indent=1))
        finally:
            lock.release()


def json_number(value: object) -> object:
    """A tensor or array of one value as a number; JSON has no NaN, so that is null."""
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextlib.contextmanager
def writing(folder: Path):
    """Turns the system's refusals to write into the run's one line."""
    try:
        yield
    except (OSError, NotImplementedError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RunError(
            f"{folder}: cannot be written: {reason}; make it writable or choose another sweep= or name="
        ) from None


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def alive(pid: object) -> bool:
    if type(pid) is not int or pid < 1:
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True


def requeue(say: Callable[[str], None]) -> None:
    """SIGUSR1 is how SLURM announces the end of the allotted time: asks for the same job again."""
    job = os.environ.get("SLURM_JOB_ID")
    if job and shutil.which("scontrol"):
        say(f"requeueing SLURM job {job}")
        subprocess.run(["scontrol", "requeue", job], check=False)
