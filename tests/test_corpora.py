"""Corpora of rows and of others' files: JSON lines, Parquet, markers, nanoGPT's tokens, the Hugging Face hub.

Nothing here needs the hub: copies of it are read by the readers of JSON lines, Parquet and text.
"""

import gzip
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import data.hf as hf
import data.nanogpt as nanogpt
import data.stdlib as stdlib
import data.text as text_package
import gpt.download
import gpt.draft
import gpt.encode
import gpt.sources
from data import COMMON, CORPORA, package
from data.wikitext import articles, lines_of
from gpt.cli import compose
from gpt.documents import Skipped, hash_share
from gpt.errors import ConfigError, DataError, UserError
from gpt.meter import Meter
from gpt.prepare import check_source, prepare
from gpt.schema import DataConfig, TokenizerConfig, build
from tests.texts import BYTE, CHAR, ROOT, relaxed, run_python
from tests.tokenizer_files import fill

TEXTS = [
    "plain",
    "é漢👩",
    "\r\n \r\n",
    "a\x00b",
    "\ufeffmark",
    '"quoted" \\ and {braces}',
    "<|endoftext|>",
    " ",
    "last\n",
]


def read(config: DataConfig, start: int = 0) -> list:
    """The documents as (split, text), and why of those that are left out."""
    return [
        one.why if isinstance(one, Skipped) else (one.split, "".join(one.blocks))
        for one in package(config).source(config).documents(start)
    ]


def texts_of(found: list) -> list[str]:
    return [one[1] for one in found if not isinstance(one, str)]


def write_lines(path: Path, rows: list) -> str:
    """A file of JSON lines, packed as its name says."""
    content = "".join(json.dumps(row, ensure_ascii=len(str(row)) % 2 == 0) + "\n" for row in rows).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(packed(path.name, content))
    return str(path)


def packed(name: str, content: bytes) -> bytes:
    if name.endswith(".gz"):
        return gzip.compress(content)
    if name.endswith(".zst"):
        return pyarrow.compress(content, "zstd", asbytes=True)
    return content


def write_parquet(path: Path, rows: list[dict], **options) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, **options)
    return str(path)


# ------------------------------------------------------------------------------------------------------ every corpus


def test_every_corpus_can_be_chosen():
    names = {path.stem for path in (ROOT / "configs/data").glob("*.yaml")}
    assert names == set(CORPORA)
    for name in names:
        text = (ROOT / f"configs/data/{name}.yaml").read_text()
        config = build(DataConfig, {k: v for k, v in yaml.safe_load(text).items() if k != "defaults"}, "data")
        assert config.name == name and package(config) is CORPORA[name]
        header = text.split("\nname:")[0]
        for part in ("Size:", "Licence:", "Time to prepare:"):
            assert part in header, (name, part)


@pytest.mark.parametrize("name", CORPORA)
def test_a_key_of_another_corpus_is_refused(name, tmp_path):
    other = {"path": "x", "marker": "x", "site_packages": True, "text_field": "x", "repo": "a/b", "val_split": "x"}
    other |= {"val_fraction": 0.5, "test_fraction": 0.3}
    for key in set(other) - CORPORA[name].KEYS:
        with pytest.raises(ConfigError, match=f"data.{key}: got .*, allowed: .*, since data={name} does not read it"):
            check_source(DataConfig(name, **{key: other[key]}), BYTE, tmp_path)
    assert COMMON | {*other, "revision", "config", "split", "test_split"} == set(DataConfig.__dataclass_fields__)


def sources(folder: Path) -> dict[str, DataConfig]:
    """A small corpus of each kind, with documents that are left out."""
    rows = [{"text": text and f"{n} {text}"} for n, text in enumerate([*TEXTS * 5, "", None, "end"])]
    write_lines(folder / "a/0.jsonl", rows[:30])
    write_lines(folder / "a/1.jsonl.gz", rows[30:])
    write_parquet(folder / "b/0.parquet", rows[:30], row_group_size=7)
    write_parquet(folder / "b/1.parquet", rows[30:])
    (folder / "marked.txt").write_bytes("<>".join(TEXTS * 5 + ["", "end"]).encode())
    for n, text in enumerate(TEXTS * 3):
        (folder / "c").mkdir(exist_ok=True)
        (folder / f"c/{n}.txt").write_bytes(text.encode())
    (folder / "d").mkdir()
    np.array([5, 50256, 50256, 7, 8, 50256, 9] * 9, "<u2").tofile(folder / "d/train.bin")
    np.array([1, 50256, 50256], "<u2").tofile(folder / "d/val.bin")
    for split in ("train", "validation"):
        write_parquet(folder / f"e/{split}.parquet", [{"text": f"{split} {n}" if n % 5 else ""} for n in range(20)])
        lines = [" \n", " = A = \n", " \n", "a\n", " \n", " = B = \n", " \n", "b\n"]
        write_parquet(folder / f"f/{split}.parquet", [{"text": "" if line == " \n" else line} for line in lines])
    return {
        "jsonl": DataConfig("jsonl", path=str(folder / "a")),
        "parquet": DataConfig("parquet", path=str(folder / "b")),
        "marker": DataConfig("text", path=str(folder / "marked.txt"), marker="<>"),
        "text": DataConfig("text", path=str(folder / "c")),
        "single": DataConfig("text", path=str(folder / "c/1.txt")),
        "nanogpt": DataConfig("nanogpt", path=str(folder / "d")),
        "hf": DataConfig("hf", path=str(folder / "a")),
        "hf, two splits": DataConfig("hf", path=str(folder / "e"), val_split="validation"),
        "wikitext": DataConfig("wikitext2", path=str(folder / "f"), val_split="validation"),
    }


@pytest.mark.parametrize(
    "kind", ["jsonl", "parquet", "marker", "text", "single", "nanogpt", "hf", "hf, two splits", "wikitext"]
)
def test_documents_can_be_read_from_any_number_on(tmp_path, kind):
    """A killed preparation goes on there."""
    config = sources(tmp_path)[kind]
    found = package(config).source(config).documents

    def listed(start: int) -> list:
        rows = []
        for one in found(start):
            blocks = None if isinstance(one, Skipped) else [list(block) for block in one.blocks]
            rows.append((one, None) if blocks is None else (one.split, one.ends, sum(blocks, [])))
        return rows

    everything = listed(0)
    assert len(everything) > 1 and listed(0) == everything
    starts = range(len(everything) + 2)
    for start in starts:
        assert listed(start) == everything[start:], start


# -------------------------------------------------------------------------------------------------------- JSON lines


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.ndjson", "a.json"])
def test_json_lines_are_documents(tmp_path, name):
    config = DataConfig("jsonl", path=write_lines(tmp_path / name, [{"id": 3, "text": text} for text in TEXTS]))
    assert texts_of(read(config)) == TEXTS
    corpus = prepare(config, BYTE, tmp_path / "data", lambda _: None)
    splits = [one[0] for one in read(config)]
    for split in ("train", "val", "test"):
        mine = [text for text, at in zip(TEXTS, splits, strict=True) if at == split]
        assert len(mine) and corpus.tokenizer.decode(getattr(corpus, split)[:]) == "".join(mine)
        assert corpus.meta["splits"][split]["documents"] == len(mine)


