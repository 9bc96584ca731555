"""A corpus is prepared once, whole or not at all, never over another one, and goes on where it was killed."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import gpt.corpus
import gpt.documents
import gpt.draft
import gpt.prepare
from gpt.cli import compose
from gpt.corpus import open_corpus
from gpt.data import batch
from gpt.errors import DataError
from gpt.prepare import check_source, prepare
from gpt.schema import DataConfig
from gpt.tokenizer import ByteTokenizer
from tests.texts import BYTE, CHAR, DOCUMENTS, ROOT, run_python, size, text_corpus


def snapshot(folder: Path) -> dict:
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


def test_prepared_once(tmp_path):
    said = []
    first = text_corpus(tmp_path, DOCUMENTS, log=said)
    times = snapshot(first.folder)
    config = DataConfig("text", path=str(tmp_path / "texts"))
    second = prepare(config, BYTE, tmp_path / "data", said.append)
    assert snapshot(second.folder) == times and len(said) == 1
    assert second.train_sha256 == first.train_sha256 == hashlib.sha256(first.train[:].tobytes()).hexdigest()
    assert not second.train[:].flags.writeable
    assert second.train.dtype == np.uint16 and second.train_documents.dtype == np.uint64


def test_a_source_that_changed_is_prepared_beside_what_there_is(tmp_path):
    said = []
    first = text_corpus(tmp_path, DOCUMENTS, log=said)
    times = snapshot(first.folder)
    second = text_corpus(tmp_path, {"new.txt": "a new document"}, log=said)
    assert said[1:] == [
        f"{second.folder}: preparing; its source is another than that of {first.folder.name}, which stays"
    ]
    assert second.folder.parent == first.folder.parent and second.folder != first.folder
    assert size(second) == size(first) + 15
    assert snapshot(first.folder) == times and open_corpus(first.folder).train_sha256 == first.train_sha256
    (tmp_path / "texts" / "new.txt").unlink()
    assert text_corpus(tmp_path, {}, log=said).folder == first.folder and len(said) == 2  # the old text, the old folder


@pytest.mark.parametrize("emptied", [False, True])
def test_a_source_that_is_gone_is_not_needed(tmp_path, emptied):
    said = []
    first = text_corpus(tmp_path, DOCUMENTS, log=said)
    second = text_corpus(tmp_path, {"new.txt": "a new document"}, log=said)
    other = text_corpus(tmp_path, {}, log=said, val_fraction=0.3)
    now = os.stat(other.folder / "meta.json").st_mtime_ns
    for age, corpus in enumerate((other, second, first)):  # `other` is the newest, and of no matter here
        os.utime(corpus.folder / "meta.json", ns=(now, now - age * 10**9))
    shutil.rmtree(tmp_path / "texts")
    if emptied:
        (tmp_path / "texts").mkdir()
    config = DataConfig("text", path=str(tmp_path / "texts"))
    check_source(config, BYTE, tmp_path / "data")
    for expected in (second, first):  # the newest, or the next where that is damaged
        found = prepare(config, BYTE, tmp_path / "data", said.append)
        assert found.folder == expected.folder and "its source is gone" in said[-1]
        (found.folder / "train-00000.bin").write_bytes(b"")
    with pytest.raises(DataError, match="holds no text" if emptied else "not there"):
        prepare(config, BYTE, tmp_path / "data", said.append)
    with pytest.raises(DataError, match="holds no text" if emptied else "not there"):
        check_source(config, CHAR, tmp_path / "data")


def test_another_format_leaves_what_an_older_version_prepared(tmp_path, monkeypatch):
    first = text_corpus(tmp_path, DOCUMENTS)
    times = snapshot(first.folder)
    for room in (gpt.corpus, gpt.draft, gpt.prepare):
        monkeypatch.setattr(room, "FORMAT", 99)
    assert text_corpus(tmp_path, {}).folder != first.folder and snapshot(first.folder) == times


def test_fractions_that_differ_in_the_last_place_are_two_corpora(tmp_path):
    one = text_corpus(tmp_path, DOCUMENTS, val_fraction=0.123456789)
    assert text_corpus(tmp_path, {}, val_fraction=0.123456788).folder != one.folder


@pytest.mark.parametrize("corpus", ["text", "shakespeare_char"])
def test_a_path_that_cannot_be_looked_at_is_one_line(tmp_path, corpus):
    with pytest.raises(DataError, match="data.path: .*aaa.* cannot be read .File name too long"):
        prepare(DataConfig(corpus, path=str(tmp_path / ("a" * 300))), BYTE, tmp_path / "data")


def test_a_folder_that_holds_another_tokenizer_is_prepared_again(prepared, tmp_path):
    place, good = prepared
    config, said = DataConfig("text", path=str(place / "texts")), []
    folder = prepare(config, CHAR, tmp_path / "data", said.append).folder
    shutil.rmtree(folder)
    shutil.copytree(good.folder, folder)
    corpus = prepare(config, CHAR, tmp_path / "data", said.append)
    assert corpus.tokenizer.name == "char" and "it holds tokenizer=byte" in said[1]


def test_a_tokenizer_that_leaves_its_vocabulary_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(ByteTokenizer, "encode", lambda self, text: np.full(len(text), 70000))
    with pytest.raises(DataError, match="token id 70,000 at index 0"):
        text_corpus(tmp_path, DOCUMENTS)
    assert [p for p in (tmp_path / "data").rglob("*") if p.is_file() and p.suffix != ".lock"] == []


def test_a_vocabulary_of_more_than_65536_ids_is_stored_in_uint32(tmp_path):
    text = "".join(map(chr, range(0x10000, 0x10000 + 70000)))
    (tmp_path / "all.txt").write_text(text)
    corpus = prepare(DataConfig("text", path=str(tmp_path / "all.txt")), CHAR, tmp_path / "data")
    assert corpus.train.dtype == np.uint32 and corpus.train[:].tolist() == list(range(59500))
    assert batch(corpus.val, 6999, 0, 0, range(1))[1][0, -1] == 69999


@pytest.mark.parametrize("moment", ["gpt.draft.write_atomic", "gpt.prepare.os.rename", "gpt.tokens.TokenWriter.finish"])
def test_a_killed_preparation_does_not_count(tmp_path, moment):
    first = text_corpus(tmp_path, DOCUMENTS)
    (tmp_path / "texts" / "0.txt").write_text("changed")
    code = """
