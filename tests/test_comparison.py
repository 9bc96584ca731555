"""What may be averaged, what is refused, and what a run is called. All runs here are made up, with known answers."""

import csv
import io
import json
import math

import pytest

from gpt import comparison as comparing
from gpt import plots, report, results
from tests.measured_runs import L, config, line, only, row, simple, write_run


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Pictures are drawn, but not turned into files, which takes most of a report's time."""
    monkeypatch.setattr(plots, "png", lambda made: b"")


def test_means_spreads_and_changes_by_hand(tmp_path):
    for seed, losses in enumerate(([1.0, 1.5, 2.0], [2.0, 2.0, 4.0], [3.0, 4.0, 9.0])):
        simple(tmp_path, "rope", seed, losses)
    rope = line(only(tmp_path), "rope")
    assert rope.mean("disjoint", 1) == comparing.Mean(2.0, 1.0, 3)
    assert rope.mean("disjoint", 4).sd == pytest.approx(math.sqrt(13))  # 2, 4, 9 around 5: (9 + 1 + 16) / 2
    assert rope.change("disjoint", 1, 4).mean == 3.0
    assert rope.change("disjoint", 1, 4).sd == pytest.approx(math.sqrt(7))  # 1, 2, 6 around 3: (4 + 1 + 9) / 2


def test_paired_differences_take_out_what_all_schemes_share(tmp_path):
    easy = [1.0, 2.0, 3.0]
    for seed, (base, extra) in enumerate(zip(easy, [0.15, 0.2, 0.25], strict=True)):
        simple(tmp_path, "rope", seed, [base] * 3)
        simple(tmp_path, "alibi", seed, [base + extra] * 3)
    comparison = only(tmp_path)
    difference = comparing.paired(line(comparison, "alibi"), line(comparison, "rope"), "disjoint", 1)
    assert difference.mean == pytest.approx(0.2) and difference.n == 3
    assert difference.margin == pytest.approx(4.303 * 0.05 / math.sqrt(3))
    assert not difference.tie  # though the spread over seeds is 1.0


def test_pairs_are_common_seeds_only(tmp_path):
    for seed, loss in ((0, 1.0), (1, 2.0)):
        simple(tmp_path, "rope", seed, [loss] * 3)
    for seed, loss in ((1, 2.5), (2, 9.0)):
        simple(tmp_path, "alibi", seed, [loss] * 3)
    found = comparing.compare([tmp_path])
    comparison = found.comparisons[0]
    difference = comparing.paired(line(comparison, "alibi"), line(comparison, "rope"), "disjoint", 1)
    assert difference == comparing.Mean(0.5, None, 1) and not difference.tie
    assert any("different seeds" in text for text in found.warnings)


@pytest.mark.parametrize(
    "extra, tie",
    [
        ((0.1, -0.1, 0.09), True),
        ((0.1, 0.2, 0.3), True),  # 3.5 standard errors, which three seeds give by chance more than once in 20 times
        ((0.15, 0.2, 0.25), False),
        ((0.1, 0.11, 0.09), False),
        ((0, 0, 0), True),
    ],
)
def test_ties_are_by_students_t(tmp_path, extra, tie):
    for seed in range(3):
        simple(tmp_path, "rope", seed, [1.0 + seed] * 3)
        simple(tmp_path, "t5", seed, [1.0 + seed + extra[seed]] * 3)
    comparison = only(tmp_path)
    assert comparing.paired(line(comparison, "t5"), line(comparison, "rope"), "disjoint", 1).tie is tie
    text = report.write_report([tmp_path]).markdown
    assert ("≈ |" in text) is tie


def test_the_table_of_students_t():
    """The density, integrated from -t to t, is 95%."""
    for freedom, t in enumerate(comparing.T95, 1):
        steps = 4000
        density = [(1 + (t * i / steps) ** 2 / freedom) ** (-(freedom + 1) / 2) for i in range(steps + 1)]
        area = (sum(density) - (density[0] + density[-1]) / 2) * t / steps  # trapezoids, one half
        scale = math.gamma((freedom + 1) / 2) / math.gamma(freedom / 2) / math.sqrt(freedom * math.pi)
        assert 2 * scale * area == pytest.approx(0.95, abs=1e-4), freedom
    assert comparing.Mean(1.0, 1.0, 2).margin == pytest.approx(12.706 / math.sqrt(2))
    assert comparing.Mean(1.0, 1.0, 500).margin == pytest.approx(2.042 / math.sqrt(500))


