"""A checkpoint is whole or not there, and every way to damage one is noticed."""

import errno
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import time

import pytest
import torch

from gpt import checkpoint
from gpt.errors import CheckpointError, RunError


def tensors(seed: int, n: int = 4) -> dict:
    generator = torch.Generator().manual_seed(seed)
    return {f"block.{i}.weight": torch.randn(3 + i, 5, generator=generator) for i in range(n)}


def save(folder, step: int, **state):
    return checkpoint.save(folder, step, tensors(step), tensors(step + 1), state)


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


def test_what_is_saved_comes_back(tmp_path):
    model = {
        "a": torch.randn(7, 3),
        "b": torch.randn(4).bfloat16(),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "turned": torch.randn(4, 6).T,
    }
    optimizer = {"a.step": torch.tensor(17), "a.exp_avg": torch.randn(7, 3)}
    state = {"config": {"model": {"n_embd": 8}, "tags": ("x", "é")}, "tokens": 2**40, "best": None, "lr": 1e-4 / 3}
    path = checkpoint.save(tmp_path, 500, model, optimizer, state)
    assert path == tmp_path / "step-000500"
    assert sorted(p.name for p in path.iterdir()) == ["model.safetensors", "optimizer.safetensors", "state.json"]
    found = checkpoint.load(path)
    assert same(found.model_state(), model) and same(found.optimizer_state(), optimizer)
    assert found.step == 500 and found.path == path
    assert found.state == json.loads(json.dumps(state)) | {"step": 500}
    stored = json.loads((path / "state.json").read_text())
    assert stored["files"]["model.safetensors"]["sha256"] == found.sha256
    assert stored["files"]["model.safetensors"]["size"] == (path / "model.safetensors").stat().st_size


def test_no_tensors_and_views_of_one_buffer(tmp_path):
    buffer = torch.randn(12)
    views = {"whole": buffer, "part": buffer[2:5], "again": buffer}
    found = checkpoint.load(checkpoint.save(tmp_path, 0, views, {}, {}))
    assert same(found.model_state(), views) and found.optimizer_state() == {}


def test_names_of_a_compiled_wrapper_are_never_saved(tmp_path):
    for model, optimizer in (({"_orig_mod.a": torch.zeros(1)}, {}), ({}, {"x._orig_mod.a": torch.zeros(1)})):
        with pytest.raises(AssertionError, match="_orig_mod"):
            checkpoint.save(tmp_path, 1, model, optimizer, {})
    assert list(tmp_path.iterdir()) == []


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def empty(path):
    os.truncate(path, 0)


def flip_bit(path):
    data = bytearray(path.read_bytes())
    where = random.randrange(len(data))
    data[where] ^= 1 << random.randrange(8)
    path.write_bytes(data)


def grow(path):
    with open(path, "ab") as file:
        file.write(b"x")


def remove(path):
    path.unlink()


@pytest.mark.parametrize("harm", [truncate, empty, flip_bit, grow, remove])
@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_damage_falls_back_or_is_an_error(tmp_path, file, harm):
    seed = random.randrange(10**6)
    print("seed", seed)
    random.seed(seed)
    old, new = save(tmp_path, 10), save(tmp_path, 20)
    if (file, harm) == ("state.json", grow):
        (new / file).write_text((new / file).read_text() + "x")
    else:
        harm(new / file)
    lines = []
    found = checkpoint.latest(tmp_path, lines.append)
    assert found.path == old
    assert len(lines) == 1 and "warning" in lines[0] and new.name in lines[0] and old.name in lines[0]
    with pytest.raises(CheckpointError, match=file):
        checkpoint.load(new)
    with pytest.raises(CheckpointError):
        checkpoint.resolve(new)
    harm(old / file) if harm is not grow else remove(old / file)
    with pytest.raises(CheckpointError, match="all checkpoints are damaged .*rm -r"):
        checkpoint.latest(tmp_path)


def test_every_bit_of_the_state_is_guarded(tmp_path):
    """No flipped bit of state.json gives another state: it is refused, or (in white space) says the same."""
    path = save(tmp_path, 10, config={"optim": {"lr": 0.001}, "name": "rope"}, tokens=123)
    right = checkpoint.load(path).state
    data = (path / "state.json").read_bytes()
    for bit in range(0, 8 * len(data), 7):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        (path / "state.json").write_bytes(changed)
        try:
            assert checkpoint.load(path).state == right
        except CheckpointError:
            pass


def test_none_and_only_leftovers(tmp_path):
    assert checkpoint.latest(tmp_path / "none") is None
    (tmp_path / "step-000010.tmp").mkdir()
    assert checkpoint.latest(tmp_path) is None


