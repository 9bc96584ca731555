"""A run's name is short, a function of the configuration, and nobody else's."""

import itertools
import random
import re
from pathlib import Path

import pytest

import train
from gpt import cli
from gpt.errors import ConfigError
from gpt.naming import check_start, folder_name
from gpt.run import Run
from tests.folders import config


@pytest.mark.parametrize(
    "overrides, changes, expected",
    [
        ([], {}, "rope-s1"),
        (["position=rope", "seed=1"], {}, "rope-s1"),
        (["optim.lr=1e-4"], {"optim__lr": 1e-4}, "rope-s1-lr1e-4"),
        (["optim.lr=0.0001"], {"optim__lr": 1e-4}, "rope-s1-lr1e-4"),
        (["++optim.lr=0.0001"], {"optim__lr": 1e-4}, "rope-s1-lr1e-4"),
        (["model=small"], {}, "rope-s1-modelsmall"),
        (["position.base=500000"], {"position__base": 500000.0}, "rope-s1-base500000"),
        (["position.layers=PPPN"], {"position__layers": "PPPN"}, "rope-s1-layersPPPN"),
        (
            ["model.dropout=0.2", "optim.lr=2e-3"],
            {"model__dropout": 0.2, "optim__lr": 2e-3},
            "rope-s1-dropout0.2-lr2e-3",
        ),
        (["model.bias=true"], {"model__bias": True}, "rope-s1-biastrue"),
        (["model=gpt2-medium"], {}, "rope-s1-modelgpt2-medium"),
        (["data.name=text"], {"data__name": "text"}, "rope-s1-data.nametext"),
        (["runtime.dtype=bfloat16"], {"runtime__dtype": "bfloat16"}, "rope-s1-dtypebfloat16"),
    ],
)
def test_folder_names(overrides, changes, expected):
    assert folder_name(config(name="", **changes), overrides) == expected


