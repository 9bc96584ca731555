"""The report: what is written, and that it is the numbers. All runs here are made up, with known answers."""

import csv
import io
import json
import math
import random
import re
import runpy
import shlex
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from gpt import plots, report, tables
from gpt.comparison import Mean
from tests.measured_runs import ablation, config, only, row, simple, write_run


@pytest.fixture
def quick(monkeypatch):
    """Pictures are drawn, but not turned into files, which takes most of a report's time."""
    monkeypatch.setattr(plots, "png", lambda made: b"")


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


def test_the_csv_has_a_line_a_measurement_and_all_fields_but_the_curve(tmp_path, quick):
    ablation(tmp_path)
    folder = tmp_path / "rope-s0"
    with open(folder / "eval.jsonl", "a") as file:
        file.write(json.dumps(row("rope", 0, 1, 7.25, step=10, checkpoint="a,b\n", new_field=3)) + "\n")
    report.write_report([tmp_path])
    with open(tmp_path / "results.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert set(lines[0]) == {*row("rope", 0, 1, 1.0), "label", "folder", "in_tables", "seeds_in_mean", "new_field"} - {
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


def test_same_input_same_bytes_whatever_the_order(tmp_path, quick):
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


def test_the_findings_are_the_numbers(tmp_path, quick):
    text = report.write_report([ablation(tmp_path)]).markdown
    assert (
        "1x the lowest mean loss is that of **rope**: 1.525 ± 0.007; "
        "the largest certain gap is that to learned, 0.100 ± 0.000" in text
    )
    assert (
        "At 4x the lowest mean loss is that of **alibi**: 1.525 ± 0.007; the largest certain gap is that to rope, 0.280"
        in text
    )
    assert "the loss changes by: alibi -0.020 ± 0.000, rope +0.280 ± 0.000." in text
    assert "lowers the loss of alibi (-0.040); raises the loss of rope (+0.350)" in text
    assert "parameters" in text and "836,192" in text and "8,192" in text and "50,000" in text


def test_findings_of_one_seed_are_numbers_and_claims_none(tmp_path):
    found = report.findings(only(ablation(tmp_path, seeds=1)))
    assert found[0] == (
        "At 1x the loss is: alibi 1.540 (0.010), learned 1.620 (0.010), rope 1.520 (0.010) "
        "(no two seeds in common, so no claim)."
    )
    assert found[1].startswith("At 4x the loss is: alibi 1.520 (0.010), rope 1.800 (0.010) (no two seeds")
    assert found[3].endswith("with one seed and so without a claim, the loss of alibi (-0.040), rope (+0.350).")
    words = "lowest highest best better worse lowers raises tie wins"
    assert not any(re.search(rf"\b{word}\b", text) for text in found for word in words.split())


def test_findings_rank_only_what_has_seeds_in_common(tmp_path):
    ablation(tmp_path)
    simple(tmp_path, "t5", 0, [1.0, 1.0, 1.0], [1.0, 1.0, 1.0])  # one seed, and lower than all others
    found = report.findings(only(tmp_path))
    assert found[0] == (
        "At 1x the lowest mean loss is that of **rope**: 1.525 ± 0.007; "
        "the largest certain gap is that to learned, 0.100 ± 0.000; "
        "t5 1.000 (0.010) (no two seeds in common, so no claim)."
    )


def test_differences_are_shown_with_their_interval(tmp_path, quick):
    for seed, extra in enumerate((0.15, 0.2, 0.25)):
        simple(tmp_path, "rope", seed, [1.0 + seed] * 3)
        simple(tmp_path, "t5", seed, [1.0 + seed + extra] * 3)
        simple(tmp_path, "alibi", seed, [1.0 + seed + 2 * extra - 0.3] * 3)
    text = report.write_report([tmp_path]).markdown
    table = text.split("Differences, seed by seed")[1]
    assert "+0.200 ± 0.124" in table and "+0.100 ± 0.248 tie" in table
    assert "3: ±4.30" in table and "Student's t" in table


def test_the_commands_are_those_that_were_typed(tmp_path, quick):
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


def test_markdown_tables_are_rectangular_and_escape_pipes(tmp_path, quick):
    rows = [row("learned", 0, 1, 1.0), row("learned", 0, 2, None, reason="a | b\nc [/bold]")]
    write_run(tmp_path / "a", config("learned", 0), rows)
    written = report.write_report([tmp_path])
    assert "a \\| b c" in written.markdown
    for block in written.markdown.split("\n\n"):
        if block.startswith("|"):
            assert len({len(re.findall(r"(?<!\\)\|", text)) for text in block.splitlines()}) == 1
            assert len({len(text) for text in block.splitlines()}) == 1
    tables.print_tables(written.results, Console(file=io.StringIO()))  # brackets in a reason are no markup


def test_the_ways_in_which_a_run_cannot_be_read_are_one_line(tmp_path):
    ways = [{"scaling": kind} for kind in ("none", "linear", "ntk", "yarn")]
    rows = [row("alibi", 0, f, 1.0 if way["scaling"] == "none" else None, reason="has no rotations", **way)
            for way in ways for f in (1, 2)]  # fmt: skip
    table = tables.evaluation_table({tmp_path: rows})
    assert [str(cell) for cell in table.columns[0].cells] == ["alibi-s0", "alibi-s0 (linear, ntk, yarn)"]
    assert [str(cell) for cell in table.columns[2].cells] == ["1.0000", "unsupported [1]"]
    assert str(table.caption) == "[1] has no rotations"
    table = tables.evaluation_table({tmp_path: [row("learned", 0, 2, None, reason="r", **way) for way in ways]})
    assert [str(cell) for cell in table.columns[0].cells] == ["learned-s0 (as trained, linear, ntk, yarn)"]
    table = tables.evaluation_table({tmp_path: [row("learned", 0, 2, None, reason="r")]})
    assert [str(cell) for cell in table.columns[0].cells] == ["learned-s0"]


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({}, ""),
        ({"documents": "within"}, ", within documents"),
        ({"split": "test"}, ", test split"),
        ({"documents": "within", "split": "test"}, ", within documents, test split"),
    ],
)
def test_titles_say_what_was_measured(tmp_path, changes, expected):
    rows = [row("rope", 0, f, 1.0 + f, protocol, **changes) for f in (1, 2) for protocol in ("disjoint", "sliding")]
    assert tables.evaluation_table({tmp_path: rows}).title == "Loss (nats per token)" + expected
    write_run(tmp_path / "rope-s0", config("rope", 0), rows)
    titles = [grid.title for grid in tables.grids(only(tmp_path))]
    assert titles[:2] == [f"Disjoint windows{expected}", f"Sliding windows, stride 32{expected}"]


