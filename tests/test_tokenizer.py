"""Tokenizers give back what they were given, whatever it was, and say in one line what they cannot take."""

import hashlib
import http.server
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gpt.download
import gpt.tokenizer.base
import gpt.tokenizer.bpe
import gpt.tokenizer.hf
from gpt.documents import WORD_END, Document, pieces
from gpt.download import download
from gpt.errors import ConfigError, DataError
from gpt.schema import TokenizerConfig
from gpt.tokenizer import (
    KINDS,
    ByteTokenizer,
    CharTokenizer,
    FileTokenizer,
    TiktokenTokenizer,
    TrainedTokenizer,
    load_tokenizer,
    new_tokenizer,
    tokenizer_label,
)
from gpt.tokenizer.bpe import (
    ENCODINGS,
    LONG_RUN,
    LONG_SPACE,
    SPACE,
    WORD,
    bytes_to_symbols,
    cut_runs,
    without_long_space,
)
from gpt.tokenizer.hf import CL100K, NOWHERE
from tests.tokenizer_files import fill, shipped

ROOT = Path(__file__).parents[1]
HOSTILE = [
    "<|endoftext|>",
    "<|fim_prefix|>",
    "</s>",
    "\r\n",
    "\r",
    "\x00",
    "\ufeff",
    "e\u0301",
    "👩‍👩‍👧",
    "\u2028",
    "\u0085",
    "  \n\n ",
    "'s",
    "'S",
    "\x1c",
    "\U0010ffff",
    "漢字",
    "Ġ",
    "▁",
    "ﬁ",
    "1234567",
]
texts = st.lists(st.one_of(st.text(max_size=20), st.sampled_from(HOSTILE)), max_size=8).map("".join)
relaxed = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def document(*blocks: str, split: str = "train") -> Document:
    return Document(split, blocks)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = fill(tmp_path_factory.mktemp("tiktoken"))
        patch.setenv("TIKTOKEN_CACHE_DIR", str(folder))
        yield folder


@pytest.fixture(scope="module")
def gpt2(cache):
    return TiktokenTokenizer("gpt2")


@pytest.fixture(scope="module")
def cl100k(cache):
    return TiktokenTokenizer("cl100k_base")


@pytest.fixture(scope="module")
def o200k(gpt2):
    """o200k_base, whose file no package ships: its pattern with GPT-2's tokens."""
    import tiktoken
    from tiktoken_ext import openai_public

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(openai_public, "load_tiktoken_bpe", lambda *_, **__: gpt2.encoding._mergeable_ranks)
        tokenizer = TiktokenTokenizer("o200k_base")
        tokenizer.encoding = tiktoken.Encoding(**openai_public.o200k_base())
    return tokenizer


PROSE = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "gpt").glob("*.py"))[:8]]


@pytest.fixture(scope="module")
def bpe():
    return new_tokenizer(TokenizerConfig("bpe", vocab_size=600), [document(text) for text in PROSE])


