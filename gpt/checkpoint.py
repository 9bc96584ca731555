"""Checkpoints on disk: folders that are either whole or not there.

    <run>/checkpoints/step-000500/model.safetensors        the parameters
                                  optimizer.safetensors    the optimizer's tensors
                                  state.json               the rest, and size and sha256 of the other two; written last

A checkpoint is written beside (`step-000500.tmp`), synced to disk and renamed, so a kill at any moment leaves the
earlier ones and at most a leftover that the next save removes. Nothing is pickled. Loading verifies every byte.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpt.errors import CheckpointError, RunError
from gpt.files import digest, seal, sha256_of, write_synced

if TYPE_CHECKING:  # torch takes seconds to import, and a sweep only asks here which runs are done
    from torch import Tensor

FORMAT = 1
MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
KEPT = 3  # the last two and the best


class DamagedError(CheckpointError):
    """Files that are missing or are not those that were saved, whoever reads them and however often."""


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint. `state` is what was given to `save`; `sha256` is that of the model's file."""

    path: Path
    step: int
    state: dict
    sha256: str

    def model_state(self) -> dict[str, Tensor]:
        """The parameters by name, on the CPU."""
        return read_tensors(self.path / MODEL)

    def optimizer_state(self) -> dict[str, Tensor]:
        """The optimizer's tensors by name, on the CPU."""
        return read_tensors(self.path / OPTIMIZER)


def save(
    folder: Path, step: int, model_state: dict[str, Tensor], optimizer_state: dict[str, Tensor], state: dict
) -> Path:
    """Writes `folder`/step-<step> whole or not at all and returns its path.

    Args:
        folder: <run>/checkpoints; made if missing. One process at a time may save into it.
        model_state, optimizer_state: tensors of any shape by name, each under one name only.
        state: plain JSON values; "format", "step", "files" and "sha256" are added.
    Raises CheckpointError where the disk is full or not writable; earlier checkpoints stay as they are.
    """
    for name in (*model_state, *optimizer_state):
        assert "_orig_mod." not in name, f"{name}: save the model's own names, not those of its compiled wrapper"
    taken = {"format", "files", "sha256"} & set(state)
    assert not taken and state.get("step", step) == step, f"state may not hold {taken} or another step than {step}"
    target = folder / step_name(step)
    beside = folder / f"{target.name}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        clean(folder)
        beside.mkdir()
        write_tensors(beside / MODEL, model_state)
        write_tensors(beside / OPTIMIZER, optimizer_state)
        files = {name: fingerprint(beside / name) for name in (MODEL, OPTIMIZER)}
        write_synced(beside / STATE, seal({**state, "format": FORMAT, "step": step, "files": files}))
        sync_folder(beside)
        if target.exists():  # saved again: the old one stays readable under its other name until the new one is there
            os.replace(target, folder / f"{target.name}.old")
        os.replace(beside, target)
        sync_folder(folder)
        clean(folder)
    except OSError as error:
        shutil.rmtree(beside, ignore_errors=True)
        raise CheckpointError(
            f"{target}: cannot be saved: {error.strerror or error}; earlier checkpoints are intact; "
            "make room or mend the folder and run the same command again"
        ) from None
    return target


