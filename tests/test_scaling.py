"""RoPE's rescalings against transformers, x-transformers, the papers' formulas in float64, and exact values."""

import math
from dataclasses import replace
from typing import get_args, get_type_hints

import pytest
import torch

from gpt.errors import ConfigError
from gpt.position.rope import frequencies
from gpt.position.scaling import PARAMETERS, ScalingConfig, describe, index_bounds, rescale
from gpt.schema import build

KINDS = tuple(PARAMETERS)
BASE, TRAINED = 10000.0, 256


def scaled(kind="ntk", base=BASE, width=64, trained=TRAINED, length=None, turns=None, **parameters):
    scaling = ScalingConfig(kind=kind, **parameters)
    turns = frequencies(width, base) if turns is None else turns
    return rescale(turns, scaling, base, width, trained, 4 * trained if length is None else length)


def number(low: float, high: float, generator: torch.Generator) -> float:
    return low + (high - low) * torch.rand((), generator=generator).item()


def rising(count: int, generator: torch.Generator) -> tuple[float, ...]:
    return tuple((1 + 3 * torch.rand(count, generator=generator)).sort().values.tolist())


# Exact values


@pytest.mark.parametrize(
    "width, factor, base",
    [
        (64, 2, 20452.23),
        (64, 4, 41829.37),
        (64, 8, 85550.38),
        (128, 2, 20221.26),
        (128, 4, 40889.94),
        (128, 8, 82684.62),
    ],
)
def test_ntk_is_rope_at_a_larger_base(width, factor, base):
    turns, mscale = scaled("ntk", width=width, factor=factor)
    torch.testing.assert_close(turns, frequencies(width, base), rtol=2e-6, atol=0)
    assert mscale == 1


@pytest.mark.parametrize("factor, mscale", [(2, 1.06931), (4, 1.13863), (8, 1.20794), (16, 1.27726)])
def test_yarn_has_the_papers_temperature(factor, mscale):
    assert scaled("yarn", factor=factor)[1] == pytest.approx(mscale, abs=5e-6)


def test_temperatures_can_be_chosen():
    assert scaled("yarn", factor=4, temperature=0.0707)[1] == pytest.approx(1 + 0.0707 * math.log(4))  # DeepSeek-V2
    assert scaled("yarn", factor=4, temperature=0)[1] == 1
    assert scaled("by_parts", factor=4, temperature=0.2, attention_factor=3)[1] == 1
    assert scaled("longrope", factor=4, trained=64)[1] == pytest.approx(math.sqrt(1 + 1 / 3))
    for kind in ("yarn", "longrope"):
        assert scaled(kind, factor=4, attention_factor=1.5)[1] == 1.5


@pytest.mark.parametrize("length, bounds", [(256, (0, 13)), (512, (3, 16)), (1024, (5, 18)), (2048, (8, 21))])
def test_bounds_of_the_index_ramp(length, bounds):
    assert index_bounds(64, length, 1, 32, BASE) == bounds


def test_a_ramp_without_slope_is_a_step():
    """Where the official code's bounds are crossed its ramp runs backwards, and slows what it should keep."""
    turns, _ = scaled("yarn", factor=4, base=2, trained=4096)  # the slowest pair turns more than 300 times
    assert torch.equal(turns, frequencies(64, 2))
    turns, _ = scaled("yarn", factor=4, trained=4)  # the fastest pair does not turn once
    assert torch.equal(turns[1:], frequencies(64, BASE)[1:] / 4)


# Independent implementations


def transformers_rotation(kind: str, width: int, base: float, trained: int, **parameters):
    """transformers' rotary module for a Llama with this scaling."""
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding

    rope = {"rope_type": kind, "rope_theta": base, "original_max_position_embeddings": trained, **parameters}
    if kind == "dynamic":
        del rope["original_max_position_embeddings"]
    return LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=2 * width,
            num_attention_heads=2,
            head_dim=width,
            max_position_embeddings=trained,
            rope_parameters=rope,
        )
    )


