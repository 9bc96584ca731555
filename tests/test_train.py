"""train.py and eval.py, from the composed configuration to what they leave in a run's folder."""

import math
import re
import shutil
import signal
import sys
import types
from pathlib import Path

import pytest
import torch

import gpt.data
import gpt.evaluate
import train
from gpt import cli
from gpt.checkpoint import latest
from gpt.errors import CheckpointError, ConfigError, DataError, LengthError, NonFiniteError, RunError, UserError
from gpt.model import GPT
from gpt.position import SCHEMES
from gpt.restore import load_weights, named
from gpt.run import Run
from tests.runs import composed, in_one_layer, metrics, on_batch, status, write_corpus

ROOT = Path(__file__).parents[1]
RUNS = Path("runs/default")


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """An empty working directory with a text."""
    monkeypatch.chdir(tmp_path)
    write_corpus(Path("corpus.txt"))


def go(*overrides: str) -> int:
    return train.main(*composed(*overrides))


def losses(name: str) -> list[tuple]:
    """(step, tokens, loss, rate, gradient norm) of each line with a loss: the same whenever the run is repeated."""
    keys = ("step", "tokens", "loss", "lr", "grad_norm")
    return [tuple(line[key] for key in keys) for line in metrics(RUNS / name)]


def tensors(name: str) -> dict[str, torch.Tensor]:
    """Weights and optimizer state of a run's newest checkpoint."""
    saved = latest(RUNS / name / "checkpoints")
    return saved.model_state() | {f"optimizer {key}": value for key, value in saved.optimizer_state().items()}


def assert_same_run(a: str, b: str) -> None:
    assert losses(a) == losses(b)
    first, second = tensors(a), tensors(b)
    assert first.keys() == second.keys()
    for key in first:
        assert torch.equal(first[key], second[key]), key


class Killed(BaseException):
    """Stands for kill -9."""


def kill_after(monkeypatch, step: int, *overrides: str) -> None:
    """A run that dies after `step` steps and leaves what a killed process leaves."""

    def act(at, *_):
        if at == step:
            raise Killed

    with monkeypatch.context() as patch:
        on_batch(patch, act)
        patch.setattr(Run, "_finish", lambda run, error: run._metrics.close())  # the dead say nothing
        with pytest.raises(Killed):
            go(*overrides)
    assert metrics(RUNS / run_name(overrides))[-1]["step"] == step


def stop_after(monkeypatch, step: int, *overrides: str) -> int:
    """A run that gets SIGTERM during its step number `step`."""
    with monkeypatch.context() as patch:
        on_batch(patch, lambda at, rows, *_: at == step - 1 and not rows.start and signal.raise_signal(signal.SIGTERM))
        return go(*overrides)


def run_name(overrides) -> str:
    return next(one.partition("=")[2] for one in overrides if one.startswith("name="))


# Exact resume


@pytest.mark.parametrize("scheme", SCHEMES)
def test_twenty_steps_are_ten_and_a_kill_and_ten(monkeypatch, scheme):
    overrides = [f"position={scheme}", *in_one_layer(scheme)]
    assert go("name=straight", *overrides) == 0
    kill_after(monkeypatch, 12, "name=killed", *overrides)
    assert status(RUNS / "killed")["status"] == "running"
    assert latest(RUNS / "killed/checkpoints").step == 10
    assert go("name=killed", *overrides) == 0
    assert [line["step"] for line in metrics(RUNS / "killed")] == list(range(1, 21))
    assert_same_run("straight", "killed")
    assert status(RUNS / "killed")["status"] == "done"


def test_the_status_names_the_step_that_is_saved(monkeypatch):
    """Also where it lies between two that are logged."""
    assert stop_after(monkeypatch, 7, "name=stopped", "train.log_every=5") == 143
    assert latest(RUNS / "stopped/checkpoints").step == status(RUNS / "stopped")["step"] == 7
    assert [line["step"] for line in metrics(RUNS / "stopped")] == [5]


def test_a_run_whose_text_has_changed_goes_on_with_its_own_and_says_so(capsys):
    """The tokens are those it began with; both hashes are named, that of the prepared folder and today's."""
    for name, when in (("same", "before"), ("changed", "between")):
        assert go(f"name={name}", "train.steps=10") == 0
        (folder,) = Path("data/text").glob("corpus-*")
        capsys.readouterr()
        if when == "between":
            Path("corpus.txt").write_text(Path("corpus.txt").read_text().upper() + " and more")
        assert go(f"name={name}", "train.steps=20") == 0
        said = [line for line in capsys.readouterr().out.splitlines() if "going on with the tokens of before" in line]
        assert len(said) == (when == "between")
    then, now = re.search("then ([0-9a-f]{8}), now ([0-9a-f]{8})", said[0]).groups()
    assert folder.name.endswith(then) and now != then and said[0].startswith(str(folder))
    assert_same_run("same", "changed")
    assert go("name=new", "train.steps=5") == 0
    assert sorted(path.name.rpartition("-")[2] for path in folder.parent.glob("corpus-*")) == sorted([then, now])