def load(path: Path) -> Checkpoint:
    """The checkpoint in this very folder, every byte verified; raises CheckpointError and never looks elsewhere."""
    path = Path(path)

    def refuse(file: str, why: str, kind: type[CheckpointError] = DamagedError) -> CheckpointError:
        return kind(f"{path / file}: {why}; name another checkpoint of the run, or the run's folder")

    if not path.is_dir():
        raise CheckpointError(
            f"{path}: no such checkpoint; a checkpoint is a folder like <run>/checkpoints/step-000500"
        )
    try:
        state = unseal((path / STATE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise refuse(STATE, "is missing, so this is no whole checkpoint") from None
    except OSError as error:
        raise refuse(STATE, f"cannot be read ({error.strerror or error})", CheckpointError) from None
    except (ValueError, RecursionError) as error:
        raise refuse(STATE, f"is damaged ({error})") from None
    if state["format"] != FORMAT:
        raise refuse(STATE, f"has format {state['format']!r}, this version reads {FORMAT}", CheckpointError)
    for name in (MODEL, OPTIMIZER):
        expected = state["files"][name]
        try:
            found = fingerprint(path / name)
            if found == expected:
                check_tensors(path / name)
        except FileNotFoundError:
            raise refuse(name, "is missing") from None
        except OSError as error:
            raise refuse(name, f"cannot be read ({error.strerror or error})", CheckpointError) from None
        except ValueError as error:
            raise refuse(name, f"holds no tensors ({error})") from None
        if found["size"] != expected["size"]:
            raise refuse(name, f"is damaged: {found['size']:,} bytes, expected {expected['size']:,}")
        if found != expected:
            raise refuse(name, f"is damaged: sha256 {found['sha256'][:12]}, expected {expected['sha256'][:12]}")
    given = {key: value for key, value in state.items() if key not in ("format", "files", "sha256")}
    return Checkpoint(path, state["step"], given, state["files"][MODEL]["sha256"])


def latest(folder: Path, log: Callable[[str], None] = print) -> Checkpoint | None:
    """The newest undamaged checkpoint of `folder`, None if it holds none at all.

    Warns through `log` when it passes over damaged ones; raises CheckpointError if every one is damaged.
    """
    damaged = []
    for path in candidates(folder):
        try:
            found = load(path)
        except CheckpointError as error:
            damaged.append((path, error))
            continue
        for bad, error in damaged:
            state = "is damaged" if isinstance(error, DamagedError) else "cannot be read"
            log(f"warning: {bad.name} {state} and passed over, going on from {path.name} ({error})")
        return found
    if damaged:
        names = ", ".join(path.name for path, _ in damaged)
        raise CheckpointError(
            f"{folder}: all checkpoints are damaged ({names}), so nothing can go on from there; "
            f"put a good one back, or give the run up: rm -r {Path(folder).parent}"
        )
    return None


def resolve(path: Path, log: Callable[[str], None] = print) -> Checkpoint:
    """What a user names: a checkpoint's folder (never anything else than that), or a run's folder (its newest)."""
    path = Path(path)
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        pass  # said below
    except (OSError, ValueError) as error:  # a name that is too long, or holds a zero byte
        why = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{str(path)[:100]}: cannot be read ({why}); name a run's folder") from None
    for folder in (path / "checkpoints", path):
        if candidates(folder):
            return latest(folder, log)
    if path.is_dir() and not (path / STATE).exists() and not re.fullmatch(NAME, path.name):
        raise CheckpointError(f"{path}: holds no checkpoint; name a run's folder or <run>/checkpoints/step-000500")
    return load(path)


def prune(folder: Path, best_step: int | None) -> None:
    """Removes all checkpoints but the last two that verify and the best one.

    One that could not be read just now, which a disk or a network may cause, stays until it can.
    """
    verified, best = 0, None if best_step is None else step_name(best_step)
    for path in candidates(folder):
        try:
            if verified < 2 and load(path):
                verified += 1
                continue
        except DamagedError:
            pass
        except CheckpointError:
            continue
        if path.name != best:
            discard(path)


def required_bytes(model_state: dict[str, Tensor], optimizer_state: dict[str, Tensor]) -> int:
    """Bytes of one checkpoint of these tensors, within a small margin."""
    tensors = (*model_state.values(), *optimizer_state.values())
    return sum(t.numel() * t.element_size() + 512 for t in tensors) + 65536


def check_space(folder: Path, bytes: int) -> None:
    """Raises RunError where `folder` cannot be written, or its disk cannot hold three checkpoints of `bytes` each."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_synced(folder / "probe.tmp", "")
        (folder / "probe.tmp").unlink()
        free = shutil.disk_usage(folder).free
        free += sum(file.stat().st_size for file in folder.glob("*/*") if file.is_file())  # those get replaced
    except OSError as error:
        raise RunError(f"{folder}: cannot be written: {error.strerror or error}; choose another folder") from None
    if free < KEPT * bytes:
        raise RunError(
            f"{folder}: room for {size_text(free)}, but {KEPT} checkpoints of {size_text(bytes)} each are kept; "
            "make room on this disk or start in a folder on another one"
        )


# What is below serves the functions above.


def size_text(bytes: float) -> str:
    """1.2 kB, 34.5 MB or 678.9 GB"""
    unit, name = next((one for one in ((1e9, "GB"), (1e6, "MB")) if bytes >= one[0]), (1e3, "kB"))
    return f"{bytes / unit:,.1f} {name}"


NAME = r"step-(\d{6,})(\.old)?"


def step_name(step: int) -> str:
    return f"step-{step:06d}"


def candidates(folder: Path) -> list[Path]:
    """The checkpoints of `folder`, newest first, damaged ones too, leftovers of dead saves not."""
    found = []
    for path in Path(folder).glob("step-*"):
        match = re.fullmatch(NAME, path.name)
        if match:
            found.append((int(match[1]), match[2] is None, path))
    return [path for *_, path in sorted(found, reverse=True)]


def clean(folder: Path) -> None:
    """Removes what a killed save or prune left behind; a checkpoint that was being replaced gets its name back."""
    for path in folder.glob("*.tmp"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for old in folder.glob("*.old"):
        if (folder / old.stem).exists():
            discard(old)
        else:
            os.replace(old, folder / old.stem)


def discard(path: Path) -> None:
    """Removes a checkpoint; renamed first, so that a kill half-way leaves no damaged one."""
    trash = path.with_name(f"{path.name}.tmp")
    os.replace(path, trash)
    shutil.rmtree(trash)


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    own, seen = {}, set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        memory = tensor.untyped_storage().data_ptr()
        own[name] = tensor.clone() if memory in seen else tensor  # views of one buffer: each its own bytes
        seen.add(memory)
    try:
        save_file(own, path)
    except SafetensorError as error:
        raise OSError(str(error)) from None
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def read_tensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); name another checkpoint of the run") from None


def check_tensors(path: Path) -> None:
    """Raises ValueError where the file is no safetensors file, whatever its checksum says."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt"):
            pass
    except SafetensorError as error:
        raise ValueError(str(error)) from None


def fingerprint(path: Path) -> dict:
    return {"size": path.stat().st_size, "sha256": sha256_of(path)}


def unseal(text: str) -> dict:
    """The checked content of a state.json; raises ValueError."""
    state = json.loads(text)
    if not isinstance(state, dict) or not {"format", "step", "files", "sha256"} <= set(state):
        raise ValueError("not the content of a state.json")
    if state.pop("sha256") != digest(state):
        raise ValueError("it does not match its own sha256")
    files = state["files"]
    if not isinstance(files, dict) or set(files) != {MODEL, OPTIMIZER}:
        names = sorted(files) if isinstance(files, dict) else files
        raise ValueError(f"it names the files {names!r}, allowed: {MODEL} and {OPTIMIZER}")
    for entry in files.values():
        kinds = {key: type(value) for key, value in entry.items()} if isinstance(entry, dict) else None
        if kinds != {"size": int, "sha256": str}:
            raise ValueError("an entry of files has no size and sha256")
    if type(state["step"]) is not int or state["step"] < 0:
        raise ValueError(f"step is {state['step']!r}, allowed: a whole number >= 0")
    return state


def sync_folder(path: Path) -> None:
    """Makes renames and new names in `path` survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
