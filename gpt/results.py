"""Runs read from their folders: what was chosen, how it ended, what was measured, and what tells them apart."""

import json
import math
import os
import re
import statistics
from collections import Counter
from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path

import yaml

from gpt.errors import RunError
from gpt.files import read_json_lines
from gpt.run import read_status
from gpt.schema import CONFIGS, SECTIONS, as_written, flatten, plain

MARKS = ("config.yaml", "status.json", "metrics.jsonl", "eval.jsonl")  # a folder with one of these is a run
QUIET = (  # keys that change no loss, only where, how fast and how closely watched it is computed
    "train.eval_every",
    "train.checkpoint_every",
    "train.log_every",
    "runtime.device",
    "runtime.compile",
    "runtime.attention",  # of runs from before there was one kernel
    "sweep",
)
# What makes two rows the same measurement.
KEY = (
    "step",
    "checkpoint_sha256",
    "data_sha256",
    "documents",
    "eval_length",
    "protocol",
    "stride",
    "scaling",
    "scaling_factor",
    "scaling_parameters",
    "rope_base",
    "overflow",
    "ids",
    "block_length",
    "n_blocks",
    "dtype",
)
# What the fields of a row are, where they are not null; any other is a text, a number, true or false.
TEXTS = (
    "run position protocol scaling scaling_parameters overflow ids documents split data data_sha256 train_sha256 "
    "tokenizer checkpoint checkpoint_sha256 dtype status reason measured"
).split()
LENGTHS = "train_length eval_length factor stride block_length n_blocks".split()
COUNTS = "seed step tokens n_dropped n_targets n_bytes parameters position_parameters".split()
MEASURES = "loss loss_se tail_loss tail_loss_se perplexity bits_per_byte tokens_per_second".split()
MEASURES += ["scaling_factor", "rope_base"]
CURVE = ("position_curve", "position_bins")
DIVERGED = "diverged"  # the status of a row whose loss is no finite number
LARGEST = 1e305  # sums of larger numbers would overflow


@dataclass(frozen=True)
class Record:
    """One run as its folder tells it. `rows` are the measurements of eval.jsonl, `problems` what could not be read."""

    folder: Path
    config: dict
    status: dict
    metrics: tuple[dict, ...]
    rows: tuple[dict, ...]
    problems: tuple[str, ...]

    @property
    def scheme(self) -> str:
        return str(
            get(self.config, "position.name") or next((r["position"] for r in self.rows if "position" in r), "?")
        )

    @property
    def seed(self) -> object:
        return self.config.get("seed", next((r["seed"] for r in self.rows if "seed" in r), None))

    @property
    def state(self) -> str:
        return str(self.status.get("status", "unknown (no status.json)"))

    @property
    def newest(self) -> int:
        """The step of the newest checkpoint that was measured."""
        return max((row.get("step") or 0 for row in self.rows), default=0)

    @property
    def current(self) -> list[dict]:
        """The rows of the newest checkpoint, all of the same weights; other measurements are compared with nothing."""
        rows = [row for row in self.rows if (row.get("step") or 0) == self.newest]
        return [row for row in rows if row.get("checkpoint_sha256") == rows[-1].get("checkpoint_sha256")]

    @property
    def text(self) -> str | None:
        """sha256 of the ids that it was trained on, where its rows know it."""
        return next((row["train_sha256"] for row in reversed(self.current) if row.get("train_sha256")), None)

    @property
    def speed(self) -> float | None:
        """Training tokens per second: the median of what was logged, which a slow first step does not move."""
        values = [m["tokens_per_second"] for m in self.metrics if is_number(m.get("tokens_per_second"))]
        return statistics.median(values) if values else None

    @property
    def val_loss(self) -> float | None:
        return next((m["val_loss"] for m in reversed(self.metrics) if is_number(m.get("val_loss"))), None)


def is_number(value: object) -> bool:
    """A finite number that can be summed."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST


def is_length(value: object) -> bool:
    return is_number(value) and 0 < value < 1e30


def is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def is_text(value: object) -> bool:
    return isinstance(value, str)


def writable(value: object) -> bool:
    """Whether a value can be written again: plain, not endless, not too deep, without halves of characters."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def whole(row: dict) -> bool:
    """Whether a row of eval.jsonl has what identifies it, and in every field what belongs there."""
    if not (is_length(row.get("factor")) and row.get("protocol") and row.get("status")):
        return False
    fields = {name: value for name, value in row.items() if value is not None and name not in CURVE}
    kinds = {**dict.fromkeys(TEXTS, is_text), **dict.fromkeys(LENGTHS, is_length), **dict.fromkeys(COUNTS, is_count)}
    kinds |= dict.fromkeys(MEASURES, lambda value: isinstance(value, (int, float)) and not isinstance(value, bool))
    if not all(kinds.get(name, is_scalar)(value) for name, value in fields.items()):
        return False
    curve, bins = (row.get(name) for name in CURVE)
    return writable(row) and (curve is bins is None or is_curve(curve, bins))


