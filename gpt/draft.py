"""A corpus on its way to the disk, with which a process can go on where another one was killed."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from gpt.corpus import FORMAT, SPLITS, remember, whole
from gpt.documents import Skipped, Source
from gpt.encode import Encoded, Part, Place, bytes_of
from gpt.errors import DataError
from gpt.files import seal, write_atomic
from gpt.tokenizer import Tokenizer, id_dtype, load_tokenizer
from gpt.tokens import TokenWriter


class Draft:
    """A corpus on the way: token files that grow, and what is known of them, in `folder`.

    progress.json says how far all of them are good, with their sha256 up to there; a draft of the same `identity` goes
    on from there.
    """

    def __init__(self, folder: Path, identity: str, source: Source, new: Callable[[], Tokenizer], log=print):
        self.folder, self.identity, self.ids_at, self.log = folder, identity, source.ids_at, log
        self.settled = source.settled
        if not self._resume():
            for path in folder.iterdir():
                path.unlink()
            tokenizer = new()
            nothing = {split: {"documents": 0, "tokens": 0, "bytes": 0} for split in SPLITS}
            self._open({"splits": nothing, "skipped": source.skipped, "reached": Place()}, tokenizer)

    def _resume(self) -> bool:
        """Whether there is a draft of the same that can be gone on with; opens it."""
        path = self.folder / "progress.json"
        if not path.is_file():
            return False
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            if saved["identity"] != self.identity:
                return False
            self._open(saved, load_tokenizer(saved["tokenizer"]))
            if [sha256.result() for sha256 in self.hashes] != saved["sha256"]:
                raise DataError("its ids are not those that were written")
            self.settled.update(saved["settled"])
        except (KeyError, TypeError, ValueError, AttributeError, OSError, DataError):
            self.log("  beginning anew: what a killed preparation left is damaged")
            return False
        return True

    def _open(self, state: dict, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        place = Place(*map(whole, state["reached"]))
        self.skipped = Counter(state["skipped"])
        self.n_bytes = {split: whole(state["splits"][split]["bytes"]) for split in SPLITS}
        dtype, vocab_size = id_dtype(self.tokenizer.vocab_size), self.tokenizer.vocab_size
        self.ids, self.starts = {}, {}
        for split, counts in state["splits"].items():
            self.ids[split] = TokenWriter(
                self.folder, split, dtype, vocab_size, whole(counts["tokens"]), self.ids_at.get(split)
            )
            self.starts[split] = TokenWriter(
                self.folder, f"{split}_documents", np.dtype(np.uint64), count=whole(counts["documents"])
            )
        self._reached(place)

    def _reached(self, place: Place) -> None:
        self.place = place
        self.hashes = [writer.digest.so_far() for writer in (*self.ids.values(), *self.starts.values())]
        self.checkpointed = {"splits": self.counts(), "skipped": dict(self.skipped), "reached": list(place)}

    def counts(self) -> dict:
        return {
            split: {
                "documents": self.starts[split].count,
                "tokens": self.ids[split].count,
                "bytes": self.n_bytes[split],
            }
            for split in SPLITS
        }

    @property
    def tokens(self) -> int:
        return sum(writer.count for writer in self.ids.values())

    @property
    def documents(self) -> int:
        return sum(writer.count for writer in self.starts.values())

    @property
    def bytes(self) -> int:
        return sum(self.n_bytes.values())

    def write(self, task: list[Part | Skipped], encoded: Encoded, place: Place, limit: int | None) -> None:
        """Appends a task's ids, as long as there are fewer than `limit` in all."""
        ids, counts, n_bytes = encoded
        if limit is not None and self.tokens + len(ids) >= limit:
            ids = ids[: limit - self.tokens]
            ends = counts.cumsum()
            kept = int(np.searchsorted(ends - counts, len(ids)))  # parts that begin before the limit
            task, counts, n_bytes = task[:kept], counts[:kept].copy(), n_bytes[:kept].copy()
            if kept:
                counts[-1] -= ends[kept - 1] - len(ids)
                n_bytes[-1] = bytes_of(self.tokenizer, ids[len(ids) - counts[-1] :]).sum()
        splits = np.array(["" if isinstance(part, Skipped) else part.split for part in task], dtype=str)
        begins = np.array([not isinstance(part, Skipped) and part.begins for part in task], dtype=bool)
        self.skipped.update(part.why for part in task if isinstance(part, Skipped))
        for split in SPLITS:
            mine = splits == split
            if mine.any():
                starts = self.ids[split].count + (counts * mine).cumsum() - counts
                self.ids[split].write(ids if mine.all() else ids[np.repeat(mine, counts)])
                self.starts[split].write(starts[mine & begins].astype(np.uint64))
                self.n_bytes[split] += int(n_bytes[mine].sum())
        self._reached(place)

    def save(self) -> None:
        """From now on a killed process has lost nothing that was written before."""
        for writer in (*self.ids.values(), *self.starts.values()):
            writer.sync()
        write_atomic(
            self.folder / "progress.json",
            json.dumps(
                {"identity": self.identity, "tokenizer": self.tokenizer.state(), "settled": self.settled}
                | {"sha256": [sha256.result() for sha256 in self.hashes]}
                | self.checkpointed
            ),
        )

    def finish(self, facts: dict) -> None:
        """Writes meta.json, without which all of it does not count."""
        files, splits = {}, self.counts()
        for split in SPLITS:
            found, splits[split]["sha256"] = self.ids[split].finish()
            files |= found | self.starts[split].finish()[0]
        for name, said in files.items():
            remember(self.folder / name, said["sha256"])  # its ids were checked as they were written
        meta = {"format": FORMAT, **facts, "skipped": dict(self.skipped), "tokenizer": self.tokenizer.state()}
        meta |= {"tokenizer_sha256": self.tokenizer.sha256, "splits": splits, "files": files}
        if self.settled:
            meta["settled"] = self.settled
        write_atomic(self.folder / "meta.json", seal(meta))
        (self.folder / "progress.json").unlink(missing_ok=True)

    def close(self) -> None:
        for writer in (*self.ids.values(), *self.starts.values()):
            writer.close()
