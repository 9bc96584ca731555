"""A corpus is prepared once, whole or not at all, never over another one, and goes on where it was killed."""

import gzip
import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import data.text as text_package
import gpt.corpus
import gpt.documents
import gpt.draft
import gpt.encode
import gpt.prepare
from gpt.cli import compose
from gpt.corpus import open_corpus
from gpt.data import batch
from gpt.errors import DataError
from gpt.prepare import check_source, prepare
from gpt.schema import DataConfig, TokenizerConfig
from gpt.tokenizer import ByteTokenizer
from tests.texts import BYTE, CHAR, DOCUMENTS, ROOT, run_python, size, text_corpus
from tests.tokenizer_files import fill


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
        f"{second.folder}: preparing; {first.folder.name} stays, which is of an older version or of files that were "
        "changed or touched since"
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
    assert len(said) == 1 and "files that were changed or touched since" in said[0]
    assert size(corpus) == sum(len(text) + 1 for text in {**DOCUMENTS, "0.txt": "changed again"}.values())
    assert [p.suffix for p in (corpus.folder.parent / ".preparing").iterdir()] == [".lock"]


def large_texts(tmp_path: Path, n: int = 30, words: int = 2000) -> DataConfig:
    """A folder of texts, with a line in every one that no other has."""
    rng = np.random.default_rng()
    (tmp_path / "texts").mkdir(exist_ok=True)
    for i in range(n):
        text = " ".join(f"w{word}" for word in rng.integers(0, 5000, words))
        (tmp_path / "texts" / f"{i:02}.txt").write_text(f"{i} {text}\n")
    return DataConfig("text", path=str(tmp_path / "texts"))


def ids_and_counts(corpus) -> tuple:
    files = {path.name: path.read_bytes() for path in corpus.folder.glob("*.bin")}
    return files, corpus.meta["splits"], corpus.meta["skipped"]


# Kills itself once it has made sure of its work `argv[3]` times.
KILLED = """
import os, signal, sys
import gpt.draft, gpt.encode, gpt.prepare
from gpt.prepare import *
gpt.encode.TASK, gpt.prepare.SAVE = 3000, -1
save, left = gpt.draft.Draft.save, [int(sys.argv[3])]

def counted(draft):
    save(draft)
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)

gpt.draft.Draft.save = counted
prepare(DataConfig("text", path=sys.argv[1] + "/texts"), TokenizerConfig(sys.argv[2]), Path(sys.argv[1]) / "data")
"""


@pytest.mark.parametrize("tokenizer", ["byte", "char"])
def test_a_killed_preparation_goes_on_where_it_was(tmp_path, tokenizer):
    config, kind = large_texts(tmp_path), TokenizerConfig(tokenizer)
    straight = prepare(config, kind, tmp_path / "straight", [].append)
    rng = np.random.default_rng()
    for saves in rng.integers(1, 9, 3):  # three times in a row, before all of the 30 texts are done
        done = run_python(KILLED, tmp_path, tokenizer, saves)
        assert done.returncode == -9, done.stderr
    beside = next((tmp_path / "data/text/.preparing").glob("*/progress.json"))
    reached = json.loads(beside.read_text())
    for path in beside.parent.glob("*.bin"):  # what came after the last save is not relied on
        with open(path, "ab") as file:
            file.write(b"torn")
    read, said = [], []
    with pytest.MonkeyPatch.context() as patch:
        real = gpt.documents.read_blocks
        patch.setattr(text_package, "read_blocks", lambda path, *more: read.append(path.name) or real(path, *more))
        corpus = prepare(config, kind, tmp_path / "data", said.append)
    assert ids_and_counts(corpus) == ids_and_counts(straight) and not beside.exists()
    done = sum(split["tokens"] for split in reached["splits"].values())
    assert 0 < done < size(corpus) and any(f"going on behind {done:,} tokens" in line for line in said)
    assert len(read) == 30 - reached["reached"][0]  # documents that are done are not read again