def test_what_was_compared_is_said_as_a_methods_section_needs_it(tmp_path, quick):
    made = config("rope", 0, optim__warmup=100)
    write_run(tmp_path / "a", made, [row("rope", 0, f, 1.0) for f in (1, 2)])
    text = report.write_report([tmp_path]).markdown
    assert "packing random, " in text and "after 100 steps of warm-up" in text
    assert "\n- tokens of the split that lie in no block: 7\n" in text


@pytest.mark.parametrize("value, shown", [(-0.0001, "0.000"), (0.0001, "0.000"), (-0.001, "-0.001"), (0.02, "+0.020")])
def test_a_rounded_zero_has_no_sign(value, shown):
    assert tables.cell(Mean(value, None, 1), signed=True) == shown


def test_a_report_names_the_parameters_of_every_rescaling(tmp_path, quick):
    yarn = {"scaling": "yarn", "scaling_factor": 4.0, "scaling_parameters": "alpha=1 beta=4"}
    rows = [row("rope", 0, f, 1.0, **way) for f in (1, 2) for way in ({}, yarn)]
    write_run(tmp_path / "a", config("rope", 0), rows)
    assert "\n- read otherwise than trained: yarn alpha=1 beta=4\n" in report.write_report([tmp_path]).markdown


def test_what_was_asked_for_beside_the_default_has_tables_of_its_own(tmp_path, quick):
    """The test split and windows within documents, of all runs, and no warning: they are other questions."""
    ways = {}, {"documents": "within", "data_sha256": "cd" * 32}, {"split": "test", "data_sha256": "ef" * 32}
    for seed in range(2):
        measured = [row("rope", seed, f, n + f + 0.1 * seed, **way) for n, way in enumerate(ways) for f in (1, 2)]
        write_run(tmp_path / f"rope-s{seed}", config("rope", seed), measured)
    write_run(tmp_path / "t5-s0", config("t5", 0), [row("t5", 0, f, 7.0) for f in (1, 2)])  # the default alone
    written = report.write_report([tmp_path])
    titles = ["Disjoint windows", "Disjoint windows, within documents", "Disjoint windows, test split"]
    assert [tables.grids(one)[0].title for one in written.results.comparisons] == titles
    for n, one in enumerate(written.results.comparisons):
        assert one.lines[0].mean("disjoint", 2).mean == pytest.approx(n + 2.05)
        assert [found.label for found in one.lines] == (["rope", "t5"] if n == 0 else ["rope"])
    assert not any("NOT ONE" in text or "left out" in text for text in written.results.warnings)
    assert (tmp_path / "extrapolation-3.png").is_file()
    for words in ("eval.split=test", "eval.documents=within"):
        assert sum(words in text for text in written.markdown.splitlines() if text.startswith("python eval.py")) == 1


