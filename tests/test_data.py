"""Corpora are prepared once, whole or not at all; opening checks everything; a batch is a function of its address."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import data.shakespeare_char as shakespeare_char
import data.stdlib as stdlib
import gpt.data
from gpt.data import TokenFile, batch, cut_in_two, held_out, open_corpus, prepare, read_blocks, share, window
from gpt.errors import ConfigError, DataError
from gpt.schema import DataConfig, TokenizerConfig
from gpt.tokenizer import ByteTokenizer, CharTokenizer

ROOT = Path(__file__).parents[1]
BYTE, CHAR = TokenizerConfig("byte"), TokenizerConfig("char")
relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def random_text(rng: np.random.Generator, size: int) -> str:
    return "".join(rng.choice(list("abc é漢👩\n "), size))


def text_corpus(tmp_path: Path, documents: dict[str, str], tokenizer=BYTE, log=None, **config):
    """A corpus prepared from files of these names and texts."""
    folder = tmp_path / "texts"
    for name, text in documents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text.encode())
    said = [] if log is None else log
    return prepare(DataConfig("text", path=str(folder), **config), tokenizer, tmp_path / "data", said.append)


def run_python(code: str, *arguments: object, timeout: float = 60) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)


# ------------------------------------------------------------------------------------------------------------ batches


def tokens_of(n: int) -> np.ndarray:
    return np.arange(n).astype(np.uint16)


def test_targets_are_the_inputs_one_further():
    tokens = np.random.default_rng().integers(0, 60000, 5000).astype(np.uint16)
    x, y = batch(tokens, 32, seed=3, step=7, rows=range(12))
    assert x.shape == y.shape == (12, 32) and x.dtype == y.dtype == torch.int64
    assert x.is_contiguous() and y.is_contiguous()
    assert torch.equal(x[:, 1:], y[:, :-1])
    text = tokens.tolist()
    windows = {tuple(text[i : i + 33]) for i in range(5000 - 32)}
    assert all(tuple([*row.tolist(), last.item()]) in windows for row, last in zip(x, y[:, -1], strict=True))


@relaxed
@given(st.integers(0, 2**63 - 1), st.integers(0, 2**40), st.integers(0, 50), st.integers(0, 50), st.integers(1, 7))
def test_a_row_depends_on_seed_step_and_row_alone(seed, step, start, more, stride):
    tokens = tokens_of(3000)
    everything = batch(tokens, 8, seed, step, range(120))[0]
    rows = range(start, start + more, stride)
    np.random.seed(0)  # what the global generator does is of no matter
    assert torch.equal(batch(tokens, 8, seed, step, rows)[0], everything[list(rows)].reshape(len(rows), 8))


def test_other_seeds_steps_and_rows_give_other_windows():
    tokens = tokens_of(60000)
    drawn = [batch(tokens, 1, seed, step, range(8))[0] for seed in range(5) for step in range(20)]
    firsts = torch.cat(drawn).flatten().tolist()  # 800 of 60,000 starts: about 5 meet by chance
    assert len(set(firsts)) > 770


@pytest.mark.parametrize("seed", np.random.default_rng().integers(0, 2**31, 2).tolist())
def test_every_window_is_as_likely_as_any_other(seed):
    n, length, draws = 13, 3, 20000
    starts = batch(tokens_of(n), length, seed, 0, range(draws))[0][:, 0]
    counts = torch.bincount(starts, minlength=10)
    assert len(counts) == n - length  # from 0 to the last window, which ends with the last token
    chi_square = ((counts - draws / 10) ** 2 / (draws / 10)).sum().item()
    assert chi_square < 40  # 9 degrees of freedom: once in 100,000 tries


def test_exactly_one_window_works_and_one_token_less_is_refused():
    x, y = batch(tokens_of(65), 64, 0, 0, range(5))
    assert torch.equal(x, torch.arange(64).expand(5, 64)) and torch.equal(y, torch.arange(1, 65).expand(5, 64))
    for n in (64, 1, 0):
        with pytest.raises(DataError, match=f"model.block_size: got 64, which needs 65 tokens .* has {n};"):
            batch(tokens_of(n), 64, 0, 0, range(5))


def test_windows_start_where_they_are_told():
    x, y = window(tokens_of(100), np.array([0, 50, 90]), 9)
    assert x[:, 0].tolist() == [0, 50, 90] and y[:, -1].tolist() == [9, 59, 99]


def test_a_batch_takes_less_than_a_third_of_a_millisecond(tmp_path):
    np.save(tmp_path / "tokens.npy", tokens_of(60000))
    tokens = np.load(tmp_path / "tokens.npy", mmap_mode="r")
    times = []
    for step in range(300):
        began = time.perf_counter()
        batch(tokens, 64, 0, step, range(12))
        times.append(time.perf_counter() - began)
    assert np.quantile(times, 0.2) < 3e-4  # a low quantile: other processes may be at work


def test_resident_memory_stays_flat_over_20000_batches_of_a_large_file(tmp_path):
    path = tmp_path / "large.npy"
    size = 260 * 2**20
    with open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<u2", "fortran_order": False, "shape": (size // 2,)})
        file.truncate(file.tell() + size)  # a hole: takes no disk
    code = """
