"""Exact values of each scheme, from the papers' formulas and the authors' code."""

import math
from pathlib import Path

import pytest
import torch

from gpt.errors import ConfigError
from gpt.position import SCHEMES, build_position
from gpt.position.rope import frequencies, rotate_pairs, rotation
from gpt.schema import ModelConfig, build
from tests.helpers import as_written, excite, make

GPT2 = ModelConfig(n_layer=12, n_head=12, n_embd=768, block_size=1024)


@pytest.mark.parametrize(
    "name, count", [("nope", 0), ("learned", 786_432), ("sinusoidal", 1), ("rope", 0)]
)
def test_parameter_table_at_gpt2(name, count):
    with torch.device("meta"):
        position = build_position(SCHEMES[name].Config(name=name), GPT2)
    assert sum(p.numel() for p in position.parameters()) == count


def test_every_scheme_has_its_yaml():
    """The table of schemes, their files and their names are one list; the first row of a class has its defaults.

    (A checkpoint from before a key existed is read with the default of the class.)
    """
    folder = Path(__file__).parents[1] / "configs" / "position"
    assert {path.stem for path in folder.glob("*.yaml")} == set(SCHEMES)
    seen = set()
    for name, cls in SCHEMES.items():
        values = as_written(name)
        config = build(cls.Config, values, "position")
        config.check(GPT2)
        assert config.name == name
        assert (config == cls.Config(name=name)) != (cls in seen), name
        seen.add(cls)


# RoPE


def test_rope_frequencies():
    for width, last in ((8, 1e-3), (64, 1.3335e-4), (128, 1.1548e-4)):
        found = frequencies(width, 10000.0)
        assert found[0] == 1 and float(found[-1]) == pytest.approx(last, rel=1e-4)
        expected = [10000.0 ** (-2 * r / width) for r in range(width // 2)]
        torch.testing.assert_close(found, torch.tensor(expected), atol=0, rtol=1e-5)


def test_rope_is_a_rotation_of_pairs(fresh):
    """Pair (2r, 2r + 1) at position i turns by i base^(-2r/d): against sines and cosines in float64, pair by pair."""
    d, T = 8, 50
    x = torch.randn(2, 3, T, d, generator=fresh)
    found = rotate_pairs(x, rotation(torch.arange(T), frequencies(d, 100.0)))
    for i in range(T):
        for r in range(d // 2):
            angle = i * 100.0 ** (-2 * r / d)
            a, b = x[..., i, 2 * r].double(), x[..., i, 2 * r + 1].double()
            torch.testing.assert_close(
                found[..., i, 2 * r].double(), a * math.cos(angle) - b * math.sin(angle), atol=1e-4, rtol=0
            )
            torch.testing.assert_close(
                found[..., i, 2 * r + 1].double(), a * math.sin(angle) + b * math.cos(angle), atol=1e-4, rtol=0
            )
    torch.testing.assert_close(found.norm(dim=-1), x.norm(dim=-1))


def test_rope_complex_path_equals_the_real_one(fresh):
    """The CPU's fast product of complex numbers against cosine and sine, forward and gradient."""
    pos, turns = torch.arange(40) + 4000, frequencies(16, 10000.0)
    fast = rotation(pos, turns)
    slow = torch.stack((fast.real, fast.imag), dim=-1)
    assert fast.is_complex() and not slow.is_complex()
    weights = torch.randn(2, 3, 40, 16, generator=fresh)
    found = []
    for turn in (fast, slow):
        x = torch.randn(2, 3, 40, 16, generator=torch.Generator().manual_seed(5)).requires_grad_()
        y = rotate_pairs(x, turn)
        (y * weights).sum().backward()
        found.append((y.detach(), x.grad))
    torch.testing.assert_close(*found)


def test_rope_scores_depend_on_the_difference(fresh):
    q, k = (torch.randn(1, 1, 1, 64, generator=fresh, dtype=torch.float64) for _ in range(2))
    turns = frequencies(64, 10000.0)

    def score(i, j):
        a, b = (rotation(torch.tensor([p]), turns) for p in (i, j))
        return float((rotate_pairs(q, a).double() * rotate_pairs(k, b).double()).sum())

    for i, j in ((5, 2), (100, 3)):
        for c in (1, 17, 300):
            assert score(i + c, j + c) == pytest.approx(score(i, j), abs=1e-3)
    assert abs(score(5, 2) - score(5, 3)) > 1e-3


def test_rope_angles_stay_exact_far_out():
    """float32 cosines against float64 at 4,096 positions (in bfloat16 they are off by 0.1 from position 58 on)."""
    pos = torch.arange(4096)
    found = rotation(pos, frequencies(64, 10000.0))
    exact = pos.double().unsqueeze(1) * torch.tensor([10000.0 ** (-2 * r / 64) for r in range(32)], dtype=torch.float64)
    assert (found.real - exact.cos()).abs().max() < 2e-3 and (found.imag - exact.sin()).abs().max() < 2e-3


@pytest.mark.parametrize("width", [1, 5, 65])
def test_rope_refuses_odd_widths(width):
    model = ModelConfig(n_layer=1, n_head=2, n_embd=2 * width, block_size=8)
    with pytest.raises(ConfigError, match=f"model.n_embd.*{width}"):
        SCHEMES["rope"].Config(name="rope").check(model)


# nope


def test_one_causal_layer_without_positions_is_blind_to_order_and_two_are_not(fresh):
    """Claim C03: the mask alone tells order, but only from the second layer on."""
    x = torch.arange(16).unsqueeze(0)
    order = torch.cat((torch.randperm(15, generator=fresh), torch.tensor([15])))
    for layers, blind in ((1, True), (2, False)):
        model = excite(make("nope", ModelConfig(n_layer=layers, n_head=4, n_embd=32, block_size=16)), fresh).double()
        with torch.no_grad():
            change = (model(x)[0][:, -1] - model(x[:, order])[0][:, -1]).abs().max()
        assert (change < 1e-9) == blind