def starts_taken(monkeypatch, *overrides: str) -> list[int]:
    """Where the training windows of a run begin, in the order of their rows."""
    taken, real = [], gpt.data.window
    with monkeypatch.context() as patch:
        patch.setattr(gpt.data, "window", lambda tokens, at, n: taken.extend(at.tolist()) or real(tokens, at, n))
        assert go("name=a", "data.packing=sequential", *overrides) == 0
    return taken


def test_epochs_go_on_where_they_were_when_the_batch_size_changes(monkeypatch):
    write_corpus(Path("corpus.txt"), words=100)
    taken = starts_taken(monkeypatch, "train.steps=5")
    taken += starts_taken(monkeypatch, "train.steps=20", "train.batch_size=2", "train.accumulate=3")
    saved = latest(RUNS / "a/checkpoints").state
    assert len(taken) == saved["rows"] == 5 * 4 + 15 * 6 and saved["tokens"] == 16 * saved["rows"]
    count = max(taken) // 16 + 1
    assert 10 < count < 50 and all(
        sorted(taken[n : n + count]) == list(range(0, 16 * count, 16)) for n in range(0, 2 * count, count)
    )


def test_tokens_are_the_targets_that_were_trained_on(monkeypatch):
    """What pads the windows of short documents is none, and a resumed run counts on."""
    Path("texts").mkdir()
    for n in range(30):
        write_corpus(Path(f"texts/{n}.txt"), words=n + 4)
    counted, real = [], gpt.data.Windows.batch

    def batch(windows, step, rows):
        made = real(windows, step, rows)
        counted.append(int((made[1] != gpt.data.NO_TARGET).sum()))
        return made

    monkeypatch.setattr(gpt.data.Windows, "batch", batch)
    for steps in (4, 8):
        words = "name=a", "data.path=texts", "data.packing=documents", "train.accumulate=2", f"train.steps={steps}"
        assert go(*words) == 0
        saved = latest(RUNS / "a/checkpoints").state
        assert (
            saved["tokens"] == sum(counted) == metrics(RUNS / "a")[-1]["tokens"] < steps * 8 * 16 == 16 * saved["rows"]
        )


def test_stops_at_any_step_change_nothing(monkeypatch, fresh):
    go("name=straight", "train.accumulate=2", "train.checkpoint_every=20")
    step = 0
    while step < 20:
        step += int(torch.randint(1, 8, (), generator=fresh))
        code = stop_after(monkeypatch, step, "name=stopped", "train.accumulate=2", "train.checkpoint_every=20")
        assert code == (143 if step < 20 else 0)
        assert latest(RUNS / "stopped/checkpoints").step == min(step, 20)
        assert status(RUNS / "stopped")["status"] == ("interrupted" if step < 20 else "done")
    assert_same_run("straight", "stopped")


def test_a_done_run_is_left_alone(monkeypatch, capsys):
    go("name=a", "train.steps=2")
    before = (RUNS / "a/status.json").read_bytes()
    on_batch(monkeypatch, lambda *_: pytest.fail("trained again"))
    assert go("name=a", "train.steps=2") == 0
    assert "done already" in capsys.readouterr().out and (RUNS / "a/status.json").read_bytes() == before


# What must not change training


def test_how_often_one_looks_changes_nothing():
    go("name=rarely", "train.steps=50", "train.eval_every=50", "train.checkpoint_every=50")
    go("name=often", "train.steps=50", "train.eval_every=10", "train.checkpoint_every=7", "train.eval_tokens=640")
    assert len(losses("often")) == 50
    assert_same_run("rarely", "often")


def test_batches_and_shared_weights_are_those_of_every_scheme(monkeypatch):
    batches, weights = {}, {}
    measure = gpt.evaluate.validation_loss

    def first_weights(model, *args):
        weights.setdefault(scheme, {key: value.clone() for key, value in model.state_dict().items()})
        return measure(model, *args)

    monkeypatch.setattr(gpt.evaluate, "validation_loss", first_weights)
    for scheme in SCHEMES:
        with monkeypatch.context() as patch:
            batches[scheme] = []
            on_batch(patch, lambda *taken, to=batches[scheme]: to.append(taken))
            steps = "train.steps=3", "train.accumulate=2"
            go(f"position={scheme}", f"name={scheme}", *steps, *in_one_layer(scheme))
    for scheme in SCHEMES:
        assert len(batches[scheme]) == 6
        for (step, rows, x, y), (step_0, rows_0, x_0, y_0) in zip(batches[scheme], batches["nope"], strict=True):
            assert (step, rows) == (step_0, rows_0) and torch.equal(x, x_0) and torch.equal(y, y_0)
        shared = {key: value for key, value in weights[scheme].items() if not key.startswith("position.")}
        assert shared.keys() == weights["nope"].keys()
        for key, value in shared.items():
            assert torch.equal(value, weights["nope"][key]), (scheme, key)