import sys, numpy as np
from gpt.data import batch
tokens = np.load(sys.argv[1], mmap_mode="r")
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20
for step in range(200):
    batch(tokens, 64, 0, step, range(12))
before = highest = resident()
for step in range(20000):
    batch(tokens, 64, 0, step, range(12))
    if step % 500 == 0:
        highest = max(highest, resident())
print(highest - before)
"""
    if not Path("/proc/self/statm").exists():
        pytest.skip("resident memory is read from /proc, which this system lacks")
    done = run_python(code, path)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 20  # MiB; left mapped, it would be hundreds


# --------------------------------------------------------------------------------------------------- texts to documents


@relaxed
@given(st.text(max_size=60), st.integers(1, 9))
def test_a_text_read_in_blocks_is_the_text(tmp_path, text, block):
    path = tmp_path / "text"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpt.data, "BLOCK", block)
        assert "".join(read_blocks(path)) == text


@pytest.mark.parametrize("block", [1, 2, 3, 5, 2**20])
@pytest.mark.parametrize("bad", [b"\xff", b"\xe2\x28", b"\xed\xa0\x80", b"\xc0\xaf", b"\xe2\x82", b"\x80"])
def test_what_is_not_utf8_is_named_with_file_and_byte(tmp_path, monkeypatch, block, bad):
    monkeypatch.setattr(gpt.data, "BLOCK", block)
    path = tmp_path / "broken.txt"
    good = "good é漢 text ".encode()
    path.write_bytes(good + bad)
    with pytest.raises(DataError, match=f"broken.txt: byte {len(good)} \\(0x{bad[0]:02x}\\) is not UTF-8"):
        list(read_blocks(path))


@pytest.mark.parametrize("seed", np.random.default_rng().integers(0, 2**31, 3).tolist())
def test_a_single_text_is_cut_between_characters(tmp_path, seed):
    rng = np.random.default_rng(seed)
    path = tmp_path / "text.txt"
    text = random_text(rng, 500)
    path.write_bytes(text.encode())
    for fraction in rng.uniform(0.01, 0.99, 30):
        train, val = cut_in_two(path, fraction)
        train_text, val_text = "".join(train.blocks), "".join(val.blocks)
        assert train_text + val_text == text
        assert (train.split, train.ends, val.split, val.ends) == ("train", False, "val", True)
        assert abs(len(val_text.encode()) - fraction * len(text.encode())) <= 4


def test_documents_are_held_out_by_name_whatever_else_there_is():
    names = [f"chapter {i}" for i in range(2000)]
    val = held_out(names, 0.1)
    assert 140 < len(val) < 260
    assert held_out(names[:1000], 0.1) == val & set(names[:1000])
    for few in (["a", "b"], ["a", "b", "c"]):
        assert len(held_out(few, 1e-9)) == 1 and len(held_out(few, 0.999999)) == len(few) - 1


# -------------------------------------------------------------------------------------------------------- corpus: text


def test_a_folder_is_one_document_a_file(tmp_path):
    documents = {f"{i}.txt": f"text {i} <|endoftext|>\r\n" for i in range(20)} | {"deep/er/é.md": "a", "code.py": "b"}
    corpus = text_corpus(tmp_path, documents)
    for split in ("train", "val"):
        tokens, starts = getattr(corpus, split), getattr(corpus, f"{split}_documents")
        ends = [*starts[1:].tolist(), len(tokens)]
        found = [tokens[a:b].tolist() for a, b in zip(starts.tolist(), ends, strict=True)]
        names = [n for n in sorted(documents) if (n in held_out(documents, 0.1)) == (split == "val")]
        # a separator after every document, nowhere else
        assert found == [[*documents[name].encode(), 256] for name in names]
        n_bytes = sum(len(documents[name].encode()) for name in names)
        assert corpus.meta["splits"][split] == {"documents": len(names), "tokens": len(tokens), "bytes": n_bytes}


def test_a_single_text_keeps_its_end_for_validation(tmp_path):
    path = tmp_path / "book.anything"
    path.write_text("0123456789" * 10)
    corpus = prepare(DataConfig("text", path=str(path), val_fraction=0.2), BYTE, tmp_path / "data")
    assert corpus.tokenizer.decode(corpus.train) == "0123456789" * 8
    assert corpus.tokenizer.decode(corpus.val) == "0123456789" * 2
    assert 256 not in corpus.train and corpus.val.tolist().count(256) == 1 and corpus.val[-1] == 256
    assert corpus.train_documents.tolist() == corpus.val_documents.tolist() == [0]


def test_char_has_the_characters_of_both_splits_and_no_separator(tmp_path):
    documents = {f"{i}.txt": chr(97 + i) * 5 for i in range(8)}
    corpus = text_corpus(tmp_path, documents, CHAR)
    assert corpus.tokenizer.characters == "abcdefgh"
    assert len(corpus.train) + len(corpus.val) == 40 and len(corpus.train_documents) + len(corpus.val_documents) == 8


def test_what_is_left_out_of_a_folder_is_counted(tmp_path):
    folder = tmp_path / "texts"
    (folder / ".git").mkdir(parents=True)
    (folder / ".git" / "config.txt").write_text("hidden")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    (folder / "empty.txt").touch()
    (folder / "broken.txt").symlink_to(folder / "nowhere")
    corpus = text_corpus(tmp_path, {"a.txt": "a", "b.TXT": "b"})
    assert sum(split["documents"] for split in corpus.meta["splits"].values()) == 2
    assert corpus.meta["skipped"] == {
        "files of another kind": 1,
        "empty files": 1,
        "broken links or no plain files": 1,
        "hidden folders": 1,
    }
    assert "1 empty files" in corpus.summary()


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda p: None, "data.path: got .* which is not there"),
        (lambda p: p.mkdir(), "holds no text; allowed in a folder: files ending in .txt"),
        (lambda p: p.touch(), "is empty"),
        (lambda p: p.write_text("a"), "too little text, the train split is empty"),
        (lambda p: p.write_bytes(b"caf\xe9 au lait"), "byte 3 \\(0xe9\\) is not UTF-8"),
        (lambda p: os.mkfifo(p), "neither a file nor a folder"),
    ],
)
def test_texts_that_cannot_be_used(tmp_path, make, message):
    make(tmp_path / "given")
    with pytest.raises(DataError, match=message) as error:
        prepare(DataConfig("text", path=str(tmp_path / "given")), BYTE, tmp_path / "data", lambda _: None)
    assert "\n" not in str(error.value)
    left = [p.name for p in (tmp_path / "data").rglob("*") if p.is_file() and p.suffix != ".lock"]
    assert left == []


@pytest.mark.parametrize(
    "config, message",
    [
        (DataConfig("text"), "data.path: got null, allowed: a UTF-8 text file"),
        (DataConfig("text", path=""), "data.path: got ''"),
        (DataConfig("stdlib", path="here"), "data.path: got 'here', allowed: null"),
        (DataConfig("books"), "data.name: got 'books', allowed: stdlib | shakespeare_char | text"),
    ],
)
def test_keys_that_cannot_be_used(tmp_path, config, message):
    with pytest.raises(ConfigError, match=message):
        prepare(config, BYTE, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_texts_and_tokenizers_live_side_by_side(tmp_path):
    opened = {}
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "my book.txt").write_text(f"text of {place}, a hundred letters or so " * 3)
        config = DataConfig("text", path=str(tmp_path / place / "my book.txt"))
        for tokenizer in (BYTE, CHAR):
            opened[place, tokenizer.name] = prepare(config, tokenizer, tmp_path / "data")
    assert len({corpus.folder for corpus in opened.values()}) == 4
    for (place, name), corpus in opened.items():
        assert place in open_corpus(corpus.folder).tokenizer.decode(corpus.train)
        assert corpus.folder.name.startswith("my-book-") and corpus.folder.name.endswith(name)


# ------------------------------------------------------------------------------------------------------ corpus: stdlib


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    root = tmp_path_factory.mktemp("stdlib")
    began = time.monotonic()
    corpus = prepare(DataConfig("stdlib"), BYTE, root)
    return corpus, time.monotonic() - began


def test_the_standard_library_is_prepared_in_seconds(library):
    corpus, seconds = library
    assert seconds < 10
    assert 5e6 < len(corpus.train) + len(corpus.val) < 5e7
    assert 0.03 < len(corpus.val) / len(corpus.train) < 0.3
    assert corpus.meta["splits"]["train"]["documents"] > 300
    assert corpus.train[-1] == corpus.val[-1] == 256


def test_the_documents_are_the_files(library):
    corpus, _ = library
    text = {"train": [], "val": []}
    folder = Path(json.__file__).parents[1]
    for name in stdlib.files(folder):
        content = (folder / name).read_bytes()
        if content and name not in ("bad_coding.py",):
            text["val" if share(name) < 0.1 else "train"].append(content)
    for split in text:
        tokens, starts = getattr(corpus, split), getattr(corpus, f"{split}_documents").tolist()
        assert len(starts) == len(text[split])
        for i in np.random.default_rng().integers(0, len(starts), 20):
            end = starts[i + 1] if i + 1 < len(starts) else len(tokens)
            assert corpus.tokenizer.decode_bytes(tokens[starts[i] : end]) == text[split][i]


def test_which_files_the_library_has(tmp_path, monkeypatch):
    kept = [f"module{i}.py" for i in range(40)] + ["package/sub/deep.py"]
    left_out = ["test/a.py", "json/tests/b.py", "idlelib/idle_test/c.py", "site-packages/d.py", "dist-packages/e.py"]
    left_out += ["__pycache__/f.py", "g.pyc", "data.txt", "_sysconfigdata_linux.py", "sitecustomize.py"]
    library = tmp_path / "lib"
    for name in kept + left_out:
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text(f"# {name}\n")
    monkeypatch.setattr(stdlib.sysconfig, "get_path", lambda name: str(library))
    assert list(stdlib.files(library)) == sorted(kept, key=share)

    (library / "latin.py").write_bytes(b"# caf\xe9")
    (library / "__init__.py").touch()
    said = []
    corpus = prepare(DataConfig("stdlib", val_fraction=0.3), BYTE, tmp_path / "data", said.append)
    assert corpus.meta["skipped"] == {"empty": 1, "not UTF-8": 1}
    assert sum(split["documents"] for split in corpus.meta["splits"].values()) == len(kept)
    val = corpus.tokenizer.decode(corpus.val).splitlines()
    assert val == [f"# {name}" for name in sorted(kept, key=share) if share(name) < 0.3]
    assert corpus.folder.name == "byte-val0.3"

    (library / "module0.py").write_text("# changed and longer\n")
    again = prepare(DataConfig("stdlib", val_fraction=0.3), BYTE, tmp_path / "data", said.append)
    assert "again, because its source changed" in said[-1] and again.train_sha256 != corpus.train_sha256
    monkeypatch.setattr(stdlib.sysconfig, "get_path", lambda name: str(tmp_path / "data"))
    with pytest.raises(DataError, match="without the .py files"):
        prepare(DataConfig("stdlib"), BYTE, tmp_path / "data")


# --------------------------------------------------------------------------------------------- corpus: shakespeare_char


def test_shakespeare_is_nanogpts_to_the_token(tmp_path):
    path = ROOT.parent / "shared" / "data" / "tinyshakespeare.txt"
    path = next((p for p in (shakespeare_char.HERE, path) if p.exists()), None)
    if path is None:
        pytest.skip("tiny Shakespeare is not on this machine: put it at data/shakespeare_char/input.txt")
    corpus = prepare(DataConfig("shakespeare_char", path=str(path)), CHAR, tmp_path)
    text = path.read_text()
    stoi = {ch: i for i, ch in enumerate(sorted(set(text)))}
    n = len(text)
    assert corpus.train.tolist() == [stoi[c] for c in text[: int(n * 0.9)]]
    assert corpus.val.tolist() == [stoi[c] for c in text[int(n * 0.9) :]]
    assert (len(corpus.train), len(corpus.val), corpus.tokenizer.vocab_size) == (1003854, 111540, 65)


@pytest.fixture
def other_shakespeare(tmp_path, monkeypatch):
    """The corpus made to be a short text, so that the test needs none, with the places to look at in tmp_path."""
    text = "To be, or not to be, that is the question:\n" * 20
    monkeypatch.setattr(shakespeare_char, "SHA256", hashlib.sha256(text.encode()).hexdigest())
    monkeypatch.setattr(shakespeare_char, "HERE", tmp_path / "here.txt")
    monkeypatch.setattr(shakespeare_char, "BESIDE", tmp_path / "beside.txt")
    monkeypatch.setattr(shakespeare_char, "URL", "http://127.0.0.1:1/input.txt")
    monkeypatch.setenv("no_proxy", "*")
    return text


@pytest.mark.parametrize("place", ["here.txt", "beside.txt", "given.txt"])
def test_where_shakespeare_is_looked_for(tmp_path, other_shakespeare, place):
    (tmp_path / "here.txt").write_text("something else")
    (tmp_path / place).write_text(other_shakespeare)
    config = DataConfig("shakespeare_char", path=str(tmp_path / place) if place == "given.txt" else None)
    corpus = prepare(config, CHAR, tmp_path / "data", lambda _: None)
    assert corpus.tokenizer.decode(corpus.train) + corpus.tokenizer.decode(corpus.val) == other_shakespeare
    (tmp_path / place).unlink()  # prepared tokens need it no more, nor a network
    assert prepare(config, CHAR, tmp_path / "data", lambda _: None).train_sha256 == corpus.train_sha256


def test_shakespeare_offline_says_where_to_put_it(tmp_path, other_shakespeare):
    began = time.monotonic()
    with pytest.raises(DataError) as error:
        prepare(DataConfig("shakespeare_char"), CHAR, tmp_path / "data", lambda _: None)
    assert time.monotonic() - began < 5
    assert f"put that file at {tmp_path / 'here.txt'}, or say data.path=" in str(error.value)


def test_another_text_is_not_shakespeare(tmp_path, other_shakespeare):
    (tmp_path / "mine.txt").write_text("mine")
    mine = DataConfig("shakespeare_char", path=str(tmp_path / "mine.txt"))
    with pytest.raises(DataError, match="which is no file"):
        prepare(DataConfig("shakespeare_char", path=str(tmp_path / "none.txt")), CHAR, tmp_path / "data")
    with pytest.raises(DataError, match="mine.txt is not the tiny Shakespeare .* data=text data.path="):
        prepare(mine, CHAR, tmp_path / "data")
    (tmp_path / "here.txt").write_text(other_shakespeare)
    prepare(DataConfig("shakespeare_char"), CHAR, tmp_path / "data")
    with pytest.raises(DataError, match="mine.txt is not the tiny Shakespeare"):  # not passed over for what is prepared
        prepare(mine, CHAR, tmp_path / "data")


# ------------------------------------------------------------------------------------------- prepared once, and whole


DOCUMENTS = {f"{i}.txt": f"document {i} with some words in it\n" * 5 for i in range(12)}


def snapshot(folder: Path) -> dict:
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


def test_prepared_once(tmp_path):
    said = []
    first = text_corpus(tmp_path, DOCUMENTS, log=said)
    times = snapshot(first.folder)
    config = DataConfig("text", path=str(tmp_path / "texts"))
    second = prepare(config, BYTE, tmp_path / "data", said.append)
    assert snapshot(second.folder) == times and len(said) == 1
    assert (
        second.train_sha256
        == first.train_sha256
        == hashlib.sha256((first.folder / "train.npy").read_bytes()).hexdigest()
    )
    assert not second.train.flags.writeable and isinstance(second.train, np.memmap)
    assert second.train.dtype == np.uint16 and second.train_documents.dtype == np.uint64


def test_a_source_that_changed_is_prepared_again_and_one_that_is_gone_is_not_needed(tmp_path):
    said = []
    first = text_corpus(tmp_path, DOCUMENTS, log=said)
    second = text_corpus(tmp_path, {"new.txt": "a new document"}, log=said)
    assert "again, because its source changed" in said[-1]
    assert len(second.train) + len(second.val) == len(first.train) + len(first.val) + 15
    shutil.rmtree(tmp_path / "texts")
    (tmp_path / "texts").mkdir()
    config = DataConfig("text", path=str(tmp_path / "texts"))
    with pytest.raises(DataError, match="holds no text"):  # emptied is not gone
        prepare(config, BYTE, tmp_path / "data", said.append)
    (tmp_path / "texts").rmdir()
    third = prepare(config, BYTE, tmp_path / "data", said.append)
    assert third.train_sha256 == second.train_sha256 and "its source is gone" in said[-1]
    (third.folder / "train.npy").write_bytes(b"")
    with pytest.raises(DataError, match="not there"):
        prepare(config, BYTE, tmp_path / "data", said.append)


def rewrite(folder: Path, file: str, ids: np.ndarray, pickled: bool = False) -> None:
    """Another token file, with a meta.json that agrees about its size, sha256, type and count."""
    np.save(folder / file, ids, allow_pickle=pickled)
    meta = json.loads((folder / "meta.json").read_text())
    content = (folder / file).read_bytes()
    meta["files"][file] = {
        "size": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "dtype": ids.dtype.name,
        "count": ids.size,
    }
    split = file.split("_")[0].removesuffix(".npy")
    meta["splits"][split]["documents" if "_" in file else "tokens"] = ids.size
    (folder / "meta.json").write_text(json.dumps(meta))


def change(folder: Path, **changes) -> None:
    meta = json.loads((folder / "meta.json").read_text()) | changes
    (folder / "meta.json").write_text(json.dumps(meta))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[np.random.default_rng().integers(128, len(content))] ^= 1
    path.write_bytes(content)


def drop(folder: Path, key: str) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    del meta[key]
    (folder / "meta.json").write_text(json.dumps(meta))


IDS = np.arange(500).astype(np.uint16) % 256
DAMAGE = {
    "shorter by a byte": (
        lambda f: os.truncate(f / "train.npy", (f / "train.npy").stat().st_size - 1),
        "train.npy: .* bytes, expected",
    ),
    "longer": (lambda f: open(f / "val.npy", "ab").write(b"xx"), "val.npy: .* bytes, expected"),
    "emptied": (lambda f: (f / "train.npy").write_bytes(b""), "train.npy: 0 bytes, but no .npy file"),
    "header only": (lambda f: os.truncate(f / "train.npy", 100), "train.npy: 100 bytes, but no .npy file"),
    "no tokens": (lambda f: rewrite(f, "train.npy", IDS[:0]), "train.npy: has the shape \\(0,\\), expected"),
    "two dimensions": (lambda f: rewrite(f, "train.npy", IDS.reshape(5, 100)), "train.npy: has the shape \\(5, 100\\)"),
    "another type": (
        lambda f: rewrite(f, "train.npy", IDS.astype(np.int64)),
        "train.npy: holds int64, expected uint16",
    ),
    "wider": (lambda f: rewrite(f, "val.npy", IDS.astype(np.uint32)), "val.npy: holds uint32, expected uint16"),
    "big-endian": (lambda f: rewrite(f, "val.npy", IDS.astype(">u2")), "val.npy: holds >u2, expected uint16"),
    "a pickle": (lambda f: rewrite(f, "val.npy", np.array([1, None]), True), "val.npy: holds object, expected uint16"),
    "an unknown id": (
        lambda f: rewrite(f, "train.npy", np.where(np.arange(500) == 321, 257, IDS).astype(np.uint16)),
        "train.npy: token id 257 at index 321, allowed: 0 to 256",
    ),
    "a bit": (lambda f: flip(f / "val.npy"), "val.npy: damaged, its sha256 is"),
    "a bit of the offsets": (lambda f: flip(f / "train_documents.npy"), "train_documents.npy: damaged"),
    "offsets past the end": (
        lambda f: rewrite(f, "val_documents.npy", np.array([0, 10**9], dtype=np.uint64)),
        "val_documents.npy: starts must rise from 0",
    ),
    "a file missing": (lambda f: (f / "val.npy").unlink(), "val.npy: not there"),
    "another file's tokens": (lambda f: shutil.copy(f / "val.npy", f / "train.npy"), "train.npy: .* meta.json says"),
    "no metadata": (lambda f: (f / "meta.json").unlink(), "meta.json: not there"),
    "half the metadata": (lambda f: os.truncate(f / "meta.json", 200), "meta.json: not whole"),
    "metadata of nothing": (lambda f: (f / "meta.json").write_text("[]"), "meta.json: format '\\[\\]', expected 1"),
    "binary metadata": (lambda f: (f / "meta.json").write_bytes(b"\xff\xfe\x00"), "meta.json: not whole"),
    "another format": (lambda f: change(f, format=99), "meta.json: format '99', expected 1"),
    "metadata without files": (lambda f: drop(f, "files"), "meta.json: something is missing"),
    "metadata without a source": (lambda f: drop(f, "source"), "meta.json: something is missing"),
    "files of another type": (lambda f: change(f, files=3), "meta.json: something is missing"),
    "other counts": (
        lambda f: change(f, splits={"train": {"documents": 1, "tokens": 1, "bytes": 1}}),
        "counts of train",
    ),
    "another tokenizer": (
        lambda f: change(f, tokenizer=CharTokenizer("ab").state()),
        "tokenizer does not have the sha256",
    ),
    "an unknown tokenizer": (lambda f: change(f, tokenizer={"name": "x"}), "tokenizer: got the state"),
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A prepared corpus, to be copied and damaged."""
    place = tmp_path_factory.mktemp("prepared")
    return place, text_corpus(place, DOCUMENTS)


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_at_opening_and_mended_by_preparing(prepared, tmp_path, damage):
    place, good = prepared
    shutil.copytree(place / "data", tmp_path / "data")
    folder = tmp_path / "data" / "text" / good.folder.name
    assert open_corpus(folder).train_sha256 == good.train_sha256
    spoil, message = DAMAGE[damage]
    spoil(folder)
    with pytest.raises(DataError, match=message) as error:
        open_corpus(folder)
    assert "\n" not in str(error.value) and "python data/prepare.py data=text" in str(error.value)
    said = []
    mended = prepare(DataConfig("text", path=str(place / "texts")), BYTE, tmp_path / "data", said.append)
    assert len(said) == 1 and "preparing again, because" in said[0]
    assert (mended.train_sha256, mended.val_sha256) == (good.train_sha256, good.val_sha256)
    assert sorted(p.name for p in folder.parent.iterdir()) == sorted([".preparing", folder.name])