def hf_json(tokens: list[bytes], **changes) -> dict:
    """A tokenizer.json of a byte-level BPE with these merged tokens and three added ones."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    known = [bytes([byte]) for byte in range(256)]
    merges = []
    for token in tokens:
        cut = next(n for n in range(1, len(token)) if token[:n] in known and token[n:] in known)
        merges.append((bytes_to_symbols(token[:cut]), bytes_to_symbols(token[cut:])))
        known.append(token)
    # the ids of the bytes as `tokenizers` gives them, which are not the bytes themselves
    order = sorted(known[:256], key=bytes_to_symbols) + known[256:]
    made = Tokenizer(models.BPE({bytes_to_symbols(token): n for n, token in enumerate(order)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|fim_prefix|>", "<|endoftext|>"])
    made.add_tokens([AddedToken("漢字", normalized=False)])
    return json.loads(made.to_str()) | changes


@pytest.fixture(scope="module")
def hf(bpe):
    return load_tokenizer({"name": "hf", "json": json.dumps(hf_json(bpe.tokens))})


def check_round_trip(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids.ndim == 1 and ids.dtype == (np.uint16 if tokenizer.vocab_size <= 65536 else np.uint32)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode_bytes(ids) == text.encode()
    assert tokenizer.token_bytes()[ids].sum() == len(text.encode())
    assert len(ids) == 0 or ids.max() < tokenizer.vocab_size
    assert tokenizer.separator is None or tokenizer.separator not in ids
    again = load_tokenizer(json.loads(json.dumps(tokenizer.state())))
    assert again.sha256 == tokenizer.sha256
    np.testing.assert_array_equal(again.encode(text), ids)


@relaxed
@given(texts)
def test_byte_round_trip(text):
    check_round_trip(ByteTokenizer(), text)


@relaxed
@given(texts, texts)
def test_char_round_trip(text, more):
    if text + more:
        tokenizer = new_tokenizer(TokenizerConfig("char"), iter([document(text), document("", more, split="test")]))
        assert tokenizer.vocab_size == len(set(text + more))
        check_round_trip(tokenizer, text)


@pytest.mark.parametrize("name", ["gpt2", "cl100k", "bpe", "hf"])
@settings(relaxed, max_examples=50)
@given(text=texts)
def test_round_trip(request, name, text):
    check_round_trip(request.getfixturevalue(name), text)


@settings(relaxed, max_examples=50)
@given(text=texts)
def test_o200k_round_trip(o200k, text):
    ids = o200k.encode(text)
    assert ids.dtype == np.uint32 and o200k.decode(ids) == text and o200k.separator not in ids
    assert o200k.token_bytes()[ids].sum() == len(text.encode())


def test_gpt2_gives_the_published_ids(gpt2):
    assert gpt2.encode("Hello, world!").tolist() == [15496, 11, 995, 0]
    assert gpt2.separator == 50256 and gpt2.vocab_size == 50257
    assert gpt2.token_bytes().shape == (50257,) and gpt2.token_bytes()[50256] == 0 and gpt2.token_bytes()[995] == 6


@settings(relaxed, max_examples=100)
@given(blocks=st.lists(st.one_of(texts, st.text(alphabet="abS'sl1 \n\t\r.!é漢", max_size=12)), max_size=8))
def test_encoding_piece_by_piece_equals_encoding_the_whole(gpt2, cl100k, o200k, bpe, hf, blocks):
    whole = "".join(blocks)
    cut = list(pieces(blocks))
    assert "".join(cut) == whole
    for tokenizer in (gpt2, cl100k, o200k, bpe, hf, ByteTokenizer()):
        parts = [*map(tokenizer.encode, cut), np.array([], dtype=int)]
        np.testing.assert_array_equal(np.concatenate(parts), tokenizer.encode(whole))


LLAMA3 = {"Regex": CL100K}  # as its tokenizer.json has it
SPLIT = {"type": "Split", "pattern": LLAMA3, "behavior": "Isolated", "invert": False}
BYTES_ALONE = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
GPT2_WORDS = BYTES_ALONE | {"use_regex": True}


@pytest.mark.parametrize(
    "parts, added, cut",
    [
        ([GPT2_WORDS], {}, True),
        ([SPLIT, BYTES_ALONE], {}, True),
        ([{"type": "Digits", "individual_digits": True}, GPT2_WORDS], {}, True),
        ([GPT2_WORDS], {"content": "  a"}, True),
        ([BYTES_ALONE], {}, False),
        ([{"type": "Punctuation", "behavior": "Isolated"}, BYTES_ALONE], {}, False),
        ([SPLIT | {"pattern": {"Regex": "b a"}}, GPT2_WORDS], {}, False),
        ([SPLIT | {"behavior": "MergedWithNext"}, GPT2_WORDS], {}, False),
        ([SPLIT | {"pattern": {"String": " "}}, BYTES_ALONE], {}, False),
        ([GPT2_WORDS], {"content": "b a"}, False),
    ],
)
def test_a_file_is_cut_into_pieces_only_where_its_ids_stay(parts, added, cut):
    pre_tokenizer = parts[0] if len(parts) == 1 else {"type": "Sequence", "pretokenizers": parts}
    made = hf_json([b" a", b"b a", b"ab", b"!!", b"b ab", b"  "], pre_tokenizer=pre_tokenizer)
    made["added_tokens"][-1] |= added
    tokenizer = FileTokenizer(json.dumps(made))
    assert tokenizer.boundary is (WORD_END if cut else NOWHERE)
    rng = np.random.default_rng()
    for _ in range(60):
        blocks = ["".join(rng.choice(list("aabb  !1\n"), 5)) for _ in range(8)]
        cut_up = list(pieces(blocks, tokenizer.boundary))
        assert "".join(cut_up) == "".join(blocks) and (cut or len(cut_up) == 1)
        parted = np.concatenate([*map(tokenizer.encode, cut_up)])
        np.testing.assert_array_equal(parted, tokenizer.encode("".join(blocks)))


def test_an_added_token_that_swallows_what_follows_is_cut_nowhere():
    made = hf_json([])
    made["added_tokens"][-1]["rstrip"] = True
    assert FileTokenizer(json.dumps(made)).boundary is NOWHERE


def test_an_entry_of_a_file_that_no_text_reaches_stands_for_nothing(bpe):
    made = hf_json(bpe.tokens)
    made["model"]["vocab"] |= {"<|文|>": 599, "two words": 600}  # the added ones then follow, whatever the file says
    tokenizer = FileTokenizer(json.dumps(made))
    stand_for = {token: tokenizer.token_bytes()[index] for token, index in tokenizer.vocabulary.items()}
    assert [stand_for[token] for token in ("<|文|>", "two words", "<|endoftext|>", "漢字")] == [0, 0, 0, 6]
    assert tokenizer.vocab_size == 604
    assert tokenizer.separator == tokenizer.loaded.token_to_id("<|endoftext|>") == 602
    for text in ("<|文|> two words", *PROSE[:2]):
        check_round_trip(tokenizer, text)


def test_the_bytes_of_ids_are_counted_once(bpe, monkeypatch):
    """nanoGPT's tokens ask for them once a document, of which there are millions."""
    tokenizer = load_tokenizer(bpe.state())
    calls, table = [], tokenizer.table
    monkeypatch.setattr(tokenizer, "table", lambda: calls.append(1) or table())
    found = [tokenizer.token_bytes() for _ in range(5)]
    assert calls == [1] and all(one is found[0] for one in found)
    assert found[0].tolist() == [len(token) for token in table()]
    with pytest.raises(ValueError, match="read-only"):
        found[0][3] = 2


