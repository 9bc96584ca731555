"""Results of runs, read from their folders and put side by side: what may be averaged and what may be compared.

Run = one training. Line = all seeds of one configuration, a line of a table or a plot. Condition = what was measured
on; losses of two conditions are never averaged. Comparison = the lines of one condition. Losses: nats per token.
"""

import json
import math
import os
import statistics
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from gpt.errors import RunError
from gpt.run import read_status

DISJOINT, SLIDING = "disjoint", "sliding"
MARKS = ("config.yaml", "status.json", "metrics.jsonl", "eval.jsonl")  # a folder with one of these is a run
QUIET = (  # keys that change no loss, only where, how fast and how closely watched it is computed
    "train.eval_every",
    "train.eval_tokens",
    "train.checkpoint_every",
    "train.log_every",
    "runtime.device",
    "runtime.compile",
    "runtime.attention",
    "sweep",
)


@dataclass(frozen=True)
class Run:
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
        """The newest checkpoint that was measured; older measurements are not compared with anything."""
        return max((row.get("step") or 0 for row in self.rows), default=0)

    @property
    def speed(self) -> float | None:
        """Training tokens per second: the median of what was logged, which a slow first step does not move."""
        values = [m["tokens_per_second"] for m in self.metrics if number(m.get("tokens_per_second"))]
        return statistics.median(values) if values else None

    @property
    def val_loss(self) -> float | None:
        return next((m["val_loss"] for m in reversed(self.metrics) if number(m.get("val_loss"))), None)


@dataclass(frozen=True)
class Condition:
    """What a measurement was taken on. Losses are comparable only where all of this is equal."""

    data: str | None
    data_sha256: str | None
    tokenizer: str | None
    dtype: str | None
    documents: str | None
    train_length: int | None
    block_length: int | None
    n_blocks: int | None
    n_targets: int | None


@dataclass(frozen=True)
class Mean:
    """A mean over `n` seeds and its sample standard deviation; one seed has `block_se`, the error over text blocks."""

    mean: float
    sd: float | None
    n: int
    block_se: float | None = None


@dataclass(frozen=True)
class Difference:
    """Mean of the differences seed by seed, and its standard error (None: one common seed)."""

    mean: float
    se: float | None
    n: int

    @property
    def tie(self) -> bool:
        return self.se is not None and (abs(self.mean) < 2 * self.se or self.mean == 0)


@dataclass(frozen=True)
class Line:
    """All seeds of one configuration, under one rescaling and one overflow policy."""

    label: str
    base: str  # the label without rescaling and overflow
    scheme: str
    overflow: str | None
    scaling: str
    runs: dict  # seed -> Run
    rows: dict  # (protocol, factor) -> {seed: row}

    @property
    def seeds(self) -> list:
        return sorted(self.runs, key=str)

    @property
    def variant(self) -> bool:
        """Not trained for itself: the same checkpoints as line `base`, read in another way."""
        return self.label != self.base

    def values(self, protocol: str, factor: float, name: str = "loss") -> dict:
        """{seed: value} of the supported measurements."""
        found = {seed: row.get(name) for seed, row in self.rows.get((protocol, factor), {}).items() if ok(row)}
        return {seed: value for seed, value in found.items() if number(value)}

    def mean(self, protocol: str, factor: float, name: str = "loss") -> Mean | None:
        values = self.values(protocol, factor, name)
        if len(values) == 1:
            seed, value = next(iter(values.items()))
            return Mean(value, None, 1, self.rows[protocol, factor][seed].get(name + "_se"))
        return average(values.values())

    def change(self, protocol: str, start: float, end: float) -> Mean | None:
        """Loss at `end` minus loss at `start`, run by run."""
        a, b = self.values(protocol, start), self.values(protocol, end)
        return average(b[seed] - a[seed] for seed in sorted(a.keys() & b.keys(), key=str))

    def unsupported(self, protocol: str, factor: float) -> str | None:
        """Why this line has no value there, or None."""
        rows = self.rows.get((protocol, factor), {}).values()
        if any(ok(row) for row in rows):
            return None
        return next((str(r.get("reason") or "no reason given") for r in rows if r.get("status") == "unsupported"), None)

    def first(self, name: str) -> object:
        """A fact that all rows share, such as the number of parameters."""
        rows = (row for by_seed in self.rows.values() for row in by_seed.values())
        return next((row[name] for row in rows if row.get(name) is not None), None)


