"""Runs read from folders of which anything may be missing or damaged."""

import io
import math

import pytest
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
