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


def long_enough(counts: np.ndarray, block_size: int, factor: int) -> tuple[float, float]:
    """Share of the documents that hold a window of factor times block_size targets, and of all tokens those in them."""
    chosen = counts > factor * block_size  # the first token is nobody's target
    return (float(chosen.mean()), float(counts[chosen].sum() / counts.sum())) if len(counts) else (0.0, 0.0)


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
        lines.append(f"    {'factor':>6}{'tokens':>12}{'documents':>12}{'of all text':>13}")
        for factor in FACTORS:
            documents, tokens = long_enough(counts, block_size, factor)
            lines.append(f"    {factor:>6}{factor * block_size:>12,}{documents:>12.1%}{tokens:>13.1%}")
    starts = np.asarray(corpus.val_documents).astype(np.int64)
    for n in np.unique(np.linspace(0, len(starts) - 1, samples).astype(int)):
        text = corpus.tokenizer.decode(corpus.val[int(starts[n]) : int(starts[n]) + SHOWN])[:SHOWN]
        lines += ["", f"  val, document {n:,}:", *(f"    | {line}" for line in text.splitlines())]
    return "\n".join(lines)
