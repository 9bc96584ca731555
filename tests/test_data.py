"""Corpora are prepared once, whole or not at all; opening checks everything; a batch is a function of its address."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import data.shakespeare_char as shakespeare_char
import data.stdlib as stdlib
import gpt.corpus
import gpt.documents
import gpt.prepare
from gpt.cli import compose
from gpt.corpus import find_corpus, open_corpus
from gpt.data import batch, window
from gpt.documents import cut_text, hash_share, read_blocks, splits_of
from gpt.errors import ConfigError, DataError
from gpt.prepare import TokenFile, check_source, prepare
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


def run_python(code: str, *arguments: object, timeout: float = 300) -> subprocess.CompletedProcess:
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


@pytest.mark.parametrize("seed", np.random.default_rng().integers(0, 2**31, 2).tolist(), ids="12")
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


def philox(key: tuple[int, int], counter: list[int]) -> list[int]:
    """Four 64-bit numbers of Philox4x64-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3")."""
    mask = 2**64 - 1
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(10):
        a, b = c0 * 0xD2E7470EE14C6C93, c2 * 0xCA5A826395121157
        c0, c1, c2, c3 = (b >> 64) ^ c1 ^ k0, b & mask, (a >> 64) ^ c3 ^ k1, a & mask
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
    return [c0, c1, c2, c3]


