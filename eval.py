"""Loss of trained runs at 1x, 2x, 4x ... of their training length, on the same targets at each.

python eval.py runs=runs/pos factors=[1,2,4]
python eval.py checkpoint=runs/pos/rope-s0 factors=[1,2,8]
"""

import sys
import time

from gpt.terminal import guard


def main(values: dict, overrides: list[str]) -> int:
    from rich.console import Console

    from gpt import runtime
    from gpt.checkpoint import candidates, resolve
    from gpt.config import load_evaluation
    from gpt.errors import UserError
    from gpt.measure import measure, run_folders
    from gpt.mirror import mirror_evaluation
    from gpt.progress import Progress
    from gpt.run import read_status
    from gpt.tables import evaluation_table

    config = load_evaluation(values)
    rt = runtime.start(config.runtime)
    folders = run_folders(config)
    rows, failures, skipped = {}, [], 0  # rows: {folder: those that were asked for}
    unread = []  # of each run what its scheme does not have
    with Progress("evaluating", 0, len(folders)) as progress:
        for done, folder in enumerate(folders, start=1):
            began = time.perf_counter()
            if config.asked.runs and not candidates(folder / "checkpoints"):
                state = read_status(folder).get("status", "not started")
                progress.say(f"{folder}: skipped, it holds no checkpoint yet (status: {state})")
                skipped += 1
                continue
            try:
                found = measure(resolve(folder, log=progress.say), config, rt, log=progress.say)
                rows[folder] = found.rows
                unread.append(found.unread)
                seconds = time.perf_counter() - began
                progress.say(f"{folder}: {len(found.new)} of {len(found.rows)} rows measured now, {seconds:.1f} s")
                if found.new:
                    mirror_evaluation(found.folder, found.rows, log=progress.say)
            except (UserError, OSError) as error:  # the other runs are measured all the same
                words = " ".join(str(error).split())
                failures.append(words if words.startswith(f"{folder}: ") else f"{folder}: {words}")
            progress.update(done)
    if skipped == len(folders):
        failures.append(f"{config.asked.runs}: no run in it holds a checkpoint; run python train.py again to go on")
    for key in unread[0] if unread else ():
        if all(key in of_run for of_run in unread):
            failures.append(f"{key}: got {unread[0][key]!r}, which no scheme here reads: losses are those without it")
    if rows:
        Console(width=None if sys.stdout.isatty() else 160).print(evaluation_table(rows), crop=False)
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    return 2 if failures else 0


def start() -> None:
    from gpt import cli

    cli.run("eval", main)


if __name__ == "__main__":
    guard(start)