def test_one_seed_has_the_error_over_blocks_and_says_so(tmp_path):
    simple(tmp_path, "rope", 0, [1.0, 1.5, 2.0])
    written = report.write_report([tmp_path])
    assert "**1.000 (0.010)**" in written.markdown and "±" not in written.markdown
    assert "one seed only" in written.markdown
    assert any("one seed" in text for text in written.results.warnings)


def test_unsupported_is_said_with_its_reason_and_is_no_number(tmp_path):
    simple(tmp_path, "learned", 0, [1.0, None, None], [1.0, None, None])
    simple(tmp_path, "rope", 0, [1.1, 1.2, 1.3], [1.0, 1.0, 1.0])
    comparison = only(tmp_path)
    learned = line(comparison, "learned")
    assert learned.mean("disjoint", 4) is None and learned.change("disjoint", 1, 4) is None
    assert learned.unsupported("disjoint", 4) == "the table has 64 rows" and learned.unsupported("disjoint", 1) is None
    text = report.write_report([tmp_path]).markdown
    assert "unsupported [1]" in text and "[1] the table has 64 rows" in text
    assert "**learned** has no value at 2x, 4x: the table has 64 rows." in text


@pytest.mark.parametrize("status", ["diverged", "unsupported"])  # the latter is what earlier versions wrote
def test_a_seed_that_diverges_is_named_wherever_the_others_are_averaged(tmp_path, status):
    for seed in range(3):
        rows = [row("rope", seed, 1, 4.98 + seed / 100), row("rope", seed, 2, 4.97 + seed / 100)]
        rows[1] |= {"loss": None, "status": status, "reason": "the loss is nan"} if seed == 2 else {}
        write_run(tmp_path / f"n{seed}", config("rope", seed), rows)
        both = [row("t5", seed, f, 6.0 + seed / 100 + extra) for f, extra in ((1, 0), (2, seed / 500))]
        write_run(tmp_path / f"t{seed}", config("t5", seed), both)
    written = report.write_report([tmp_path])
    rope = next(text for text in written.markdown.splitlines() if text.startswith("| rope "))
    assert [cell.strip() for cell in rope.split("|")[2:6]] == [
        "3",
        "**4.990 ± 0.010**",
        "4.975 ± 0.007 (2 of 3)",  # and not the best: nan is less than nothing
        "-0.010 ± 0.000 (2 of 3)",
    ]
    assert "t5 ≈" not in written.markdown and "-1.031 ± 0.013 (2 of 3)" in written.markdown
    why = "no disjoint loss at 2x: the loss is nan; the means of rope there are over its other seeds"
    assert f"{tmp_path / 'n2'}: {why}" in written.results.warnings and why in written.markdown
    assert "At 2x the loss is: t5 6.012 ± 0.012; not ranked, since a seed diverged: rope." in written.markdown
    found = {one["folder"]: one for one in csv.DictReader(io.StringIO(written.csv)) if one["factor"] == "2"}
    assert [found[f"{name}"]["seeds_in_mean"] for name in ("n0", "n2", "t0")] == ["2 of 3", "2 of 3", "3 of 3"]


def test_a_line_all_of_whose_seeds_have_no_value_says_why_of_each(tmp_path):
    for seed, change in enumerate(({"status": "diverged", "reason": "the loss is nan"}, {"reason": "out of memory"})):
        rows = [row("rope", seed, 1, 1.0), row("rope", seed, 2, None, **change)]
        write_run(tmp_path / f"{seed}", config("rope", seed), rows)
    text = report.write_report([tmp_path]).markdown
    assert "diverged [1]" in text and "[1] the loss is nan; out of memory" in text


