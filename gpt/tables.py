"""The tables of a comparison, whatever they are written in, and on the terminal. Losses in nats per token."""

import os
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpt.comparison import DISJOINT, SLIDING, Comparison, Line, Mean, Results, average, paired
from gpt.results import DIVERGED, Record, in_short, is_number, ok, reading

BEST, TIE = "best", "tie"


@dataclass(frozen=True)
class Grid:
    """A table before it is Markdown or rich: cells are texts, `marks` says which are best or tied with the best."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    marks: dict  # (row, column) -> BEST | TIE
    notes: tuple[str, ...] = ()


# ---- cells


def cell(mean: Mean | None, seeds: int = 1, signed: bool = False) -> str:
    """A mean as text; of a line with more `seeds` than it is over, it says of how many."""
    if mean is None:
        return "–"
    error = f" ± {mean.sd:.3f}" if mean.sd is not None else f" ({mean.block_se:.3f})" if mean.block_se else ""
    text = f"{mean.mean:+.3f}" if signed else f"{mean.mean:.3f}"
    return text.replace("-0.000", "0.000").replace("+0.000", "0.000") + error + some(mean, seeds)


def some(mean: Mean, seeds: int) -> str:
    """Of how many seeds a mean is, where it is not all."""
    return f" ({mean.n} of {seeds})" if mean.n < seeds else ""


def whole(value: object) -> str:
    return f"{round(value):,}" if is_number(value) else "–"


def standing(comparison: Comparison, line: Line, protocol: str, factor: float) -> str | None:
    """BEST, TIE or None."""
    best = comparison.best(protocol, factor)
    if best is None or line is best:
        return BEST if best else None
    difference = None if line.diverged(protocol, factor) else paired(line, best, protocol, factor)
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
            if reason is None and (marked := standing(comparison, line, protocol, factor)):
                if line.mean(protocol, factor):
                    marks[i, len(row)] = marked
            word = DIVERGED if line.diverged(protocol, factor) else "unsupported"
            mean = line.mean(protocol, factor)
            row.append(f"{word} [{notes.index(reason) + 1}]" if reason else cell(mean, len(line.runs)))
        rows.append((*row, *more(line)))
    length = comparison.condition.train_length or 0
    head = ("scheme", "seeds", *(f"{factor:g}x ({round(factor * length)})" for factor in factors), *end)
    shown = [f"[{i}] {note}" for i, note in enumerate(notes, 1) if any(f"[{i}]" in c for row in rows for c in row)]
    title = "Disjoint windows" if protocol == DISJOINT else f"Sliding windows, stride {comparison.stride}"
    title += scope(comparison.condition.documents, comparison.condition.split)
    return Grid(title, head, tuple(rows), marks, tuple(shown))


def scope(documents: str | None, split: str | None) -> str:
    """What a title adds where not all of the validation split is one text."""
    return (", within documents" if documents == "within" else "") + (", test split" if split == "test" else "")


def grids(comparison: Comparison) -> list[Grid]:
    """The tables of one comparison: disjoint, sliding, differences seed by seed, cost."""
    found = []
    if comparison.factors:
        low, high = comparison.factors[0], comparison.factors[-1]

        def far(line: Line) -> list[str]:
            seeds = len(line.runs)
            tail = [cell(line.mean(DISJOINT, high, "tail_loss"), seeds)] if high > 1 else []
            change = [cell(line.change(DISJOINT, low, high), seeds, signed=True)] if high > low else []
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
                lambda line: [cell(line.change(SLIDING, low, high), len(line.runs), signed=True)] * len(end),
            )
        )
    found += [grid for grid in [difference_grid(comparison)] if grid]
    rows = []
    for line in comparison.lines:
        if line.variant:
            continue
        speed = average(run.speed for run in line.runs.values() if run.speed)
        val = average(run.val_loss for run in line.runs.values() if run.val_loss is not None)
        bits = line.mean(DISJOINT, 1, "bits_per_byte") if 1 in comparison.factors else None
        numbers = [
            whole(line.first("parameters")),
            whole(line.first("position_parameters")),
            whole(speed and speed.mean),
        ]
        rows.append((line.label, *numbers, cell(val, len(line.runs)), cell(bits, len(line.runs))))
    head = ("scheme", "parameters", "of the position", "train tokens/s", "final val loss", "bits per byte at 1x")
    found.append(Grid("Cost and training", head, tuple(rows), {}))
    return found


def difference_grid(comparison: Comparison) -> Grid | None:
    """Every line minus the best, seed by seed: the spread that all schemes share (easy and hard seeds) falls out."""
    rows, head = [], ["scheme"]
    bests = {factor: comparison.best(DISJOINT, factor, seeds=2) for factor in comparison.factors}
    bests = {factor: best for factor, best in bests.items() if best}
    if not bests:
        return None
    head += [f"{factor:g}x, minus {best.label}" for factor, best in bests.items()]
    for line in comparison.lines:
        row = [line.label]
        for factor, best in bests.items():
            difference = None if line is best else paired(line, best, DISJOINT, factor)
            text = "best" if line is best else "–"
            if difference:
                error = "" if difference.margin is None else f" ± {difference.margin:.3f}"
                of = some(difference, max(len(line.runs), len(best.runs)))
                text = f"{difference.mean:+.3f}{error}" + (" tie" if difference.tie else "") + of
            row.append(text)
        rows.append(tuple(row))
    return Grid("Differences, seed by seed", tuple(head), tuple(rows), {})


# ---- on the terminal


class Wide(Table):
    """A table that is wider than a terminal that its numbers do not fit in; print it with crop=False."""

    def __rich_console__(self, console, options):
        return super().__rich_console__(console, options.update_width(max(options.max_width, self.min_width or 0)))


def rich_table(grid: Grid) -> Wide:
    table = Wide(title=grid.title, title_justify="left", caption=Text("\n".join(grid.notes)), caption_justify="left")
    rows = []
    for i, row in enumerate(grid.rows):
        marks = [grid.marks.get((i, j)) for j in range(len(row))]
        texts = [f"{text} ≈" if m == TIE else text for text, m in zip(row, marks, strict=True)]
        styles = [{BEST: "bold green", TIE: "green"}.get(m, "") for m in marks]
        rows.append([Text(text, style=style) for text, style in zip(texts, styles, strict=True)])
    fill(table, grid.head, rows)
    return table


def fill(table: Wide, head: tuple[str, ...], rows: list[list[Text]]) -> None:
    """Names in the first column, which folds where the table is too wide; the numbers beside them are never cut."""
    table.min_width = 1
    for i, (name, *cells) in enumerate(zip(head, *rows, strict=True)):
        width = max((len(cell) for cell in cells), default=0)
        if i == 0:
            width = min(width, 12)
            table.add_column(Text(name), overflow="fold")
        else:
            lines = [part for line in name.split("\n") for part in textwrap.wrap(line, max(width, 12))]
            width = max([width, *map(len, lines)])
            table.add_column(Text("\n".join(lines)), justify="right", no_wrap=True)
        table.min_width += width + 3  # with the padding and a border
    for row in rows:
        table.add_row(*row)


def print_tables(results: Results, console: Console | None = None) -> None:
    """The tables of a report, its warnings and the runs that are not in them."""
    console = console or Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    for comparison in results.comparisons:
        if len(results.comparisons) > 1:
            console.print(Text(conditions_line(comparison), style="bold"))
        for grid in grids(comparison):
            console.print(rich_table(grid), crop=False)
    for text in results.warnings:
        console.print(Text(f"! {text}", style="yellow"))
    for run, reason in results.left_out:
        console.print(Text(f"! {run.folder}: {left_out(run, reason)}", style="yellow"))


def evaluation_table(found: dict[Path, list[dict]]) -> Wide:
    """What eval.py prints: the rows that were asked for of each run's folder, a line for each way of reading it.

    The ways in which a run cannot be read at all are one line, with the reasons of the first of them.
    """
    lines, columns, reasons, scopes, never = {}, {}, {}, {}, {}
    names = folder_names(found)
    rows_of = {}
    for folder, row in ((folder, row) for folder, rows in found.items() for row in rows):
        rows_of.setdefault((folder, in_short(reading(row))), []).append(row)
    for (folder, way), rows in rows_of.items():
        if all(row["status"] == "unsupported" for row in rows):
            never.setdefault(folder, []).append(way)
    for folder, way, row in ((*key, row) for key, rows in rows_of.items() for row in rows):
        if way in never.get(folder, [])[1:]:
            continue
        scopes[scope(row.get("documents"), row.get("split"))] = None
        column = (row["protocol"] == SLIDING, row.get("stride") or 0, row["factor"], row.get("eval_length"))
        columns[column] = None
        if ok(row):
            value = f"{row['loss']:.4f}" if is_number(row.get("loss")) else str(row.get("loss"))
        else:
            value = f"{row['status']} [{reasons.setdefault(str(row.get('reason')), len(reasons) + 1)}]"
        alike = never[folder] if way in never.get(folder, []) else [way]
        ways = ", ".join(one or "as trained" for one in alike) if len(alike) > 1 else way
        lines.setdefault((folder, ways), {})[column] = value
    table = Wide(
        title="Loss (nats per token)" + " and".join(scopes),
        title_justify="left",
        caption=Text("\n".join(f"[{i}] {reason}" for reason, i in reasons.items())),
        caption_justify="left",
    )
    head = ["run"]
    for sliding, stride, factor, length in sorted(columns):
        head.append((f"sliding,\nstride {stride}" if sliding else "disjoint") + f"\n{factor:g}x ({length})")
    rows = []
    for (folder, way), cells in lines.items():
        name = names[folder] + (f" ({way})" if way else "")
        rows.append([Text(name), *(Text(cells.get(column, "–")) for column in sorted(columns))])
    fill(table, tuple(head), rows)
    return table


def folder_names(found: dict[Path, list[dict]]) -> dict[Path, str]:
    """What each run is called: its name, and where several have the same one, what tells their folders apart."""
    own = {f: str(rows[0].get("run") or rows[0].get("position")) if rows else f.name for f, rows in found.items()}
    names = {}
    for folder, name in own.items():
        alike = [other.resolve() for other in found if own[other] == name]
        names[folder] = name if len(alike) == 1 else os.path.relpath(folder.resolve(), os.path.commonpath(alike))
    return names


def left_out(run: Record, reason: str) -> str:
    """Why a run is in no table, in one line with the next command."""
    error = " ".join(str(run.status.get("error") or "").split())
    text = f"{run.state}, {reason}" + (f" ({error})" if error else "")
    return text + (f"; next: python eval.py runs={run.folder}" if reason == "not evaluated" and not error else "")


def conditions_line(comparison: Comparison) -> str:
    c = comparison.condition
    sha = f" (sha256 {c.data_sha256[:12]})" if c.data_sha256 not in (None, c.data) else ""
    inside = ", each within one document" if c.documents == "within" else ""
    data = f"{c.data} (test split)" if c.split == "test" else c.data
    return (
        f"data {data}{sha}, tokenizer {c.tokenizer}, measured in {c.dtype}, training length {c.train_length} tokens, "
        f"{whole(c.n_targets)} targets in {whole(c.n_blocks)} blocks of {c.block_length}{inside}"
    )