def assert_same_rotation(theirs, turns, mscale, length):
    """Cosine and sine of the last and some other position, up to what float32 leaves of an angle so large."""
    pos = torch.tensor([[0, 1, length // 2, length - 1]])
    cos, sin = theirs(torch.zeros(1), pos)
    half = turns.shape[-1]
    assert torch.equal(cos[..., :half], cos[..., half:])
    angle = pos[0].double()[:, None] * turns.double()
    torch.testing.assert_close(theirs.inv_freq, turns, rtol=3e-6, atol=0)
    torch.testing.assert_close(cos[0, :, :half].double(), mscale * angle.cos(), rtol=0, atol=1e-6 * length)
    torch.testing.assert_close(sin[0, :, :half].double(), mscale * angle.sin(), rtol=0, atol=1e-6 * length)


@pytest.mark.parametrize("width", [8, 32, 64, 128])
@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "llama3", "longrope"])
def test_same_as_transformers(kind, width, fresh):
    for trained, times in [(64, 1), (256, 2), (256, 0.5), (1024, 4), (8192, 8)]:
        factor, base = number(1.1, 16, fresh), 10 ** number(3, 6, fresh)
        ours, hf, length = {}, {}, int(trained * times)
        if kind == "yarn":
            ours = {"alpha": number(0.5, 2, fresh), "beta": number(3, 40, fresh)}
            hf = {"beta_slow": ours["alpha"], "beta_fast": ours["beta"]}
        if kind == "llama3":
            ours = {"low": number(0.5, 2, fresh), "high": number(3, 8, fresh)}
            hf = {"low_freq_factor": ours["low"], "high_freq_factor": ours["high"]}
        if kind == "longrope":
            ours = {"long_factors": rising(width // 2, fresh), "short_factors": rising(width // 2, fresh)}
            hf = {"long_factor": list(ours["long_factors"]), "short_factor": list(ours["short_factors"])}
        theirs = transformers_rotation(kind, width, base, trained, factor=factor, **hf)
        turns, mscale = scaled(kind, base, width, trained, length, factor=factor, **ours)
        assert_same_rotation(theirs, turns, mscale, length)


def test_bounds_beyond_the_last_pair_are_those_of_transformers():
    """At so small a base the ramp would end past the width; the official code cuts it there."""
    theirs = transformers_rotation("yarn", 16, 20.0, 2048, factor=4.0)
    assert_same_rotation(theirs, *scaled("yarn", 20.0, 16, 2048, factor=4), 2048)


@pytest.mark.parametrize("width", [8, 64, 128])
def test_ntk_is_the_same_as_x_transformers(width, fresh):
    from x_transformers.x_transformers import RotaryEmbedding

    factor, base = number(1, 16, fresh), 10 ** number(3, 6, fresh)
    theirs = RotaryEmbedding(width, base=base, base_rescale_factor=factor).inv_freq
    torch.testing.assert_close(scaled("ntk", base, width, factor=factor)[0], theirs, rtol=3e-6, atol=0)


@pytest.mark.parametrize("kind", ["ntk", "dynamic", "by_parts", "yarn", "llama3", "longrope"])
def test_same_as_the_papers_formulas_in_float64(kind, fresh):
    """One pair after the other, with the ramp over turns where there is one."""
    for width in (4, 16, 64):
        base, s, trained = 10 ** number(2, 6, fresh), number(1.1, 16, fresh), 512
        length = trained + int(number(1, 4096, fresh))
        alpha, beta = number(0.2, 2, fresh), number(3, 40, fresh)
        expected = []
        for r in range(width // 2):
            theta = base ** (-2 * r / width)
            if kind in ("ntk", "longrope"):
                theta = (base * s ** (width / (width - 2))) ** (-2 * r / width)
            elif kind == "dynamic":
                theta = (base * (s * length / trained - (s - 1)) ** (width / (width - 2))) ** (-2 * r / width)
            else:
                rotations = trained * theta / (2 * math.pi)
                gamma = min(1, max(0, (rotations - alpha) / (beta - alpha)))
                theta = (1 - gamma) * theta / s + gamma * theta
            expected.append(theta)
        bounds = {"low": alpha, "high": beta} if kind == "llama3" else {"alpha": alpha, "beta": beta, "ramp": "turns"}
        turns, _ = scaled(kind, base, width, trained, length, factor=s, **bounds)
        assert turns.dtype == torch.float32
        torch.testing.assert_close(turns.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=0)


# Laws


@pytest.mark.parametrize("kind", KINDS)
def test_factor_one_is_the_identity(kind, fresh):
    """Also for frequencies of no schedule, and whatever the other parameters say."""
    turns = torch.rand(32, generator=fresh)
    others = {"temperature": 0.5, "attention_factor": 2, "long_factors": rising(32, fresh), "ramp": "turns"}
    for parameters in ({}, others):
        for length in (1, TRAINED):
            once, mscale = scaled(kind, turns=turns, length=length, factor=1, **parameters)
            assert torch.equal(once, turns) and mscale == 1
    assert ScalingConfig(kind=kind).factor == 1


@pytest.mark.parametrize("kind", KINDS)
def test_no_stretch_is_the_identity_and_a_stretch_is_none(kind):
    """What an evaluation at 1x and at 4x does, by the one door for all kinds."""
    turns = frequencies(64, BASE)
    at_one, at_four = (ScalingConfig(kind=kind).stretched(s) for s in (1, 4))
    once, mscale = rescale(turns, at_one, BASE, 64, TRAINED, TRAINED)
    assert torch.equal(once, turns) and mscale == 1
    slower, _ = rescale(turns, at_four, BASE, 64, TRAINED, 4 * TRAINED)
    if kind == "none":
        assert torch.equal(slower, turns)
    else:
        assert slower[-1].item() == pytest.approx(turns[-1].item() / 4, rel=1e-6)


def test_dynamic_is_ntk_for_the_length_at_hand(fresh):
    for length in (1, 100, TRAINED):
        assert torch.equal(scaled("dynamic", length=length, factor=3)[0], frequencies(64, BASE))
    length = TRAINED + int(number(1, 1000, fresh))
    ntk, _ = scaled("ntk", factor=length / TRAINED)
    torch.testing.assert_close(scaled("dynamic", length=length)[0], ntk, rtol=1e-6, atol=0)
    assert (scaled("dynamic", length=length, factor=2)[0][1:] < ntk[1:]).all()  # overshoots


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_kinds_that_say_so_depend_on_the_length(kind, fresh):
    lists = {"long_factors": rising(32, fresh)}
    for parameters in (lists, lists | {"short_factors": rising(32, fresh)}):
        scaling = ScalingConfig(kind=kind, factor=4, **parameters)
        turns = frequencies(64, BASE)
        short, long = (rescale(turns, scaling, BASE, 64, TRAINED, length)[0] for length in (TRAINED, 4 * TRAINED))
        assert torch.equal(short, long) == (not scaling.depends_on_length)


@pytest.mark.parametrize("ramp", ["index", "turns"])
@pytest.mark.parametrize("kind", KINDS)
def test_slower_in_order_and_within_the_factor(kind, ramp, fresh):
    """0 <= theta/s <= theta' <= theta, still falling from pair to pair, and slowed more the slower a pair is."""
    for width, trained in ((8, 16), (64, 256), (128, 2048)):
        s = number(1.1, 8, fresh)
        turns = frequencies(width, BASE)
        slower, _ = scaled(kind, width=width, trained=trained, length=int(trained * s), factor=s, ramp=ramp)
        if kind == "dynamic":
            s = s * int(trained * s) / trained - (s - 1)
        assert (slower <= turns).all() and (slower >= turns / s * (1 - 1e-6)).all()
        assert (slower.diff() < 0).all()
        assert ((turns / slower).diff() > -1e-5).all()


@pytest.mark.parametrize("factor", [1.5, 2.0, 3.0, 8.0])
@pytest.mark.parametrize("width", [4, 32, 64, 128])
def test_first_frequency_is_kept_and_last_divided_by_the_factor(width, factor):
    turns = frequencies(width, 500000.0)
    for kind in ("ntk", "longrope", "by_parts", "yarn", "llama3"):
        slower, _ = scaled(kind, base=500000.0, width=width, trained=1024, factor=factor, ramp="turns")
        assert slower[0] == turns[0], kind
        torch.testing.assert_close(slower[-1], turns[-1] / factor, rtol=2e-7, atol=0)
    assert torch.equal(scaled("linear", base=500000.0, width=width, factor=factor)[0], turns / factor)


def test_the_two_ramps_differ():
    """The paper's keeps less: turns fall geometrically with the index."""
    for kind in ("by_parts", "yarn"):
        index, paper = (scaled(kind, factor=4, trained=1024, ramp=ramp)[0] for ramp in ("index", "turns"))
        assert (index >= paper).all() and (index / paper).max() > 1.5


def test_yarn_is_by_parts_with_a_temperature():
    for ramp in ("index", "turns"):
        assert torch.equal(scaled("yarn", factor=4, ramp=ramp)[0], scaled("by_parts", factor=4, ramp=ramp)[0])


def test_longrope_lists(fresh):
    """Each pair's own divisor: long always, or short up to L where it is given; without lists that of ntk."""
    turns, long, short = frequencies(64, BASE), rising(32, fresh), rising(32, fresh)
    parameters = {"factor": 4, "long_factors": long, "short_factors": short}
    by_long, by_short = turns / torch.tensor(long), turns / torch.tensor(short)
    assert torch.equal(scaled("longrope", length=TRAINED + 1, **parameters)[0], by_long)
    assert torch.equal(scaled("longrope", length=TRAINED, **parameters)[0], by_short)
    assert torch.equal(scaled("longrope", length=TRAINED, factor=4, long_factors=long)[0], by_long)
    assert torch.equal(scaled("longrope", factor=4)[0], scaled("ntk", factor=4)[0])


@pytest.mark.parametrize("ramp", ["index", "turns"])
@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_of_zero_stay_zero_and_change_no_other(kind, ramp):
    """p-RoPE: a prefix of the full schedule, then zeros."""
    turns = frequencies(64, BASE)
    cut = torch.where(torch.arange(32) < 24, turns, 0.0).requires_grad_()
    full, _ = scaled(kind, factor=4, ramp=ramp)
    slower, _ = scaled(kind, factor=4, ramp=ramp, turns=cut)
    assert torch.equal(slower[:24], full[:24])
    assert (slower[24:] == 0).all()
    slower.sum().backward()
    assert cut.grad.isfinite().all() and (cut.grad[:24] > 0).any()


@pytest.mark.parametrize("ramp", ["index", "turns"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_pair_that_turns_the_other_way_is_slowed_alike(kind, ramp):
    """Trained frequencies may change their sign."""
    turns = frequencies(64, BASE)
    forth, back = (scaled(kind, factor=4, trained=1024, ramp=ramp, turns=t)[0] for t in (turns, -turns))
    assert torch.equal(back, -forth)


@pytest.mark.parametrize("kind", ["dynamic", "by_parts", "yarn", "llama3", "longrope"])
def test_original_length_stands_for_the_training_length(kind):
    moved = scaled(kind, factor=4, trained=64, original_length=1024, length=4096)
    straight = scaled(kind, factor=4, trained=1024, length=4096)
    assert torch.equal(moved[0], straight[0]) and moved[1] == straight[1]
    other = scaled(kind, factor=4, trained=64, length=4096)
    assert not torch.equal(moved[0], other[0]) or moved[1] != other[1]


# Bases


def test_raising_the_base_is_not_ntk_aware():
    """C45: Llama 3's 500000 slows the last pair by a number that depends on the width and on no context length."""
    for width, slowed in ((64, 44.24), (128, 47.03)):
        raised, plain = frequencies(width, 500000.0), frequencies(width, BASE)
        assert (plain[-1] / raised[-1]).item() == pytest.approx(50 ** ((width - 2) / width), rel=1e-5)
        assert 50 ** ((width - 2) / width) == pytest.approx(slowed, abs=0.01)
        for factor in (2, 4, 8, 32):
            aware, _ = scaled("ntk", width=width, factor=factor)
            assert ((aware - raised).abs() / raised).max() > 0.3


def angles_agree(base: float, width: int, length: int) -> bool:
    """Whether sum_r cos(m theta_r) >= 0 at every distance m below the length."""
    theta = torch.tensor(float(base), dtype=torch.float64) ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    return bool(((torch.arange(length)[:, None] * theta).cos().sum(1) >= 0).all())


def test_smallest_base_for_a_length():
    """The bound of Men et al. 2024 (https://arxiv.org/abs/2405.14591) by direct search, in steps of 0.2%."""
    listed = {64: {256: 1420, 512: 3440, 1024: 7780, 2048: 30300}, 128: {256: 894, 512: 2070, 1024: 4310, 2048: 11600}}
    for width, known in listed.items():
        base, lengths = 2.0, [16, 64]
        for length, smallest in known.items():
            lengths.append(length)  # a base that fails at a shorter length fails here too
            while not all(angles_agree(base, width, shorter) for shorter in lengths):
                base *= 1.002
            assert angles_agree(smallest, width, length)
            assert 0.975 * smallest <= base <= 1.002 * smallest
    # It bounds from below only: above it some bases fail, RoPE's own among them.
    assert angles_agree(7780, 64, 1024) and not angles_agree(BASE, 64, 1024)


# Configuration


def test_describe_gives_what_the_kind_reads():
    texts = {
        "none": "",
        "linear": "factor=4",
        "ntk": "factor=4",
        "dynamic": "factor=4",
        "by_parts": "factor=4 alpha=1 beta=32 ramp=index",
        "yarn": "factor=4 alpha=1 beta=32 ramp=index temperature=0.1",
        "llama3": "factor=4 high=4 low=1",
        "longrope": "factor=4",
    }
    assert {kind: describe(ScalingConfig(kind=kind, factor=4)) for kind in KINDS} == texts
    assert describe(ScalingConfig(kind="yarn", factor=2.5, attention_factor=1.1, original_length=512)) == (
        "factor=2.5 alpha=1 attention_factor=1.1 beta=32 original_length=512 ramp=index"
    )
    assert describe(ScalingConfig(kind="longrope", factor=4, long_factors=(1, 2.5))) == "factor=4 long_factors=1,2.5"


def test_describe_tells_apart_what_is_measured_apart(fresh):
    """A parameter moves the text if and only if it moves the result."""
    moved = {
        "factor": 3.0,
        "original_length": 512,
        "alpha": 1.5,
        "beta": 9.0,
        "ramp": "turns",
        "temperature": 0.3,
        "low": 1.5,
        "high": 9.0,
        "attention_factor": 1.7,
        "long_factors": rising(32, fresh),
        "short_factors": rising(32, fresh),
    }
    turns = frequencies(64, BASE)

    def same(one, other):
        pairs = [[rescale(turns, scaling, BASE, 64, 1024, n) for scaling in (one, other)] for n in (800, 4096)]
        return all(torch.equal(a[0], b[0]) and a[1] == b[1] for a, b in pairs)

    for kind in KINDS:
        plain = ScalingConfig(kind=kind, factor=4)
        for name, value in moved.items():
            changed = replace(plain, **{name: value})
            assert same(plain, changed) == (describe(plain) == describe(changed)), (kind, name)


def test_parameters_name_fields_of_every_kind():
    assert set(get_args(get_type_hints(ScalingConfig)["kind"])) == set(KINDS)
    assert {name for names in PARAMETERS.values() for name in names} | {"kind"} == set(get_type_hints(ScalingConfig))


@pytest.mark.parametrize(
    "raw, key",
    [
        ({"kind": "pi"}, "scaling.kind"),
        ({"factor": 0.5}, "scaling.factor"),
        ({"factor": True}, "scaling.factor"),
        ({"original_length": 1}, "scaling.original_length"),
        ({"alpha": 0}, "scaling.alpha"),
        ({"beta": -1}, "scaling.beta"),
        ({"ramp": "paper"}, "scaling.ramp"),
        ({"temperature": -0.1}, "scaling.temperature"),
        ({"low": 0}, "scaling.low"),
        ({"high": "4"}, "scaling.high"),
        ({"attention_factor": 0}, "scaling.attention_factor"),
        ({"long_factors": [1, 0]}, "scaling.long_factors"),
        ({"short_factors": 2}, "scaling.short_factors"),
        ({"beta_fast": 32}, "scaling.beta_fast"),
    ],
)
def test_values_out_of_range_are_named(raw, key):
    with pytest.raises(ConfigError) as error:
        build(ScalingConfig, raw, "scaling")
    assert str(error.value).startswith(f"{key}: ") and "\n" not in str(error.value)


def test_lists_come_from_json_and_yaml_as_lists():
    scaling = build(ScalingConfig, {"kind": "longrope", "factor": 4, "long_factors": [1, 1.5]}, "scaling")
    assert scaling.long_factors == (1, 1.5) and hash(scaling)


@pytest.mark.parametrize(
    "parameters, base, width, message",
    [
        ({"alpha": 4, "beta": 4}, BASE, 8, "rescaling.beta: got 4.0, allowed: more than rescaling.alpha=4"),
        ({"low": 4, "high": 3}, BASE, 8, "rescaling.high: got 3.0, allowed: more than rescaling.low=4"),
        (
            {"kind": "linear"},
            BASE,
            7,
            "scaling: got 'linear', allowed: none, or an even rotary width; here it",
        ),
        ({"kind": "yarn"}, BASE, 0, "scaling: got 'yarn', allowed: none, or an even rotary width; here it"),
        ({"kind": "ntk"}, BASE, 2, "scaling: got 'ntk', allowed: none | linear"),
        ({"kind": "dynamic"}, BASE, 2, "scaling: got 'dynamic', allowed: none | linear"),
        ({"kind": "longrope"}, BASE, 2, "scaling: got 'longrope', allowed: none | linear"),
        ({"kind": "yarn"}, 1.0, 8, "rescaling.ramp: got 'index', allowed: turns where the base is at most 1, here 1"),
        ({"kind": "by_parts"}, 0.5, 8, "rescaling.ramp: got 'index', allowed: turns"),
        (
            {"kind": "longrope", "long_factors": (1.0,)},
            BASE,
            8,
            "rescaling.long_factors: got [1.0], allowed: 4 numbers",
        ),
        ({"kind": "longrope", "short_factors": ()}, BASE, 8, "rescaling.short_factors: got [], allowed: 4 numbers"),
    ],
)
def test_what_cannot_be_scaled_is_named(parameters, base, width, message):
    scaling = ScalingConfig(factor=2, **parameters)
    for attempt in (
        lambda: scaling.check(base, width),
        lambda: rescale(torch.ones(width // 2), scaling, base, width, TRAINED, 2 * TRAINED),
    ):
        with pytest.raises(ConfigError) as error:
            attempt()
        assert str(error.value).startswith(message) and "\n" not in str(error.value)
    with pytest.raises(ConfigError) as error:
        scaling.check(base, width, "position.scaling", "position.scaling.kind")
    key = message.partition(":")[0]
    assert error.value.key == ("position.scaling.kind" if key == "scaling" else f"position.{key.removeprefix('re')}")


def test_what_needs_no_more_than_one_pair_works_at_width_two():
    parameters = {"linear": {}, "by_parts": {}, "yarn": {}, "llama3": {}, "longrope": {"long_factors": (4,)}}
    for kind, lists in parameters.items():
        slower, _ = rescale(torch.ones(1), ScalingConfig(kind=kind, factor=4, **lists), BASE, 2, 4, 16)
        assert slower.shape == (1,) and 0.25 <= slower.item() <= 1, kind