def test_a_folder_that_holds_another_tokenizer_is_prepared_again(prepared, tmp_path):
    place, good = prepared
    wrong = tmp_path / "data" / "text" / good.folder.name.replace("byte", "char")
    shutil.copytree(good.folder, wrong)
    said = []
    corpus = prepare(DataConfig("text", path=str(place / "texts")), CHAR, tmp_path / "data", said.append)
    assert corpus.tokenizer.name == "char" and "it holds tokenizer=byte" in said[0]


def test_ids_outside_of_the_vocabulary_are_refused_while_preparing(tmp_path):
    file = TokenFile(tmp_path / "ids.npy", np.dtype(np.uint16), vocab_size=50000)
    file.write(np.array([1, 2, 3]))
    with pytest.raises(DataError, match="token id 70,000 at index 5, allowed: 0 to 49,999"):
        file.write(np.array([4, 5, 70000]))
    with pytest.raises(DataError, match="token id -1 at index 3"):
        file.write(np.array([-1]))
    assert file.finish()["count"] == 3 and np.load(tmp_path / "ids.npy").tolist() == [1, 2, 3]


def test_a_tokenizer_that_leaves_its_vocabulary_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(ByteTokenizer, "encode", lambda self, text: np.full(len(text), 70000))
    with pytest.raises(DataError, match="token id 70,000 at index 0"):
        text_corpus(tmp_path, DOCUMENTS)
    assert [p for p in (tmp_path / "data").rglob("*") if p.is_file() and p.suffix != ".lock"] == []


