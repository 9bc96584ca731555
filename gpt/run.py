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
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import re
import secrets
import shutil
import signal
import socket
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path

import yaml

from gpt import checkpoint
from gpt.errors import ConfigError, RunError, UserError
from gpt.mirror import Mirror, hide_secrets, mark, new_wandb_id

# How a key of the configuration may differ from what a run's folder holds; all other keys are the run's structure.
ADDRESS = ("name", "sweep")  # where the folder is, not what is in it
FREE = (
    "wandb",
    "runtime",
    "eval",
    "train.log_every",
    "train.eval_every",
    "train.checkpoint_every",
    "train.eval_tokens",
)
UNNAMED = (*ADDRESS, *FREE, "seed", "experiment")  # these make no other name
TUNABLE = ("optim", "train.steps", "train.batch_size", "train.accumulate")

EXIT_CODES = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGUSR1: 0}
STATUS_SECONDS = 5  # status.json follows the step at most this late
NAME_LENGTH = 60


class Run:
    """Holds a run's folder for one process, from `with` to its end, and keeps its status honest on every way out.

        with Run(config) as run:
            if run.decision == "resume":
                run.resume_at(step of the loaded checkpoint)
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

    def __init__(self, config: dict, root: Path = Path("runs"), log: Callable[[str], None] = print):
        self.config = plain(config)
        self.folder = folder_of(self.config, root)
        self.decision: str | None = None
        self.stop: int | None = None  # the signal that asked to stop
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
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(self, kind, error, trace) -> None:
        try:
            if self.decision != "skip":
                self._finish(error)
        finally:
            for number, handler in self._old_handlers.items():
                signal.signal(number, handler)
            self._lock.release()
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
        """Goes on after `step`: forgets later lines of metrics.jsonl, and takes over and reports changed keys."""
        for key, (old, new) in self._changes.items():
            self.say(f"{key}: {old} -> {new} from step {step} on")
            self._status["changes"].append({"step": step, "key": key, "old": old, "new": new})
        with writing(self.folder):
            write_atomic(self.folder / "config.yaml", yaml.safe_dump(self.config, sort_keys=False))
            dropped = self._open_metrics(step)
        self._update(step=step)
        # Lines that this run's earlier process sent to wandb already are not sent again.
        self._open_mirror(sent=dropped if self._status["wandb"] else set())

    def log(self, step: int, **values) -> None:
        """A line of metrics.jsonl, on disk at once, then wandb. Lines of a step come before its checkpoint is saved."""
        if self._metrics is None:
            raise RuntimeError("a resumed run calls resume_at(step) before it logs")
        line = {"step": step, **{key: number(value) for key, value in values.items()}}
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
        """Adds fields to status.json, such as device and threads."""
        self._update(**fields)

    def done(self, step: int) -> None:
        """Says that all steps are taken and saved."""
        self._update(status="done", step=step)

    # What is below serves the methods above.

    def _start(self) -> None:
        before = read_json(self.folder / "status.json")
        fresh = self.decision == "fresh"
        self._clock = time.monotonic()
        self._before = 0.0 if fresh else before.get("seconds", 0.0)
        self._status = {
            "status": "running",
            "step": 0 if fresh else before.get("step", 0),
            "error": None,
            "traceback": None,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": now() if fresh else before.get("started", now()),
            "updated": now(),
            "seconds": self._before,
            "changes": [] if fresh else before.get("changes", []),
            "versions": versions(),
            "threads": None,
            "device": None,
            "wandb": None if fresh else before.get("wandb"),  # the id of the wandb run, once there is one
        }
        if fresh:
            with writing(self.folder):
                write_atomic(self.folder / "config.yaml", yaml.safe_dump(self.config, sort_keys=False))
                self._open_metrics(-1)
        self._update()
        if threading.current_thread() is threading.main_thread():
            self._old_handlers = {number: signal.signal(number, self._on_signal) for number in EXIT_CODES}
        if fresh:
            self._open_mirror()

    def _finish(self, error: BaseException | None) -> None:
        ending = {}
        if error is None or isinstance(error, KeyboardInterrupt):
            if self._status["status"] != "done":
                ending = {"status": "interrupted"}
        elif isinstance(error, UserError):
            ending = {"status": "failed", "error": hide_secrets(str(error))}
        elif isinstance(error, SystemExit) and error.code in (0, None, 130, 143):
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
            return
        if self._status["status"] == "running":
            with contextlib.suppress(RunError):
                self._update(status="interrupted")
        os._exit(128 + number)

    def _open_metrics(self, step: int) -> set:
        """Keeps the lines up to `step` (whole ones), opens the file behind them and returns the marks of the others."""
        path = self.folder / "metrics.jsonl"
        lines = read_lines(path)
        kept = [line for line in lines if line["step"] <= step]
        write_atomic(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._metrics = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed at the end of the run)
        return {mark(line) for line in lines if line["step"] > step}

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
        self.folder = folder_of(config, root)
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


# Folders: where, whose, and what to do with one that exists.


def folder_name(config: dict, overrides: list[str]) -> str:
    """A run's name: `name` where it is set, else <position>-s<seed>[-<what else was overridden>].

    Args:
        config: the composed configuration, plain. Values come from here, so 1e-4 and 0.0001 give one name.
        overrides: of the command line, such as optim.lr=1e-4, in any order.
    A hash is added wherever shortening loses something, so no two configurations share a name by accident.
    Raises ConfigError on a name that cannot be a folder's.
    """
    if config.get("name"):
        return check_name("name", config["name"])
    given = {}
    for override in overrides:
        key, _, text = override.partition("=")
        key = key.strip().lstrip("+")
        if not (within(key, UNNAMED) or key in ("position", "position.name") or key.startswith("hydra")):
            given[key] = text.strip()
    leaves = {key: value for key, value in flatten(config).items() if not within(key, UNNAMED)}
    given = {key: leaves.get(key, text) for key, text in sorted(given.items())}
    short = {key: shorten(key, leaves) for key in (*leaves, *given)}
    items, lost = [], False
    for key, value in given.items():
        text = value if isinstance(value, str) else number_text(value)
        item = re.sub(r"[^A-Za-z0-9._-]+", "_", short[key] + text)
        lost |= item != short[key] + text
        # Whatever could be read as another key, as a further key, or as a value of another type:
        lost |= any(item.startswith(other) for other in short.values() if other != short[key])
        lost |= any(part.startswith(other) for part in item.split("-")[1:] for other in short.values())
        lost |= isinstance(value, str) and bool(re.fullmatch(r"true|false|null|-?[\d.]+(e-?\d+)?", text))
        items.append(item)
    head = f"{config['position']['name']}-s{config['seed']}"
    name = "-".join([head, *items])
    if lost or len(name) > NAME_LENGTH:
        text = json.dumps(given, sort_keys=True)
        name = f"{name[: NAME_LENGTH - 9].rstrip('-._')}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return check_name("name", name)


def check_name(key: str, name: object) -> str:
    """`name` if it can be a folder's; raises ConfigError naming `key`."""
    fine = isinstance(name, str) and 0 < len(name) <= 100 and name.strip(". ") and name == name.strip()
    if not fine or re.search(r"[/\\\x00-\x1f\x7f]", name):
        raise ConfigError(key, name, "1 to 100 characters, no slashes, not only dots, no spaces around")
    return name