# ---- beginning with another run's weights


def first_weights(monkeypatch, *overrides: str) -> dict[str, torch.Tensor]:
    """The weights with which training begins."""
    found = {}
    measure = gpt.evaluate.validation_loss

    def look(model, *args):
        found.update({key: value.clone() for key, value in model.state_dict().items() if key not in found})
        return measure(model, *args)

    with monkeypatch.context() as patch:
        patch.setattr(gpt.evaluate, "validation_loss", look)
        go(*overrides)
    return found


@pytest.mark.parametrize("then", ["nope", "rope", "alibi", "t5", "learned"])
def test_a_run_goes_on_from_anothers_weights(monkeypatch, then, capsys):
    """DroPE and its kin: all weights but the scheme's own are taken over, bit for bit, and it trains on."""
    go("position=rope", "name=start")
    saved = latest(RUNS / "start/checkpoints")
    begun = first_weights(monkeypatch, f"position={then}", "name=on", "init_from=runs/default/start", "seed=3")
    fresh = GPT(*parts_of("on")).state_dict()
    for name, value in begun.items():
        assert torch.equal(value, saved.model_state().get(name, fresh[name])), name
    note = status(RUNS / "on")["init_from"]
    assert note["sha256"] == saved.sha256 and note["checkpoint"].endswith("step-000020")
    assert note["fresh"] == [name for name in begun if name.startswith("position.")] and note["dropped"] == []
    assert len(losses("on")) == 20 and losses("on")[-1][2] < losses("start")[0][2]
    assert f"begins with {note['checkpoint']}" in capsys.readouterr().out


def parts_of(name: str):
    from gpt.config import load

    saved = latest(RUNS / name / "checkpoints")
    config = load(saved.state["config"])
    return config.model, config.position, saved.state["vocab_size"], config.seed


def test_a_scheme_goes_on_with_its_own_weights(monkeypatch):
    go("position=t5", "name=start")
    begun = first_weights(monkeypatch, "position=t5", "name=on", "init_from=runs/default/start/checkpoints/step-000020")
    assert torch.equal(begun["position.bias"], tensors("start")["position.bias"])
    note = status(RUNS / "on")["init_from"]
    assert note["fresh"] == note["dropped"] == []


@pytest.mark.parametrize(
    "first, then, fresh, dropped",
    [
        (["position=kerple"], ["position=kerple_power"], True, True),  # the same names, another meaning
        (["position=trainable_rope"], ["position=trainable_rope", "position.base=500"], True, True),
        (["position=trainable_rope"], ["position=rope"], False, True),
        (["position=alibi", "position.slopes=learned"], ["position=alibi"], False, True),
        (["position=learned"], ["position=learned", "position.overflow=clamp"], False, False),
    ],
)
def test_weights_of_a_scheme_go_where_they_mean_the_same(monkeypatch, first, then, fresh, dropped, capsys):
    go(*first, "name=start")
    begun = first_weights(monkeypatch, *then, "name=on", "init_from=runs/default/start")
    theirs, drawn = tensors("start"), GPT(*parts_of("on")).state_dict()
    own = [name for name in begun if name.startswith("position.")]
    for name, value in begun.items():
        assert torch.equal(value, drawn[name] if fresh and name in own else theirs[name]), name
    note = status(RUNS / "on")["init_from"]
    assert note["fresh"] == (own if fresh else [])
    assert note["dropped"] == [name for name in theirs if name.startswith("position.")] * dropped


@pytest.mark.parametrize(
    "overrides",
    [["position.base=500000"], ["position.scaling.kind=yarn", "position.scaling.factor=4.0", "model.block_size=32"]],
)
def test_longer_context_by_training_on(overrides):
    """ABF raises the base; a rescaling is turned on; the training length may grow. Both go on as any run does."""
    go("position=rope", "name=start")
    assert go("position=rope", "name=on", "init_from=runs/default/start", *overrides) == 0
    first = metrics(RUNS / "on")[0]["loss"]
    assert first < metrics(RUNS / "start")[0]["loss"]


def test_a_run_with_a_beginning_resumes_as_any_other(monkeypatch):
    """The first weights are not needed any more, and are not read again."""
    go("position=rope", "name=start")
    begin = "position=nope", "init_from=runs/default/start"
    go("name=straight", *begin, "train.checkpoint_every=20")
    assert stop_after(monkeypatch, 7, "name=stopped", *begin, "train.checkpoint_every=20") == 143
    shutil.rmtree(RUNS / "start/checkpoints")
    go("name=stopped", *begin, "train.checkpoint_every=20")
    assert_same_run("straight", "stopped")