def test_a_name_that_is_too_long_is_one_line():
    for name, why in (("x" * 300, "File name too long"), ("x/" * 5000, "File name too long"), ("a\0b", "null byte")):
        with pytest.raises(CheckpointError, match=f"cannot be read .*{why}.; name a run's folder") as error:
            checkpoint.resolve(name)
        assert len(str(error.value)) < 250


def test_sizes_have_sensible_units():
    sizes = {0: "0.0 kB", 1234: "1.2 kB", 999_949: "999.9 kB", 1e6: "1.0 MB", 1e9: "1.0 GB", 5.678e12: "5,678.0 GB"}
    assert {size: checkpoint.size_text(size) for size in sizes} == sizes


def test_resolve_names_a_run_or_a_checkpoint(tmp_path):
    run = tmp_path / "run"
    old, new = save(run / "checkpoints", 10), save(run / "checkpoints", 20)
    assert checkpoint.resolve(run).path == checkpoint.resolve(run / "checkpoints").path == new
    assert checkpoint.resolve(str(old)).step == 10
    shutil.copytree(old, tmp_path / "my copy")
    assert checkpoint.resolve(tmp_path / "my copy").step == 10
    for bad in (tmp_path / "nowhere", tmp_path, new / "state.json", run / "checkpoints" / "step-000015"):
        with pytest.raises(CheckpointError) as error:
            checkpoint.resolve(bad)
        assert str(bad) in str(error.value) and "\n" not in str(error.value)


class Bomb:
    def __reduce__(self):
        return os.mkdir, (os.environ["NANOPE_BOMB"],)


