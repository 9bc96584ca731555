"""A folder of runs as something to read: tables, report.md, results.csv and two pictures. Losses in nats per token."""

import csv
import io
import os
import re
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpt import results as R
from gpt.results import DISJOINT, SLIDING, Comparison, Line, Mean, Results, count, get, show

FIELDS = (  # the columns of results.csv: the fields of a row of eval.jsonl but the curve
    "run position seed step tokens train_length eval_length factor protocol stride scaling overflow block_length "
    "n_blocks n_dropped documents dtype loss loss_se tail_loss tail_loss_se perplexity bits_per_byte n_targets n_bytes "
    "tokens_per_second parameters position_parameters data data_sha256 tokenizer checkpoint checkpoint_sha256 status "
    "reason"
).split()
CURVE = ("position_curve", "position_bins")
BEST, TIE = "best", "tie"


@dataclass(frozen=True)
class Report:
    """What was written: `files` lie in `folder`; `markdown` and `csv` are the texts of report.md and results.csv."""

    folder: Path
    results: Results
    markdown: str
    csv: str
    files: tuple[Path, ...]


@dataclass(frozen=True)
class Grid:
    """A table before it is Markdown or rich: cells are texts, `marks` says which are best or tied with the best."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    marks: dict  # (row, column) -> BEST | TIE
    notes: tuple[str, ...] = ()


def write_report(folders: list[Path], out: Path | None = None) -> Report:
    """Compares all runs at or below `folders` and writes report.md, results.csv and the two pictures.

    They land in `out`, by default the first folder. Same input, same bytes of report.md and results.csv.
    Raises RunError where a folder is missing, holds no runs, or none of them was evaluated.
    """
    from gpt import plots  # matplotlib takes a second to import

    folders = [Path(folder) for folder in folders]
    results = R.compare(folders)
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
    contents = {"report.md": text.encode(), "results.csv": table.encode(), **pictures}
    for name, content in contents.items():
        write(out / name, content)
    return Report(out, results, text, table, tuple(out / name for name in contents))


def write(path: Path, content: bytes) -> None:
    """All of it or nothing: written beside, then renamed."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(beside, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


# ---- cells


def cell(mean: Mean | None, signed: bool = False) -> str:
    if mean is None:
        return "–"
    error = f" ± {mean.sd:.3f}" if mean.sd is not None else f" ({mean.block_se:.3f})" if mean.block_se else ""
    return (f"{mean.mean:+.3f}" if signed else f"{mean.mean:.3f}") + error


def whole(value: object) -> str:
    return f"{round(value):,}" if R.number(value) else "–"


def mark(comparison: Comparison, line: Line, protocol: str, factor: float) -> str | None:
    best = comparison.best(protocol, factor)
    if best is None or line is best:
        return BEST if best else None
    difference = R.paired(line, best, protocol, factor)
    return TIE if difference and difference.tie else None


def footnotes(comparison: Comparison) -> list[str]:
    """The reasons of unsupported measurements, each once, in the order of the tables."""
    reasons = {}
    for line in comparison.lines:
        for protocol, factors in ((DISJOINT, comparison.factors), (SLIDING, comparison.sliding)):
            for factor in factors:
                reasons.setdefault(line.unsupported(protocol, factor))
    return [reason for reason in reasons if reason]


def losses(comparison: Comparison, protocol: str, factors: tuple, end: tuple[str, ...], more) -> Grid:
    """A grid with the loss at every factor; `more(line)` gives the cells of the columns `end`."""
    notes, marks, rows = footnotes(comparison), {}, []
    for i, line in enumerate(comparison.lines):
        row = [line.label, str(len(line.runs))]
        for factor in factors:
            reason = line.unsupported(protocol, factor)
            if reason is None and (marked := mark(comparison, line, protocol, factor)):
                if line.mean(protocol, factor):
                    marks[i, len(row)] = marked
            row.append(f"unsupported [{notes.index(reason) + 1}]" if reason else cell(line.mean(protocol, factor)))
        rows.append((*row, *more(line)))
    length = comparison.condition.train_length or 0
    head = ("scheme", "seeds", *(f"{factor:g}x ({round(factor * length)})" for factor in factors), *end)
    shown = [f"[{i}] {note}" for i, note in enumerate(notes, 1) if any(f"[{i}]" in c for row in rows for c in row)]
    title = "Disjoint windows" if protocol == DISJOINT else f"Sliding windows, stride {comparison.stride}"
    return Grid(title, head, tuple(rows), marks, tuple(shown))


