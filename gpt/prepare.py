"""From texts to token files. A corpus is prepared once, whole or not at all, and never in place of another one."""

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
from dataclasses import fields
from pathlib import Path

from gpt.corpus import FORMAT, Corpus, open_corpus
from gpt.documents import Document, Source, SourceGone, left_out
from gpt.draft import Draft
from gpt.encode import WorkerDied, encode_all, parts_of, tasks_of
from gpt.errors import ConfigError, DataError, shown
from gpt.meter import Meter
from gpt.schema import DataConfig, TokenizerConfig
from gpt.tokenizer import Tokenizer, new_tokenizer, tokenizer_label

SAVE = 10  # seconds between two times that a preparation makes sure it could go on from here


def write_corpus(
    folder: Path, data: DataConfig, tokenizer: TokenizerConfig, source: Source, workers: int, log=print
) -> None:
    """Tokenizes `source` into `folder`, from where a killed process stopped there; meta.json comes last.

    Raises DataError where the text cannot be used, WorkerDied and OSError (a full disk) where it can go on later.
    """

    def new() -> Tokenizer:
        return new_tokenizer(
            tokenizer, (one for one in source.documents(0) if isinstance(one, Document)), data.max_tokens
        )

    facts = {"name": data.name, "source": source.description, "fingerprint": source.fingerprint}
    facts |= fractions(data) | {"max_tokens": data.max_tokens}
    identity = json.dumps([FORMAT, facts, tokenizer_label(tokenizer), source.state], sort_keys=True)
    draft = Draft(folder, hashlib.sha256(identity.encode()).hexdigest(), source, new, log)
    if draft.tokens:
        log(f"  going on behind {draft.tokens:,} tokens")
    saved = time.monotonic()
    left = None if data.max_tokens is None else data.max_tokens - draft.tokens
    tasks = tasks_of(parts_of(source, draft.tokenizer.boundary, draft.place, left))
    try:
        encoding = contextlib.closing(encode_all(draft.tokenizer, tasks, workers))
        with Meter(log) as meter, encoding as encoded:
            size = None
            for task, results, place in encoded:
                size = size or source.size()
                draft.write(task, results, place, data.max_tokens)
                read = 2 * draft.tokens if source.ids_at else draft.bytes
                meter.update(read, draft.documents, done(read, size, draft.tokens, data.max_tokens))
                if data.max_tokens is not None and draft.tokens >= data.max_tokens:
                    break
                if time.monotonic() - saved > SAVE:
                    draft.save()
                    saved = time.monotonic()
        for split in ("train", "val"):
            if not draft.n_bytes[split]:
                raise DataError(too_little(split, draft, data, source))
        now = _source(data)
        if (now.fingerprint, now.state) != (source.fingerprint, source.state):
            raise DataError(f"{shown(source.description)}: changed while it was read; run the same command again")
        draft.finish(facts)
    except BaseException as error:
        if resumable(error):
            with contextlib.suppress(OSError):  # of a full disk
                draft.save()
        raise
    finally:
        with contextlib.suppress(OSError):
            draft.close()


def fractions(data: DataConfig) -> dict[str, float]:
    """The fractions that say what is held out, where this corpus reads them."""
    from data import package

    keys = ("val_fraction", "test_fraction") if data.val_split is None else ()
    return {key: getattr(data, key) for key in keys if key in package(data).KEYS}


def too_little(split: str, draft: Draft, data: DataConfig, source: Source) -> str:
    """What to say of a corpus whose `split` is empty."""
    if data.max_tokens is not None and draft.tokens >= data.max_tokens:
        mend = f"say more than data.max_tokens={data.max_tokens}"
    else:
        chosen = " and ".join(f"data.{key}={share:g}" for key, share in fractions(data).items())
        mend = "give a longer text or more documents" + (f", or others than {chosen}" if chosen else "")
    without = f" (left out: {left_out(draft.skipped)})" if draft.skipped else ""
    return f"{shown(source.description)}: too little text, the {split} split is empty{without}; {mend}"


