"""A prepared corpus on disk: opened as read-only memory maps, and checked as a whole.

`data/<name>/<key>-<hash of the source>/` holds

    train.npy, val.npy, test.npy    (n,) uint16 or uint32 ids, one document after the other; no test.npy where
                                    data.test_fraction is 0
    train_documents.npy, ...        (documents,) uint64, where in the ids each document starts
    meta.json                       source, tokenizer, counts, size and sha256 of the files; written last

The test split is sealed: training and evaluation during it never read it.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gpt.data import LARGE, forget
from gpt.errors import DataError
from gpt.files import read_json, sha256_of, write_atomic
from gpt.schema import DataConfig, TokenizerConfig
from gpt.tokenizer import Tokenizer, id_dtype, load_tokenizer

FORMAT = 2  # to be raised when the same source gives other files; part of the folder's name
SPLITS = ("train", "val", "test")
BLOCK = 2**20  # ids checked at a time
LONGEST = 128  # bytes of the longest token of any tokenizer here


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus, opened and checked."""

    name: str
    folder: Path
    tokenizer: Tokenizer
    meta: dict  # what meta.json holds
    train: np.ndarray  # (n,) ids, a read-only memory map
    val: np.ndarray
    test: np.ndarray  # of no length where there is none
    train_documents: np.ndarray  # (documents,) uint64, where in `train` each document starts
    val_documents: np.ndarray
    test_documents: np.ndarray
    train_sha256: str  # of the token files
    val_sha256: str
    test_sha256: str  # "" where there is none

    def summary(self) -> str:
        """A few lines for a person: what it was made of, and how much of it."""
        lines = [f"{self.folder}", f"  source     {self.meta['source']}"]
        lines += [f"  tokenizer  {self.tokenizer.name}, {self.tokenizer.vocab_size:,} ids", ""]
        lines += [f"  {'':9}{'documents':>11}{'bytes':>15}{'tokens':>15}{'share':>9}"]
        total = sum(split["tokens"] for split in self.meta["splits"].values())
        for name, split in self.meta["splits"].items():
            counts = f"{split['documents']:>11,}{split['bytes']:>15,}{split['tokens']:>15,}"
            lines += [f"  {name:9}{counts}{split['tokens'] / total:>9.1%}"]
        skipped = ", ".join(f"{count:,} {why}" for why, count in self.meta["skipped"].items())
        return "\n".join(lines + ["", f"  skipped    {skipped or 'nothing'}"])


def open_corpus(folder: Path) -> Corpus:
    """Opens a prepared corpus and checks all of it against meta.json.

    Raises DataError naming the file, what was expected and what was found.
    """
    folder = Path(folder)
    try:
        return open_checked(folder)
    except DataError as error:
        path = " data.path=<file or folder>" if folder.parent.name == "text" else ""
        command = f"python data/prepare.py data={folder.parent.name or '<name>'}{path}"
        raise DataError(f"{error}; prepare it again: {command}") from None


def find_corpus(
    data: DataConfig, tokenizer: TokenizerConfig, train_sha256: str, val_sha256: str, root: Path = Path("data")
) -> Corpus | None:
    """The prepared corpus whose token files have these hashes, whatever its source is now; None where there is none.

    One that is damaged is none.
    """
    for path in sorted((Path(root) / data.name).glob("*/meta.json")):
        meta = read_json(path)
        try:
            found = [meta["files"][f"{split}.npy"]["sha256"] for split in ("train", "val")]
            if found == [train_sha256, val_sha256] and meta["tokenizer"]["name"] == tokenizer.name:
                return open_checked(path.parent)
        except (KeyError, TypeError, DataError):
            continue
    return None


