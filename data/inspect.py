"""What a prepared corpus holds: counts, lengths of documents, how many are long enough for each factor, samples.

python data/inspect.py data=stdlib
python data/inspect.py data=text data.path=<file or folder> tokenizer=gpt2 model.block_size=256

The keys are those of train.py; what is not prepared yet is prepared first. The test split is counted, never shown.
"""

import os
import sys

sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # not data/: `import data` is the package


def main() -> None:
    from gpt.cli import compose
    from gpt.prepare import prepare
    from gpt.schema import DataConfig, ModelConfig, TokenizerConfig, build
    from gpt.survey import survey

    config = compose("train", sys.argv[1:])
    model = build(ModelConfig, config["model"], "model")
    corpus = prepare(
        build(DataConfig, config["data"], "data"), build(TokenizerConfig, config["tokenizer"], "tokenizer")
    )
    print(survey(corpus, model.block_size))


def start() -> None:
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__.strip())
        return
    from gpt.cli import report_errors

    report_errors(main, "train")


if __name__ == "__main__":
    from gpt.terminal import guard

    guard(start)
