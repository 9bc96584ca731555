"""A prepared corpus on disk: opened for lazy reading, and checked as a whole.

`data/<name>/<key>-<hash of the source>/` holds

    train-00000.bin, ...             token files (gpt/tokens.py): uint16 or uint32 ids, one document after the other
    train_documents-00000.bin, ...   uint64, where in the ids each document starts
    val..., test...                  the same; no test files where data.test_fraction is 0
    meta.json                        source, tokenizer, counts, sha256 of the files and of itself; written last

The test split is sealed: training and evaluation during it never read it.

Format 1, which nothing writes any more, had one .npy file in place of shards, no test split, and the sha256 of whole
files. It can be read, so that what was trained on it can be evaluated, and trained on.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gpt.documents import left_out
from gpt.errors import DataError, shown
from gpt.files import digest, read_json, sha256_of, write_atomic
from gpt.tokenizer import Tokenizer, id_dtype, load_tokenizer
from gpt.tokens import Tokens, check_ids, header, npy_header, npy_sha256, numbers_sha256, shard_path

FORMAT = 3  # to be raised when the same source gives other files; part of the folder's name
FIRST = 1
SPLITS = ("train", "val", "test")
LARGE = 2**28  # bytes; larger files are verified once, not at every opening
LONGEST = 2**16  # bytes; no tokenizer has a longer token


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus, opened and checked."""

    name: str
    folder: Path
    tokenizer: Tokenizer
    meta: dict  # what meta.json holds
    train: Tokens  # (n,) ids
    val: Tokens
    test: Tokens  # of no length where there is none
    train_documents: Tokens  # (documents,) uint64, where in `train` each document starts
    val_documents: Tokens
    test_documents: Tokens
    train_sha256: str  # of the ids as they are stored, whatever the shards; in format 1 of the .npy file
    val_sha256: str
    test_sha256: str

    def hashes(self) -> dict[str, str]:
        """What tells this corpus from every other: a checkpoint keeps it."""
        own = {f"{split}_sha256": getattr(self, f"{split}_sha256") for split in SPLITS}
        return {"tokenizer_sha256": self.tokenizer.sha256, **own}

    def differing(self, hashes: dict) -> str | None:
        """The first of a checkpoint's `hashes` that are not those of this corpus, None where all are.

        A checkpoint without a test split is older than the shards: its hashes are those of .npy files.
        """
        for key, own in self.hashes().items():
            if "test_sha256" not in hashes and key == "test_sha256":
                continue
            same = own == hashes[key]
            if not same and "test_sha256" not in hashes and key != "tokenizer_sha256":
                same = npy_sha256(getattr(self, key.removesuffix("_sha256"))) == hashes[key]
            if not same:
                return key
        return None

    def summary(self) -> str:
        """A few lines for a person: what it was made of, and how much of it."""
        lines = [f"{self.folder}", f"  source     {shown(self.meta['source'])}"]
        lines += [f"  tokenizer  {self.tokenizer.name}, {self.tokenizer.vocab_size:,} ids", ""]
        lines += [f"  {'':9}{'documents':>11}{'bytes':>15}{'tokens':>15}{'share':>9}"]
        total = sum(split["tokens"] for split in self.meta["splits"].values())
        for name, split in self.meta["splits"].items():
            counts = f"{split['documents']:>11,}{split['bytes']:>15,}{split['tokens']:>15,}"
            lines += [f"  {name:9}{counts}{split['tokens'] / total:>9.1%}"]
        return "\n".join(lines + ["", f"  skipped    {self.skipped or 'nothing'}"])

    @property
    def skipped(self) -> str:
        """What was left out: how many of each kind."""
        return left_out(self.meta["skipped"])


def find_corpus(name: str, hashes: dict, root: Path = Path("data")) -> Corpus | None:
    """The prepared corpus of data=<name> that has these `Corpus.hashes`, whatever its source is now, or None.

    One that is damaged is none.
    """
    for path in sorted((Path(root) / name).glob("*/meta.json")):
        try:
            meta = _read_meta(path)
            said = {"tokenizer_sha256": meta["tokenizer_sha256"]}
            said |= {f"{split}_sha256": meta["splits"][split]["sha256"] for split in SPLITS}
            old = "test_sha256" not in hashes
            if all(said[key] == hashes[key] for key in (("tokenizer_sha256",) if old else said)):
                corpus = open_corpus(path.parent)
                if corpus.differing(hashes) is None:
                    return corpus
        except (KeyError, TypeError, DataError):
            continue
    return None


def open_corpus(folder: Path) -> Corpus:
    """Opens a prepared corpus and checks all of it against meta.json.

    Raises DataError naming the file, what was expected and what was found.
    """
    meta = _read_meta(folder / "meta.json")
    try:
        tokenizer, _ = load_tokenizer(meta["tokenizer"]), text(meta["source"])
        if tokenizer.sha256 != meta["tokenizer_sha256"]:
            raise DataError(f"{folder / 'meta.json'}: its tokenizer does not have the sha256 that is written beside it")
        opened = {}
        for split in SPLITS:
            counts = meta["splits"][split]
            count, documents, n_bytes = (whole(counts[key]) for key in ("tokens", "documents", "bytes"))
            fits = (0 < n_bytes <= LONGEST * count and documents > 0) if count else n_bytes == documents == 0
            if not fits or (split != "test" and not count):
                raise DataError(f"{folder / 'meta.json'}: the counts of {split} cannot be those of a text")
            dtype, wide = id_dtype(tokenizer.vocab_size), np.dtype(np.uint64)
            opened[split] = _open_files(folder, split, meta["files"], dtype, count, tokenizer.vocab_size)
            opened[f"{split}_documents"] = _open_files(
                folder, f"{split}_documents", meta["files"], wide, documents, last=count
            )
        sha256 = {f"{split}_sha256": text(meta["splits"][split]["sha256"]) for split in SPLITS}
        _ = meta["fingerprint"], [whole(count) for count in meta["skipped"].values()]
        return Corpus(text(meta["name"]), folder, tokenizer, meta, **opened, **sha256)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{folder / 'meta.json'}: something is missing or of another type ({error})") from None
    except OSError as error:
        raise DataError(f"{error.filename or folder}: cannot be read ({error.strerror or error})") from None