@pytest.mark.parametrize("limit", [1, 5, 6, 11, 1000])
def test_a_vocabulary_is_of_no_more_text_than_is_wanted(limit):
    read = []

    def blocks(*parts):
        for part in parts:
            read.append(part)
            yield part

    documents = [Document("train", blocks("abc", "def")), Document("val", blocks("ghi", "jkl")), document("xyz" * 90)]
    whole = "abcdefghijkl" + "xyz" * 90
    tokenizer = new_tokenizer(TokenizerConfig("char"), iter(documents), limit)
    assert tokenizer.characters == "".join(sorted(set(whole[:limit])))
    assert len("".join(read)) < limit + 3

    merged = [document("ab " * 300), document("xyz " * 3000)]
    limited = new_tokenizer(TokenizerConfig("bpe", vocab_size=258), iter(merged), limit)
    assert limited.tokens == [b"ab" if limit < 1000 else b"xy"]


def test_pieces_stay_as_small_as_the_blocks():
    blocks = [f"line {i} of some text\n" * 50 for i in range(40)]
    assert max(map(len, pieces(blocks))) < 1.1 * max(map(len, blocks))


@pytest.mark.parametrize("name", ["byte", "gpt2", "cl100k", "bpe", "hf"])
def test_the_separator_stands_for_no_text(name, request):
    tokenizer = ByteTokenizer() if name == "byte" else request.getfixturevalue(name)
    ids = [*tokenizer.encode("one"), tokenizer.separator, *tokenizer.encode("two<|endoftext|>"), tokenizer.separator]
    assert tokenizer.decode(ids) == "onetwo<|endoftext|>"
    assert tokenizer.token_bytes()[ids].sum() == len("onetwo<|endoftext|>")


def test_broken_utf8_becomes_replacement_characters():
    assert ByteTokenizer().decode([65, 0xFF, 66, 0xE2, 0x82]) == "A\ufffdB\ufffd"
    assert ByteTokenizer().decode_bytes([65, 0xFF, 66, 0xE2, 0x82]) == b"A\xffB\xe2\x82"


@pytest.mark.parametrize("wrong", [257, -1, 70000])
def test_unknown_ids_are_refused_with_their_index(wrong):
    with pytest.raises(DataError, match=rf"id {wrong} at index 2: the byte vocabulary is 0 to 256"):
        ByteTokenizer().decode([1, 2, wrong, 3])
    with pytest.raises(DataError, match=rf"id {wrong} at index 0"):
        CharTokenizer("abc").decode_bytes([wrong])


@pytest.mark.parametrize("text, character, position", [("abcXab", "'X'", 3), ("a€", "'€'", 1), ("\n", r"'\\n'", 0)])
def test_a_character_that_the_corpus_lacks_is_named_with_its_position(text, character, position):
    with pytest.raises(
        DataError, match=rf"character {position} is {character} \(U\+[0-9A-F]+\), which .*tokenizer=byte"
    ):
        CharTokenizer("abc").encode(text)


def test_half_a_surrogate_pair_is_refused(gpt2, bpe, hf):
    for tokenizer in (ByteTokenizer(), gpt2, bpe, hf):
        with pytest.raises(DataError, match="character 2 is U\\+D800, half"):
            tokenizer.encode("ab\ud800")
    with pytest.raises(DataError, match="U\\+D800"):
        CharTokenizer("abc").encode("\ud800")


def test_char_takes_the_sorted_characters_of_all_texts():
    tokenizer = new_tokenizer(TokenizerConfig("char"), [document("hello"), document(" world", "\n", split="val")])
    assert tokenizer.characters == "\n dehlorw"
    assert tokenizer.encode("\n dehlorw").tolist() == list(range(9))


def test_more_characters_than_uint16_holds_do_not_wrap():
    tokenizer = CharTokenizer("".join(map(chr, range(0x10000, 0x10000 + 70000))))
    text = chr(0x10000 + 69999) + chr(0x10000) + chr(0x10000 + 65536)
    assert tokenizer.encode(text).tolist() == [69999, 0, 65536]
    assert tokenizer.encode(text).dtype == np.uint32 and tokenizer.decode([69999, 0, 65536]) == text


