"""How fast a corpus is prepared and read, and in how much memory: the figures of docs/performance.md.

python scripts/bench_data.py
python scripts/bench_data.py books=<folder of texts> gigabytes=1

Texts are made up where no `books` are given. CPU time, of all processes, is what to compare on a busy machine.
"""

import os
import resource
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def used() -> tuple[float, float]:
    """Seconds of wall clock and of all this process's and its ended children's CPUs."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return time.perf_counter(), sum(u.ru_utime + u.ru_stime for u in map(resource.getrusage, kinds))


def peak() -> float:
    """MiB that this process, or the largest of its children, had at most."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return max(resource.getrusage(kind).ru_maxrss for kind in kinds) / unit


def prepared(path: Path, tokenizer: str, root: Path):
    from gpt.prepare import prepare
    from gpt.schema import DataConfig, TokenizerConfig

    (wall, cpu), size = used(), sum(p.stat().st_size for p in path.rglob("*")) if path.is_dir() else path.stat().st_size
    config = TokenizerConfig(tokenizer, vocab_size=4096 if tokenizer == "bpe" else None)
    own = time.thread_time()
    corpus = prepare(DataConfig("text", path=str(path)), config, root, lambda line: None)
    own = time.thread_time() - own
    wall, cpu = (after - before for after, before in zip(used(), (wall, cpu), strict=True))
    print(
        f"{path.name}, {size / 1e6:,.1f} MB, tokenizer={tokenizer}: {wall:.1f} s ({size / 1e6 / wall:,.1f} MB/s), "
        f"CPU {cpu:.2f} s, {own:.2f} s of it on the thread that reads, peak so far {peak():,.0f} MiB",
        flush=True,
    )
    return corpus


def waiting(corpus, rounds: int = 5, steps: int = 60) -> None:
    """Share of a step of the tiny model in which the trainer waits for its batch; median of rounds, in turn."""
    import torch

    from gpt.cli import compose
    from gpt.config import load
    from gpt.data import Ahead, Windows
    from gpt.model import GPT

    config = load(compose("train", ["position=rope"]))
    L, B = config.model.block_size, config.train.batch_size
    model = GPT(config.model, config.position, corpus.tokenizer.vocab_size, 0)
    optimizer = torch.optim.AdamW(model.parameters())
    shares = {packing: [] for packing in ("random", "sequential", "documents")}
    for packing in [*shares] * (1 + rounds):  # the first round warms up
        windows = Windows(packing, corpus.train, corpus.train_documents, L, 0, B)
        waited, began = 0.0, time.perf_counter()
        with Ahead(lambda step, windows=windows: windows.batch(step, range(B)), 0, steps) as batches:
            for _ in range(steps):
                asked = time.perf_counter()
                x, y = next(batches)
                waited += time.perf_counter() - asked
                model(x, y)[1].backward()
                optimizer.step()
                optimizer.zero_grad()
        step = (time.perf_counter() - began) / steps
        shares[packing].append((waited / steps / step, step))
    for packing, found in shares.items():
        (share, step), words = sorted(found[1:])[rounds // 2], " ".join(f"{s:.2%}" for s, _ in found[1:])
        print(f"packing={packing}: {share:.2%} of {step * 1e3:.1f} ms a step is waiting for data ({words})")


def main() -> None:
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__.strip())
        return
    given = dict(word.split("=", 1) for word in sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        words = "".join(
            f"Here is line {n} of a made-up text: it has words, é and 漢, and it ends.\n" for n in range(15000)
        )
        books = Path(given.get("books", root / "made_up"))
        if "books" not in given:
            books.mkdir()
            for n in range(10):
                (books / f"{n}.txt").write_text(words, encoding="utf-8")
        for tokenizer in ("gpt2", "bpe", "byte"):
            corpus = prepared(books, tokenizer, root / "data")
        large = root / "large.txt"
        with open(large, "w", encoding="utf-8") as file:
            for _ in range(int(float(given.get("gigabytes", 1)) * 1e9 / len(words.encode()))):
                file.write(words)
        prepared(large, "byte", root / "data")
        waiting(corpus)


if __name__ == "__main__":
    main()