def test_files_that_were_joined_are_read_to_their_end(tmp_path):
    for name, members in (("a.jsonl.gz", 3), ("a.jsonl.zst", 3)):
        content = packed(name, b'{"text": "one"}\n{"text": "two"}\n')
        (tmp_path / name).write_bytes(content * members)
        assert texts_of(read(DataConfig("jsonl", path=str(tmp_path / name)))) == ["one", "two"] * members


def test_a_folder_of_json_lines(tmp_path):
    for n, name in enumerate(["b.jsonl", "a/c.jsonl.zst", "a/b.JSON"]):
        write_lines(tmp_path / "in" / name, [{"body": f"{name} {i}"} for i in range(n + 1)])
    (tmp_path / "in/notes.txt").write_text("not these")
    config = DataConfig("jsonl", path=str(tmp_path / "in"), text_field="body")
    assert texts_of(read(config)) == [f"a/b.JSON {i}" for i in range(3)] + [
        "a/c.jsonl.zst 0",
        "a/c.jsonl.zst 1",
        "b.jsonl 0",
    ]
    corpus = prepare(config, BYTE, tmp_path / "data", lambda _: None)
    assert corpus.meta["skipped"] == {"files of another kind": 1}
    pattern = DataConfig("jsonl", path=str(tmp_path / "in/**/*.jsonl"), text_field="body")
    assert texts_of(read(pattern)) == ["b.jsonl 0"]


def test_what_is_left_out_of_json_lines_is_counted(tmp_path):
    lines = ['\ufeff{"text": "a"}', "", " \t", '{"text": ""}', '{"text": null}', '{"text": "b"}', '{"text": "c"}']
    (tmp_path / "a.jsonl").write_bytes("\r\n".join(lines).encode())
    config = DataConfig("jsonl", path=str(tmp_path / "a.jsonl"))
    assert texts_of(read(config)) == ["a", "b", "c"]
    corpus = prepare(config, BYTE, tmp_path / "data", lambda _: None)
    assert corpus.meta["skipped"] == {"blank lines": 2, "empty texts": 2}
    assert "2 blank lines" in corpus.summary()


NOTHING = {
    "blank lines": b"\n\n\n",
    "empty texts": b'{"text": ""}\n{"text": null}\n',
}


@pytest.mark.parametrize("tokenizer", [BYTE, CHAR, TokenizerConfig("bpe", vocab_size=300)], ids=lambda one: one.name)
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet", "nothing.jsonl.gz", "nothing.parquet"])
@pytest.mark.parametrize("corpus", ["own", "hf"])
def test_a_corpus_without_any_text_is_one_line(tmp_path, corpus, name, tokenizer):
    path, corpus = tmp_path / name, ("parquet" if "parquet" in name else "jsonl") if corpus == "own" else corpus
    for why, content in NOTHING.items():
        skipped = {"blank lines": 3, "empty texts": 2}[why]
        if name.endswith("parquet"):
            n = 0 if name.startswith("nothing") else 2
            pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array([None] * n, pyarrow.string())}), path)
            why, skipped = "empty texts", n
        else:
            content, skipped = (b"", 0) if name.startswith("nothing") else (content, skipped)
            path.write_bytes(packed(name, content))
        left = rf" .left out: {skipped} {why}." if skipped else ""
        message = rf"{name}: too little text, the train split is empty{left}; give"
        if tokenizer is not BYTE:
            message = "the texts are empty|for so little training text"
        with pytest.raises(UserError, match=message) as error:
            prepare(DataConfig(corpus, path=str(path)), tokenizer, tmp_path / "data", lambda _: None)
        assert "\n" not in str(error.value)


def test_what_a_corpus_of_one_document_lacks(tmp_path):
    config = DataConfig("jsonl", path=write_lines(tmp_path / "a.jsonl", [{"text": "long " * 1000}]), val_fraction=0.3)
    message = "val split is empty; give .* more documents, or others than data.val_fraction=0.3 and data.test_fraction"
    with pytest.raises(DataError, match=message):
        prepare(config, BYTE, tmp_path / "data", lambda _: None)


GOOD = '{"text": "é"}\n'.encode()


@pytest.mark.parametrize(
    "line, message",
    [
        (b'{"text": "a', "line 3, byte 39 is no JSON .Unterminated string"),
        ('{"text": "é" "b"}'.encode(), "line 3, byte 44 is no JSON .Expecting ',' delimiter"),
        (b'{"text": "a\nb"}', "line 3, byte 41 is no JSON"),
        (b'{"text": "a\x00b"}', "line 3, byte 41 is no JSON .Invalid control character"),
        (b'{"text": "caf\xe9"}', "line 3, byte 43 .0xe9. is not UTF-8"),
        (b'\xff\xfe{\x00"\x00', "line 3, byte 30 .0xff. is not UTF-8"),
        (b'{"txt": "a", "n": 3}', "line 3 .byte 30.: has no 'text'; allowed as data.text_field: txt, n"),
        (b"{}", "line 3 .byte 30.: has no 'text'; allowed as data.text_field: nothing"),
        (b'{"text": 3}', "line 3 .byte 30.: 'text' is a int, allowed: a text or null"),
        (b'{"text": ["a"]}', "line 3 .byte 30.: 'text' is a list"),
        (b'["a"]', "line 3 .byte 30. holds .*; allowed: an object with a text"),
        (b"[" * 100_000, "line 3 .byte 30. holds '.{40}'; allowed: an object with a text"),
        (b'{"a":' * 100_000, "line 3 .byte 30. is no JSON that can be read"),
        (b'{"text": "ab\\ud800"}', "line 3 .byte 30.: character 2 of 'text' is U.D800, half a surrogate pair"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(tmp_path, line, message):
    for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst"):
        (tmp_path / name).write_bytes(packed(name, GOOD * 2 + line))
        with pytest.raises(DataError, match=f"{name}: {message}") as error:
            prepare(DataConfig("jsonl", path=str(tmp_path / name)), BYTE, tmp_path / "data", lambda _: None)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "another kind"])
def test_a_damaged_packed_file_is_named(tmp_path, name, damage):
    rows = b"".join(json.dumps({"text": os.urandom(40).hex()}).encode() + b"\n" for _ in range(3000))
    content = packed(name, rows)
    if damage == "cut":
        content = content[: len(content) // 2]
    elif damage == "flipped" and name.endswith(".gz"):  # Arrow writes .zst without the checksum that would tell
        middle = len(content) // 2
        content = content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1 :]
    else:
        content = rows
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"{name}: (cannot be read behind line [0-9,]+ |line [0-9,]+)") as error:
        read(DataConfig("jsonl", path=str(tmp_path / name)))
    assert "\n" not in str(error.value)


def test_a_line_that_is_too_long_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("data.jsonl.LINE", 1000)
    longest = json.dumps({"text": "a" * 988}) + "\n"  # 1,000 bytes, and a line's end
    (tmp_path / "a.jsonl").write_text(longest * 3)
    config = DataConfig("jsonl", path=str(tmp_path / "a.jsonl"))
    assert texts_of(read(config)) == ["a" * 988] * 3
    (tmp_path / "a.jsonl").write_text(longest * 3 + longest.replace("a", "aa", 1))
    with pytest.raises(
        DataError, match="a.jsonl: line 4 .byte [0-9,]+. has more than 1,000 bytes; allowed: .*data=text"
    ):
        read(config)