def test_tokenizers_that_differ_have_different_hashes(bpe, hf):
    kinds = [ByteTokenizer(), CharTokenizer("ab"), CharTokenizer("abc"), bpe, TrainedTokenizer(bpe.tokens[:-1]), hf]
    kinds += [TiktokenTokenizer(name) for name in ENCODINGS]
    assert len({tokenizer.sha256 for tokenizer in kinds}) == len(kinds)


def test_only_char_and_bpe_read_the_texts(tmp_path, bpe):
    def documents():
        raise AssertionError("read")
        yield

    (tmp_path / "tokenizer.json").write_text(json.dumps(hf_json(bpe.tokens)))
    for name in KINDS:
        config = TokenizerConfig(
            name,
            file=str(tmp_path / "tokenizer.json") if name == "hf" else None,
            vocab_size=300 if name == "bpe" else None,
        )
        if name in ("char", "bpe"):
            with pytest.raises(AssertionError, match="read"):
                new_tokenizer(config, documents())
        else:
            assert new_tokenizer(config, documents()).name == name
    with pytest.raises(DataError, match="empty"):
        new_tokenizer(TokenizerConfig("char"), [document("", "")])


def test_every_kind_can_be_chosen():
    names = set(get_args(TokenizerConfig.__annotations__["name"]))
    assert names == set(KINDS) == {path.stem for path in (ROOT / "configs/tokenizer").glob("*.yaml")}


@pytest.mark.parametrize(
    "config, message",
    [
        (TokenizerConfig("byte", file="x"), "tokenizer.file: got 'x', allowed: null with tokenizer=byte"),
        (TokenizerConfig("gpt2", vocab_size=500), "tokenizer.vocab_size: got 500, allowed: null with tokenizer=gpt2"),
        (TokenizerConfig("bpe"), "tokenizer.vocab_size: got null, allowed: at least 258"),
        (TokenizerConfig("bpe", vocab_size=257), "tokenizer.vocab_size: got 257, allowed: at least 258"),
        (TokenizerConfig("hf"), "tokenizer.file: got null, allowed: a tokenizer.json; say tokenizer.file=<file>"),
        (TokenizerConfig("hf", file="/no/where"), "tokenizer.file: /no/where cannot be read .No such file"),
        (TokenizerConfig("char", file="/no/where"), "tokenizer.file: /no/where cannot be read .No such file"),
    ],
)
def test_keys_that_cannot_be_used(config, message):
    for call in (tokenizer_label, lambda config: new_tokenizer(config, [])):
        if call is tokenizer_label or config.name in ("hf", "bpe", "char"):
            with pytest.raises((ConfigError, DataError), match=message):
                call(config)


# ----------------------------------------------------------------------------------------------- OpenAI's encodings


def test_the_table_of_encodings_is_tiktokens(monkeypatch):
    from tiktoken_ext import openai_public

    asked = {}

    def load(*arguments, **named):
        urls = [value for key, value in named.items() if key.endswith("file")] or arguments[:1]
        hashes = [value for key, value in named.items() if key.endswith("hash")]
        asked.update(zip(urls, hashes, strict=True))
        return {}

    for name in ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks"):
        monkeypatch.setattr(openai_public, name, load)
    assert set(ENCODINGS) == set(openai_public.ENCODING_CONSTRUCTORS)
    for name, constructor in openai_public.ENCODING_CONSTRUCTORS.items():
        asked.clear()
        said = constructor()
        ours = ENCODINGS[name]
        assert asked == {ours.url + file: sha256 for file, sha256 in ours.files.items()}
        assert ours.separator == said["special_tokens"]["<|endoftext|>"]
        assert ours.vocab_size == said.get("explicit_n_vocab", max(said["special_tokens"].values()) + 1)


def test_cl100k_gives_the_published_ids(cl100k):
    assert cl100k.encode("Hello, world!").tolist() == [9906, 11, 1917, 0]
    assert cl100k.encoding.n_vocab == cl100k.vocab_size == 100277 and cl100k.separator == 100257
    n_bytes = cl100k.token_bytes()
    assert np.flatnonzero(n_bytes == 0).tolist() == [100256, *range(100257, 100277)]  # unused and special ids
    assert cl100k.decode([9906, 100256, 100258, 100276, 0]) == "Hello!"  # which stand for no text


def test_a_million_times_the_same_character(gpt2, cl100k, o200k, bpe, hf):
    for character in " \ta\n👩\u200d":
        text = "x" + character * (10**6 if character.isascii() else 10**5) + "x"
        for tokenizer in (gpt2, cl100k, o200k, bpe, hf) if character in " 👩" else (gpt2, o200k):
            assert tokenizer.decode(tokenizer.encode(text)) == text, (tokenizer.name, character)