def is_scalar(value: object) -> bool:
    return value is None or isinstance(value, (str, int, float))


def is_curve(losses: object, edges: object) -> bool:
    """Whether these are losses of bins and the edges of the bins, in tokens."""
    if not (isinstance(losses, list) and isinstance(edges, list) and len(edges) == len(losses) + 1 >= 2):
        return False
    rising = all(map(is_count, edges)) and all(a < b for a, b in zip(edges, edges[1:], strict=False))
    return rising and all(map(is_number, losses))


def sane_config(config: object) -> bool:
    """Whether this may be a run's configuration: sections of plain values, whatever keys an older version had."""
    if not isinstance(config, dict) or not config or not writable(config):
        return False
    sections = [config[name] for name in (*SECTIONS, "position") if name in config]
    if not all(isinstance(section, dict) for section in sections):
        return False
    name, seed = get(config, "position.name"), config.get("seed")
    return (name is None or is_text(name)) and (seed is None or is_count(seed))


def sane_status(status: dict) -> bool:
    """Whether status.json may be a run's: what is read of it is of the right kind."""
    changes, given = ([] if status.get(key) is None else status[key] for key in ("changes", "overrides"))
    texts = [status.get(name) or "" for name in ("status", "updated", "device", "dtype")]
    lists = isinstance(changes, list) and isinstance(given, list)
    return bool(status) and lists and all(map(is_text, [*texts, *given])) and writable(status)


def ok(row: dict) -> bool:
    return row.get("status") == "ok"


def diverged(row: dict) -> bool:
    """Whether the model was evaluated, and its loss is no finite number."""
    old = row.get("status") == "unsupported" and re.fullmatch("the loss is (nan|-?inf)", str(row.get("reason")))
    return row.get("status") == DIVERGED or bool(old) or (ok(row) and not is_number(row.get("loss")))


def get(config: dict, key: str) -> object:
    """The value under a dotted key, or None."""
    for part in key.split("."):
        config = config.get(part) if isinstance(config, dict) else None
    return config


def identity(row: dict) -> tuple:
    """What makes two rows of eval.jsonl the same measurement."""
    return tuple(row.get(key) for key in KEY)


def reading(row: dict) -> dict[str, str]:
    """How a checkpoint was read otherwise than it was trained: {key of eval.py: value as one types it}.

    A factor of rescaling is among them where it was fixed; one that follows the evaluation's is the same way at all
    lengths.
    """
    found = {}
    if row.get("scaling") not in (None, "none"):
        found["scaling"] = f"[{row['scaling']}]"
        for word in str(row.get("scaling_parameters") or "").split():
            key, _, value = word.partition("=")
            found[f"rescaling.{key}"] = f"[{value}]" if "," in value else value
    if row.get("rope_base") is not None:
        found["position.base"] = show(row["rope_base"])
    if row.get("overflow"):
        found["position.overflow"] = row["overflow"]
    if row.get("ids") == "random":
        found["position.ids"] = row["ids"]
    return found


def in_short(way: dict[str, str]) -> str:
    """A way of reading in short: yarn alpha=1, base=500000, clamp."""
    bare = ("scaling", "position.overflow")
    return " ".join(v.strip("[]") if k in bare else f"{k.rsplit('.', 1)[-1]}={v}" for k, v in way.items())


# ---- reading


def find_runs(folders: list[Path]) -> list[Path]:
    """Every run folder at or below `folders`, sorted; raises RunError where there is none."""
    found = set()
    for folder in folders:
        if not folder.is_dir():
            raise RunError(f"{folder}: no such folder; measure runs first: python eval.py runs=<folder of runs>")
        for here, below, files in os.walk(folder):
            if any(mark in files for mark in MARKS):
                found.add(Path(os.path.normpath(here)))
                below.clear()  # what is inside a run (checkpoints, wandb) is not another run
            below[:] = [name for name in below if not name.startswith(".") and name not in ("wandb", "checkpoints")]
    if not found:
        named = " ".join(str(folder) for folder in folders)
        raise RunError(
            f"{named}: no runs in it; train and measure some: python train.py, then python eval.py runs={named}"
        )
    return sorted(found)