def test_a_vocabulary_of_more_than_65536_ids_is_stored_in_uint32(tmp_path):
    text = "".join(map(chr, range(0x10000, 0x10000 + 70000)))
    (tmp_path / "all.txt").write_text(text)
    corpus = prepare(DataConfig("text", path=str(tmp_path / "all.txt")), CHAR, tmp_path / "data")
    assert corpus.train.dtype == np.uint32 and corpus.train.tolist() == list(range(63000))
    assert batch(corpus.val, 6999, 0, 0, range(1))[1][0, -1] == 69999


@pytest.mark.parametrize("moment", ["write_json", "os.rename", "TokenFile.finish"])
def test_a_killed_preparation_does_not_count(tmp_path, moment):
    text_corpus(tmp_path, DOCUMENTS)
    (tmp_path / "texts" / "0.txt").write_text("changed")
    code = """
import os, sys
import gpt.data
from gpt.data import *
place, _, name = sys.argv[2].rpartition(".")
setattr(eval("gpt.data." + place) if place else gpt.data, name, lambda *_: os._exit(9))
prepare(DataConfig("text", path=sys.argv[1] + "/texts"), TokenizerConfig("byte"), Path(sys.argv[1]) / "data")
"""
    assert run_python(code, tmp_path, moment).returncode == 9
    said = []
    corpus = text_corpus(tmp_path, {}, log=said)
    assert "again, because its source changed" in said[0]
    assert len(corpus.train) + len(corpus.val) == sum(
        len(text) + 1 for text in {**DOCUMENTS, "0.txt": "changed"}.values()
    )
    assert [p.suffix for p in (corpus.folder.parent / ".preparing").iterdir()] == [".lock"]