@pytest.mark.parametrize("runs, longest", [(LONG_SPACE, SPACE), (LONG_RUN, WORD)])
def test_long_runs_are_cut_and_no_others(runs, longest):
    for before in (0, 1, 63, 64, 32767, 32768, 50000):
        start = "x " * before
        for n in (longest - 1, longest, longest + 1, 3 * longest - 1, 3 * longest):
            text = start + "x" + "\n" * n + "yy z"
            cuts = [len(start) + 1 + longest * k for k in range(1, n // longest + 1)]
            parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
            assert cut_runs(runs, longest, text) == parts
            assert runs is LONG_RUN or without_long_space(text) == parts


def test_runs_that_are_not_quite_too_long_take_no_time(bpe):
    """Where a match is tried at every character of a run, each of these takes minutes."""
    began = time.process_time()
    text = (" " * (SPACE - 1) + "x") * 15
    assert without_long_space(text) == [text] and bpe.decode(bpe.encode(text)) == text
    text = ("a" * (WORD - 1) + " " * (WORD - 1)) * 3000
    assert cut_runs(LONG_RUN, WORD, text) == [text]
    assert time.process_time() - began < 10


def test_bpe_is_trained_on_a_million_times_the_same_character():
    """In seconds, which the square of a million would not be."""
    for character in "a ":
        tokens = new_tokenizer(TokenizerConfig("bpe", vocab_size=262), [document("x" + character * 10**6)]).tokens
        assert tokens == [character.encode() * 2**n for n in range(1, 6)]


# -------------------------------------------------------------------------------------------------- trained on a corpus


def test_bpe_merges_what_is_most_frequent():
    """The merges of Sennrich et al. 2016 on words that begin with their space, counted a second time, naively."""
    rng = np.random.default_rng()
    words = ["low", "lower", "newest", "widest", "wide", "lo", "é", "new", "wow"]
    text = " ".join(rng.choice(words, 400))
    counts = Counter((" " + word).encode() for word in text.split(" ")[1:]) + Counter([text.split(" ")[0].encode()])
    split = {word: [bytes([byte]) for byte in word] for word in counts}
    tokens = TrainedTokenizer.new(TokenizerConfig("bpe", vocab_size=265), [document(text)]).tokens
    for token in tokens:
        pairs = Counter()
        for word, parts in split.items():
            for pair in zip(parts, parts[1:], strict=False):
                pairs[pair] += counts[word]
        most = [pair for pair, count in pairs.items() if count == max(pairs.values())]
        pair = next(pair for pair in most if pair[0] + pair[1] == token)  # among equals any may come first
        for word, parts in split.items():
            merged, n = [], 0
            while n < len(parts):
                step = 2 if tuple(parts[n : n + 2]) == pair else 1
                merged.append(b"".join(parts[n : n + step]))
                n += step
            split[word] = merged


def test_bpe_is_a_function_of_the_training_text(bpe, tmp_path):
    assert bpe.vocab_size == 600 and bpe.separator == 599 and len(bpe.tokens) == 343
    again = new_tokenizer(
        TokenizerConfig("bpe", vocab_size=600),
        [document(text) for text in PROSE[::-1]] + [document("zqzq " * 10**5, split="val")],
    )
    assert again.state() == bpe.state()
    code = """
import sys
from tests.test_tokenizer import *
print(new_tokenizer(TokenizerConfig("bpe", vocab_size=600), [document(text) for text in PROSE]).sha256)
"""
    for threads in ("1", "3"):
        environment = {**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
        assert done.stdout.strip() == bpe.sha256, done.stderr


def test_bpe_is_trained_on_so_much_text_at_most(monkeypatch, bpe):
    monkeypatch.setattr(gpt.tokenizer.bpe, "TRAINED_ON", sum(map(len, PROSE)))

    def documents():
        yield from map(document, PROSE)
        yield document("zqzq " * 10**4)
        raise AssertionError("read on")

    assert new_tokenizer(TokenizerConfig("bpe", vocab_size=600), documents()).state() == bpe.state()


def test_bpe_of_too_little_text_says_how_much_it_would_give():
    with pytest.raises(ConfigError, match="vocab_size: got 4096, allowed: at most 262 for so little training text"):
        new_tokenizer(TokenizerConfig("bpe", vocab_size=4096), [document("aaaa bbb")])
    with pytest.raises(ConfigError, match="at most 257 for"):
        new_tokenizer(TokenizerConfig("bpe", vocab_size=4096), [document("", split="train")])


def test_the_bytes_come_first(bpe):
    assert bpe._table[:256] == [bytes([byte]) for byte in range(256)]
    assert bpe.decode_bytes([0, 255, 10]) == b"\x00\xff\n"
    assert bpe.state()["tokens"][0] == "ĠĠ"  # as GPT-2 writes two spaces


# ----------------------------------------------------------------------------------------------- a file of Hugging Face


def test_hf_gives_the_ids_of_its_library(hf):
    from tokenizers import Tokenizer

    theirs = Tokenizer.from_str(hf.content)
    for text in PROSE:
        assert hf.encode(text).tolist() == theirs.encode(text).ids
    assert hf.separator == theirs.token_to_id("<|endoftext|>") and hf.vocab_size == 602
    assert hf.encode("漢字").tolist() == [601] and hf._table[601] == "漢字".encode()


def test_hf_special_tokens_are_never_made_from_text(hf):
    text = "a<|endoftext|>b<|fim_prefix|>"
    assert not set(hf.encode(text).tolist()) & {599, 600} and hf.decode(hf.encode(text)) == text
    assert hf.decode([599, 600]) == ""


def test_a_file_of_gpt2_gives_the_ids_of_gpt2(gpt2, tmp_path):
    """GPT-2's two files as a tokenizer.json."""
    merges = shipped("gpt2", "vocab.bpe").read_text(encoding="utf-8").splitlines()[1:]
    vocabulary = json.loads(shipped("gpt2", "encoder.json").read_text(encoding="utf-8"))
    made = hf_json([])
    made["model"] |= {"vocab": vocabulary, "merges": [merge.split(" ") for merge in merges]}
    special = next(token for token in made["added_tokens"] if token["content"] == "<|endoftext|>")
    made["added_tokens"] = [special | {"id": 50256}]
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    tokenizer = new_tokenizer(TokenizerConfig("hf", file=str(tmp_path / "tokenizer.json")), [])
    assert (tokenizer.vocab_size, tokenizer.separator) == (50257, 50256)
    np.testing.assert_array_equal(tokenizer.token_bytes(), gpt2.token_bytes())
    for text in (*PROSE, "".join(HOSTILE)):
        np.testing.assert_array_equal(tokenizer.encode(text), gpt2.encode(text))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"normalizer": {"type": "NFC"}}, "changes texts by a normalizer .NFC."),
        ({"normalizer": {"type": "Lowercase"}}, "changes texts by a normalizer .Lowercase."),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "changes texts by a pre-tokenizer .Whitespace."),
        ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}}, "changes texts by .* .ByteLevel."),
        ({"pre_tokenizer": None}, "changes texts by a pre-tokenizer .None."),
        ({"pre_tokenizer": {"type": "Digits", "individual_digits": True}}, "is not byte-level"),
        ({"model": {"type": "WordPiece", "vocab": {}}}, "holds a WordPiece model"),
        ({"model": {"type": "BPE", "dropout": 0.1, "vocab": {}, "merges": []}}, "holds a BPE model with dropout"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}, "is not byte-level, or lacks some"),
        ({"model": None}, "is no tokenizer.json of Hugging Face"),
        ({"pre_tokenizer": {"type": "x" * 10**6}}, "changes texts by a pre-tokenizer .x{100}.;"),
    ],
)
def test_a_file_that_would_change_texts_is_refused(tmp_path, change, message):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(hf_json([], **change)))
    with pytest.raises(DataError, match=f"tokenizer.file: {path} {message}") as error:
        new_tokenizer(TokenizerConfig("hf", file=str(path)), [])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("affix", ["continuing_subword_prefix", "end_of_word_suffix"])
