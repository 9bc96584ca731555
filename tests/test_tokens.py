"""Token files: ids come back whatever the shards, a writer goes on where it was, and only what is asked for is read."""

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpt.tokens
from gpt.errors import DataError
from gpt.tokens import HEADER, Tokens, TokenWriter, shard_path
from tests.texts import relaxed

UINT16, UINT32 = np.dtype(np.uint16), np.dtype(np.uint32)


def reopen(folder: Path, files: dict, dtype: np.dtype) -> Tokens:
    return Tokens([folder / name for name in files], [said["count"] for said in files.values()], dtype)


@relaxed
@given(
    st.lists(st.lists(st.integers(0, 2**16 - 1), max_size=40), max_size=6),
    st.integers(20, 70),
    st.sampled_from([UINT16, UINT32]),
    st.data(),
)
def test_ids_come_back_whatever_the_shards(tmp_path_factory, writes, shard, dtype, drawn):
    folder = tmp_path_factory.mktemp("ids")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpt.tokens, "SHARD", shard)
        writer = TokenWriter(folder, "train", dtype)
        for ids in writes:
            writer.write(np.array(ids, dtype=np.int64))
        files, sha256 = writer.finish()
    expected = np.array([one for ids in writes for one in ids], dtype=dtype)
    assert [said["count"] for said in files.values()] == [
        min(shard, len(expected) - at) for at in range(0, len(expected), shard)
    ]
    tokens = reopen(folder, files, dtype)
    assert len(tokens) == len(expected) and tokens.dtype == dtype and tokens.nbytes == expected.nbytes
    assert np.array_equal(tokens, expected) and np.asarray(tokens).dtype == dtype
    assert sha256 == hashlib.sha256(expected.tobytes()).hexdigest()  # of the ids alone
    a, b = drawn.draw(st.integers(-60, 260)), drawn.draw(st.integers(-60, 260))
    assert np.array_equal(tokens[a:b], expected[a:b]) and np.array_equal(tokens[a:], expected[a:])
    assert np.array_equal(tokens[::3], expected[::3]) and np.array_equal(tokens[::-1], expected[::-1])
    assert list(tokens) == expected.tolist()
    if len(expected):
        assert tokens[-1] == expected[-1] and tokens[a % len(expected)] == expected[a % len(expected)]
    with pytest.raises(IndexError):
        tokens[len(expected)]


@relaxed
@given(st.integers(0, 200), st.integers(0, 100), st.integers(50, 90))
def test_a_writer_goes_on_with_what_another_one_left(tmp_path_factory, kept, lost, shard):
    folder = tmp_path_factory.mktemp("ids")
    ids = np.random.default_rng().integers(0, 2**16, kept + lost + 50)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpt.tokens, "SHARD", shard)
        killed = TokenWriter(folder, "a", UINT16)
        killed.write(ids[: kept + lost])
        killed.sync()  # and its file is left open, its header without a count
        writer = TokenWriter(folder, "a", UINT16, count=kept)
        writer.write(ids[kept:])
        files, sha256 = writer.finish()
    assert np.array_equal(reopen(folder, files, UINT16), ids)
    assert sha256 == hashlib.sha256(ids.astype(np.uint16).tobytes()).hexdigest()


def test_a_file_that_lost_its_end_cannot_be_gone_on_with(tmp_path):
    writer = TokenWriter(tmp_path, "a", UINT16)
    writer.write(np.arange(10))
    writer.close()
    with pytest.raises(DataError, match="a-00000.bin: shorter than 54 bytes"):
        TokenWriter(tmp_path, "a", UINT16, count=11)
    with pytest.raises(DataError, match="b-00000.bin: shorter than"):
        TokenWriter(tmp_path, "b", UINT16, count=1)


def test_the_layout_is_what_the_docstring_says(tmp_path):
    writer = TokenWriter(tmp_path, "val", UINT32)
    writer.write(np.array([1, 70000]))
    files, _ = writer.finish()
    content = (tmp_path / "val-00000.bin").read_bytes()
    numbers = [1, 4, 2, 0, 0, 0]  # version, bytes a number, count (8 bytes), zero (8 bytes)
    assert content == b"nanoPE\r\n" + np.array([*numbers, 1, 70000], "<u4").tobytes()
    assert files == {
        "val-00000.bin": {"dtype": "uint32", "count": 2, "sha256": hashlib.sha256(content[32:]).hexdigest()}
    }


def test_ids_outside_of_the_vocabulary_are_refused_and_never_wrapped(tmp_path):
    writer = TokenWriter(tmp_path, "ids", UINT16, vocab_size=50000)
    writer.write(np.array([1, 2, 3]))
    with pytest.raises(DataError, match="ids: token id 70,000 at index 5, allowed: 0 to 49,999"):
        writer.write(np.array([4, 5, 70000]))
    with pytest.raises(DataError, match="token id -1 at index 3"):
        writer.write(np.array([-1]))
    files, _ = writer.finish()
    assert reopen(tmp_path, files, UINT16)[:].tolist() == [1, 2, 3]


def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path):
    writer = TokenWriter(tmp_path, "a", UINT16)
    writer.write(np.arange(10000))
    tokens = reopen(tmp_path, writer.finish()[0], UINT16)
    os.truncate(shard_path(tmp_path, "a", 0), HEADER.size + 1000)
    assert tokens[:500].tolist() == list(range(500))
    with pytest.raises(DataError, match="a-00000.bin: ends at byte 1,032, was longer when opened"):
        tokens[:]


def test_files_are_closed_with_their_tokens(tmp_path):
    writer = TokenWriter(tmp_path, "a", UINT16)
    writer.write(np.arange(10))
    files, _ = writer.finish()
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else pytest.skip("no /proc here")
    for _ in range(20):
        reopen(tmp_path, files, UINT16)
    assert len(os.listdir("/proc/self/fd")) == before
