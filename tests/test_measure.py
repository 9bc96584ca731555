"""eval.py on real runs: which rows it leaves, what it does not measure again, and what it refuses."""

import dataclasses
import json
import math
import re
import runpy
import shutil
from pathlib import Path

import pytest
import torch

import eval as evaluation
import gpt.evaluate
import gpt.generate
import gpt.measure
import gpt.mirror
import gpt.model
import gpt.runtime
import train
from gpt import checkpoint, cli, terminal
from gpt.checkpoint import latest
from gpt.corpus import open_corpus
from gpt.errors import UserError
from tests.runs import composed, metrics, write_corpus

RUNS = Path("runs/default")
FIELDS = """run position seed step tokens train_length eval_length factor protocol stride scaling scaling_parameters
rope_base overflow ids block_length n_blocks n_dropped documents split loss loss_se tail_loss tail_loss_se
perplexity bits_per_byte n_targets n_bytes tokens_per_second parameters position_parameters data
data_sha256 tokenizer checkpoint checkpoint_sha256 status reason position_curve position_bins""".split()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a text and two runs of a few steps."""
    place = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        write_corpus(Path("corpus.txt"))
        for scheme in ("learned", "rope"):
            train.main(*composed(f"position={scheme}", f"name={scheme}", "train.steps=10", "train.eval_tokens=999999"))
    return place


@pytest.fixture(autouse=True)
def place(trained, tmp_path, monkeypatch):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True, copy_function=shutil.copy2)  # times are part of a text
    monkeypatch.chdir(tmp_path)


def measure(*overrides: str) -> int:
    return evaluation.main(cli.compose("eval", list(overrides)), list(overrides))


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()]


def table(capsys) -> str:
    out = capsys.readouterr().out
    return out[out.index("Loss (nats per token)") :]


def never(*_):
    pytest.fail("measured again")


def test_rows_and_the_second_call(capsys, monkeypatch):
    assert measure("runs=runs/default", "factors=[1,2,4]") == 0
    first = table(capsys)
    learned, rope = rows(RUNS / "learned"), rows(RUNS / "rope")
    for run, found in (("learned", learned), ("rope", rope)):
        saved = latest(RUNS / run / "checkpoints")
        assert [(row["protocol"], row["factor"]) for row in found] == [
            (protocol, factor) for protocol in ("disjoint", "sliding") for factor in (1, 2, 4)
        ]
        for row in found:
            assert set(FIELDS) <= row.keys()
            assert (row["run"], row["position"], row["seed"], row["step"]) == (run, run, 0, 10)
            assert row["tokens"] == saved.state["tokens"] == 640
            assert (row["train_length"], row["eval_length"]) == (16, 16 * row["factor"])
            assert row["checkpoint_sha256"] == saved.sha256 and row["data_sha256"] == saved.state["val_sha256"]
            assert row["stride"] == (None if row["protocol"] == "disjoint" else 8)
            assert (row["block_length"], row["n_blocks"], row["scaling"], row["overflow"]) == (64, 8, "none", None)
    for row in rope + [row for row in learned if row["factor"] == 1]:
        assert (row["status"], row["reason"]) == ("ok", None)
        assert row["n_targets"] == row["n_bytes"] == (512 if row["protocol"] == "disjoint" else 64)
        assert 0 < row["loss"] < 6 and row["perplexity"] == pytest.approx(math.exp(row["loss"]))
        assert row["bits_per_byte"] == pytest.approx(row["loss"] / math.log(2))  # a byte is a token
        assert row["loss_se"] > 0 and row["tokens_per_second"] > 0
        assert (row["tail_loss"] is None) == (row["factor"] == 1 or row["protocol"] == "sliding")
        if row["protocol"] == "disjoint":
            assert len(row["position_curve"]) + 1 == len(row["position_bins"]) == 16 * row["factor"] + 1
    for row in learned:
        if row["factor"] > 1:
            reason = f"position=learned: {row['eval_length']} tokens, its table has 16 rows"
            assert (row["status"], row["reason"], row["loss"], row["n_targets"]) == ("unsupported", reason, None, None)

    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    monkeypatch.setattr(gpt.measure, "disjoint", never)
    monkeypatch.setattr(gpt.measure, "sliding", never)
    assert measure("runs=runs/default", "factors=[4,2,1,1]") == 0
    assert table(capsys) == first
    assert before == {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}


def test_windows_within_documents_and_the_test_split_are_rows_of_their_own():
    """Of a text of one document, within reads what concat does; the sealed split is read only where it is asked for."""
    assert measure("runs=runs/default", "factors=[1,2]") == 0
    concat = rows(RUNS / "rope")
    assert {(row["split"], row["documents"]) for row in concat} == {("val", "concat")}
    assert measure("runs=runs/default", "factors=[1,2]", "eval.documents=within") == 0
    within = rows(RUNS / "rope")[4:]
    assert [row["documents"] for row in within] == ["within"] * 4
    for one, other in zip(concat, within, strict=True):
        assert one["loss"] == other["loss"] and one["data_sha256"] == other["data_sha256"]
    assert measure("runs=runs/default", "factors=[1,2]", "eval.split=test") == 0
    sealed = rows(RUNS / "rope")[8:]
    corpus = open_corpus(next(Path("data/text").glob("*/meta.json")).parent)
    assert {(row["split"], row["data_sha256"]) for row in sealed} == {("test", corpus.test_sha256)}
    assert all(row["loss"] != before["loss"] for row, before in zip(sealed, concat, strict=True))
    assert measure("runs=runs/default", "factors=[1,2]", "eval.split=test") == 0 and len(rows(RUNS / "rope")) == 12


def test_rows_of_text_too_short_say_of_which():
    assert measure("checkpoint=runs/default/rope", "factors=[1,4096]", "eval.split=test") == 0
    reasons = [row["reason"] for row in rows(RUNS / "rope") if row["status"] == "unsupported"]
    assert len(reasons) == 2 and all(reason.startswith("the test split has") for reason in reasons)
    assert measure("checkpoint=runs/default/rope", "factors=[1,4096]", "eval.documents=within") == 0
    assert rows(RUNS / "rope")[-1]["reason"].startswith("the longest document of the validation split has")


def test_a_corpus_without_a_test_split_has_no_such_rows(capsys):
    train.main(*composed("position=rope", "name=b", "train.steps=1", "data.test_fraction=0"))
    assert measure("checkpoint=runs/default/b", "eval.split=test") != 0
    said = "".join(capsys.readouterr())
    assert "eval.split: got 'test', allowed: val: " in said and "prepared with data.test_fraction=0" in said
    assert not (RUNS / "b/eval.jsonl").exists()


def test_measured_again_the_numbers_are_the_same():
    measure("runs=runs", "factors=[1,2]")
    first = rows(RUNS / "rope")
    (RUNS / "rope/eval.jsonl").unlink()
    measure("checkpoint=runs/default/rope", "factors=[1,2]")
    for row, other in zip(first, rows(RUNS / "rope"), strict=True):
        for key in row.keys() - {"tokens_per_second", "measured"}:
            assert row[key] == other[key], key


def test_factor_1_is_what_training_reported():
    measure("runs=runs/default", "factors=[1]", "eval.tokens=999999")
    for run in ("learned", "rope"):
        row = rows(RUNS / run)[0]
        assert row["loss"] == pytest.approx(metrics(RUNS / run)[-1]["val_loss"], abs=1e-6)


def test_only_what_is_new_is_measured(monkeypatch, capsys):
    measure("runs=runs/default", "factors=[1,2]")
    with monkeypatch.context() as patch:
        patch.setattr(gpt.measure, "sliding", lambda *args: never() if args[4] == 8 else gpt.evaluate.sliding(*args))
        patch.setattr(gpt.measure, "disjoint", never)
        measure("checkpoint=runs/default/rope", "factors=[1,2]", "eval.stride=4")
    assert [row["stride"] for row in rows(RUNS / "rope")] == [None, None, 8, 8, 4, 4]
    # a named policy is a measurement of its own, where the table ends
    measure("runs=runs/default", "factors=[1,2]", "position.overflow=clamp")
    found = [(row["protocol"], row["factor"], row["overflow"], row["status"]) for row in rows(RUNS / "learned")]
    assert found == [
        ("disjoint", 1, None, "ok"),
        ("disjoint", 2, None, "unsupported"),
        ("sliding", 1, None, "ok"),
        ("sliding", 2, None, "unsupported"),
        ("disjoint", 2, "clamp", "ok"),
        ("sliding", 2, "clamp", "ok"),
    ]
    assert len(rows(RUNS / "rope")) == 6 and "learned (clamp)" in capsys.readouterr().out


def test_lengths_that_the_text_does_not_reach():
    assert measure("checkpoint=runs/default/rope", "factors=[1,2,512]") == 0
    found = rows(RUNS / "rope")
    assert [(row["factor"], row["status"]) for row in found] == 2 * [(1, "ok"), (2, "ok"), (512, "unsupported")]
    for row in found[2::3]:
        assert re.fullmatch(r"the validation split has \d+ tokens, factors \[1, 2, 512\] need 8193", row["reason"])
    assert found[0]["block_length"] == 32 and found[2]["block_length"] is None


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("MPS backend out of memory"),
        MemoryError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_length_for_which_the_memory_does_not_suffice(monkeypatch, error):
    def short(*args):
        if args[3] == 2:
            raise error
        return gpt.evaluate.disjoint(*args)

    with monkeypatch.context() as patch:
        patch.setattr(gpt.measure, "disjoint", short)
        assert measure("checkpoint=runs/default/rope", "factors=[1,2,4]") == 0
    found = rows(RUNS / "rope")
    assert [row["status"] for row in found] == ["ok", "unsupported", "ok", "ok", "ok", "ok"]
    assert found[1]["reason"] == "out of memory at 32 tokens" and found[1]["loss"] is None
    assert measure("checkpoint=runs/default/rope", "factors=[1,2,4]") == 0  # tried again, and only that
    again = rows(RUNS / "rope")
    assert again[:6] == found and len(again) == 7
    assert (again[6]["status"], again[6]["eval_length"], again[6]["protocol"]) == ("ok", 32, "disjoint")


def test_other_errors_of_a_kernel_are_no_lack_of_memory(monkeypatch):
    def broken(*_):
        raise RuntimeError("shapes cannot be multiplied")

    monkeypatch.setattr(gpt.measure, "disjoint", broken)
    with pytest.raises(RuntimeError, match="shapes"):
        measure("checkpoint=runs/default/rope", "factors=[1]")


def test_a_folder_that_cannot_be_written_is_one_line_and_stops_no_other(capsys):
    (RUNS / "learned/.eval.jsonl.lock").mkdir()  # root may write everywhere, so permissions would not do
    (RUNS / "rope/eval.jsonl").mkdir()
    shutil.copytree(RUNS / "rope", RUNS / "third", ignore=shutil.ignore_patterns("eval.jsonl"))
    assert measure("runs=runs/default", "factors=[1]") == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("error: runs/default/learned: ")
    assert first.endswith("/runs/default/learned/eval.jsonl: cannot be written: Is a directory")
    assert second.startswith("error: runs/default/rope: ") and "Is a directory" in second
    assert [row["status"] for row in rows(RUNS / "third")] == ["ok", "ok"]


def test_wandb_gets_all_rows_when_one_is_new(monkeypatch):
    sent = []
    monkeypatch.setattr(gpt.mirror, "mirror_evaluation", lambda folder, rows, log: sent.append((folder.name, rows)))
    measure("checkpoint=runs/default/rope", "factors=[1]")
    measure("checkpoint=runs/default/rope", "factors=[1]")
    assert measure("checkpoint=runs/default/rope", "factors=[1,2]") == 0
    assert [(name, len(found)) for name, found in sent] == [("rope", 2), ("rope", 4)]


def test_a_torn_line_survives_and_hides_nothing():
    measure("checkpoint=runs/default/rope", "factors=[1]")
    path = RUNS / "rope/eval.jsonl"
    whole = path.read_text()
    path.write_text(whole[:-40])  # the second row was being written
    measure("checkpoint=runs/default/rope", "factors=[1]")
    lines = path.read_text().splitlines()
    assert len(lines) == 3 and whole.startswith(lines[0] + "\n" + lines[1])
    again, row = json.loads(lines[2]), json.loads(whole.splitlines()[1])
    assert (again["loss"], again["protocol"]) == (row["loss"], "sliding")


def test_a_checkpoint_out_of_its_run():
    measure("checkpoint=runs/default/rope", "factors=[1]")
    shutil.move(RUNS / "rope/checkpoints/step-000010", "mine")
    assert measure("checkpoint=mine", "factors=[1]") == 0
    assert [row["loss"] for row in rows(Path("mine"))] == [row["loss"] for row in rows(RUNS / "rope")]
    assert {row["checkpoint"] for row in rows(Path("mine"))} == {"mine"}
    assert measure("checkpoint=runs/default/rope/checkpoints/step-000005", "factors=[1]") == 0
    assert [row["step"] for row in rows(RUNS / "rope")] == [10, 10, 5, 5]


def test_a_run_that_cannot_be_measured_stops_no_other(capsys):
    logs = RUNS / "rope/wandb/run-1/files"
    logs.mkdir(parents=True)
    (logs / "config.yaml").write_text("a: 1\n")  # wandb's, not a run
    shutil.copytree(RUNS / "rope", RUNS / "bad")
    for file in (RUNS / "bad/checkpoints").rglob("state.json"):
        file.unlink()
    path = RUNS / "learned/checkpoints/step-000010/model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert measure("runs=runs/default", "factors=[1]") == 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert line.startswith("error: runs/default/bad") and line.count("runs/default/bad: ") <= 1
    assert "step-000010 is damaged and passed over, going on from step-000005" in out
    assert rows(RUNS / "learned")[0]["step"] == 5 and rows(RUNS / "rope")[0]["step"] == 10
    # named itself, it never falls back
    assert measure("checkpoint=runs/default/learned/checkpoints/step-000010", "factors=[1]") == 2
    assert "model.safetensors: is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("gone", [False, True])
def test_a_text_that_changed_is_not_needed_while_its_tokens_are_there(gone):
    measure("checkpoint=runs/default/rope", "factors=[1]")
    first = rows(RUNS / "rope")
    (RUNS / "rope/eval.jsonl").unlink()
    Path("corpus.txt").unlink() if gone else Path("corpus.txt").write_text("another text " * 1000)
    before = set(Path("data").rglob("*"))
    assert measure("checkpoint=runs/default/rope", "factors=[1]") == 0
    assert [row["loss"] for row in rows(RUNS / "rope")] == [row["loss"] for row in first]
    assert set(Path("data").rglob("*")) == before  # nothing was prepared


def test_a_text_that_changed_is_refused(capsys):
    was = latest(RUNS / "rope/checkpoints").state["train_sha256"][:12]
    Path("corpus.txt").write_text(Path("corpus.txt").read_text()[::-1])
    shutil.rmtree("data")
    assert measure("checkpoint=runs/default/rope") == 2
    assert re.search(f"trained with train_sha256 {was}, data/text/.* has [0-9a-f]{{12}}", capsys.readouterr().err)
    assert not (RUNS / "rope/eval.jsonl").exists()


def test_weights_that_give_no_number():
    saved = latest(RUNS / "rope/checkpoints")
    weights = saved.model_state()
    weights["wte.weight"][:] = math.nan
    checkpoint.save(Path("bad"), 1, weights, {}, {k: v for k, v in saved.state.items() if k != "step"})
    assert measure("checkpoint=bad/step-000001", "factors=[1]") == 0
    assert [(row["status"], row["reason"]) for row in rows(Path("bad/step-000001"))] == 2 * [
        ("diverged", "the loss is nan")
    ]


@pytest.mark.parametrize(
    "overrides, message",
    [
        ([], "runs: got null, allowed: exactly one of"),
        (["runs=runs", "checkpoint=runs/default/rope"], "runs: got 'runs', allowed: exactly one of"),
        (["runs=nowhere"], "runs: got 'nowhere', allowed: a folder with runs in it"),
        (["runs="], "runs: got '', allowed: a text not empty or null"),
        (["checkpoint="], "checkpoint: got '', allowed: a text not empty or null"),
        (["checkpoint=corpus.txt"], "checkpoint: got 'corpus.txt', allowed: a folder, a run's"),
        (["runs=runs", f"factors=[1,{10**20}]"], f"factors: got [1, {10**20}], allowed: a list, each a whole number"),
        (["runs=runs", "factors=[0]"], "factors: got [0], allowed"),
        (["runs=runs", "factors=[]"], "factors: got [], allowed"),
        (["runs=runs", "factor=[1]"], "factor: there is no such key; did you mean factors?"),
        (["runs=runs", "position.overflow=extend"], "position.overflow: got 'extend', allowed"),
        (["runs=runs", "scaling=[lineal]"], "scaling: got ['lineal'], allowed: a list, each none | linear | ntk"),
        (["runs=runs", "scaling=[]"], "scaling: got [], allowed: a list"),
        (["runs=runs", "rescaling.factor=0.5"], "rescaling.factor: got 0.5, allowed: a number >= 1"),
        (["runs=runs", "rescaling.ramp=log"], "rescaling.ramp: got 'log', allowed: index | turns"),
        (["runs=runs", "rescaling.alpha=40"], "rescaling.beta: got 32.0, allowed: more than rescaling.alpha=40"),
        (["runs=runs", "rescaling.alpha=5e-324"], "rescaling.alpha: got 5e-324, allowed: a number >= 1e-09"),
        (["runs=runs", "rescaling.bet=3"], "rescaling.bet: there is no such key; did you mean rescaling.beta?"),
        (["runs=runs", "+rescaling.kind=ntk"], "rescaling.kind: "),
        (["runs=runs", "position.base=0"], "position.base: got 0, allowed: a number >= 1e-09 and <= 1e+12 or null"),
        (["runs=runs", "position.ids=odd"], "position.ids: got 'odd', allowed: spaced | random or null"),
    ],
)
def test_errors(overrides, message, capsys):
    with pytest.raises(SystemExit) as exit:
        cli.report_errors(lambda: measure(*overrides), "eval")
    (line,) = capsys.readouterr().err.splitlines()
    assert exit.value.code == 2 and line.startswith(f"error: {message}")


KINDS = ["none", "linear", "ntk", "dynamic", "by_parts", "yarn", "llama3", "longrope"]


def test_every_rescaling_in_one_command(capsys, monkeypatch):
    """A row each, with its parameters; at factor 1 that of `none`, not measured again; and nothing of it stays."""
    seen = []  # (factor, rule in force) of each measurement
    disjoint = gpt.measure.disjoint

    def measured(model, *args):
        seen.append((args[2], model.position.stretch[0].kind))
        return disjoint(model, *args)

    monkeypatch.setattr(gpt.measure, "disjoint", measured)
    command = "checkpoint=runs/default/rope", "factors=[1,2,4]", f"scaling=[{','.join(KINDS)}]", "rescaling.beta=4"
    assert measure(*command) == 0
    assert sorted(seen) == sorted([(1, "none"), *((factor, kind) for factor in (2, 4) for kind in KINDS)])
    found = {(r["scaling"], r["protocol"], r["factor"]): r for r in rows(RUNS / "rope")}
    assert len(found) == 8 * 2 * 3 and all(row["status"] == "ok" for row in found.values())
    for (kind, protocol, factor), row in found.items():
        plain = found["none", protocol, factor]
        same = {name: row[name] == plain[name] for name in ("loss", "position_curve", "n_targets", "perplexity")}
        # Beyond 1x each rule was in force, as `seen` tells; the losses of a hardly trained model may still be alike.
        assert all(same.values()) or (factor > 1 and kind != "none"), (kind, protocol, factor)
        # dynamic, in windows of one length, is ntk; measured twice, the last bits may differ
        assert found["dynamic", protocol, factor]["loss"] == pytest.approx(found["ntk", protocol, factor]["loss"], 1e-6)
    parameters = {kind: found[kind, "disjoint", 4]["scaling_parameters"] for kind in KINDS}
    assert parameters["none"] is parameters["ntk"] is parameters["dynamic"] is None
    assert parameters["yarn"] == "alpha=1 beta=4 ramp=index temperature=0.1"
    factors = {kind: [found[kind, "disjoint", factor]["scaling_factor"] for factor in (1, 2, 4)] for kind in KINDS}
    assert factors == {kind: [1, 2, 4] for kind in KINDS} | {"none": [None] * 3, "dynamic": [1] * 3}
    out = table(capsys)
    assert "rope (yarn alpha=1 beta=4 ramp=index temperature=0.1)" in out and "unsupported" not in out
    monkeypatch.setattr(gpt.measure, "disjoint", never)
    assert measure(*command) == 0
    assert len(rows(RUNS / "rope")) == 8 * 2 * 3


@pytest.mark.parametrize("run, key", [("learned", "base=500"), ("learned", "ids=random"), ("rope", "overflow=wrap")])
def test_what_no_scheme_reads_is_said(capsys, run, key):
    assert measure(f"checkpoint=runs/default/{run}", "factors=[1]", f"position.{key}") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: position.{key.partition('=')[0]}: got ") and "no scheme here reads" in line
    for anyway in ("overflow=error", "ids=spaced"):  # what changes nothing is no mistake
        assert measure("checkpoint=runs/default/rope", "factors=[1]", f"position.{anyway}") == 0
    if key == "base=500":  # one of several does
        assert measure("runs=runs/default", "factors=[1]", f"position.{key}") == 0


def test_a_rescaled_row_is_that_of_a_model_built_so():
    """Of all kinds, with parameters of their own and another base: from the checkpoint's weights, by hand."""
    assert measure("checkpoint=runs/default/rope", "factors=[4]", "scaling=[yarn]", "rescaling.ramp=turns",
                   "rescaling.factor=8", "position.base=500") == 0  # fmt: skip
    row = rows(RUNS / "rope")[0]
    assert (row["rope_base"], row["scaling_factor"], row["scaling_parameters"].split()[0]) == (500.0, 8, "factor=8")
    saved = latest(RUNS / "rope/checkpoints")
    from dataclasses import replace

    from gpt.position.scaling import ScalingConfig
    from gpt.restore import restore

    model, config = restore(saved, torch.device("cpu"))
    scaling = ScalingConfig(kind="yarn", factor=8.0, ramp="turns", original_length=16)
    built = gpt.model.GPT(config.model, replace(config.position, base=500.0, scaling=scaling), model.vocab_size)
    built.load_state_dict(model.state_dict())
    corpus = gpt.measure.corpus_of(config, saved)
    blocks = gpt.evaluate.cut(len(corpus.val), 16, [4], 512)
    runtime = gpt.runtime.start(config.runtime)
    expected = gpt.evaluate.disjoint(built.eval(), corpus.val, blocks, 4, corpus.tokenizer.token_bytes(), runtime)
    assert row["loss"] == pytest.approx(expected["loss"], abs=1e-7)