def test_a_beginning_that_does_not_fit(capsys):
    go("position=learned", "name=start")
    start = "init_from=runs/default/start"
    for overrides, error, words in (
        (
            ["init_from=nowhere"],
            ConfigError,
            "init_from: got 'nowhere', allowed: the folder of a run",
        ),
        (["init_from=corpus.txt"], ConfigError, "init_from: got 'corpus.txt'"),
        (["init_from="], ConfigError, "init_from: got '', allowed: null, or the folder"),
        ([start, "model.n_layer=2"], CheckpointError, "init_from: .*start.* has model.n_layer=1, this run has 2"),
        ([start, "model.n_head=4"], CheckpointError, "has model.n_head=2, this run has 4"),
        ([start, "model.n_embd=64"], CheckpointError, "has model.n_embd=32, this run has 64"),
        ([start, "model.block_size=32"], CheckpointError, "position.table is .16, 32., this model has .32, 32"),
        ([start, "tokenizer=char"], CheckpointError, "init_from: .*start.* was trained with tokenizer byte .*char"),
    ):
        with pytest.raises(error, match=words):
            go("position=learned", "name=on", *overrides)
        assert not list(Path(RUNS / "on").glob("checkpoints/*"))
        shutil.rmtree(RUNS / "on", ignore_errors=True)


def test_micro_steps_of_any_size_give_one_gradient():
    shapes = ((8, 1), (4, 2), (2, 4), (1, 8))
    for size, count in shapes:
        sizes = f"train.batch_size={size}", f"train.accumulate={count}", "train.steps=1", "model.dropout=0"
        go(f"name=one{count}", *sizes, "optim.grad_clip=0")
        go(f"name=more{count}", *sizes[:2], "train.steps=5", "model.dropout=0", "optim.eps=1e-3")
    for _, count in shapes[1:]:
        whole, split = tensors("one1"), tensors(f"one{count}")
        moments = [key for key in whole if key.endswith("/exp_avg")]
        assert len(moments) == len([key for key in whole if not key.startswith("optimizer")])
        for key in moments:  # after the first step: a tenth of the gradient
            torch.testing.assert_close(10 * split[key], 10 * whole[key], atol=1e-6, rtol=0)
        for line, other in zip(losses("more1"), losses(f"more{count}"), strict=True):
            assert other == pytest.approx(line, abs=1e-6)
        for key, value in tensors("more1").items():
            torch.testing.assert_close(tensors(f"more{count}")[key], value, atol=1e-6, rtol=0)


def test_the_rate_that_is_logged_is_applied():
    """Adam's first update moves a weight by the rate, whatever its gradient."""
    go("name=a", "train.steps=1", "optim.weight_decay=0", "model.dropout=0")
    config = train.final(*composed("name=a"))
    start = GPT(config.model, config.position, 257, 0).state_dict()
    moved = max(
        float((value - start[key]).abs().max()) for key, value in latest(RUNS / "a/checkpoints").model_state().items()
    )
    rate = metrics(RUNS / "a")[0]["lr"]
    assert rate == pytest.approx(1e-2 / 4)  # the first of three steps of warm-up
    assert moved == pytest.approx(rate, rel=1e-3)


# Numbers that are none


def spoil(monkeypatch, step: int, how) -> None:
    """Applies `how` to the (logits, loss) of the forward of step number `step`."""
    real, now = GPT.forward, types.SimpleNamespace(step=None)

    def forward(model, *args, **kwargs):
        logits, loss = real(model, *args, **kwargs)
        return logits, how(model, loss) if now.step == step - 1 else loss

    def act(at, *_):
        now.step = at

    on_batch(monkeypatch, act)
    monkeypatch.setattr(GPT, "forward", forward)


@pytest.mark.parametrize(
    "how, words",
    [
        (lambda model, loss: loss * math.nan, "loss is nan"),
        (lambda model, loss: loss * math.inf, "loss is inf"),
        (lambda model, loss: loss + (0 * model.wte.weight[0, 0]).sqrt() * 0, "grad_norm is nan"),
    ],
    ids=["nan", "inf", "gradient"],
)
def test_a_bad_number_stops_before_the_optimizer(monkeypatch, capsys, how, words):
    go("name=straight")
    with monkeypatch.context() as patch:
        spoil(patch, 8, how)
        with pytest.raises(SystemExit) as exit:
            cli.report_errors(lambda: go("name=bad"))
    assert exit.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: step 8: ") and words in line
    assert status(RUNS / "bad")["status"] == "failed" and status(RUNS / "bad")["error"] == line[len("error: ") :]
    assert [line["step"] for line in metrics(RUNS / "bad")] == list(range(1, 8))
    assert latest(RUNS / "bad/checkpoints").step == 5
    assert all(torch.isfinite(value).all() for value in tensors("bad").values())
    assert go("name=bad") == 0
    assert_same_run("straight", "bad")


def test_a_rate_that_explodes(capsys):
    with pytest.raises(NonFiniteError, match="step [23]: loss is"):
        go("name=bad", "optim.lr=1e30", "optim.min_lr=0", "optim.warmup=0")
    assert latest(RUNS / "bad/checkpoints") is None and status(RUNS / "bad")["status"] == "failed"


