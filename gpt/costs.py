"""What a position scheme costs beside no position: counted on the meta device, and measured as speed of training."""

import functools
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from gpt import runtime
from gpt.attention import Kind, prepare
from gpt.cli import compose
from gpt.config import RunConfig, load
from gpt.model import GPT
from gpt.optim import build_optimizer
from gpt.position import SCHEMES, scheme
from gpt.position.base import Position
from gpt.runtime import Runtime
from gpt.schema import AskedBench, AskedCosts, ModelConfig, PositionConfig, parse

FUSED, MASKED, EXPLICIT = "fused", "fused with mask", "explicit"
WARM_UP = 3  # steps before any is timed


def asked(cls: type, words: Sequence[str]) -> tuple[object, dict[str, RunConfig]]:
    """A `cls` of those words that are its keys, and {scheme: configuration} that the others give. Raises UserError."""
    keys = [f.name for f in fields(cls)]
    own = [word for word in words if word.partition("=")[0] in keys]
    wanted = parse(cls, own)
    names = list(SCHEMES) if wanted.position is None else wanted.position.split(",")
    for name in names:
        scheme(name)
    rest = [word for word in words if word not in own]
    return wanted, {name: load(compose("train", [f"position={name}", *rest])) for name in names}


def show(console: Console | None, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], note: str) -> None:
    """Prints a table, numbers on the right."""
    table = Table()
    for i, column in enumerate(columns):
        number = all(row[i][-1].isdigit() or row[i] in ("–", "any") for row in rows)
        table.add_column(column, justify="right" if number else "left", no_wrap=i == 0)
    for row in rows:
        table.add_row(*row)
    console = console or Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    for part in (title, table, note):
        console.print(part, markup=False, highlight=False)


# ---- counted


@dataclass(frozen=True)
class Costs:
    """`flops`: matrix products a token, forward, in a batch of one sequence, beyond those without position.

    `mask_bytes`: of all masks, biases included, that are made once a forward. Both None beyond the longest length.
    """

    where: str
    kernel: str
    parameters: int
    flops: float | None
    mask_bytes: int | None
    longest: int | None  # tokens; None: any


def count(model: ModelConfig, position: PositionConfig, length: int) -> Costs:
    """Costs of a scheme in a model at `length` tokens. Nothing is allocated, so any size and length will do."""
    gpt = build(model, position)
    longest = gpt.position.max_len
    reached = longest is None or length <= longest
    total, masks = forward(gpt, length if reached else longest)
    ways = {
        EXPLICIT if kind.positioned and gpt.position.explicit() else FUSED if mask is None else MASKED
        for kind, mask in masks.items()
    }
    return Costs(
        where=where(gpt.position),
        kernel=", ".join(way for way in (FUSED, MASKED, EXPLICIT) if way in ways),
        parameters=gpt.count_parameters()["position"],
        flops=(total - bare_flops(model, length)) / length if reached else None,
        mask_bytes=sum(mask.nbytes for mask in masks.values() if mask is not None) if reached else None,
        longest=longest,
    )


def build(model: ModelConfig, position: PositionConfig) -> GPT:
    """On the meta device: shapes without values."""
    with torch.device("meta"):
        return GPT(model, position, vocab_size=1).eval()


@torch.no_grad()
def forward(gpt: GPT, length: int) -> tuple[int, dict[Kind, Tensor | None]]:
    """FLOPs of all layers for one sequence, and the masks: two FLOPs for each product and its sum, the head left out.

    Layers of a kind cost alike: one of each is counted. Fused kernels count like the products that they fuse, those of
    masked pairs included.
    """
    with FlopCounterMode(display=False) as counter:
        pos = gpt.position.positions(0, length, torch.device("meta"))
        shared = prepare(gpt.position, pos, pos, kinds=gpt.kinds)
        x = gpt.position.embed(gpt.wte(torch.zeros(1, length, dtype=torch.long, device="meta")), pos)
    flops = counter.get_total_flops()
    blocks = {block.attn.kind: block for block in gpt.h}
    for kind, number in Counter(block.attn.kind for block in gpt.h).items():
        with FlopCounterMode(display=False) as counter:
            blocks[kind](x, shared, None)
        flops += number * counter.get_total_flops()
    return flops, shared.masks


@functools.lru_cache
def bare_flops(model: ModelConfig, length: int) -> int:
    return forward(build(model, PositionConfig("nope")), length)[0]


def where(position: Position) -> str:
    """The hooks that the scheme's class overrides, in which layers, and what its configuration does besides."""
    cls, config = type(position), position.config

    def overrides(hook: str) -> bool:
        return getattr(cls, hook) is not getattr(Position, hook)

    acts = {
        "ids": overrides("positions") or config.randomized is not None,
        "embedding": overrides("embed"),
        "rotation": overrides("rotate"),
        "bias": cls.biased(),
        "scores": overrides("scores"),
        "values": overrides("values"),
    }
    text = ", ".join(place for place, there in acts.items() if there) or "nowhere"
    if config.layers != "P":
        text += f" in {config.layers}"
    if config.window is not None:
        text += f", window of {config.window} in {config.window_layers}"
    return text + (", log scale" if config.log_scale else "")


