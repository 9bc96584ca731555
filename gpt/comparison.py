"""Results of runs side by side: what may be averaged and what may be compared.

Run = one training. Line = all seeds of one configuration, a line of a table or a plot. Condition = what was measured
on; losses of two conditions are never averaged. Comparison = the lines of one condition. Losses: nats per token.
"""

import math
import statistics
from collections import Counter
from dataclasses import dataclass, field, fields
from pathlib import Path

from gpt.errors import RunError
from gpt.results import (
    Record,
    count,
    differing,
    diverged,
    find_runs,
    get,
    in_short,
    is_number,
    label_runs,
    ok,
    read_run,
    reading,
    settings,
    show,
)

DISJOINT, SLIDING = "disjoint", "sliding"
# Student's t: how many standard errors two-sided 95% intervals reach to each side, for 2, 3, ... values.
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131) + (
    2.120,
    2.110,
    2.101,
    2.093,
    2.086,
    2.080,
    2.074,
    2.069,
    2.064,
    2.060,
    2.056,
    2.052,
    2.048,
    2.045,
    2.042,
)


@dataclass(frozen=True)
class Condition:
    """What a measurement was taken on. Losses are comparable only where all of this is equal."""

    data: str | None = field(compare=False)  # its name; where the hash is not known, that stands for it below
    data_sha256: str | None
    tokenizer: str | None
    dtype: str | None
    documents: str | None
    split: str | None
    train_length: int | None
    block_length: int | None
    n_blocks: int | None
    n_targets: int | None

    @property
    def reads(self) -> tuple[bool, bool]:
        """What was asked for: whether the test split, whether within documents. Both stand beside the default."""
        return self.split == "test", self.documents == "within"


@dataclass(frozen=True)
class Mean:
    """A mean over `n` seeds and its sample standard deviation; one seed has `block_se`, the error over text blocks."""

    mean: float
    sd: float | None
    n: int
    block_se: float | None = None

    @property
    def margin(self) -> float | None:
        """Half of the two-sided 95% interval of the mean (Student's t over seeds); None for one seed."""
        if self.sd is None:
            return None
        return T95[min(self.n - 2, len(T95) - 1)] * self.sd / math.sqrt(self.n)

    @property
    def tie(self) -> bool:
        """For a mean of differences: whether they may all come from the seeds. One seed can say neither."""
        return self.margin is not None and abs(self.mean) <= self.margin


@dataclass(frozen=True)
class Line:
    """All seeds of one configuration, read in one way."""

    label: str
    base: str  # the label without the way of reading
    scheme: str
    way: dict[str, str]  # how the checkpoints are read otherwise than they were trained, see results.reading
    runs: dict  # seed -> Record
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
        return {seed: value for seed, value in found.items() if is_number(value)}

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

    def without(self, protocol: str, factor: float) -> dict:
        """{seed: why it has no value there}, of the seeds that have none."""
        rows = self.rows.get((protocol, factor), {})
        missing = self.runs.keys() - self.values(protocol, factor).keys()
        return {seed: why_none(rows.get(seed)) for seed in sorted(missing, key=str)}

    def unsupported(self, protocol: str, factor: float) -> str | None:
        """Why this line has no value there though it was measured, or None."""
        rows = self.rows.get((protocol, factor), {})
        if not rows or self.values(protocol, factor):
            return None
        return "; ".join(dict.fromkeys(why for seed, why in self.without(protocol, factor).items() if seed in rows))

    def diverged(self, protocol: str, factor: float) -> bool:
        """Whether a seed has a loss there that is no finite number: what the others have is no mean of the line."""
        return any(map(diverged, self.rows.get((protocol, factor), {}).values()))

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
    def runs(self) -> list[Record]:
        found = {run.folder: run for line in self.lines for run in line.runs.values()}
        return [found[folder] for folder in sorted(found)]

    def best(self, protocol: str, factor: float, seeds: int = 1) -> Line | None:
        """The line with the lowest mean loss, of those with so many seeds at least, none of which diverged.

        Among equals one that was trained for itself, then the first by name.
        """
        lines = [line for line in self.lines if not line.diverged(protocol, factor)]
        means = [(mean, line) for line in lines if (mean := line.mean(protocol, factor)) and mean.n >= seeds]
        return min((((m.mean, line.variant, line.label), line) for m, line in means), default=(None, None))[1]


