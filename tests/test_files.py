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


def test_a_line_is_appended_whole_behind_a_torn_one(tmp_path):
    path = tmp_path / "a.jsonl"
    files.append_json_line(path, {"a": 1})
    files.append_json_line(path, {"b": "ä\n"})
    with open(path, "ab") as file:
        file.write(b'{"c": ')
    files.append_json_line(path, {"d": 4})
    assert files.read_json_lines(path) == ([{"a": 1}, {"b": "ä\n"}, {"d": 4}], 1)
    with pytest.raises(ValueError):
        files.append_json_line(path, {"e": float("nan")})
    assert len(path.read_bytes().splitlines()) == 4


def test_processes_that_append_at_once_do_not_tear_each_other(tmp_path):
    """Long lines, also where a torn one is there at the start, which all of them see."""
    path, children = tmp_path / "a.jsonl", []
    path.write_bytes(b'{"torn": ')
    for writer in range(4):
        child = os.fork()
        if child == 0:
            try:
                for n in range(25):
                    files.append_json_line(path, {"writer": writer, "n": n, "filler": str(writer) * 20_000})
                os._exit(0)
            finally:
                os._exit(1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    objects, bad = files.read_json_lines(path)
    assert bad == 1 and len(path.read_bytes().split(b"\n")) == 1 + 100 + 1
    assert sorted((one["writer"], one["n"]) for one in objects) == [(w, n) for w in range(4) for n in range(25)]
