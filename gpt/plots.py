"""The two pictures of a report. A position scheme has one colour and one marker everywhere."""

import io
import math
import textwrap
import zlib
from dataclasses import dataclass

from gpt.comparison import DISJOINT, SLIDING, Comparison, Line
from gpt.results import DIVERGED, is_number, ok

# Colours of Okabe and Ito and of Tol's muted set, which the colour-blind can tell apart; where a colour comes back or
# is close to another, the marker differs. The six schemes of the first ablation have the six clearest colours.
STYLES = {
    "nope": ("#000000", "X"),
    "learned": ("#D55E00", "s"),
    "sinusoidal": ("#CC79A7", "v"),
    "rope": ("#0072B2", "o"),
    "alibi": ("#009E73", "^"),
    "t5": ("#E69F00", "D"),
    "raw_index": ("#882255", "<"),
    "normalized_index": ("#AA4499", ">"),
    "binary": ("#661100", "s"),
    "concat": ("#CC6677", "P"),
    "shaw": ("#999933", "o"),
    "transformer_xl": ("#117733", "X"),
    "tupe": ("#BB8866", "D"),
    "kerple": ("#44AA99", "*"),
    "sandwich": ("#2F6F6A", "p"),
    "fire": ("#8C6D1F", "h"),
    "cope": ("#666666", "o"),
    "xpos": ("#56B4E9", "v"),
    "pope": ("#332288", "D"),
    "hybrid": ("#7A68C8", "D"),  # rope with a pattern of layers of its own
    # kin of one of the above: its colour, another marker
    "partial_rope": ("#0072B2", "<"),
    "p_rope": ("#0072B2", "*"),
    "trainable_rope": ("#0072B2", "d"),
    "decoupled_rope": ("#0072B2", "8"),
    "rope_nope": ("#7A68C8", "P"),
    "rope_nope_alternating": ("#7A68C8", "X"),
    "rope_window_nope": ("#7A68C8", "s"),
    "swan": ("#7A68C8", "h"),
    "randomized_rope": ("#AAAAAA", "d"),
    "kerple_power": ("#44AA99", "8"),
    "concat_sinusoidal": ("#CC6677", "X"),
}
MARKERS = "osD^v<>PXphd*8"
# How a trained model is read otherwise -> (marker, dashes), whatever the scheme.
READ = {
    "clamp": ("<", (5, 2)),
    "wrap": (">", (5, 1.5, 1, 1.5)),
    "interpolate": ("d", (2.5, 1.5)),
    "linear": ("s", (8, 2)),
    "ntk": ("^", (2.5, 1.2)),
    "dynamic": ("v", (5, 1.5, 1, 1.5)),
    "by_parts": ("D", (8, 1.5, 2.5, 1.5)),
    "yarn": ("p", (4.5, 1.5)),
    "llama3": ("P", (5, 1.2, 1, 1.2, 1, 1.2)),
    "longrope": (">", (3, 1, 3, 3.5)),
    "position.base": ("X", (8, 1.5, 1, 1.5)),
    "position.ids": ("8", (3, 2.5)),
}
DOTS = (0, (1, 1.6))  # sliding windows
DASHES = (0, (9, 4))  # their control lines
GREY = "#555555"
SOBER = {
    "font.size": 10,
    "text.parse_math": False,  # a dollar in a path is a dollar
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "legend.handlelength": 4.2,  # long enough to tell dashes apart
}


@dataclass(frozen=True)
class Style:
    color: str
    marker: str
    dashes: object = "-"
    hollow: bool = False

    @property
    def line(self) -> dict:
        face = "white" if self.hollow else self.color
        shape = {"marker": self.marker, "markersize": 6, "markerfacecolor": face, "markeredgecolor": self.color}
        return {"color": self.color, "linewidth": 1.7, "linestyle": self.dashes, **shape}