class Killed(BaseException):
    """Stands for kill -9."""


@pytest.mark.parametrize(
    "corpus, tokenizer, changes, workers",
    [
        ("folder", TokenizerConfig("bpe", vocab_size=300), {}, 2),
        ("folder", TokenizerConfig("gpt2"), {}, 1),
        ("single", BYTE, {"max_tokens": 200_000}, 1),
        ("marker", TokenizerConfig("char"), {"marker": "w1 "}, 1),
        ("lines", BYTE, {}, 1),
        ("hf", BYTE, {"val_fraction": 0.3}, 1),
    ],
    ids=lambda value: value.name if isinstance(value, TokenizerConfig) else None,
)
def test_every_kind_of_preparation_goes_on_where_it_was(tmp_path, monkeypatch, corpus, tokenizer, changes, workers):
    """The same bytes as straight through; killed behind a save, what follows on the disk is not relied on."""
    if tokenizer.name == "gpt2":
        (tmp_path / "cache").mkdir()
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(fill(tmp_path / "cache")))
    config = large_texts(tmp_path)
    texts = [path.read_text() for path in sorted((tmp_path / "texts").iterdir())]
    if corpus in ("marker", "single"):
        (tmp_path / "all.txt").write_text("".join(texts))
        config = DataConfig("text", path=str(tmp_path / "all.txt"))
    elif corpus in ("lines", "hf"):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (tmp_path / "all.jsonl").write_text(lines)
        config = DataConfig("jsonl" if corpus == "lines" else "hf", path=str(tmp_path / "all.jsonl"))
    config = replace(config, **changes)
    monkeypatch.setattr(gpt.documents, "BLOCK", 5000)
    monkeypatch.setattr(gpt.encode, "TASK", 5000)
    monkeypatch.setattr(gpt.encode, "ALONE", 1)
    straight = prepare(config, tokenizer, tmp_path / "straight", [].append, workers)
    n_writes, write, save = [0], gpt.draft.Draft.write, gpt.draft.Draft.save
    last = int(np.random.default_rng().integers(2, 8))

    def counted(draft, *given):
        write(draft, *given)
        n_writes[0] += 1
        if n_writes[0] == last:
            save(draft)
        if n_writes[0] == last + 2:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(gpt.draft.Draft, "write", counted)
        patch.setattr(gpt.draft.Draft, "save", lambda draft: None)  # the dead save nothing
        with pytest.raises(Killed):
            prepare(config, tokenizer, tmp_path / "data", [].append, workers)
    said = []
    resumed = prepare(config, tokenizer, tmp_path / "data", said.append, workers)
    assert any("going on behind" in line for line in said)
    assert ids_and_counts(resumed) == ids_and_counts(straight)
    if "max_tokens" in changes:
        assert size(resumed) == 200_000


def test_what_is_left_out_is_said(tmp_path):
    said = []
    corpus = text_corpus(tmp_path, {**DOCUMENTS, "empty.txt": ""}, log=said)
    assert corpus.skipped == "1 empty files" and said[-1] == f"{corpus.folder}: left out 1 empty files"


def test_progress_of_another_text_or_torn_is_not_gone_on_with(tmp_path):
    config = large_texts(tmp_path)
    assert run_python(KILLED, tmp_path, "byte", 4).returncode == -9
    beside = next((tmp_path / "data/text/.preparing").glob("*/progress.json"))
    saved = beside.read_text()
    another = saved.replace('"identity": "', '"identity": "0')
    for spoiled in (saved[:-5], "{}", "[]", saved.replace('"tokens": ', '"tokens": 9'), another):
        assert spoiled != saved
        beside.parent.mkdir(exist_ok=True)
        beside.write_text(spoiled)
        said = []
        corpus = prepare(config, BYTE, tmp_path / "data", said.append)
        damaged = ["  beginning anew: what a killed preparation left is damaged"] * (spoiled != another)
        assert said[1:] == damaged and size(corpus) == sum(p.stat().st_size + 1 for p in (tmp_path / "texts").iterdir())
        shutil.rmtree(corpus.folder)