@pytest.mark.parametrize("where", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_a_pickle_runs_nothing(tmp_path, monkeypatch, where):
    monkeypatch.setenv("NANOPE_BOMB", str(tmp_path / "boom"))
    path = save(tmp_path / "checkpoints", 10)
    (path / where).write_bytes(pickle.dumps(Bomb()))
    if where != "state.json":  # even where the checksums were made to fit
        state = checkpoint.unseal((path / "state.json").read_text())
        state["files"][where] = checkpoint.fingerprint(path / where)
        (path / "state.json").write_text(checkpoint.seal(state))
    with pytest.raises(CheckpointError):
        checkpoint.load(path)
    assert not (tmp_path / "boom").exists()


@pytest.mark.parametrize("name", ["../evil", "/etc/passwd", "a\0b", "extra.pkl", ""])
def test_foreign_file_names_are_refused(tmp_path, name):
    path = save(tmp_path, 10)
    state = checkpoint.unseal((path / "state.json").read_text())
    for files in (
        {**state["files"], name: state["files"]["model.safetensors"]},
        {name: state["files"]["model.safetensors"], "optimizer.safetensors": state["files"]["optimizer.safetensors"]},
    ):
        (path / "state.json").write_text(checkpoint.seal({**state, "files": files}))
        with pytest.raises(CheckpointError, match="names the files"):
            checkpoint.load(path)


@pytest.mark.parametrize(
    "change",
    [
        {"files": None},
        {"files": {"model.safetensors": 1, "optimizer.safetensors": 2}},
        {"files": {n: {"size": "1", "sha256": "x"} for n in ("model.safetensors", "optimizer.safetensors")}},
        {"step": "10"},
        {"step": -1},
        {"step": True},
        {"format": 2},
    ],
)
def test_wrong_values_in_the_state_are_refused(tmp_path, change):
    path = save(tmp_path, 10)
    state = checkpoint.unseal((path / "state.json").read_text())
    (path / "state.json").write_text(checkpoint.seal({**state, **change}))
    with pytest.raises(CheckpointError, match="state.json"):
        checkpoint.load(path)
    (path / "state.json").write_text("[" * 100000)
    with pytest.raises(CheckpointError, match="state.json"):
        checkpoint.load(path)


def test_prune_keeps_the_last_two_verified_and_the_best(tmp_path):
    for step in range(10, 70, 10):
        save(tmp_path, step)
    flip_bit(tmp_path / "step-000060" / "model.safetensors")
    checkpoint.prune(tmp_path, best_step=20)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000020", "step-000040", "step-000050"]
    checkpoint.prune(tmp_path, best_step=None)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000040", "step-000050"]


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_prune_removes_nothing_that_may_be_good(tmp_path, monkeypatch, file):
    """A disk or network that does not answer for a moment proves no damage; nor does the format of a later version."""
    for step in (10, 20, 30, 40, 50):
        save(tmp_path, step)
    ill = tmp_path / "step-000040" / file
    real = open

    def open_(path, *args, **kwargs):
        if os.fspath(path) == str(ill):
            raise OSError(errno.EIO, "Input/output error")
        return real(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", open_)
        patch.setattr("io.open", open_)
        with pytest.raises(CheckpointError, match="cannot be read .Input/output error") as error:
            checkpoint.load(ill.parent)
        assert not isinstance(error.value, checkpoint.DamagedError)
        checkpoint.prune(tmp_path, best_step=None)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000030", "step-000040", "step-000050"]
    assert checkpoint.load(ill.parent).step == 40
    state = checkpoint.unseal((tmp_path / "step-000050" / "state.json").read_text())
    (tmp_path / "step-000050" / "state.json").write_text(checkpoint.seal({**state, "format": 99}))
    checkpoint.prune(tmp_path, best_step=None)
    assert (tmp_path / "step-000050").is_dir()


def test_steps_beyond_a_million_stay_in_order(tmp_path):
    save(tmp_path, 999_999)
    save(tmp_path, 1_000_000)
    assert checkpoint.latest(tmp_path).step == 1_000_000


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, 10, turn=1)
    path = save(tmp_path, 10, turn=2)
    assert checkpoint.load(path).state["turn"] == 2
    flip_bit(path / "model.safetensors")
    assert checkpoint.load(save(tmp_path, 10, turn=3)).state["turn"] == 3
    assert [p.name for p in tmp_path.iterdir()] == ["step-000010"]


def test_a_kill_between_the_two_renames_loses_nothing(tmp_path):
    save(tmp_path, 10)
    os.replace(tmp_path / "step-000010", tmp_path / "step-000010.old")
    assert checkpoint.latest(tmp_path).step == 10
    save(tmp_path, 20)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000010", "step-000020"]


@pytest.mark.parametrize("again", [False, True])
def test_kill_9_at_random_moments(tmp_path, again):
    """30 kills in a loop of saves and prunes (new steps, or the same step again and again)."""
    seed = random.randrange(10**6)
    print("seed", seed)
    random.seed(seed)
    began = time.monotonic()
    save(tmp_path, 0, turn=0)
    took = time.monotonic() - began  # on a busy machine much longer than on another
    turn = 0
    for _ in range(30 if not again else 10):
        child = os.fork()
        if child == 0:  # goes on from what it finds, as a run would
            try:
                for turn in range(turn + 1, turn + 10**6):  # noqa: B020
                    step = 0 if again else turn
                    checkpoint.save(tmp_path, step, tensors(turn), tensors(turn + 1), {"turn": turn})
                    checkpoint.prune(tmp_path, best_step=0)
            finally:
                os._exit(1)
        time.sleep(random.uniform(0.001, 0.03 + 5 * took))
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        lines = []
        found = checkpoint.latest(tmp_path, lines.append)
        assert lines == [], "a killed save left something that looks like a checkpoint"
        assert found.state["turn"] >= turn, "went back"
        turn = found.state["turn"]
        assert same(found.model_state(), tensors(turn)) and same(found.optimizer_state(), tensors(turn + 1))
    assert turn > 0
    save(tmp_path, turn + 1)
    assert not list(tmp_path.glob("*.tmp")) and not list(tmp_path.glob("*.old"))


@pytest.mark.parametrize("call", [1, 2, 3, 4, 5])
def test_a_full_disk_leaves_the_earlier_checkpoints(tmp_path, monkeypatch, call):
    save(tmp_path, 10)
    count, real = 0, os.fsync

    def full(handle):
        nonlocal count
        count += 1
        if count == call:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left on device") as error:
        save(tmp_path, 20)
    assert "\n" not in str(error.value) and "intact" in str(error.value)
    monkeypatch.setattr(os, "fsync", real)
    assert not list(tmp_path.glob("*.tmp"))
    assert checkpoint.load(tmp_path / "step-000010").step == 10
    assert checkpoint.latest(tmp_path).step in (10, 20)


def test_a_really_full_disk(tmp_path):
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "x", tmp_path]).returncode:
        pytest.skip("needs the right to mount a small file system")
    try:
        save(tmp_path, 10)
        with pytest.raises(CheckpointError, match="No space left on device"):
            checkpoint.save(tmp_path, 20, {"a": torch.zeros(100_000)}, {}, {})
        assert checkpoint.latest(tmp_path).step == 10
        with pytest.raises(RunError, match="make room"):
            checkpoint.check_space(tmp_path, 200_000)
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_space_is_checked_beforehand(tmp_path):
    model, optimizer = tensors(1), tensors(2)
    path = checkpoint.save(tmp_path, 1, model, optimizer, {"config": {"a": 1}})
    size = sum(file.stat().st_size for file in path.iterdir())
    assert size <= checkpoint.required_bytes(model, optimizer) <= size + 100_000
    checkpoint.check_space(tmp_path / "new", 1000)
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(RunError, match="make room") as error:
        checkpoint.check_space(tmp_path / "new", free // 2)
    assert "\n" not in str(error.value)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be written"):
        checkpoint.check_space(tmp_path / "file" / "checkpoints", 1000)
