"""Runs read from folders of which anything may be missing or damaged."""

import copy
import io
import json
import math
import random
import warnings

import pytest
import yaml
from rich.console import Console

from gpt import comparison as comparing
from gpt import plots, report, results, tables
from tests.measured_runs import config, only, row, simple, write_run


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Pictures are drawn, but not turned into files, which takes most of a report's time."""
    monkeypatch.setattr(plots, "png", lambda made: b"")


def test_a_torn_last_line_loses_only_itself(tmp_path):
    folder = simple(tmp_path, "rope", 0, [1.0, 1.1, 1.2])
    whole = (folder / "eval.jsonl").read_bytes()
    for name in ("eval.jsonl", "metrics.jsonl"):
        with open(folder / name, "ab") as file:
            file.write(b'{"run": "rope-s0", "loss": 1.\xff')
    found = comparing.compare([tmp_path])
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
    tables.print_tables(written.results, console)
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
    found = comparing.compare([tmp_path])
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
    text = " ".join(comparing.compare([tmp_path]).warnings)
    assert "optim.lr from 0.001 to 0.002 at step 500" in text
    assert "source revisions: aaaaaaaaaa, bbbbbbbbbb with uncommitted changes" in text


STRANGE = [None, True, -1, 0, 1, 10**20, 10**400, 0.5, -0.0, 1e300, math.nan, math.inf, "x", "", "\ud800", "$x^{$"]
STRANGE += [[], [1], ["x"], [[]], {}, {"x": 1}, {"x": {"x": [None]}}]


def mutate(draw: random.Random, value: object) -> object:
    """`value` with one thing in it, at any depth, gone or replaced by something strange."""
    places = []

    def walk(node):
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], (dict, list)):
                walk(node[key])

    value = copy.deepcopy(value)
    walk(value)
    node, key = draw.choice(places)
    if draw.random() < 0.1:
        del node[key]
    else:
        node[key] = draw.choice(STRANGE)
    return value


@pytest.mark.parametrize("part", ["config.yaml", "status.json", "metrics.jsonl", "eval.jsonl"])
def test_no_single_change_of_a_file_stops_the_report(tmp_path, part):
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    draw = random.Random(seed)
    folder = simple(tmp_path, "rope", 0, [1.0, 1.1, 1.2], [1.0, 1.1, 1.2])
    for other in (1, 2):
        simple(tmp_path, "rope", other, [1.0, 1.1, 1.2], [1.0, 1.1, 1.2])
    changes = [{"step": 5, "key": "optim.lr", "old": 0.1, "new": 0.2}]
    whole = {
        "status": "running",
        "host": "h",
        "pid": 1,
        "step": 9,
        "error": None,
        "updated": "2026-01-01",
        "dtype": "x",
    }
    whole |= {
        "changes": changes,
        "overrides": ["position=rope"],
        "device": "cpu",
        "versions": {"nanope": {"commit": "a"}},
    }
    (folder / "status.json").write_text(json.dumps(whole))
    before = (folder / part).read_text()
    for _ in range(8):
        if part == "config.yaml":
            (folder / part).write_text(yaml.safe_dump(mutate(draw, yaml.safe_load(before))))
        elif part == "status.json":
            (folder / part).write_text(json.dumps(mutate(draw, json.loads(before))))
        else:
            lines = mutate(draw, [json.loads(line) for line in before.splitlines()])
            (folder / part).write_text("".join(json.dumps(line) + "\n" for line in lines))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of fonts and of bars without an end
            written = report.write_report([tmp_path])
        tables.print_tables(written.results, Console(width=200, file=io.StringIO()))
        assert len(written.results.runs) == 3, (folder / part).read_text()


@pytest.mark.parametrize(
    "name, content",
    [
        ("config.yaml", "&a {position: *a}"),
        ("config.yaml", "[" * 1200),
        ("config.yaml", "position: [rope]"),
        ("config.yaml", "seed: [1]"),
        ("status.json", '{"status": "done", "changes": -1}'),
        ("status.json", '{"status": ["done"]}'),
        ("status.json", '{"status": "done", "overrides": [3]}'),
        ("status.json", '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"),
    ],
)
def test_files_of_another_shape_are_not_readable_and_named(tmp_path, name, content):
    folder = simple(tmp_path, "rope", 0, [1.0] * 3)
    (folder / name).write_text(content)
    assert results.read_run(folder).problems == (f"{name} is missing or not readable",)
    report.write_report([tmp_path])


@pytest.mark.parametrize(
    "change",
    [
        {"step": "x"},
        {"data": ["stdlib"]},
        {"scaling": -1},
        {"scaling": ["none"]},
        {"protocol": [1]},
        {"block_length": "x"},
        {"stride": []},
        {"loss": "x"},
        {"seed": [0]},
        {"note": {"deep": 1}},
        {"position_bins": [0, 0, 1]},
        {"position_curve": None},
    ],
    ids=str,
)
def test_a_row_with_a_value_of_another_kind_is_passed_over_and_counted(tmp_path, change):
    rows = [row("rope", 0, 1, 1.0), row("rope", 0, 2, 1.0), row("rope", 0, 4, 1.0) | change]
    read = results.read_run(write_run(tmp_path / "a", config("rope", 0), rows))
    assert [r["factor"] for r in read.rows] == [1, 2]
    assert ["eval.jsonl: 1 row without" in problem for problem in read.problems] == [True]
    assert "1 row without" in report.write_report([tmp_path]).markdown


@pytest.mark.parametrize("factor", [10**20, 1e29, 4096, 0.001])
def test_lengths_of_any_size_are_drawn(tmp_path, factor):
    """Up to a file: only the drawing itself lays out ticks."""
    rows = [
        row("rope", 0, 1, 1.0),
        row("rope", 0, 1, 1.2) | {"factor": factor, "eval_length": max(1, int(factor * 64))},
    ]
    rows[1]["position_bins"] = [0, *(n * max(1, int(factor)) for n in range(1, len(rows[1]["position_curve"]) + 1))]
    write_run(tmp_path / "a", config("rope", 0), rows)
    (comparison,) = comparing.compare([tmp_path]).comparisons
    for picture in (plots.extrapolation(comparison), plots.per_position(comparison)):
        picture.set_dpi(20)
        picture.canvas.draw()


def test_a_dollar_in_a_label_is_no_formula(tmp_path):
    for path in ("a$x^$", "b"):
        write_run(tmp_path / path[0], config("rope", 0, data__path=path), [row("rope", 0, 1, 1.0)])
    (comparison,) = comparing.compare([tmp_path]).comparisons
    assert any("$x^$" in line.label for line in comparison.lines)
    plots.extrapolation(comparison).canvas.draw()
