"""A folder of runs as something to read: report.md, results.csv and two pictures. Losses in nats per token."""

import csv
import io
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from gpt.comparison import DISJOINT, SLIDING, Comparison, Line, Results, compare, paired, revision
from gpt.files import write_atomic
from gpt.results import CURVE, count, get, in_short, is_number, reading, show
from gpt.tables import BEST, TIE, Grid, cell, conditions_line, grids, left_out, some

FIELDS = (  # the columns of results.csv: the fields of a row of eval.jsonl but the curve; others that it has come last
    "run position seed step tokens train_length eval_length factor protocol stride scaling "
    "scaling_factor scaling_parameters rope_base overflow ids block_length "
    "n_blocks n_dropped documents split dtype "
    "loss loss_se tail_loss tail_loss_se perplexity bits_per_byte n_targets n_bytes "
    "tokens_per_second parameters position_parameters data data_sha256 train_sha256 tokenizer "
    "checkpoint checkpoint_sha256 status reason measured"
).split()


@dataclass(frozen=True)
class Report:
    """What was written: `files` lie in `folder`; `markdown` and `csv` are the texts of report.md and results.csv."""

    folder: Path
    results: Results
    markdown: str
    csv: str
    files: tuple[Path, ...]


def write_report(folders: list[Path], out: Path | None = None) -> Report:
    """Compares all runs at or below `folders` and writes report.md, results.csv and the two pictures.

    They land in `out`, by default the first folder. Same input, same bytes of report.md and results.csv.
    Raises RunError where a folder is missing, holds no runs, or none of them was evaluated.
    """
    from gpt import plots  # matplotlib takes a second to import

    folders = [Path(folder) for folder in folders]
    results = compare(folders)
    out = Path(out) if out is not None else folders[0]
    out.mkdir(parents=True, exist_ok=True)
    pictures = {}
    for i, comparison in enumerate(results.comparisons):
        tail = f"-{i + 1}" if i else ""  # runs that may not be compared get pictures of their own
        pictures[f"extrapolation{tail}.png"] = plots.png(plots.extrapolation(comparison))
        pictures[f"per_position{tail}.png"] = plots.png(plots.per_position(comparison))
    for old in out.glob("*.png"):
        if re.fullmatch(r"(extrapolation|per_position)-\d+\.png", old.name) and old.name not in pictures:
            old.unlink()  # of an earlier report
    text, table = markdown(results, folders, out), csv_text(results, out)
    contents = {"report.md": text.encode(errors="replace"), "results.csv": table.encode(errors="replace"), **pictures}
    for name, content in contents.items():
        write_atomic(out / name, content)
    return Report(out, results, text, table, tuple(out / name for name in contents))


# ---- report.md


def markdown(results: Results, folders: list[Path], out: Path) -> str:
    """The text of report.md."""
    parts = [f"# Position schemes compared: {out.resolve().name}"]
    alarms = [text for text in results.warnings if text.startswith("NOT ONE COMPARISON")]
    parts += [f"> **{escape(text)}**" for text in alarms]
    for i, comparison in enumerate(results.comparisons):
        tail = f"-{i + 1}" if i else ""
        several = len(results.comparisons) > 1
        level = "###" if several else "##"
        if several:
            parts.append(f"## Measured way {i + 1} of {len(results.comparisons)}: {conditions_line(comparison)}")
        parts.append(f"{level} Findings\n\n" + "\n".join(f"- {text}" for text in findings(comparison)))
        parts.append(f"![Loss against evaluation length](extrapolation{tail}.png)")
        shown = grids(comparison)
        for grid in shown:
            parts.append(f"{level} {grid.title}\n\n{caption(grid, comparison)}\n\n{markdown_table(grid)}")
        parts.append(f"{level} Loss by position\n\n![Loss by position in the window](per_position{tail}.png)")
        parts.append(f"{level} What was compared\n\n" + "\n".join(facts(comparison)))
    notes = [text for text in results.warnings if text not in alarms]
    notes += [f"{run.folder}: {left_out(run, reason)}" for run, reason in results.left_out]
    listed = "\n".join(f"- {escape(text)}" for text in notes) or "- none found"
    parts.append(f"## Confounds, and runs that are missing above\n\n{listed}")
    parts.append(f"## Protocol\n\n{PROTOCOL}")
    parts.append("## To measure this again\n\n```bash\n" + "\n".join(commands(results, folders)) + "\n```")
    return "\n\n".join(parts) + "\n"