def done(n_bytes: int, size: int | None, tokens: int, limit: int | None) -> float | None:
    """The share that is prepared of `size` bytes or `limit` tokens, whichever end comes first; None: of nobody knows
    how much."""
    shares = ([n_bytes / size] if size else []) + ([tokens / limit] if limit else [])
    return min(1.0, max(shares)) if shares else None


def other_shares(data: DataConfig, corpus: Corpus) -> str:
    """What to say where twice as much is held out as was asked for, or less than half of it; else nothing."""
    splits = corpus.meta["splits"]
    asked = {key.removesuffix("_fraction"): share for key, share in fractions(data).items()}
    total = sum(split["bytes"] for split in splits.values())
    shares = {name: splits[name]["bytes"] / total for name in asked}
    if all(share / 2 <= shares[name] <= 2 * share for name, share in asked.items()):
        return ""
    parts = [f"{name} has {shares[name]:.1%} of the text (data.{name}_fraction={asked[name]:g})" for name in asked]
    count = sum(split["documents"] for split in splits.values())
    why = f"whole documents are held out, and these {count:,} differ much in size or are few"
    if data.max_tokens is not None:
        why = f"data.max_tokens={data.max_tokens} ends the text, of which what is held out may come first"
    return f"{', '.join(parts)}: {why}"