def offset(starts: int, seed: int, step: int, row: int) -> int:
    """Where a row starts, written down a second time: number `row` of the stream of (seed, step), modulo `starts`."""
    return philox((seed, int.from_bytes(b"nanoPE", "big")), [row // 4 + 1, 0, 0, step])[row % 4] % starts


@relaxed
@given(st.integers(0, 2**63 - 1), st.integers(0, 2**40), st.integers(0, 200))
def test_a_row_starts_where_philox_says(seed, step, row):
    x, _ = batch(tokens_of(60008), 8, seed, step, range(row, row + 1))
    assert x[0, 0] == offset(60000, seed, step, row)


@pytest.mark.parametrize(
    "seed, step, row, expected",
    [
        (0, 0, 0, 724056),
        (0, 0, 11, 871097),
        (0, 2999, 0, 785641),
        (1, 0, 0, 972786),
        (1337, 500, 7, 842636),
        (2**40, 10**6, 1000, 812639),
    ],
)
def test_batches_stay_the_same_from_version_to_version(seed, step, row, expected):
    """A change here makes every run that was ever published unrepeatable."""
    x, y = batch(np.arange(10**6 + 64, dtype=np.uint32), 64, seed, step, range(row, row + 1))
    assert x.tolist() == [list(range(expected, expected + 64))] and y[0, -1] == expected + 64


def large_file(folder: Path, size: int = 260 * 2**20) -> Path:
    """A token file of this many bytes that takes no disk: a hole."""
    path = folder / "large.npy"
    with open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<u2", "fortran_order": False, "shape": (size // 2,)})
        file.truncate(file.tell() + size)
    return path


def test_a_batch_costs_its_own_size_whatever_the_corpus_has(tmp_path):
    tokens = np.load(large_file(tmp_path), mmap_mode="r")
    batch(tokens, 64, 0, 0, range(12))  # imports
    tracemalloc.start()
    try:
        batch(tokens, 64, 0, 1, range(12))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 12 * 65 * 32 + 20000  # bytes: indices, ids, inputs and targets, and what Python needs for a call


def test_importing_the_rooms_of_data_imports_nothing_heavy():
    code = "import sys, gpt.prepare, gpt.data, data; print(*sys.modules)"
    loaded = set(run_python(code).stdout.split())
    assert "gpt.prepare" in loaded and not loaded & {"torch", "tiktoken", "filelock", "hydra", "wandb", "matplotlib"}


def test_resident_memory_stays_flat_over_20000_batches_of_a_large_file(tmp_path):
    path = large_file(tmp_path)
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
        patch.setattr(gpt.documents, "BLOCK", block)
        assert "".join(read_blocks(path)) == text


@pytest.mark.parametrize("block", [1, 2, 3, 5, 2**20])
@pytest.mark.parametrize("bad", [b"\xff", b"\xe2\x28", b"\xed\xa0\x80", b"\xc0\xaf", b"\xe2\x82", b"\x80"])
def test_what_is_not_utf8_is_named_with_file_and_byte(tmp_path, monkeypatch, block, bad):
    monkeypatch.setattr(gpt.documents, "BLOCK", block)
    path = tmp_path / "broken.txt"
    good = "good é漢 text ".encode()
    path.write_bytes(good + bad)
    with pytest.raises(DataError, match=f"broken.txt: byte {len(good)} \\(0x{bad[0]:02x}\\) is not UTF-8"):
        list(read_blocks(path))


@pytest.mark.parametrize("seed", np.random.default_rng().integers(0, 2**31, 3).tolist(), ids="123")
def test_a_single_text_is_cut_between_characters(tmp_path, seed):
    rng = np.random.default_rng(seed)
    path = tmp_path / "text.txt"
    text = random_text(rng, 500)
    path.write_bytes(text.encode())
    size = len(text.encode())
    for fraction, test_fraction in rng.uniform(0.01, 0.49, (30, 2)):
        train, test, val = cut_text(path, fraction, test_fraction)
        texts = ["".join(document.blocks) for document in (train, test, val)]
        assert "".join(texts) == text
        assert [(d.split, d.ends) for d in (train, test, val)] == [("train", False), ("test", False), ("val", True)]
        assert abs(len(texts[2].encode()) - fraction * size) <= 4
        assert abs(len(texts[1].encode()) - test_fraction * size) <= 8
        before, same = cut_text(path, fraction, 0)  # without a test: the same validation
        assert "".join(before.blocks) == texts[0] + texts[1] and "".join(same.blocks) == texts[2]


def test_documents_are_held_out_by_name_whatever_else_there_is():
    names = [f"chapter {i}" for i in range(2000)]
    splits = splits_of(names, 0.1, 0.05)
    for name, split in splits.items():
        share = int(hashlib.sha256(name.encode()).hexdigest()[:12], 16) / 16**12
        assert split == ("val" if share < 0.1 else "test" if share < 0.15 else "train")
    assert splits_of(names[:1000], 0.1, 0.05) == {name: splits[name] for name in names[:1000]}


@pytest.mark.parametrize("fraction", [1e-9, 0.1, 0.9])
@pytest.mark.parametrize("few", ["ab", "abc", "abcd", "abcde"])
def test_of_a_few_documents_each_split_has_one(few, fraction):
    splits = list(splits_of(few, fraction, 0.05).values())
    assert splits.count("train") >= 1 and splits.count("val") >= 1
    assert fraction == 0.9 or splits.count("test") == (1 if len(few) > 2 else 0)
    without = splits_of(few, fraction, 0.0)
    assert set(without.values()) == {"train", "val"}
    assert [n for n in few if without[n] == "val"] == [n for n in few if splits_of(few, fraction, 0.05)[n] == "val"]


# -------------------------------------------------------------------------------------------------------- corpus: text


def test_a_folder_is_one_document_a_file(tmp_path):
    documents = {f"{i}.txt": f"text {i} <|endoftext|>\r\n" for i in range(20)} | {"deep/er/é.md": "a", "code.py": "b"}
    corpus = text_corpus(tmp_path, documents)
    splits = splits_of(documents, 0.1, 0.05)
    for split in ("train", "val", "test"):
        tokens, starts = getattr(corpus, split), getattr(corpus, f"{split}_documents")
        ends = [*starts[1:].tolist(), len(tokens)]
        found = [tokens[a:b].tolist() for a, b in zip(starts.tolist(), ends, strict=True)]
        names = [n for n in sorted(documents) if splits[n] == split]
        # a separator after every document, nowhere else
        assert found == [[*documents[name].encode(), 256] for name in names]
        n_bytes = sum(len(documents[name].encode()) for name in names)
        assert corpus.meta["splits"][split] == {"documents": len(names), "tokens": len(tokens), "bytes": n_bytes}


def test_a_single_text_keeps_its_end_for_validation(tmp_path):
    path = tmp_path / "book.anything"
    path.write_text("0123456789" * 10)
    config = DataConfig("text", path=str(path), val_fraction=0.2, test_fraction=0.1)
    corpus = prepare(config, BYTE, tmp_path / "data")
    assert corpus.tokenizer.decode(corpus.train) == "0123456789" * 7
    assert corpus.tokenizer.decode(corpus.test) == "0123456789"
    assert corpus.tokenizer.decode(corpus.val) == "0123456789" * 2
    assert (
        256 not in corpus.test
        and 256 not in corpus.train
        and corpus.val.tolist().count(256) == 1
        and corpus.val[-1] == 256
    )
    assert corpus.train_documents.tolist() == corpus.test_documents.tolist() == corpus.val_documents.tolist() == [0]


def test_the_test_split_is_taken_from_the_training_text_alone(tmp_path):
    """And where it is not wanted, there is none: no file, no counts, and the validation text is the same."""
    sealed, without = text_corpus(tmp_path, DOCUMENTS), text_corpus(tmp_path, {}, test_fraction=0.0)
    assert sealed.val_sha256 == without.val_sha256 and sealed.train_sha256 != without.train_sha256
    assert len(sealed.train) + len(sealed.test) == len(without.train) and len(sealed.test) > 0
    assert sealed.meta["splits"]["test"] == {
        "documents": len(sealed.test_documents),
        "tokens": len(sealed.test),
        "bytes": len(sealed.tokenizer.decode_bytes(sealed.test)),
    }
    assert re.search(rf"^  test +{len(sealed.test_documents)} ", sealed.summary(), re.MULTILINE)
    assert len(without.test) == len(without.test_documents) == 0 and without.test_sha256 == ""
    assert without.test.dtype == without.train.dtype
    assert without.meta["splits"]["test"] == {"documents": 0, "tokens": 0, "bytes": 0}
    assert not list(without.folder.glob("test*")) and "test0.0" in without.folder.name
    with pytest.raises(ConfigError, match="data.test_fraction: got 0.9, allowed: below 0.9, since data.val_fraction"):
        text_corpus(tmp_path, {}, test_fraction=0.9)


def test_char_has_the_characters_of_all_splits_and_no_separator(tmp_path):
    documents = {f"{i}.txt": chr(97 + i) * 5 for i in range(8)}
    corpus = text_corpus(tmp_path, documents, CHAR)
    assert corpus.tokenizer.characters == "abcdefgh"
    assert len(corpus.train) + len(corpus.val) + len(corpus.test) == 40
    assert len(corpus.train_documents) + len(corpus.val_documents) + len(corpus.test_documents) == 8


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
        assert re.fullmatch(f"my-book-[0-9a-f]{{8}}-{name}-[0-9a-f]{{8}}", corpus.folder.name)


# ------------------------------------------------------------------------------------------------------ corpus: stdlib


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    root = tmp_path_factory.mktemp("stdlib")
    read, real = [], Path.read_bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "read_bytes", lambda path: read.append(path) or real(path))
        corpus = prepare(DataConfig("stdlib"), BYTE, root)
    return corpus, read


def test_the_standard_library_is_read_once(library):
    corpus, read = library
    assert len(read) == len(set(read)) == len(stdlib.files(Path(json.__file__).parents[1]))
    assert 5e6 < len(corpus.train) + len(corpus.val) < 5e7
    assert 0.03 < len(corpus.val) / len(corpus.train) < 0.3 and 0.01 < len(corpus.test) / len(corpus.train) < 0.15
    assert corpus.meta["splits"]["train"]["documents"] > 300
    assert corpus.train[-1] == corpus.val[-1] == 256


def test_the_documents_are_the_files(library):
    corpus, _ = library
    text = {"train": [], "val": [], "test": []}
    folder = Path(json.__file__).parents[1]
    for name in stdlib.files(folder):
        content = (folder / name).read_bytes()
        if content and name not in ("bad_coding.py",):
            share = hash_share(name)
            text["val" if share < 0.1 else "test" if share < 0.15 else "train"].append(content)
    for split in text:
        tokens, starts = getattr(corpus, split), getattr(corpus, f"{split}_documents").tolist()
        assert len(starts) == len(text[split])
        for i in np.random.default_rng().integers(0, len(starts), 20):
            end = starts[i + 1] if i + 1 < len(starts) else len(tokens)
            assert corpus.tokenizer.decode_bytes(tokens[starts[i] : end]) == text[split][i]


def test_which_files_the_library_has(tmp_path, monkeypatch):
    kept = [f"module{i}.py" for i in range(40)] + ["package/sub/deep.py"]
    left_out = ["test/a.py", "json/tests/b.py", "idlelib/idle_test/c.py", "site-packages/d.py", "dist-packages/e.py"]
    left_out += [
        "config-3.11-x86_64-linux-gnu/python-config.py",
        "__pycache__/f.py",
        "g.pyc",
        "data.txt",
        "_sysconfigdata_linux.py",
        "sitecustomize.py",
    ]
    library = tmp_path / "lib"
    for name in kept + left_out:
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text(f"# {name}\n")
    monkeypatch.setattr(stdlib.sysconfig, "get_path", lambda name: str(library))
    assert list(stdlib.files(library)) == sorted(kept, key=hash_share)

    (library / "latin.py").write_bytes(b"# caf\xe9")
    (library / "__init__.py").touch()
    said = []
    corpus = prepare(DataConfig("stdlib", val_fraction=0.3), BYTE, tmp_path / "data", said.append)
    assert corpus.meta["skipped"] == {"empty": 1, "not UTF-8": 1}
    assert sum(split["documents"] for split in corpus.meta["splits"].values()) == len(kept)
    val = corpus.tokenizer.decode(corpus.val).splitlines()
    assert val == [f"# {name}" for name in sorted(kept, key=hash_share) if hash_share(name) < 0.3]
    assert re.fullmatch("byte-val0.3-[0-9a-f]{8}", corpus.folder.name)

    (library / "module0.py").write_text("# changed and longer\n")
    again = prepare(DataConfig("stdlib", val_fraction=0.3), BYTE, tmp_path / "data", said.append)
    assert again.test_sha256 != corpus.test_sha256 and again.folder != corpus.folder  # its hash puts it there
    assert open_corpus(corpus.folder).train_sha256 == corpus.train_sha256
    monkeypatch.setattr(stdlib.sysconfig, "get_path", lambda name: str(tmp_path / "data"))
    with pytest.raises(DataError, match="without the .py files"):
        prepare(DataConfig("stdlib"), BYTE, tmp_path / "data")


def test_the_same_library_on_another_machine_is_the_same_corpus(tmp_path, monkeypatch):
    """Elsewhere, written at another time, listed in another order, with what an installation adds of its own."""
    corpora = []
    for place in ("here/python3", "there/lib/python3"):
        library = tmp_path / place
        names = [f"module{i}.py" for i in range(20)]
        for name in names if place.startswith("here") else names[::-1]:
            (library / name).parent.mkdir(parents=True, exist_ok=True)
            (library / name).write_text(f"# {name}\n")
        config = library / f"config-{place[0]}-linux" / "python-config.py"
        config.parent.mkdir()
        config.write_text(f"prefix = {str(library)!r}\n")
        monkeypatch.setattr(stdlib.sysconfig, "get_path", lambda name, library=library: str(library))
        corpora.append(prepare(DataConfig("stdlib"), BYTE, tmp_path / place[:4], lambda _: None))
    assert corpora[0].folder.name == corpora[1].folder.name
    assert corpora[0].train_sha256 == corpora[1].train_sha256


# --------------------------------------------------------------------------------------------- corpus: shakespeare_char


def test_shakespeare_is_nanogpts_to_the_token(tmp_path):
    path = next((p for p in shakespeare_char.ELSEWHERE if p.exists()), None)
    if path is None:
        pytest.skip("tiny Shakespeare is not on this machine: put it at data/shakespeare_char/input.txt")
    corpus = prepare(DataConfig("shakespeare_char", path=str(path), test_fraction=0.0), CHAR, tmp_path)
    text = path.read_text()
    stoi = {ch: i for i, ch in enumerate(sorted(set(text)))}
    n = len(text)
    assert corpus.train.tolist() == [stoi[c] for c in text[: int(n * 0.9)]]
    assert corpus.val.tolist() == [stoi[c] for c in text[int(n * 0.9) :]]
    assert (len(corpus.train), len(corpus.val), corpus.tokenizer.vocab_size) == (1003854, 111540, 65)


@pytest.fixture
def other_shakespeare(tmp_path, monkeypatch):
    """The corpus made to be a short text, so that the test needs none, with the places to look at in tmp_path."""
    monkeypatch.chdir(tmp_path)
    text = "To be, or not to be, that is the question:\n" * 20
    monkeypatch.setattr(shakespeare_char, "SHA256", hashlib.sha256(text.encode()).hexdigest())
    (tmp_path / "data/shakespeare_char").mkdir(parents=True)
    monkeypatch.setattr(shakespeare_char, "ELSEWHERE", (tmp_path / "repository.txt", tmp_path / "beside.txt"))
    monkeypatch.setattr(shakespeare_char, "URL", "http://127.0.0.1:1/input.txt")
    monkeypatch.setenv("no_proxy", "*")
    return text


HERE = "data/shakespeare_char/input.txt"


@pytest.mark.parametrize("place", [HERE, "repository.txt", "beside.txt", "given.txt"])
def test_where_shakespeare_is_looked_for(tmp_path, other_shakespeare, place):
    (tmp_path / HERE).write_text("something else")
    (tmp_path / place).write_text(other_shakespeare)
    config = DataConfig("shakespeare_char", path=str(tmp_path / place) if place == "given.txt" else None)
    corpus = prepare(config, CHAR, tmp_path / "data", lambda _: None)
    splits = (corpus.train, corpus.test, corpus.val)
    assert "".join(map(corpus.tokenizer.decode, splits)) == other_shakespeare
    (tmp_path / place).unlink()  # prepared tokens need it no more, nor a network
    assert prepare(config, CHAR, tmp_path / "data", lambda _: None).train_sha256 == corpus.train_sha256


def test_shakespeare_offline_says_where_to_put_it(tmp_path, other_shakespeare):
    with pytest.raises(DataError) as error:
        prepare(DataConfig("shakespeare_char"), CHAR, tmp_path / "data", lambda _: None)
    assert f"put that file at {HERE}, or say data.path=" in str(error.value)


def test_shakespeare_is_downloaded_below_the_working_directory(tmp_path, other_shakespeare, monkeypatch):
    asked = []
    monkeypatch.setattr(
        shakespeare_char, "download", lambda url, sha256, to: asked.append(to) or to.write_text(other_shakespeare)
    )
    for tokenizer in (CHAR, BYTE):  # once, for both
        prepare(DataConfig("shakespeare_char"), tokenizer, log=lambda _: None)
    assert asked == [Path(HERE)]


def test_another_text_is_not_shakespeare(tmp_path, other_shakespeare):
    (tmp_path / "mine.txt").write_text("mine")
    mine = DataConfig("shakespeare_char", path=str(tmp_path / "mine.txt"))
    with pytest.raises(DataError, match="which is no file"):
        prepare(DataConfig("shakespeare_char", path=str(tmp_path / "none.txt")), CHAR, tmp_path / "data")
    with pytest.raises(DataError, match="mine.txt is not the tiny Shakespeare .* data=text data.path="):
        prepare(mine, CHAR, tmp_path / "data")
    (tmp_path / HERE).write_text(other_shakespeare)
    prepare(DataConfig("shakespeare_char"), CHAR, tmp_path / "data")
    with pytest.raises(DataError, match="mine.txt is not the tiny Shakespeare"):  # not passed over for what is prepared
        prepare(mine, CHAR, tmp_path / "data")


# ------------------------------------------------------------------------------------------- prepared once, and whole


DOCUMENTS = {f"{i}.txt": f"document {i} with some words in it\n" * 5 for i in range(12)}


def size(corpus) -> int:
    return sum(len(getattr(corpus, split)) for split in ("train", "val", "test"))


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
        (found.folder / "train.npy").write_bytes(b"")
    with pytest.raises(DataError, match="holds no text" if emptied else "not there"):
        prepare(config, BYTE, tmp_path / "data", said.append)
    with pytest.raises(DataError, match="holds no text" if emptied else "not there"):
        check_source(config, CHAR, tmp_path / "data")


def test_another_format_leaves_what_an_older_version_prepared(tmp_path, monkeypatch):
    first = text_corpus(tmp_path, DOCUMENTS)
    times = snapshot(first.folder)
    for room in (gpt.corpus, gpt.prepare):
        monkeypatch.setattr(room, "FORMAT", 99)
    assert text_corpus(tmp_path, {}).folder != first.folder and snapshot(first.folder) == times


def test_fractions_that_differ_in_the_last_place_are_two_corpora(tmp_path):
    one = text_corpus(tmp_path, DOCUMENTS, val_fraction=0.123456789)
    assert text_corpus(tmp_path, {}, val_fraction=0.123456788).folder != one.folder


@pytest.mark.parametrize("corpus", ["text", "shakespeare_char"])
def test_a_path_that_cannot_be_looked_at_is_one_line(tmp_path, corpus):
    with pytest.raises(DataError, match="data.path: .*aaa.* cannot be read .File name too long"):
        prepare(DataConfig(corpus, path=str(tmp_path / ("a" * 300))), BYTE, tmp_path / "data")


# ------------------------------------------------------------------------------------------------- found by their hash


def found(tmp_path: Path, corpus, tokenizer=BYTE, path="whatever"):
    return find_corpus(
        DataConfig("text", path=path), tokenizer, corpus.train_sha256, corpus.val_sha256, tmp_path / "data"
    )


def test_tokens_are_found_by_their_hashes_whatever_the_source_is_now(tmp_path):
    first = text_corpus(tmp_path, DOCUMENTS)
    second = text_corpus(tmp_path, {"0.txt": "changed"})
    chars = text_corpus(tmp_path, {}, CHAR)
    shutil.rmtree(tmp_path / "texts")
    assert found(tmp_path, first).folder == first.folder
    assert found(tmp_path, second).folder == second.folder
    assert found(tmp_path, chars, CHAR).folder == chars.folder
    assert found(tmp_path, chars, BYTE) is None
    os.rename(first.folder, first.folder.with_name("kept by hand"))
    assert found(tmp_path, first).folder.name == "kept by hand"
    mixed = SimpleNamespace(train_sha256=first.train_sha256, val_sha256="0" * 64)
    assert found(tmp_path, mixed) is None


def test_damaged_tokens_are_not_found_and_hide_no_good_ones(tmp_path):
    corpus = text_corpus(tmp_path, DOCUMENTS)
    shutil.copytree(corpus.folder, corpus.folder.with_name("a copy"))
    for name in ("1", "2", "3"):
        (corpus.folder.with_name(name)).mkdir()
    (corpus.folder.with_name("1") / "meta.json").write_text("{")
    (corpus.folder.with_name("2") / "meta.json").write_text('{"files": 3}')
    flip(corpus.folder.with_name("a copy") / "train.npy")
    assert found(tmp_path, corpus).folder == corpus.folder
    flip(corpus.folder / "train.npy")
    assert found(tmp_path, corpus) is None
    assert found(tmp_path / "nowhere", corpus) is None


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


def entry(folder: Path, **changes) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    meta["files"]["train.npy"] |= changes
    (folder / "meta.json").write_text(json.dumps(meta))


def header(folder: Path) -> None:
    """A header that Python's parser stumbles over, in a file that is what meta.json says."""
    content = (folder / "train.npy").read_bytes()
    content = content[:10] + b"{'descr': ((".ljust(118) + content[128:]
    (folder / "train.npy").write_bytes(content)
    entry(folder, sha256=hashlib.sha256(content).hexdigest())


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
    "emptied": (lambda f: (f / "train.npy").write_bytes(b""), "train.npy: 0 bytes, expected"),
    "header only": (lambda f: os.truncate(f / "train.npy", 100), "train.npy: 100 bytes, expected"),
    "no tokens": (lambda f: rewrite(f, "train.npy", IDS[:0]), "train.npy: has the shape \\(0,\\), expected"),
    "two dimensions": (lambda f: rewrite(f, "train.npy", IDS.reshape(5, 100)), "train.npy: has the shape \\(5, 100\\)"),
    "another type": (
        lambda f: rewrite(f, "train.npy", IDS.astype(np.int64)),
        "train.npy: holds int64, expected uint16",
    ),
    "wider": (lambda f: rewrite(f, "val.npy", IDS.astype(np.uint32)), "val.npy: holds uint32, expected uint16"),
    "big-endian": (lambda f: rewrite(f, "val.npy", IDS.astype(">u2")), "val.npy: holds >u2, expected uint16"),
    "a pickle": (
        lambda f: rewrite(f, "val.npy", np.array([1, None]), True),
        "val.npy: .* bytes, but no .npy file of numbers",
    ),
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
    "metadata of nothing": (lambda f: (f / "meta.json").write_text("[]"), "meta.json: format '\\[\\]', expected 2"),
    "binary metadata": (lambda f: (f / "meta.json").write_bytes(b"\xff\xfe\x00"), "meta.json: not whole"),
    "another format": (lambda f: change(f, format=99), "meta.json: format '99', expected 2"),
    "metadata without files": (lambda f: drop(f, "files"), "meta.json: something is missing"),
    "metadata without a source": (lambda f: drop(f, "source"), "meta.json: something is missing"),
    "files of another type": (lambda f: change(f, files=3), "meta.json: something is missing"),
    "other counts": (
        lambda f: change(f, splits={"train": {"documents": 1, "tokens": 1, "bytes": 1}}),
        "counts of train",
    ),
    "absurd counts": (
        lambda f: change(f, splits={s: {"documents": 1, "tokens": 1, "bytes": 10**30} for s in ("train", "val")}),
        "counts of train",
    ),
    "a size as text": (lambda f: entry(f, size="x"), "meta.json: something is missing or of another type"),
    "a hash as number": (lambda f: entry(f, sha256=3), "meta.json: something is missing or of another type"),
    "another count": (lambda f: entry(f, count=10**30), "train.npy: .* entries of uint16; meta.json says"),
    "files of no type": (lambda f: entry(f, dtype=None), "train.npy: .* entries of None"),
    "skipped without counts": (lambda f: change(f, skipped={"a": "b"}), "meta.json: .*'b' is no whole number"),
    "a source that is none": (lambda f: change(f, source=[1]), "meta.json: .* is no text"),
    "deep metadata": (lambda f: (f / "meta.json").write_text("[" * 100_000), "meta.json: not whole"),
    "a header that is no header": (lambda f: header(f), "train.npy: .* but no .npy file of numbers"),
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


@pytest.mark.parametrize(
    "file", ["train.npy", "val.npy", "test.npy", "train_documents.npy", "val_documents.npy", "meta.json"]
)
def test_bytes_that_change_anywhere_hurt_nobody(prepared, tmp_path, fresh, file):
    place, good = prepared
    config = DataConfig("text", path=str(place / "texts"))
    for n in range(20):
        shutil.copytree(place / "data", tmp_path / str(n))
        path = tmp_path / str(n) / "text" / good.folder.name / file
        content = bytearray(path.read_bytes())
        end = len(content) if n % 2 or file == "meta.json" else 128  # every other time in the header
        for at in torch.randint(0, end, (n % 3 + 1,), generator=fresh).tolist():
            content[at] ^= int(torch.randint(1, 256, (), generator=fresh))
        path.write_bytes(content)
        try:
            opened = [open_corpus(path.parent)]
        except DataError as error:
            assert "\n" not in str(error)
            opened = []
        for corpus in (*opened, prepare(config, BYTE, tmp_path / str(n), [].append)):
            assert corpus.summary() and (corpus.train == good.train).all() and (corpus.val == good.val).all()
            assert (corpus.train_sha256, corpus.val_sha256) == (good.train_sha256, good.val_sha256)


def test_a_folder_that_holds_another_tokenizer_is_prepared_again(prepared, tmp_path):
    place, good = prepared
    config, said = DataConfig("text", path=str(place / "texts")), []
    folder = prepare(config, CHAR, tmp_path / "data", said.append).folder
    shutil.rmtree(folder)
    shutil.copytree(good.folder, folder)
    corpus = prepare(config, CHAR, tmp_path / "data", said.append)
    assert corpus.tokenizer.name == "char" and "it holds tokenizer=byte" in said[1]


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
    assert corpus.train.dtype == np.uint32 and corpus.train.tolist() == list(range(59500))
    assert batch(corpus.val, 6999, 0, 0, range(1))[1][0, -1] == 69999


@pytest.mark.parametrize("moment", ["write_atomic", "os.rename", "TokenFile.finish"])
def test_a_killed_preparation_does_not_count(tmp_path, moment):
    first = text_corpus(tmp_path, DOCUMENTS)
    (tmp_path / "texts" / "0.txt").write_text("changed")
    code = """
import os, sys
from pathlib import Path
import gpt.prepare
from gpt.prepare import *
place, _, name = sys.argv[2].rpartition(".")
setattr(getattr(gpt.prepare, place) if place else gpt.prepare, name, lambda *_: os._exit(9))
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


def test_a_large_file_is_verified_once(prepared, tmp_path, monkeypatch):
    folder = tmp_path / "byte"
    shutil.copytree(prepared[1].folder, folder)
    monkeypatch.setattr(gpt.corpus, "LARGE", 100)
    hashed = []
    sha256_of = gpt.corpus.sha256_of
    monkeypatch.setattr(gpt.corpus, "sha256_of", lambda path: hashed.append(path.name) or sha256_of(path))
    open_corpus(folder)
    assert sorted(hashed) == sorted(f"{split}{what}.npy" for split in gpt.corpus.SPLITS for what in ("", "_documents"))
    open_corpus(folder)
    assert len(hashed) == 6
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
    config = compose("train", overrides)
    assert (config["data"]["name"], config["tokenizer"]["name"]) == (name, tokenizer)
    assert set(config["data"]) == {"name", "path", "val_fraction", "test_fraction"}
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