def test_a_rescaling_asked_of_a_scheme_without_rotation(capsys):
    """The rotating runs of the folder are measured; the others say why not."""
    assert measure("runs=runs/default", "factors=[1,4]", "scaling=[none,ntk]", "position.base=500") == 0
    for row in rows(RUNS / "learned"):
        if row["scaling"] == "ntk":
            assert (row["status"], row["loss"]) == ("unsupported", None)
            assert "position=learned has no rotations" in row["reason"]
    assert all(row["status"] == "ok" and row["rope_base"] == 500 for row in rows(RUNS / "rope"))
    assert all(row["rope_base"] is None for row in rows(RUNS / "learned"))
    assert "learned-s0 (ntk)" not in capsys.readouterr().err


def test_ways_of_reading_are_lines_of_their_own():
    from gpt.comparison import compare

    measure("runs=runs/default", "factors=[1,2]", "scaling=[none,ntk,yarn]")
    measure("runs=runs/default", "factors=[1,2]", "scaling=[yarn]", "rescaling.beta=4")
    measure("runs=runs/default", "factors=[2]", "eval.tokens=512", "position.base=1234567")
    measure("runs=runs/default", "factors=[2]", "eval.tokens=512", "position.base=1234568")
    measure("runs=runs/default", "factors=[1,2]", "scaling=[ntk]", "rescaling.factor=2")
    measure("runs=runs/default", "factors=[1,2]", "position.overflow=clamp")
    (found,) = compare([Path("runs/default")]).comparisons
    assert {line.label for line in found.lines} == {
        "learned", "learned (clamp)", "rope", "rope (ntk)", "rope (yarn beta=32)", "rope (yarn beta=4)",
        "rope (ntk factor=2)", "rope (base=1234567)", "rope (base=1234568)",
    }  # fmt: skip
    lines = {line.label: line for line in found.lines}
    assert lines["rope (ntk)"].values("disjoint", 1) == lines["rope"].values("disjoint", 1)
    fixed = lines["rope (ntk factor=2)"]
    assert fixed.values("disjoint", 1) != lines["rope"].values("disjoint", 1)
    assert fixed.values("disjoint", 2) == lines["rope (ntk)"].values("disjoint", 2)
    assert lines["rope (base=1234567)"].values("disjoint", 1) == {}  # nobody measured it
    from gpt.report import commands

    assert set(commands(compare([Path("runs/default")]), [Path("runs/default")])) >= {
        f"python eval.py runs=runs/default 'factors=[1,2]' eval.tokens=512 eval.stride=8{way}"
        for way in ("", " 'scaling=[ntk]'", " position.overflow=clamp", " position.base=1234567",
                    " 'scaling=[ntk]' rescaling.factor=2",
                    " 'scaling=[yarn]' rescaling.alpha=1 rescaling.beta=4 rescaling.ramp=index "
                    "rescaling.temperature=0.1")
    }  # fmt: skip