def show_costs(words: Sequence[str], console: Console | None = None) -> None:
    """Prints the table of scripts/schemes.py. Raises UserError."""
    wanted, configs = asked(AskedCosts, words)
    model = next(iter(configs.values())).model
    length = wanted.length or model.block_size
    rows = []
    for name, config in configs.items():
        row = count(model, config.position, length)
        counts = ("–" if n is None else f"{n:,.0f}" for n in (row.parameters, row.flops, row.mask_bytes))
        rows.append((name, row.where, row.kernel, *counts, "any" if row.longest is None else f"{row.longest:,}"))
    show(
        console,
        f"{model.n_layer} layers, {model.n_head} heads, width {model.n_embd}, T = {length:,}",
        ("scheme", "acts on", "kernel", "parameters", "FLOPs", "bytes of masks", "longest"),
        rows,
        f"FLOPs: matrix products of a forward, a token in a batch of one sequence, beyond the "
        f"{bare_flops(model, length) / length:,.0f} of nope. Masks: made once a forward, for all layers.",
    )


# ---- measured


@dataclass(frozen=True)
class Turns:
    """Speeds of two that were measured in turn, so that what slows a machine for a while slows both."""

    first: tuple[float, ...]
    second: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        """second / first, of each round."""
        return [b / a for a, b in zip(self.first, self.second, strict=True)]

    @property
    def medians(self) -> tuple[float, float, float]:
        """Of the first, of the second, and of the ratios."""
        return tuple(map(statistics.median, (self.first, self.second, self.ratios)))


def in_turns(
    first: Callable[[], float], second: Callable[[], float], rounds: int, told: Callable[..., None] = lambda *_: None
) -> Turns:
    """Calls both in each round; `told(round, of the first, of the second)` hears of it."""
    pairs = []
    for n in range(1, rounds + 1):
        pairs.append((first(), second()))
        told(n, *pairs[-1])
    return Turns(*map(tuple, zip(*pairs, strict=True)))


def trainer(config: RunConfig, rt: Runtime, vocab_size: int = 256) -> Callable[[int], float]:
    """A function that trains for so many steps on random tokens and returns tokens/s, by the median step."""
    batch, L = config.train.batch_size, config.model.block_size
    model = GPT(config.model, config.position, vocab_size, config.seed).to(rt.device).train()
    optimizer = build_optimizer(model, config.optim)
    forward = torch.compile(model) if config.runtime.compile else model
    tokens = torch.randint(vocab_size, (batch, L + 1), generator=torch.Generator().manual_seed(0)).to(rt.device)
    done = 0

    def step() -> float:
        nonlocal done
        began = time.perf_counter()
        model.position.redraw(f"{config.seed}/{done}")
        with rt.autocast():
            loss = forward(tokens[:, :-1], tokens[:, 1:])[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.grad_clip or float("inf"))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if rt.device.type == "cuda":  # which would go on working while the clock is read
            torch.cuda.synchronize(rt.device)
        done += 1
        return time.perf_counter() - began

    def speed(steps: int) -> float:
        return batch * L / statistics.median(step() for _ in range(steps))

    speed(WARM_UP)
    return speed


def bench(words: Sequence[str], console: Console | None = None) -> dict:
    """Prints the table and the line of JSON of scripts/bench_schemes.py: {scheme: figures}. Raises UserError."""
    wanted, configs = asked(AskedBench, words)
    others = [word for word in words if not word.lstrip("+~").startswith("position.")]  # keys of another scheme
    base = asked(AskedBench, [*others, "position=learned"])[1]["learned"]
    rt = runtime.start(base.runtime)
    learned, found, rows = trainer(base, rt), {}, []
    for name, config in configs.items():
        own = trainer(config, rt)
        turns = in_turns(lambda: learned(wanted.steps), lambda own=own: own(wanted.steps), wanted.rounds)
        (a, b, ratio), low, high = turns.medians, min(turns.ratios), max(turns.ratios)
        found[name] = {"tokens_per_second": b, "learned": a, "ratio": ratio, "lowest": low, "highest": high}
        rows.append((name, f"{b:,.0f}", f"{a:,.0f}", f"{ratio:.2f}", f"{low:.2f}", f"{high:.2f}"))
        print(f"{name}: {ratio:.2f} of learned", file=sys.stderr, flush=True)
    show(
        console,
        f"Training, {base.train.batch_size} x {base.model.block_size} tokens a step, {wanted.rounds} rounds of "
        f"{wanted.steps} steps in turn; {rt.device_name}, {rt.precision}, {torch.get_num_threads()} threads",
        ("scheme", "tokens/s", "learned", "ratio", "lowest", "highest"),
        rows,
        "tokens/s: medians. Ratio to learned: median of the rounds. learned beside itself shows the noise.",
    )
    print(json.dumps(found))
    return found