def test_processes_that_prepare_the_same_wait_for_each_other(tmp_path):
    (tmp_path / "texts").mkdir()
    for i in range(30):
        (tmp_path / "texts" / f"{i}.txt").write_text(f"{i} words " * 20000)
    code = """
import sys
from gpt.data import *
corpus = prepare(DataConfig("text", path=sys.argv[1] + "/texts"), TokenizerConfig("char"), Path(sys.argv[1]) / "data")
print(corpus.train_sha256)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, str(tmp_path)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(3)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len({output.split()[-1] for output in outputs}) == 1
    assert sum(": preparing\n" in output for output in outputs) == 1


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "data").write_text("a file where the folder should be")
    with pytest.raises(DataError, match="cannot be prepared"):
        text_corpus(tmp_path, DOCUMENTS)


def test_a_large_file_is_verified_once(prepared, tmp_path, monkeypatch):
    folder = tmp_path / "byte"
    shutil.copytree(prepared[1].folder, folder)
    monkeypatch.setattr(gpt.data, "LARGE", 100)
    hashed = []
    sha256_of = gpt.data.sha256_of
    monkeypatch.setattr(gpt.data, "sha256_of", lambda path: hashed.append(path.name) or sha256_of(path))
    open_corpus(folder)
    assert sorted(hashed) == ["train.npy", "train_documents.npy", "val.npy", "val_documents.npy"]
    open_corpus(folder)
    assert len(hashed) == 4
    flip(folder / "train.npy")
    with pytest.raises(DataError, match="train.npy: damaged"):
        open_corpus(folder)
    (folder / "train.verified.json").write_text("nonsense")
    with pytest.raises(DataError, match="train.npy: damaged"):
        open_corpus(folder)


@pytest.mark.parametrize("tokenizer", ["byte", "char"])
def test_memory_does_not_grow_with_the_text(tmp_path, tokenizer):
    with open(tmp_path / "large.txt", "w", encoding="utf-8") as file:
        for i in range(24):
            file.write(f"{i} 👩 some words of a long text\n" * (2**20 // 32))
    code = """
import resource, sys
from gpt.data import *
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


# --------------------------------------------------------------------------------------------------------- from outside


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
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        config = compose("train", overrides)
    assert (config.data.name, config.tokenizer) == (name, {"name": tokenizer})
    assert set(config.data) == {"name", "path", "val_fraction"} and config.data.val_fraction == 0.1


@pytest.mark.parametrize(
    "arguments, code, expected",
    [
        (["data=stdlib", "tokenizer=byte"], 0, "standard library of Python"),
        (["--help"], 0, "python data/prepare.py data=text"),
        (["data=text", "data.path=/not/there"], 2, "error: data.path: got '/not/there'"),
        (["data=novels"], 2, "error: data: got 'novels'"),
    ],
)
def test_the_command(arguments, code, expected):
    command = [sys.executable, "data/prepare.py", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    assert expected in done.stdout + done.stderr and "Traceback" not in done.stderr
    assert code == 0 or done.stderr.count("\n") == 1