def peak(corpus: str, path: object) -> float:
    """GB of memory that reading all documents takes at most, or refusing them."""
    code = """
import re, sys
from pathlib import Path
from data import package
from gpt.errors import DataError
from gpt.schema import DataConfig
config = DataConfig(sys.argv[1], path=sys.argv[2])
try:
    for document in package(config).source(config).documents(0):
        for block in document.blocks:
            pass
except DataError as error:
    print(error)
print(int(re.search("VmHWM: *([0-9]+) kB", Path("/proc/self/status").read_text().replace("\\t", " "))[1]) / 2**20)
"""
    if not Path("/proc/self/status").exists():
        pytest.skip("no /proc here")
    done = run_python(code, corpus, path)
    assert done.returncode == 0, done.stderr
    return float(done.stdout.split()[-1])


def test_memory_is_bounded_whatever_a_line_or_row_holds(tmp_path):
    line = tmp_path / "a.jsonl"
    line.write_bytes(b'{"text": "' + "👩".encode() + b"a" * 10**8 + b'"}\n')
    assert peak("jsonl", line) < 0.3
    rows = write_parquet(tmp_path / "a.parquet", [{"text": "a" * 10_000_000}] * 24)
    assert peak("parquet", rows) < 0.3


def test_errors_are_bounded_and_show_what_cannot_be_printed(tmp_path):
    path = write_lines(tmp_path / "a\nb\x1b.jsonl", [{"k" * 5_000_000: 1}])
    with pytest.raises(DataError, match=r"a\\nb\\x1b.jsonl: line 1 .byte 0.: has no 'text'; .*: kkk+…kkk+$") as error:
        read(DataConfig("jsonl", path=path))
    assert len(str(error.value)) < 500
    (tmp_path / "a\nb.txt").write_text("a text " * 100)
    corpus = prepare(DataConfig("text", path=str(tmp_path / "a\nb.txt")), BYTE, tmp_path / "data", lambda _: None)
    assert r"/a\nb.txt" in corpus.summary() and corpus.meta["source"].endswith("/a\nb.txt")
    with pytest.raises(DataError) as error:
        check_source(DataConfig("text", path="/" + "long/" * 5000), BYTE, tmp_path / "data")
    assert len(str(error.value)) < 1000
    assert len(str(UserError("a" * 10**6))) <= 2000


def test_a_document_comes_in_blocks(tmp_path):
    text = "é" * (3 * 2**20 + 5)
    for config in (
        DataConfig("jsonl", path=write_lines(tmp_path / "a.jsonl", [{"text": text}])),
        DataConfig("parquet", path=write_parquet(tmp_path / "a.parquet", [{"text": text}])),
    ):
        (document,) = package(config).source(config).documents(0)
        blocks = list(document.blocks)
        assert "".join(blocks) == text and max(map(len, blocks)) <= 2**20


# ----------------------------------------------------------------------------------------------------------- Parquet


def test_parquet_rows_are_documents(tmp_path):
    rows = [{"id": n, "body": text} for n, text in enumerate([*TEXTS, None, ""] * 20)]
    path = write_parquet(tmp_path / "a.parquet", rows, row_group_size=7)
    config = DataConfig("parquet", path=path, text_field="body")
    assert texts_of(read(config)) == TEXTS * 20
    corpus = prepare(config, BYTE, tmp_path / "data", lambda _: None)
    assert corpus.meta["skipped"] == {"empty texts": 40}


def test_categories_are_texts(tmp_path):
    column = pyarrow.array([*TEXTS, None, "", *TEXTS]).dictionary_encode()
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet", row_group_size=4)
    assert pyarrow.types.is_dictionary(pyarrow.parquet.ParquetFile(tmp_path / "a.parquet").schema_arrow.field(0).type)
    assert texts_of(read(DataConfig("parquet", path=str(tmp_path / "a.parquet")))) == TEXTS * 2
    numbers = pyarrow.table({"text": pyarrow.array([1, 2]).dictionary_encode()})
    pyarrow.parquet.write_table(numbers, tmp_path / "n.parquet")
    with pytest.raises(DataError, match="column 'text' holds int64, allowed: string"):
        read(DataConfig("parquet", path=str(tmp_path / "n.parquet")))