@pytest.mark.parametrize("name", ["train-00000.bin", "val_documents-00000.bin"])
def test_what_was_damaged_since_it_was_saved_is_not_gone_on_with(tmp_path, name):
    config = large_texts(tmp_path)
    assert run_python(KILLED, tmp_path, "byte", 9).returncode == -9
    path = next((tmp_path / "data/text/.preparing").glob(f"*/{name}"))
    content = bytearray(path.read_bytes())
    content[32] ^= 1  # the first number
    path.write_bytes(content)
    said = []
    corpus = prepare(config, BYTE, tmp_path / "data", said.append)
    assert said[1:] == ["  beginning anew: what a killed preparation left is damaged"]
    assert ids_and_counts(corpus) == ids_and_counts(prepare(config, BYTE, tmp_path / "straight", [].append))


def test_the_same_bytes_whatever_the_number_of_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(gpt.encode, "TASK", 5000)
    monkeypatch.setattr(gpt.encode, "ALONE", 1)
    config, kind = large_texts(tmp_path, 12, 4000), TokenizerConfig("bpe", vocab_size=300)
    corpora = [prepare(config, kind, tmp_path / str(n), [].append, workers=n) for n in (1, 2, 3)]
    assert ids_and_counts(corpora[0]) == ids_and_counts(corpora[1]) == ids_and_counts(corpora[2])
    assert len({corpus.folder.name for corpus in corpora}) == 1


def test_a_full_disk_is_named_and_gone_on_from(tmp_path):
    pytest.importorskip("resource", reason="file sizes cannot be limited on this system")
    config = large_texts(tmp_path)
    code = KILLED.replace("left = [", "left = [10**9 + ").replace(
        "gpt.draft.Draft.save = counted",
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, resource.RLIM_INFINITY))",
    )  # every file ends at 150,000 bytes
    done = run_python(code, tmp_path, "byte", 0)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "cannot be prepared (File too large); make room or rights there, and give the same command again" in last
    assert not list((tmp_path / "data/text").glob("*/meta.json"))
    said = []
    corpus = prepare(config, BYTE, tmp_path / "data", said.append)
    assert "going on behind" in said[-1]
    assert size(corpus) == sum(p.stat().st_size + 1 for p in (tmp_path / "texts").iterdir())


@pytest.mark.parametrize("change", ["grown", "removed", "added"])
def test_a_folder_that_changes_while_it_is_read(tmp_path, monkeypatch, change):
    config = large_texts(tmp_path, 6)
    other = tmp_path / "texts" / {"grown": "00.txt", "removed": "05.txt", "added": "99.txt"}[change]
    real = gpt.prepare.encode_all

    def act(*arguments):
        for n, found in enumerate(real(*arguments)):
            if n == 0:
                other.unlink() if change == "removed" else other.write_text("something new")
            yield found

    monkeypatch.setattr(gpt.encode, "TASK", 1000)
    monkeypatch.setattr(gpt.prepare, "encode_all", act)
    words = "05.txt: cannot be read .No such file" if change == "removed" else "changed while it was read"
    with pytest.raises(DataError, match=words):
        prepare(config, BYTE, tmp_path / "data", [].append)
    assert [p for p in (tmp_path / "data").rglob("*") if p.is_file() and p.suffix != ".lock"] == []
    monkeypatch.setattr(gpt.prepare, "encode_all", real)
    assert size(prepare(config, BYTE, tmp_path / "data", [].append)) > 0


