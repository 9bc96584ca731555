"""Training speed of position schemes beside learned positions: both in turn, on random tokens, on this machine.

python scripts/bench_schemes.py
python scripts/bench_schemes.py position=rope,alibi model.block_size=256 rounds=5

position                   schemes with commas between; all where not given
rounds=5 steps=10          steps of each of the two in a round
model.block_size=256 train.batch_size=16   and any other key of train.py

Prints medians of tokens/s (forward, backward and optimizer step), the median of the ratios of neighbours, and all of it
as one line of JSON.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpt.cli import report_errors  # noqa: E402


def main(words: list[str]) -> None:
    if {"-h", "--help"} & set(words):
        print(__doc__.strip())
        return
    from gpt.costs import bench

    bench(["model.block_size=256", "train.batch_size=16", *words])


if __name__ == "__main__":
    report_errors(lambda: main(sys.argv[1:]), "train")
