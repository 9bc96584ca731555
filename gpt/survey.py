"""What a prepared corpus is like: lengths of its documents, how many are long enough to evaluate on, samples."""

import numpy as np

from gpt.corpus import SPLITS, Corpus

FACTORS = (1, 2, 4, 8, 16, 32, 64)
WIDTH = 40  # characters of the longest bar
SHOWN = 240  # characters of a sample


def lengths(corpus: Corpus, split: str) -> np.ndarray:
    """(documents,) int64: tokens of each document of a split, its separator included."""
    starts = np.asarray(getattr(corpus, f"{split}_documents")).astype(np.int64)
    return np.diff(np.append(starts, len(getattr(corpus, split))))


def histogram(counts: np.ndarray) -> list[tuple[int, int, int]]:
    """(from, below, how many) for each power of two that `counts`, whole numbers from 1 on, reach over."""
    powers = np.frexp(counts.astype(np.float64))[1] - 1  # of 2^p .. 2^(p+1) - 1: p, exactly
    found = np.bincount(powers)
    first = int(np.flatnonzero(found)[0]) if len(found) else 0
    return [(2**p, 2 ** (p + 1), int(found[p])) for p in range(first, len(found))]


def long_enough(counts: np.ndarray, block_size: int, factor: int) -> tuple[int, float, float]:
    """How many documents hold a window of factor times block_size targets, their share of all, and the share of all
    tokens that are targets in such windows."""
    length = factor * block_size
    chosen = counts[counts > length]  # the first token is nobody's target
    if not len(chosen):
        return 0, 0.0, 0.0
    return len(chosen), len(chosen) / len(counts), float(((chosen - 1) // length * length).sum() / counts.sum())


def survey(corpus: Corpus, block_size: int, samples: int = 3, splits: tuple[str, ...] = SPLITS) -> str:
    """All of it in lines for a person. The samples are spread evenly over the validation split."""
    lines = [corpus.summary()]
    for split in splits:
        counts = lengths(corpus, split)
        if not len(counts):
            continue
        middle = f"median {int(np.median(counts)):,}, longest {counts.max():,}"
        lines += ["", f"  {split}: tokens a document ({middle})"]
        rows = histogram(counts)
        largest = max(n for *_, n in rows)
        for start, stop, n in rows:
            bar = "#" * -(-WIDTH * n // largest)
            lines.append(f"    {start:>11,} to {stop - 1:>11,} {n:>11,}  {bar}".rstrip())
        lines += ["", f"  {split}: long enough for windows inside one document, of factor x {block_size} tokens"]
        lines.append(f"    {'factor':>6}{'tokens':>12}{'documents':>12}{'of all':>9}{'tokens in windows':>19}")
        for factor in FACTORS:
            n, documents, tokens = long_enough(counts, block_size, factor)
            lines.append(f"    {factor:>6}{factor * block_size:>12,}{n:>12,}{documents:>9.1%}{tokens:>19.1%}")
    starts = np.append(np.asarray(corpus.val_documents), len(corpus.val)).astype(np.int64)
    for n in np.unique(np.linspace(0, len(starts) - 2, samples).astype(int)):
        start, stop = starts[n : n + 2].tolist()
        text = corpus.tokenizer.decode(corpus.val[start : min(stop, start + SHOWN)])[:SHOWN]
        lines += ["", f"  val, document {n:,}:", *(f"    | {line}" for line in text.splitlines())]
    return "\n".join(lines)