def test_the_evaluation_table_shows_what_was_just_measured():
    rows = [row("learned", 0, 1, 1.23456), row("learned", 0, 2, None, reason="[/x] 64 rows")]
    rows += [row("learned", 0, 2, 3.0, overflow="clamp"), row("learned", 0, 1, 1.5, "sliding")]
    console = Console(width=120, file=io.StringIO())
    console.print(tables.evaluation_table({Path("x"): rows}))
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


def test_runs_of_one_name_are_lines_of_their_own():
    folders = ("runs/two/a/rope-s0", "runs/two/b/rope-s0", "runs/two/copy", "runs/two/b/alibi-s0")
    found = {Path(name): [row(name.split("/")[-1][:5].strip("-"), 0, 1, 1.0 + n)] for n, name in enumerate(folders)}
    found[Path(folders[2])][0]["run"] = found[Path(folders[0])][0]["run"] = "rope-s0"
    found[Path(folders[1])][0]["run"] = "rope-s0"
    table = tables.evaluation_table(found)
    names, losses = ([str(cell) for cell in column.cells] for column in table.columns)
    assert dict(zip(names, losses, strict=True)) == {
        "a/rope-s0": "1.0000",
        "b/rope-s0": "2.0000",
        "copy": "3.0000",
        "alibi-s0": "4.0000",
    }


# ---- the script

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "compare.py"


def script(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True, timeout=180)


def test_the_script_writes_into_the_folder_and_prints_the_table(tmp_path):
    ablation(tmp_path / "pos", seeds=1)
    ended = script(tmp_path / "pos")
    assert ended.returncode == 0 and not ended.stderr
    assert "rope" in ended.stdout and "1.520 (0.010)" in ended.stdout and "report.md" in ended.stdout
    assert (tmp_path / "pos" / "report.md").exists()


def test_wrong_use_is_one_line_with_the_next_command_and_leaves_nothing(tmp_path, capsys):
    main = runpy.run_path(str(SCRIPT))["main"]
    (tmp_path / "empty").mkdir()
    write_run(tmp_path / "pos" / "rope-s0", config("rope", 0), [], "failed")
    for arguments in ([], [tmp_path / "none"], [tmp_path / "empty"], [tmp_path / "pos"], ["--tables"]):
        assert main([str(argument) for argument in arguments]) == 2
        out, err = capsys.readouterr()
        assert not out and len(err.strip().splitlines()) == 1 and "python eval.py runs=" in err
    assert "1 run (1 failed), none evaluated" in script(tmp_path / "pos").stderr
    assert not list(tmp_path.rglob("report.md"))


def test_nothing_heavy_is_imported():
    code = "import sys, gpt.report; print([m for m in ('torch', 'hydra', 'wandb', 'matplotlib') if m in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=SCRIPT.parent.parent)
    assert ended.stdout.strip() == "[]", ended.stderr