@pytest.mark.parametrize("how", ["replaced", "overwritten"])
@pytest.mark.parametrize("when", ["read", "killed"])
def test_a_file_that_is_another_one_of_the_same_size_and_time(tmp_path, monkeypatch, how, when):
    """Never one half of each: neither in one go, nor behind a preparation that was killed."""
    path, config = tmp_path / "a.txt", DataConfig("text", path=str(tmp_path / "a.txt"))
    path.write_text("lower case " * 3000)
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    real = gpt.prepare.encode_all

    def act(*arguments):
        for n, found in enumerate(real(*arguments)):
            if n == 3:
                new = path if how == "overwritten" else tmp_path / "new"
                new.write_text("LOWER CASE " * 3000)
                os.utime(new, ns=times)
                os.replace(new, path)
                if when == "killed":
                    raise Killed("killed")
            yield found

    monkeypatch.setattr(gpt.documents, "BLOCK", 3000)
    monkeypatch.setattr(gpt.encode, "TASK", 3000)
    monkeypatch.setattr(gpt.prepare, "encode_all", act)
    with pytest.raises((Killed, DataError), match="killed" if when == "killed" else "changed while it was read"):
        prepare(config, BYTE, tmp_path / "data", [].append)
    monkeypatch.setattr(gpt.prepare, "encode_all", real)
    corpus = prepare(config, BYTE, tmp_path / "data", [].append)
    text = "".join(corpus.tokenizer.decode(getattr(corpus, split)[:]) for split in ("train", "test", "val"))
    assert text == "LOWER CASE " * 3000 and corpus.meta["fingerprint"].keys() == {"files", "sha256"}


def test_a_limit_of_tokens_is_exact(tmp_path, monkeypatch):
    monkeypatch.setattr(gpt.encode, "TASK", 700)
    config = large_texts(tmp_path, 10, 100)
    whole = prepare(config, BYTE, tmp_path / "data", [].append)
    for limit in (size(whole) - 200, size(whole) - 1, size(whole), size(whole) + 5):
        part = prepare(replace(config, max_tokens=limit), BYTE, tmp_path / "data", [].append)
        assert size(part) == min(limit, size(whole)) and f"-tokens{limit}-" in part.folder.name
        for split in ("train", "val", "test"):
            ids = getattr(part, split)[:]
            assert np.array_equal(ids, getattr(whole, split)[: len(ids)])  # the beginning of what there is
            assert part.meta["splits"][split]["bytes"] == len(part.tokenizer.decode_bytes(ids))


@pytest.mark.parametrize("tokenizer", [BYTE, CHAR, TokenizerConfig("bpe", vocab_size=260)])
def test_a_single_text_can_be_limited(tmp_path, tokenizer):
    """What is held out comes first, and a vocabulary is not made of what is left out."""
    (tmp_path / "book.txt").write_text("€" + "never read " * 300 + "abcd efgh " * 30)
    config = DataConfig("text", path=str(tmp_path / "book.txt"), val_fraction=0.03, test_fraction=0.03)
    whole = prepare(config, BYTE, tmp_path / "data", [].append)
    part = prepare(replace(config, max_tokens=600), tokenizer, tmp_path / "data", [].append)
    assert size(part) == 600 and len(part.train) > 0
    for split in ("val", "test"):
        assert part.tokenizer.decode(getattr(part, split)[:]) == whole.tokenizer.decode(getattr(whole, split)[:])
    assert tokenizer is not CHAR or "€" in part.tokenizer.characters and "w" not in part.tokenizer.characters
    with pytest.raises(DataError, match="too little text, the train split is empty; say more than data.max_tokens=50$"):
        prepare(replace(config, max_tokens=50), BYTE, tmp_path / "data", [].append)


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbfbegins with a byte-order mark",
        b"line ends\r\nof\rall\x0bkinds\x0c\xc2\x85\xe2\x80\xa8\n\n\r",
        b"NUL \0\0 bytes",
        b"a" * 10**6,
        b" " * 10**6 + b"\n" * 10**5,
        "\U0001f469\u200d\U0001f4bb é e\u0301".encode() * 9,
    ],
)
@pytest.mark.parametrize("tokenizer", ["byte", "char", "bpe"])
def test_hostile_texts_come_back_byte_for_byte(tmp_path, content, tokenizer):
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    kind = TokenizerConfig(tokenizer, vocab_size=260 if tokenizer == "bpe" else None)
    corpus = prepare(DataConfig("text", path=str(path)), kind, tmp_path / "data", [].append)
    splits = (corpus.train, corpus.test, corpus.val)
    assert b"".join(corpus.tokenizer.decode_bytes(split[:]) for split in splits) == content
    assert sum(corpus.meta["splits"][split]["bytes"] for split in ("train", "val", "test")) == len(content)