def folder_of(config: dict, root: Path = Path("runs")) -> Path:
    """<root>/<sweep>/<name>; raises ConfigError."""
    return Path(root) / check_name("sweep", config.get("sweep")) / check_name("name", config.get("name"))


def already_done(config: dict, root: Path = Path("runs")) -> bool:
    """Whether this very run is done. Raises RunError where its folder holds another configuration."""
    config = plain(config)
    return decide(folder_of(config, root), config)[0] == "skip"


def decide(folder: Path, config: dict) -> tuple[str, dict]:
    """("fresh" | "resume" | "skip", {changed key: (stored, asked)}) for `config` in `folder`; raises RunError."""
    saved = checkpoint.candidates(folder / "checkpoints")
    path = folder / "config.yaml"
    if not path.exists():
        if saved:
            raise RunError(f"{path}: is missing beside checkpoints; put it back or choose another name=")
        return "fresh", {}
    try:
        stored = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(stored, dict):
            raise ValueError("no mapping")
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise RunError(f"{path}: cannot be read ({error}); put it back or choose another name=") from None
    changed = differences(stored, config)
    structure = {key: value for key, value in changed.items() if not within(key, (*ADDRESS, *FREE, *TUNABLE))}
    if structure:
        raise RunError(
            f"{folder}: holds another configuration: {arrows(structure)}; "
            f"choose another sweep= or name=, or remove it: rm -r {folder}"
        )
    tunable = {key: value for key, value in changed.items() if within(key, TUNABLE)}
    asked, before = config.get("train", {}).get("steps"), stored.get("train", {}).get("steps")
    if read_json(folder / "status.json").get("status") == "done":
        grown = asked is not None and before is not None and asked > before
        if not tunable:
            return "skip", {}
        if not grown:
            raise RunError(
                f"{folder}: is done after {before} steps, and this cannot change any more: {arrows(tunable)}; "
                "ask for more train.steps, or choose another sweep= or name="
            )
        if not saved:
            raise RunError(f"{folder}: is done, but its checkpoints are gone, so train.steps={asked} has no start")
        return "resume", tunable
    if not saved:
        return "fresh", {}
    reached = int(saved[0].name.split("-")[1].split(".")[0])
    if asked is not None and asked < reached:
        raise RunError(f"train.steps: got {asked}, allowed: at least {reached}, the step that {folder} has reached")
    return "resume", tunable


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
            raise RunError(
                f"{folder}: process {status.get('pid', '?')} on {status.get('host', '?')} is at work in it; "
                "wait for its end or choose another sweep= or name="
            ) from None
    return lock