@pytest.mark.parametrize(
    "overrides, expected",
    [
        ("", "learned-s0"),
        ("data=text data.path=texts", "learned-s0-datatext-pathtexts"),
        ("data=text data.path=one.txt seed=3 position=alibi", "alibi-s3-datatext-pathone.txt"),
        (
            "data=text data.path=texts tokenizer=gpt2 optim.lr=1e-4",
            "learned-s0-datatext-pathtexts-lr1e-4-tokenizergpt2",
        ),
        (
            "data=text data.path=texts data.val_fraction=0.2 tokenizer=char",
            "learned-s0-datatext-pathtexts-val_fraction0.2-tokenizerchar",
        ),
        ("model=small tokenizer=gpt2 train.steps=100", "learned-s0-modelsmall-tokenizergpt2-steps100"),
        ("position=rope position.layers=PPPN model.dropout=0.1", "rope-s0-dropout0.1-layersPPPN"),
        ("position=rope position.base=500000 optim.schedule=wsd", "rope-s0-schedulewsd-base500000"),
        (
            "train.batch_size=4 train.accumulate=3 model.block_size=128",
            "learned-s0-block_size128-accumulate3-batch_size4",
        ),
    ],
)
def test_runs_of_the_first_version_keep_their_folders(tmp_path, monkeypatch, overrides, expected):
    """The names that it gave: a key that ends as another one would lengthen both, and orphan what has the old one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    for name in ("texts/a.txt", "texts/b.txt", "one.txt"):
        (tmp_path / name).write_text("some text")
    words = overrides.split()
    assert train.final(cli.compose("train", words), words).name == expected


@pytest.mark.parametrize(
    "overrides, changes, words",
    [
        (
            ["init_from=runs/pos/rope-s0-batch_size8-steps40", "position.base=500000", "train.steps=80"],
            {"init_from": "runs/pos/rope-s0-batch_size8-steps40", "position__base": 5e5, "train__steps": 80},
            "rope-s1-base500000-steps80-init_fromrope-s0-batch_s",
        ),
        (
            ["data=text", "data.path=/home/me/my texts/emma.txt", "position.layers=PPPN", "optim.lr=1e-4"],
            {"data__path": "/home/me/my texts/emma.txt", "position__layers": "PPPN", "optim__lr": 1e-4},
            "rope-s1-layersPPPN-datatext-pathemma.txt-lr1e-4",
        ),
        (["data.path=a/b/"], {"data__path": "a/b/"}, "rope-s1-patha_b"),  # short: as it has always been
        (["data.path=" + "long/" * 9], {"data__path": "long/" * 9}, "rope-s1-pathlong"),
        (["data.path='" + "long/" * 9 + "*.txt'"], {"data__path": "long/" * 9 + "*.txt"}, "rope-s1-path_.txt"),
        (
            ["position.factors=[" + "1.25," * 30 + "1]", "model.dropout=0.1"],
            {"position__factors": [1.25] * 30 + [1.0], "model__dropout": 0.1},
            "rope-s1-dropout0.1-factors_1.25_1.25_1.25_1.25_1.25",
        ),
    ],
)
def test_a_long_name_says_first_what_differs_in_position(overrides, changes, words):
    made = config(name="", init_from=None, **{key: value for key, value in changes.items() if key != "init_from"})
    made["init_from"] = changes.get("init_from")
    for order in (overrides, overrides[::-1]):
        name = folder_name(made, order)
        assert re.fullmatch(re.escape(words) + "-[0-9a-f]{8}", name) and len(name) <= 60, name


def test_paths_that_end_alike_have_names_of_their_own():
    folder = "/home/me/texts/of/many/centuries/"
    paths = [folder + end for end in ("a/emma.txt", "b/emma.txt", "a/emma.txt/", "a//emma.txt", "../emma.txt")]
    paths += ["emma.txt"]
    names = {folder_name(config(name="", data__path=path), [f"data.path={path}"]) for path in paths}
    assert len(names) == len(paths)
    assert "rope-s1-pathemma.txt" in names and all(name.startswith("rope-s1-pathemma.txt") for name in names)


def test_what_does_not_change_the_run_does_not_change_its_name():
    ignored = ["position=rope", "seed=3", "sweep=x", "name=", "experiment=smoke", "wandb.mode=offline", "wandb=off"]
    ignored += ["runtime.device=cpu", "runtime.compile=true", "eval.tokens=1", "train.log_every=1"]
    ignored += ["train.eval_every=1", "train.eval_tokens=7", "train.checkpoint_every=1"]
    ignored += ["hydra.mode=RUN", "hydra/launcher=processes", "+experiment=smoke"]
    for n in (0, 1, len(ignored)):
        assert folder_name(config(name=""), random.sample(ignored, n)) == "rope-s1"


def test_the_order_of_overrides_does_not_matter():
    made = config(name="", optim__lr=1e-4, model__dropout=0.1, data__path="/a b/c")
    overrides = ["optim.lr=1e-4", "model.dropout=0.1", "data.path='/a b/c'", "seed=1"]
    assert len({folder_name(made, list(order)) for order in itertools.permutations(overrides)}) == 1


def test_other_configurations_never_share_a_name():
    """Lists, slashes, =, spaces, long and tricky values: short names of plain characters, all different."""
    values = [
        "a",
        "a/b",
        "a_b",
        "a b",
        "a=b",
        "a-lr2",
        "ab",
        "a,b",
        "[a]",
        "é",
        "ê",
        "x" * 200,
        "x" * 201,
        "../a",
        "A.b",
    ]
    names = {}
    for path, lr, name in itertools.product(values, (1e-3, 2.5e-4, 1 / 3), ("stdlib", "a")):
        overrides = [f"data.path={path}", f"optim.lr={lr}", f"data.name={name}"]
        made = config(name="", data__path=path, optim__lr=lr, data__name=name)
        names.setdefault(folder_name(made, overrides), set()).add((path, lr, name))
    assert all(len(which) == 1 for which in names.values())
    for name in names:
        assert len(name) <= 60 and set(name) <= set(
            "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-"
        ), name
    tags = [folder_name(config(name=""), [f"tokenizer={t}"]) for t in ("byte", "'byte'", "gpt2")]
    assert len(set(tags)) == 3


def test_a_name_given_wins_and_is_checked(tmp_path):
    assert folder_name(config(name="my run"), ["optim.lr=1"]) == "my run"
    for bad in ("a/b", "..", ".", "\\x", "a\0b", "a\nb", "x" * 101, " a", "...", ".a", "wandb", "checkpoints", 3):
        with pytest.raises(ConfigError, match="^name: got"):
            folder_name(config(name=bad), [])
    for bad in ("", "..", "a/b", ".a", "wandb", "checkpoints", None, 3):
        with pytest.raises(ConfigError, match="^sweep: got"):
            Run(config(sweep=bad), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_start_that_is_not_there_names_the_runs_near_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="it is not there, and no run in runs/ is called so$"):
        check_start("runs/pos/rope-s0")
    long = "runs/pos/rope-s0-block_size256-batch_size8-warmup10-steps40"
    for name in ("runs/pos/alibi-s0", long, "runs/pos/rope-s10-steps40", "runs/other/nope-s3"):
        Path(name).mkdir(parents=True)
        Path(name, "config.yaml").touch()
    for given in ("runs/pos/rope-s0", "./runs/pos/rope-s0/"):
        with pytest.raises(ConfigError) as error:
            check_start(given)
        assert str(error.value).endswith(f"a run or of a checkpoint; it is not there, near it: {long}")
    with pytest.raises(ConfigError, match="not there, near it: runs/pos/alibi-s0, "):
        check_start("runs/pos/alibi-s1")
    with pytest.raises(ConfigError, match="not there, and no run in runs/ is called so$"):
        check_start("x")
    with pytest.raises(ConfigError, match="this is a file$"):
        check_start("runs/other/nope-s3/config.yaml")
    with pytest.raises(ConfigError, match="not there"):
        check_start("x" * 300 + "\0")
    check_start("runs/pos")