@dataclass
class Results:
    """All that was read: the comparisons (that of the most runs first), and what the reader must know of them."""

    runs: list[Record]
    comparisons: list[Comparison]
    warnings: list[str] = field(default_factory=list)
    left_out: list[tuple[Record, str]] = field(default_factory=list)  # runs without a place in a table, and why
    used: set = field(default_factory=set)  # id(row) of the rows in the tables
    labels: dict = field(default_factory=dict)  # folder -> label


def why_none(row: dict | None) -> str:
    """Why a row has no loss that can be averaged."""
    if row is None:
        return "not measured"
    return "its loss is no finite number" if ok(row) else str(row.get("reason") or "no reason given")


def average(values) -> Mean | None:
    values = list(values)
    if not values:
        return None
    return Mean(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


def paired(line: Line, other: Line, protocol: str, factor: float) -> Mean | None:
    """`line` minus `other`, seed by seed, over the seeds both have; None without a common seed."""
    a, b = line.values(protocol, factor), other.values(protocol, factor)
    return average(a[seed] - b[seed] for seed in sorted(a.keys() & b.keys(), key=str))


def condition(row: dict, n_targets: int | None) -> Condition:
    names = ("data", "tokenizer", "dtype", "documents", "train_length", "block_length", "n_blocks")
    split = row.get("split", "val")  # of rows from before there was a test split
    text = row.get("data_sha256") or row.get("data")
    return Condition(**{name: row.get(name) for name in names}, data_sha256=text, split=split, n_targets=n_targets)


def agrees(part: Condition, whole: Condition) -> bool:
    """All that `part` says, `whole` says too; an unsupported row may have nulls."""
    names = (f.name for f in fields(Condition) if f.compare)
    return all(getattr(part, name) in (None, getattr(whole, name)) for name in names)


def conditions(run: Record) -> dict[Condition, list[dict]]:
    """The rows of the newest checkpoint by what they were measured on.

    The number of targets is that of the disjoint rows; sliding and unsupported rows go with those beside them.
    """
    groups, rest = {}, []
    for row in run.current:
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
    # Of what a run was asked for in several ways, take the way most runs share; then the longest blocks, the most text.
    votes = Counter(key for groups in by_run.values() for key in groups)
    rank = {key: (n, key.block_length or 0, key.n_targets or 0, str(key)) for key, n in votes.items()}
    members = {}
    for run in measured:
        groups = by_run[run.folder]
        taken = {
            reads: max((k for k in groups if k.reads == reads), key=rank.get) for reads in {k.reads for k in groups}
        }
        for best in taken.values():
            members.setdefault(best, []).append((run, groups[best]))
        older = sum((row.get("step") or 0) != run.newest for row in run.rows)
        counts = {
            "of older checkpoints": older,
            f"of other weights at step {run.newest}": len(run.rows) - older - len(run.current),
            "on other blocks or data": sum(len(rows) for key, rows in groups.items() if key not in taken.values()),
        }
        if any(counts.values()):
            parts = [f"{n} {what}" for what, n in counts.items() if n]
            results.warnings.append(
                f"{run.folder}: measurements left out of the tables: {', '.join(parts)} (they are in results.csv)"
            )
    order = sorted(members, key=lambda key: (key.reads, -len(members[key]), -(key.block_length or 0), str(key)))
    results.comparisons = [arrange(key, members[key], results) for key in order]
    warn(results)
    results.warnings = list(dict.fromkeys(results.warnings))
    return results


def drop_twins(measured: list[Record], results: Results) -> None:
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


def arrange(key: Condition, members: list[tuple[Record, list[dict]]], results: Results) -> Comparison:
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
        line = (results.labels[run.folder], tuple(reading(row).items()))
        owners.setdefault(line, {})[run.seed] = run
        cell = table.setdefault(line, {}).setdefault((row["protocol"], row["factor"]), {})
        if ok(row) or not ok(cell.get(run.seed, {})):  # what a text is too short for alone may be beside a measurement
            cell[run.seed] = row  # a later row of the same measurement replaces an earlier one
    for (base, way), cells in table.items():  # up to the training length, what is for longer inputs changes nothing
        if not {key for key, _ in way} <= {"position.overflow"} and not follows(way):
            continue
        for cell, by_seed in table.get((base, ()), {}).items():
            supported = {seed: row for seed, row in by_seed.items() if ok(row) and seed in owners[base, way]}
            _, factor = cell
            if supported and cell not in cells and factor <= 1:
                cells[cell] = supported
    lines = []
    shown = telling([way for _, way in table])
    for (base, way), cells in table.items():
        if way and not any(ok(row) for by_seed in cells.values() for row in by_seed.values()):
            continue  # such as a rescaling asked of all runs, for a scheme that does not rotate
        label = f"{base} ({in_short(shown[way])})" if way else base
        runs = owners[base, way]
        scheme = next(iter(runs.values())).scheme
        lines.append(Line(label, base, scheme, dict(way), runs, cells))
    drop_other_targets(lines, results)
    results.used |= {id(row) for line in lines for by_seed in line.rows.values() for row in by_seed.values()}

    def place(line: Line):
        start = [line.mean(DISJOINT, factor) for factor in factors[:1]]
        return (start[0].mean if start and start[0] else math.inf, line.label)

    factors = tuple(sorted({factor for line in lines for protocol, factor in line.rows if protocol == DISJOINT}))
    sliding = tuple(sorted({factor for line in lines for protocol, factor in line.rows if protocol == SLIDING}))
    return Comparison(key, tuple(sorted(lines, key=place)), factors, sliding, stride)


def follows(way: tuple) -> bool:
    """Whether this is a rescaling alone, stretched as far as the evaluation goes: at the training length it is none."""
    keys = {key for key, _ in way}
    return "scaling" in keys and not keys & {"rescaling.factor", "position.base", "position.ids"}


def telling(ways: list[tuple]) -> dict[tuple, dict[str, str]]:
    """Of each way of reading what tells it from the others of its kind."""
    found = {}
    for way in set(ways) - {()}:
        alike = [other for other in ways if other and other[0] == way[0]]
        found[way] = dict([way[0], *(item for item in way[1:] if not all(item in other for other in alike))])
    return found


def strides_of(folder: Path, rows: list[tuple[Record, dict]]) -> set[int]:
    found = {row.get("stride") for run, row in rows if run.folder == folder and row["protocol"] == SLIDING}
    return {stride for stride in found if is_number(stride)}


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
    for reads in dict.fromkeys(comparison.condition.reads for comparison in results.comparisons):
        parts = [vars(c.condition) for c in results.comparisons if c.condition.reads == reads]
        if len(parts) < 2:
            continue
        names = [n for n in parts[0] if len({str(part[n]) for part in parts}) > 1]
        texts = [f"{n}: {', '.join(short(part[n]) for part in parts)}" for n in names]
        notes.append(
            f"NOT ONE COMPARISON: the runs were measured in {len(parts)} different ways ({'; '.join(texts)}). "
            "They are shown in separate tables and never averaged; losses of different tables cannot be compared."
        )
    for comparison in results.comparisons:
        lines = [line for line in comparison.lines if not line.variant]
        configs = settings([run for run in comparison.runs if run.config])
        confounds = [k for k in differing(list(configs.values())) if not k.startswith("position.")]
        if "train.eval_tokens" in confounds:
            confounds.remove("train.eval_tokens")
            notes.append("final val loss is not comparable: the runs took it on different texts (train.eval_tokens)")
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
        precisions = sorted({str(run.status["dtype"]) for run in comparison.runs if run.status.get("dtype")})
        if len(precisions) > 1:
            notes.append(f"the runs were trained in different precisions: {', '.join(precisions)}")
        texts = sorted(map(short, {run.text for run in comparison.runs} - {None}))
        if len(texts) > 1:
            notes.append(f"the runs were trained on different texts: sha256 {', '.join(texts)}")
        notes += survivors(comparison)
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


def survivors(comparison: Comparison) -> list[str]:
    """Where a mean is over fewer seeds than its line has: which run is missing there, and why."""
    found = {}  # (folder, label, protocol, why) -> factors
    for line in comparison.lines:
        for protocol, factors in ((DISJOINT, comparison.factors), (SLIDING, comparison.sliding)):
            for factor in factors:
                for seed, why in line.without(protocol, factor).items():
                    if line.values(protocol, factor):
                        found.setdefault((line.runs[seed].folder, line.label, protocol, why), []).append(factor)
    return [
        f"{folder}: no {protocol} loss at {', '.join(f'{factor:g}x' for factor in factors)}: {why}; "
        f"the means of {label} there are over its other seeds"
        for (folder, label, protocol, why), factors in found.items()
    ]


def revision(run: Record) -> str | None:
    """The commit that trained the run, and whether its files had been changed since."""
    source = get(run.status, "versions.nanope")
    if not isinstance(source, dict) or not source.get("commit"):
        return None
    return str(source["commit"])[:10] + (" with uncommitted changes" if source.get("dirty") else "")


def short(value: object) -> str:
    text = str(value)
    return text[:12] if len(text) == 64 else text