def grids(comparison: Comparison) -> list[Grid]:
    """The tables of one comparison: disjoint, sliding, differences seed by seed, cost."""
    found = []
    if comparison.factors:
        low, high = comparison.factors[0], comparison.factors[-1]

        def far(line: Line) -> list[str]:
            tail = [cell(line.mean(DISJOINT, high, "tail_loss"))] if high > 1 else []
            change = [cell(line.change(DISJOINT, low, high), signed=True)] if high > low else []
            return [*change, *tail]

        end = ((f"change {low:g}x→{high:g}x",) if high > low else ()) + ((f"tail at {high:g}x",) if high > 1 else ())
        found.append(losses(comparison, DISJOINT, comparison.factors, end, far))
    if comparison.sliding:
        low, high = comparison.sliding[0], comparison.sliding[-1]
        end = (f"{high:g}x minus {low:g}x",) if high > low else ()
        found.append(
            losses(
                comparison,
                SLIDING,
                comparison.sliding,
                end,
                lambda line: [cell(line.change(SLIDING, low, high), signed=True)] * len(end),
            )
        )
    found += [grid for grid in [difference_grid(comparison)] if grid]
    rows = []
    for line in comparison.lines:
        if line.variant:
            continue
        speed = R.average(run.speed for run in line.runs.values() if run.speed)
        val = R.average(run.val_loss for run in line.runs.values() if run.val_loss is not None)
        bits = line.mean(DISJOINT, 1, "bits_per_byte") if 1 in comparison.factors else None
        numbers = [
            whole(line.first("parameters")),
            whole(line.first("position_parameters")),
            whole(speed and speed.mean),
        ]
        rows.append((line.label, *numbers, cell(val), cell(bits)))
    head = ("scheme", "parameters", "of the position", "train tokens/s", "final val loss", "bits per byte at 1x")
    found.append(Grid("Cost and training", head, tuple(rows), {}))
    return found


def difference_grid(comparison: Comparison) -> Grid | None:
    """Every line minus the best, seed by seed: the spread that all schemes share (easy and hard seeds) falls out."""
    if not comparison.factors or max((len(line.runs) for line in comparison.lines), default=0) < 2:
        return None
    rows, head = [], ["scheme"]
    bests = {factor: comparison.best(DISJOINT, factor) for factor in comparison.factors}
    bests = {factor: best for factor, best in bests.items() if best}
    head += [f"{factor:g}x, minus {best.label}" for factor, best in bests.items()]
    for line in comparison.lines:
        row = [line.label]
        for factor, best in bests.items():
            difference = None if line is best else R.paired(line, best, DISJOINT, factor)
            text = "best" if line is best else "–"
            if difference:
                error = "" if difference.se is None else f" ± {difference.se:.3f}"
                text = f"{difference.mean:+.3f}{error}" + (" tie" if difference.tie else "")
            row.append(text)
        rows.append(tuple(row))
    return Grid("Differences, seed by seed", tuple(head), tuple(rows), {})


def rich_table(grid: Grid) -> Table:
    table = Table(title=grid.title, title_justify="left", caption=Text("\n".join(grid.notes)), caption_justify="left")
    for i, name in enumerate(grid.head):
        table.add_column(Text(name), justify="right" if i else "left", no_wrap=i == 0)
    for i, row in enumerate(grid.rows):
        marks = [grid.marks.get((i, j)) for j in range(len(row))]
        texts = [f"{text} ≈" if m == TIE else text for text, m in zip(row, marks, strict=True)]
        styles = [{BEST: "bold green", TIE: "green"}.get(m, "") for m in marks]
        table.add_row(*(Text(text, style=style) for text, style in zip(texts, styles, strict=True)))
    return table


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


KEY = (
    "Bold: the lowest loss; ≈: a tie with it (the mean difference over common seeds is smaller than two standard "
    "errors). {spread} Tail: the targets further than the training length into their window."
)
SPREAD = "±: sample standard deviation over seeds."
BLOCKS = "In brackets: one seed only, so the standard error over blocks of text, not a spread over seeds."


def key(comparison: Comparison) -> str:
    sizes = [len(line.runs) for line in comparison.lines]
    parts = [SPREAD] * any(n > 1 for n in sizes) + [BLOCKS] * any(n == 1 for n in sizes)
    return KEY.format(spread=" ".join(parts))


# ---- on the terminal


