"""The corpora: which documents each has, what it leaves out, and what it says where the text is not there."""

import hashlib
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

import data.shakespeare_char as shakespeare_char
import data.stdlib as stdlib
from gpt.corpus import open_corpus
from gpt.documents import hash_share, splits_of
from gpt.errors import ConfigError, DataError
from gpt.prepare import prepare
from gpt.schema import DataConfig
from gpt.sources import Files
from tests.texts import BYTE, CHAR, DOCUMENTS, text_corpus


def test_a_folder_is_one_document_a_file(tmp_path):
    documents = {f"{i}.txt": f"text {i} <|endoftext|>\r\n" for i in range(20)} | {"deep/er/é.md": "a", "code.py": "b"}
    corpus = text_corpus(tmp_path, documents)
    splits = splits_of(documents, 0.1, 0.05)
    for split in ("train", "val", "test"):
        tokens, starts = getattr(corpus, split), getattr(corpus, f"{split}_documents")
        ends = [*starts[1:].tolist(), len(tokens)]
        found = [tokens[a:b].tolist() for a, b in zip(starts[:].tolist(), ends, strict=True)]
        names = [n for n in sorted(documents) if splits[n] == split]
        # a separator after every document, nowhere else
        assert found == [[*documents[name].encode(), 256] for name in names]
        n_bytes = sum(len(documents[name].encode()) for name in names)
        sha256 = hashlib.sha256(tokens[:].tobytes()).hexdigest()
        expected = {"documents": len(names), "tokens": len(tokens), "bytes": n_bytes, "sha256": sha256}
        assert corpus.meta["splits"][split] == expected


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
        and corpus.val[:].tolist().count(256) == 1
        and corpus.val[-1] == 256
    )
    assert (
        corpus.train_documents[:].tolist()
        == corpus.test_documents[:].tolist()
        == corpus.val_documents[:].tolist()
        == [0]
    )


def test_the_test_split_is_taken_from_the_training_text_alone(tmp_path):
    """And where it is not wanted, there is none: no file, no counts, and the validation text is the same."""
    sealed, without = text_corpus(tmp_path, DOCUMENTS), text_corpus(tmp_path, {}, test_fraction=0.0)
    assert sealed.val_sha256 == without.val_sha256 and sealed.train_sha256 != without.train_sha256
    assert len(sealed.train) + len(sealed.test) == len(without.train) and len(sealed.test) > 0
    assert sealed.meta["splits"]["test"] == {
        "documents": len(sealed.test_documents),
        "tokens": len(sealed.test),
        "bytes": len(sealed.tokenizer.decode_bytes(sealed.test)),
        "sha256": sealed.test_sha256,
    }
    assert re.search(rf"^  test +{len(sealed.test_documents)} ", sealed.summary(), re.MULTILINE)
    assert len(without.test) == len(without.test_documents) == 0 and without.test_sha256 == hashlib.sha256().hexdigest()
    assert without.test.dtype == without.train.dtype
    assert without.meta["splits"]["test"] == {
        "documents": 0,
        "tokens": 0,
        "bytes": 0,
        "sha256": without.test_sha256,
    }
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
        (lambda p: p.mkdir(), "holds no text; allowed: a UTF-8 text file, a folder"),
        (lambda p: p.touch(), "is empty"),
        (
            lambda p: p.write_text("a"),
            "too little text, the train split is empty .left out: 1 empty.; give a longer text or more documents, or "
            "others than data.val_fraction=0.1 and data.test_fraction=0.05$",
        ),
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


@pytest.mark.parametrize("val, test", [(0.5, 0.4999), (0.999999, 0.0)])
def test_fractions_that_leave_nothing_are_named(tmp_path, val, test):
    (tmp_path / "a.txt").write_text("ten bytes " * (100 if test else 1))
    config = DataConfig("text", path=str(tmp_path / "a.txt"), val_fraction=val, test_fraction=test)
    message = f"train split is empty.*; give .*others than data.val_fraction={val} and data.test_fraction={test:g}$"
    with pytest.raises(DataError, match=message):
        prepare(config, BYTE, tmp_path / "data", lambda _: None)


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
        tokens, starts = getattr(corpus, split), getattr(corpus, f"{split}_documents")[:].tolist()
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


def test_shakespeare_is_nanogpts_to_the_token(tmp_path):
    path = next((p for p in shakespeare_char.ELSEWHERE if p.exists()), None)
    if path is None:
        pytest.skip("tiny Shakespeare is not on this machine: put it at data/shakespeare_char/input.txt")
    corpus = prepare(DataConfig("shakespeare_char", path=str(path), test_fraction=0.0), CHAR, tmp_path)
    text = path.read_text()
    stoi = {ch: i for i, ch in enumerate(sorted(set(text)))}
    n = len(text)
    assert corpus.train[:].tolist() == [stoi[c] for c in text[: int(n * 0.9)]]
    assert corpus.val[:].tolist() == [stoi[c] for c in text[int(n * 0.9) :]]
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


def test_brackets_in_the_name_of_a_folder_that_is_there_are_no_pattern(tmp_path):
    for folder in ("book [1]", "book 1"):
        (tmp_path / folder / "in").mkdir(parents=True)
        for name in ("c1.txt", "c2.txt"):
            (tmp_path / folder / "in" / name).write_text("text")
    for path in (f"{tmp_path}/book [1]/in/*.txt", f"{tmp_path}/book [1]/i[n]/c?.txt"):
        files = Files(Path(path), (".txt",), "text")
        assert [file.parts[-3] for file in files.paths.values()] == ["book [1]"] * 2
