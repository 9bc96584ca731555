"""The pictures say what they show, and each scheme looks the same everywhere."""

import io
import itertools
import math
import random
import warnings
from dataclasses import replace
from typing import get_args

import pytest
from rich.console import Console

from gpt import comparison as comparing
from gpt import plots, tables
from gpt.position import SCHEMES
from gpt.results import in_short
from gpt.schema import Scaling
from tests.measured_runs import ablation, config, only, row, simple, write_run


def legend(figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_the_extrapolation_picture_says_what_it_shows(tmp_path):
    comparison = only(ablation(tmp_path))
    figure = plots.extrapolation(comparison)
    flat, sliding, missing = figure.axes
    assert flat.get_ylabel() == "loss (nats per token)" and "tokens" in flat.get_xlabel()
    assert [text.get_text() for text in flat.get_xticklabels()] == ["64\n1x", "128\n2x", "256\n4x"]
    assert legend(figure)[:3] == ["learned", "rope", "alibi"] and "training length (64 tokens)" in legend(figure)
    assert flat.get_title(loc="left") == "disjoint windows"
    assert sliding.get_title(loc="left") == "sliding windows, stride 32"
    for ax in (flat, sliding):
        assert [64, 64] in [list(one.get_xdata()) for one in ax.lines]  # the training length
    rope = next(c for c in flat.containers if c.get_label() == "rope")
    assert list(rope[0].get_xdata()) == [64, 128, 256] and rope[0].get_ydata()[2] == pytest.approx(1.805)
    assert rope[0].get_linestyle() == "-"
    bar = rope[2][0].get_segments()[0]
    assert bar[1][1] - bar[0][1] == pytest.approx(2 * 0.01 / math.sqrt(2))
    dotted = next(c for c in sliding.containers if c.get_label() == "rope")[0]
    assert dotted.get_color() == rope[0].get_color() and dotted.is_dashed()
    controls = [one for one in sliding.lines if one.is_dashed() and list(one.get_xdata()) == [0, 1]]
    assert sorted(one.get_ydata()[0] for one in controls) == pytest.approx([1.455, 1.475, 1.555])
    keys = {one.get_label(): one for one in figure.legends[0].legend_handles}
    dots, dashes = keys["sliding windows"], keys["control line: sliding at 1x"]
    assert dots._unscaled_dash_pattern == dotted._unscaled_dash_pattern != dashes._unscaled_dash_pattern
    assert all(one._unscaled_dash_pattern == dashes._unscaled_dash_pattern for one in controls)
    assert [text.get_text() for text in missing.texts] == ["learned: unsupported"]
    assert list(missing.lines[0].get_xdata()) == [128, 256] and missing.lines[0].get_markerfacecolor() == "white"


def test_an_explosion_gets_a_panel_in_which_the_rest_can_be_told_apart(tmp_path):
    simple(tmp_path, "rope", 0, [1.52, 1.57, 1.8])
    simple(tmp_path, "alibi", 0, [1.54, 1.53, 1.52])
    assert len(plots.extrapolation(only(tmp_path)).axes) == 1
    simple(tmp_path, "nope", 0, [1.6, 3.0, 8.0])
    wide, near = plots.extrapolation(only(tmp_path)).axes
    assert wide.get_ylim()[1] > 8 and 1.8 < near.get_ylim()[1] < 3
    assert "zoom" in near.get_title(loc="left")
    arrow = [one for one in near.lines if one.get_marker() == "^" and len(one.get_xdata()) == 1]
    assert len(arrow) == 1 and 64 < arrow[0].get_xdata()[0] < 128  # where nope leaves


@pytest.mark.parametrize("losses", [[1.0, None, None], [None, None, None]])
def test_pictures_of_little(tmp_path, losses):
    simple(tmp_path, "learned", 0, losses)
    comparison = only(tmp_path)
    for draw in (plots.extrapolation, plots.per_position):
        figure = draw(comparison)
        texts = [text.get_text() for ax in figure.axes for text in ax.texts]
        assert ("no supported measurement" in texts) == (losses[0] is None)
        assert plots.png(figure)


def test_the_position_picture_takes_each_schemes_longest_window(tmp_path):
    ablation(tmp_path)
    figure = plots.per_position(only(tmp_path))
    ax = figure.axes[0]
    drawn = {one.get_label(): one for one in ax.lines}
    assert max(drawn["learned (windows of 64)"].get_xdata()) == 62 and max(drawn["rope"].get_xdata()) == 254
    assert list(drawn["training length (64 tokens)"].get_xdata()) == [64, 64]
    assert drawn["rope"].get_ydata()[-1] == pytest.approx(1.805)  # the mean over seeds
    assert legend(figure)[:3] == ["learned (windows of 64)", "rope", "alibi"]
    assert "shorter windows" in figure.legends[0].get_title().get_text()
    assert ax.get_ylabel() == "loss (nats per token)" and ax.get_xlabel() == "position in the window (tokens)"


def test_smoothing_never_reaches_across_the_training_length():
    bins = list(range(0, 257, 4))
    ys = [1.0 if edge < 64 else 2.0 for edge in bins[:-1]]
    assert plots.smooth(bins, ys, 64) == ys
    noisy = [y + (-1) ** i for i, y in enumerate(ys)]
    assert max(abs(a - b) for a, b in zip(plots.smooth(bins, noisy, 64)[20:60], ys[20:60], strict=True)) < 0.5
    straight = [float(i) for i in range(64)]
    assert plots.smooth(bins, straight, 64) == pytest.approx(straight)


def made_line(scheme: str, base: str | None = None, way: dict | None = None) -> comparing.Line:
    base = base or scheme
    return comparing.Line(f"{base} ({in_short(way)})" if way else base, base, scheme, way or {}, {}, {})


def test_a_scheme_has_one_colour_whatever_it_is_drawn_with():
    alone = plots.styles([made_line("rope")])["rope"]
    many = [made_line(scheme) for scheme in plots.STYLES] + [made_line("rope", "rope base=5"), made_line("unheard_of")]
    random.Random(3).shuffle(many)
    found = plots.styles(many)
    assert found["rope"] == alone and (alone.color, alone.marker) == plots.STYLES["rope"]
    assert found["unheard_of"] == plots.styles([made_line("unheard_of")])["unheard_of"]
    assert len({(style.color, style.marker) for style in found.values()}) == len(found) - 1 + (
        (found["unheard_of"].color, found["unheard_of"].marker) not in plots.STYLES.values()
    )
    clamp = plots.styles([made_line("learned"), made_line("learned", way={"position.overflow": "clamp"})])
    assert clamp["learned (clamp)"].color == clamp["learned"].color
    assert clamp["learned (clamp)"].dashes != "-" and clamp["learned"].dashes == "-"


KINDS = [kind for kind in get_args(Scaling) if kind != "none"]
OVERFLOW = ["clamp", "wrap", "interpolate"]


def test_every_way_of_reading_looks_its_own():
    """Markers tell them apart in the dotted panel too, dashes and markers each among one scheme's rescalings."""
    assert {*KINDS, *OVERFLOW} <= set(plots.READ)
    ways = [{"scaling": f"[{kind}]"} for kind in KINDS] + [{"position.base": "500000"}, {"position.ids": "random"}]
    rotating = ["rope", "p_rope", "partial_rope", "xpos", "pope", "trainable_rope", "rope_nope"]
    lines = [made_line(scheme, way=way) for scheme in rotating for way in ({}, *ways)]
    lines += [made_line("rope", way={"scaling": "[yarn]", "rescaling.beta": str(n)}) for n in range(3)]
    lines += [made_line("learned", way=way) for way in ({}, *({"position.overflow": one} for one in OVERFLOW))]
    lines += [made_line("rope", way={"scaling": "[of a later version]"})]
    random.Random(4).shuffle(lines)
    found = plots.styles(lines)
    assert len(found) == len(lines) == len(set(found.values()))
    rope = [found["rope"], *(found[f"rope ({kind})"] for kind in KINDS)]
    assert len({style.marker for style in rope}) == len({style.dashes for style in rope}) == 8
    assert all(style.hollow for style in rope[1:]) and not rope[0].hollow
    assert all(found[f"rope ({kind})"].marker == found[f"xpos ({kind})"].marker for kind in KINDS)
    assert len({found[f"learned ({one})"].dashes for one in OVERFLOW}) == 3


def test_both_pictures_draw_rescalings_as_their_legend_says(tmp_path):
    rows = [row("rope", 0, f, 1.5 + 0.1 * f, protocol) for f in (1, 2, 4) for protocol in ("disjoint", "sliding")]
    for n, kind in enumerate(KINDS):
        ways = {"scaling": kind, "scaling_parameters": ""}
        rows += [row("rope", 0, f, 1.5 + 0.01 * n * f, p, **ways) for f in (2, 4) for p in ("disjoint", "sliding")]
    write_run(tmp_path / "rope-s0", config("rope", 0), rows)
    found = only(tmp_path)
    for figure in (plots.extrapolation(found), plots.per_position(found)):
        handles = [one for one in figure.legends[0].legend_handles if "rope" in one.get_label()]
        assert len(handles) == 8 and len({one.get_marker() for one in handles}) == 8
        for ax in figure.axes:
            drawn = {one.get_marker() for one in ax.lines if one.get_marker() not in ("None", "_", "|")}
            assert drawn >= {one.get_marker() for one in handles}
        figure.canvas.draw()
        legend = figure.legends[0].get_window_extent()
        assert all(ax.get_window_extent().x1 < legend.x0 for ax in figure.axes)
        assert 0 < legend.y0 and legend.y1 < figure.bbox.height and legend.x1 <= figure.bbox.width


def test_all_schemes_have_a_style():
    assert set(plots.STYLES) == {*SCHEMES, "hybrid"}


DEUTAN = ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881))
PROTAN = ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998))


