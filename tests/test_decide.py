"""What a second start in a run's folder may change, and what it is refused for."""

import copy
import sys
from pathlib import Path

import pytest
import yaml

from gpt.cli import compose
from gpt.config import load
from gpt.decide import decide
from gpt.errors import RunError
from gpt.run import Run, already_done
from gpt.schema import flatten, plain
from tests.folders import CONFIG, config, fake_checkpoint, finish, metrics, quiet, status

FREE = {
    "wandb__mode": "auto",
    "runtime__device": "cpu",
    "runtime__compile": True,
    "eval__tokens": 1,
    "train__log_every": 1,
    "train__eval_every": 1,
    "train__checkpoint_every": 7,
    "train__eval_tokens": 9,
}
TUNABLE = {"optim__lr": 5e-4, "optim__schedule": "wsd", "train__batch_size": 6, "train__accumulate": 2}
STRUCTURE = {
    "seed": 2,
    "model__n_embd": 64,
    "model__bias": True,
    "position__name": "alibi",
    "position__base": 5e5,
    "data__path": "/x",
    "tokenizer__name": "char",
    "runtime__dtype": "bfloat16",
}


@pytest.mark.parametrize("done", [False, True])
def test_free_keys_may_differ(tmp_path, monkeypatch, done):
    monkeypatch.setitem(sys.modules, "wandb", None)
    lines = []
    folder = interrupted(tmp_path) if not done else finish(tmp_path, config())
    made = config(**FREE)
    assert already_done(made, tmp_path) == done
    with Run(made, tmp_path, lines.append) as run:
        assert run.decision == ("skip" if done else "resume")
        if not done:
            run.resume_at(50)
            assert yaml.safe_load((folder / "config.yaml").read_text()) == made
    assert not any("->" in line for line in lines) and status(folder)["changes"] == []


def test_a_run_that_ended_before_its_first_step_holds_nothing_against_another(tmp_path):
    """A mistake in init_from, a text that is too short: the corrected command is not refused."""
    with pytest.raises(RunError, match="a mistake"), Run(config(position__name="rope"), tmp_path, quiet) as run:
        raise RunError("a mistake")
    assert status(run.folder)["status"] == "failed"
    with Run(made := config(position__name="alibi"), tmp_path, quiet) as run:
        assert run.decision == "fresh" and yaml.safe_load((run.folder / "config.yaml").read_text()) == made
        run.log(1, loss=1.0)
    with pytest.raises(RunError, match="holds another configuration: position.name: 'alibi' -> 'rope'"):
        decide(run.folder, config(position__name="rope"))


def interrupted(root: Path, made: dict = CONFIG) -> Path:
    with Run(made, root, quiet) as run:
        fake_checkpoint(run.folder, 50)
        run.log(50, loss=1.0)
    return run.folder


def test_tunable_keys_are_applied_and_logged(tmp_path):
    folder, lines = interrupted(tmp_path), []
    made = config(train__steps=200, **TUNABLE)
    with Run(made, tmp_path, lines.append) as run:
        assert run.decision == "resume"
        assert yaml.safe_load((folder / "config.yaml").read_text()) == CONFIG, "not before the checkpoint is loaded"
        run.resume_at(50)
    assert yaml.safe_load((folder / "config.yaml").read_text()) == made
    changes = {one["key"]: (one["step"], one["old"], one["new"]) for one in status(folder)["changes"]}
    assert changes == {
        "optim.lr": (50, 1e-3, 5e-4),
        "optim.schedule": (50, "cosine", "wsd"),
        "train.steps": (50, 100, 200),
        "train.batch_size": (50, 12, 6),
        "train.accumulate": (50, 1, 2),
    }
    assert any("optim.lr" in line and "0.001 -> 0.0005" in line for line in lines)
    with Run(made, tmp_path, quiet) as run:
        run.resume_at(50)
    assert len(status(folder)["changes"]) == 5, "kept, and not again"


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("key", STRUCTURE)
def test_structure_is_refused(tmp_path, done, key):
    folder = finish(tmp_path, config()) if done else interrupted(tmp_path)
    before = (folder / "config.yaml").read_text(), (folder / "status.json").read_text()
    dotted, old = key.replace("__", "."), str(flatten(CONFIG)[key.replace("__", ".")])
    for act in (lambda made: Run(made, tmp_path, quiet).__enter__(), lambda made: already_done(made, tmp_path)):
        with pytest.raises(RunError, match="another configuration") as error:
            act(config(optim__lr=7.0, **{key: STRUCTURE[key]}))
        line = str(error.value)
        assert f"{dotted}: " in line and old in line and str(STRUCTURE[key]) in line and "optim" not in line
    assert before == ((folder / "config.yaml").read_text(), (folder / "status.json").read_text())
    if not done:
        with Run(config(), tmp_path, quiet) as run:  # the refused one let go of the lock
            run.resume_at(50)


