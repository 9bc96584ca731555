"""Compares the runs of a folder: prints tables, writes report.md, results.csv and two pictures into it.

python eval.py runs=runs/pos           first: what is not measured has no row
python scripts/compare.py runs/pos     of several folders, the first gets the files
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpt.terminal import guard  # noqa: E402


def main(arguments: list[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        print(__doc__.strip())
        return 0
    from gpt.errors import UserError
    from gpt.report import write_report
    from gpt.tables import print_tables

    if not all(arguments or [""]) or any(argument.startswith("-") for argument in arguments):
        print(
            "usage: python scripts/compare.py <folder of runs> ...; first: python eval.py runs=<folder of runs>",
            file=sys.stderr,
        )
        return 2
    try:
        report = write_report([Path(argument) for argument in arguments])
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print_tables(report.results)
    print("wrote " + " ".join(str(path) for path in report.files))
    return 0


if __name__ == "__main__":
    guard(lambda: sys.exit(main(sys.argv[1:])))