def whole(value: object) -> int:
    """`value` if it is a whole number >= 0; raises TypeError."""
    if type(value) is not int or value < 0:
        raise TypeError(f"{str(value)[:40]!r} is no whole number >= 0")
    return value


def text(value: object) -> str:
    """`value` if it is a text; raises TypeError."""
    if not isinstance(value, str):
        raise TypeError(f"{str(value)[:40]!r} is no text")
    return value


def _read_meta(path: Path) -> dict:
    if path.exists() and not path.is_file():
        raise DataError(f"{path}: cannot be read (no plain file)")
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        sha256 = digest(meta) if isinstance(meta, dict) else None
    except FileNotFoundError:
        raise DataError(f"{path}: not there, so this is no prepared corpus") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not whole ({error})") from None
    if isinstance(meta, dict) and meta.get("format") == FIRST:
        return _of_first(path, meta)
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        given = meta.get("format") if isinstance(meta, dict) else meta
        raise DataError(f"{path}: format {str(given)[:40]!r}, expected {FORMAT}")
    if meta.get("sha256") != sha256:
        raise DataError(f"{path}: damaged or changed by hand, it does not have its own sha256")
    return meta


def _of_first(path: Path, meta: dict) -> dict:
    """What a meta.json of format 1 would say today; it had no sha256 of its own."""
    try:
        splits = {s: meta["splits"][s] | {"sha256": meta["files"][f"{s}.npy"]["sha256"]} for s in ("train", "val")}
    except (KeyError, TypeError) as error:
        raise DataError(f"{path}: something is missing or of another type ({error})") from None
    nothing = {"documents": 0, "tokens": 0, "bytes": 0, "sha256": hashlib.sha256().hexdigest()}
    return meta | {"splits": splits | {"test": nothing}}


def _open_files(
    folder: Path, stem: str, said: dict, dtype: np.dtype, total: int, vocab_size: int | None = None, last: int = 0
) -> Tokens:
    """The shards `stem` if they are what meta.json `said`: sizes, headers, sha256; ids, or starts below `last`."""
    paths, counts = [folder / f"{stem}.npy"], []
    old = paths[0].name in said
    if not old:
        paths = []
        while (path := shard_path(folder, stem, len(paths))).name in said:
            paths.append(path)
    for path in paths:
        entry = said[path.name]
        if entry["dtype"] != dtype.name:
            raise DataError(f"{path}: holds {entry['dtype']}, expected {dtype.name}")
        counts.append(whole(entry["count"]))
    if sum(counts) != total:
        raise DataError(f"{folder}: meta.json says {total:,} numbers of {stem}, and {sum(counts):,} in its files")
    tokens = Tokens(paths, counts, dtype, npy_header if old else header)
    good = [_verified(path, text(said[path.name]["sha256"])) for path in paths]
    if not all(good):
        if vocab_size is not None:
            check_ids(folder / stem, tokens, vocab_size)
        else:
            _check_starts(folder / stem, tokens, last)
        for path in paths:
            remember(path, said[path.name]["sha256"])
    return tokens


def _check_starts(place: Path, starts: Tokens, count: int) -> None:
    """Raises DataError where the starts of documents do not rise from 0 to below `count`."""
    before = -1
    for at in range(0, len(starts), 2**20):
        block = np.concatenate(([before], starts[at : at + 2**20].astype(np.int64)))
        if (at == 0 and block[1] != 0) or np.any(block[1:] <= block[:-1]) or block[-1] >= count:
            raise DataError(f"{place}: starts must rise from 0 and stay below {count:,}")
        before = block[-1]


def _verified(path: Path, expected: str) -> bool:
    """Whether a large file was found good before; else its sha256 is taken now, and DataError raised if it differs."""
    if path.stat().st_size > LARGE and read_json(_sidecar(path)).get("verified") == _mark(path, expected):
        return True
    if (sha256 := (sha256_of if path.suffix == ".npy" else numbers_sha256)(path)) != expected:
        raise DataError(f"{path}: damaged, its sha256 is {sha256[:12]}…, meta.json says {expected[:12]}…")
    return False


def remember(path: Path, sha256: str) -> None:
    """That a large file was read and found good, so that it is not read again at the next opening."""
    if path.stat().st_size > LARGE:
        try:
            write_atomic(_sidecar(path), json.dumps({"verified": _mark(path, sha256)}))
        except OSError:
            pass  # a read-only folder: it is verified again next time


def _mark(path: Path, sha256: str) -> list:
    return [path.stat().st_size, path.stat().st_mtime_ns, sha256]


def _sidecar(path: Path) -> Path:
    """Where it stands that a large file was found good: its size, mtime in ns and sha256 then."""
    return path.with_suffix(".verified.json")
