"""The report: what is averaged, what is refused, what is written. All runs here are made up, with known answers."""

import csv
import io
import itertools
import json
import math
import random
import re
import shlex
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from gpt import plots, report, results

L = 64


def config(scheme: str, seed: int, **changes) -> dict:
    """A run's configuration, plain; changes by dotted key with __ for the dot."""
    made = {
        "seed": seed,
        "sweep": "pos",
        "name": "",
        "model": {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": L, "dropout": 0.0, "bias": False},
        "position": {"name": scheme, "layers": "P", **({"base": 10000.0} if scheme == "rope" else {})},
        "data": {"name": "stdlib", "path": None, "val_fraction": 0.1},
        "tokenizer": {"name": "byte"},
        "optim": {"lr": 0.001, "weight_decay": 0.1},
        "train": {"steps": 2000, "batch_size": 12, "accumulate": 1, "eval_every": 250},
        "eval": {"tokens": 131072, "stride": None},
        "runtime": {"device": "auto", "dtype": "auto", "compile": False},
        "wandb": {"mode": "auto", "project": "nanope"},
    }
    for key, value in changes.items():
        *path, last = key.split("__")
        place = made
        for part in path:
            place = place[part]
        place[last] = value
    return made


def row(scheme: str, seed: int, factor: int, loss: float | None, protocol: str = "disjoint", **changes) -> dict:
    """A measurement as eval.py writes it; loss None: unsupported."""
    good, flat, length = loss is not None, protocol == "disjoint", changes.get("train_length", L)
    made = {
        "run": f"{scheme}-s{seed}",
        "position": scheme,
        "seed": seed,
        "step": 2000,
        "tokens": 2000 * 12 * length,
        "train_length": length,
        "eval_length": factor * length,
        "factor": factor,
        "protocol": protocol,
        "stride": None if flat else length // 2,
        "scaling": "none",
        "overflow": None,
        "block_length": 4 * length,
        "n_blocks": 512,
        "n_dropped": 7,
        "documents": "concat",
        "dtype": "float32",
        "loss": loss,
        "loss_se": 0.01 if good else None,
        "tail_loss": loss + 0.05 if good and flat and factor > 1 else None,
        "tail_loss_se": 0.01 if good and flat and factor > 1 else None,
        "perplexity": math.exp(loss) if good else None,
        "bits_per_byte": loss / math.log(2) if good else None,
        "n_targets": (512 * (4 * length if flat else length // 2)) if good else None,
        "n_bytes": 131072 if good else None,
        "tokens_per_second": 50000.0 if good else None,
        "parameters": 828000 + (8192 if scheme == "learned" else 0),
        "position_parameters": 8192 if scheme == "learned" else 0,
        "data": "stdlib",
        "data_sha256": "ab" * 32,
        "tokenizer": "byte",
        "checkpoint": "checkpoints/step-002000",
        "checkpoint_sha256": f"{scheme}-{seed}",
        "status": "ok" if good else "unsupported",
        "reason": None if good else f"the table has {L} rows",
        "position_curve": [loss + 0.1 * (i == 0) for i in range(16 * factor)] if good and flat else None,
        "position_bins": [i * length // 16 for i in range(16 * factor + 1)] if good and flat else None,
    }
    return made | changes


def write_run(folder: Path, values: dict, rows: list[dict], status: str | dict = "done", metrics: int = 20) -> Path:
    """A run's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    status = status if isinstance(status, dict) else {"status": status, "step": 2000, "error": None}
    (folder / "status.json").write_text(json.dumps(status))
    lines = [
        {"step": 10 * i, "tokens": 7680 * i, "loss": 5 / i, "tokens_per_second": 50000.0} for i in range(1, metrics)
    ]
    lines += [{"step": 2000, "val_loss": rows[0]["loss"] or 2.0}] if rows else []
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if rows:
        (folder / "eval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rows))
    return folder


def simple(
    root: Path, scheme: str, seed: int, losses: list, sliding: list | None = None, name: str = "", **changes
) -> Path:
    """A run measured at 1x, 2x, 4x."""
    rows = [row(scheme, seed, f, loss) for f, loss in zip((1, 2, 4), losses, strict=True)]
    rows += [row(scheme, seed, f, loss, "sliding") for f, loss in zip((1, 2, 4), sliding or [], strict=False)]
    return write_run(root / (name or f"{scheme}-s{seed}"), config(scheme, seed, **changes), rows)


# ---- numbers


def only(folder: Path) -> results.Comparison:
    found = results.compare([folder])
    assert len(found.comparisons) == 1, found.warnings
    return found.comparisons[0]


def line(comparison: results.Comparison, label: str) -> results.Line:
    return {one.label: one for one in comparison.lines}[label]


def test_means_spreads_and_changes_by_hand(tmp_path):
    for seed, losses in enumerate(([1.0, 1.5, 2.0], [2.0, 2.0, 4.0], [3.0, 4.0, 9.0])):
        simple(tmp_path, "rope", seed, losses)
    rope = line(only(tmp_path), "rope")
    assert rope.mean("disjoint", 1) == results.Mean(2.0, 1.0, 3)
    assert rope.mean("disjoint", 4).sd == pytest.approx(math.sqrt(13))  # 2, 4, 9 around 5: (9 + 1 + 16) / 2
    assert rope.change("disjoint", 1, 4).mean == 3.0
    assert rope.change("disjoint", 1, 4).sd == pytest.approx(math.sqrt(7))  # 1, 2, 6 around 3: (4 + 1 + 9) / 2


def test_paired_differences_take_out_what_all_schemes_share(tmp_path):
    easy = [1.0, 2.0, 3.0]
    for seed, (base, extra) in enumerate(zip(easy, [0.1, 0.2, 0.3], strict=True)):
        simple(tmp_path, "rope", seed, [base] * 3)
        simple(tmp_path, "alibi", seed, [base + extra] * 3)
    comparison = only(tmp_path)
    difference = results.paired(line(comparison, "alibi"), line(comparison, "rope"), "disjoint", 1)
    assert difference.mean == pytest.approx(0.2) and difference.n == 3
    assert difference.se == pytest.approx(0.1 / math.sqrt(3))
    assert not difference.tie  # though the spread over seeds is 1.0


def test_pairs_are_common_seeds_only(tmp_path):
    for seed, loss in ((0, 1.0), (1, 2.0)):
        simple(tmp_path, "rope", seed, [loss] * 3)
    for seed, loss in ((1, 2.5), (2, 9.0)):
        simple(tmp_path, "alibi", seed, [loss] * 3)
    found = results.compare([tmp_path])
    comparison = found.comparisons[0]
    difference = results.paired(line(comparison, "alibi"), line(comparison, "rope"), "disjoint", 1)
    assert difference == results.Difference(0.5, None, 1) and not difference.tie
    assert any("different seeds" in text for text in found.warnings)


@pytest.mark.parametrize(
    "extra, tie", [((0.1, -0.1, 0.09), True), ((0.3, 0.1, 0.0), True), ((0.1, 0.11, 0.09), False), ((0, 0, 0), True)]
)
def test_ties_are_below_two_standard_errors(tmp_path, extra, tie):
    for seed in range(3):
        simple(tmp_path, "rope", seed, [1.0 + seed] * 3)
        simple(tmp_path, "t5", seed, [1.0 + seed + extra[seed]] * 3)
    comparison = only(tmp_path)
    assert results.paired(line(comparison, "t5"), line(comparison, "rope"), "disjoint", 1).tie is tie
    text = report.write_report([tmp_path]).markdown
    assert ("≈ |" in text) is tie


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


def test_a_rescaling_is_its_own_line(tmp_path):
    rows = [row("rope", 0, f, loss) for f, loss in ((1, 1.0), (2, 2.0), (4, 3.0))]
    rows += [row("rope", 0, 4, 1.5, scaling="yarn")]
    write_run(tmp_path / "a", config("rope", 0), rows)
    comparison = only(tmp_path)
    assert line(comparison, "rope (yarn)").mean("disjoint", 4).mean == 1.5
    assert line(comparison, "rope").mean("disjoint", 4).mean == 3.0


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
    found = results.compare([tmp_path])
    assert line(found.comparisons[0], "alibi").mean("sliding", 1) is None
    assert any("scored 5 targets" in text for text in found.warnings)


def test_of_several_strides_one_is_shown_and_the_others_are_named(tmp_path):
    rows = [row("rope", 0, 1, 1.0)]
    rows += [row("rope", 0, 1, 1.0 + stride, "sliding", stride=stride, n_targets=stride) for stride in (16, 48, 32)]
    write_run(tmp_path / "a", config("rope", 0), rows)
    found = results.compare([tmp_path])
    assert found.comparisons[0].stride == 32  # half the training length, where it is there
    assert found.comparisons[0].lines[0].mean("sliding", 1).mean == 33.0
    assert any("strides 16, 32, 48" in text for text in found.warnings)


def test_the_newest_checkpoint_counts_and_its_older_rows_are_named(tmp_path):
    rows = [row("rope", 0, f, 9.0, step=1000) for f in (1, 2, 4)] + [row("rope", 0, f, 1.0) for f in (1, 2)]
    write_run(tmp_path / "a", config("rope", 0), rows[::-1])
    found = results.compare([tmp_path])
    rope = found.comparisons[0].lines[0]
    assert rope.mean("disjoint", 1).mean == 1.0 and rope.mean("disjoint", 4) is None
    assert any("3 of older checkpoints" in text for text in found.warnings)


def test_the_blocks_that_most_runs_share_are_taken(tmp_path):
    long = {"block_length": 8 * L, "n_blocks": 256}
    for seed in range(2):
        rows = [row("rope", seed, f, 1.0) for f in (1, 2, 4)]
        rows += [row("rope", seed, f, 2.0, **long) for f in (1, 2, 4, 8)] if seed == 0 else []
        write_run(tmp_path / str(seed), config("rope", seed), rows)
    assert only(tmp_path).lines[0].mean("disjoint", 1) == results.Mean(1.0, 0.0, 2)
    with open(tmp_path / "1" / "eval.jsonl", "a") as file:
        file.writelines(json.dumps(row("rope", 1, f, 2.0, **long)) + "\n" for f in (1, 2, 4, 8))
    assert only(tmp_path).factors == (1, 2, 4, 8)  # now all have the longer ones


def test_an_unfinished_run_is_no_seed_of_the_finished_ones(tmp_path):
    simple(tmp_path, "rope", 0, [1.0] * 3)
    rows = [row("rope", 1, f, 9.0, step=500) for f in (1, 2, 4)]
    write_run(tmp_path / "b", config("rope", 1), rows, status="interrupted")
    found = results.compare([tmp_path])
    assert {one.label for one in found.comparisons[0].lines} == {"rope", "rope step=500"}
    assert any("interrupted" in text for text in found.warnings)
    assert any("not equally trained: steps 500, 2000" in text for text in found.warnings)


# ---- labels


def test_labels_come_from_the_configuration_not_from_folders(tmp_path):
    simple(tmp_path, "rope", 0, [1.0] * 3, name="alibi-s9")
    simple(tmp_path, "rope", 0, [1.1] * 3, name="x", position__base=500000.0)
    simple(tmp_path, "rope", 0, [1.2] * 3, name="y", position__layers="PPPN")
    simple(tmp_path, "t5", 0, [1.3] * 3, name="rope-s0")
    assert [one.label for one in only(tmp_path).lines] == [
        "rope base=10000",
        "rope base=500000",
        "rope layers=PPPN base=10000",
        "t5",
    ]


def test_what_differs_beside_the_scheme_is_in_the_label_and_named_as_a_confound(tmp_path):
    simple(tmp_path, "rope", 0, [1.0] * 3, optim__lr=0.002)
    simple(tmp_path, "t5", 0, [1.0] * 3)
    found = results.compare([tmp_path])
    assert {one.label for one in found.comparisons[0].lines} == {"rope lr=0.002", "t5 lr=0.001"}
    assert any("more than the position scheme differs" in text and "optim.lr" in text for text in found.warnings)


def test_how_often_one_looks_is_no_difference(tmp_path):
    simple(tmp_path, "rope", 0, [1.0] * 3, train__eval_every=10, wandb__mode="disabled", runtime__device="cuda:1")
    simple(tmp_path, "rope", 1, [2.0] * 3)
    found = results.compare([tmp_path])
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
    found = results.compare([tmp_path])
    assert found.comparisons[0].lines[0].mean("disjoint", 1).n == 1
    assert [(run.folder.name, "same configuration" in why) for run, why in found.left_out] == [("b", True)]


# ---- damaged and missing files


def test_a_torn_last_line_loses_only_itself(tmp_path):
    folder = simple(tmp_path, "rope", 0, [1.0, 1.1, 1.2])
    whole = (folder / "eval.jsonl").read_bytes()
    for name in ("eval.jsonl", "metrics.jsonl"):
        with open(folder / name, "ab") as file:
            file.write(b'{"run": "rope-s0", "loss": 1.\xff')
    found = results.compare([tmp_path])
    assert found.comparisons[0].lines[0].mean("disjoint", 4).mean == 1.2
    assert [text.split(": ")[1:] for text in found.warnings[-2:]] == [
        ["metrics.jsonl", "1 unreadable line skipped"],
        ["eval.jsonl", "1 unreadable line skipped"],
    ]
    (folder / "eval.jsonl").write_bytes(whole[:-20])
    assert only(tmp_path).factors == (1, 2)


def test_runs_that_failed_or_were_not_evaluated_are_listed(tmp_path):
    simple(tmp_path, "rope", 0, [1.0] * 3)
    broken = {"status": "failed", "step": 70, "error": "loss is nan\nat step 70"}
    write_run(tmp_path / "alibi-s0", config("alibi", 0), [], broken)
    write_run(tmp_path / "t5-s0", config("t5", 0), [])
    written = report.write_report([tmp_path])
    assert "alibi-s0: failed, not evaluated (loss is nan at step 70)" in written.markdown
    assert f"t5-s0: done, not evaluated; next: python eval.py runs={tmp_path / 't5-s0'}" in written.markdown
    console = Console(width=200, file=io.StringIO())
    report.print_table(written, console)
    assert "alibi-s0: failed" in console.file.getvalue() and "t5-s0: done, not" in console.file.getvalue()


@pytest.mark.parametrize("name", ["config.yaml", "status.json", "metrics.jsonl"])
@pytest.mark.parametrize("content", [None, b"", b"[1, 2", b"\xff\xfe{", b"7\n"])
def test_missing_and_damaged_files_are_named_and_the_rest_is_shown(tmp_path, name, content):
    folder = simple(tmp_path, "rope", 0, [1.0] * 3)
    simple(tmp_path, "alibi", 0, [1.5] * 3)
    (folder / name).unlink() if content is None else (folder / name).write_bytes(content)
    written = report.write_report([tmp_path])
    assert len(written.results.comparisons[0].lines) == 2
    said = any(name in text for text in written.results.warnings)
    assert said or (name == "metrics.jsonl" and not content)  # a run that was stopped early has none


def test_rows_without_what_identifies_them_and_losses_that_are_no_numbers_are_named(tmp_path):
    rows = [row("rope", 0, 1, 1.0), {"loss": 3.0}, row("rope", 0, 4, 1.0) | {"loss": math.nan}]
    write_run(tmp_path / "a", config("rope", 0), rows)
    found = results.compare([tmp_path])
    assert any("1 row without factor" in text for text in found.warnings)
    assert any("1 row with a loss that is no finite number" in text for text in found.warnings)
    report.write_report([tmp_path])


def test_what_lies_inside_a_run_is_no_run(tmp_path):
    folder = simple(tmp_path, "rope", 0, [1.0] * 3)
    for inner in ("wandb/run-1/files", "checkpoints/step-1", ".hydra", "copy"):
        (folder / inner).mkdir(parents=True)
        (folder / inner / "config.yaml").write_text("x: 1")
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "config.yaml").write_text("x: 1")
    assert results.find_runs([tmp_path]) == [folder]
    assert results.find_runs([folder]) == [folder] == results.find_runs([folder, tmp_path])


def test_changes_on_the_way_and_other_revisions_are_confounds(tmp_path):
    for seed, commit in enumerate(("a" * 40, "b" * 40)):
        changes = [{"step": 500, "key": "optim.lr", "old": 0.001, "new": 0.002}] if seed else []
        status = {"status": "done", "changes": changes, "versions": {"nanope": {"commit": commit, "dirty": bool(seed)}}}
        rows = [row("rope", seed, f, 1.0) for f in (1, 2)]
        write_run(tmp_path / str(seed), config("rope", seed), rows, status)
    text = " ".join(results.compare([tmp_path]).warnings)
    assert "optim.lr from 0.001 to 0.002 at step 500" in text
    assert "source revisions: aaaaaaaaaa, bbbbbbbbbb with uncommitted changes" in text


# ---- what is written


def ablation(root: Path, seeds: int = 2) -> Path:
    table = {
        "learned": ([1.62, None, None], [1.55, None, None]),
        "rope": ([1.52, 1.57, 1.80], [1.45, 1.49, 1.8]),
        "alibi": ([1.54, 1.53, 1.52], [1.47, 1.45, 1.43]),
    }
    for scheme, (flat, sliding) in table.items():
        for seed in range(seeds):
            extra = 0.01 * seed
            moved = [[None if x is None else x + extra for x in xs] for xs in (flat, sliding)]
            simple(root, scheme, seed, *moved)
    return root


def test_the_files_are_there_and_sane(tmp_path):
    out = tmp_path / "elsewhere" / "deep"
    written = report.write_report([ablation(tmp_path / "runs")], out)
    assert sorted(path.name for path in out.iterdir()) == [
        "extrapolation.png",
        "per_position.png",
        "report.md",
        "results.csv",
    ]
    assert all(path.parent == out for path in written.files)
    for name in ("extrapolation.png", "per_position.png"):
        content = (out / name).read_bytes()
        assert content[:8] == b"\x89PNG\r\n\x1a\n"
        width, height = struct.unpack(">II", content[16:24])
        assert 1000 < width < 4000 and 700 < height < 2500
        assert f"]({name})" in written.markdown
    assert (out / "report.md").read_text() == written.markdown


def test_the_csv_has_a_line_a_measurement_and_all_fields_but_the_curve(tmp_path):
    ablation(tmp_path)
    folder = tmp_path / "rope-s0"
    with open(folder / "eval.jsonl", "a") as file:
        file.write(json.dumps(row("rope", 0, 1, 7.25, step=10, checkpoint="a,b\n", new_field=3)) + "\n")
    report.write_report([tmp_path])
    with open(tmp_path / "results.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert set(lines[0]) == {*row("rope", 0, 1, 1.0), "label", "folder", "in_tables", "new_field"} - {
        "position_curve",
        "position_bins",
    }
    assert len(lines) == 2 * 3 * 6 + 1
    old = [one for one in lines if one["loss"] == "7.25"]
    assert len(old) == 1 and old[0]["in_tables"] == "false" and old[0]["checkpoint"] == "a,b\n"
    rest = [one for one in lines if one["loss"] != "7.25"]
    assert all(one["in_tables"] == "true" for one in rest)
    assert {one["folder"] for one in lines} == {f"{s}-s{n}" for s in ("learned", "rope", "alibi") for n in range(2)}
    unsupported = [one for one in lines if one["status"] == "unsupported"]
    assert len(unsupported) == 8 and all(one["loss"] == "" and one["reason"] for one in unsupported)
    assert float(rest[-1]["perplexity"]) == math.exp(float(rest[-1]["loss"]))  # nothing is rounded


def test_same_input_same_bytes_whatever_the_order(tmp_path):
    first = report.write_report([ablation(tmp_path / "a" / "pos")])
    again = report.write_report([tmp_path / "a" / "pos"])
    assert (first.markdown, first.csv) == (again.markdown, again.csv)
    rng = random.Random(7)
    folders = [folder for folder in (tmp_path / "a" / "pos").iterdir() if folder.is_dir()]
    for folder in folders:
        rows = (folder / "eval.jsonl").read_text().splitlines(True)
        rng.shuffle(rows)
        target = tmp_path / "b" / "pos" / f"{rng.random()}"
        shutil.copytree(folder, target)
        (target / "eval.jsonl").write_text("".join(rows))
    other = report.write_report([tmp_path / "b" / "pos"])
    assert other.markdown == first.markdown.replace(str(tmp_path / "a"), str(tmp_path / "b"))


def test_the_findings_are_the_numbers(tmp_path):
    text = report.write_report([ablation(tmp_path)]).markdown
    assert "At 1x the lowest loss is that of **rope**: 1.525 ± 0.007; the highest is learned, 0.100 above." in text
    assert "At 4x the lowest loss is that of **alibi**" in text
    assert "the loss changes by: alibi -0.020 ± 0.000, rope +0.280 ± 0.000." in text
    assert "lowers the loss of alibi (-0.040); raises the loss of rope (+0.350)" in text
    assert "parameters" in text and "836,192" in text and "8,192" in text and "50,000" in text


def test_the_commands_are_those_that_were_typed(tmp_path):
    """Schemes and seeds of one sweep in one command, the other overrides as they were; no record, no command."""
    for scheme in ("learned", "rope", "alibi"):
        for seed in (0, 1):
            given = [f"position={scheme}", f"seed={seed}", "sweep=pos", "optim.lr=3e-3"]
            rows = [row(scheme, seed, factor, 1.0) for factor in (1, 2, 4)] + [row(scheme, seed, 1, 1.0, "sliding")]
            status = {"status": "done", "step": 2000, "error": None, "overrides": given}
            write_run(tmp_path / "pos" / f"{scheme}-s{seed}", config(scheme, seed), rows, status)
    given = ["position=rope", "sweep=pos", "name=a b"]
    status = {"status": "done", "step": 2000, "error": None, "overrides": given}
    far = [row("rope", 0, factor, 1.0, run="far") for factor in (1, 2, 4)]
    write_run(tmp_path / "pos" / "far", config("rope", 0, position__base=5e5), far, status)
    write_run(tmp_path / "pos" / "old", config("rope", 7), [row("rope", 7, 1, 1.0)])
    text = report.write_report([tmp_path / "pos"]).markdown
    block = text.split("```bash\n")[1].split("```")[0]
    commands = [shlex.split(command) for command in block.strip().splitlines()]
    assert {tuple(command[1:]) for command in commands if command[1] == "train.py"} == {
        ("train.py", "-m", "position=alibi,learned,rope", "seed=0,1", "sweep=pos", "optim.lr=3e-3"),
        ("train.py", "position=rope", "seed=0", "sweep=pos", "name=a b"),
    }
    evaluation = [command for command in commands if command[1] == "eval.py"]
    assert {f"runs={tmp_path / 'pos'}", "factors=[1,2,4]", "eval.tokens=131072", "eval.stride=32"} < set(evaluation[0])
    assert commands[-1] == ["python", "scripts/compare.py", str(tmp_path / "pos")]


def test_markdown_tables_are_rectangular_and_escape_pipes(tmp_path):
    rows = [row("learned", 0, 1, 1.0), row("learned", 0, 2, None, reason="a | b\nc [/bold]")]
    write_run(tmp_path / "a", config("learned", 0), rows)
    written = report.write_report([tmp_path])
    assert "a \\| b c" in written.markdown
    for block in written.markdown.split("\n\n"):
        if block.startswith("|"):
            assert len({len(re.findall(r"(?<!\\)\|", text)) for text in block.splitlines()}) == 1
            assert len({len(text) for text in block.splitlines()}) == 1
    report.print_table(written, Console(file=io.StringIO()))  # brackets in a reason are no markup


def test_the_evaluation_table_shows_what_was_just_measured():
    rows = [row("learned", 0, 1, 1.23456), row("learned", 0, 2, None, reason="[/x] 64 rows")]
    rows += [row("learned", 0, 2, 3.0, overflow="clamp"), row("learned", 0, 1, 1.5, "sliding")]
    console = Console(width=120, file=io.StringIO())
    console.print(report.evaluation_table(rows))
    text = console.file.getvalue()
    for word in (
        "1.2346",
        "unsupported [1]",
        "[1] [/x] 64 rows",
        "learned-s0 (clamp)",
        "3.0000",
        "1.5000",
        "stride 32",
    ):
        assert word in text, word
    assert "2x (128)" in text


# ---- pictures


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
    controls = [one.get_ydata()[0] for one in sliding.lines if one.is_dashed() and list(one.get_xdata()) == [0, 1]]
    assert sorted(controls) == pytest.approx([1.455, 1.475, 1.555])
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
    assert max(drawn["learned"].get_xdata()) == 62 and max(drawn["rope"].get_xdata()) == 254
    assert list(drawn["training length (64 tokens)"].get_xdata()) == [64, 64]
    assert drawn["rope"].get_ydata()[-1] == pytest.approx(1.805)  # the mean over seeds
    assert legend(figure)[:3] == ["learned", "rope", "alibi"]
    assert ax.get_ylabel() == "loss (nats per token)" and ax.get_xlabel() == "position in the window (tokens)"


def test_smoothing_never_reaches_across_the_training_length():
    bins = list(range(0, 257, 4))
    ys = [1.0 if edge < 64 else 2.0 for edge in bins[:-1]]
    assert plots.smooth(bins, ys, 64) == ys
    noisy = [y + (-1) ** i for i, y in enumerate(ys)]
    assert max(abs(a - b) for a, b in zip(plots.smooth(bins, noisy, 64)[20:60], ys[20:60], strict=True)) < 0.5
    straight = [float(i) for i in range(64)]
    assert plots.smooth(bins, straight, 64) == pytest.approx(straight)


def made_line(scheme: str, base: str | None = None, overflow: str | None = None) -> results.Line:
    base = base or scheme
    return results.Line(f"{base} ({overflow})" if overflow else base, base, scheme, overflow, "none", {}, {})


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
    clamp = plots.styles([made_line("learned"), made_line("learned", overflow="clamp")])
    assert clamp["learned (clamp)"].color == clamp["learned"].color
    assert clamp["learned (clamp)"].dashes != "-" and clamp["learned"].dashes == "-"


def test_all_schemes_have_a_style():
    named = (
        "learned sinusoidal raw_index normalized_index binary concat shaw transformer_xl t5 tupe alibi kerple sandwich "
        "fire cope rope xpos pope nope randomized hybrid"
    )
    assert set(named.split()) == set(plots.STYLES)


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


# ---- the script

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "compare.py"


def script(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True, timeout=60)


def test_the_script_writes_into_the_folder_and_prints_the_table(tmp_path):
    ablation(tmp_path / "pos", seeds=1)
    ended = script(tmp_path / "pos")
    assert ended.returncode == 0 and not ended.stderr
    assert "rope" in ended.stdout and "1.520 (0.010)" in ended.stdout and "report.md" in ended.stdout
    assert (tmp_path / "pos" / "report.md").exists()


def test_wrong_use_is_one_line_with_the_next_command_and_leaves_nothing(tmp_path):
    (tmp_path / "empty").mkdir()
    write_run(tmp_path / "pos" / "rope-s0", config("rope", 0), [], "failed")
    for arguments in ([], [tmp_path / "none"], [tmp_path / "empty"], [tmp_path / "pos"], ["--help"]):
        ended = script(*arguments)
        assert ended.returncode == 2 and not ended.stdout
        assert len(ended.stderr.strip().splitlines()) == 1 and "python eval.py runs=" in ended.stderr
    assert "1 run (1 failed), none evaluated" in script(tmp_path / "pos").stderr
    assert not list(tmp_path.rglob("report.md"))


def test_it_starts_fast_and_without_torch():
    code = "import sys, time; t = time.perf_counter(); sys.path.insert(0, '.'); import gpt.report; "
    code += "heavy = [m for m in ('torch', 'hydra', 'wandb', 'matplotlib') if m in sys.modules]; "
    code += "print(heavy, time.perf_counter() - t < 1.5)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=SCRIPT.parent.parent)
    assert ended.stdout.strip() == "[] True", ended.stderr