@pytest.mark.parametrize("override, words", [("eval.stride=17", "eval.stride"), ("eval.tokens=63", "eval.tokens")])
def test_values_that_do_not_fit_a_run(override, words, capsys):
    assert measure("checkpoint=runs/default/rope", "factors=[1,2,4]", override) == 2
    assert f"error: runs/default/rope: {words}: got" in capsys.readouterr().err


def test_a_sweep_folder_without_runs():
    Path("runs/none").mkdir()
    with pytest.raises(UserError, match="runs/none: no runs in it"):
        measure("runs=runs/none")


@pytest.mark.parametrize(
    "change",
    [{"loss": None}, {"loss": "x"}, {"loss": math.nan}, {"loss": math.inf}, {"status": "?"}, {"status": None}]
    + [{"stride": []}, {"factor": None}, {"n_targets": "many"}],
    ids=str,
)
def test_a_damaged_row_is_measured_again(change):
    measure("checkpoint=runs/default/rope", "factors=[1]")
    whole, sliding = rows(RUNS / "rope")
    (RUNS / "rope/eval.jsonl").write_text(json.dumps(whole | change) + "\n" + json.dumps(sliding) + "\n")
    assert measure("checkpoint=runs/default/rope", "factors=[1]") == 0
    found = rows(RUNS / "rope")
    assert len(found) == 3 and found[2]["loss"] == whole["loss"] and found[2]["protocol"] == "disjoint"


