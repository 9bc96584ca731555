"""Texts as documents: read in blocks, held out by name, cut between characters and where tokens end."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpt.corpus
import gpt.documents
import gpt.prepare
from gpt.documents import cut_text, read_blocks, splits_of
from gpt.errors import DataError
from tests.texts import random_text, relaxed


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
        val, test, train = cut_text(path, fraction, test_fraction)  # held out first, for who ends early
        texts = ["".join(document.blocks) for document in (train, test, val)]
        assert "".join(texts) == text
        assert [(d.split, d.ends) for d in (train, test, val)] == [("train", False), ("test", False), ("val", True)]
        assert abs(len(texts[2].encode()) - fraction * size) <= 4
        assert abs(len(texts[1].encode()) - test_fraction * size) <= 8
        same, before = cut_text(path, fraction, 0)  # without a test: the same validation
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
