"""Documents to ids: the same for any number of processes and from any place on, cut only where that changes nothing."""

import json
import os
import re
import string
import subprocess
import sys
import time
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpt.documents
import gpt.encode
from gpt.documents import WORD_END, Document, Skipped, Source, pieces
from gpt.draft import Draft
from gpt.encode import Part, Place, WorkerDied, encode_all, parts_of, tasks_of
from gpt.errors import DataError
from gpt.prepare import prepare
from gpt.schema import DataConfig, TokenizerConfig
from gpt.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer
from tests.texts import CHAR, ROOT, relaxed, size, text_corpus

START = Place()


class Words(Tokenizer):
    """A word, with the space before it, is an id: its crc32. What byte-pair encodings do at ends of words."""

    name, vocab_size, separator = "words", 2**16, 0

    def encode(self, text):
        words = re.findall(r" ?\S+|\s", text)
        return np.array([zlib.crc32(word.encode()) % 65535 + 1 for word in words], dtype=np.uint16)

    def token_bytes(self):
        return np.ones(self.vocab_size, dtype=np.int64)


def source_of(documents: list) -> Source:
    return Source("a list", {}, lambda start: iter(documents[start:]))


texts = st.text(alphabet="ab é漢\n", max_size=30)
documents = st.lists(
    st.one_of(
        st.builds(Skipped, st.sampled_from(["empty", "broken"])),
        st.builds(Document, st.sampled_from(["train", "val", "test"]), st.lists(texts, max_size=5), st.booleans()),
    ),
    max_size=8,
)


def ids_of(source: Source, tokenizer: Tokenizer, start: Place = START, workers: int = 1) -> list:
    """Everything that is written from `start` on: each part with its ids and bytes, and the place behind its task."""
    found = []
    for task, encoded, place in encode_all(tokenizer, tasks_of(parts_of(source, tokenizer.boundary, start)), workers):
        assert len(task) == len(encoded.counts) == len(encoded.n_bytes) and encoded.counts.sum() == len(encoded.ids)
        each = np.split(encoded.ids, encoded.counts.cumsum()[:-1])
        found += [(part, ids.tolist(), int(n), place) for part, ids, n in zip(task, each, encoded.n_bytes, strict=True)]
    return found


@relaxed
@given(documents, st.integers(1, 40))
def test_ids_are_those_of_whole_documents(given_documents, task):
    expected = []
    for one in given_documents:
        text = "".join(one.blocks) if isinstance(one, Document) else ""
        if text:
            expected += [(one.split, Words().encode(text).tolist() + [0] * one.ends, len(text.encode()))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpt.encode, "TASK", task)
        found = []
        for part, ids, n_bytes, _ in ids_of(source_of(given_documents), Words()):
            if isinstance(part, Skipped):
                assert (ids, n_bytes) == ([], 0)
                continue
            before, size = ([], 0) if part.begins else found.pop()[1:]
            found.append((part.split, before + ids, size + n_bytes))
    assert found == expected


@relaxed
@given(documents, st.integers(1, 40))
def test_one_can_go_on_from_every_place(given_documents, task):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpt.encode, "TASK", task)
        source = source_of(given_documents)
        whole = ids_of(source, Words())
        for n, (*_, place) in enumerate(whole, start=1):
            if n == len(whole) or whole[n][-1] != place:  # the end of a task
                assert [one[:-1] for one in ids_of(source, Words(), place)] == [one[:-1] for one in whole[n:]]


def test_what_is_left_out_is_counted_with_its_reason():
    source = source_of([Skipped("broken"), Document("train", ["", ""]), Document("val", []), Document("train", ["a"])])
    *skipped, part = [part for part, *_ in ids_of(source, ByteTokenizer())]
    assert skipped == [Skipped("broken"), Skipped("empty"), Skipped("empty")]
    assert part == Part("train", "a", True, True, "a list: document 4 (train)", 0)


@relaxed
@given(documents, st.integers(0, 60), st.integers(1, 40))
def test_of_a_text_that_may_be_cut_anywhere_no_more_is_read_than_is_wanted(given_documents, left, task):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpt.encode, "TASK", task)
        whole = "".join(block for one in given_documents if isinstance(one, Document) for block in one.blocks)
        tasks = list(tasks_of(parts_of(source_of(given_documents), None, START, left)))
        read = [[part for part in task if isinstance(part, Part)] for task, _ in tasks]
        assert "".join(part.text for parts in read for part in parts) == whole[:left]
        for n, (_, place) in enumerate(tasks, start=1):  # one can go on from every place with what is left then
            rest = left - sum(len(part.text) for parts in read[:n] for part in parts)
            assert list(tasks_of(parts_of(source_of(given_documents), None, place, rest))) == tasks[n:]
        # by words, a text that is cut would have other ids
        parts = [part for part, *_ in parts_of(source_of(given_documents), WORD_END, START, max(left, 1))]
        assert parts == [part for part, *_ in parts_of(source_of(given_documents), WORD_END, START)]


