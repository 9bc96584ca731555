"""What an earlier version wrote can still be used: tests/stored/first is a run of the first one, with its corpus."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import train
from gpt import cli
from gpt.checkpoint import resolve
from gpt.corpus import open_corpus
from gpt.errors import CheckpointError, ConfigError, DataError
from gpt.evaluate import validation_loss
from gpt.measure import Text
from gpt.prepare import prepare
from gpt.restore import corpus_of, restore
from gpt.runtime import Runtime
from gpt.schema import DataConfig
from tests.runs import metrics
from tests.texts import BYTE

STORED = Path(__file__).parent / "stored" / "first"
RUN, CORPUS = Path("runs/default/old"), Path("data/text/novel-e7e35330-byte-4d5197c9")
CPU = Runtime(torch.device("cpu"), torch.float32)


@pytest.fixture(autouse=True)
def stored(tmp_path, monkeypatch) -> None:
    shutil.copytree(STORED, tmp_path / "stored")
    monkeypatch.chdir(tmp_path / "stored")


def quiet(line: str) -> None:
    pass


def test_a_corpus_of_the_first_format_is_read():
    corpus = open_corpus(CORPUS)
    assert np.array_equal(corpus.train[:], np.load(CORPUS / "train.npy"))
    text = Path("novel.txt").read_bytes()
    assert corpus.tokenizer.decode_bytes(np.concatenate([corpus.train, corpus.val])) == text
    assert corpus.train[5:9].tobytes() == np.load(CORPUS / "train.npy")[5:9].tobytes()
    assert corpus.train_documents[:].tolist() == [0] and len(corpus.test) == len(corpus.test_documents) == 0
    assert "skipped    nothing" in corpus.summary()


@pytest.mark.parametrize("name", ["train.npy", "val.npy", "train_documents.npy"])
def test_a_damaged_one_is_refused(name):
    content = bytearray((CORPUS / name).read_bytes())
    content[-1] ^= 1
    (CORPUS / name).write_bytes(content)
    with pytest.raises(DataError, match=f"{name}: damaged"):
        open_corpus(CORPUS)
    (CORPUS / name).write_bytes(content[:-8])
    with pytest.raises(DataError, match=f"{name}: .* bytes, expected"):
        open_corpus(CORPUS)


def test_what_is_not_whole_is_refused():
    meta = json.loads((CORPUS / "meta.json").read_text())
    del meta["files"]["val.npy"]
    (CORPUS / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(DataError, match="meta.json: something is missing"):
        open_corpus(CORPUS)


@pytest.mark.parametrize("kept", ["the corpus as it was", "the text alone", "both", "another corpus too"])
def test_its_checkpoint_has_the_loss_it_had(kept):
    if kept == "the text alone":
        shutil.rmtree("data")
    if kept == "the corpus as it was":
        Path("novel.txt").unlink()
    if kept == "another corpus too":
        Path("other.txt").write_text("Another text of some length. " * 100)
        prepare(DataConfig("text", path="other.txt", test_fraction=0.0), BYTE, log=quiet)
    checkpoint = resolve(RUN)
    model, config = restore(checkpoint, torch.device("cpu"))
    corpus = corpus_of(config, checkpoint, log=quiet)
    assert (corpus.folder == CORPUS) == (kept != "the text alone")
    found = validation_loss(model, corpus.val, 64, CPU)
    assert abs(found - metrics(RUN)[-1]["val_loss"]) < 1e-5


def test_its_checkpoint_is_not_read_on_another_text():
    shutil.rmtree("data")
    Path("novel.txt").write_text(Path("novel.txt").read_text().replace("sea", "lake"))
    checkpoint = resolve(RUN)
    _, config = restore(checkpoint, torch.device("cpu"))
    with pytest.raises(CheckpointError, match="trained with train_sha256 89625a1616d3, data/text/novel"):
        corpus_of(config, checkpoint, log=quiet)


def test_it_has_no_test_split_and_says_why():
    """Its configuration is older than data.test_fraction, whose default is another one today."""
    checkpoint = resolve(RUN)
    _, config = restore(checkpoint, torch.device("cpu"))
    assert "test_fraction" not in checkpoint.state["config"]["data"] and config.data.test_fraction == 0
    with pytest.raises(ConfigError, match="eval.split: .* was prepared with data.test_fraction=0"):
        Text.of(corpus_of(config, checkpoint, log=quiet), "test", "concat", config.data)


def test_its_run_goes_on():
    """With the command that it was started with, and more steps."""
    overrides = json.loads((RUN / "status.json").read_text())["overrides"] + ["train.steps=6"]
    assert train.main(cli.compose("train", overrides), overrides) == 0
    checkpoint = resolve(RUN)
    assert checkpoint.step == 6 and checkpoint.state["tokens"] == 6 * 32 and checkpoint.state["rows"] == 12
    assert [path.name for path in Path("data/text").glob("novel*")] == [CORPUS.name]
    assert corpus_of(restore(checkpoint, torch.device("cpu"))[1], checkpoint, log=quiet).folder == CORPUS


def test_a_new_run_prepares_its_own_corpus():
    """With a test split; and where the text is gone, the old corpus is no stand-in."""
    corpus = prepare(DataConfig("text", path="novel.txt"), BYTE, log=quiet)
    assert corpus.folder != CORPUS and len(corpus.test)
    shutil.rmtree(corpus.folder)
    Path("novel.txt").unlink()
    with pytest.raises(DataError, match="novel.txt.*not there"):
        prepare(DataConfig("text", path="novel.txt"), BYTE, log=quiet)