def markdown_table(grid: Grid) -> str:
    """Padded, so that it reads well raw too."""
    rows = [list(grid.head)]
    for i, row in enumerate(grid.rows):
        words = {BEST: "**{}**", TIE: "{} ≈"}
        rows.append([words.get(grid.marks.get((i, j)), "{}").format(escape(text)) for j, text in enumerate(row)])
    widths = [max(len(row[j]) for row in rows) for j in range(len(grid.head))]
    lines = []
    for row in rows:
        padded = [text.rjust(w) if j else text.ljust(w) for j, (text, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("| " + " | ".join(padded) + " |")
    rule = ["-" * (w + 1) + ":" if j else ":" + "-" * (w + 1) for j, w in enumerate(widths)]
    lines.insert(1, "|" + "|".join(rule) + "|")
    notes = "".join(f"\n{note}  " for note in map(escape, grid.notes))
    return "\n".join(lines) + (f"\n{notes}" if notes else "")


def escape(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|")


PROTOCOL = """\
- The validation text is cut into blocks as long as the longest window. Every target is scored once at every length: the
  same tokens, only the window changes.
- Disjoint: a block is read as windows side by side; early targets of a window have little context.
- Sliding: the last (stride) targets of each block, from a window that ends with the block, so that every target has at
  least (window - stride) tokens of context; the same targets at every length. At 1x this is the control line: what the
  model reaches if it never looks further back than it was trained to. Other targets than those of disjoint windows.
- Losses are sums over targets divided by their number, in nats per token; bits per byte ignore the tokenizer."""


def caption(grid: Grid, comparison: Comparison) -> str:
    if grid.title.startswith("Disjoint"):
        return f"Loss in nats per token at each evaluation length (factor, and length in tokens). {key(comparison)}"
    if grid.title.startswith("Sliding"):
        low = comparison.sliding[0]
        return (
            f"Loss in nats per token; {low:g}x is the control line. Below it, a longer context helps; above, it harms."
        )
    if grid.title.startswith("Differences"):
        return INTERVAL
    return "Training speed is the median of each run's log; it compares only runs that had the machine to themselves."


INTERVAL = (
    "Disjoint loss minus that of the best scheme at that length, over common seeds: mean ± half of its two-sided 95% "
    "interval by Student's t (2 seeds: ±12.71 standard errors, 3: ±4.30, 4: ±3.18, 5: ±2.78). Tie: zero lies in it."
)


def key(comparison: Comparison) -> str:
    """What bold, ≈, ± and brackets mean, of those that are there."""
    sizes = [len(line.runs) for line in comparison.lines]
    parts = ["Bold: the lowest loss."]
    if any(n > 1 for n in sizes):
        parts.append("≈: a tie with it, since zero lies in the 95% interval of the difference (table below).")
        parts.append("±: sample standard deviation over seeds; (2 of 3): only 2 of a line's 3 seeds have a value.")
    if any(n == 1 for n in sizes):
        parts.append("In brackets: one seed only, so the standard error over blocks of text, not a spread over seeds.")
    return " ".join([*parts, "Tail: the targets further than the training length into their window."])


def findings(comparison: Comparison) -> list[str]:
    """What the numbers say, in sentences made from them; of one seed the numbers alone."""
    found = []
    if comparison.factors:
        low, high = comparison.factors[0], comparison.factors[-1]
        found += [ranking(comparison, factor) for factor in dict.fromkeys((low, high))]
        if high > low:
            changes = [(line.change(DISJOINT, low, high), line.label, len(line.runs)) for line in comparison.lines]
            changes = sorted(((m.mean, label, m, n) for m, label, n in changes if m), key=lambda c: c[:2])
            texts = [f"{label} {cell(m, n, signed=True)}" for _, label, m, n in changes]
            if texts:
                found.append(
                    f"From {low:g}x to {high:g}x, on the same targets, the loss changes by: {', '.join(texts)}."
                )
    if len(comparison.sliding) > 1:
        low, high = comparison.sliding[0], comparison.sliding[-1]
        kinds = {
            "lowers the loss of": [],
            "raises the loss of": [],
            "makes no measurable difference to": [],
            "changes, with one seed and so without a claim, the loss of": [],
        }
        lower, higher, same, unknown = kinds.values()
        for line in comparison.lines:
            if move := line.change(SLIDING, low, high):
                kind = unknown if move.n == 1 else same if move.tie else higher if move.mean > 0 else lower
                kind.append((move.mean, line.label, some(move, len(line.runs))))
        parts = [
            f"{kind} {', '.join(f'{label} ({value:+.3f}){of}' for value, label, of in sorted(lines))}"
            for kind, lines in kinds.items()
            if lines
        ]
        if parts:
            found.append(
                f"Sliding windows: against the control line ({low:g}x), a window of {high:g}x {'; '.join(parts)}."
            )
    for line in comparison.lines:
        bad = [f for f in comparison.factors if line.unsupported(DISJOINT, f)]
        if bad:
            reason = escape(line.unsupported(DISJOINT, bad[0]))
            found.append(f"**{line.label}** has no value at {', '.join(f'{f:g}x' for f in bad)}: {reason}.")
    return found or ["Nothing was measured with disjoint windows."]


def ranking(comparison: Comparison, factor: float) -> str:
    """One sentence on a length: the lowest loss, ties, and the largest certain gap, where seeds in common say so."""
    lines = [line for line in comparison.lines if line.mean(DISJOINT, factor) and not (line.variant and factor <= 1)]
    if not lines:
        return f"At {factor:g}x no scheme has a value."
    broken = [line.label for line in lines if line.diverged(DISJOINT, factor)]
    lines = [line for line in lines if line.label not in broken]
    aside = f"; not ranked, since a seed diverged: {', '.join(broken)}" if broken else ""
    if not lines:
        return f"At {factor:g}x no scheme has a value of all its seeds{aside}."
    best = comparison.best(DISJOINT, factor, seeds=2)
    seeds = {line.label: max(len(line.runs), len(best.runs)) for line in lines if best}

    def value(line: Line) -> str:
        return cell(line.mean(DISJOINT, factor), len(line.runs))

    gaps = {line.label: paired(line, best, DISJOINT, factor) for line in lines if best and line is not best}
    gaps = {label: gap for label, gap in gaps.items() if gap and gap.n > 1}
    text = f"At {factor:g}x "
    if gaps:
        text += f"the lowest mean loss is that of **{best.label}**: {value(best)}"
        ties = [label for label, gap in gaps.items() if gap.tie]
        text += f"; a tie with {' and '.join(ties)}" if ties else ""
        above = [(gap.mean, label, gap) for label, gap in gaps.items() if not gap.tie]
        if above:
            _, label, gap = max(above)
            text += f"; the largest certain gap is that to {label}, {gap.mean:.3f} ± {gap.margin:.3f}"
            text += some(gap, seeds[label])
        lines = [line for line in lines if line is not best and line.label not in gaps]
    if lines:
        numbers = [f"{line.label} {value(line)}" for line in sorted(lines, key=lambda x: x.label)]
        single = len(numbers) > 1 or gaps
        text += ("; " if gaps else "the loss is: ") + ", ".join(numbers)
        text += " (no two seeds in common, so no claim)" if single else ""
    return text + aside + "."


def facts(comparison: Comparison) -> list[str]:
    """What was compared: data, model, training, seeds, revision, date."""
    runs, rows = comparison.runs, [row for line in comparison.lines for c in line.rows.values() for row in c.values()]
    revisions = sorted({r for run in runs if (r := revision(run))})
    trained = [str(run.status["updated"])[:10] for run in runs if run.status.get("updated")]
    measured = [row["measured"][:10] for row in rows if row.get("measured")]
    model = {
        "layers": "n_layer",
        "heads": "n_head",
        "width": "n_embd",
        "context": "block_size",
        "dropout": "dropout",
    }
    sizes = [f"{word} {values([get(run.config, f'model.{name}') for run in runs])}" for word, name in model.items()]
    batch = [
        a * b
        for r in runs
        if is_number(a := get(r.config, "train.batch_size")) and is_number(b := get(r.config, "train.accumulate") or 1)
    ]
    lines = [
        f"- measured on: {conditions_line(comparison)}",
        f"- model: {', '.join(sizes)}",
        f"- training: {values([r.get('step') for r in rows])} steps of {values(batch)} sequences, packing "
        f"{values([get(run.config, 'data.packing') or 'random' for run in runs])}, "
        f"{values([r.get('tokens') for r in rows])} tokens, "
        f"learning rate {values([get(run.config, 'optim.lr') for run in runs])} after "
        f"{values([get(run.config, 'optim.warmup') for run in runs])} steps of warm-up",
        f"- seeds: {values([run.seed for run in runs])}; {count(len(runs), 'run')}",
        f"- trained: until {max(trained, default='?')}, source revision {', '.join(revisions) or 'not recorded'}, "
        f"device {values([run.status.get('device') for run in runs])}",
        f"- measured: until {max(measured, default='?')}",
        f"- tokens of the split that lie in no block: {values([r.get('n_dropped') for r in rows])}",
    ]
    ways = sorted({way for row in rows if (way := in_short(reading(row)))})
    return lines + ([f"- read otherwise than trained: {'; '.join(ways)}"] if ways else [])


def values(found: list) -> str:
    """Each value once, in order, numbers first."""
    shown = {show(value): value for value in found if value is not None}
    numbers = sorted(value for value in shown.values() if is_number(value))
    others = sorted(text for text, value in shown.items() if not is_number(value))
    texts = [f"{n:,}" if isinstance(n, int) and abs(n) > 9999 else show(n) for n in numbers]
    return ", ".join(texts + others) or "?"


def commands(results: Results, folders: list[Path]) -> list[str]:
    """Commands that train and measure the compared runs again: as they were typed, schemes and seeds gathered."""
    groups: dict[tuple, tuple[dict, dict]] = {}
    for comparison in results.comparisons:
        for run in comparison.runs:
            given = run.status.get("overrides")
            if given is None:
                continue
            rest = tuple(word for word in given if not word.startswith(("position=", "seed=")))
            schemes, seeds = groups.setdefault(rest, ({}, {}))
            schemes[run.scheme] = seeds[run.seed] = None
    lines = []
    for rest, (schemes, seeds) in groups.items():
        many = " -m" if len(schemes) > 1 or len(seeds) > 1 else ""
        words = [f"position={','.join(sorted(schemes))}", f"seed={','.join(map(str, sorted(seeds, key=str)))}", *rest]
        lines.append(f"python train.py{many} " + " ".join(map(shlex.quote, words)))
    where = " ".join(shlex.quote(str(folder)) for folder in folders)
    for comparison in results.comparisons:
        condition = comparison.condition
        factors = ",".join(f"{factor:g}" for factor in comparison.factors or comparison.sliding)
        tokens = f" eval.tokens={condition.n_targets}" if condition.n_targets else ""
        stride = f" eval.stride={comparison.stride}" if comparison.stride else ""
        stride += " eval.documents=within" if condition.documents == "within" else ""
        stride += " eval.split=test" if condition.split == "test" else ""
        measured = (row for line in comparison.lines for cell in line.rows.values() for row in cell.values())
        ways = {"".join(f" {shlex.quote(f'{k}={v}')}" for k, v in reading(row).items()) for row in measured} | {""}
        for folder in folders:
            for way in sorted(ways):
                lines.append(
                    f"python eval.py runs={shlex.quote(str(folder))} 'factors=[{factors}]'{tokens}{stride}{way}"
                )
    return [*dict.fromkeys(lines), f"python scripts/compare.py {where}"]


# ---- results.csv


def csv_text(results: Results, out: Path) -> str:
    """One line a measurement of every run, with the label of its line and whether the tables show it."""
    extra = sorted({name for run in results.runs for row in run.rows for name in row} - set(FIELDS) - set(CURVE))
    seeds = {}  # id(row) -> how many seeds its mean is over, of how many
    for line in sorted((line for c in results.comparisons for line in c.lines), key=lambda line: line.variant):
        for place, rows in line.rows.items():
            seeds = {id(row): f"{len(line.values(*place))} of {len(line.runs)}" for row in rows.values()} | seeds
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["label", "folder", "in_tables", "seeds_in_mean", *FIELDS, *extra])
    for run in results.runs:
        folder = Path(os.path.relpath(run.folder, out)).as_posix()
        for row in run.rows:
            values = ["" if row.get(name) is None else row[name] for name in (*FIELDS, *extra)]
            shown = str(id(row) in results.used).lower()
            label = results.labels.get(run.folder, run.scheme)
            writer.writerow([label, folder, shown, seeds.get(id(row), ""), *values])
    return file.getvalue()