def resumable(error: BaseException) -> bool:
    """Whether a preparation that ended with `error` can go on later: not where the text is at fault."""
    return not isinstance(error, DataError) or isinstance(error, WorkerDied)


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def prepare(
    data: DataConfig, tokenizer: TokenizerConfig, root: Path = Path("data"), log=print, workers: int | None = None
) -> Corpus:
    """The corpus that `data` and `tokenizer` name, from `root/<name>/<key>-<hash>`; made first if need be.

    The hash is that of the source's fingerprint: when the text changes, a new folder comes beside the old one, since
    runs were trained on that. Where the text is gone, the newest folder is used, with a notice. Processes that prepare
    the same wait for each other. `workers` processes tokenize, all cores if None; the ids do not depend on it. What is
    killed, or finds no room on the disk, goes on from there at the next call.
    Raises ConfigError for a key, DataError for a text that cannot be used.
    """
    place = _place(data, tokenizer, root)
    try:
        source = _source(data)
    except SourceGone as gone:
        return _newest(place, tokenizer, gone, log)
    _check_vocabulary(source, tokenizer)
    folder = place.with_name(f"{place.name}-{_hash(source.fingerprint)}")
    corpus, _ = _existing(folder, tokenizer, source)
    if corpus is not None:
        return corpus

    from filelock import FileLock, Timeout

    # One lock and one place to write, whatever the source: who prepares next clears up what a killed process left.
    beside = place.parent / ".preparing"
    try:
        beside.mkdir(parents=True, exist_ok=True)
        lock = FileLock(beside / f"{place.name}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            log(f"{folder}: another process is preparing it, waiting")
            lock.acquire()
        try:
            corpus, why = _existing(folder, tokenizer, source)
            if corpus is None:
                others = _prepared(place)
                if why:
                    log(f"{folder}: preparing again, because {why}")
                elif others:
                    log(
                        f"{folder}: preparing; {others[0].name} stays, which is of an older version or of files that "
                        "were changed or touched since"
                    )
                else:
                    log(f"{folder}: preparing")
                _build(folder, beside / place.name, data, tokenizer, source, workers or cores(), log)
                corpus = open_corpus(folder)
                if corpus.meta["skipped"]:
                    log(f"{folder}: left out {corpus.skipped}")
                if uneven := other_shares(data, corpus):
                    log(f"{folder}: {uneven}")
        finally:
            lock.release()
    except OSError as error:
        raise DataError(
            f"{folder}: cannot be prepared ({error.strerror or error}); make room or rights there, "
            "and give the same command again"
        ) from None
    return corpus


def since(data: DataConfig, corpus: Corpus) -> str | None:
    """In a line, that what `corpus` was prepared from has changed; None where it has not, or is not there any more."""
    try:
        now = _source(data).fingerprint
    except DataError:
        return None
    then = corpus.meta["fingerprint"]
    if corpus.meta["format"] != FORMAT or now == then:
        return None
    return (
        f"{corpus.folder}: going on with the tokens of before, although their files were changed or touched since "
        f"(hash of the source then {_hash(then)}, now {_hash(now)})"
    )


def check_source(data: DataConfig, tokenizer: TokenizerConfig, root: Path = Path("data")) -> None:
    """Raises what `prepare` would say about the keys and the place of the text, and writes nothing."""
    place = _place(data, tokenizer, root)
    try:
        _check_vocabulary(_source(data), tokenizer)
    except SourceGone:
        if not _prepared(place):
            raise


def _place(data: DataConfig, tokenizer: TokenizerConfig, root: Path) -> Path:
    """Where the corpus is prepared, but for the hash of its source."""
    from data import package

    data.check()
    names = {"val_fraction": "val", "test_fraction": "test", "max_tokens": "tokens"}
    default = {f.name: f.default for f in fields(DataConfig)}
    chosen = [f"{names[key]}{getattr(data, key)!r}" for key in names if getattr(data, key) != default[key]]
    key = "-".join(part for part in (package(data).label(data), tokenizer_label(tokenizer), *chosen) if part)
    return Path(root) / data.name / key


def _source(data: DataConfig) -> Source:
    from data import package

    try:
        return package(data).source(data)
    except OSError as error:
        raise DataError(f"data.path: {shown(error.filename)} cannot be read ({error.strerror})") from None


def _check_vocabulary(source: Source, tokenizer: TokenizerConfig) -> None:
    """Raises ConfigError where the documents are ids of another tokenizer's."""
    if source.vocabulary is not None and tokenizer.name != source.vocabulary[0]:
        raise ConfigError("tokenizer", tokenizer.name, *source.vocabulary)


def _hash(fingerprint: dict) -> str:
    return hashlib.sha256(json.dumps([FORMAT, fingerprint], sort_keys=True).encode()).hexdigest()[:8]


def _prepared(place: Path) -> list[Path]:
    """The folders of this corpus, whatever their source was, the newest first."""
    name = re.compile(re.escape(place.name) + "-[0-9a-f]{8}")
    found = [meta for meta in place.parent.glob("*/meta.json") if name.fullmatch(meta.parent.name)]
    return [meta.parent for meta in sorted(found, key=lambda meta: meta.stat().st_mtime_ns, reverse=True)]


def _newest(place: Path, tokenizer: TokenizerConfig, gone: SourceGone, log) -> Corpus:
    """What was prepared last and can be used, with a notice; raises `gone` where nothing can."""
    for folder in _prepared(place):
        corpus, _ = _existing(folder, tokenizer)
        if corpus is not None:
            log(f"{folder}: its source is gone, what was prepared from it is used ({gone})")
            return corpus
    raise gone


def _existing(folder: Path, tokenizer: TokenizerConfig, source: Source | None = None) -> tuple[Corpus | None, str]:
    """What is prepared in `folder` if it can be used, else why not ("" where there is nothing)."""
    if not folder.exists():
        return None, ""
    try:
        corpus = open_corpus(folder)
    except DataError as error:
        return None, str(error)
    if corpus.meta["format"] != FORMAT:
        return None, f"it has format {corpus.meta['format']}"
    if corpus.tokenizer.name != tokenizer.name:
        return None, f"it holds tokenizer={corpus.tokenizer.name}"
    if source is not None and corpus.meta["fingerprint"] != source.fingerprint:
        return None, f"it holds another source: {corpus.meta['source']}"
    return corpus, ""


def _build(
    folder: Path, new: Path, data: DataConfig, tokenizer: TokenizerConfig, source: Source, workers: int, log
) -> None:
    """Prepares in `new`, from where a killed process stopped there, then puts it in place of `folder`."""
    old = new.with_name(f"{new.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    new.mkdir(exist_ok=True)
    try:
        write_corpus(new, data, tokenizer, source, workers, log)
        if folder.exists():
            os.rename(folder, old)
        os.rename(new, folder)
    except BaseException as error:
        if not resumable(error) or not (new / "progress.json").exists():
            shutil.rmtree(new, ignore_errors=True)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)
