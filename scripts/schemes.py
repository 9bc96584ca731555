"""What every position scheme is and costs, as its YAML says: counted, nothing is trained.

python scripts/schemes.py
python scripts/schemes.py model=gpt2 length=4096 position=rope,alibi

model=gpt2   and any other key of train.py
length       tokens of a sequence; the training length where not given
position     schemes with commas between; all where not given
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpt.cli import report_errors  # noqa: E402


def main(words: list[str]) -> None:
    if {"-h", "--help"} & set(words):
        print(__doc__.strip())
        return
    from gpt.costs import show_costs

    show_costs(["model=gpt2", *words])


if __name__ == "__main__":
    report_errors(lambda: main(sys.argv[1:]), "train")