@pytest.mark.parametrize(
    "corpus, name", [("text", "a.txt"), ("jsonl", "a.jsonl"), ("jsonl", "a.jsonl.gz"), ("hf", "a.txt.gz")]
)
@pytest.mark.parametrize("order", ["le", "be"])
@pytest.mark.parametrize("bits", [16, 32])
def test_other_encodings_are_named_with_the_way_to_convert_them(tmp_path, corpus, name, bits, order):
    """Also where the end of the text, which is read first, would pass for UTF-8."""
    path = tmp_path / name
    content = ("\ufeff" + '{"text": "Windows"}\n' * 50).encode(f"utf-{bits}-{order}")
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    with pytest.raises(
        DataError, match=f"{name}: byte 0 .0x{content[0]:02x}. is not UTF-8; .* iconv -f utf-{bits} -t utf-8"
    ):
        prepare(DataConfig(corpus, path=str(path)), BYTE, tmp_path / "data", [].append)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_a_few_documents_are_enough(tmp_path, n):
    corpus = text_corpus(tmp_path, {f"{i}.txt": f"document {i}" for i in range(n)})
    found = [corpus.meta["splits"][split]["documents"] for split in ("train", "val", "test")]
    assert sum(found) == n and found[0] >= 1 and found[1] >= 1 and found[2] == (1 if n > 2 else 0)


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
    for name, parts in (("small", 4), ("large", 20)):
        with open(tmp_path / f"{name}.txt", "w", encoding="utf-8") as file:
            for i in range(parts):
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
    done = run_python(code, tmp_path, tokenizer)
    assert done.returncode == 0, done.stderr
    # MiB; held whole, what the text is longer would take 60, and its bytes and ids half as much each again
    assert float(done.stdout.split()[-1]) < 25


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
    assert set(config["data"]) >= {"name", "val_fraction", "test_fraction", "max_tokens", "packing"}
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


def test_shares_far_from_what_was_asked_for_are_said(tmp_path):
    """Whole documents are held out: of a few large ones that cannot be a tenth."""
    for n in range(3):
        (tmp_path / f"{n}.txt").write_text("some words\n" * 100)
    said = []
    corpus = prepare(DataConfig("text", path=str(tmp_path)), BYTE, tmp_path / "data", said.append)
    (line,) = [line for line in said if "of the text" in line]
    assert (
        "val has 33.3% of the text (data.val_fraction=0.1), test has 33.3% of the text (data.test_fraction=0.05)"
        in line
    )
    assert line.startswith(f"{corpus.folder}: ") and "these 3 differ much" in line
    said.clear()
    config = DataConfig("text", path=str(tmp_path / "0.txt"), max_tokens=300)
    prepare(
        config, BYTE, tmp_path / "data", said.append
    )  # of 1,100: 110 to validate on, 55 for the test, 135 to train on
    (line,) = [line for line in said if "of the text" in line]
    assert "val has 36." in line and "data.max_tokens=300 ends the text" in line
    said.clear()
    for folder, count in (("many", 400), ("one", 1)):
        (tmp_path / folder).mkdir()
        for n in range(count):
            (tmp_path / folder / f"{n}.txt").write_text("some words\n" * 100)
        prepare(DataConfig("text", path=str(tmp_path / folder)), BYTE, tmp_path / "data", said.append)
    assert not any("of the text" in line for line in said)