def open_checked(folder: Path) -> Corpus:
    """`open_corpus`, whose errors do not say how to mend it."""
    meta = _read_meta(folder / "meta.json")
    try:
        tokenizer, _ = load_tokenizer(meta["tokenizer"]), text(meta["source"])
        if tokenizer.sha256 != meta["tokenizer_sha256"]:
            raise DataError(f"{folder / 'meta.json'}: its tokenizer does not have the sha256 that is written beside it")
        opened = {}
        for split in SPLITS:
            if split == "test" and meta["splits"][split] == {"documents": 0, "tokens": 0, "bytes": 0}:
                opened |= {
                    split: np.empty(0, id_dtype(tokenizer.vocab_size)),
                    f"{split}_documents": np.empty(0, np.uint64),
                }
                continue
            for name, vocab_size in ((split, tokenizer.vocab_size), (f"{split}_documents", None)):
                opened[name] = _open_file(folder / f"{name}.npy", meta["files"][f"{name}.npy"], vocab_size)
            starts, count = opened[f"{split}_documents"], len(opened[split])
            if starts[0] != 0 or np.any(starts[1:] < starts[:-1]) or starts[-1] >= count:
                raise DataError(f"{folder}/{split}_documents.npy: starts must rise from 0 and stay below {count:,}")
            counts = meta["splits"][split]
            fits = 0 < whole(counts["bytes"]) <= LONGEST * count
            if (whole(counts["documents"]), whole(counts["tokens"])) != (len(starts), count) or not fits:
                raise DataError(f"{folder / 'meta.json'}: the counts of {split} are not those of its files")
        sha256 = {split: meta["files"].get(f"{split}.npy", {"sha256": ""})["sha256"] for split in SPLITS}
        _ = meta["fingerprint"], [whole(count) for count in meta["skipped"].values()]
        return Corpus(
            text(meta["name"]),
            folder,
            tokenizer,
            meta,
            **opened,
            train_sha256=sha256["train"],
            val_sha256=sha256["val"],
            test_sha256=sha256["test"],
        )
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise DataError(f"{folder / 'meta.json'}: something is missing or of another type ({error})") from None


def whole(value: object) -> int:
    """`value` if it is a whole number; raises TypeError."""
    if type(value) is not int:
        raise TypeError(f"{str(value)[:40]!r} is no whole number")
    return value


def text(value: object) -> str:
    """`value` if it is a text; raises TypeError."""
    if not isinstance(value, str):
        raise TypeError(f"{str(value)[:40]!r} is no text")
    return value


def _read_meta(path: Path) -> dict:
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{path}: not there, so this is no prepared corpus") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not whole ({error})") from None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        given = meta.get("format") if isinstance(meta, dict) else meta
        raise DataError(f"{path}: format {str(given)[:40]!r}, expected {FORMAT}")
    return meta


def _open_file(path: Path, said: dict, vocab_size: int | None) -> np.ndarray:
    """The array in `path`, memory-mapped, if it is what meta.json `said`: size, type, count, sha256, ids."""
    dtype = np.dtype(np.uint64) if vocab_size is None else id_dtype(vocab_size)
    expected, expected_sha256 = whole(said["size"]), text(said["sha256"])
    try:
        size = path.stat().st_size
        if size != expected:
            raise DataError(f"{path}: {size:,} bytes, expected {expected:,}, as meta.json says")
        known = read_json(_sidecar(path)).get("verified") if size > LARGE else None
        verified = [size, path.stat().st_mtime_ns, expected_sha256]
        if known != verified and (sha256 := sha256_of(path)) != expected_sha256:
            raise DataError(f"{path}: damaged, its sha256 is {sha256[:12]}…, meta.json says {expected_sha256[:12]}…")
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise DataError(f"{path}: not there") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from None
    except DataError:
        raise
    except Exception as error:  # numpy's reading of a header lets errors of Python's own parser through
        raise DataError(f"{path}: {size:,} bytes, but no .npy file of numbers ({str(error)[:100]})") from None
    if array.dtype != dtype:
        raise DataError(f"{path}: holds {array.dtype}, expected {dtype}")
    if array.ndim != 1 or len(array) < 1:
        raise DataError(f"{path}: has the shape {array.shape}, expected one dimension and at least one entry")
    if (len(array), dtype.name) != (whole(said["count"]), said["dtype"]):
        raise DataError(
            f"{path}: {len(array):,} entries of {dtype}; meta.json says {said['count']:,} entries of {said['dtype']}"
        )
    if known == verified:
        return array
    if vocab_size is not None:
        check_ids(path, array, vocab_size)
    if size > LARGE:
        forget(array)
        try:
            write_atomic(_sidecar(path), json.dumps({"verified": verified}))
        except OSError:
            pass  # a read-only folder: it is verified again next time
    return array


def _sidecar(path: Path) -> Path:
    """Where it stands that a large file was found good: its size, mtime in ns and sha256 then."""
    return path.with_suffix(".verified.json")


def check_ids(path: Path, ids: np.ndarray, vocab_size: int, start: int = 0) -> None:
    """Raises DataError with the index where an id is outside of 0 .. vocab_size - 1."""
    for at in range(0, len(ids), BLOCK):
        block = ids[at : at + BLOCK]
        if block.max() >= vocab_size or block.min() < 0:
            wrong = int(np.argmax((block >= vocab_size) | (block < 0)))
            raise DataError(
                f"{path}: token id {int(block[wrong]):,} at index {start + at + wrong:,}, "
                f"allowed: 0 to {vocab_size - 1:,} (the vocabulary)"
            )