import os, sys
from pathlib import Path
import gpt.prepare
from gpt.prepare import *
place, _, name = sys.argv[2].rpartition(".")
setattr(eval(place), name, lambda *_: os._exit(9))
prepare(DataConfig("text", path=sys.argv[1] + "/texts"), TokenizerConfig("byte"), Path(sys.argv[1]) / "data")
"""
    assert run_python(code, tmp_path, moment).returncode == 9
    assert open_corpus(first.folder).train_sha256 == first.train_sha256
    said = []
    (tmp_path / "texts" / "0.txt").write_text("changed again")  # and who prepares that clears up the leftovers
    corpus = text_corpus(tmp_path, {}, log=said)
    assert len(said) == 1 and "its source is another than that of" in said[0]
    assert size(corpus) == sum(len(text) + 1 for text in {**DOCUMENTS, "0.txt": "changed again"}.values())
    assert [p.suffix for p in (corpus.folder.parent / ".preparing").iterdir()] == [".lock"]


def test_processes_that_prepare_the_same_wait_for_each_other(tmp_path):
    (tmp_path / "texts").mkdir()
    for i in range(30):
        (tmp_path / "texts" / f"{i}.txt").write_text(f"{i} words " * 20000)
    code = """
import sys
from gpt.prepare import *
corpus = prepare(DataConfig("text", path=sys.argv[1] + "/texts"), TokenizerConfig("char"), Path(sys.argv[1]) / "data")
print(corpus.train_sha256)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, str(tmp_path)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(3)]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len({output.split()[-1] for output in outputs}) == 1
    assert sum(": preparing\n" in output for output in outputs) == 1


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "data").write_text("a file where the folder should be")
    with pytest.raises(DataError, match="cannot be prepared"):
        text_corpus(tmp_path, DOCUMENTS)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    place = tmp_path_factory.mktemp("prepared")
    return place, text_corpus(place, DOCUMENTS)


@pytest.mark.parametrize("tokenizer", ["byte", "char"])
def test_memory_does_not_grow_with_the_text(tmp_path, tokenizer):
    with open(tmp_path / "large.txt", "w", encoding="utf-8") as file:
        for i in range(24):
            file.write(f"{i} 👩 some words of a long text\n" * (2**20 // 32))
    code = """
import resource, sys
from gpt.prepare import *
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
import filelock
config = DataConfig("text", path=sys.argv[1] + "/small.txt")
prepare(config, TokenizerConfig(sys.argv[2]), Path(sys.argv[1]) / "data")
before = peak()
config = DataConfig("text", path=sys.argv[1] + "/large.txt")
prepare(config, TokenizerConfig(sys.argv[2]), Path(sys.argv[1]) / "data")
print(peak() - before)
"""
    (tmp_path / "small.txt").write_text("a small text\n" * 20)
    done = run_python(code, tmp_path, tokenizer)
    assert done.returncode == 0, done.stderr
    assert (
        float(done.stdout.split()[-1]) < 120
    )  # MiB; the text alone, held whole, would take 90, and its ids and bytes as much again


@pytest.mark.parametrize(
    "overrides, name, tokenizer",
    [
        ([], "stdlib", "byte"),
        (["data=shakespeare_char"], "shakespeare_char", "char"),
        (["data=shakespeare_char", "tokenizer=byte"], "shakespeare_char", "byte"),
        (["tokenizer=gpt2", "data=shakespeare_char"], "shakespeare_char", "gpt2"),
        (["data=text", "data.path=x", "tokenizer=char"], "text", "char"),
    ],
)
def test_configurations_compose(overrides, name, tokenizer):
    config = compose("train", overrides)
    assert (config["data"]["name"], config["tokenizer"]["name"]) == (name, tokenizer)
    assert set(config["data"]) >= {"name", "path", "val_fraction", "test_fraction", "max_tokens", "packing"}
    fractions = config["data"]["val_fraction"], config["data"]["test_fraction"]
    assert fractions == (0.1, 0.0 if name == "shakespeare_char" else 0.05)


@pytest.mark.parametrize(
    "arguments, code, expected",
    [
        (["data=stdlib", "tokenizer=byte"], 0, "standard library of Python"),
        (["--help"], 0, "python data/prepare.py data=text"),
        (["data=text", "data.path=/not/there"], 2, "error: data.path: got '/not/there'"),
        (["data=novels"], 2, "error: data: got 'novels'"),
    ],
)
def test_the_command(tmp_path, arguments, code, expected):
    command = [sys.executable, ROOT / "data/prepare.py", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stderr
    assert expected in done.stdout + done.stderr and "Traceback" not in done.stderr
    assert code == 0 or done.stderr.count("\n") == 1
    # what is prepared lands below the working directory
    assert len(list(tmp_path.glob("data/stdlib/byte-*/meta.json"))) == (1 if "data=stdlib" in arguments else 0)
