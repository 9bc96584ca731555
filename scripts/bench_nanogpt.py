"""Training speed beside nanoGPT's, at nanoGPT's CPU recipe: both train.py in turn, on this machine.

python scripts/bench_nanogpt.py <nanoGPT checkout, with data/shakespeare_char prepared> [rounds=5] [position=learned]

Prints the median tokens/s of each and the median of the ratios of neighbouring runs.
"""

import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from gpt.costs import in_turns  # noqa: E402

STEPS = 300
TOKENS = 12 * 64  # a step
RECIPE = (
    "config/train_shakespeare_char.py --device=cpu --compile=False --dtype=float32 --eval_iters=1 --log_interval=10 "
    f"--block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --dropout=0.0 --max_iters={STEPS} "
    "--lr_decay_iters=2000 --eval_interval=100000"
)


def nanogpt(folder: Path) -> float:
    """Median tokens/s of the logged steps, the first 50 left out."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "train.py", *RECIPE.split(), f"--out_dir={out}"]
        text = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout
    lines = re.findall(r"^iter (\d+): loss .*, time ([\d.]+)ms", text, re.MULTILINE)
    return statistics.median(TOKENS / (float(time) / 1e3) for step, time in lines if int(step) > 50)


def ours(folder: Path, position: str) -> float:
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, str(ROOT / "train.py"), "experiment=nanogpt_cpu", f"position={position}"]
        options = f"train.steps={STEPS} train.eval_every={STEPS} train.eval_tokens=768 optim.lr=1e-3 name=bench".split()
        text = folder / "data" / "shakespeare_char" / "input.txt"
        subprocess.run([*command, *options, f"data.path={text}"], cwd=out, check=True, capture_output=True, text=True)
        lines = (Path(out) / "runs" / "nanogpt_cpu" / "bench" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return statistics.median(row["tokens_per_second"] for row in rows if row["step"] > 50)


def main(arguments: list[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        print(__doc__.strip())
        return 0
    options = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    folders = [Path(argument) for argument in arguments if "=" not in argument]
    if len(folders) != 1 or options.keys() - {"rounds", "position"}:
        print(__doc__.strip())
        return 2
    if not (folders[0] / "data" / "shakespeare_char" / "train.bin").is_file():
        print(
            f"error: {folders[0]}: no data/shakespeare_char/train.bin; run its data/shakespeare_char/prepare.py first"
        )
        return 2
    position = options.get("position", "learned")
    turns = in_turns(
        lambda: nanogpt(folders[0]),
        lambda: ours(folders[0], position),
        int(options.get("rounds", 5)),
        lambda n, a, b: print(f"round {n}: nanoGPT {a:,.0f} tokens/s, {position} here {b:,.0f}", flush=True),
    )
    theirs, own, ratio = turns.medians
    print(f"median: nanoGPT {theirs:,.0f} tokens/s, {position} here {own:,.0f}; ratio {ratio:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