@pytest.mark.parametrize("workers", [2, 3])
def test_any_number_of_processes_gives_the_same_ids(monkeypatch, workers):
    monkeypatch.setattr(gpt.encode, "TASK", 50)
    monkeypatch.setattr(gpt.encode, "ALONE", 1)
    monkeypatch.setattr(CharTokenizer, "boundary", WORD_END)  # so that it is not done in this process
    rng = np.random.default_rng()
    written = ["".join(rng.choice(list(string.ascii_lowercase + "   "), n)) for n in rng.integers(1, 300, 60)]
    source = source_of([Document("train", [text[:9], text[9:]]) for text in written])
    kind = CharTokenizer("".join(sorted(set(string.ascii_lowercase + " "))))
    assert ids_of(source, kind, workers=workers) == ids_of(source, kind)


def test_ids_instead_of_text_stay_what_they_are():
    """Those that the vocabulary lacks too, which are refused where they are written."""
    ids = np.array([7, 256, 65, 300, -1])
    documents = [Document("val", [ids[:3], ids[3:]]), Document("train", [ids[:1]], ends=False)]
    found = [one[1:3] for one in ids_of(source_of(documents), ByteTokenizer())]
    assert found == [([7, 256, 65], 2), ([300, -1, 256], 0), ([7], 1)]  # a separator has no bytes


def test_many_small_documents_take_little_time_each():
    source = source_of([Document("train", ["a"])] * 50_000 + [Document("val", [np.array([5])])] * 50_000)
    began = time.process_time()
    found = list(encode_all(ByteTokenizer(), tasks_of(parts_of(source, None, START)), 1))
    assert time.process_time() - began < 3  # it takes 0.5 s
    assert sum(len(encoded.ids) for _, encoded, _ in found) == 200_000


@relaxed
@given(documents, st.integers(0, 60), st.integers(1, 40), st.booleans())
def test_a_draft_holds_the_first_tokens_and_no_more(tmp_path_factory, given_documents, limit, task, separated):
    """Counted a second time, token by token, whatever the size of the tasks."""
    kind = ByteTokenizer() if separated else CharTokenizer("".join(sorted("ab é漢\n")))
    ids, starts, n_bytes = ({split: new() for split in ("train", "val", "test")} for new in (list, list, int))
    skipped, left = Counter(), limit
    for one in given_documents:
        text = "".join(one.blocks) if isinstance(one, Document) else ""
        if not left:
            break
        if not text:
            skipped[one.why if isinstance(one, Skipped) else "empty"] += 1
            continue
        starts[one.split].append(len(ids[one.split]))
        kept = (kind.encode(text).tolist() + [256] * (separated and one.ends))[:left]
        left -= len(kept)
        ids[one.split] += kept
        n_bytes[one.split] += len(kind.decode_bytes(kept))
    source, folder = source_of(given_documents), tmp_path_factory.mktemp("draft")
    draft = Draft(folder, "", source, lambda: kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpt.encode, "TASK", task)
        for found in encode_all(kind, tasks_of(parts_of(source, kind.boundary, START, limit)), 1):
            draft.write(*found, limit)
    draft.save()
    draft.close()
    for split in ids:
        for stem, dtype, numbers in ((split, np.uint16, ids[split]), (f"{split}_documents", np.uint64, starts[split])):
            path = folder / f"{stem}-00000.bin"
            assert (np.fromfile(path, dtype, offset=32).tolist() if path.exists() else []) == numbers
    assert {split: counts["bytes"] for split, counts in draft.counts().items()} == n_bytes
    assert draft.skipped == skipped


class Killed(BaseException):
    """Stands for kill -9."""


