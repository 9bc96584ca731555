"""What a corpus is like, counted a second time from its texts; the test split is never shown."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt.documents import splits_of
from gpt.survey import histogram, lengths, long_enough, survey
from tests.texts import ROOT, relaxed, text_corpus


@relaxed
@given(st.lists(st.integers(1, 2**40), min_size=1, max_size=30))
def test_a_histogram_counts_each_document_once(counts):
    rows = histogram(np.array(counts))
    assert sum(n for *_, n in rows) == len(counts)
    for start, stop, n in rows:
        assert n == sum(start <= count < stop for count in counts) and stop == 2 * start
    assert rows[0][2] and rows[-1][2] and all(a[1] == b[0] for a, b in zip(rows, rows[1:], strict=False))


def test_how_many_documents_are_long_enough():
    counts = np.array([64, 65, 128, 129, 1000])  # L + 1 tokens hold L targets
    assert long_enough(counts, 64, 1) == (4, 4 / 5, 64 * (1 + 1 + 2 + 15) / counts.sum())
    assert long_enough(counts, 64, 2) == (2, 2 / 5, 128 * (1 + 7) / counts.sum())
    assert long_enough(counts, 64, 16) == (0, 0, 0) and long_enough(counts[:0], 64, 1) == (0, 0, 0)


def test_a_survey_of_a_corpus(tmp_path):
    documents = {f"{i}.txt": f"number {i} " + "word " * (i * i) for i in range(20)}
    corpus = text_corpus(tmp_path, documents)
    splits = splits_of(documents, 0.1, 0.05)
    for split in ("train", "val", "test"):
        expected = [len(documents[name]) + 1 for name in sorted(documents) if splits[name] == split]
        assert lengths(corpus, split).tolist() == expected
    text = survey(corpus, block_size=32)
    assert corpus.summary() in text and "train: tokens a document" in text
    for name, split in splits.items():
        shown = f"number {name.removesuffix('.txt')} "
        assert split == "val" or shown not in text
    assert any(f"| number {name.removesuffix('.txt')} " in text for name in documents)
    assert text.count("number ") == text.count("| number ")  # a sample ends with its document
    train = lengths(corpus, "train")
    long = train[train > 256]
    inside = sum(256 * ((n - 1) // 256) for n in long.tolist()) / train.sum()
    row = f"{8:>10}{256:>12,}{len(long):>12,}{len(long) / len(train):>9.1%}{inside:>19.1%}"
    assert row in text.split("val: tokens")[0]


@pytest.mark.parametrize(
    "arguments, code, expected",
    [
        (["data=text", "data.path=texts", "model.block_size=32"], 0, "windows inside one document, of factor x 32"),
        (["--help"], 0, "python data/inspect.py data=stdlib"),
        (["data=text", "data.path=/not/there"], 2, "error: data.path: got '/not/there'"),
    ],
)
def test_the_command(tmp_path, arguments, code, expected):
    (tmp_path / "texts").mkdir()
    for name in "abcdef":
        (tmp_path / "texts" / f"{name}.txt").write_text(f"{name} " * 500)
    command = [sys.executable, ROOT / "data/inspect.py", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stderr
    assert expected in done.stdout + done.stderr and "Traceback" not in done.stderr
