"""A prepared corpus is checked when it is opened, and found by its hashes."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import gpt.corpus
import gpt.documents
import gpt.prepare
from gpt.corpus import SPLITS, find_corpus, open_corpus
from gpt.errors import DataError
from gpt.files import seal
from gpt.prepare import prepare
from gpt.schema import DataConfig
from gpt.tokenizer import CharTokenizer
from gpt.tokens import HEADER, TokenWriter
from tests.texts import BYTE, CHAR, DOCUMENTS, text_corpus


def found(tmp_path: Path, corpus, **other):
    return find_corpus("text", corpus.hashes() | other, tmp_path / "data")


def test_tokens_are_found_by_their_hashes_whatever_the_source_is_now(tmp_path):
    first = text_corpus(tmp_path, DOCUMENTS)
    second = text_corpus(tmp_path, {"0.txt": "changed"})
    chars = text_corpus(tmp_path, {}, CHAR)
    shutil.rmtree(tmp_path / "texts")
    assert found(tmp_path, first).folder == first.folder
    assert found(tmp_path, second).folder == second.folder
    assert found(tmp_path, chars).folder == chars.folder
    os.rename(first.folder, first.folder.with_name("kept by hand"))
    assert found(tmp_path, first).folder.name == "kept by hand"


@pytest.mark.parametrize("key", ["tokenizer_sha256", "train_sha256", "val_sha256", "test_sha256"])
def test_tokens_of_another_hash_are_not_found(tmp_path, key):
    corpus = text_corpus(tmp_path, DOCUMENTS)
    assert found(tmp_path, corpus).folder == corpus.folder and corpus.differing(corpus.hashes()) is None
    assert found(tmp_path, corpus, **{key: "0" * 64}) is None
    assert corpus.differing(corpus.hashes() | {key: "0" * 64}) == key


def test_damaged_tokens_are_not_found_and_hide_no_good_ones(tmp_path):
    corpus = text_corpus(tmp_path, DOCUMENTS)
    shutil.copytree(corpus.folder, corpus.folder.with_name("a copy"))
    for name in ("1", "2", "3"):
        (corpus.folder.with_name(name)).mkdir()
    (corpus.folder.with_name("1") / "meta.json").write_text("{")
    (corpus.folder.with_name("2") / "meta.json").write_text('{"files": 3}')
    flip(corpus.folder.with_name("a copy") / "train-00000.bin")
    assert found(tmp_path, corpus).folder == corpus.folder
    flip(corpus.folder / "train-00000.bin")
    assert found(tmp_path, corpus) is None
    assert found(tmp_path / "nowhere", corpus) is None


def meta_of(folder: Path) -> dict:
    return json.loads((folder / "meta.json").read_text())


def change(folder: Path, **changes) -> None:
    """Another meta.json, that carries its own sha256 as before."""
    (folder / "meta.json").write_text(seal(meta_of(folder) | changes))


def entry(folder: Path, **changes) -> None:
    files = meta_of(folder)["files"]
    change(folder, files=files | {"train-00000.bin": files["train-00000.bin"] | changes})


def rewrite(folder: Path, stem: str, ids: np.ndarray) -> None:
    """Another token file, and a meta.json that agrees with it."""
    writer = TokenWriter(folder, stem, ids.dtype)
    writer.write(ids)
    files, sha256 = writer.finish()
    splits = meta_of(folder)["splits"]
    split = stem.removesuffix("_documents")
    splits[split] |= {"documents": len(ids)} if split != stem else {"tokens": len(ids), "sha256": sha256}
    rest = {name: said for name, said in meta_of(folder)["files"].items() if not name.startswith(f"{stem}-")}
    change(folder, files=rest | files, splits=splits)


def flip(path: Path) -> None:
    """One bit behind the header."""
    content = bytearray(path.read_bytes())
    content[np.random.default_rng().integers(HEADER.size, len(content))] ^= 1
    path.write_bytes(content)


def overwrite(path: Path, at: int, new: bytes) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:at] + new + content[at + len(new) :])


def drop(folder: Path, key: str) -> None:
    (folder / "meta.json").write_text(seal({k: v for k, v in meta_of(folder).items() if k != key}))


def counts(folder: Path, split: str, **changes) -> None:
    splits = meta_of(folder)["splits"]
    change(folder, splits=splits | {split: splits[split] | changes})


TRAIN, VAL, STARTS = "train-00000.bin", "val-00000.bin", "train_documents-00000.bin"
IDS = np.arange(500).astype(np.uint16) % 256
DAMAGE = {
    "shorter by a byte": (lambda f: os.truncate(f / TRAIN, (f / TRAIN).stat().st_size - 1), "bytes, expected"),
    "longer": (lambda f: open(f / VAL, "ab").write(b"xx"), "val-00000.bin: .* bytes, expected"),
    "emptied": (lambda f: (f / TRAIN).write_bytes(b""), "train-00000.bin: 0 bytes, expected"),
    "half a header": (lambda f: os.truncate(f / TRAIN, 10), "train-00000.bin: 10 bytes, expected"),
    "another kind of file": (lambda f: overwrite(f / VAL, 0, b"PK"), "val-00000.bin: begins with .*no token file"),
    "through a text mode": (lambda f: overwrite(f / VAL, 6, b"\n\n"), "begins with b'nanoPE.n.n' 1, expected"),
    "a later version": (lambda f: overwrite(f / VAL, 8, b"\x02"), "begins with b'nanoPE.r.n' 2, expected"),
    "a header of wide ids": (lambda f: overwrite(f / VAL, 12, b"\x04"), "header says .* of 4 bytes, expected .* of 2"),
    "a header of no ids": (lambda f: overwrite(f / VAL, 16, b"\0\0"), "header says 0 numbers of 2 bytes"),
    "something behind the header's count": (lambda f: overwrite(f / VAL, 31, b"\1"), "header ends in"),
    "no training tokens": (lambda f: rewrite(f, "train", IDS[:0]), "counts of train cannot be those of a text"),
    "another type": (lambda f: rewrite(f, "train", IDS.astype(np.int64)), "holds int64, expected uint16"),
    "wider": (lambda f: rewrite(f, "val", IDS.astype(np.uint32)), "val-00000.bin: holds uint32, expected uint16"),
    "an unknown id": (
        lambda f: rewrite(f, "train", np.where(np.arange(500) == 321, 257, IDS).astype(np.uint16)),
        "train: token id 257 at index 321, allowed: 0 to 256",
    ),
    "a bit": (lambda f: flip(f / VAL), "val-00000.bin: damaged, its sha256 is"),
    "a bit of the offsets": (lambda f: flip(f / STARTS), "train_documents-00000.bin: damaged"),
    "offsets past the end": (
        lambda f: rewrite(f, "val_documents", np.array([0, 10**9], dtype=np.uint64)),
        "val_documents: starts must rise from 0",
    ),
    "offsets that fall": (
        lambda f: rewrite(f, "train_documents", np.array([0, 9, 5], dtype=np.uint64)),
        "train_documents: starts must rise from 0",
    ),
    "offsets that begin late": (
        lambda f: rewrite(f, "train_documents", np.array([1, 9], dtype=np.uint64)),
        "train_documents: starts must rise from 0",
    ),
    "a file missing": (lambda f: (f / VAL).unlink(), "val-00000.bin: not there"),
    "a folder for a file": (lambda f: [(f / VAL).unlink(), (f / VAL).mkdir()], "val-00000.bin: .*(bytes|read)"),
    "a pipe for a file": (
        lambda f: [(f / VAL).unlink(), os.mkfifo(f / VAL)],
        "val-00000.bin: cannot be read .no plain",
    ),
    "a pipe for metadata": (
        lambda f: [(f / "meta.json").unlink(), os.mkfifo(f / "meta.json")],
        "meta.json: .*no plain",
    ),
    "another file's tokens": (lambda f: shutil.copy(f / VAL, f / TRAIN), "train-00000.bin: .*as meta.json says"),
    "no metadata": (lambda f: (f / "meta.json").unlink(), "meta.json: not there"),
    "half the metadata": (lambda f: os.truncate(f / "meta.json", 200), "meta.json: not whole"),
    "metadata of nothing": (lambda f: (f / "meta.json").write_text("[]"), "meta.json: format '\\[\\]', expected 3"),
    "binary metadata": (lambda f: (f / "meta.json").write_bytes(b"\xff\xfe\x00"), "meta.json: not whole"),
    "another format": (lambda f: change(f, format=99), "meta.json: format '99', expected 3"),
    "metadata without files": (lambda f: drop(f, "files"), "meta.json: something is missing"),
    "metadata without a source": (lambda f: drop(f, "source"), "meta.json: something is missing"),
    "files of another type": (lambda f: change(f, files=3), "meta.json: something is missing"),
    "changed by hand": (
        lambda f: (f / "meta.json").write_text((f / "meta.json").read_text().replace("texts", "tests")),
        "meta.json: damaged or changed by hand",
    ),
    "other counts": (lambda f: counts(f, "train", tokens=1), "says 1 numbers of train, and"),
    "absurd counts": (lambda f: counts(f, "val", bytes=10**30), "counts of val cannot be those of a text"),
    "negative counts": (lambda f: counts(f, "val", bytes=-1), "'-1' is no whole number"),
    "documents without a test": (lambda f: counts(f, "test", tokens=0), "counts of test cannot be"),
    "a hash as number": (lambda f: entry(f, sha256=3), "meta.json: something is missing or of another type"),
    "another count": (lambda f: entry(f, count=10**30), "numbers of train, and 1,000,000"),
    "files of no type": (lambda f: entry(f, dtype=None), "train-00000.bin: holds None, expected uint16"),
    "skipped without counts": (lambda f: change(f, skipped={"a": "b"}), "meta.json: .*'b' is no whole number"),
    "a source that is none": (lambda f: change(f, source=[1]), "meta.json: .* is no text"),
    "deep metadata": (lambda f: (f / "meta.json").write_text("[" * 100_000), "meta.json: not whole"),
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
    assert "\n" not in str(error.value)
    said = []
    mended = prepare(DataConfig("text", path=str(place / "texts")), BYTE, tmp_path / "data", said.append)
    assert len(said) == 1 and "preparing again, because" in said[0]
    assert (mended.train_sha256, mended.val_sha256) == (good.train_sha256, good.val_sha256)
    assert sorted(p.name for p in folder.parent.iterdir()) == sorted([".preparing", folder.name])


@pytest.mark.parametrize("file", [TRAIN, VAL, "test-00000.bin", STARTS, "val_documents-00000.bin", "meta.json"])
def test_bytes_that_change_anywhere_hurt_nobody(prepared, tmp_path, fresh, file):
    place, good = prepared
    config = DataConfig("text", path=str(place / "texts"))
    for n in range(20):
        shutil.copytree(place / "data", tmp_path / str(n))
        path = tmp_path / str(n) / "text" / good.folder.name / file
        content = bytearray(path.read_bytes())
        end = len(content) if n % 2 or file == "meta.json" else HEADER.size  # every other time in the header
        for at in torch.randint(0, end, (n % 3 + 1,), generator=fresh).tolist():
            content[at] ^= int(torch.randint(1, 256, (), generator=fresh))
        path.write_bytes(content)
        try:
            opened = [open_corpus(path.parent)]
        except DataError as error:
            assert "\n" not in str(error)
            opened = []
        for corpus in (*opened, prepare(config, BYTE, tmp_path / str(n), [].append)):
            assert corpus.summary() and all((getattr(corpus, s)[:] == getattr(good, s)[:]).all() for s in SPLITS)
            assert (corpus.train_sha256, corpus.val_sha256) == (good.train_sha256, good.val_sha256)


def test_a_large_file_is_verified_once(prepared, tmp_path, monkeypatch):
    folder = tmp_path / "byte"
    shutil.copytree(prepared[1].folder, folder)
    monkeypatch.setattr(gpt.corpus, "LARGE", 100)
    hashed = []
    numbers_sha256 = gpt.corpus.numbers_sha256
    monkeypatch.setattr(gpt.corpus, "numbers_sha256", lambda path: hashed.append(path.name) or numbers_sha256(path))
    open_corpus(folder)
    assert sorted(hashed) == sorted(f"{split}{what}-00000.bin" for split in SPLITS for what in ("", "_documents"))
    open_corpus(folder)
    small = [name for name in hashed[6:] if (folder / name).stat().st_size > 100]
    assert len(hashed) > 6 and not small
    flip(folder / TRAIN)
    with pytest.raises(DataError, match="train-00000.bin: damaged"):
        open_corpus(folder)
    (folder / "train-00000.verified.json").write_text("nonsense")
    with pytest.raises(DataError, match="train-00000.bin: damaged"):
        open_corpus(folder)