def read_status(folder: Path) -> dict:
    """status.json, {} if there is none; a run whose process is gone is interrupted, whatever it last wrote."""
    status = read_json(Path(folder) / "status.json")
    here = status.get("status") == "running" and status.get("host") == socket.gethostname()
    if here and not alive(status.get("pid", 0)):
        status.update(status="interrupted", error=f"process {status['pid']} was killed")
    return status


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


def differences(old: dict, new: dict) -> dict:
    """{dotted key: (old value, new value)} where two plain configurations differ; a missing key counts as null."""
    old, new = flatten(old), flatten(new)
    return {key: (old.get(key), new.get(key)) for key in (old | new) if old.get(key) != new.get(key)}


def flatten(config: dict, prefix: str = "") -> dict:
    flat = {}
    for key, value in config.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return flat


def within(key: str, sections: Iterable[str]) -> bool:
    return any(key == section or key.startswith(section + ".") for section in sections)


def arrows(changed: dict) -> str:
    return ", ".join(f"{key}: {old!r} -> {new!r}" for key, (old, new) in changed.items())


def shorten(key: str, leaves: dict) -> str:
    """The last part of a dotted key, where no other key ends so."""
    last = key.rsplit(".", 1)[-1]
    return last if sum(leaf.rsplit(".", 1)[-1] == last for leaf in {*leaves, key}) == 1 else key


def number_text(value: object) -> str:
    """The shorter of 0.0001 and 1e-4."""
    if not isinstance(value, float):
        return json.dumps(value)
    if value.is_integer() and abs(value) < 1e7:
        return str(int(value))
    head, tail = f"{value:e}".split("e")
    short = f"{head.rstrip('0').rstrip('.')}e{int(tail)}"
    return short if float(short) == value and len(short) < len(repr(value)) else repr(value)


def plain(config: dict) -> dict:
    """`config` as it reads back from YAML: no tuples, no shared parts."""
    return yaml.safe_load(yaml.safe_dump(json.loads(json.dumps(config))))


# Small files


def write_atomic(path: Path, text: str) -> None:
    """Writes beside, syncs and renames: readers see the old text or the new one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        checkpoint.write_synced(beside, text)
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise


def read_json(path: Path) -> dict:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        return value if isinstance(value, dict) else {}
    except (OSError, ValueError):
        return {}


def read_lines(path: Path) -> list[dict]:
    """The whole lines of a metrics.jsonl; a torn last one is left out."""
    lines = []
    with contextlib.suppress(FileNotFoundError):
        for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                line = json.loads(text)
                if isinstance(line, dict) and isinstance(line.get("step"), int):
                    lines.append(line)
    return lines


def number(value: object) -> object:
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


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def versions() -> dict:
    found = {"python": platform.python_version()}
    for package in ("torch", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return {**found, "nanope": source_revision()}


def source_revision() -> dict | None:
    """{"commit", "dirty"} of the code that runs, None where it is no git checkout."""
    here = Path(__file__).resolve().parent.parent

    def git(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=here, capture_output=True, text=True, check=True, timeout=10).stdout

    try:
        return {"commit": git("rev-parse", "HEAD").strip(), "dirty": bool(git("status", "--porcelain").strip())}
    except (OSError, subprocess.SubprocessError):
        return None


def requeue(say: Callable[[str], None]) -> None:
    """SIGUSR1 is how SLURM announces the end of the allotted time: asks for the same job again."""
    job = os.environ.get("SLURM_JOB_ID")
    if job and shutil.which("scontrol"):
        say(f"requeueing SLURM job {job}")
        subprocess.run(["scontrol", "requeue", job], check=False)


def mirror_evaluation(folder: Path, rows: list[dict], log: Callable[[str], None] = print) -> None:
    """Adds rows of eval.jsonl to the wandb run that mirrored the training in `folder`; does nothing if none did."""
    status = read_json(Path(folder) / "status.json")
    if not rows or not status.get("wandb"):
        return
    config = yaml.safe_load((Path(folder) / "config.yaml").read_text(encoding="utf-8"))
    mirror = Mirror(Path(folder), config, status["wandb"], log)
    mirror.table(rows, first_step=status.get("step", 0) + 1)
    mirror.finish(0 if status.get("status") == "done" else 1)