def test_a_seed_that_was_not_measured_everywhere_is_named(tmp_path):
    for seed in range(3):
        rows = [row("rope", seed, f, 1.0 + seed) for f in ((1, 2) if seed else (1,))]
        write_run(tmp_path / f"{seed}", config("rope", seed), rows)
    written = report.write_report([tmp_path])
    assert "2.500 ± 0.707 (2 of 3)" in written.markdown
    assert any(f"{tmp_path / '0'}: no disjoint loss at 2x: not measured" in w for w in written.results.warnings)


def test_a_way_of_reading_is_of_the_seeds_that_were_read_so(tmp_path):
    """Its value at the training length too, where it is the plain one."""
    for seed in range(3):
        rows = [row("learned", seed, 1, 1.0 + seed), row("learned", seed, 2, None)]
        rows += [row("learned", seed, 2, 5.0, overflow="clamp")] if seed == 1 else []
        write_run(tmp_path / f"{seed}", config("learned", seed), rows)
    clamp = line(only(tmp_path), "learned (clamp)")
    assert clamp.seeds == [1] and clamp.mean("disjoint", 1).mean == 2.0 and clamp.mean("disjoint", 1).n == 1


def test_an_overflow_policy_is_its_own_line_and_shares_the_start(tmp_path):
    rows = [row("learned", 0, f, loss) for f, loss in ((1, 1.0), (2, None), (4, None))]
    rows += [row("learned", 0, f, loss, overflow="clamp") for f, loss in ((2, 2.0), (4, 3.0))]
    write_run(tmp_path / "a", config("learned", 0), rows)
    comparison = only(tmp_path)
    assert [one.label for one in comparison.lines] == ["learned", "learned (clamp)"]
    clamp = line(comparison, "learned (clamp)")
    assert clamp.change("disjoint", 1, 4).mean == 2.0 and clamp.variant
    assert line(comparison, "learned").unsupported("disjoint", 2)
    assert comparison.best("disjoint", 1).label == "learned"
    text = report.write_report([tmp_path]).markdown
    assert "position.overflow=clamp" in text  # among the commands


@pytest.mark.parametrize(
    "way, name",
    [
        ({"rope_base": 500000.0}, "base=500000"),
        ({"ids": "random"}, "ids=random"),
        ({"scaling": "ntk", "scaling_factor": 8.0, "scaling_parameters": "factor=8"}, "ntk"),
    ],
)
def test_what_changes_the_start_too_does_not_share_it(tmp_path, way, name):
    rows = [row("rope", 0, f, loss) for f, loss in ((1, 1.0), (2, 2.0), (4, 3.0))]
    write_run(tmp_path / "a", config("rope", 0), [*rows, row("rope", 0, 4, 1.5, **way)])
    other = line(only(tmp_path), f"rope ({name})")
    assert [other.mean("disjoint", f) and other.mean("disjoint", f).mean for f in (1, 2, 4)] == [None, None, 1.5]


def test_seeds_of_a_run_that_began_with_seeds_of_another_are_one_line(tmp_path):
    for seed in range(3):
        begun = config("nope", seed) | {"init_from": f"runs/pos/rope-s{seed}/checkpoints/step-002000"}
        write_run(tmp_path / f"d{seed}", begun, [row("nope", seed, 1, 1.0 + seed)])
        write_run(tmp_path / f"n{seed}", config("nope", seed), [row("nope", seed, 1, 2.0 + seed)])
    found = only(tmp_path)
    begun = "nope init_from=runs/pos/rope-s*/checkpoints/step-002000"
    assert {one.label: one.seeds for one in found.lines} == {begun: [0, 1, 2], "nope init_from=null": [0, 1, 2]}


def begun(folder, scheme: str, seed: int, path: str, sha256: str | None, loss: float = 1.0) -> None:
    """A run that began with that checkpoint."""
    status = {"status": "done", "init_from": {"checkpoint": path, "sha256": sha256}} if sha256 else "done"
    write_run(folder, config(scheme, seed) | {"init_from": path}, [row(scheme, seed, 1, loss)], status)