def test_a_panic_of_the_library_is_one_line(monkeypatch, capfd, affix):
    """It comes as a BaseException, and in fifty lines of its own."""
    made = hf_json([b" a", b"ab"])
    made["model"][affix] = "##"
    with pytest.raises(ValueError, match=f"has a {affix} .##.; allowed"):
        FileTokenizer(json.dumps(made))
    monkeypatch.setattr(gpt.tokenizer.hf, "check_lossless", lambda parsed: None)
    if affix == "continuing_subword_prefix":
        with pytest.raises(ValueError, match="is no tokenizer of Hugging Face") as error:
            FileTokenizer(json.dumps(made))
        assert len(str(error.value)) < 200
        with pytest.raises(DataError, match="tokenizer hf: the stored state is none"):
            load_tokenizer({"name": "hf", "json": json.dumps(made)})
    os.write(2, b"heard again")
    assert capfd.readouterr().err == "heard again"


def test_ids_far_above_the_number_of_tokens_are_refused():
    for highest, allowed in ((519, True), (520, False), (400_000_000, False), (2**32 - 6, False)):
        made = hf_json([])
        made["added_tokens"] = []
        made["model"]["vocab"] |= {"ab": 256, "bc": 257, "cd": 258, "de": highest}
        if allowed:
            assert FileTokenizer(json.dumps(made)).vocab_size == highest + 1 == 2 * 260
        else:
            with pytest.raises(ValueError, match=f"has 260 tokens with ids up to {highest:,}; allowed: below 520"):
                FileTokenizer(json.dumps(made))


def test_an_added_token_without_text_is_refused():
    made = hf_json([])
    made["added_tokens"][-1]["content"] = ""
    with pytest.raises(ValueError, match="adds a token without text; allowed"):
        FileTokenizer(json.dumps(made))