def test_bad_weights_at_the_start_are_not_blamed_on_the_rate(monkeypatch):
    monkeypatch.setattr(gpt.evaluate, "validation_loss", lambda *_: math.inf)
    with pytest.raises(NonFiniteError, match="step 0: val_loss is inf") as error:
        go("name=bad")
    assert "optim" not in str(error.value) and "checkpoint" not in str(error.value)


def test_a_bad_validation_loss_is_not_saved(monkeypatch):
    real, calls = gpt.evaluate.validation_loss, []

    def validation_loss(*args):
        calls.append(None)
        return math.nan if len(calls) == 3 else real(*args)

    monkeypatch.setattr(gpt.evaluate, "validation_loss", validation_loss)
    with pytest.raises(NonFiniteError, match="step 10: val_loss is nan; .*lower optim.lr"):
        go("name=bad", "train.eval_every=5")
    assert latest(RUNS / "bad/checkpoints").step == 5
    assert [line["step"] for line in metrics(RUNS / "bad")] == list(range(1, 10))


# A second start with something else


def test_another_rate_length_and_batch_are_applied_and_logged(monkeypatch, capsys):
    stop_after(monkeypatch, 10, "name=a")
    capsys.readouterr()
    assert go("name=a", "optim.lr=5e-3", "train.steps=24", "train.batch_size=8") == 0
    said = capsys.readouterr().out
    for key, old, new in (("optim.lr", 0.01, 0.005), ("train.steps", 20, 24), ("train.batch_size", 4, 8)):
        assert f"{key}: {old} -> {new} from step 10 on" in said
        assert {"step": 10, "key": key, "old": old, "new": new} in status(RUNS / "a")["changes"]
    lines = metrics(RUNS / "a")
    assert [line["step"] for line in lines] == list(range(1, 25))
    assert lines[10]["lr"] < 0.5 * lines[9]["lr"] * 1.2
    # tokens are those that were read: 10 steps of 4 sequences, 14 of 8
    assert [line["tokens"] for line in lines] == [64 * n for n in range(1, 11)] + [640 + 128 * n for n in range(1, 15)]
    assert latest(RUNS / "a/checkpoints").state["tokens"] == 640 + 128 * 14


@pytest.mark.parametrize("done", [False, True])
def test_another_structure_is_refused(monkeypatch, done):
    shutil.copy("corpus.txt", "other.txt")
    go("name=a") if done else stop_after(monkeypatch, 10, "name=a")
    before = {path: path.read_bytes() for path in RUNS.rglob("*") if path.is_file()}
    for change, key in (
        ("model.n_embd=64", "model.n_embd: 32 -> 64"),
        ("model.dropout=0.1", "model.dropout: 0.2 -> 0.1"),
        ("position=rope", "position.name: 'learned' -> 'rope'"),
        ("seed=1", "seed: 0 -> 1"),
        ("data.path=other.txt", "data.path: 'corpus.txt' -> 'other.txt'"),
        ("tokenizer=char", "tokenizer.name: 'byte' -> 'char'"),
    ):
        with pytest.raises(RunError, match=re.escape(key)):
            go("name=a", change)
    assert before == {path: path.read_bytes() for path in RUNS.rglob("*") if path.is_file()}


