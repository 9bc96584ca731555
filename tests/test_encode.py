"""Documents to ids: the same for any number of processes and from any place on, cut only where that changes nothing."""

import os
import re
import string
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpt.documents
import gpt.encode
from gpt.documents import WORD_END, Document, Skipped, Source, pieces
from gpt.encode import Place, WorkerDied, encode, encode_all, parts_of, tasks_of
from gpt.errors import DataError
from gpt.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer
from tests.texts import ROOT, relaxed

START = Place()


class Words(Tokenizer):
    """A word, with the space before it, is an id: its sha256. What byte-pair encodings do at ends of words."""

    name, vocab_size, separator = "words", 2**16, 0

    def encode(self, text):
        words = re.findall(r" ?\S+|\s", text)
        return np.array([hash(word) % 65535 + 1 for word in words], dtype=np.uint16)

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
    """Everything that is written from `start` on: (what, split, why of a skipped one, ids), and the places behind."""
    encoded = encode_all(tokenizer, tasks_of(parts_of(source, tokenizer.boundary, start)), workers)
    found = []
    for task, results, place in encoded:
        for (what, split, text), (ids, n_bytes) in zip(task, results, strict=True):
            found.append((what, split, text if what == "skipped" else "", ids.tolist(), n_bytes, place))
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
        for what, split, _, ids, n_bytes, _ in ids_of(source_of(given_documents), Words()):
            if what == "begin":
                found.append((split, [], 0))
            elif what != "skipped":
                split_before, before, size = found.pop()
                assert split_before == split
                found.append((split, before + ids, size + n_bytes))
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
    found = [(what, why) for what, _, why, *_ in ids_of(source, ByteTokenizer())]
    assert found == [("skipped", "broken"), ("skipped", "empty"), ("skipped", "empty")] + [
        (what, "") for what in ("begin", "text", "end")
    ]


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
    ids = np.array([7, 256, 65, 300])
    [(*_, begin), (*_, text), _] = [one[:5] for one in ids_of(source_of([Document("val", [ids])]), ByteTokenizer())]
    [task] = [task for task, _ in tasks_of(parts_of(source_of([Document("val", [ids])]), None, Place()))]
    results = encode(ByteTokenizer(), task)
    assert results[1][0].tolist() == ids.tolist() and results[1][1] == text == 2  # a separator has no bytes
    assert begin == 0


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
    with pytest.raises(DataError, match="'b' .U.0062. at position 1") as error:
        ids_of(source_of([Document("train", ["ab"])]), CharTokenizer("a"), workers=2)
    assert not isinstance(error.value, WorkerDied)  # the text is at fault, so nothing goes on later


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