@pytest.mark.parametrize("name", ["char", "hf"])
def test_a_path_that_is_no_file_of_a_vocabulary_is_refused_at_once(tmp_path, monkeypatch, name):
    monkeypatch.setattr(gpt.tokenizer.base, "LARGEST", 1000)
    (tmp_path / "large").write_bytes(b" " * 1001)
    (tmp_path / "latin").write_bytes(b'"\xe9"')
    os.mkfifo(tmp_path / "pipe")
    for path, message in {
        "~nosuchuser/x.json": "~nosuchuser/x.json cannot be read",
        "a\0b": r"got 'a.x00b', which is no path",
        str(tmp_path): "cannot be read .Is a directory",
        str(tmp_path / "pipe"): "is no plain file",
        "/dev/zero": "is no plain file",
        str(tmp_path / "large"): "is larger than 1,000 bytes",
        str(tmp_path / "latin"): "not UTF-8",
    }.items():
        for call in (tokenizer_label, lambda config: new_tokenizer(config, [])):
            with pytest.raises(DataError, match=f"tokenizer.file: .*{message}"):
                call(TokenizerConfig(name, file=path))


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"model": {"type": "BPE"}}', b"\xff\xfe", b"PK\x03\x04", b"null"]
)
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(DataError, match="tokenizer.file: .*tokenizer.json ") as error:
        new_tokenizer(TokenizerConfig("hf", file=str(tmp_path / "tokenizer.json")), [])
    assert "\n" not in str(error.value)


def test_a_text_that_a_file_does_not_give_back_is_refused(bpe):
    """An added token that swallows the space before it."""
    made = hf_json(bpe.tokens)
    made["added_tokens"][-1]["lstrip"] = True
    tokenizer = FileTokenizer(json.dumps(made))
    assert tokenizer.decode(tokenizer.encode("漢字 漢")) == "漢字 漢"
    with pytest.raises(DataError, match="does not give back the text 'a 漢字'"):
        tokenizer.encode("a 漢字")


def test_a_file_is_named_by_its_content(tmp_path, bpe):
    labels = []
    for tokens in (bpe.tokens, bpe.tokens[:-1]):
        (tmp_path / "tokenizer.json").write_text(json.dumps(hf_json(tokens)))
        labels.append(tokenizer_label(TokenizerConfig("hf", file=str(tmp_path / "tokenizer.json"))))
    assert len(set(labels)) == 2 and all(label.startswith("hf") for label in labels)
    assert tokenizer_label(TokenizerConfig("bpe", vocab_size=300)) != tokenizer_label(
        TokenizerConfig("bpe", vocab_size=301)
    )


# ----------------------------------------------------------------------------------------------- characters from a file


@pytest.mark.parametrize("value", ["\n abc漢", ["\n", " ", "a", "b", "c", "漢"]])
def test_the_characters_can_be_given(tmp_path, value):
    (tmp_path / "characters.json").write_text(json.dumps(value))
    config = TokenizerConfig("char", file=str(tmp_path / "characters.json"))
    assert new_tokenizer(config, []).encode("cab漢").tolist() == [4, 2, 3, 5]
    assert tokenizer_label(config) != "char"


@pytest.mark.parametrize(
    "content",
    ['""', "[]", '"ba"', '["a", "bc"]', "[1, 2]", "{}", "abc", '"aa"', "3", '["\\ud800"]', '"\\udfff"', "[" * 10**5],
)
def test_characters_that_are_none_are_refused(tmp_path, content):
    (tmp_path / "characters.json").write_text(content)
    config = TokenizerConfig("char", file=str(tmp_path / "characters.json"))
    for call in (tokenizer_label, lambda config: new_tokenizer(config, [])):
        with pytest.raises(DataError, match="tokenizer.file: .*characters.json (holds|is no JSON)"):
            call(config)


# ------------------------------------------------------------------------------------------------------- stored states


@pytest.mark.parametrize(
    "state",
    [
        None,
        [],
        {},
        {"name": "bpe"},
        {"name": "bpe", "tokens": ["ab"], "more": 1},
        {"name": "bpe", "tokens": ["abc"]},
        {"name": "bpe", "tokens": ["ab", "ab"]},
        {"name": "bpe", "tokens": ["a"]},
        {"name": "bpe", "tokens": ["a漢"]},
        {"name": "bpe", "tokens": 3},
        {"name": "hf", "json": "{}"},
        {"name": "hf", "json": 3},
        {"name": ["byte"]},
        {"name": "cl100k_base", "files": {"cl100k_base.tiktoken": "0"}},
        {"name": "char"},
        {"name": "char", "characters": ""},
        {"name": "char", "characters": "ba"},
        {"name": "char", "characters": "aab"},
        {"name": "char", "characters": ["a", "b"]},
        {"name": "char", "characters": "\ud800"},
        {"name": "byte", "more": 1},
        {"name": "gpt2", "files": {}},
    ],
)
def test_a_state_that_no_tokenizer_wrote_is_refused(state):
    with pytest.raises(DataError, match="tokenizer|text:") as error:
        load_tokenizer(state)
    assert "\n" not in str(error.value)