def damage(path: Path) -> None:
    content = bytearray((path / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (path / "model.safetensors").write_bytes(content)


def test_damaged_checkpoints(monkeypatch, capsys):
    go("name=straight")
    stop_after(monkeypatch, 10, "name=a")
    damage(RUNS / "a/checkpoints/step-000010")
    assert go("name=a") == 0
    said = capsys.readouterr().out
    assert "warning: step-000010 is damaged and passed over, going on from step-000005" in said
    assert_same_run("straight", "a")
    assert [line["step"] for line in metrics(RUNS / "a")] == list(range(1, 21))

    stop_after(monkeypatch, 10, "name=b")
    damage(RUNS / "b/checkpoints/step-000005")
    damage(RUNS / "b/checkpoints/step-000010")
    with pytest.raises(CheckpointError, match="all checkpoints are damaged .step-000010, step-000005."):
        go("name=b")
    assert status(RUNS / "b")["status"] == "failed"
    assert [line["step"] for line in metrics(RUNS / "b")] == list(range(1, 11))  # still there


def test_a_text_that_changed_is_refused(monkeypatch):
    go("name=straight")
    stop_after(monkeypatch, 10, "name=a")
    kept = Path("corpus.txt").read_text()
    was = latest(RUNS / "a/checkpoints").state["train_sha256"][:12]
    Path("corpus.txt").write_text(kept[::-1])
    shutil.rmtree("data")
    with pytest.raises(CheckpointError, match=f"train_sha256 {was}.* has [0-9a-f]{{12}}; bring that text back"):
        go("name=a")
    Path("corpus.txt").write_text(kept)
    assert go("name=a") == 0
    assert_same_run("straight", "a")


@pytest.mark.parametrize("gone", [False, True])
def test_a_run_goes_on_with_its_tokens_whatever_became_of_the_text(monkeypatch, gone):
    go("name=straight")
    stop_after(monkeypatch, 10, "name=a")
    Path("corpus.txt").unlink() if gone else Path("corpus.txt").write_text("another text " * 1000)
    before = set(Path("data").rglob("*"))
    assert go("name=a") == 0
    assert_same_run("straight", "a")
    assert set(Path("data").rglob("*")) == before  # nothing was prepared


def test_weights_of_another_scheme_are_refused_by_name():
    go("name=a", "position=rope", "train.steps=1")
    saved = latest(RUNS / "a/checkpoints")
    for other in ("alibi", "nope"):
        config = train.final(*composed("name=b", f"position={other}"))
        model = GPT(config.model, config.position, 257, 0)
        assert model.state_dict().keys() == saved.model_state().keys()  # nothing but the name tells them apart
        with pytest.raises(CheckpointError, match=f"position=rope .* position={other} "):
            load_weights(model, saved)


# Folders and disks


def test_a_full_disk_is_found_before_the_first_step(monkeypatch):
    on_batch(monkeypatch, lambda *_: pytest.fail("a step was taken"))
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100_000))
    with pytest.raises(RunError, match=r"room for 100\.0 kB, but 3 checkpoints of [\d.]+ kB"):
        go("name=a")
    assert status(RUNS / "a")["status"] == "failed" and latest(RUNS / "a/checkpoints") is None


def test_a_folder_that_cannot_be_written_is_found_before_the_first_step(monkeypatch):
    on_batch(monkeypatch, lambda *_: pytest.fail("a step was taken"))
    Path("runs").write_text("")
    with pytest.raises(RunError, match="runs/default/a: cannot be written"):
        go("name=a")
    Path("runs").unlink()
    RUNS.joinpath("b").mkdir(parents=True)
    RUNS.joinpath("b/checkpoints").write_text("")
    with pytest.raises(RunError, match="runs/default/b/checkpoints: cannot be written"):
        go("name=b")


def test_a_folder_that_vanishes_stops_the_run(monkeypatch):
    with monkeypatch.context() as patch:
        on_batch(patch, lambda at, *_: at == 6 and shutil.rmtree(RUNS / "a"))
        with pytest.raises(RunError, match="runs/default/a: cannot be written: metrics.jsonl was removed"):
            go("name=a")
    assert not (RUNS / "a").exists()
    assert go("name=a") == 0 and [line["step"] for line in metrics(RUNS / "a")] == list(range(1, 21))


def test_a_disk_that_fills_up_keeps_the_checkpoints(monkeypatch):
    import gpt.checkpoint

    real = gpt.checkpoint.write_tensors

    def write_tensors(path, tensors):
        if "step-000010" in str(path):
            raise OSError(28, "No space left on device")
        real(path, tensors)

    with monkeypatch.context() as patch:
        patch.setattr(gpt.checkpoint, "write_tensors", write_tensors)
        with pytest.raises(CheckpointError, match="step-000010: cannot be saved: No space left on device"):
            go("name=a")
    assert latest(RUNS / "a/checkpoints").step == 5 and status(RUNS / "a")["status"] == "failed"
    assert go("name=a") == 0


@pytest.mark.parametrize(
    "overrides, words",
    [
        (["model.n_embd=4000000000"], "model.n_embd=4000000000, .* this machine has .* choose a smaller model"),
        (["model.n_layer=1000000000000"], "model.n_layer=1000000000000, .* choose a smaller model"),
        (["model.vocab_multiple=1000000000000"], "model.vocab_multiple=1000000000000.: the weights need"),
        (["train.batch_size=1000000000000"], "out of memory: train.batch_size=1000000000000, model.block_size=16 are"),
        (["train.batch_size=100000000000000000000"], "out of memory: train.batch_size=100000000000000000000, model"),
        (
            ["position=learned", "model.block_size=1000000000000", "train.eval_tokens=1000000000000"],
            "out of memory: choose smaller model.n_layer, n_embd or block_size, or a smaller table",
        ),
    ],
)
def test_sizes_that_no_machine_has_are_one_line(overrides, words):
    with pytest.raises(UserError, match=words):
        go("name=a", *overrides)
    found = status(RUNS / "a")
    assert found["status"] == "failed" and found["traceback"] is None and re.search(words, found["error"])