@pytest.mark.parametrize("task, kills", [(2**20, 0), (100, 0), (100, 3)])
def test_a_limit_gives_the_first_characters_and_a_vocabulary_of_these(tmp_path, monkeypatch, task, kills):
    """Of a text in which every line has a character that no other has."""
    lines = [chr(0x4E00 + n) * 3 + " of 漢 and é" for n in range(1000)]
    (tmp_path / "all.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    config = DataConfig("jsonl", path=str(tmp_path / "all.jsonl"), max_tokens=6000)
    monkeypatch.setattr(gpt.encode, "TASK", task)
    write, save, left = Draft.write, Draft.save, [0]

    def counted(draft, *given):
        if kills and not left[0]:
            left[0] = -1
            raise Killed
        write(draft, *given)
        save(draft)
        left[0] -= 1

    monkeypatch.setattr(Draft, "write", counted)
    for n in range(kills):
        left[0] = 5 + n
        with pytest.raises(Killed):
            prepare(config, CHAR, tmp_path / "data", [].append, 1)
    left[0], said = -1, []
    corpus = prepare(config, CHAR, tmp_path / "data", said.append, 1)
    assert bool(kills) == any("going on behind" in line for line in said)
    whole = "".join(lines)[:6000]
    assert corpus.tokenizer.characters == "".join(sorted(set(whole))) and size(corpus) == 6000
    decoded = "".join(corpus.tokenizer.decode(getattr(corpus, split)[:]) for split in ("train", "val", "test"))
    assert sorted(decoded) == sorted(whole)


# A preparation with a worker that is killed, or that outlives its parent: in a process of its own.
KILLED = """
import os, signal, sys, threading, time
import gpt.encode
from gpt.documents import Document, Source, WORD_END
from gpt.encode import *
from gpt.tokenizer import CharTokenizer
gpt.encode.TASK, gpt.encode.ALONE = 1000, 1
CharTokenizer.boundary = WORD_END
source = Source("", {}, lambda start: (Document("train", ["abc " * 500]) for _ in range(10000)))
encoded = encode_all(CharTokenizer(" abc"), tasks_of(parts_of(source, WORD_END, Place())), 2)
for n, _ in enumerate(encoded):
    if n == 20:
        import multiprocessing
        children = [child.pid for child in multiprocessing.active_children()]
        print(*children, flush=True)
        os.kill(os.getpid() if sys.argv[1] == "parent" else children[0], signal.SIGKILL)
"""


def spoiled(whom: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", KILLED, whom]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


def test_a_worker_that_is_killed_is_named():
    done = spoiled("worker")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "WorkerDied: a process that tokenizes died, killed or out of memory; the same command goes on" in last


def test_workers_end_with_their_parent():
    if not Path("/proc").exists():
        pytest.skip("whether a process lives is read from /proc, which this system lacks")
    workers = [int(word) for word in spoiled("parent").stdout.split()]
    assert workers
    until = time.monotonic() + 20
    while any(Path(f"/proc/{pid}/exe").exists() for pid in workers) and time.monotonic() < until:
        time.sleep(0.1)
    assert not any(Path(f"/proc/{pid}/exe").exists() for pid in workers)


def test_an_error_in_a_worker_is_the_users(monkeypatch):
    monkeypatch.setattr(gpt.encode, "ALONE", 0)
    monkeypatch.setattr(CharTokenizer, "boundary", WORD_END)
    with pytest.raises(DataError, match="'b' .U.0062., which is not among") as error:
        ids_of(source_of([Document("train", ["ab"])]), CharTokenizer("a"), workers=2)
    assert not isinstance(error.value, WorkerDied)  # else the same command would go on, to the same end


@pytest.mark.parametrize("file, where", [("", "a list: document 2 .val."), ("texts/b.txt", "texts/b.txt")])
@pytest.mark.parametrize("text, why", [("b", "'b' .U.0062., which is not among"), ("\udfff", "U.DFFF, half a surr")])
def test_a_character_without_an_id_is_named_with_its_document_and_place(file, where, text, why):
    documents = [Document("train", ["aaa"]), Document("val", ["a" * 1000, "", "aa" + text], file=file)]
    kind = CharTokenizer("a") if text == "b" else ByteTokenizer()
    with pytest.raises(DataError, match=f"^{where}: character 1,002 is {why}"):
        ids_of(source_of(documents), kind)


def test_the_file_of_a_folder_that_has_such_a_character_is_named(tmp_path):
    (tmp_path / "characters.json").write_text('"ab"')
    kind = TokenizerConfig("char", file=str(tmp_path / "characters.json"))
    with pytest.raises(DataError, match=f"^{tmp_path}/texts/b.txt: character 2 is 'X' .U.0058., which is not among"):
        text_corpus(tmp_path, {"a.txt": "ab", "b.txt": "abXX", "c.txt": "X"}, kind)


@relaxed
@given(st.lists(st.text(alphabet="ab \n漢", max_size=12), max_size=12), st.integers(4, 40))
def test_pieces_are_the_text_and_end_where_words_do(blocks, longest):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpt.documents, "LONGEST", longest)
        found = list(pieces(blocks, WORD_END))
    assert "".join(found) == "".join(blocks)
    largest = max(map(len, blocks), default=0)
    for n, piece in enumerate(found[:-1]):
        at_a_word = re.search(r"\S$", piece) and found[n + 1].startswith(" ")
        # or it was too long to be held, with what came next
        assert at_a_word or len(piece) <= longest < len(piece) + largest or len(piece) > longest
    assert all(len(piece) <= max(longest, largest) + largest for piece in found)
    assert list(pieces(blocks, None)) == blocks


def test_a_line_without_an_end_is_read_in_bounded_memory():
    """A line of 40 MB of one character: held whole it would be one piece."""
    block = "a" * 2**20
    sizes = [len(piece) for piece in pieces((block for _ in range(40)), WORD_END)]
    assert sum(sizes) == 40 * 2**20 and max(sizes) <= 2**21
