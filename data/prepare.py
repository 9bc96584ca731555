"""Prepares a corpus, and says what it holds:

python data/prepare.py data=stdlib
python data/prepare.py data=shakespeare_char data.path=<file>
python data/prepare.py data=text data.path=<file or folder> tokenizer=gpt2

train.py does the same where it is needed, to the same place: data/ below the working directory. The keys are
those of train.py.
"""

import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # instead of data/, so that `import data` is the package

from gpt.cli import compose, report_errors  # noqa: E402
from gpt.prepare import prepare  # noqa: E402
from gpt.schema import DataConfig, TokenizerConfig, build  # noqa: E402


def main() -> None:
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__.strip())
        return
    began = time.perf_counter()
    config = compose("train", sys.argv[1:])
    data, tokenizer = (
        build(DataConfig, config["data"], "data"),
        build(TokenizerConfig, config["tokenizer"], "tokenizer"),
    )
    corpus = prepare(data, tokenizer)
    print(corpus.summary())
    print(f"  checked    all files, {time.perf_counter() - began:.1f} s in all")


if __name__ == "__main__":
    report_errors(main, "train")