def test_runs_of_one_seed_that_began_otherwise_are_two_lines(tmp_path):
    for n in (0, 1):
        begun(tmp_path / f"{n}", "nope", 5, f"runs/base/rope-s{n}", f"{n}" * 64, 5.29 + n / 100)
    found = comparing.compare([tmp_path])
    lines = {one.label: one.mean("disjoint", 1).mean for one in found.comparisons[0].lines}
    assert lines == {"nope init_from=runs/base/rope-s0": 5.29, "nope init_from=runs/base/rope-s1": 5.30}
    assert not found.left_out


def test_only_its_own_seed_is_left_open_and_only_in_the_runs_name():
    for path, seed, expected in (
        ("runs/lr-s3/rope-s0", 0, "runs/lr-s3/rope-s*"),
        ("runs/lr-s3/rope-s0", 3, "runs/lr-s3/rope-s0"),
        ("runs/lr-s0/rope-s10", 1, "runs/lr-s0/rope-s10"),
        ("runs/a/rope-s1-lr3/checkpoints/step-000001", 1, "runs/a/rope-s*-lr3/checkpoints/step-000001"),
        ("checkpoints", 0, "checkpoints"),
    ):
        assert results.open_seed(path, seed) == expected


def test_seeds_that_all_began_with_one_checkpoint_are_one_line(tmp_path):
    """Though for one of them it is that of its own seed, and beside seeds of another scheme that began with theirs."""
    for seed in (0, 1, 2):
        begun(tmp_path / f"a{seed}", "alibi", seed, "runs/base/rope-s0", "0" * 64)
        begun(tmp_path / f"n{seed}", "nope", seed, f"runs/base/rope-s{seed}", f"{seed}" * 64)
    assert {one.label: one.seeds for one in only(tmp_path).lines} == {
        "alibi init_from=runs/base/rope-s0": [0, 1, 2],
        "nope init_from=runs/base/rope-s*": [0, 1, 2],
    }


def test_a_start_is_its_checkpoint_and_not_its_path(tmp_path):
    begun(tmp_path / "a", "nope", 0, "runs/base/rope", "a" * 64)
    begun(tmp_path / "b", "nope", 1, "/home/me/runs/base/rope/checkpoints/step-1", "a" * 64)  # another way to it
    assert {one.label: one.seeds for one in only(tmp_path).lines} == {"nope": [0, 1]}
    begun(tmp_path / "c", "nope", 1, "runs/base/rope", "c" * 64)  # the same path, trained again since
    labels = {one.label: one.seeds for one in only(tmp_path).lines}
    assert labels == {
        "nope init_from=runs/base/rope@aaaaaaaa": [0, 1],
        "nope init_from=runs/base/rope@cccccccc": [1],
    }


@pytest.mark.parametrize("way", [{"scaling": "ntk"}, {"overflow": "clamp"}])
def test_a_way_to_read_on_has_no_value_where_it_was_not_measured(tmp_path, way):
    """Up to the training length it changes nothing, so the plain value stands for it; beyond, nothing does."""
    (name,) = way.values()
    for protocol in ("disjoint", "sliding"):
        rows = [row("rope", 0, f, loss, protocol) for f, loss in ((1, 1.0), (2, 2.0), (4, 3.0))]
        rows += [row("rope", 0, 4, 1.5, protocol, **way)]
        write_run(tmp_path / protocol / "a", config("rope", 0), rows)
        comparison = only(tmp_path / protocol)
        other = line(comparison, f"rope ({name})")
        assert [other.mean(protocol, f) and other.mean(protocol, f).mean for f in (1, 2, 4)] == [1, None, 1.5]
        assert [line(comparison, "rope").mean(protocol, f).mean for f in (1, 2, 4)] == [1, 2, 3]
    text = report.write_report([tmp_path / "disjoint"]).markdown
    cells = next(line for line in text.splitlines() if line.startswith(f"| rope ({name})")).split("|")
    assert [cell.strip(" *") for cell in cells[3:6]] == ["1.000 (0.010)", "–", "1.500 (0.010)"]


# ---- what must not be averaged


