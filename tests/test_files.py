"""Small files: whole or not at all, and read whatever is left of them."""

import hashlib
import json
import os

import pytest

from gpt import files


@pytest.mark.parametrize("content", ["", "ä\nb\r\n", b"\x00\xff"])
def test_what_is_written_is_what_lies_there(tmp_path, content):
    for write in (files.write_synced, files.write_atomic):
        write(tmp_path / "a", content)
        expected = content.encode() if isinstance(content, str) else content
        assert (tmp_path / "a").read_bytes() == expected
        assert files.sha256_of(tmp_path / "a") == hashlib.sha256(expected).hexdigest()
    assert os.listdir(tmp_path) == ["a"]


def test_a_failed_write_leaves_the_old_content_and_nothing_beside_it(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("old")

    def full(*_):
        raise OSError(28, "No space left on device")

    for broken in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, broken, full)
            with pytest.raises(OSError, match="No space"):
                files.write_atomic(tmp_path / "a", "new")
        assert (tmp_path / "a").read_text() == "old"
        assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("content", [None, b"", b"{", b"[1]", b"3", b"\xff{}", b"[" * 100_000])
def test_no_object_reads_as_an_empty_one(tmp_path, content):
    if content is not None:
        (tmp_path / "a").write_bytes(content)
    assert files.read_json(tmp_path / "a") == {}
    (tmp_path / "a").write_text('{"ä": [1]}', encoding="utf-8")
    assert files.read_json(tmp_path / "a") == {"ä": [1]}


def test_lines_that_are_no_objects_are_counted_and_left_out(tmp_path):
    path = tmp_path / "a.jsonl"
    assert files.read_json_lines(path) == ([], 0)
    path.write_bytes(b'{"a": 1}\n\n[1]\n{"b": "x\\ry\xc2\x85"}\r\n\xff\n' + b"[" * 100_000 + b'\n{"c": 3}\n{"d": ')
    objects, bad = files.read_json_lines(path)
    assert objects == [{"a": 1}, {"b": "x\ry\x85"}, {"c": 3}] and bad == 4
    assert json.loads(json.dumps(objects)) == objects