def seen(colour: str, matrix) -> list[float]:
    """CIELAB of a colour as someone without green (or red) cones sees it (Machado, Oliveira and Fernandes 2009)."""
    rgb = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    rgb = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
    r, g, b = (min(1, max(0, sum(m * c for m, c in zip(line, rgb, strict=True)))) for line in matrix)
    xyz = (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505, 0.2126 * r + 0.7152 * g + 0.0722 * b
    xyz += ((0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089,)
    x, y, z = (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in xyz)
    return [116 * y - 16, 500 * (x - y), 200 * (y - z)]


@pytest.mark.parametrize("matrix", [DEUTAN, PROTAN, ((1, 0, 0), (0, 1, 0), (0, 0, 1))])
def test_the_colour_blind_can_tell_schemes_apart(matrix):
    first = ("nope", "learned", "sinusoidal", "rope", "alibi", "t5")
    for a, b in itertools.combinations(plots.STYLES, 2):
        (colour, marker), (other, shape) = plots.STYLES[a], plots.STYLES[b]
        distance = math.dist(seen(colour, matrix), seen(other, matrix))
        assert distance > 20 or marker != shape, (a, b, distance)
        assert distance > 15 or not {a, b} <= set(first), (a, b, distance)


def test_a_seed_that_diverged_is_in_the_legend(tmp_path):
    for seed in (0, 1):
        for scheme in ("rope", "t5"):
            rows = [row(scheme, seed, f, 1.0) for f in (1, 2)]
            rows[1] |= {"status": "diverged", "loss": None} if seed and scheme == "rope" else {}
            write_run(tmp_path / f"{scheme}{seed}", config(scheme, seed), rows)
    assert {"rope (a seed diverged)", "t5"} <= set(legend(plots.extrapolation(only(tmp_path))))


LONG = "base=10000 scaling.factor=1 scaling.kind=none scaling.original_length=null block_size=64 init_from=/some/where/"


def long_names(folder) -> comparing.Comparison:
    """Ten lines with labels of 150 characters, one of them unsupported from the training length on."""
    simple(folder, "rope", 0, [6.5, 6.6, 6.9])
    found = only(folder)
    lines = []
    for n in range(10):
        label = f"{'learned' if n else 'rope'} {LONG}".ljust(149, "x") + str(n)
        rows = [row("rope", 0, f, 6 + n / 10 + f / 20, p) for f in (1, 2, 4) for p in ("disjoint", "sliding")]
        if n == 3:
            rows = [
                row("rope", 0, f, None, p, reason="no such row") for f in (1, 2, 4) for p in ("disjoint", "sliding")
            ]
        for one in rows:
            bins = list(range(0, one["eval_length"] + 1, 2))
            one |= {"position_bins": bins, "position_curve": [one["loss"]] * (len(bins) - 1)} if one["loss"] else {}
        places = {(one["protocol"], one["factor"]): {0: one} for one in rows}
        runs = next(iter(found.lines)).runs
        lines.append(comparing.Line(label, label, label.split()[0], {}, runs, places))
    return replace(found, lines=tuple(lines), factors=(1, 2, 4), sliding=(1, 2, 4), stride=32)


def test_long_names_leave_the_pictures_whole(tmp_path):
    found = long_names(tmp_path)
    for figure in (plots.extrapolation(found), plots.per_position(found)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # such as that axes collapsed
            figure.canvas.draw()
        box = figure.legends[0].get_window_extent()
        assert 0 <= box.y0 and box.y1 <= figure.bbox.height and box.x1 <= figure.bbox.width
        for ax in figure.axes:
            inside = ax.get_window_extent()
            assert inside.x1 < box.x0 and inside.width > 2.5 * figure.dpi, "a panel is squeezed"
            assert ax.get_tightbbox().x0 >= 0 and ax.get_tightbbox().y0 >= 0
        words = [ax.xaxis.label.get_window_extent() for ax in figure.axes if ax.get_xlabel() and ax.axison]
        assert all(left.x1 < right.x0 for left, right in itertools.pairwise(words)), "labels lie on each other"
        entries = [entry for entry in legend(figure) if "base=" in entry]
        assert len(set(entries)) == len(entries) >= 9  # one cannot be read, and has no curve
        for entry in entries:
            assert max(map(len, entry.splitlines())) <= 36 and len(entry.splitlines()) <= 3
        assert "(row 3)" in " ".join(entries) and "tables" in figure.legends[0].get_title().get_text()
    figure = plots.extrapolation(replace(found, sliding=()))
    figure.canvas.draw()
    panel, row = figure.axes
    inside, words = panel.get_window_extent(), row.texts[0].get_window_extent()
    assert inside.x0 <= words.x0 and words.x1 <= inside.x1, "the name is as wide as the panel at most"
    assert 0 <= words.y0 and words.y1 <= figure.bbox.height
    missing = row.texts[0].get_text()
    assert len(missing) <= 48 and missing.startswith("learned") and missing.endswith("… (row 4): unsupported")


def test_a_name_is_folded_and_if_need_be_cut_but_never_its_end():
    assert plots.fold("rope", 1) == "rope" and plots.fold("rope", 1, " (a seed diverged)") == "rope (a seed diverged)"
    assert plots.fold("rope base=500000 init_from=rope-s0-steps2000", 1).splitlines() == [
        "rope base=500000",
        "init_from=rope-s0-steps2000",
    ]
    for words in ("x" * 500, "ab " * 200):
        lines = plots.fold(words, 12, " (a seed diverged)").splitlines()
        assert len(lines) == 3 and max(map(len, lines)) <= 36
        assert lines[-1].endswith("… (row 12) (a seed diverged)")


def test_tables_fold_long_names_and_never_cut_a_number(tmp_path):
    found = long_names(tmp_path)
    grids = tables.grids(found)
    head = ("scheme", f"4x, minus {found.lines[0].label}")
    grids.append(tables.Grid("", head, ((found.lines[0].label, "+0.123 ± 0.001 tie"),), {}))
    for grid, width in itertools.product(grids, (60, 100, 160)):
        text = printed(tables.rich_table(grid), width)
        assert "…" not in text
        for one in grid.rows:
            assert all(number in text for number in one[1:])
        if width == 160:
            assert max(map(len, text.splitlines())) <= 160
            joined = "".join(line[1:].split("│")[0].strip() for line in text.splitlines() if line.startswith("│"))
            assert all(one[0].replace(" ", "") in joined.replace(" ", "") for one in grid.rows)


def test_the_evaluation_table_folds_the_names_of_runs(tmp_path):
    names = [f"t5-s0-datatext-packing{way}-pathcorpus-modeltiny-steps2000-52354631" for way in ("documents", "random")]
    places = [(f, p) for p in ("disjoint", "sliding") for f in (1, 2, 4, 8)]
    found = {tmp_path / name: [row("t5", 0, f, 6.5 + f / 10000, p, run=name) for f, p in places] for name in names}
    for width in (60, 120):
        text = printed(tables.evaluation_table(found), width)
        joined = "".join(line[1:].split("│")[0].strip() for line in text.splitlines() if line.startswith("│"))
        assert all(name in joined for name in names) and "…" not in text
        assert text.count("6.5008") == text.count("6.5001") == 4


def printed(table, width: int) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(table, crop=False)
    return console.file.getvalue()