@pytest.mark.parametrize(
    "change",
    [
        {"data_sha256": "cd" * 32},
        {"n_targets": 999},
        {"block_length": 8 * L, "n_blocks": 256},
        {"train_length": 2 * L},
        {"tokenizer": "char"},
        {"dtype": "bfloat16"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_runs_measured_otherwise_are_never_averaged(tmp_path, change):
    simple(tmp_path, "rope", 0, [1.0, 1.0, 1.0])
    simple(tmp_path, "rope", 1, [1.0, 1.0, 1.0])
    rows = [row("rope", 2, f, 100.0, **change) for f in (1, 2, 4)]
    write_run(tmp_path / "other", config("rope", 2), rows)
    written = report.write_report([tmp_path])
    found = written.results
    assert [len(one.runs) for one in found.comparisons] == [2, 1]
    assert [one.lines[0].mean("disjoint", 4).mean for one in found.comparisons] == [1.0, 100.0]
    assert found.warnings[0].startswith("NOT ONE COMPARISON") and next(iter(change)) in found.warnings[0]
    assert "> **NOT ONE COMPARISON" in written.markdown.split("## ")[0]  # before anything else
    assert {path.name for path in written.files} >= {"extrapolation-2.png", "per_position-2.png"}
    (tmp_path / "other" / "eval.jsonl").unlink()
    report.write_report([tmp_path])
    assert not (tmp_path / "extrapolation-2.png").exists()  # nothing stale stays beside the new report


def test_unsupported_rows_with_nulls_stay_with_their_run(tmp_path):
    rows = [row("learned", 0, 1, 1.0), row("learned", 0, 2, None, block_length=None, n_blocks=None)]
    write_run(tmp_path / "a", config("learned", 0), rows)
    simple(tmp_path, "rope", 0, [1.0, 1.0, 1.0])
    write_run(tmp_path / "tupe", config("tupe", 0), [row("tupe", 0, f, None) for f in (2, 4)])
    comparison = only(tmp_path)
    assert line(comparison, "learned").unsupported("disjoint", 2)
    assert line(comparison, "tupe").unsupported("disjoint", 4)


def test_sliding_rows_on_other_targets_are_left_out_and_named(tmp_path):
    for seed in range(2):
        simple(tmp_path, "rope", seed, [1.0] * 3, [1.0] * 3)
    rows = [row("alibi", 0, f, 1.0) for f in (1, 2, 4)] + [row("alibi", 0, 1, 9.0, "sliding", n_targets=5)]
    write_run(tmp_path / "alibi", config("alibi", 0), rows)
    found = comparing.compare([tmp_path])
    assert line(found.comparisons[0], "alibi").mean("sliding", 1) is None
    assert any("scored 5 targets" in text for text in found.warnings)


def test_of_several_strides_one_is_shown_and_the_others_are_named(tmp_path):
    rows = [row("rope", 0, 1, 1.0)]
    rows += [row("rope", 0, 1, 1.0 + stride, "sliding", stride=stride, n_targets=stride) for stride in (16, 48, 32)]
    write_run(tmp_path / "a", config("rope", 0), rows)
    found = comparing.compare([tmp_path])
    assert found.comparisons[0].stride == 32  # half the training length, where it is there
    assert found.comparisons[0].lines[0].mean("sliding", 1).mean == 33.0
    assert any("strides 16, 32, 48" in text for text in found.warnings)


def test_the_newest_checkpoint_counts_and_its_older_rows_are_named(tmp_path):
    rows = [row("rope", 0, f, 9.0, step=1000) for f in (1, 2, 4)] + [row("rope", 0, f, 1.0) for f in (1, 2)]
    write_run(tmp_path / "a", config("rope", 0), rows[::-1])
    found = comparing.compare([tmp_path])
    rope = found.comparisons[0].lines[0]
    assert rope.mean("disjoint", 1).mean == 1.0 and rope.mean("disjoint", 4) is None
    assert any("3 of older checkpoints" in text for text in found.warnings)


def test_rows_of_other_weights_at_the_same_step_are_left_out_and_named(tmp_path):
    """Of a run that was trained again in its folder: the last row says which weights are there now."""
    old = [row("rope", 0, f, 3.0, scaling=scaling, checkpoint_sha256="old") for f in (1, 2) for scaling in ("yarn",)]
    new = [row("rope", 0, f, 5.0) for f in (1, 2)]
    write_run(tmp_path / "a", config("rope", 0), [*old, row("rope", 0, 1, 9.0, checkpoint_sha256="old"), *new])
    found = comparing.compare([tmp_path])
    (rope,) = found.comparisons[0].lines
    assert rope.label == "rope" and [rope.mean("disjoint", f).mean for f in (1, 2)] == [5.0, 5.0]
    assert any("left out of the tables: 3 of other weights at step 2000 (they" in text for text in found.warnings)


def test_a_measurement_is_not_hidden_by_a_row_without_blocks(tmp_path):
    """Of an earlier command, whose factors together needed a longer text."""
    short = row("rope", 0, 3, None, block_length=None, n_blocks=None, reason="factors [3, 4] need more")
    write_run(tmp_path / "a", config("rope", 0), [short, row("rope", 0, 1, 1.0), row("rope", 0, 3, 2.0)])
    assert only(tmp_path).lines[0].mean("disjoint", 3).mean == 2.0


def test_the_blocks_that_most_runs_share_are_taken(tmp_path):
    long = {"block_length": 8 * L, "n_blocks": 256}
    for seed in range(2):
        rows = [row("rope", seed, f, 1.0) for f in (1, 2, 4)]
        rows += [row("rope", seed, f, 2.0, **long) for f in (1, 2, 4, 8)] if seed == 0 else []
        write_run(tmp_path / str(seed), config("rope", seed), rows)
    assert only(tmp_path).lines[0].mean("disjoint", 1) == comparing.Mean(1.0, 0.0, 2)
    with open(tmp_path / "1" / "eval.jsonl", "a") as file:
        file.writelines(json.dumps(row("rope", 1, f, 2.0, **long)) + "\n" for f in (1, 2, 4, 8))
    assert only(tmp_path).factors == (1, 2, 4, 8)  # now all have the longer ones


def test_an_unfinished_run_is_no_seed_of_the_finished_ones(tmp_path):
    simple(tmp_path, "rope", 0, [1.0] * 3)
    rows = [row("rope", 1, f, 9.0, step=500) for f in (1, 2, 4)]
    write_run(tmp_path / "b", config("rope", 1), rows, status="interrupted")
    found = comparing.compare([tmp_path])
    assert {one.label for one in found.comparisons[0].lines} == {"rope", "rope step=500"}
    assert any("interrupted" in text for text in found.warnings)
    assert any("not equally trained: steps 500, 2000" in text for text in found.warnings)


# ---- labels


def test_labels_come_from_the_configuration_not_from_folders(tmp_path):
    simple(tmp_path, "rope", 0, [1.0] * 3, name="alibi-s9")
    simple(tmp_path, "rope", 0, [1.1] * 3, name="x", position__base=500000.0)
    simple(tmp_path, "rope", 0, [1.2] * 3, name="y", position__layers="PPPN")
    simple(tmp_path, "t5", 0, [1.3] * 3, name="rope-s0")
    simple(tmp_path, "rope_nope", 0, [1.4] * 3, position__layers="PPPN")  # that is what the name says
    assert [one.label for one in only(tmp_path).lines] == [
        "rope base=10000",
        "rope base=500000",
        "rope layers=PPPN base=10000",
        "t5",
        "rope_nope",
    ]
    simple(tmp_path, "rope_nope", 0, [1.4] * 3, name="z", position__layers="PN")
    assert [one.label for one in only(tmp_path).lines][4:] == ["rope_nope", "rope_nope layers=PN"]


def test_what_differs_beside_the_scheme_is_in_the_label_and_named_as_a_confound(tmp_path):
    simple(tmp_path, "rope", 0, [1.0] * 3, optim__lr=0.002)
    simple(tmp_path, "t5", 0, [1.0] * 3)
    found = comparing.compare([tmp_path])
    assert {one.label for one in found.comparisons[0].lines} == {"rope lr=0.002", "t5 lr=0.001"}
    assert any("more than the position scheme differs" in text and "optim.lr" in text for text in found.warnings)


def test_a_key_that_came_later_is_no_difference(tmp_path):
    """An older run lacks it, and was trained with what is the default today."""
    folder = simple(tmp_path, "rope", 0, [1.0] * 3)
    values = config("rope", 1, optim__lr=0.001) | {"runtime": {"device": "cpu", "attention": "sdpa"}}
    values["model"] |= {"vocab_multiple": 1}
    values["position"] |= {"fraction": 1.0}
    values["optim"] |= {"decay": 0.2}
    write_run(tmp_path / "new", values, [row("rope", 1, f, 2.0) for f in (1, 2, 4)])
    found = comparing.compare([tmp_path])
    assert [one.label for one in found.comparisons[0].lines] == ["rope"] and not found.warnings
    values["optim"] |= {"decay": 0.3}
    values["position"] |= {"base": 5e5}
    write_run(tmp_path / "new", values, [row("rope", 1, f, 2.0) for f in (1, 2, 4)])
    found = comparing.compare([tmp_path])
    labels = {one.label for one in found.comparisons[0].lines}
    assert labels == {"rope base=10000 decay=0.2", "rope base=500000 decay=0.3"}, folder
    assert any("more than the position scheme differs between the runs: optim.decay" in w for w in found.warnings)


def test_the_final_val_loss_is_on_so_many_tokens(tmp_path):
    """Runs that differ in it are not averaged, and that column alone is said not to compare."""
    for scheme, seed, tokens in (("rope", 0, 1024), ("rope", 1, 2048), ("t5", 0, 1024)):
        made = config(scheme, seed)
        made["train"]["eval_tokens"] = tokens
        write_run(tmp_path / f"{scheme}{seed}", made, [row(scheme, seed, f, 1.0) for f in (1, 2, 4)])
    found = comparing.compare([tmp_path])
    labels = [one.label for one in found.comparisons[0].lines]
    assert labels == ["rope eval_tokens=1024", "rope eval_tokens=2048", "t5 eval_tokens=1024"]
    assert any("final val loss is not comparable" in text and "train.eval_tokens" in text for text in found.warnings)
    assert not any("more than the position scheme" in text for text in found.warnings)


def on_text(folder, seed: int, sha256: str | None, path: str | None = None, **changes) -> None:
    """A run of two lengths that was trained on that text."""
    rows = [row("rope", seed, f, 1.0 + seed, train_sha256=sha256 and sha256 * 64, **changes) for f in (1, 2)]
    write_run(folder, config("rope", seed, data__path=path), rows)


def test_other_texts_of_training_are_never_averaged(tmp_path):
    """Such as a folder to which files were added; where the paths differ, these tell them apart."""
    for seed in (0, 1):
        on_text(tmp_path / "same" / f"{seed}", seed, f"{seed}", "texts")
        on_text(tmp_path / "other" / f"{seed}", seed, f"{seed}", f"{seed}.txt")
    found = comparing.compare([tmp_path / "same"])
    labels = {one.label: one.seeds for one in found.comparisons[0].lines}
    assert labels == {"rope sha256=00000000": [0], "rope sha256=11111111": [1]}
    assert any("trained on different texts: sha256 000000000000, 111111111111" in text for text in found.warnings)
    assert [one.label for one in only(tmp_path / "other").lines] == ["rope path=0.txt", "rope path=1.txt"]


def test_the_same_text_is_the_same_however_it_is_spelled(tmp_path):
    on_text(tmp_path / "0", 0, "a", "t.txt")
    on_text(tmp_path / "1", 1, "a", "/home/me/t.txt")
    on_text(tmp_path / "2", 2, "a", None, data="copy")
    on_text(tmp_path / "3", 3, None, "t.txt")  # from before rows said it
    found = comparing.compare([tmp_path])
    (comparison,) = found.comparisons
    assert [(one.label, one.seeds) for one in comparison.lines] == [("rope", [0, 1, 2, 3])]
    assert not found.warnings
    on_text(tmp_path / "3", 3, "b", "t.txt")
    on_text(tmp_path / "4", 4, None, "t.txt")  # of which of the two?
    assert {one.label: one.seeds for one in only(tmp_path).lines} == {
        "rope sha256=aaaaaaaa": [0, 1, 2],
        "rope sha256=bbbbbbbb": [3],
        "rope sha256=unknown": [4],
    }


def test_another_tokenizer_is_no_other_text(tmp_path):
    for seed, name in enumerate(("byte", "bpe")):
        rows = [row("rope", seed, 1, 1.0, train_sha256=f"{seed}" * 64)]
        write_run(tmp_path / name, config("rope", seed, tokenizer__name=name), rows)
    assert {one.label for one in only(tmp_path).lines} == {"rope tokenizer.name=byte", "rope tokenizer.name=bpe"}


def test_other_names_of_data_without_a_hash_are_other_data(tmp_path):
    for seed, name in enumerate(("stdlib", "text")):
        on_text(tmp_path / name, seed, None, data=name, data_sha256=None)
    assert len(comparing.compare([tmp_path]).comparisons) == 2


def test_a_key_means_what_it_meant_when_the_run_was_made(tmp_path):
    """Before there was data.test_fraction, nothing was held out for a test."""
    for name, fraction in (("old", None), ("new", 0.05), ("none", 0.0)):
        made = config("rope", 0)
        made["data"] |= {} if fraction is None else {"test_fraction": fraction}
        write_run(tmp_path / name, made, [row("rope", 0, 1, 1.0)])
    found = comparing.compare([tmp_path])
    assert {one.label for one in found.comparisons[0].lines} == {"rope test_fraction=0", "rope test_fraction=0.05"}
    assert [(run.folder.name, why) for run, why in found.left_out] == [
        ("old", f"same configuration and seed as {tmp_path / 'none'}")
    ]


def test_runs_of_which_nothing_is_known_are_no_twins(tmp_path):
    for name in ("a", "b"):
        (simple(tmp_path, "rope", 0, [1.0] * 3, name=name) / "config.yaml").unlink()
    found = comparing.compare([tmp_path])
    assert len(found.comparisons[0].lines) == 2 and not found.left_out


def test_other_precisions_of_training_are_a_confound(tmp_path):
    for seed, dtype in enumerate(("float32", "bfloat16", None)):
        status = {"status": "done", "dtype": dtype} if dtype else {"status": "done"}
        rows = [row("rope", seed, f, 1.0) for f in (1, 2)]
        write_run(tmp_path / str(seed), config("rope", seed), rows, status)
    assert any("different precisions: bfloat16, float32" in text for text in comparing.compare([tmp_path]).warnings)
    (tmp_path / "1" / "status.json").write_text('{"status": "done", "dtype": "float32"}')
    assert not any("precision" in text for text in comparing.compare([tmp_path]).warnings)


def test_what_was_measured_again_counts_once(tmp_path):
    """Where the memory did not suffice at first, the later row stands, wherever it is."""
    again = row("rope", 0, 2, 1.5)
    short = row("rope", 0, 2, None, reason="out of memory at 128 tokens")
    write_run(tmp_path / "a", config("rope", 0), [row("rope", 0, 1, 1.0), short, row("rope", 0, 4, 2.0), again])
    rope = only(tmp_path).lines[0]
    assert rope.mean("disjoint", 2).mean == 1.5 and rope.unsupported("disjoint", 2) is None


def test_how_often_one_looks_is_no_difference(tmp_path):
    simple(tmp_path, "rope", 0, [1.0] * 3, train__eval_every=10, wandb__mode="disabled", runtime__device="cuda:1")
    simple(tmp_path, "rope", 1, [2.0] * 3)
    found = comparing.compare([tmp_path])
    assert [one.label for one in found.comparisons[0].lines] == ["rope"]
    assert not found.warnings


def test_two_sweeps_of_one_configuration_are_two_lines(tmp_path):
    for sweep in ("old", "new"):
        for seed in range(2):
            simple(tmp_path / sweep, "rope", seed, [1.0] * 3, sweep=sweep)
    assert {one.label for one in only(tmp_path).lines} == {"rope sweep=old", "rope sweep=new"}


def test_a_copied_run_is_not_a_second_seed(tmp_path):
    for name in ("a", "b"):
        simple(tmp_path, "rope", 0, [1.0] * 3, name=name)
    found = comparing.compare([tmp_path])
    assert found.comparisons[0].lines[0].mean("disjoint", 1).n == 1
    assert [(run.folder.name, "same configuration" in why) for run, why in found.left_out] == [("b", True)]