def print_table(results: Results | Report, console: Console | None = None) -> None:
    """The tables of a report, its warnings and the runs that are not in them."""
    results = results.results if isinstance(results, Report) else results
    console = console or Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    for comparison in results.comparisons:
        if len(results.comparisons) > 1:
            console.print(Text(conditions_line(comparison), style="bold"))
        for grid in grids(comparison):
            console.print(rich_table(grid))
    for text in results.warnings:
        console.print(Text(f"! {text}", style="yellow"))
    for run, reason in results.left_out:
        console.print(Text(f"! {run.folder}: {left_out(run, reason)}", style="yellow"))


def evaluation_table(rows: Iterable[dict]) -> Table:
    """What eval.py prints: rows of eval.jsonl, one line for each run, rescaling and overflow policy."""
    lines, columns, reasons = {}, {}, {}
    for row in rows:
        ways = [way for way in (row.get("scaling"), row.get("overflow")) if way and way != "none"]
        name = f"{row.get('run') or row.get('position')}" + (f" ({', '.join(ways)})" if ways else "")
        column = (row["protocol"] == SLIDING, row.get("stride") or 0, row["factor"], row.get("eval_length"))
        columns[column] = None
        if R.ok(row):
            value = f"{row['loss']:.4f}" if R.number(row.get("loss")) else str(row.get("loss"))
        else:
            value = f"unsupported [{reasons.setdefault(str(row.get('reason')), len(reasons) + 1)}]"
        lines.setdefault(name, {})[column] = value
    table = Table(
        title="Loss (nats per token)",
        title_justify="left",
        caption=Text("\n".join(f"[{i}] {reason}" for reason, i in reasons.items())),
        caption_justify="left",
    )
    table.add_column("run")
    for column in sorted(columns):
        sliding, stride, factor, length = column
        what = f"sliding, stride {stride}" if sliding else "disjoint"
        table.add_column(Text(f"{what}\n{factor:g}x ({length})"), justify="right")
    for name, cells in lines.items():
        table.add_row(Text(name), *(Text(cells.get(column, "–")) for column in sorted(columns)))
    return table


# ---- report.md


def left_out(run: R.Run, reason: str) -> str:
    """Why a run is in no table, in one line with the next command."""
    error = " ".join(str(run.status.get("error") or "").split())
    text = f"{run.state}, {reason}" + (f" ({error})" if error else "")
    return text + (f"; next: python eval.py runs={run.folder}" if reason == "not evaluated" and not error else "")


def conditions_line(comparison: Comparison) -> str:
    c = comparison.condition
    sha = f" (sha256 {c.data_sha256[:12]})" if c.data_sha256 else ""
    return (
        f"data {c.data}{sha}, tokenizer {c.tokenizer}, measured in {c.dtype}, training length {c.train_length} tokens, "
        f"{whole(c.n_targets)} targets in {whole(c.n_blocks)} blocks of {c.block_length}"
    )


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
            parts.append(f"{level} {grid.title}\n\n{explain(grid, comparison)}\n\n{markdown_table(grid)}")
        parts.append(f"{level} Loss by position\n\n![Loss by position in the window](per_position{tail}.png)")
        parts.append(f"{level} What was compared\n\n" + "\n".join(facts(comparison)))
    notes = [text for text in results.warnings if text not in alarms]
    notes += [f"{run.folder}: {left_out(run, reason)}" for run, reason in results.left_out]
    listed = "\n".join(f"- {escape(text)}" for text in notes) or "- none found"
    parts.append(f"## Confounds, and runs that are missing above\n\n{listed}")
    parts.append(f"## Protocol\n\n{PROTOCOL}")
    parts.append("## To measure this again\n\n```bash\n" + "\n".join(commands(results, folders)) + "\n```")
    return "\n\n".join(parts) + "\n"


PROTOCOL = """\
- The validation text is cut into blocks as long as the longest window. Every target is scored once at every length: the
  same tokens, only the window changes.
- Disjoint: a block is read as windows side by side; early targets of a window have little context.
- Sliding: the last (stride) targets of each block, from a window that ends with the block, so that every target has at
  least (window - stride) tokens of context; the same targets at every length. At 1x this is the control line: what the
  model reaches if it never looks further back than it was trained to. Other targets than those of disjoint windows.
- Losses are sums over targets divided by their number, in nats per token; bits per byte ignore the tokenizer."""


def explain(grid: Grid, comparison: Comparison) -> str:
    if grid.title.startswith("Disjoint"):
        return f"Loss in nats per token at each evaluation length (factor, and length in tokens). {key(comparison)}"
    if grid.title.startswith("Sliding"):
        low = comparison.sliding[0]
        return (
            f"Loss in nats per token; {low:g}x is the control line. Below it, a longer context helps; above, it harms."
        )
    if grid.title.startswith("Differences"):
        return (
            "Disjoint loss minus that of the best scheme at that length, over common seeds: mean ± its standard error. "
            "Tie: smaller than two standard errors."
        )
    return "Training speed is the median of each run's log; it compares only runs that had the machine to themselves."


