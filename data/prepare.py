"""Prepares a corpus, and says what it holds:

python data/prepare.py data=stdlib
python data/prepare.py data=shakespeare_char data.path=<file>
python data/prepare.py data=text data.path=<file or folder> tokenizer=gpt2

train.py does the same where it is needed, to the same place: data/ below the working directory. The keys are
those of train.py. It takes all cores; stopped, the same command goes on from where it was.
"""

import os
import sys

sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # not data/: `import data` is the package


def main() -> None:
    import time

    from gpt.cli import compose
    from gpt.prepare import prepare
    from gpt.schema import DataConfig, TokenizerConfig, build

    began = time.perf_counter()
    config = compose("train", sys.argv[1:])
    corpus = prepare(
        build(DataConfig, config["data"], "data"), build(TokenizerConfig, config["tokenizer"], "tokenizer")
    )
    print(corpus.summary())
    print(f"  checked    all files, {time.perf_counter() - began:.1f} s in all")


def start() -> None:
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__.strip())
        return
    from gpt.cli import report_errors

    report_errors(main, "train")


if __name__ == "__main__":
    from gpt.terminal import guard

    guard(start)