def test_lines_that_are_no_utf8_are_passed_over():
    measure("checkpoint=runs/default/rope", "factors=[1]")
    path = RUNS / "rope/eval.jsonl"
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first[:-3] + b"\xff\n" + second)
    assert measure("checkpoint=runs/default/rope", "factors=[1]") == 0
    assert len(path.read_bytes().splitlines()) == 3


def test_runs_without_a_checkpoint_yet_are_skipped(capsys):
    (RUNS / "early").mkdir()
    shutil.copy(RUNS / "rope/config.yaml", RUNS / "early")
    (RUNS / "early/status.json").write_text('{"status": "failed"}')
    assert measure("runs=runs/default", "factors=[1]") == 0
    out, err = capsys.readouterr()
    assert "runs/default/early: skipped, it holds no checkpoint yet (status: failed)" in out and not err
    assert len(rows(RUNS / "rope")) == 2 and not (RUNS / "early/eval.jsonl").exists()
    assert measure("runs=runs/default/early", "factors=[1]") == 2  # nothing at all was measured
    assert "error: runs/default/early: no run in it holds a checkpoint" in capsys.readouterr().err


def test_a_run_without_its_configuration(capsys):
    """Among others it is named; alone it is measured, and its rows lie with the run, not in a checkpoint."""
    (RUNS / "rope/config.yaml").unlink()
    assert measure("runs=runs/default", "factors=[1]") == 0
    assert "runs/default/rope: skipped, its config.yaml is missing" in capsys.readouterr().out
    assert measure("checkpoint=runs/default/rope/checkpoints/step-000010", "factors=[1]") == 0
    assert len(rows(RUNS / "rope")) == 2 and not list((RUNS / "rope/checkpoints").rglob("eval.jsonl"))


