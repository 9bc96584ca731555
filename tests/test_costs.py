"""What schemes cost: the counted table against formulas by hand, and the clockwork of the measured one."""

import dataclasses
import io
import json
import runpy
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode

from gpt import attention, costs
from gpt.attention import prepare
from gpt.cli import compose
from gpt.config import load
from gpt.costs import EXPLICIT, FUSED, MASKED, Turns, bench, count, in_turns, show_costs, trainer
from gpt.errors import ConfigError
from gpt.position import SCHEMES
from gpt.runtime import Runtime
from gpt.schema import ModelConfig, PositionConfig, build
from tests.helpers import as_written, ids, make

SCRIPTS = Path(__file__).parents[1] / "scripts"
CPU = Runtime(torch.device("cpu"), torch.float32)
GPT2 = ModelConfig(n_layer=12, n_head=12, n_embd=768, block_size=1024)
ODD = ModelConfig(n_layer=5, n_head=3, n_embd=24, block_size=48, bias=True)  # no two sizes alike
TINY = [
    *("model.n_layer=1", "model.n_head=2", "model.n_embd=16", "model.block_size=8", "train.batch_size=2"),
    *("train.eval_tokens=8", "runtime.device=cpu"),
]


def table(m: ModelConfig, T: int) -> dict:
    """{scheme: (acts on, kernel, parameters, FLOPs a token, bytes of masks, longest)}, derived by hand.

    A product of (a, b) and (b, c) is 2 a b c FLOPs. All is a token's share of a forward of one sequence of T tokens.
    """
    N, H, D, d, L = m.n_layer, m.n_head, m.n_embd, m.head_width, m.block_size
    bias, causal = 4 * H * T * T, 4 * T * T  # float32: for each head, or one for all
    split = "rotation in PPPN, window of 32 in WWWF"
    norm = D + D * m.bias
    return {
        "nope": ("nowhere", FUSED, 0, 0, 0, None),
        "learned": ("embedding", FUSED, L * D, 0, 0, L),
        "sinusoidal": ("embedding", FUSED, 1, 0, 0, None),
        "raw_index": ("embedding", FUSED, D, 0, 0, None),
        "normalized_index": ("embedding", FUSED, D, 0, 0, None),
        "binary": ("embedding", FUSED, 16 * D, 2 * 16 * D, 0, 2**16),
        # (D, D) for the token, (D, D) for its place
        "concat": ("embedding", FUSED, L * D + 2 * D * D, 2 * D * D + 2 * D * D, 0, L),
        "concat_sinusoidal": ("embedding", FUSED, 2 * D * D, 2 * D * D + 2 * D * D, 0, None),
        "rope": ("rotation", FUSED, 0, 0, 0, None),
        "partial_rope": ("rotation", FUSED, 0, 0, 0, None),
        "p_rope": ("rotation", FUSED, 0, 0, 0, None),
        "trainable_rope": ("rotation", FUSED, d // 2, 0, 0, None),
        "xpos": ("rotation", FUSED, 0, 0, 0, None),
        "decoupled_rope": ("rotation", FUSED, 0, 0, 0, None),
        # queries and keys are d wider: (1, d) and (d, T) more in each head of each layer
        "pope": ("rotation", FUSED, N * H * d, N * H * 2 * d * T, 0, None),
        "rope_nope": ("rotation in PPPN", FUSED, 0, 0, 0, None),
        "rope_nope_alternating": ("rotation in PN", FUSED, 0, 0, 0, None),
        "rope_window_nope": (split, f"{FUSED}, {MASKED}", 0, 0, causal, None),
        "swan": (f"{split}, log scale", f"{FUSED}, {MASKED}", 0, 0, causal, None),
        "randomized_rope": ("ids, rotation", FUSED, 0, 0, 0, 8 * L),
        "alibi": ("bias", MASKED, 0, 0, bias, None),
        "kerple": ("bias", MASKED, 2 * H, 0, bias, None),
        "kerple_power": ("bias", MASKED, 2 * H, 0, bias, None),
        # codes of width 128: (T, 128) and (128, T)
        "sandwich": ("bias", MASKED, 0, 2 * 128 * T, bias, None),
        # 1-32-H with biases, c and the threshold's multiplier; into the hidden layer and on to the heads for each pair
        "fire": ("bias", MASKED, (32 + 32) + (32 * H + H) + 2, 2 * 32 * (1 + H) * T, bias, None),
        "t5": ("bias", MASKED, 32 * H, 0, bias, None),
        # table, norm, two projections, 32 buckets; positions are projected twice and multiplied, once for all layers
        "tupe": ("bias", MASKED, L * D + norm + 2 * D * D + 32 * H, 2 * 2 * D * D + H * 2 * d * T, bias, L),
        # k = 16, so 17 rows for keys and 17 for values, shared by heads; each head's query and weights meet all rows
        "shaw": ("scores, values", EXPLICIT, N * 2 * 17 * d, N * H * 2 * (2 * d * 17), causal, None),
        # W of each layer, u and v; T codes through W, (q + v) with T codes, and u with the key
        "transformer_xl": (
            *("scores", EXPLICIT, N * D * D + 2 * D),
            *(N * (2 * D * D + H * 2 * d * T + H * 2 * d), causal, None),
        ),
        # 64 rows of each layer, shared by heads: each head's query meets all
        "cope": ("scores", EXPLICIT, N * 64 * d, N * H * 2 * d * 64, causal, None),
    }


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("model, length", [(GPT2, 1024), (GPT2, 512), (ODD, 40)], ids=["gpt2", "half", "odd"])
def test_the_table_is_exact(name, model, length):
    expected = table(model, length)
    if name not in expected:
        pytest.fail(
            f"{name}: add it to `table` in tests/test_costs.py: where it acts, its kernel, and by formulas its "
            "parameters, FLOPs a token, bytes of masks and longest length"
        )
    found = count(model, build(SCHEMES[name].Config, as_written(name), "position"), length)
    assert dataclasses.astuple(found) == expected[name]


@pytest.mark.parametrize(
    "name, parameters",
    [
        *(("learned", 786_432), ("t5", 384), ("kerple", 24), ("fire", 462), ("pope", 12 * 768)),
        *(("cope", 12 * 4_096), ("shaw", 12 * 2_176), ("transformer_xl", 12 * 589_824 + 1_536)),
        *(("concat", 786_432 + 1_179_648), ("tupe", 786_432 + 1_179_648 + 768 + 384)),
    ],
)
def test_parameters_at_gpt2(name, parameters):
    """As published or counted by hand; shaw's 4,224 a layer without the 16 + 16 rows of the future."""
    assert table(GPT2, 1024)[name][2] == parameters


def test_the_layers_without_position_cost_what_they_should():
    """24 D^2 for the projections and the MLP, 4 T D for scores and values; in each layer, without the head."""
    assert costs.bare_flops(GPT2, 1024) == 1024 * 12 * (24 * 768**2 + 4 * 1024 * 768)


@pytest.mark.parametrize("name", SCHEMES)
def test_counts_are_those_of_a_real_forward(name, monkeypatch, fresh):
    """On the CPU, all layers: the same products, masks as large, and the kernels that the table names."""
    model, taken = make(name, ODD, vocab=1), set()
    sdpa, slow = attention.F.scaled_dot_product_attention, attention.attend_explicit

    def fused(*args, **options):
        taken.add(FUSED if options.get("attn_mask") is None else MASKED)
        return sdpa(*args, **options)

    def explicit(*args, **options):
        taken.add(EXPLICIT)
        return slow(*args, **options)

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", fused)
    monkeypatch.setattr(attention, "attend_explicit", explicit)
    row = count(ODD, model.position.config, 40)
    taken.clear()
    with torch.no_grad():
        model(ids((1, 40), fresh, 1))
    assert row.kernel == ", ".join(way for way in (FUSED, MASKED, EXPLICIT) if way in taken)

    pos = model.position.positions(0, 40, torch.device("cpu"))
    with torch.no_grad():
        masks = prepare(model.position, pos, pos, kinds=model.kinds).masks.values()
    assert row.mask_bytes == sum(mask.numel() * 4 for mask in masks if mask is not None)

    model.kernel = "reference"  # whose products the counter knows on the CPU too
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.hidden(ids((1, 40), fresh, 1))
    assert counter.get_total_flops() == row.flops * 40 + costs.bare_flops(ODD, 40)


def test_nothing_is_allocated():
    """A bias of 12 x 2^20 x 2^20 would take 48 TiB."""
    config = build(SCHEMES["alibi"].Config, as_written("alibi"), "position")
    assert count(GPT2, config, 2**20).mask_bytes == 12 * 2**42


def test_where_options_act():
    model = ModelConfig()
    found = {
        "bias in PN": PositionConfig("alibi", layers="PN"),
        "nowhere, window of 8 in W": PositionConfig("nope", window=8),
        "ids, bias, log scale": PositionConfig("alibi", randomized=2, log_scale=True),
    }
    for text, config in found.items():
        config = build(SCHEMES[config.name].Config, dataclasses.asdict(config), "position")
        assert count(model, config, 64).where == text


def test_beyond_the_longest_length_there_is_nothing_to_count():
    row = count(GPT2, build(SCHEMES["learned"].Config, as_written("learned"), "position"), 1025)
    assert (row.flops, row.mask_bytes, row.longest, row.kernel, row.parameters) == (None, None, 1024, FUSED, 786_432)


def shown(show, words) -> str:
    out = io.StringIO()
    show(words, Console(file=out, width=200))
    return out.getvalue()


def test_the_table_that_is_printed():
    text = shown(show_costs, ["model=tiny", "position=learned,shaw", "length=128"])
    assert "4 layers, 4 heads, width 128, T = 128" in text
    rows = {
        line.split("│")[1].strip(): [c.strip() for c in line.split("│")[2:-1]]
        for line in text.splitlines()
        if "│" in line
    }
    assert rows["learned"] == ["embedding", FUSED, "8,192", "–", "–", "64"]
    assert rows["shaw"] == ["scores, values", EXPLICIT, "4,352", "34,816", "65,536", "any"]


@pytest.mark.parametrize(
    "words, message",
    [
        (["position=ropes"], "position.name: got 'ropes', allowed: nope | "),
        (["position=rope,"], "position.name: got '', allowed"),
        (["length=0"], "length: got 0, allowed: a whole number >= 1"),
        (["position=rope", "model.n_embd=130"], "model.n_embd: got 130, allowed: a multiple of model.n_head=4"),
    ],
)
def test_words_that_are_wrong(words, message):
    with pytest.raises(ConfigError) as error:
        show_costs(words)
    assert str(error.value).startswith(message)


def test_in_turns_means_in_turns():
    speeds, called, told = iter([1.0, 2.0, 4.0, 4.0, 2.0, 6.0]), [], []

    def run(which):
        return lambda: called.append(which) or next(speeds)

    turns = in_turns(run("a"), run("b"), 3, lambda *heard: told.append(heard))
    assert called == list("ababab") and told == [(1, 1.0, 2.0), (2, 4.0, 4.0), (3, 2.0, 6.0)]
    assert turns == Turns((1.0, 4.0, 2.0), (2.0, 4.0, 6.0))
    assert turns.ratios == [2.0, 1.0, 3.0] and turns.medians == (2.0, 4.0, 2.0)


def test_a_timed_step_trains(monkeypatch):
    """Every parameter moves, ids are drawn anew, and the speed is tokens over the median step."""
    built, real = [], costs.GPT
    monkeypatch.setattr(costs, "GPT", lambda *args: built.append(real(*args)) or built[-1])
    config = load(compose("train", [*TINY, "position=randomized_rope"]))
    speed = trainer(config, CPU)
    (model,) = built
    before = {key: value.clone() for key, value in model.state_dict().items()}
    drawn = model.position.drawn.clone()
    times = iter([0.0, 1.0, 1.0, 1.5, 1.5, 9.0])
    monkeypatch.setattr(costs.time, "perf_counter", lambda: next(times))
    assert speed(3) == 2 * 8 / 1.0  # steps of 1, 0.5 and 7.5 seconds
    assert all(not torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not torch.equal(model.position.drawn, drawn)


def test_bench(capsys):
    """learned is there to compare with, asked for or not, without the keys of the other scheme."""
    text = shown(bench, [*TINY, "position=shaw", "position.k=3", "rounds=2", "steps=1"])
    found = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert list(found) == ["shaw"] and "2 x 8 tokens a step, 2 rounds of 1 steps in turn; cpu, float32" in text
    row = found["shaw"]
    assert 0 < row["lowest"] <= row["ratio"] <= row["highest"] and row["learned"] > 0 and row["tokens_per_second"] > 0
    assert f"{row['tokens_per_second']:,.0f}" in text and f"{row['ratio']:.2f}" in text


def test_bench_nanogpt_takes_turns_too(tmp_path, capsys):
    path = tmp_path / "data" / "shakespeare_char" / "train.bin"
    path.parent.mkdir(parents=True)
    path.touch()
    main = runpy.run_path(str(SCRIPTS / "bench_nanogpt.py"))["main"]
    main.__globals__.update(nanogpt=lambda folder: 100.0, ours=lambda folder, position: 150.0)
    assert main([str(tmp_path), "rounds=2", "position=rope"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [f"round {n}: nanoGPT 100 tokens/s, rope here 150" for n in (1, 2)]
    assert lines[2] == "median: nanoGPT 100 tokens/s, rope here 150; ratio 1.50"


def test_the_scripts_begin_with_their_sizes(monkeypatch):
    """What is given comes later, and so it counts."""
    heard = []
    monkeypatch.setattr(costs, "show_costs", heard.append)
    monkeypatch.setattr(costs, "bench", heard.append)
    runpy.run_path(str(SCRIPTS / "schemes.py"))["main"](["model=tiny"])
    runpy.run_path(str(SCRIPTS / "bench_schemes.py"))["main"](["model.block_size=8", "train.batch_size=2"])
    assert heard[0] == ["model=gpt2", "model=tiny"]
    config = load(compose("train", heard[1]))
    assert config.model.block_size == 8 and config.train.batch_size == 2
    assert load(compose("train", heard[0])).model.n_embd == 128