@dataclass(frozen=True)
class Comparison:
    """The lines that may be compared with each other: one condition."""

    condition: Condition
    lines: tuple[Line, ...]
    factors: tuple[float, ...]
    sliding: tuple[float, ...]
    stride: int | None

    @property
    def runs(self) -> list[Run]:
        found = {run.folder: run for line in self.lines for run in line.runs.values()}
        return [found[folder] for folder in sorted(found)]

    def best(self, protocol: str, factor: float) -> Line | None:
        """The line with the lowest mean loss; among equals one that was trained for itself, then the first by name."""
        means = [(line.mean(protocol, factor), line) for line in self.lines]
        return min((((m.mean, line.variant, line.label), line) for m, line in means if m), default=(None, None))[1]


@dataclass
class Results:
    """All that was read: the comparisons (that of the most runs first), and what the reader must know of them."""

    runs: list[Run]
    comparisons: list[Comparison]
    warnings: list[str] = field(default_factory=list)
    left_out: list[tuple[Run, str]] = field(default_factory=list)  # runs without a place in a table, and why
    used: set = field(default_factory=set)  # id(row) of the rows in the tables
    labels: dict = field(default_factory=dict)  # folder -> label


def number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def ok(row: dict) -> bool:
    return row.get("status") == "ok"


def get(config: dict, key: str) -> object:
    """The value under a dotted key, or None."""
    for part in key.split("."):
        config = config.get(part) if isinstance(config, dict) else None
    return config