def test_a_factor_that_fits_alone_says_so():
    assert measure("checkpoint=runs/default/rope", "factors=[1,32,31,33]") == 0
    reasons = {row["factor"]: row["reason"] for row in rows(RUNS / "rope") if row["reason"]}
    assert reasons[33].endswith("need 523777; alone, factors=[33], it needs 529")


def test_a_reason_is_that_of_this_command(capsys):
    """Not one that was stored for other factors; the same command again adds no row."""
    for factors, need in (("[1,2000]", 32001), ("[2000]", 32001), ("[3,2000]", 96001)):
        for _ in range(2):
            assert measure("checkpoint=runs/default/rope", f"factors={factors}") == 0
            said = " ".join(table(capsys).replace("│", " ").split())
            assert f"factors {factors.replace(',', ', ')} need {need}" in said and said.count("[1]") == 3
    assert len(rows(RUNS / "rope")) == 4 + 2 + 4


def test_a_corpus_that_came_without_a_test_split_says_so():
    from gpt.errors import ConfigError
    from gpt.schema import DataConfig

    corpus = open_corpus(next(Path("data/text").glob("*/meta.json")).parent)
    bare = dataclasses.replace(corpus, test=corpus.test[:0])
    with pytest.raises(ConfigError, match="val: data/text/.* has no test split: data=nanogpt has none, or too few"):
        gpt.measure.Text.of(bare, "test", "concat", DataConfig("nanogpt"))


def test_folders_are_named_once(capsys):
    assert measure("checkpoint=nowhere", "factors=[1]") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: nowhere: no such checkpoint")


def test_a_sweep_of_evaluations_is_one_line_and_leaves_nothing(monkeypatch, capsys):
    before = set(Path().rglob("*"))
    monkeypatch.setattr("sys.argv", ["eval.py", "-m", "runs=runs/default,runs"])
    with pytest.raises(SystemExit) as exit:
        cli.run("eval", evaluation.main)
    (line,) = capsys.readouterr().err.splitlines()
    assert exit.value.code == 2 and line.startswith("error: -m sweeps over train.py only")
    assert set(Path().rglob("*")) == before


def test_an_interrupted_sample_ends_its_line(monkeypatch, capsys):
    def two_tokens(*_):
        yield from (97, 98)
        raise KeyboardInterrupt

    monkeypatch.setattr(gpt.generate, "generate", two_tokens)
    main = runpy.run_path(str(Path(evaluation.__file__).parent / "scripts/sample.py"))["main"]
    with pytest.raises(SystemExit) as exit:
        terminal.guard(lambda: main(["checkpoint=runs/default/rope", "prompt=x"]))
    assert exit.value.code == 130 and capsys.readouterr() == ("xab\n", "")