def findings(comparison: Comparison) -> list[str]:
    """What the numbers say, in sentences made from them."""
    found = []
    trained = [line for line in comparison.lines if not line.variant]
    if comparison.factors:
        low, high = comparison.factors[0], comparison.factors[-1]
        for factor in dict.fromkeys((low, high)):
            best = comparison.best(DISJOINT, factor)
            if best is None:
                found.append(f"At {factor:g}x no scheme has a value.")
                continue
            lines = [line for line in (trained if factor == low else comparison.lines) if line is not best]
            ties = [line.label for line in lines if mark(comparison, line, DISJOINT, factor) == TIE]
            text = f"At {factor:g}x the lowest loss is that of **{best.label}**: {cell(best.mean(DISJOINT, factor))}"
            text += f"; a tie with {' and '.join(ties)}" if ties else ""
            others = [line for line in lines if line.label not in ties and line.mean(DISJOINT, factor)]
            if others:
                worst = max(others, key=lambda line: line.mean(DISJOINT, factor).mean)
                gap = worst.mean(DISJOINT, factor).mean - best.mean(DISJOINT, factor).mean
                text += f"; the highest is {worst.label}, {gap:.3f} above"
            found.append(text + ".")
        if high > low:
            changes = [(line.change(DISJOINT, low, high), line.label) for line in comparison.lines]
            changes = sorted(((m.mean, label, m) for m, label in changes if m), key=lambda c: c[:2])
            texts = [f"{label} {cell(m, signed=True)}" for _, label, m in changes]
            if texts:
                found.append(
                    f"From {low:g}x to {high:g}x, on the same targets, the loss changes by: {', '.join(texts)}."
                )
    if len(comparison.sliding) > 1:
        low, high = comparison.sliding[0], comparison.sliding[-1]
        kinds = {"lowers the loss of": [], "raises the loss of": [], "makes no measurable difference to": []}
        for line in comparison.lines:
            if move := line.change(SLIDING, low, high):
                same = move.sd is not None and abs(move.mean) < 2 * move.sd / move.n**0.5
                kind = list(kinds)[2 if same else int(move.mean > 0)]
                kinds[kind].append((move.mean, line.label))
        parts = [
            f"{kind} {', '.join(f'{label} ({value:+.3f})' for value, label in sorted(lines))}"
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


def facts(comparison: Comparison) -> list[str]:
    """What was compared: data, model, training, seeds, revision, date."""
    runs, rows = comparison.runs, [row for line in comparison.lines for c in line.rows.values() for row in c.values()]
    revisions = sorted({r for run in runs if (r := R.revision(run))})
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
        R.number(a := get(r.config, "train.batch_size")) and a * (get(r.config, "train.accumulate") or 1) for r in runs
    ]
    lines = [
        f"- measured on: {conditions_line(comparison)}",
        f"- model: {', '.join(sizes)}",
        f"- training: {values([r.get('step') for r in rows])} steps of {values(batch)} sequences, "
        f"{values([r.get('tokens') for r in rows])} tokens, "
        f"learning rate {values([get(run.config, 'optim.lr') for run in runs])}",
        f"- seeds: {values([run.seed for run in runs])}; {count(len(runs), 'run')}",
        f"- trained: until {max(trained, default='?')}, source revision {', '.join(revisions) or 'not recorded'}, "
        f"device {values([run.status.get('device') for run in runs])}",
        f"- measured: until {max(measured, default='?')}",
    ]
    return lines


def values(found: list) -> str:
    """Each value once, in order."""
    distinct = sorted({value for value in found if value is not None}, key=lambda v: (isinstance(v, str), v))
    return ", ".join(f"{v:,}" if isinstance(v, int) and abs(v) > 9999 else show(v) for v in distinct) or "?"


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
        ways = {""} | {f" position.overflow={line.overflow}" for line in comparison.lines if line.overflow}
        ways |= {f" 'scaling=[{line.scaling}]'" for line in comparison.lines if line.scaling != "none"}
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
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["label", "folder", "in_tables", *FIELDS, *extra])
    for run in results.runs:
        folder = Path(os.path.relpath(run.folder, out)).as_posix()
        for row in run.rows:
            values = ["" if row.get(name) is None else row[name] for name in (*FIELDS, *extra)]
            shown = str(id(row) in results.used).lower()
            writer.writerow([results.labels.get(run.folder, run.scheme), folder, shown, *values])
    return file.getvalue()