def flatten(config: dict, prefix: str = "") -> dict:
    flat = {}
    for key, value in config.items():
        flat.update(flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return flat


def average(values) -> Mean | None:
    values = list(values)
    if not values:
        return None
    return Mean(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


def paired(line: Line, other: Line, protocol: str, factor: float) -> Difference | None:
    """`line` minus `other` over the seeds both have; None without a common seed."""
    a, b = line.values(protocol, factor), other.values(protocol, factor)
    mean = average(a[seed] - b[seed] for seed in sorted(a.keys() & b.keys(), key=str))
    return mean and Difference(mean.mean, None if mean.sd is None else mean.sd / math.sqrt(mean.n), mean.n)


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


def read_lines(path: Path) -> tuple[list[dict], int]:
    """The objects of a JSON-lines file, and how many lines are none: a killed process leaves the last one torn."""
    if not path.is_file():
        return [], 0
    objects, bad = [], 0
    for line in path.read_bytes().splitlines():
        try:
            value = json.loads(line) if line.strip() else {}
        except ValueError:
            value = None
        if isinstance(value, dict):
            objects += [value] if value else []
        else:
            bad += 1
    return objects, bad


def read_run(folder: Path) -> Run:
    """One run's folder; whatever is missing or damaged becomes a line of `problems`, never an exception."""
    problems = []
    try:
        config = yaml.safe_load((folder / "config.yaml").read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        config = None
    if not isinstance(config, dict) or not config:
        config = {}
        problems.append("config.yaml is missing or not readable")
    if not (status := read_status(folder)):
        problems.append("status.json is missing or not readable")
    metrics, torn = read_lines(folder / "metrics.jsonl")
    rows, bad = read_lines(folder / "eval.jsonl")
    problems += [f"metrics.jsonl: {count(torn, 'unreadable line')} skipped"] if torn else []
    problems += [f"eval.jsonl: {count(bad, 'unreadable line')} skipped"] if bad else []
    whole = [row for row in rows if number(row.get("factor")) and row.get("protocol") and row.get("status")]
    if len(whole) < len(rows):
        problems.append(
            f"eval.jsonl: {count(len(rows) - len(whole), 'row')} without factor, protocol or status skipped"
        )
    if strange := sum(ok(row) and not number(row.get("loss")) for row in whole):
        problems.append(f"eval.jsonl: {count(strange, 'row')} with a loss that is no finite number")
    return Run(folder, config, status, tuple(metrics), tuple(whole), tuple(problems))


def count(n: int, word: str) -> str:
    return f"{n} {word}" if n == 1 else f"{n} {word}s"


# ---- naming the lines


def show(value: object) -> str:
    """A value as one would type it: null, true, 500000, [1,2]."""
    if isinstance(value, float) and math.isfinite(value) and value == int(value) and abs(value) < 1e15:
        return str(int(value))
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def setting(config: dict) -> dict:
    """The dotted keys that can change a loss: all but the seed, names, how often one looks, and how it is measured."""
    flat = {key: value for key, value in flatten(config).items() if not key.startswith(("wandb.", "eval."))}
    return {key: value for key, value in flat.items() if key not in ("seed", "name", "sweep", *QUIET)}


def differing(flats: list[dict]) -> list[str]:
    """The keys whose values are not all the same (a key that one lacks differs)."""
    keys = sorted({key for flat in flats for key in flat})
    return [key for key in keys if len({json.dumps(flat.get(key, "absent"), sort_keys=True) for flat in flats}) > 1]


def label_runs(runs: list[Run]) -> dict[Path, str]:
    """A label for each run: its scheme, then what else sets it apart from the others, from the configurations.

    Position parameters are named where runs of the same scheme differ in them, everything else where any run differs.
    """
    flats = {run.folder: setting(run.config) for run in runs}
    known = [run for run in runs if run.config]  # a lost config.yaml would make every key differ
    common = [key for key in differing([flats[run.folder] for run in known]) if not key.startswith("position.")]
    shorts = Counter(key.rsplit(".", 1)[-1] for key in common)
    labels = {}
    for run in runs:
        flat = flats[run.folder]
        same = [flats[other.folder] for other in known if other.scheme == run.scheme]
        words = [run.scheme] if run.config else [run.scheme, "(no config.yaml)"]
        layers = str(flat.get("position.layers", "P"))
        if set(layers) != {"P"}:
            words.append(f"layers={layers}")
        for key in differing(same) if run.config else []:
            if key.startswith("position.") and key not in ("position.layers", "position.name"):
                words.append(f"{key.removeprefix('position.')}={show(flat.get(key))}")
        for key in common if run.config else []:
            short = key.rsplit(".", 1)[-1]
            words.append(f"{short if shorts[short] == 1 and short != 'name' else key}={show(flat.get(key))}")
        planned = get(run.config, "train.steps")
        if run.rows and planned and run.newest != planned:
            words.append(f"step={run.newest}")  # a half-trained model is not a seed of the finished ones
        labels[run.folder] = " ".join(words)
    for key in QUIET[
        ::-1
    ]:  # two runs of one configuration and seed: the sweep, or what changes no loss, tells them apart
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


# ---- comparing


def condition(row: dict, n_targets: int | None) -> Condition:
    names = ("data", "data_sha256", "tokenizer", "dtype", "documents", "train_length", "block_length", "n_blocks")
    return Condition(**{name: row.get(name) for name in names}, n_targets=n_targets)


def agrees(part: Condition, whole: Condition) -> bool:
    """All that `part` says, `whole` says too; an unsupported row may have nulls."""
    return all(value in (None, getattr(whole, name)) for name, value in vars(part).items())


def conditions(run: Run) -> dict[Condition, list[dict]]:
    """The rows of the newest checkpoint by what they were measured on.

    The number of targets is that of the disjoint rows; sliding and unsupported rows go with those beside them.
    """
    rows = [row for row in run.rows if (row.get("step") or 0) == run.newest]
    groups, rest = {}, []
    for row in rows:
        if ok(row) and row["protocol"] == DISJOINT:
            groups.setdefault(condition(row, row.get("n_targets")), []).append(row)
        else:
            rest.append(row)
    for row in rest:
        bare = condition(row, None)
        homes = [key for key in groups if agrees(bare, key)]
        groups.setdefault(homes[0] if homes else bare, []).append(row)
    return groups


def compare(folders: list[Path]) -> Results:
    """Reads all runs at or below `folders` and arranges what may be compared; RunError where nothing was measured."""
    runs = [read_run(folder) for folder in find_runs(folders)]
    results = Results(runs, [])
    for run in runs:
        results.warnings += [f"{run.folder}: {problem}" for problem in run.problems]
        if not run.rows:
            results.left_out.append((run, "not evaluated"))
    measured = [run for run in runs if run.rows]
    if not measured:
        states = ", ".join(f"{n} {state}" for state, n in sorted(Counter(run.state for run in runs).items()))
        named = " ".join(str(folder) for folder in folders)
        raise RunError(
            f"{named}: {count(len(runs), 'run')} ({states}), none evaluated; next: python eval.py runs={named}"
        )
    results.labels = label_runs(measured)
    drop_twins(measured, results)

    by_run = {run.folder: conditions(run) for run in measured}
    share_targets(by_run)
    # Where a run was measured in several ways, take the way most runs share; then the longest blocks, the most text.
    votes = Counter(key for groups in by_run.values() for key in groups)
    rank = {key: (n, key.block_length or 0, key.n_targets or 0, str(key)) for key, n in votes.items()}
    members = {}
    for run in measured:
        groups = by_run[run.folder]
        best = max(groups, key=lambda key: rank[key])
        members.setdefault(best, []).append((run, groups[best]))
        older = len(run.rows) - sum(len(rows) for rows in groups.values())
        other = sum(len(rows) for key, rows in groups.items() if key != best)
        if older or other:
            parts = [f"{older} of older checkpoints"] * bool(older) + [f"{other} on other blocks or data"] * bool(other)
            results.warnings.append(
                f"{run.folder}: measurements left out of the tables: {', '.join(parts)} (they are in results.csv)"
            )
    order = sorted(members, key=lambda key: (-len(members[key]), -(key.block_length or 0), str(key)))
    results.comparisons = [arrange(key, members[key], results) for key in order]
    warn(results)
    results.warnings = list(dict.fromkeys(results.warnings))
    return results


def drop_twins(measured: list[Run], results: Results) -> None:
    """Of runs with the same configuration and seed keeps the first: counted twice, a seed would look like two."""
    seen = {}
    for run in list(measured):
        first = seen.setdefault((results.labels[run.folder], str(run.seed)), run)
        if first is not run:
            measured.remove(run)
            results.left_out.append((run, f"same configuration and seed as {first.folder}"))


def share_targets(by_run: dict[Path, dict[Condition, list[dict]]]) -> None:
    """Runs with nothing but unsupported rows have no number of targets: they join the others on the same blocks."""
    full = Counter(key for groups in by_run.values() for key in groups if key.n_targets is not None)
    for groups in by_run.values():
        for key in [key for key in groups if key.n_targets is None]:
            homes = [other for other in full if agrees(key, other)]
            if homes:
                home = max(homes, key=lambda other: (full[other], other.n_targets))
                groups.setdefault(home, []).extend(groups.pop(key))


def arrange(key: Condition, members: list[tuple[Run, list[dict]]], results: Results) -> Comparison:
    """Puts the rows of one condition into lines."""
    rows = [(run, row) for run, all_rows in members for row in all_rows]
    strides = Counter(stride for run in {run.folder for run, _ in rows} for stride in strides_of(run, rows))
    half = (key.train_length or 0) / 2
    stride = max(strides, key=lambda s: (strides[s], s == half, -s), default=None)
    if len(strides) > 1:
        results.warnings.append(
            f"sliding windows were measured with the strides {', '.join(map(str, sorted(strides)))}; "
            f"the tables show stride {stride} only"
        )
    table = {}  # line key -> (protocol, factor) -> seed -> row
    owners = {}
    for run, row in rows:
        if row["protocol"] == SLIDING and row.get("stride") != stride:
            continue
        line = (results.labels[run.folder], row.get("scaling") or "none", row.get("overflow"))
        owners.setdefault(line, {})[run.seed] = run
        cell = table.setdefault(line, {}).setdefault((row["protocol"], row["factor"]), {})
        cell[run.seed] = row  # a later row of the same measurement replaces an earlier one
    for (base, *_), cells in table.items():  # a policy for long inputs changes nothing where none is needed
        for cell, by_seed in table.get((base, "none", None), {}).items():
            supported = {seed: row for seed, row in by_seed.items() if ok(row)}
            if supported and cell not in cells:
                cells[cell] = supported
    lines = []
    for (base, scaling, overflow), cells in table.items():
        ways = [way for way in (scaling if scaling != "none" else None, overflow) if way]
        label = f"{base} ({', '.join(ways)})" if ways else base
        runs = owners[base, scaling, overflow]
        scheme = next(iter(runs.values())).scheme
        lines.append(Line(label, base, scheme, overflow, scaling, runs, cells))
    drop_other_targets(lines, results)
    results.used |= {id(row) for line in lines for by_seed in line.rows.values() for row in by_seed.values()}

    def place(line: Line):
        start = [line.mean(DISJOINT, factor) for factor in factors[:1]]
        return (start[0].mean if start and start[0] else math.inf, line.label)

    factors = tuple(sorted({factor for line in lines for protocol, factor in line.rows if protocol == DISJOINT}))
    sliding = tuple(sorted({factor for line in lines for protocol, factor in line.rows if protocol == SLIDING}))
    return Comparison(key, tuple(sorted(lines, key=place)), factors, sliding, stride)


def strides_of(folder: Path, rows: list[tuple[Run, dict]]) -> set[int]:
    found = {row.get("stride") for run, row in rows if run.folder == folder and row["protocol"] == SLIDING}
    return {stride for stride in found if number(stride)}


def drop_other_targets(lines: list[Line], results: Results) -> None:
    """Within a protocol all rows must score the same number of targets; takes out those that do not."""
    for protocol in (DISJOINT, SLIDING):
        cells = [(line, by_seed) for line in lines for (name, _), by_seed in line.rows.items() if name == protocol]
        counts = Counter(row.get("n_targets") for _, by_seed in cells for row in by_seed.values() if ok(row))
        if len(counts) < 2:
            continue
        most = max(counts, key=lambda n: (counts[n], n or 0))
        for line, by_seed in cells:
            for seed in [seed for seed, row in by_seed.items() if ok(row) and row.get("n_targets") != most]:
                row = by_seed.pop(seed)
                results.warnings.append(
                    f"{line.runs[seed].folder}: {protocol} at {row['factor']:g}x scored {row.get('n_targets')} "
                    f"targets, the others {most}: left out, since other targets have another loss"
                )


def warn(results: Results) -> None:
    """What could make a difference between two lines something else than their position schemes."""
    notes = []
    if len(results.comparisons) > 1:
        parts = [vars(c.condition) for c in results.comparisons]
        names = [n for n in parts[0] if len({str(part[n]) for part in parts}) > 1]
        texts = [f"{n}: {', '.join(short(part[n]) for part in parts)}" for n in names]
        notes.append(
            f"NOT ONE COMPARISON: the runs were measured in {len(parts)} different ways ({'; '.join(texts)}). "
            "They are shown in separate tables and never averaged; losses of different tables cannot be compared."
        )
    for comparison in results.comparisons:
        lines = [line for line in comparison.lines if not line.variant]
        configs = [setting(run.config) for run in comparison.runs if run.config]
        confounds = [k for k in differing(configs) if not k.startswith("position.")]
        if confounds:
            notes.append(f"more than the position scheme differs between the runs: {', '.join(confounds)}")
        steps = sorted({run.newest for run in comparison.runs})
        if len(steps) > 1:
            notes.append(f"the checkpoints are not equally trained: steps {', '.join(map(str, steps))}")
        revisions = sorted({str(revision(run)) for run in comparison.runs})
        if len(revisions) > 1:
            notes.append(f"the runs were trained by different source revisions: {', '.join(revisions)}")
        devices = sorted({str(run.status.get("device")).split(":")[0] for run in comparison.runs})
        if len(devices) > 1:
            notes.append(f"the runs were trained on different devices: {', '.join(devices)}")
        seeds = {line.label: line.seeds for line in lines}
        if len({str(s) for s in seeds.values()}) > 1:
            texts = [f"{label} {','.join(map(str, s))}" for label, s in sorted(seeds.items())]
            notes.append(f"the lines have different seeds ({'; '.join(texts)}): differences use the common ones")
        if any(len(s) == 1 for s in seeds.values()):
            notes.append(
                "lines with one seed have no spread over seeds: how far another seed would fall is not known, and no "
                "difference to them is called a tie or a win"
            )
    for run in results.runs:
        if run.rows and run.state != "done":
            notes.append(f"{run.folder}: status is {run.state}, measured at step {run.newest}")
        for change in run.status.get("changes") or []:
            if run.rows and isinstance(change, dict) and change.get("key"):
                words = f"{change['key']} from {show(change.get('old'))} to {show(change.get('new'))}"
                notes.append(f"{run.folder}: settings changed on the way: {words} at step {change.get('step')}")
    results.warnings = notes + results.warnings


def revision(run: Run) -> str | None:
    """The commit that trained the run, and whether its files had been changed since."""
    source = get(run.status, "versions.nanope")
    if not isinstance(source, dict) or not source.get("commit"):
        return None
    return str(source["commit"])[:10] + (" with uncommitted changes" if source.get("dirty") else "")


def short(value: object) -> str:
    text = str(value)
    return text[:12] if len(text) == 64 else text