def scheme_style(scheme: str) -> tuple[str, str]:
    """(colour, marker) of a scheme, always the same; of one not in the table, by the hash of its name."""
    if scheme in STYLES:
        return STYLES[scheme]
    code = zlib.crc32(scheme.encode())
    colours = sorted({colour for colour, _ in STYLES.values()})
    return colours[code % len(colours)], MARKERS[code // len(colours) % len(MARKERS)]


def styles(lines: list[Line] | tuple[Line, ...]) -> dict[str, Style]:
    """label -> Style. A scheme's variants keep its colour, darker or lighter, with a marker of their own.

    A rescaling or a policy past a table's end is the same model read otherwise: hollow and dashed, with the marker and
    the dashes of its kind, in the scheme's colour or a shade of it. No two labels look the same.
    """
    found, families = {}, {}
    for base in sorted({(line.scheme, line.base) for line in lines}):
        families.setdefault(family(*base), []).append(base[1])
    for name, bases in families.items():
        colour, marker = scheme_style(name)
        rest = [m for m in MARKERS if m != marker]
        bases.sort(key=lambda base: (base != name, base))  # the bare scheme keeps the bare style
        for i, base in enumerate(bases):
            found[base] = Style(shade(colour, i), marker if i == 0 else rest[(i - 1) % len(rest)])
    for line in sorted((line for line in lines if line.variant), key=lambda line: line.label):
        colour = found[line.base].color
        kinds = [word for key, value in line.way.items() for word in (value.strip("[]"), key) if word in READ]
        marker, dashes = READ[kinds[0]] if kinds else ("o", (4, 1.5, 1.5, 1.5))
        first = list(READ).index(kinds[0]) % 3 if kinds else 0
        looks = [Style(shade(colour, n), marker, (0, dashes), hollow=True) for n in range(first, first + 50)]
        found[line.label] = next((look for look in looks if look not in found.values()), looks[0])
    return found


def family(scheme: str, base: str) -> str:
    return "hybrid" if scheme == "rope" and "layers=" in base else scheme


def shade(colour: str, number: int) -> str:
    """0: the colour itself; then darker and lighter ones in turn."""
    return mix(colour, "#000000" if number % 2 else "#FFFFFF", 0.42 / (1 + number // 4)) if number else colour


def mix(colour: str, other: str, share: float) -> str:
    a, b = (tuple(int(c[i : i + 2], 16) for i in (1, 3, 5)) for c in (colour, other))
    return "#" + "".join(f"{round(x + (y - x) * share):02X}" for x, y in zip(a, b, strict=True))


def figure(**options):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(layout="constrained", **options)
    FigureCanvasAgg(made)
    return made


def png(made) -> bytes:
    file = io.BytesIO()
    made.savefig(file, format="png", dpi=200, metadata={"Software": None})
    return file.getvalue()


# ---- loss against evaluation length


def extrapolation(comparison: Comparison):
    """Loss at every evaluation length, a line a scheme: disjoint windows left, sliding windows right; a Figure.

    Where a few lines rise so far that the others lie on each other, a panel in the middle shows the low end larger.
    Above the first panel: which scheme has no value at which length.
    """
    import matplotlib

    with matplotlib.rc_context(SOBER):
        return draw_extrapolation(comparison)


def draw_extrapolation(comparison: Comparison):
    from matplotlib.lines import Line2D

    look = styles(comparison.lines)
    length = comparison.condition.train_length or 1
    shown = [DISJOINT] * bool(comparison.factors) + [SLIDING] * bool(comparison.sliding)
    means = {
        line.label: [
            [m.mean for f in lengths(comparison, protocol) if (m := line.mean(protocol, f))] for protocol in shown
        ]
        for line in comparison.lines
    }
    heights = [[y for ys in parts for y in ys] for parts in means.values()]
    starts = [ys[0] for parts in means.values() for ys in parts if ys]
    window = zoom(heights, starts)
    panels = (
        [(DISJOINT, False)]
        + ([(DISJOINT, True)] if window else [])
        + [(SLIDING, bool(window))] * bool(comparison.sliding)
    )
    missing = [one for one in comparison.lines if any(one.unsupported(DISJOINT, f) for f in comparison.factors)]

    strip = 0.42 * len(missing) + 0.1
    names = entries(comparison)
    wide, tall = room(names.values())
    made = figure(figsize=(4.3 * len(panels) + wide, tall + (strip + 0.3 if missing else 0)))
    grid = made.add_gridspec(2 if missing else 1, len(panels), height_ratios=[strip, tall] if missing else [tall])
    axes = []
    for i, (protocol, near) in enumerate(panels):
        # without a zoom both protocols share the loss axis
        ax = made.add_subplot(grid[-1, i], sharey=axes[0] if axes and not window else None)
        draw_panel(ax, comparison, protocol, look, window if near else None)
        axes.append(ax)
    axes[0].set_ylabel("loss (nats per token)")
    if missing:
        draw_missing(made.add_subplot(grid[0, 0], sharex=axes[0]), comparison, missing, look)

    handles = [Line2D([], [], label=names[line.label], **look[line.label].line) for line in by_end(comparison)]
    handles.append(Line2D([], [], color=GREY, linewidth=1, label=f"training length ({length} tokens)"))
    if comparison.sliding:
        handles.append(Line2D([], [], color=GREY, linestyle=DOTS, linewidth=1.7, marker="o", label="sliding windows"))
        handles.append(Line2D([], [], color=GREY, linestyle=DASHES, linewidth=1, label="control line: sliding at 1x"))
    spread = [line for line in comparison.lines if len(line.runs) > 1]
    title = "bars: standard deviation over seeds" if spread else "one seed: no bars"
    draw_legend(made, handles, title)
    return made


def draw_legend(made, handles: list, title: str = "") -> None:
    if any("… (row " in handle.get_label() for handle in handles):
        title += "\n" * bool(title) + "(row …): in full in that row of the tables"
    made.legend(handles=handles, loc="outside right center", title=title, title_fontsize=8.5, alignment="left")


def entries(comparison: Comparison) -> dict[str, str]:
    """label -> what the legend says: where a seed diverged, what is drawn there is of the others."""
    found = {}
    for row, line in enumerate(comparison.lines, 1):
        some = any(line.diverged(*place) and line.mean(*place) for place in line.rows)
        found[line.label] = fold(line.label, row, " (a seed diverged)" if some else "")
    return found


def fold(label: str, row: int, end: str = "", width: int = 36, most: int = 3) -> str:
    """A label in at most `most` lines, and `end` in full; a label that is cut names its row in the tables."""
    lines = textwrap.wrap(label + end, width)
    if len(lines) > most:
        tail = f"… (row {row}){end}"
        lines = textwrap.wrap(label, width)[:most]
        lines[-1] = lines[-1][: width - len(tail)].rstrip() + tail
    return "\n".join(lines)


def room(names) -> tuple[float, float]:
    """(width of the legend, height of a figure that it fits in), in inches."""
    lines = [line for name in names for line in name.split("\n")]
    longest = max(map(len, lines), default=0)
    return max(2.6, 0.08 * longest + 0.8), max(4.6, 0.165 * len(lines) + 0.05 * len(names) + 1.2)


def lengths(comparison: Comparison, protocol: str) -> tuple:
    return comparison.factors if protocol == DISJOINT else comparison.sliding


def by_end(comparison: Comparison) -> list[Line]:
    """The lines from the highest end to the lowest, as a reader meets them at the right edge; those that stop first."""

    def place(line: Line):
        reached = [f for f in comparison.factors if line.mean(DISJOINT, f)]
        at = reached[-1] if reached else 0
        return (
            at == comparison.factors[-1] if comparison.factors else False,
            -(line.mean(DISJOINT, at).mean if at else 0),
        )

    return sorted(comparison.lines, key=lambda line: (place(line), line.label))


def zoom(heights: list[list[float]], starts: list[float]) -> tuple[float, float] | None:
    """The range of all starts and of the lines that stay in the lowest third, or None where that is most of the range.

    heights: the values of each line; starts: values that must be inside.
    """
    tops = [max(ys) for ys in heights if ys]
    if len(tops) < 3 or not starts:
        return None
    low = min(min(ys) for ys in heights if ys)
    third = low + (max(tops) - low) / 3
    high = max([*starts, *(top for top in tops if top <= third)])
    if high > third or high == low:
        return None
    pad = 0.1 * (high - low)
    return low - pad, high + pad


def draw_panel(ax, comparison: Comparison, protocol: str, look: dict[str, Style], window: tuple | None) -> None:
    factors, length = lengths(comparison, protocol), comparison.condition.train_length or 1
    every = sorted({1, *comparison.factors, *comparison.sliding})
    ax.set_xscale("log", base=2)
    ax.set_xticks([float(f * length) for f in every], [f"{f * length:g}\n{f:g}x" for f in every])
    ax.minorticks_off()
    ax.set_xlim(every[0] * length / 2**0.3, every[-1] * length * 2**0.3)
    ax.set_xlabel("evaluation length (tokens, times the training length)")
    name = "disjoint windows" if protocol == DISJOINT else f"sliding windows, stride {comparison.stride}"
    ax.set_title(name + (" (zoom)" if window else ""))
    ax.axvline(length, color=GREY, linewidth=1, zorder=1)
    for line in comparison.lines:
        style = look[line.label]
        points = [(f * length, m) for f in factors if (m := line.mean(protocol, f))]
        if points:
            x, y = [p[0] for p in points], [p[1].mean for p in points]
            errors = [p[1].sd or 0 for p in points]  # of text blocks, which all lines share, bars would say nothing
            options = style.line | ({"linestyle": DOTS} if protocol == SLIDING else {})
            over = 3 - 0.5 * line.variant  # where both have the same value, the trained scheme's marker is seen
            ax.errorbar(
                x,
                y,
                yerr=errors if any(errors) else None,
                capsize=2.5,
                elinewidth=1,
                label=line.label,
                zorder=over,
                **options,
            )
            if window:
                leave(ax, x, y, window[1], style)
        control = line.mean(SLIDING, 1) if not line.variant else None
        if control and protocol == SLIDING:
            faint = 0.75 if len(comparison.lines) <= 8 else 0.35
            ax.axhline(control.mean, color=style.color, linestyle=DASHES, linewidth=1, alpha=faint, zorder=2)
    if not any(line.mean(protocol, f) for line in comparison.lines for f in factors):
        ax.text(0.5, 0.5, "no supported measurement", transform=ax.transAxes, ha="center", color=GREY)
        ax.set_yticks([])
    if window:
        ax.set_ylim(*window)


def leave(ax, x: list, y: list, top: float, style: Style) -> None:
    """An arrow where a line leaves the panel through its top."""
    for i in range(1, len(x)):
        if y[i - 1] <= top < y[i]:
            share = (top - y[i - 1]) / (y[i] - y[i - 1])
            at = 2 ** (math.log2(x[i - 1]) + share * (math.log2(x[i]) - math.log2(x[i - 1])))
            ax.plot([at], [top], marker="^", color=style.color, markersize=7, clip_on=False, zorder=5)


def draw_missing(ax, comparison: Comparison, missing: list[Line], look: dict[str, Style]) -> None:
    """A row a scheme, a hollow cross at each length it cannot read, and above them its name."""
    length = comparison.condition.train_length or 1
    for row, line in enumerate(missing):
        bad = [f * length for f in comparison.factors if line.unsupported(DISJOINT, f)]
        word = DIVERGED if any(line.diverged(DISJOINT, f) for f in comparison.factors) else "unsupported"
        style = look[line.label]
        options = {"marker": "X", "markersize": 8, "markerfacecolor": "white", "markeredgecolor": style.color}
        ax.plot(bad, [row] * len(bad), linestyle=(0, (1, 3)), color=style.color, linewidth=0.8, **options)
        name = fold(line.label, comparison.lines.index(line) + 1, f": {word}", width=48, most=1)
        ax.text(0, row - 0.45, name, transform=ax.get_yaxis_transform(), va="center", color=style.color, fontsize=9)
    ax.set_ylim(len(missing) - 0.7, -0.8)
    ax.axis("off")


# ---- loss by position


def per_position(comparison: Comparison):
    """Loss by position in the longest window that each scheme reads (disjoint), the mean over seeds; a Figure."""
    import matplotlib

    with matplotlib.rc_context(SOBER):
        return draw_per_position(comparison)


def draw_per_position(comparison: Comparison):
    look = styles(comparison.lines)
    length = comparison.condition.train_length or 1
    curves = {line.label: c for line in comparison.lines if (c := curve(line, comparison.factors))}
    curves = {label: (bins, smooth(bins, ys, length)) for label, (bins, ys) in curves.items()}
    # The first positions have little context and high losses for every scheme; they would squeeze all the rest.
    late = [[y for a, y in zip(bins, ys, strict=False) if a >= length / 8] or ys for bins, ys in curves.values()]
    inside = [y for bins, ys in curves.values() for a, y in zip(bins, ys, strict=False) if length / 4 <= a < length]
    window = zoom(late, inside)
    ends = [float(bins[-1]) for bins, _ in curves.values()] or [length]
    names = {}
    for row, line in enumerate(comparison.lines, 1):
        if line.label in curves:
            end = curves[line.label][0][-1]
            names[line.label] = fold(line.label, row, f" (windows of {end:g})" if end < max(ends) else "")
    wide, tall = room(names.values())
    note = "shorter windows: other targets, more of them" if min(ends) < max(ends) else ""
    made = figure(figsize=(6 + (3.4 if window else 0) + wide, tall))
    axes = made.subplots(1, 2 if window else 1, squeeze=False)[0]
    for ax, near in zip(axes, (None, window), strict=False):
        for line in by_end(comparison):
            if line.label not in curves:
                continue
            bins, ys = curves[line.label]
            style = look[line.label]
            x = [(a + b) / 2 for a, b in zip(bins[:-1], bins[1:], strict=True)]
            options = style.line | {"markersize": 4.5, "markevery": max(1, round(max(ends) / 10 / (x[-1] / len(x))))}
            ax.plot(x, ys, label=names[line.label], **options)
        ax.axvline(length, color=GREY, linewidth=1, label=f"training length ({length} tokens)", zorder=1)
        ax.set_xlim(0, max(ends))
        every = max(1, round(max(ends) / length / 8)) * length
        ax.set_xticks([n * every for n in range(int(max(ends) / every) + 1)])
        ax.set_xlabel("position in the window (tokens)")
        ax.set_title("longest disjoint window of each scheme" + (" (zoom)" if near else ""))
    if curves:
        low, high = min(map(min, late)), max(map(max, late))
        pad = 0.06 * (high - low) or 0.05
        axes[0].set_ylim(low - pad, high + pad)
        if window:
            axes[-1].set_ylim(*window)
        draw_legend(made, axes[0].get_legend_handles_labels()[0], note)
    else:
        axes[0].text(0.5, 0.5, "no supported measurement", transform=axes[0].transAxes, ha="center", color=GREY)
    axes[0].set_ylabel("loss (nats per token)")
    return made


def curve(line: Line, factors: tuple) -> tuple[list, list] | None:
    """(bin edges, losses) at the largest factor with a value, the mean over seeds; the edges most seeds share."""
    for factor in reversed(factors):
        rows = [
            r
            for r in line.rows.get((DISJOINT, factor), {}).values()
            if ok(r) and is_number(r["loss"]) and r.get("position_curve")
        ]
        bins = [tuple(r["position_bins"]) for r in rows]
        if rows:
            shared = max(sorted(set(bins)), key=bins.count)
            curves = [r["position_curve"] for r, b in zip(rows, bins, strict=True) if b == shared]
            return list(shared), [sum(ys) / len(ys) for ys in zip(*curves, strict=True)]
    return None


def smooth(bins: list, ys: list, length: int) -> list[float]:
    """A running mean of at most 5 bins, narrower towards the ends; it never reaches across the training length."""
    inside = [b <= length for b in bins[1:]]
    found = []
    for i in range(len(ys)):
        same = [j for j in range(len(ys)) if inside[j] == inside[i]]
        reach = min(len(ys) // 32 + 1, 2, i - same[0], same[-1] - i)
        part = ys[i - reach : i + reach + 1]
        found.append(sum(part) / len(part))
    return found