def test_a_gpu_without_room_names_the_batch(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. and\nmany lines more")

    on_batch(monkeypatch, lambda at, *_: at == 7 and full())
    with pytest.raises(UserError, match="^out of memory: train.batch_size=4, .* lower train.batch_size and raise"):
        go("name=a")
    assert latest(RUNS / "a/checkpoints").step == 5 and status(RUNS / "a")["traceback"] is None


# What is written


def test_lines_and_status():
    go("name=a", "train.batch_size=6", "train.accumulate=3", "train.log_every=4", "train.eval_every=6")
    lines = metrics(RUNS / "a")
    assert [line["step"] for line in lines] == [4, 6, 8, 12, 16, 18, 20]
    for line in lines:
        assert {"step", "tokens", "loss", "lr", "grad_norm", "tokens_per_second"} <= line.keys()
        assert line["tokens"] == line["step"] * 6 * 3 * 16
        assert ("val_loss" in line) == (line["step"] in (6, 12, 18, 20))
        assert all(math.isfinite(line[key]) and line[key] > 0 for key in ("loss", "grad_norm"))
    ended = status(RUNS / "a")
    assert (ended["status"], ended["step"], ended["error"]) == ("done", 20, None)
    assert ended["parameters"]["position"] == 16 * 32 and ended["tokens_a_step"] == 288


@pytest.mark.parametrize("warmup", [2, 3, 100])
def test_a_rate_that_is_never_reached_is_said(capsys, warmup):
    assert go("name=a", "train.steps=3", f"optim.warmup={warmup}") == 0
    said = "so the rate never reaches optim.lr" in " ".join(capsys.readouterr().out.split())
    assert said == (warmup >= 3)


def test_padding_is_no_token(capsys):
    Path("many").mkdir()
    for n in range(60):
        Path(f"many/{n}.txt").write_text("abcdefghi"[: 3 + n % 5])
    go("name=a", "data.path=many", "data.packing=documents", "train.steps=2", "train.eval_tokens=16")
    ended = status(RUNS / "a")
    assert ended["most_tokens_a_step"] == 4 * 16 and "tokens_a_step" not in ended
    assert " at most 64 tokens a step " in " ".join(capsys.readouterr().out.split())
    assert 0 < metrics(RUNS / "a")[-1]["tokens"] < 2 * 64


def test_the_loss_falls():
    go("name=a", "model.dropout=0", "train.steps=150", "train.eval_every=150", "train.checkpoint_every=150")
    first, *_, last = metrics(RUNS / "a")
    assert first["loss"] > 5 and last["val_loss"] < 3  # from ln 257 = 5.55; letters of a few words: far below ln 257


def test_checkpoints_that_are_kept():
    go("name=a", "train.checkpoint_every=2", "train.eval_every=4")
    steps = sorted(int(path.name[5:]) for path in (RUNS / "a/checkpoints").iterdir())
    best = latest(RUNS / "a/checkpoints").state["best"]
    values = {line["step"]: line["val_loss"] for line in metrics(RUNS / "a") if "val_loss" in line}
    assert best == {"step": min(values, key=values.get), "val_loss": min(values.values())}
    assert steps == sorted({18, 20, best["step"]})


def test_bfloat16():
    go("name=a", "runtime.dtype=bfloat16", "train.steps=2", "model.dropout=0")
    go("name=b", "runtime.dtype=float32", "train.steps=2", "model.dropout=0")
    for (*_, low, _, norm), (*_, high, _, _) in zip(losses("a"), losses("b"), strict=True):
        assert low == pytest.approx(high, abs=0.02) and low != high and math.isfinite(norm)
    assert all(value.dtype == torch.float32 for value in tensors("a").values())


def test_compiled(monkeypatch):
    """The graph that torch.compile captures, run without its code generator, which takes a minute."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model: real(model, backend="aot_eager"))
    short = "train.steps=2", "model.dropout=0", "train.eval_every=1", "position=t5"
    go("name=plain", *short)
    go("name=compiled", *short, "runtime.compile=true")
    for line, other in zip(losses("plain"), losses("compiled"), strict=True):
        assert other == pytest.approx(line, rel=1e-4)
    assert tensors("compiled").keys() == tensors("plain").keys()  # no _orig_mod. in any name


# Experiments and errors


def experiments() -> list[str]:
    return sorted(path.stem for path in (ROOT / "configs/experiment").glob("*.yaml"))


@pytest.mark.parametrize("name", experiments())
def test_every_experiment_takes_a_step(name):
    import yaml

    overrides = [f"experiment={name}", "train.steps=1", "train.batch_size=2", "wandb.mode=disabled"]
    overrides += ["model.n_layer=1", "model.n_head=2", "model.n_embd=32", "model.block_size=16", "train.eval_tokens=64"]
    content = yaml.safe_load((ROOT / f"configs/experiment/{name}.yaml").read_text())
    params = content.get("hydra", {}).get("sweeper", {}).get("params", {})
    overrides += [f"{key}={str(values).split(',')[0]}" for key, values in params.items()]
    values = cli.compose("train", overrides)
    if values["data"]["name"] == "shakespeare_char":
        texts = [ROOT / "data/shakespeare_char/input.txt", ROOT.parent / "shared/data/tinyshakespeare.txt"]
        if not any(path.is_file() for path in texts):
            pytest.skip("there is no tiny Shakespeare on this machine, and tests download nothing")
    assert train.main(values, overrides) == 0
    (folder,) = Path("runs", name).iterdir()
    assert status(folder)["status"] == "done" and status(folder)["step"] == 1


@pytest.mark.parametrize(
    "overrides, words",
    [
        (["optim.lrr=1"], "optim.lrr: there is no such key; did you mean optim.lr?"),
        (["+optim.lrr=1"], "optim.lrr: there is no such key"),
        (["+foo=1"], "foo: there is no such key"),
        (["+model.foo.bar=1"], "model.foo: there is no such key"),
        (["model.n_layer=two"], "model.n_layer: got 'two', allowed: a whole number >= 1"),
        (["model.n_layer=1.5"], "model.n_layer: got 1.5, allowed"),
        (["optim.lr=-1"], "optim.lr: got -1, allowed: a number > 0"),
        (["optim.lr=nan"], "optim.lr: got"),
        (["model.dropout=1"], "model.dropout: got 1, allowed: a number >= 0 and < 1"),
        (["model.n_embd=33"], "model.n_embd: got 33, allowed: a multiple of model.n_head=2"),
        (["position=foo"], "position: got 'foo', allowed: alibi | binary"),
        (["position.name=rope"], "position.name: got 'rope', allowed: position=<scheme>"),
        (["position=rope", "position.buckets=3"], "position.buckets: there is no such key"),
        (["position=rope", "+position.buckets=3"], "position.buckets: there is no such key"),
        (["position=rope", "model.n_embd=30"], "model.n_embd: got 30, allowed: an even head width"),
        (["position.layers=XP"], "position.layers: got 'XP'"),
        (["seed=-1"], "seed: got -1, allowed: a whole number >= 0"),
        (["seed=a"], "seed: got 'a', allowed"),
        (["sweep=a/b"], "sweep: got 'a/b', allowed"),
        (["name=.."], "name: got '..', allowed"),
        (["tokenizer.name=foo"], "tokenizer.name: got 'foo', allowed: byte | char | gpt2"),
        (["data.name=foo"], "data.name: got 'foo', allowed: stdlib"),
        (["data.path=/nowhere.txt"], "data.path: got '/nowhere.txt', which is not there; allowed: "),
        (["data.path=null"], "data.path: got null, allowed"),
        (["train.eval_tokens=3"], "train.eval_tokens: got 3, allowed: at least model.block_size=16"),
        (["runtime.device=tpu"], "runtime.device: got 'tpu', allowed"),
        (["runtime.device=cuda:99"], "runtime.device: got 'cuda:99', allowed"),
        (["runtime.dtype=float16"], "runtime.dtype: got 'float16', allowed: auto | float32 | bfloat16"),
        (["wandb.mode=on"], "wandb.mode: got"),
        (["model=huge"], "model: got 'huge', allowed: gpt2"),
        (["experiment=foo"], "experiment: got 'foo', allowed: ablation"),
        (["model=null"], "null is no option of a group"),
        (["optim.lr"], "optim.lr: has no value; write optim.lr=<value>"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_errors_are_one_line_and_leave_nothing(capsys, overrides, words):
    with pytest.raises(SystemExit) as exit:
        cli.report_errors(lambda: go(*overrides), "train")
    out, err = capsys.readouterr()
    assert exit.value.code == 2
    (line,) = err.splitlines()
    assert line.startswith("error: " + words)
    assert not list(Path().rglob("runs/*"))


def test_the_configuration_is_checked_before_slow_imports(monkeypatch):
    monkeypatch.setitem(sys.modules, "gpt.evaluate", None)
    with pytest.raises(ConfigError, match="model.n_layer: got 0"):
        go("model.n_layer=0")
    with pytest.raises(ImportError):
        go()


def test_a_checkpoint_whose_name_is_too_long_is_left_to_resolve():
    assert named("x" * 300) == Path("x" * 300)


def test_texts_that_are_too_short():
    Path("corpus.txt").write_text("abcdefghij" * 2)
    with pytest.raises(LengthError, match="the validation split has 3 tokens, 17 are needed"):
        go("name=a")
    with pytest.raises(DataError, match="model.block_size: got 16, which needs 17 tokens"):
        go("name=b", "data.val_fraction=0.85")
    assert status(RUNS / "a")["status"] == status(RUNS / "b")["status"] == "failed"
    Path("corpus.txt").write_text("abcdefghijklmnopq" * 2)
    halves = ("data.val_fraction=0.5", "data.test_fraction=0")  # one window each
    assert go("name=c", *halves, "train.steps=2", "train.eval_tokens=16") == 0


def test_an_interrupt_before_the_run_is_quiet(capsys):
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as exit:
        cli.report_errors(interrupted)
    assert exit.value.code == 130 and capsys.readouterr().err == ""