def test_parquet_that_cannot_be_used(tmp_path):
    def refused(path: str, message: str, **keys) -> None:
        with pytest.raises(DataError, match=message) as error:
            prepare(DataConfig("parquet", path=path, **keys), BYTE, tmp_path / "data", lambda _: None)
        assert "\n" not in str(error.value)

    good = write_parquet(tmp_path / "a.parquet", [{"text": "a", "n": 1}] * 3)
    refused(good, r"a.parquet: has no column 'body'; allowed as data.text_field: \['text', 'n'\]", text_field="body")
    refused(good, "a.parquet: column 'n' holds int64, allowed: string", text_field="n")
    (tmp_path / "cut.parquet").write_bytes(Path(good).read_bytes()[:-9])
    refused(str(tmp_path / "cut.parquet"), "cut.parquet: cannot be read as Parquet")
    (tmp_path / "text.parquet").write_text("no Parquet at all")
    refused(str(tmp_path / "text.parquet"), "text.parquet: cannot be read as Parquet")
    latin = pyarrow.array([b"a", b"caf\xe9"], pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": latin}), tmp_path / "latin.parquet")
    refused(str(tmp_path / "latin.parquet"), "latin.parquet: row 1 cannot be read .*utf-8")


# ----------------------------------------------------------------------------------------------------------- markers


@relaxed
@given(
    st.text(alphabet="ab<>é", max_size=30),
    st.sampled_from(["a", "ab", "aab", "abab", "<>", "é<"]),
    st.integers(1, 7),
)
def test_a_text_is_cut_at_its_marker(text, marker, block):
    expected = text.split(marker)
    expected = expected[:-1] if expected[-1] == "" else expected
    blocks = [text[at : at + block] for at in range(0, len(text), block)]
    assert ["".join(one) for one in text_package.cut_at(blocks, marker)] == expected
    assert sum(1 for _ in text_package.cut_at(blocks, marker)) == len(expected)  # unread ones are passed over


def test_marked_texts_are_documents(tmp_path):
    stories = [f"story {n}\r\n<|endoftext|" for n in range(50)]
    (tmp_path / "a.txt").write_bytes("<|endoftext|>".join(stories[:30]).encode())
    (tmp_path / "b.txt").write_bytes(("<|endoftext|>".join(stories[30:]) + "<|endoftext|><|endoftext|>").encode())
    config = DataConfig("text", path=str(tmp_path / "*.txt"), marker="<|endoftext|>")
    corpus = prepare(config, BYTE, tmp_path / "data", lambda _: None)
    assert texts_of(read(config)) == [*stories, ""]
    assert corpus.meta["skipped"] == {"empty": 1}
    assert sum(split["documents"] for split in corpus.meta["splits"].values()) == 50
    whole = prepare(DataConfig("text", path=str(tmp_path / "*.txt")), BYTE, tmp_path / "data", lambda _: None)
    assert sum(split["documents"] for split in whole.meta["splits"].values()) == 2 and whole.folder != corpus.folder
    with pytest.raises(ConfigError, match="data.marker: got ''"):
        read(DataConfig("text", path=str(tmp_path), marker=""))


def test_a_pattern_that_matches_nothing_is_named(tmp_path):
    with pytest.raises(DataError, match=r"data.path: got .*\*.txt', which is not there; allowed: a UTF-8 text file"):
        prepare(DataConfig("text", path=str(tmp_path / "*.txt")), BYTE, tmp_path / "data")


def test_a_pattern_is_the_folder_wherever_it_is(tmp_path):
    """The same names, so the same documents are held out, in the same order."""
    found = []
    for place in ("here", "a/longer/way"):
        for n in range(40):
            path = tmp_path / place / f"texts/{n % 7}/{n}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"text {n}")
        for end in ("texts", "texts/**/*.txt", "texts/*/*.txt", "texts/[0-6]/*"):
            found.append(read(DataConfig("text", path=str(tmp_path / place / end))))
    assert len(found[0]) == 40 and len({one[0] for one in found[0]}) == 3
    assert all(one == found[0] for one in found)
    one = read(DataConfig("text", path=str(tmp_path / "here/texts/3/*.txt")))
    assert one == read(DataConfig("text", path=str(tmp_path / "here/texts/3")))


def test_a_pattern_follows_no_linked_folders(tmp_path):
    """Each file once, however the folders are linked; what is left out is counted as of a folder."""
    folder = tmp_path / "texts"
    for n in range(6):
        (folder / f"sub{n % 2}").mkdir(parents=True, exist_ok=True)
        (folder / f"sub{n % 2}/{n}.txt").write_text(str(n))
    for link in ("x", "y", "sub0/z"):
        (folder / link).symlink_to(folder)
    (folder / ".git").mkdir()
    (folder / ".git/a.txt").write_text("hidden")
    (folder / "sub1/.a.txt").write_text("hidden")
    (folder / "sub1/notes.md").write_text("another kind")
    counts = {"hidden folders": 1, "linked folders": 3, "hidden files": 1}
    for pattern, left_out in (
        ("**/*.txt", counts),
        ("**/sub*/**/*.txt", counts),
        ("*/*.txt", {"hidden folders": 1, "linked folders": 2, "hidden files": 1}),
        ("sub[01]/*.txt", {"hidden files": 1}),
        ("sub[01]/[0-9].*", {}),
        ("**/[0-9].txt", {"hidden folders": 1, "linked folders": 3}),
    ):
        config = DataConfig("text", path=str(folder / pattern))
        assert sorted(texts_of(read(config))) == list("012345"), pattern
        assert package(config).source(config).skipped == left_out, pattern
    with pytest.raises(DataError, match="holds no text .left out: 1 hidden folders, 3 linked folders, 1 hidden files"):
        read(DataConfig("text", path=str(folder / "**/.*.txt")))


def test_linked_folders_are_counted(tmp_path):
    (tmp_path / "texts/deep").mkdir(parents=True)
    for n in range(4):
        (tmp_path / f"texts/deep/{n}.txt").write_text(str(n))
    (tmp_path / "texts/link").symlink_to(tmp_path / "texts")  # in a circle
    (tmp_path / "texts/.link").symlink_to(tmp_path / "texts")
    config = DataConfig("text", path=str(tmp_path / "texts"))
    assert texts_of(read(config)) == list("0123")
    assert package(config).source(config).skipped == {"linked folders": 1, "hidden folders": 1}


# ----------------------------------------------------------------------------------- which of a stream are held out


@pytest.mark.parametrize("n", [3, 4, 5, 9, 2000])
def test_of_any_stream_something_is_held_out(tmp_path, n):
    config = DataConfig("jsonl", path=write_lines(tmp_path / "a.jsonl", [{"text": str(i)} for i in range(n)]))
    found = read(config)
    assert texts_of(found) == [str(i) for i in range(n)]
    counts = {split: sum(one[0] == split for one in found) for split in ("train", "val", "test")}
    assert min(counts.values()) >= 1
    if n == 2000:
        assert abs(counts["val"] - 200) < 60 and abs(counts["test"] - 100) < 40
        for i in range(n):
            share = hash_share(str(i))
            assert found[i][0] == ("val" if share < 0.1 else "test" if share < 0.15 else "train")


def test_a_stream_that_grows_keeps_what_is_held_out(tmp_path):
    found = []
    for n in (500, 1000):
        rows = [{"text": str(i)} for i in range(n)]
        found.append(read(DataConfig("jsonl", path=write_lines(tmp_path / f"{n}.jsonl", rows))))
    assert found[1][:500] == found[0]


# ------------------------------------------------------------------------------------------- the packages of a Python


def test_installed_packages_join_the_library(tmp_path, monkeypatch):
    places = {"stdlib": tmp_path / "lib", "purelib": tmp_path / "lib/site-packages", "platlib": tmp_path / "lib64"}
    for name in ("stdlib", "purelib", "platlib"):
        for n in range(20):
            path = places[name] / f"{name}_package/module{n}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"# {name} {n}\n")
    monkeypatch.setattr(stdlib.sysconfig, "get_path", lambda name: str(places[name]))
    alone, all_of_it = read(DataConfig("stdlib")), read(DataConfig("stdlib", site_packages=True))
    assert sorted(texts_of(alone)) == sorted(f"# stdlib {n}\n" for n in range(20))
    assert sorted(texts_of(all_of_it)) == sorted(f"# {name} {n}\n" for name in places for n in range(20))
    before = [
        package(c).source(c).fingerprint for c in (DataConfig("stdlib"), DataConfig("stdlib", site_packages=True))
    ]
    for place in ("stdlib", "purelib"):  # edited in place to the same length: that matters only for packages
        path = places[place] / f"{place}_package/module0.py"
        os.utime(path, ns=(0, path.stat().st_mtime_ns + 10**9))
    after = [package(c).source(c).fingerprint for c in (DataConfig("stdlib"), DataConfig("stdlib", site_packages=True))]
    assert after[0] == before[0] and after[1] != before[1]
    corpora = [
        prepare(DataConfig("stdlib", site_packages=s), BYTE, tmp_path / "data", lambda _: None) for s in (0 > 1, True)
    ]
    assert corpora[0].folder.name.split("-")[0] == "byte" and corpora[1].folder.name.startswith("site-packages-byte-")


# -------------------------------------------------------------------------------------------------- nanoGPT's tokens


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return fill(tmp_path_factory.mktemp("tiktoken"))


@pytest.fixture
def bins(tmp_path, cache, monkeypatch):
    """A folder as nanoGPT's openwebtext leaves it."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(cache))
    rng = np.random.default_rng()
    ids = {split: rng.integers(0, 50257, n).astype("<u2") for split, n in (("train", 5000), ("val", 700))}
    for split in ids:
        ids[split][rng.integers(0, len(ids[split]), 40)] = 50256
        ids[split][10:13] = 50256
        ids[split].tofile(tmp_path / f"{split}.bin")
    return tmp_path, ids


def test_nanogpts_tokens_are_taken_as_they_are(bins, monkeypatch):
    folder, ids = bins
    monkeypatch.setattr("data.nanogpt.BLOCK", 97)
    corpus = prepare(DataConfig("nanogpt", path=str(folder)), TokenizerConfig("gpt2"), folder / "data", lambda _: None)
    for split in ids:
        np.testing.assert_array_equal(getattr(corpus, split)[:], ids[split])
        starts = [0, *(np.flatnonzero(ids[split] == 50256) + 1)]
        starts = starts[:-1] if starts[-1] == len(ids[split]) else starts
        assert getattr(corpus, f"{split}_documents")[:].tolist() == starts
        n_bytes = corpus.tokenizer.token_bytes()[ids[split]].sum()
        assert corpus.meta["splits"][split]["bytes"] == n_bytes
    assert not {"val_fraction", "test_fraction"} & set(corpus.meta)  # they say nothing here
    assert corpus.tokenizer.name == "gpt2" and corpus.meta["splits"]["test"]["tokens"] == 0


@pytest.mark.parametrize("change", ["cut", "grown", "other ids"])
def test_nanogpts_tokens_that_change_while_they_are_read(bins, monkeypatch, change):
    """A mapped file that is cut short would end the process without a word."""
    folder, ids = bins
    monkeypatch.setattr("data.nanogpt.BLOCK", 97)
    path, documents = folder / "train.bin", nanogpt.read(folder / "train.bin")
    list(next(documents))
    stat = path.stat()
    if change == "cut":
        os.truncate(path, 1000)
    elif change == "grown":
        path.write_bytes(path.read_bytes() + b"ab")
    else:
        os.utime(path, ns=(0, stat.st_mtime_ns + 1))
    with pytest.raises(DataError, match="train.bin: changed while it was read; run the same command again"):
        for document in documents:
            list(document)


def shares(monkeypatch) -> list:
    """What the progress bar is told of a preparation from now on: (bytes, documents, share) each time."""
    told = []
    monkeypatch.setattr(Meter, "update", lambda meter, *given: told.append(given))
    return told


def test_progress_over_nanogpts_tokens_ends_at_all_of_them(bins, monkeypatch):
    told, config = shares(monkeypatch), DataConfig("nanogpt", path=str(bins[0]))
    prepare(config, TokenizerConfig("gpt2"), bins[0] / "data", lambda _: None)
    assert told[-1][0] == 2 * (5000 + 700) and told[-1][2] == 1


@pytest.mark.parametrize("kind", ["a.txt", "a.txt.gz", "a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_progress_has_an_end_whatever_is_read(tmp_path, monkeypatch, kind):
    """It rises to nearly all, which of packed files is a guess."""
    letters = np.random.default_rng().integers(
        97, 123, (10, 40, 5000), dtype=np.uint8
    )  # packs to somewhat more than half
    (folder := tmp_path / "copy").mkdir()
    _, ending, *packed = kind.split(".")
    for n, rows in enumerate(letters):
        texts, path = [row.tobytes().decode() for row in rows], folder / f"{n}{kind}"
        if ending == "parquet":
            pyarrow.parquet.write_table(pyarrow.table({"id": range(40), "text": texts}), path)
            continue
        lines = "".join(texts if ending == "txt" else (json.dumps({"text": text}) + "\n" for text in texts))
        with pyarrow.output_stream(str(path), compression={"gz": "gzip", "zst": "zstd"}.get("".join(packed))) as file:
            file.write(lines.encode())
    monkeypatch.setattr(gpt.encode, "TASK", 2**18)
    told = shares(monkeypatch)
    prepare(DataConfig("hf", path=str(folder)), BYTE, tmp_path / "data", lambda _: None)
    found = [share for _, _, share in told]
    assert len(found) >= 5 and found == sorted(found) and 0.9 < found[-1] <= 1 and found[0] < 0.5


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("corpus", ["jsonl", "hf"])
def test_the_size_of_json_lines_is_that_of_their_texts(tmp_path, corpus, name):
    """About: whatever else the lines hold, and packed or not."""
    rows = [{"text": f"é {n} " * 10, "other": os.urandom(400).hex()} for n in range(9000)]
    config = DataConfig(corpus, path=write_lines(tmp_path / name, rows))
    expected = sum(len(row["text"].encode()) for row in rows)
    assert abs(package(config).source(config).size() / expected - 1) < 0.1
    (tmp_path / name).write_bytes(packed(name, b'{"no": 1}\n' * 9000))  # a guess that fails is no failure
    assert package(config).source(config).size() > 0


def test_progress_of_a_limit(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("a line\n" * 1000)
    monkeypatch.setattr(gpt.encode, "TASK", 100)
    told = shares(monkeypatch)
    prepare(DataConfig("text", path=str(tmp_path / "a.txt"), max_tokens=5000), BYTE, tmp_path, lambda _: None)
    assert told[-1][2] == 1


def test_nanogpts_tokens_can_be_limited(bins):
    folder, ids = bins
    config = DataConfig("nanogpt", path=str(folder), max_tokens=1000)
    corpus = prepare(config, TokenizerConfig("gpt2"), folder / "data", lambda _: None)
    np.testing.assert_array_equal(corpus.val[:], ids["val"])
    np.testing.assert_array_equal(corpus.train[:], ids["train"][:300])


def test_nanogpts_characters_need_their_vocabulary(tmp_path):
    """Its meta.pkl is not opened, whatever is in it."""
    text = "".join(np.random.default_rng().choice(list("abc \n"), 900))
    characters = sorted(set(text))
    for split, part in (("train", text[:800]), ("val", text[800:])):
        np.array([characters.index(c) for c in part], "<u2").tofile(tmp_path / f"{split}.bin")

    class Trap:
        def __reduce__(self):
            return open, (str(tmp_path / "opened"), "w")

    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(Trap()))
    (tmp_path / "input.txt").write_text(text)
    config = DataConfig("nanogpt", path=str(tmp_path))
    for tokenizer in (BYTE, TokenizerConfig("gpt2")):
        for call in (check_source, prepare):
            with pytest.raises(
                ConfigError, match="meta.pkl holds the vocabulary as a pickle, which is not opened"
            ) as e:
                call(config, tokenizer, tmp_path / "data")
    with pytest.raises(DataError, match="holds ids, not text.*tokenizer=char tokenizer.file="):
        prepare(config, CHAR, tmp_path / "data", lambda _: None)
    command = re.search(r'python -c "(.*)" > characters.json', str(e.value)).group(1)
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    (tmp_path / "characters.json").write_text(done.stdout)  # as the message says
    corpus = prepare(
        config, TokenizerConfig("char", file=str(tmp_path / "characters.json")), tmp_path / "data", lambda _: None
    )
    assert corpus.tokenizer.decode(corpus.train[:]) + corpus.tokenizer.decode(corpus.val[:]) == text
    assert not (tmp_path / "opened").exists()


def test_bpe_cannot_be_trained_on_ids(bins):
    with pytest.raises(DataError, match="holds ids, not text"):
        config = TokenizerConfig("bpe", vocab_size=300)
        prepare(DataConfig("nanogpt", path=str(bins[0])), config, bins[0] / "data", lambda _: None)


@pytest.mark.parametrize(
    "spoil, message",
    [
        (
            lambda f: (f / "val.bin").unlink(),
            "val.bin is not there; allowed: a folder with nanoGPT's train.bin and val.bin",
        ),
        (lambda f: (f / "val.bin").write_bytes(b""), "val.bin: 0 bytes; allowed: ids of two bytes"),
        (lambda f: (f / "train.bin").write_bytes(b"abc"), "train.bin: 3 bytes; allowed: ids of two bytes"),
        (
            lambda f: np.array([1, 2, 50257, 3], "<u2").tofile(f / "train.bin"),
            "^/.*/train.bin: token id 50,257 at index 2, allowed: 0 to 50,256",
        ),
    ],
)
def test_nanogpts_files_that_cannot_be_used(bins, spoil, message):
    spoil(bins[0])
    with pytest.raises(DataError, match=message) as error:
        prepare(DataConfig("nanogpt", path=str(bins[0])), TokenizerConfig("gpt2"), bins[0] / "data", lambda _: None)
    assert ".preparing" not in str(error.value)


# ------------------------------------------------------------------------------------------------ Hugging Face's hub


SPLITS = {"train": 40, "validation": 4, "test": 3}


def repository(folder: Path, kind: str) -> dict[str, list[str]]:
    """A copy of a dataset in files of one kind; the texts of each split."""
    texts = {
        split: [f"{split} {n} {text}" for n, text in enumerate((TEXTS * 9)[:count])] for split, count in SPLITS.items()
    }
    for split, of_split in texts.items():
        rows = [{"id": n, "text": text} for n, text in enumerate(of_split)]
        if kind == "parquet":
            write_parquet(folder / f"{split}-00000-of-00001.parquet", rows, row_group_size=9)
        elif kind.startswith("text"):
            for n, text in enumerate(of_split):
                (folder / split).mkdir(parents=True, exist_ok=True)
                path = folder / split / f"{n:03}.{kind.replace('text', 'txt')}"
                path.write_bytes(packed(path.name, text.encode()))
        else:
            write_lines(folder / f"{split}.{kind}", rows)
    return texts


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "jsonl.gz", "text", "text.gz"])
def test_a_copy_of_a_dataset_is_read_as_the_hubs(tmp_path, kind, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # which is not needed, nor a network
    texts = repository(tmp_path / "copy", kind)
    config = DataConfig("hf", path=str(tmp_path / "copy"), val_split="validation", test_split="test")
    expected = [
        (ours, text)
        for ours, split in (("val", "validation"), ("test", "test"), ("train", "train"))
        for text in texts[split]
    ]
    assert read(config) == expected
    corpus = prepare(config, BYTE, tmp_path / "data", lambda _: None)
    assert [corpus.meta["splits"][split]["documents"] for split in ("train", "val", "test")] == [40, 4, 3]
    assert corpus.tokenizer.decode(corpus.val[:]) == "".join(texts["validation"])
    # a share of one split, where the others are not named
    alone = read(DataConfig("hf", path=str(tmp_path / "copy")))
    assert texts_of(alone) == texts["train"] and {one[0] for one in alone} == {"train", "val", "test"}


def test_one_file_is_a_dataset(tmp_path):
    for path in (
        write_parquet(tmp_path / "a.parquet", [{"text": text} for text in TEXTS]),
        write_lines(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS]),
        write_lines(tmp_path / "a.jsonl.gz", [{"text": text} for text in TEXTS]),
    ):
        assert texts_of(read(DataConfig("hf", path=path))) == TEXTS


def test_a_copy_with_configurations_is_read_by_their_name(tmp_path):
    for name in ("small", "large", "sample/10BT"):
        for split in ("train", "test"):
            rows = [{"text": f"{name} {split} {n}"} for n in range(9)]
            write_parquet(tmp_path / f"copy/{name}/{split}-00000-of-00001.parquet", rows)
    (tmp_path / "copy/dataset_infos.json").write_text("{}")

    def config(path: str, **keys) -> DataConfig:
        return DataConfig("hf", path=str(tmp_path / path), **keys)

    for name, folder in (("large", "large"), ("sample-10BT", "sample/10BT")):
        expected = [f"{folder} train {n}" for n in range(9)]
        chosen = config("copy", config=name)
        assert texts_of(read(chosen)) == expected
        assert package(chosen).source(chosen).skipped == {
            "files about the dataset": 1,
            "files of another configuration": 4,
            "files of other splits than data.split, val_split and test_split": 1,
        }
        for path in (f"copy/{folder}", f"copy/{folder}/train*.parquet"):  # named by the path itself
            assert texts_of(read(config(path, config=name))) == expected
    with pytest.raises(ConfigError, match="data.config: got null, .* several hold t.*: large, sample-10BT, small"):
        read(config("copy"))
    with pytest.raises(ConfigError, match="data.config: got 'medium', allowed: null .*: large, sample-10BT, small"):
        read(config("copy", config="medium"))


@pytest.mark.parametrize(
    "name, split",
    [
        ("train.jsonl", "train"),
        ("validation-00000-of-00002.parquet", "validation"),
        ("train_sft-00000-of-00001-a1b2c3.parquet", "train_sft"),
        ("data/dev.jsonl.gz", "validation"),
        ("test/train_station.txt", "train"),
        ("test/a/1.txt", "test"),
        ("Eval 2.json", "test"),
        ("wiki.valid.raw", "validation"),
        ("TinyStories-train.txt", "train"),
        ("unsupervised.parquet", "unsupervised"),
        ("trained.txt", None),
        ("latest/contest.txt", None),
        ("part-0.parquet", None),
    ],
)
def test_the_split_that_a_name_tells(name, split):
    assert hf.split_told(name, ["unsupervised"]) == split


def test_files_of_a_copy_that_are_not_read_are_counted(tmp_path):
    for name in ("train-1", "train-2", "dev", "test", "notes"):
        write_lines(tmp_path / f"copy/{name}.jsonl", [{"text": f"{name} {n}"} for n in range(4)])
    (tmp_path / "copy/README.md").write_text("---\nconfigs:\n- config_name: a\n  data_files: notes.jsonl\n---\n")
    config = DataConfig("hf", path=str(tmp_path / "copy"), val_split="validation")
    corpus = prepare(config, BYTE, tmp_path / "data", lambda _: None)
    assert corpus.meta["skipped"] == {
        "files of another kind": 1,
        "files whose name tells no split": 1,
        "files of other splits than data.split, val_split and test_split": 1,
    }
    assert [corpus.meta["splits"][split]["documents"] for split in ("train", "val", "test")] == [8, 4, 0]
    assert corpus.tokenizer.decode(corpus.val[:]) == "".join(f"dev {n}" for n in range(4))
    write_lines(tmp_path / "copy/train-2.jsonl", [{"text": "another"}] * 4)  # what is read makes the fingerprint
    assert prepare(config, BYTE, tmp_path / "data", lambda _: None).folder != corpus.folder


def test_what_is_wrong_behind_a_mark_is_at_the_byte_of_the_file(tmp_path):
    for line, byte in ((b'{"text": nope}', 12), (b'{"text": "\xff"}', 13)):
        (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + line)
        with pytest.raises(DataError, match=f"line 1, byte {byte} "):
            read(DataConfig("jsonl", path=str(tmp_path / "a.jsonl")))


def test_kinds_are_told_by_names_of_any_case(tmp_path):
    (tmp_path / "copy").mkdir()
    for name in ("A.TXT", "b.txt", "C.PARQUET"):
        (tmp_path / "copy" / name).write_text("some text")
    with pytest.raises(DataError, match=r"1 of Parquet and 2 of text; .*data.path='.*/copy/\*\*/\*.txt'"):
        read(DataConfig("hf", path=str(tmp_path / "copy")))


def test_splits_that_no_name_tells_are_asked_for(tmp_path):
    for n in range(3):
        write_lines(tmp_path / f"copy/{n}.jsonl", [{"text": "a"}])
    with pytest.raises(ConfigError, match="data.path: .* allowed: files named train, validation and test; no name"):
        read(DataConfig("hf", path=str(tmp_path / "copy"), val_split="validation"))


def test_files_whose_names_tell_nothing_are_to_train_on(tmp_path):
    for n in range(3):
        write_lines(tmp_path / f"copy/{n}.jsonl", [{"text": f"{n} {i}"} for i in range(4)])
    assert texts_of(read(DataConfig("hf", path=str(tmp_path / "copy")))) == [
        f"{n} {i}" for n in range(3) for i in range(4)
    ]
    with pytest.raises(ConfigError, match="data.split: got 'dev', allowed: what the names at .* tell: train"):
        read(DataConfig("hf", path=str(tmp_path / "copy"), split="dev"))


@pytest.mark.parametrize("name", ["a.txt.gz", "a.txt.zst"])
@pytest.mark.parametrize("block", [1, 5, 2**20])
def test_packed_text_is_unpacked(tmp_path, monkeypatch, name, block):
    monkeypatch.setattr(gpt.sources, "BLOCK", block)
    text = "".join(TEXTS) * 3
    (tmp_path / name).write_bytes(packed(name, text.encode()))
    assert "".join(gpt.sources.read_text(tmp_path / name)) == text
    bad = text.encode() + "é".encode()[:1]
    (tmp_path / name).write_bytes(packed(name, bad))
    with pytest.raises(DataError, match=f"{name}: byte {len(bad) - 1} of its text is not UTF-8"):
        list(gpt.sources.read_text(tmp_path / name))
    whole = packed(name, os.urandom(50_000).hex().encode())
    (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=f"{name}: cannot be read behind byte [0-9,]+ of its text"):
        list(gpt.sources.read_text(tmp_path / name))


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"test_split": "test"}, "data.test_split: got 'test', allowed: null, since data.val_split is; name both"),
        ({"val_split": "train"}, "data.val_split: got 'train', allowed: a split of its own"),
        ({"val_split": "test", "test_split": "test"}, "data.val_split: got 'test', allowed: a split of its own"),
        ({"val_split": "validation", "test_split": "train"}, "data.test_split: got 'train', allowed: a split of its"),
        (
            {"val_split": "validation", "val_fraction": 0.2},
            "data.val_fraction: got 0.2, allowed: 0.1, since data.val_s",
        ),
        (
            {"val_split": "validation", "test_fraction": 0.0},
            "data.test_fraction: got 0.0, allowed: 0.05, since data.val",
        ),
    ],
)
def test_splits_that_do_not_go_together(tmp_path, keys, message):
    repository(tmp_path / "copy", "jsonl")
    for place in ({"path": str(tmp_path / "copy")}, {"repo": "someone/something"}):
        with pytest.raises(ConfigError, match=message):
            check_source(DataConfig("hf", **place, **keys), BYTE, tmp_path / "data")


def test_labels_tell_where_a_key_was_left_out():
    one = DataConfig("hf", repo="a/b", config="train", split="x")
    other = DataConfig("hf", repo="a/b", split="train", text_field="x")
    labels = {
        hf.label(c) for c in (one, other, DataConfig("hf", repo="a/b"), DataConfig("hf", repo="a/b", revision="v1"))
    }
    assert len(labels) == 4


@pytest.mark.parametrize("max_tokens", [None, 400])
def test_the_hub_is_asked_for_a_stream_or_for_all(tmp_path, monkeypatch, max_tokens):
    """The hub is a folder here, which `datasets` loads in the same way."""
    import datasets

    texts = repository(tmp_path / "copy", "parquet")
    asked, load = [], datasets.load_dataset
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(hf, "commit", lambda config: asked.append("commit") or f"{config.revision} is c0ffee")

    def local(repo, config, **keys):
        asked.append((repo, config, dict(keys)))
        keys.pop("revision")
        return load(str(tmp_path / "copy"), cache_dir=str(tmp_path / "cache"), **keys)

    monkeypatch.setattr(datasets, "load_dataset", local)
    monkeypatch.setattr(hf, "reach", lambda url: asked.append(url))
    config = DataConfig("hf", repo="someone/something", config="part", max_tokens=max_tokens)
    told = shares(monkeypatch)
    corpus = prepare(config, BYTE, tmp_path / "data", lambda _: None)
    assert asked[0] == "https://huggingface.co"
    keys = {"split": "train", "revision": "None is c0ffee", "streaming": max_tokens is not None}
    assert asked[1] == "commit" and asked[2] == ("someone/something", "part", keys)
    assert asked.count("commit") == 1 and {one[2]["revision"] for one in asked if len(one) == 3} == {"None is c0ffee"}
    n_tokens = sum(split["tokens"] for split in corpus.meta["splits"].values())
    assert n_tokens == max_tokens or (
        max_tokens is None and n_tokens == sum(len(t.encode()) + 1 for t in texts["train"])
    )
    assert told[-1][2] is not None
    asked.clear()
    assert prepare(config, BYTE, tmp_path / "data").folder == corpus.folder and asked == []  # and then no more
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.invalid")
    tagged = DataConfig("hf", repo="someone/something", revision="v1")
    source = package(tagged).source(tagged)
    assert (
        source.fingerprint["revision"] == "v1" and source.settled == {} and asked == []
    )  # it asks the hub for nothing
    assert texts_of(
        [one if isinstance(one, Skipped) else (one.split, "".join(one.blocks)) for one in source.documents(0)]
    )
    assert "https://mirror.invalid" in asked and source.settled == {"revision": "v1 is c0ffee"}
    source = package(tagged).source(tagged)
    source.settled["revision"] = "an older one"  # of a preparation that goes on
    asked.clear()
    next(source.documents(5))
    assert "commit" not in asked and {one[2]["revision"] for one in asked if len(one) == 3} == {"an older one"}
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    asked.clear()
    next(package(tagged).source(tagged).documents(0))
    assert {one[2]["revision"] for one in asked} == {"v1"}  # no one else was asked anything


@pytest.mark.parametrize(
    "config, message",
    [
        ({}, "data.repo: got null, allowed: a dataset of the Hugging Face hub"),
        ({"path": "{}/nowhere"}, "data.path: got .*nowhere', which is not there; allowed: a file, folder or pattern"),
        (
            {"path": "{}/copy", "split": "dev"},
            "data.split: got 'dev', allowed: what the names at .* tell: other, test, train",
        ),
        (
            {"path": "{}/copy", "split": "other", "val_split": "validation"},
            "data.val_split: got 'validation', allowed: what the names at .* tell: other, test, train",
        ),
        ({"path": "{}/copy", "text_field": "body"}, "has no column 'body'; allowed as data.text_field: .'id', 'text'"),
        ({"path": "{}/copy", "text_field": "id"}, "column 'id' holds int64, allowed: string"),
        ({"path": "{}/copy", "revision": "v1"}, "data.revision: got 'v1', allowed: null with data.path"),
        ({"path": "{}/script"}, "data.path: .*script holds no text .left out: 1 files of another kind.; allowed"),
        (
            {"path": "{}/mixed"},
            "mixed has 1 of Parquet and 2 of JSON lines; allowed: .*; say which: data.path='.*/mixed/",
        ),
        ({"path": "{}/bad.jsonl"}, "bad.jsonl: line 2, byte 24 is no JSON"),
        (
            {"path": "{}/x.csv"},
            "data.path: .*x.csv has 1 of another kind; allowed: a file, folder or pattern of Parquet",
        ),
    ],
)
def test_datasets_that_cannot_be_used(tmp_path, config, message):
    for name in ("train", "test", "other-00000-of-00001"):
        write_parquet(tmp_path / f"copy/{name}.parquet", [{"id": 1, "text": "a"}] * 5)
    (tmp_path / "script").mkdir()
    (tmp_path / "script/script.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    write_parquet(tmp_path / "mixed/train.parquet", [{"text": "a"}] * 5)
    for name in ("train.jsonl", "test.json.gz"):
        write_lines(tmp_path / "mixed" / name, [{"text": "a"}] * 5)
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (tmp_path / "x.csv").write_text("text\na\n")
    config = {key: value.format(tmp_path) for key, value in config.items()}
    with pytest.raises((DataError, ConfigError), match=message) as error:
        prepare(DataConfig("hf", **config), BYTE, tmp_path / "data", lambda _: None)
    assert "\n" not in str(error.value) and not (tmp_path / "ran").exists()


def test_a_preparation_that_goes_on_keeps_its_commit(tmp_path, monkeypatch):
    import datasets

    versions = {"old": [f"text {n}" for n in range(60)], "new": ["another"] * 80}

    def load(repo, config, split, revision, streaming):
        return datasets.Dataset.from_dict({"text": versions[revision]})

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(hf, "reach", lambda url: None)
    monkeypatch.setattr(gpt.encode, "TASK", 40)
    config, said, write, written = DataConfig("hf", repo="a/b"), [], gpt.draft.Draft.write, []

    def full(*arguments):
        if len(written) == 3:
            raise OSError(28, "No space left on device")
        written.append(write(*arguments))

    with monkeypatch.context() as patch:
        patch.setattr(gpt.draft.Draft, "write", full)
        patch.setattr(hf, "commit", lambda config: "old")
        with pytest.raises(DataError, match="No space left"):
            prepare(config, BYTE, tmp_path / "data", said.append, workers=1)
    monkeypatch.setattr(hf, "commit", lambda config: "new")
    corpus = prepare(config, BYTE, tmp_path / "data", said.append, workers=1)
    assert any("going on behind" in line for line in said) and corpus.meta["settled"] == {"revision": "old"}
    assert sum(split["bytes"] for split in corpus.meta["splits"].values()) == sum(map(len, versions["old"]))


def test_without_a_network_it_says_so_soon(tmp_path):
    environment = {**os.environ, "HF_ENDPOINT": "http://nowhere.invalid", "OMP_NUM_THREADS": "1"}
    environment.pop("HF_HUB_OFFLINE", None)
    began = time.monotonic()
    command = [sys.executable, ROOT / "data/prepare.py", "data=wikitext103"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    for part in ("Salesforce/wikitext cannot be had from http://nowhere.invalid", "data.path=<a copy of it>"):
        assert part in done.stderr
    assert time.monotonic() - began < 30  # left alone, `datasets` would have tried for as long
    assert gpt.download.PATIENCE <= 3  # of a server that is silent; the rest is Python's start


def test_a_server_that_refuses_is_reached(monkeypatch):
    import http.server
    import threading

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(403)

        def log_message(self, *_):
            pass

    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(gpt.download, "PATIENCE", 60)  # the machine may be busy
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        gpt.download.reach(f"http://127.0.0.1:{server.server_port}/")
        server.shutdown()
    with pytest.raises(OSError, match="refused"):
        gpt.download.reach("http://127.0.0.1:1/")


# --------------------------------------------------------------------------------------------------------- WikiText


ARTICLE = [
    " \n",
    " = {} = \n",
    " \n",
    " The < unk > = x = of it .\n",
    " \n",
    " = = Section = = \n",
    " \n",
    " More . \n",
]


def test_wikitext_is_put_together_to_articles(tmp_path):
    """Rows as the hub has them: a line each, blank ones as empty texts."""
    written = {}
    for split, count in (("train", 30), ("validation", 2), ("test", 3)):
        whole = [[line.format(f"{split} ( {n} )") for line in ARTICLE] for n in range(count)]
        written[split] = ["".join(article) for article in whole]
        rows = [{"text": "" if line == " \n" else line} for article in whole for line in article]
        write_parquet(tmp_path / f"copy/wikitext-2-raw-v1/{split}-00000-of-00001.parquet", rows)
    order = (("val", "validation"), ("test", "test"), ("train", "train"))
    shutil.copytree(tmp_path / "copy/wikitext-2-raw-v1", tmp_path / "files" / "data")  # of no configuration's name
    for path in ("files", "files/data", "copy", "copy/wikitext-2-raw-v1"):
        overrides = ["data=wikitext2", f"data.path={tmp_path}/{path}"]
        config = build(DataConfig, compose("train", overrides)["data"], "data")
        assert read(config) == [(ours, text) for ours, split in order for text in written[split]], path
    corpus = prepare(config, BYTE, tmp_path / "data", lambda _: None)
    assert [corpus.meta["splits"][split]["documents"] for split in ("train", "val", "test")] == [30, 2, 3]
    assert corpus.meta["skipped"] == {}  # blank lines are part of the text
    for split, of_split in written.items():  # and the published files, which are text
        (tmp_path / f"raw/wiki.{split.replace('validation', 'valid')}.raw").parent.mkdir(exist_ok=True)
        (tmp_path / f"raw/wiki.{split.replace('validation', 'valid')}.raw").write_text("".join(of_split))
    with pytest.raises(ConfigError, match="data.val_split: got null, allowed: validation"):
        read(DataConfig("wikitext2", path=str(tmp_path / "raw")))
    raw = DataConfig("wikitext2", path=str(tmp_path / "raw"), val_split="validation", test_split="test")
    again = prepare(raw, BYTE, tmp_path / "data", lambda _: None)
    assert (again.train_sha256, again.val_sha256) == (corpus.train_sha256, corpus.val_sha256)
    assert again.val_documents[:].tolist() == corpus.val_documents[:].tolist()


@relaxed
@given(st.text(alphabet="a \n\r\u2028", max_size=30), st.integers(1, 7))
def test_lines_of_blocks(text, block):
    expected = [line for line in re.findall("[^\n]*\n?", text) if line]
    assert list(lines_of(text[at : at + block] for at in range(0, len(text), block))) == expected


@relaxed
@given(
    st.lists(
        st.sampled_from([" \n", " = A = \n", " = = B = = \n", " = C = = \n", "x = y = \n", " text\n"]), max_size=30
    )
)
def test_no_line_is_lost_among_articles(lines):
    found = list(articles(iter(lines)))
    assert sum(found, []) == lines
    for article in found[1:]:
        assert article[0].strip() == "" and article[1] in (" = A = \n", " = C = = \n")