def test_a_done_run_changes_only_by_more_steps(tmp_path):
    folder = finish(tmp_path, config())
    for changes in (TUNABLE, {"train__steps": 50}):
        with pytest.raises(RunError, match="is done after 100 steps") as error:
            Run(config(**changes), tmp_path, quiet).__enter__()
        named = [key for key in changes if f"{key.replace('__', '.')}: " in str(error.value)]
        assert len(named) == min(3, len(changes)) and (" and 1 more; " in str(error.value)) == (len(changes) == 4)
    with Run(config(train__steps=150, optim__lr=2e-3), tmp_path, quiet) as run:
        assert run.decision == "resume"
        run.resume_at(100)
        run.log(150, loss=0.5)
        run.done(150)
    assert [line["step"] for line in metrics(folder)] == [100, 150]
    (folder / "checkpoints" / "step-000100").rmdir()
    with pytest.raises(RunError, match="checkpoints are gone"):
        Run(config(train__steps=200, optim__lr=2e-3), tmp_path, quiet).__enter__()


def test_fewer_steps_than_reached_are_refused(tmp_path):
    interrupted(tmp_path)
    with pytest.raises(RunError, match="train.steps: got 40.*at least 50"):
        Run(config(train__steps=40), tmp_path, quiet).__enter__()


@pytest.fixture(scope="module")
def whole():
    """A configuration with every key of today."""
    return plain(load(compose("train", ["position=rope", "name=a"])))


def test_another_scheme_is_said_first_and_in_short(tmp_path, whole):
    folder = finish(tmp_path, whole)
    alibi = plain(load(compose("train", ["position=alibi", "name=a", "model.n_embd=64"])))
    with pytest.raises(RunError) as error:
        decide(folder, alibi)
    line = str(error.value)
    assert line.startswith(
        f"{folder}: holds another configuration: position.name: 'rope' -> 'alibi', model.n_embd: 128 -> 64, position."
    )
    others = sum(flatten(whole).get(key) != flatten(alibi).get(key) for key in {**flatten(whole), **flatten(alibi)})
    assert line.count("->") == 3 and f" and {others - 3} more; choose another sweep= or name=" in line
    with pytest.raises(RunError, match=r"configuration: position.base: 10000.0 -> 500000.0; choose"):
        decide(folder, plain(load(compose("train", ["position=rope", "name=a", "position.base=500000"]))))


@pytest.mark.parametrize("done", [False, True])
def test_a_key_that_came_later_is_no_difference(tmp_path, whole, done):
    old = copy.deepcopy(whole)
    for section, key in (
        ("data", "val_fraction"),
        ("optim", "decay"),
        ("model", "vocab_multiple"),
        ("position", "base"),
    ):
        del old[section][key]
    folder = finish(tmp_path, old) if done else interrupted(tmp_path, old)
    assert decide(folder, whole) == ("skip" if done else "resume", {})
    other = copy.deepcopy(whole)
    other["data"]["val_fraction"] = 0.2
    with pytest.raises(RunError, match=r"another configuration: data.val_fraction: 0.1 -> 0.2;"):
        decide(folder, other)
    other = copy.deepcopy(whole)
    other["optim"]["decay"] = 0.5
    if not done:
        assert decide(folder, other) == ("resume", {"optim.decay": (0.2, 0.5)})


def test_a_configuration_that_no_version_reads_any_more_is_refused(tmp_path, whole):
    old = copy.deepcopy(whole)
    old["model"]["rotary"] = True
    folder = interrupted(tmp_path, old)
    with pytest.raises(RunError, match="model.rotary: there is no such key") as error:
        decide(folder, whole)
    assert str(error.value).startswith(f"{folder}: its config.yaml cannot be read any more")


@pytest.mark.parametrize("content", ["{", "[1]", "\0", "!!python/object/apply:os.mkdir ['boom']"])
def test_a_spoilt_config_is_refused(tmp_path, content, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = interrupted(tmp_path)
    (folder / "config.yaml").write_text(content)
    with pytest.raises(RunError, match="config.yaml: cannot be read") as error:
        Run(config(), tmp_path, quiet).__enter__()
    assert "\n" not in str(error.value) and not Path("boom").exists()
    (folder / "config.yaml").unlink()
    with pytest.raises(RunError, match="missing beside checkpoints"):
        Run(config(), tmp_path, quiet).__enter__()