def read_run(folder: Path) -> Record:
    """One run's folder; whatever is missing or damaged becomes a line of `problems`, never an exception."""
    problems = []
    try:
        config = yaml.safe_load((folder / "config.yaml").read_text("utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        config = None
    if not sane_config(config):
        config = {}
        problems.append("config.yaml is missing or not readable")
    try:
        status = read_status(folder)
    except (TypeError, ValueError, KeyError, OverflowError):  # of a process id that is none
        status = {}
    if not sane_status(status):
        status = {}
        problems.append("status.json is missing or not readable")
    read = {}
    for name in ("metrics.jsonl", "eval.jsonl"):
        try:
            read[name], torn = read_json_lines(folder / name)
        except OSError as error:
            read[name], torn = [], 0
            problems.append(f"{name}: cannot be read ({error.strerror or error})")
        problems += [f"{name}: {count(torn, 'unreadable line')} skipped"] if torn else []
    rows = read["eval.jsonl"]
    good = [row for row in rows if whole(row)]
    if len(good) < len(rows):
        bad = count(len(rows) - len(good), "row")
        problems.append(f"eval.jsonl: {bad} without factor, protocol or status, or with values of another kind skipped")
    if strange := sum(ok(row) and not is_number(row.get("loss")) for row in good):
        problems.append(f"eval.jsonl: {count(strange, 'row')} with a loss that is no finite number")
    newest = {}  # what was measured again, for want of memory, counts once, at its later place
    for row in good:
        newest.pop(identity(row), None)
        newest[identity(row)] = row
    return Record(folder, config, status, tuple(read["metrics.jsonl"]), tuple(newest.values()), tuple(problems))


def count(n: int, word: str) -> str:
    return f"{n} {word}" if n == 1 else f"{n} {word}s"


# ---- what tells runs apart


def show(value: object) -> str:
    """A value as one would type it: null, true, 500000, [1,2]."""
    if isinstance(value, float) and math.isfinite(value) and value == int(value) and abs(value) < 1e15:
        return str(int(value))
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def settings(runs: list[Record]) -> dict[Path, dict]:
    """{folder: the dotted keys that can change a loss}: not the seed, names, what only watches, or how it is measured.

    What a run was trained on and what it began with are told by their hashes where these are known: equal ones have the
    same words however they were spelled, and different ones have different words, if need be the hash.
    """
    flats = {run.folder: setting(run.config) for run in runs}
    spelled = {}
    for folder, flat in flats.items():
        text = {key: value for key, value in flat.items() if of_text(key) or key.startswith("tokenizer.")}
        spelled[folder] = json.dumps(text, sort_keys=True)
    named = in_words(spelled, {run.folder: run.text for run in runs})
    for folder, (text, mark) in named.items():
        rest = {key: value for key, value in flats[folder].items() if not of_text(key)}
        flats[folder] = rest | {key: value for key, value in json.loads(text).items() if of_text(key)}
        flats[folder] |= {"data.sha256": mark} if mark else {}
    for folder, start in starts(runs, flats).items():
        flats[folder]["init_from"] = start
    return flats


def of_text(key: str) -> bool:
    """Whether a key chooses the text, and not how it is read."""
    return key.startswith("data.") and key != "data.packing"


def setting(config: dict) -> dict:
    """The keys of `settings` as a configuration spells them.

    One that is younger than the run has the value of the time before it: today's default, but for schema.BEFORE.
    """
    defaults = {
        f"{section}.{field.name}": plain(field.default)
        for section, cls in SECTIONS.items()
        for field in fields(cls)
        if field.default is not MISSING
    }
    flat = defaults | {"init_from": None} | flatten(as_written(config))
    flat = {key: value for key, value in flat.items() if not key.startswith(("wandb.", "eval."))}
    return {key: value for key, value in flat.items() if key not in ("seed", "name", "sweep", *QUIET)}


def in_words(spelled: dict[Path, str], hashes: dict[Path, str | None]) -> dict[Path, tuple[str, str | None]]:
    """{folder: (spelling, mark)}, both equal where the hash is.

    The mark is that hash in short where a spelling has several of them, else None. A hash that is not known is that of
    the same spelling, if there is one only.
    """
    known = {}  # spelling -> hashes
    for folder, sha256 in hashes.items():
        known.setdefault(spelled[folder], set()).update({sha256} - {None})
    found, first = {}, {}  # folder -> hash, or spelling; that -> how the first folder spells it
    for folder, sha256 in hashes.items():
        alike = known[spelled[folder]]
        found[folder] = sha256 or (next(iter(alike)) if len(alike) == 1 else spelled[folder])
        first.setdefault(found[folder], spelled[folder])
    clash = len(set(first.values())) < len(first)
    marks = {one: ("unknown" if one == text else one[:8]) if clash else None for one, text in first.items()}
    return {folder: (first[one], marks[one]) for folder, one in found.items()}


def starts(runs: list[Record], flats: dict[Path, dict]) -> dict[Path, str]:
    """{folder: what a run began with}, of those that began with another.

    Where each seed of what is else one configuration began with its own seed of another run, the seed is left open
    (runs/pos/rope-s*): they are one line.
    """
    paths = {run.folder: run.config.get("init_from") for run in runs}
    paths = {folder: os.path.normpath(path) for folder, path in paths.items() if is_text(path)}
    hashes = {run.folder: get(run.status, "init_from.sha256") for run in runs if run.folder in paths}
    named = in_words(paths, {folder: sha256 if is_text(sha256) else None for folder, sha256 in hashes.items()})
    found = {folder: f"{path}@{mark}" if mark else path for folder, (path, mark) in named.items()}
    families = {}  # (path with an open seed, configuration) -> seed -> folders
    for run in runs:
        if run.folder in paths and (path := open_seed(paths[run.folder], run.seed)) != paths[run.folder]:
            rest = json.dumps(flats[run.folder] | {"init_from": None}, sort_keys=True)
            families.setdefault((path, rest), {}).setdefault(run.seed, []).append(run.folder)
    for (path, _), seeds in families.items():
        if len(seeds) > 1 and all(len({found[folder] for folder in folders}) == 1 for folders in seeds.values()):
            found |= {folder: path for folders in seeds.values() for folder in folders}
    return found


def open_seed(path: str, seed: object) -> str:
    """A run's or checkpoint's path with * for the seed in the run's name, where that is `seed`."""
    parts = path.split(os.sep)
    run = parts.index("checkpoints") - 1 if "checkpoints" in parts[1:] else -1
    parts[run] = re.sub(rf"-s{seed}(?=-|$)", "-s*", parts[run], count=1)
    return os.sep.join(parts)


def differing(flats: list[dict]) -> list[str]:
    """The keys whose values are not all the same. One that a run lacks differs, but for a parameter of a scheme."""

    def values(key: str) -> set[str]:
        found = {json.dumps(flat[key], sort_keys=True) for flat in flats if key in flat}
        everywhere = key.startswith("position.") or all(key in flat for flat in flats)
        return found if everywhere else found | {"absent"}

    return [key for key in sorted({key for flat in flats for key in flat}) if len(values(key)) > 1]


@cache
def own_layers(scheme: str) -> str:
    """The pattern of layers that configs/position/<scheme>.yaml has: PPPN of rope_nope, P of most."""
    path = CONFIGS / "position" / f"{scheme}.yaml"
    return yaml.safe_load(path.read_text(encoding="utf-8")).get("layers", "P") if path.is_file() else "P"


def label_runs(runs: list[Record]) -> dict[Path, str]:
    """A label for each run: its scheme, then what else sets it apart from the others, from the configurations.

    Position parameters are named where runs of the same scheme differ in them, everything else where any run differs.
    """
    known = [run for run in runs if run.config]  # a lost config.yaml would make every key differ
    flats = settings(known)
    common = [key for key in differing([flats[run.folder] for run in known]) if not key.startswith("position.")]
    shorts = Counter(key.rsplit(".", 1)[-1] for key in common)
    labels = {}
    for run in runs:
        flat = flats.get(run.folder, {})
        same = [flats[other.folder] for other in known if other.scheme == run.scheme]
        words = [run.scheme] if run.config else [run.scheme, f"(no config.yaml in {run.folder})"]  # who knows
        layers = str(flat.get("position.layers", "P"))
        if layers != own_layers(run.scheme):
            words.append(f"layers={layers}")
        for key in differing(same) if run.config else []:
            if key in flat and key.startswith("position.") and key not in ("position.layers", "position.name"):
                words.append(f"{key.removeprefix('position.')}={show(flat.get(key))}")
        for key in common if run.config else []:
            short = key.rsplit(".", 1)[-1]
            words.append(f"{short if shorts[short] == 1 and short != 'name' else key}={show(flat.get(key))}")
        planned = get(run.config, "train.steps")
        if run.rows and planned and run.newest != planned:
            words.append(f"step={run.newest}")  # a half-trained model is not a seed of the finished ones
        labels[run.folder] = " ".join(words)
    for key in reversed(QUIET):  # runs of one configuration and seed: the sweep, or what changes no loss, tells apart
        groups = {}
        for run in runs:
            groups.setdefault(labels[run.folder], []).append(run)
        for label, group in groups.items():
            if (
                len({str(run.seed) for run in group}) < len(group)
                and len({show(get(r.config, key)) for r in group}) > 1
            ):
                for run in group:
                    labels[run.folder] = f"{label} {key.rsplit('.', 1)[-1]}={show(get(run.config, key))}"
    return labels