# ------------------------------------------------------------------------------------------------ files and networks


@pytest.fixture
def silent_server(monkeypatch):
    """A server that takes connections and never answers."""
    monkeypatch.setenv("no_proxy", "*")
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/"


@pytest.fixture
def server(monkeypatch, tmp_path):
    """A server of the files in `folder`."""
    monkeypatch.setenv("no_proxy", "*")
    folder = tmp_path / "served"
    folder.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(folder))

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.1:{httpd.server_port}/"
        httpd.shutdown()


@pytest.mark.parametrize("name, file", [("gpt2", "vocab.bpe"), ("cl100k_base", "cl100k_base.tiktoken")])
@pytest.mark.parametrize("network", ["silent", "refused", "unknown name"])
def test_without_files_and_network_it_says_so_soon(network, name, file, silent_server, monkeypatch, tmp_path):
    monkeypatch.setattr(gpt.download, "PATIENCE", 0.5)
    urls = {"silent": silent_server, "refused": "http://127.0.0.1:1/", "unknown name": "http://nowhere.invalid/"}
    monkeypatch.setitem(ENCODINGS, name, replace(ENCODINGS[name], url=urls[network]))
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    began = time.monotonic()
    with pytest.raises(DataError) as error:
        TiktokenTokenizer(name).encode("text")
    assert time.monotonic() - began < 30  # unasked, the silent one would be waited for without end
    for part in (f"tokenizer={name}", file, "TIKTOKEN_CACHE_DIR", "tokenizer=byte", str(tmp_path / "cache")):
        assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_a_damaged_tokenizer_file_is_not_used(monkeypatch, tmp_path):
    monkeypatch.setitem(ENCODINGS, "gpt2", replace(ENCODINGS["gpt2"], url="http://127.0.0.1:1/"))
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    name = hashlib.sha1(b"http://127.0.0.1:1/vocab.bpe").hexdigest()
    (tmp_path / name).write_bytes(b"damaged")
    with pytest.raises(DataError, match=f"vocab.bpe is damaged at {tmp_path / name}"):
        TiktokenTokenizer("gpt2").encode("text")


def test_an_empty_cache_variable_is_named(monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    with pytest.raises(DataError, match="TIKTOKEN_CACHE_DIR: got an empty text"):
        TiktokenTokenizer("gpt2").encode("text")


@pytest.mark.parametrize("name", ENCODINGS)
def test_files_are_needed_only_to_tokenize(monkeypatch, name):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    tokenizer = load_tokenizer(TiktokenTokenizer(name).state())
    assert (tokenizer.vocab_size, tokenizer.separator) == (ENCODINGS[name].vocab_size, ENCODINGS[name].separator)


def test_download_keeps_the_right_file_only(server, tmp_path, monkeypatch):
    monkeypatch.setattr(gpt.download, "PATIENCE", 60)  # the machine may be busy
    folder, url = server
    (folder / "text").write_bytes(b"content")
    right = hashlib.sha256(b"content").hexdigest()
    download(url + "text", right, tmp_path / "new" / "text")
    assert (tmp_path / "new" / "text").read_bytes() == b"content"
    with pytest.raises(OSError, match="sha256 differs"):
        download(url + "text", "0" * 64, tmp_path / "wrong")
    with pytest.raises(OSError, match="HTTP 404"):
        download(url + "missing", right, tmp_path / "wrong")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "served"]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["text"]


def test_download_waits_for_no_name_server(monkeypatch, tmp_path):
    monkeypatch.setattr(gpt.download, "PATIENCE", 0.3)
    given_up = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: given_up.wait())  # answers never
    with pytest.raises(OSError, match="no answer in 0.3 s"):
        download("http://slow.invalid/text", "", tmp_path / "text")
    given_up.set()


def test_the_patience_is_short():
    assert gpt.download.PATIENCE <= 3  # seconds: an error for the user comes within five


def test_download_gives_up_on_a_file_that_stops_half_way(monkeypatch, tmp_path):
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(gpt.download, "PATIENCE", 1.5)

    def answer_half():
        with socket.create_server(("127.0.0.1", 0)) as server:
            address.append(f"http://127.0.0.1:{server.getsockname()[1]}/")
            ready.set()
            connection, _ = server.accept()
            connection.recv(1000)
            connection.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: 7\r\n\r\ncon")
            given_up.wait()
            connection.close()

    address, ready, given_up = [], threading.Event(), threading.Event()
    threading.Thread(target=answer_half, daemon=True).start()
    ready.wait()
    with pytest.raises(OSError, match="timed out"):
        download(address[0], "", tmp_path / "text")
    given_up.set()
    assert list(tmp_path.iterdir()) == []
