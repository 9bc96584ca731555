"""What a start does in a run's folder: begin, go on, nothing at all, or refuse, by what is there already."""

from collections.abc import Iterable
from pathlib import Path

import yaml

from gpt import checkpoint
from gpt.errors import RunError, UserError
from gpt.files import read_json
from gpt.schema import differences, flatten, plain

# How a key of the configuration may differ from what a run's folder holds; all other keys are the run's structure.
ADDRESS = ("name", "sweep")  # where the folder is, not what is in it
FREE = (
    "wandb",
    "eval",
    "runtime.device",
    "runtime.compile",
    "train.log_every",
    "train.eval_every",
    "train.checkpoint_every",
    "train.eval_tokens",
)
TUNABLE = ("optim", "train.steps", "train.batch_size", "train.accumulate")
SHOWN = 3  # changed keys in an error


def decide(folder: Path, config: dict) -> tuple[str, dict]:
    """("fresh" | "resume" | "skip", {changed key: (stored, asked)}) for `config` in `folder`; raises RunError."""
    saved = checkpoint.candidates(folder / "checkpoints")
    if not saved and not _begun(folder):
        return "fresh", {}
    path = folder / "config.yaml"
    try:
        stored = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(stored, dict):
            raise ValueError("no mapping")
    except (FileNotFoundError, NotADirectoryError):
        if saved:
            raise RunError(f"{path}: is missing beside checkpoints; put it back or choose another name=") from None
        return "fresh", {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise RunError(f"{path}: cannot be read ({error}); put it back or choose another name=") from None
    stored = completed(stored, config, folder)
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


def _begun(folder: Path) -> bool:
    """Whether a run has logged anything: else it ended over a mistake that the next command may have mended."""
    metrics = folder / "metrics.jsonl"
    empty = metrics.is_file() and metrics.stat().st_size == 0
    return not empty or read_json(folder / "status.json").get("status") == "done"


def completed(stored: dict, asked: dict, folder: Path) -> dict:
    """`stored` with today's defaults where it is older than a key; raises RunError where it cannot be read any more."""
    if flatten(stored).keys() == flatten(asked).keys():
        return stored
    from gpt.config import load  # takes seconds, since it imports torch

    try:
        return plain(load(plain(stored)))
    except UserError as error:
        raise RunError(
            f"{folder}: its config.yaml cannot be read any more ({error}); "
            f"choose another sweep= or name=, or remove it: rm -r {folder}"
        ) from None


def within(key: str, sections: Iterable[str]) -> bool:
    return any(key == section or key.startswith(section + ".") for section in sections)


def arrows(changed: dict) -> str:
    """The changes in one line: the scheme first, its keys, which differ because it does, last; a few and a count."""
    other_scheme = "position.name" in changed
    order = sorted(changed, key=lambda key: (key != "position.name", other_scheme and within(key, ["position"])))
    shown = [f"{key}: {changed[key][0]!r} -> {changed[key][1]!r}" for key in order[:SHOWN]]
    return ", ".join(shown) + (f" and {len(order) - SHOWN} more" if len(order) > SHOWN else "")
