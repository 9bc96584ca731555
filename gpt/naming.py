"""What a run is called, and where its folder is: a function of its configuration, never of the clock."""

import difflib
import hashlib
import json
import os
import re
from pathlib import Path

from gpt.decide import ADDRESS, FREE, within
from gpt.errors import ConfigError
from gpt.schema import flatten

UNNAMED = (*ADDRESS, *FREE, "seed", "experiment")  # these make no other name
NAME_LENGTH = 60
LONG = 24  # characters of a key and its value; longer ones come last
INNER = ("checkpoints", "wandb")  # folders inside a run: who looks for runs does not look there


def folder_name(config: dict, overrides: list[str]) -> str:
    """A run's name: `name` where it is set, else <position>-s<seed>[-<what else was overridden>].

    Args:
        config: the composed configuration, plain. Values come from here, so 1e-4 and 0.0001 give one name.
        overrides: of the command line, such as optim.lr=1e-4, in any order.
    A hash is added wherever shortening loses something, so no two configurations share a name by accident. Where it is
    too long, the scheme's own keys come first, of a path only the last part is left, and what is long comes last.
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
    items, lost = {}, False
    for key, value in given.items():
        text = value if isinstance(value, str) else number_text(value)
        items[key] = item = plain_text(short[key] + text)
        lost |= item != short[key] + text
        # Whatever could be read as another key, as a further key, or as a value of another type:
        lost |= any(item.startswith(other) for other in short.values() if other != short[key])
        lost |= any(part.startswith(other) for part in item.split("-")[1:] for other in short.values())
        lost |= isinstance(value, str) and bool(re.fullmatch(r"true|false|null|-?[\d.]+(e-?\d+)?", text))
    head = f"{config['position']['name']}-s{config['seed']}"
    name = "-".join([head, *items.values()])
    if lost or len(name) > NAME_LENGTH:
        room = NAME_LENGTH - 9
        if len(name) > room:  # what is cut off should not be what differs
            for key, value in given.items():
                if isinstance(value, str) and "/" in value:
                    items[key] = plain_text(short[key] + value.rstrip("/").rsplit("/", 1)[-1])
            order = sorted(items, key=lambda key: (len(items[key]) > LONG, not within(key, ["position"]), key))
            name = "-".join([head, *(items[key] for key in order)])
        text = json.dumps(given, sort_keys=True)
        name = f"{name[:room].rstrip('-._')}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return check_name("name", name)


def plain_text(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text)


def check_name(key: str, name: object) -> str:
    """`name` if it can be a folder's; raises ConfigError naming `key`."""
    fine = isinstance(name, str) and 0 < len(name) <= 100 and not name.startswith(".") and name == name.strip()
    if not fine or re.search(r"[/\\\x00-\x1f\x7f]", name) or name in INNER:
        allowed = f"1 to 100 characters, no slashes, no dot first, no spaces around, not {' or '.join(INNER)}"
        raise ConfigError(key, name, allowed)
    return name


def run_folder(config: dict, root: Path = Path("runs")) -> Path:
    """<root>/<sweep>/<name>; raises ConfigError."""
    return Path(root) / check_name("sweep", config.get("sweep")) / check_name("name", config.get("name"))


def check_start(path: str, root: Path = Path("runs")) -> None:
    """Raises ConfigError where init_from is no folder; it says what is there, or which runs of `root` are called so."""
    if os.path.isdir(path):  # False, where Path.is_dir raises, for a name that is too long
        return
    allowed = "the folder of a run or of a checkpoint"
    if os.path.exists(path):
        raise ConfigError("init_from", path, f"{allowed}; this is a file")
    runs, wanted = sorted(str(place.parent) for place in root.glob("*/*/config.yaml")), os.path.normpath(path)
    near = [run for run in runs if run.startswith(wanted)] or difflib.get_close_matches(wanted, runs, cutoff=0.4)
    known = f"near it: {', '.join(near[:3])}" if near else f"and no run in {root}/ is called so"
    raise ConfigError("init_from", path, f"{allowed}; it is not there, {known}")


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
