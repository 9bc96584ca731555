"""RoPE and its relatives: formulas in float64, transformers and x-transformers, rescaling in training and for an
evaluation, hybrids, and what is refused."""

import math
from dataclasses import replace

import pytest
import torch

from gpt.attention import PLAIN, Kind, attend, prepare, sharpness
from gpt.cache import Cache
from gpt.cli import compose
from gpt.config import load
from gpt.errors import ConfigError, LengthError, UserError
from gpt.position import SCHEMES
from gpt.position.rope import Rope, frequencies, rotate_pairs, rotation
from gpt.position.scaling import PARAMETERS, ScalingConfig, rescale
from gpt.schema import ModelConfig, build
from tests.helpers import SMALL, as_written, excite, ids, make

FAMILY = [name for name, cls in SCHEMES.items() if issubclass(cls, Rope)]
RESCALABLE = [name for name in FAMILY if name != "randomized_rope"]
KINDS = [kind for kind in PARAMETERS if kind != "none"]
WIDE = ModelConfig(n_layer=1, n_head=2, n_embd=64, block_size=64)  # head width 32
YARN = ScalingConfig(kind="yarn", factor=4.0)
DYNAMIC = ScalingConfig(kind="dynamic")


def scheme(name="rope", model=WIDE, **options):
    return make(name, model, **options).position


def turned(position, q, k, q_pos=None, k_pos=None, layer=0):
    """Queries and keys after the scheme, at positions 0, 1, ... unless given."""
    k_pos = torch.arange(k.shape[2]) if k_pos is None else k_pos
    q_pos = k_pos[-q.shape[2] :] if q_pos is None else q_pos
    return position.rotate(q, k, prepare(position, q_pos, k_pos).ctx, layer)


def products(position, q, k, **where):
    q, k = turned(position, q, k, **where)
    return q.double() @ k.double().transpose(-2, -1)


def noise(shape, generator):
    return torch.randn(shape, generator=generator)


def schedule(width, base=10000.0):
    return [base ** (-2 * r / width) for r in range(width // 2)]


def rotated(x, i, thetas, pairs):
    """One vector in float64 with pair r of channels turned by i theta_r, by the formula."""
    x = x.double().clone()
    for theta, (m, n) in zip(thetas, pairs, strict=True):
        a, b, cos, sin = x[m].item(), x[n].item(), math.cos(i * theta), math.sin(i * theta)
        x[m], x[n] = a * cos - b * sin, a * sin + b * cos
    return x


def pairs_of(width, layout):
    return [(2 * r, 2 * r + 1) if layout == "interleaved" else (r, r + width // 2) for r in range(width // 2)]


# Rotation


def test_frequencies():
    """C42: theta_r = 10000^(-2r/d) from 1 down to about 1e-4. C09: 1, 0.1, 0.01, 0.001 at width 8."""
    for width, last in ((8, 1e-3), (64, 1.3335e-4), (128, 1.1548e-4)):
        found = frequencies(width, 10000.0)
        assert found[0] == 1 and float(found[-1]) == pytest.approx(last, rel=1e-4)
        torch.testing.assert_close(found, torch.tensor(schedule(width)), atol=0, rtol=1e-5)
    torch.testing.assert_close(frequencies(8, 10000.0), torch.tensor([1, 0.1, 0.01, 0.001]), atol=0, rtol=1e-6)


@pytest.mark.parametrize("options", [{}, {"fraction": 0.25}, {"fraction": 0.5, "base": 100.0}, {"keep": 0.3}])
@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_rotation_is_the_formula(layout, options, fresh):
    """Channel by channel in float64: which pairs, by how much, and what stays."""
    d, T = 32, 40
    position = scheme(layout=layout, **options)
    width = round(options.get("fraction", 1) * d)
    thetas = schedule(width, options.get("base", 10000.0))
    kept = math.floor(options.get("keep", 1) * width / 2)
    thetas = thetas[:kept] + [0.0] * (len(thetas) - kept)
    q, k = noise((1, 2, T, d), fresh), noise((1, 2, T, d), fresh)
    for x, found in zip((q, k), turned(position, q, k), strict=True):
        for i in (0, 1, 7, T - 1):
            expected = rotated(x[0, 1, i], i, thetas, pairs_of(width, layout))
            torch.testing.assert_close(found[0, 1, i].double(), expected, atol=2e-5, rtol=0)
        assert torch.equal(found[..., width:], x[..., width:])
    assert position.score_scale == d**-0.5


def test_complex_path_equals_the_real_one(fresh):
    """The CPU's fast product of complex numbers against cosine and sine, forward and gradient."""
    pos, turns = torch.arange(40) + 4000, frequencies(16, 10000.0)
    fast = rotation(pos, turns, 1.5)
    slow = torch.stack((fast.real, fast.imag), dim=-1)
    assert fast.is_complex() and not slow.is_complex()
    weights, given = noise((2, 3, 40, 16), fresh), noise((2, 3, 40, 16), fresh)
    found = []
    for turn in (fast, slow):
        x = given.clone().requires_grad_()
        y = rotate_pairs(x, turn)
        (y * weights).sum().backward()
        found.append((y.detach(), x.grad))
    torch.testing.assert_close(*found)


def test_scores_depend_on_the_difference(fresh):
    """C39: <R_m q, R_n k> is a function of m - n: exact in the formula, to rounding of the angle in float32."""
    q, k = noise(64, fresh), noise(64, fresh)
    position = scheme(model=ModelConfig(n_layer=1, n_head=1, n_embd=64, block_size=64))
    thetas, pairs = schedule(64), pairs_of(64, "interleaved")

    def exact(m, n):
        return float(rotated(q, m, thetas, pairs) @ rotated(k, n, thetas, pairs))

    def ours(m, n):
        at = {"q_pos": torch.tensor([m]), "k_pos": torch.tensor([n])}
        return products(position, q.view(1, 1, 1, -1), k.view(1, 1, 1, -1), **at).item()

    for m, n in ((5, 2), (100, 3)):
        for c in (1, 17, 4000):
            assert exact(m + c, n + c) == pytest.approx(exact(m, n), abs=1e-9)
            assert ours(m + c, n + c) == pytest.approx(exact(m, n), abs=1e-3 if c < 1000 else 2e-2)
    assert abs(ours(5, 2) - ours(5, 3)) > 1e-3


def test_rotations_compose_and_keep_lengths(fresh):
    """C40: R_m^T R_n = R_(n-m), R^T R = 1, in either layout; the shape stays."""
    eye = torch.eye(32).view(1, 1, 32, 32)
    for layout in ("interleaved", "half"):
        position = scheme(layout=layout)

        def matrix(m, position=position):
            at = torch.full((32,), m)
            return turned(position, eye, eye, at, at)[0][0, 0].T.double()

        m, n = 41, 203
        torch.testing.assert_close(matrix(m).T @ matrix(n), matrix(n - m), atol=3e-5, rtol=0)
        torch.testing.assert_close(matrix(n).T @ matrix(n), torch.eye(32, dtype=torch.float64), atol=1e-6, rtol=0)
    x = noise((2, 3, 50, 32), fresh)
    q, k = turned(position, x, x)
    assert q.shape == k.shape == x.shape
    torch.testing.assert_close(q.norm(dim=-1), x.norm(dim=-1))


def test_layouts_are_equal_up_to_the_order_of_channels(fresh):
    """C41: Llama's interleaved pairs are Hugging Face's halves after W_q and W_k are permuted, and not without that."""
    inter = excite(make("rope"), fresh, std=0.2)
    half = make("rope", layout="half")
    half.load_state_dict(inter.state_dict())
    x = ids((2, 40), fresh)
    with torch.no_grad():
        expected = inter(x)[0]
        assert (half(x)[0] - expected).abs().max() > 1e-2
        D, H = SMALL.n_embd, SMALL.n_head
        for block in half.h:
            for part in block.attn.c_attn.weight[: 2 * D].split(D):
                part.copy_(part.clone().view(H, D // H // 2, 2, D).transpose(1, 2).reshape(D, D))
        torch.testing.assert_close(half(x)[0], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_angles_stay_exact_far_out_and_in_low_precision(layout):
    """Against float64 at 4,096 positions, in a bfloat16 model under autocast; in bfloat16 angles are off by radians."""
    position = make("rope", WIDE, layout=layout).bfloat16().position
    pos = torch.arange(4096)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = prepare(position, pos, pos).ctx[0]
    exact = pos.double().unsqueeze(1) * torch.tensor(schedule(32), dtype=torch.float64)
    cos, sin = (found.real, found.imag) if layout == "interleaved" else (found[0, :, :16], found[1, :, 16:])
    torch.testing.assert_close(cos.double(), exact.cos(), atol=1e-3, rtol=0)
    torch.testing.assert_close(sin.double(), exact.sin(), atol=1e-3, rtol=0)
    x = torch.ones(1, 1, 1, 32, dtype=torch.bfloat16)
    assert turned(position, x, x)[0].dtype == torch.bfloat16


def test_pairs_that_never_make_a_full_turn_in_training():
    """Wavelengths beyond L: their angles past L are new to the model."""
    for width, L, count in ((64, 128, 21), (64, 256, 19), (64, 512, 16), (64, 1024, 14), (32, 256, 9)):
        assert int((2 * math.pi / frequencies(width, 10000.0) > L).sum()) == count


def kappa(base, distances, width=64):
    """(1 / pairs) sum_r cos(distance theta_r): the score of equal queries and keys of ones, over that at distance 0."""
    angle = distances.double().unsqueeze(-1) * torch.tensor(schedule(width, base), dtype=torch.float64)
    return angle.cos().mean(-1)


def test_a_larger_base_decays_more_slowly_and_a_small_one_wraps(fresh):
    """C46, as far as it needs no training: kappa at distance 256 rises with the base, and base 100 repeats itself."""
    far = torch.tensor([256])
    values = [kappa(base, torch.arange(128, 384)).mean().item() for base in (1e2, 1e3, 1e4, 1e5, 5e5, 1e6)]
    assert values == sorted(values) and values[0] < 0.05 < 0.5 < values[-1]
    longest = [2 * math.pi / frequencies(64, base)[-1].item() for base in (1e2, 1e4)]
    assert longest[0] < 1024 < longest[1]  # with base 100 every pair has turned fully within 1,024 tokens
    ones = torch.ones(1, 1, 257, 64)
    position = scheme(model=ModelConfig(n_layer=1, n_head=1, n_embd=64, block_size=64), base=5e5)
    found = products(position, ones, ones)[0, 0, -1, 0].item() / 64
    assert found == pytest.approx(kappa(5e5, far).item(), abs=1e-4)


def test_scores_decay_for_equal_vectors_and_not_for_random_ones(fresh):
    """C65: RoFormer's long-term decay holds for constant q = k; for Gaussian ones no distance has smaller scores."""
    model = ModelConfig(n_layer=1, n_head=1, n_embd=64, block_size=64)
    position, distances = scheme(model=model), (1, 16, 256, 2048)
    k_pos = torch.tensor([2048 - delta for delta in reversed(distances)] + [2048])
    ones = torch.ones(1, 1, 5, 64)
    equal = products(position, ones, ones, q_pos=k_pos[-1:].expand(5), k_pos=k_pos)[0, 0, -1].flip(0) / 64
    assert (equal.diff() < 0).all() and equal[0].item() == pytest.approx(1) and equal[-1] < 0.25
    q, k = noise((4000, 1, 1, 64), fresh), noise((4000, 1, 5, 64), fresh)
    random = products(position, q, k, q_pos=k_pos[-1:], k_pos=k_pos)[:, 0, 0] / 8  # (4000, 5), of variance 1
    assert (random.std(dim=0) - 1).abs().max() < 0.06


def test_costs_nothing_and_leaves_the_attention_matrix_alone(fresh):
    """C49: no parameter, no mask, so the plain causal kernel; and a cache of keys serves (a law for every scheme)."""
    model = excite(make("rope"), fresh)
    assert not list(model.position.parameters()) and not model.position.biased() and not model.position.explicit()
    pos = torch.arange(16)
    assert prepare(model.position, pos, pos).masks[PLAIN] is None
    x, cache = ids((1, 40), fresh), Cache(SMALL.n_layer)
    with torch.no_grad():
        parts = [model(x[:, i : i + 1], cache=cache)[0] for i in range(40)]
        torch.testing.assert_close(torch.cat(parts, 1), model(x)[0], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("name", FAMILY)
def test_values_are_not_turned(name, fresh):
    """C44: where all keys score alike, the output is the plain mean of the values."""
    position, pos = scheme(name, window=None, window_layers="W"), torch.arange(50)
    shared, v = prepare(position, pos, pos), noise((1, 2, 50, 32), fresh)
    q, k = position.rotate(torch.full_like(v, -200), torch.zeros_like(v), shared.ctx, 0)  # pope: softplus of it is 0
    y = attend(q if name == "pope" else 0 * q, k, v, shared)
    torch.testing.assert_close(y[:, :, -1], v.mean(dim=2))


def test_no_table_to_outgrow(fresh):
    """Lengths 128, 129, 256, 512, 128 in one process give what a fresh model gives."""
    x = ids((1, 512), fresh)
    for name in ("rope", "xpos", "pope"):
        model = make(name)
        for n in (16, 128, 129, 256, 512, 128):
            with torch.no_grad():
                assert torch.equal(model(x[:, :n])[0], make(name)(x[:, :n])[0])


@pytest.mark.parametrize("name", ["rope", "xpos"])
def test_traced_by_the_compiler(name, fresh):
    """The graph that torch.compile takes, without complex numbers, gives what the eager path gives, rescaled or not."""
    position = scheme(name)
    x = noise((1, 2, 40, 32), fresh)

    def score(x):
        q, k = turned(position, x, x)
        return q @ k.transpose(-2, -1)

    torch.compiler.reset()
    compiled = torch.compile(score, backend="eager", fullgraph=True)
    with torch.no_grad():
        plain = score(x)
        torch.testing.assert_close(compiled(x), plain, atol=1e-4, rtol=1e-4)
        with position.scaled(YARN):
            torch.testing.assert_close(compiled(x), score(x), atol=1e-4, rtol=1e-4)
            assert (compiled(x) - plain).abs().max() > 1e-2
        torch.testing.assert_close(compiled(x), plain, atol=1e-4, rtol=1e-4)


# Partial, p-RoPE, trained


@pytest.mark.parametrize("fraction", [0.25, 0.5, 1.0])
def test_partial_rotation_is_that_of_gpt_neox(fraction, fresh):
    from transformers.models.gpt_neox import modeling_gpt_neox as neox

    config = neox.GPTNeoXConfig(
        hidden_size=64,
        num_attention_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": fraction},
    )
    q, k = noise((2, 2, 50, 32), fresh), noise((2, 2, 50, 32), fresh)
    cos, sin = neox.GPTNeoXRotaryEmbedding(config)(q, torch.arange(50).unsqueeze(0))
    theirs = neox.apply_rotary_pos_emb(q, k, cos, sin)
    torch.testing.assert_close(turned(scheme(layout="half", fraction=fraction), q, k), theirs, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("width", [8, 16, 32])
def test_partial_rotation_is_that_of_x_transformers(width, fresh):
    from x_transformers.x_transformers import RotaryEmbedding, apply_rotary_pos_emb

    q = noise((2, 2, 50, 32), fresh)
    angles, _ = RotaryEmbedding(width)(torch.arange(50))
    found = turned(scheme(fraction=width / 32), q, q)[0]
    torch.testing.assert_close(found, apply_rotary_pos_emb(q, angles), atol=2e-5, rtol=1e-5)


def test_partial_and_p_rope_turn_as_many_pairs_by_other_angles(fresh):
    """partial_rope has the whole schedule on few channels, p_rope the fast part of that of all channels."""
    partial, p = scheme(fraction=0.75), scheme("p_rope")
    found = [position.frequencies(torch.arange(4))[0] for position in (partial, p)]
    assert [int((turns > 0).sum()) for turns in found] == [12, 12]
    torch.testing.assert_close(found[0], torch.tensor(schedule(24)), atol=0, rtol=1e-5)
    torch.testing.assert_close(found[1][:12], torch.tensor(schedule(32)[:12]), atol=0, rtol=1e-5)
    assert found[0][-1] < found[1][11] / 4


def test_fast_pairs_can_attend_by_position_and_slow_ones_by_content(fresh):
    """C61, as far as it needs no training: with equal content a fast pair singles out one distance, where the slowest
    pair hardly tells distances apart; p-RoPE takes that pair's last dependence on position away."""
    T, steps = 64, 3
    for layout_pair, sharp in ((0, True), (15, False)):
        thetas = schedule(32)
        q, k = torch.zeros(1, 2, T, 32), torch.zeros(1, 2, T, 32)
        k[..., 2 * layout_pair] = 1
        angle = -steps * thetas[layout_pair]
        q[..., 2 * layout_pair], q[..., 2 * layout_pair + 1] = math.cos(angle), math.sin(angle)
        row = products(scheme(), q, k)[0, 0, 40, :41]
        assert row[40 - steps] == row.max()
        assert (row.max() - row[40 - steps - 1] > 0.4) == sharp
        assert (row.max() - row.min() < 1e-2) != sharp
    without = products(scheme("p_rope"), q, k)[0, 0, 40]
    assert torch.equal(without, without[:1].expand(T))


@pytest.mark.parametrize("keep", [0.5, 1.0])
def test_trained_frequencies(keep, fresh):
    """C43, as far as it needs no training: they begin at the schedule, one a kept pair for all layers, and learn."""
    model = make("trainable_rope", keep=keep)
    assert [name for name, _ in model.named_parameters() if "position" in name] == ["position.turns"]
    kept = round(4 * keep)
    torch.testing.assert_close(model.position.turns.detach(), torch.tensor(schedule(8)[:kept]), atol=0, rtol=1e-6)
    x = ids((2, 40), fresh)
    with torch.no_grad():
        torch.testing.assert_close(model(x)[0], make("rope", keep=keep)(x)[0], atol=1e-5, rtol=1e-5)
    excite(model, fresh)
    with torch.no_grad():
        model.position.turns.copy_(torch.tensor(schedule(8)[:kept]))

    def loss():
        return model(x, x)[1]

    loss().backward()
    gradient, h = model.position.turns.grad.clone(), 1e-4
    assert (gradient != 0).all()
    model.double()
    with torch.no_grad():  # the slowest pair, whose angles are small enough for a difference of float32 cosines
        found = []
        for step in (h, -h):
            model.position.turns[-1] += step
            found.append(loss())
            model.position.turns[-1] -= step
    assert ((found[0] - found[1]) / (2 * h)).item() == pytest.approx(gradient[-1].item(), rel=5e-2, abs=2e-2)


# xPos


def test_xpos_is_that_of_x_transformers(fresh):
    """Their centre is the text's middle too, and cancels in the product."""
    from x_transformers.x_transformers import RotaryEmbedding, apply_rotary_pos_emb

    q, k = noise((2, 2, 200, 32), fresh), noise((2, 2, 200, 32), fresh)
    angles, scale = RotaryEmbedding(32, use_xpos=True, scale_base=64)(torch.arange(200))
    theirs = apply_rotary_pos_emb(q, angles, scale) @ apply_rotary_pos_emb(k, angles, 1 / scale).transpose(-2, -1)
    found = products(scheme("xpos", scale_base=64.0), q, k)
    torch.testing.assert_close(found, theirs.double(), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("start", [0, 5000])
def test_xpos_is_the_formula(layout, start, fresh):
    """sum over pairs of zeta_r^((i-j)/scale_base) times the rotated product, in float64, wherever the text begins."""
    d, base = 32, 512.0
    q, k = noise((1, 1, 1, d), fresh), noise((1, 1, 60, d), fresh)
    k_pos = torch.arange(60) * 16 + start
    found = products(scheme("xpos", layout=layout), q, k, q_pos=k_pos[-1:], k_pos=k_pos)[0, 0, 0]
    for j in (0, 30, 59):
        delta, expected = int(k_pos[-1] - k_pos[j]), 0.0
        for r, (theta, (m, n)) in enumerate(zip(schedule(d), pairs_of(d, layout), strict=True)):
            a, b, u, v = q[..., m].item(), q[..., n].item(), k[0, 0, j, m].item(), k[0, 0, j, n].item()
            zeta = (2 * r + 0.4 * d) / (1.4 * d)
            turn = math.cos(delta * theta) * (a * u + b * v) + math.sin(delta * theta) * (a * v - b * u)
            expected += zeta ** (delta / base) * turn
        assert found[j].item() == pytest.approx(expected, abs=2e-2 if start else 1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_xpos_neither_overflows_nor_vanishes_as_far_as_it_reaches(dtype, fresh):
    """At 4 L for L = 1,024, and at the last length that is allowed; one token more is refused."""
    position = scheme("xpos", ModelConfig(n_layer=1, n_head=1, n_embd=8, block_size=1024))
    reach = position.config.reach
    assert reach > 60 * 1024
    for T in (4096, reach):
        q, k = (noise((1, 1, T, 8), fresh).to(dtype) for _ in range(2))
        q, k = turned(position, q, k)
        near, far = (q[0, 0, i].double() @ k[0, 0, j].double() for i, j in ((0, 0), (T - 1, 0)))
        assert q.isfinite().all() and k.isfinite().all() and near.abs() > 1e-4 and far.isfinite()
        diagonal = (q.float() * k.float()).sum(-1)
        assert diagonal.isfinite().all() and diagonal.abs().median() > 0.1
    with pytest.raises(LengthError, match=f"position=xpos: {reach + 1} tokens, in float32 it reaches {reach}"):
        prepare(position, torch.arange(reach + 1), torch.arange(reach + 1))


# PoPE


@pytest.mark.parametrize("phase", ["zero", "uniform"])
def test_pope_is_that_of_x_transformers(phase, fresh):
    from x_transformers.x_transformers import PolarEmbedding, apply_polar_pos_emb

    position = scheme("pope", phase=phase)
    with torch.no_grad():
        position.phase["0"].add_(noise((2, 1, 32), fresh))  # some above 0, where it is clamped
    theirs = PolarEmbedding(32, 2)
    with torch.no_grad():
        theirs.learned_bias.copy_(position.phase["0"])
    q, k = noise((2, 2, 50, 32), fresh), noise((2, 2, 50, 32), fresh)
    angles, bias = theirs(torch.arange(50))
    expected = apply_polar_pos_emb(q, angles), apply_polar_pos_emb(k, angles + bias)
    torch.testing.assert_close(turned(position, q, k), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("phase", ["none", "uniform"])
def test_pope_is_the_formula(phase, fresh):
    """softplus(q_c) softplus(k_c) cos((j - i) base^(-c/d) + phase_c), in float64; odd head widths are as good."""
    d = 7
    model = ModelConfig(n_layer=4, n_head=2, n_embd=2 * d, block_size=16)
    config = replace(scheme("pope", model, phase=phase).config)
    config.check(model)
    position = excite(make("pope", model, phase=phase, layers="NP"), fresh, std=2).position
    q, k = noise((1, 2, 20, d), fresh), noise((1, 2, 20, d), fresh)
    found = products(position, q, k, layer=3)[0, 1]
    if phase == "none":
        assert not list(position.parameters())
    else:  # layers 1 and 3 alone have positions
        assert {layer: phase.shape for layer, phase in position.phase.items()} == dict.fromkeys("13", (2, 1, d))
    for i, j in ((0, 0), (19, 0), (19, 12)):
        expected = 0.0
        for c in range(d):
            delta = 0.0 if phase == "none" else min(0.0, max(-2 * math.pi, position.phase["3"][1, 0, c].item()))
            strength = math.log1p(math.exp(q[0, 1, i, c])) * math.log1p(math.exp(k[0, 1, j, c]))
            expected += strength * math.cos((j - i) * 10000.0 ** (-c / d) + delta)
        assert found[i, j].item() == pytest.approx(expected, abs=1e-4)


def test_pope_is_twice_as_wide_and_keeps_the_scale_of_the_head(fresh):
    position = scheme("pope")
    q, k, v = (noise((1, 2, 20, 32), fresh) for _ in range(3))
    pos = torch.arange(20)
    shared = prepare(position, pos, pos)
    q2, k2 = position.rotate(q, k, shared.ctx, 0)
    assert q2.shape[-1] == k2.shape[-1] == 64
    scores = (q2 @ k2.transpose(-2, -1) / math.sqrt(32)).masked_fill(torch.ones(20, 20).triu(1).bool(), -math.inf)
    torch.testing.assert_close(attend(q2, k2, v, shared), scores.softmax(-1) @ v, atol=1e-5, rtol=1e-4)


def test_pope_phases_start_where_they_say(fresh):
    many = ModelConfig(n_layer=2, n_head=8, n_embd=512, block_size=16)
    assert all((phase == 0).all() for phase in scheme("pope", many).phase.values())
    uniform = torch.stack(list(scheme("pope", many, phase="uniform").phase.values())).detach()
    assert uniform.min() >= -2 * math.pi and uniform.max() <= 0
    torch.testing.assert_close(
        torch.histc(uniform, 4, -2 * math.pi, 0) / uniform.numel(), torch.full((4,), 0.25), atol=0.07, rtol=0
    )


def test_a_pope_phase_comes_back_from_beyond_the_clamp(fresh):
    """Above 0 and below -2 pi scores are those of the bound, and still there is a gradient: a plain clamp's is 0."""
    model = excite(make("pope"), fresh)
    x = ids((2, 12), fresh)
    with torch.no_grad():
        for beyond, bound in ((0.3, 0.0), (-7.0, -2 * math.pi)):
            found = []
            for value in (beyond, bound):
                for phase in model.position.phase.values():
                    phase.fill_(value)
                found.append(model(x)[0])
            torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)
    for beyond in (0.3, -7.0):
        for phase in model.position.phase.values():
            torch.nn.init.constant_(phase, beyond)
        model.zero_grad()
        model(x, x)[1].backward()
        for phase in model.position.phase.values():
            assert phase.grad.isfinite().all() and (phase.grad != 0).float().mean() > 0.9


# DeepSeek's split


def test_decoupled_rope_is_the_formula(fresh):
    """Per head: turned part of the query times one turned key for all heads, plus the unturned products."""
    position = scheme("decoupled_rope")  # 8 of 32 channels
    q, k = noise((1, 2, 30, 32), fresh), noise((1, 2, 30, 32), fresh)
    found = products(position, q, k)
    shared = k[0, :, :, :8].double().mean(dim=0)
    for h, i, j in ((0, 29, 3), (1, 29, 3), (1, 12, 12)):
        a = rotated(q[0, h, i, :8], i, schedule(8), pairs_of(8, "interleaved"))
        b = rotated(shared[j], j, schedule(8), pairs_of(8, "interleaved"))
        expected = float(a @ b + q[0, h, i, 8:].double() @ k[0, h, j, 8:].double())
        assert found[0, h, i, j].item() == pytest.approx(expected, abs=1e-4)
    assert position.score_scale == 32**-0.5


def test_which_layers_and_channels_the_hybrids_turn():
    """C62: DeepSeek-V3 turns 64 of 192 channels in every layer, SmolLM3 all channels but in every fourth layer."""
    deepseek = ModelConfig(n_layer=61, n_head=2, n_embd=384, block_size=64)
    split = config_of("decoupled_rope", fraction=64 / 192)
    split.check(deepseek)
    assert split.rotary_width(deepseek) == 64 and all(split.positioned(layer) for layer in range(61))
    assert scheme("decoupled_rope", replace(deepseek, n_layer=1), fraction=64 / 192).score_scale == 192**-0.5
    smollm = build(SCHEMES["rope_nope"].Config, as_written("rope_nope"), "position")
    assert [layer for layer in range(36) if not smollm.positioned(layer)] == [3, 7, 11, 15, 19, 23, 27, 31, 35]


@pytest.mark.parametrize("name", ["rope_window_nope", "swan"])
def test_windows_are_where_the_positions_are(name):
    """Three layers see a window and turn, the fourth sees everything and does not; swan's is sharpened past L."""
    four = ModelConfig(n_layer=4, n_head=2, n_embd=16, block_size=64)
    model = make(name, four)
    assert [block.attn.kind for block in model.h] == [Kind(True, True)] * 3 + [Kind(False, False)]
    pos = torch.arange(256)
    shared = prepare(model.position, pos, pos, kinds=model.kinds)
    seen = shared.masks[Kind(True, True)][0, 255] == 0
    assert seen.nonzero().flatten().tolist() == list(range(224, 256)) and shared.masks[Kind(False, False)] is None
    if name == "rope_window_nope":
        assert shared.sharpness is None
    else:
        assert torch.equal(shared.sharpness, sharpness(256, 256, 64, pos.device)) and shared.sharpness[-1] > 1.3


def test_alternation():
    config = build(SCHEMES["rope_nope_alternating"].Config, as_written("rope_nope_alternating"), "position")
    assert [config.positioned(layer) for layer in range(4)] == [True, False, True, False]


# Rescaling


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "llama3", "longrope"])
def test_rescaled_rotation_is_that_of_transformers(kind, layout, fresh):
    """Queries and keys, end to end; for interleaved pairs their channels are reordered before and after."""
    from transformers.models.llama import modeling_llama as llama

    T, L, factor = 200, 64, 4.0
    lists = {"long_factors": tuple(1 + r / 5 for r in range(16)), "short_factors": tuple(1 + r / 9 for r in range(16))}
    scaling = ScalingConfig(kind=kind, factor=factor, **(lists if kind == "longrope" else {}))
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": factor, "original_max_position_embeddings": L}
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind == "longrope":
        rope |= {"long_factor": list(scaling.long_factors), "short_factor": list(scaling.short_factors)}
    if kind == "dynamic":
        del rope["original_max_position_embeddings"]
    config = llama.LlamaConfig(
        hidden_size=64, num_attention_heads=2, head_dim=32, max_position_embeddings=L, rope_parameters=rope
    )
    q, k = noise((2, 2, T, 32), fresh), noise((2, 2, T, 32), fresh)
    cos, sin = llama.LlamaRotaryEmbedding(config)(q, torch.arange(T).unsqueeze(0))
    expected = llama.apply_rotary_pos_emb(q, k, cos, sin)

    def order(x):  # (r, r + 16) -> (2r, 2r + 1)
        return x if layout == "half" else x.unflatten(-1, (2, 16)).transpose(-1, -2).flatten(-2)

    position = scheme(layout=layout)
    with position.scaled(scaling):
        found = turned(position, order(q), order(k))
    torch.testing.assert_close(found, tuple(map(order, expected)), atol=3e-4, rtol=1e-4)
    trained = scheme(layout=layout, scaling=scaling)
    torch.testing.assert_close(turned(trained, order(q), order(k)), found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", RESCALABLE)
def test_every_relative_of_rope_can_be_rescaled(name, kind, fresh):
    """Other logits past L, the same as before afterwards, nothing in the state; factor 1 changes nothing."""
    model = excite(make(name, ModelConfig(n_layer=1, n_head=2, n_embd=64, block_size=16)), fresh)
    x = ids((1, 64), fresh)
    state, attributes = {k: v.clone() for k, v in model.state_dict().items()}, dict(vars(model.position))
    assert model.position.rescalable
    with torch.no_grad():
        before = model(x)[0]
        with model.position.scaled(ScalingConfig(kind=kind).stretched(1)):
            assert torch.equal(model(x[:, :16])[0], model(x[:, :16])[0]) and model.state_dict().keys() == state.keys()
            if kind != "dynamic":
                assert torch.equal(model(x)[0], before)
        with model.position.scaled(ScalingConfig(kind=kind, beta=2.0).stretched(4)):
            during = model(x)[0]
            assert model.state_dict().keys() == state.keys()
        after = model(x)[0]
    assert torch.equal(after, before) and dict(vars(model.position)) == attributes
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert (during - before).abs().max() > 1e-3


def test_a_pope_frequency_is_rescaled_as_rope_of_twice_the_width(fresh):
    position = scheme("pope")
    with position.scaled(YARN):
        turns, size = position.frequencies(torch.arange(256))
    expected, mscale = rescale(frequencies(64, 10000.0), YARN, 10000.0, 64, 64, 256)
    assert torch.equal(turns, expected) and size == mscale and len(turns) == 32


@pytest.mark.parametrize("name", RESCALABLE)
@pytest.mark.parametrize("scaling, squared", [(YARN, 1.13863**2), (ScalingConfig(kind="ntk", factor=4.0), 1.0)])
def test_temperature_is_neither_lost_nor_doubled(name, scaling, squared, fresh):
    """The product of a query with the key at its own place is that of no rescaling, times the square, once."""
    position = scheme(name, log_scale=False)
    width = position.width
    q, k = noise((1, 2, 9, 32), fresh), noise((1, 2, 9, 32), fresh)
    if name != "pope":
        q[..., width:] = 0  # what is not turned has no temperature
    plain = products(position, q, k).diagonal(dim1=-2, dim2=-1)
    with position.scaled(scaling):
        found = products(position, q, k).diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(found, squared * plain, atol=1e-4, rtol=1e-4)


def test_a_temperature_of_training_and_one_of_evaluation_are_both_there(fresh):
    """An evaluation's rescaling comes on top of what was trained with, so that its factor 1 is the identity."""
    trained = scheme(scaling=ScalingConfig(kind="linear", factor=2.0))
    pos = torch.arange(64)
    with trained.scaled(ScalingConfig(kind="yarn", factor=1.0)):
        assert torch.equal(trained.frequencies(pos)[0], frequencies(32, 10000.0) / 2)
    with trained.scaled(ScalingConfig(kind="linear", factor=3.0)):
        torch.testing.assert_close(trained.frequencies(pos)[0], frequencies(32, 10000.0) / 6)
    with scheme(scaling=YARN).scaled(YARN) as nothing:
        assert nothing is None
    twice = scheme(scaling=YARN)
    with twice.scaled(YARN):
        assert twice.frequencies(pos)[1] == pytest.approx(1.13863**2, abs=1e-4)


def test_another_base_for_an_evaluation(fresh):
    """The rotation of a model at that base; trained frequencies move by as much as their schedule does."""
    q = noise((1, 2, 50, 32), fresh)
    for name in ("rope", "partial_rope", "p_rope", "pope", "decoupled_rope"):
        position, other = scheme(name), scheme(name, base=500000.0)
        with position.scaled(ScalingConfig(), base=500000.0):
            assert torch.equal(*(turned(p, q, q)[0] for p in (position, other)))
        with position.scaled(YARN, base=500000.0), other.scaled(YARN):
            assert torch.equal(*(turned(p, q, q)[0] for p in (position, other)))
        assert not torch.equal(*(turned(p, q, q)[0] for p in (position, other)))
    trained = scheme("trainable_rope")
    with torch.no_grad():
        trained.turns.mul_(1.25)
    with trained.scaled(ScalingConfig(), base=500000.0):
        found = trained.frequencies(torch.arange(2))[0]
    torch.testing.assert_close(found, 1.25 * frequencies(32, 500000.0), atol=0, rtol=1e-6)


def test_nothing_stays_after_an_error_and_nested_the_inner_counts():
    position, pos = scheme(), torch.arange(256)
    plain = position.frequencies(pos)[0]
    with pytest.raises(ZeroDivisionError), position.scaled(YARN):
        raise ZeroDivisionError
    assert torch.equal(position.frequencies(pos)[0], plain)
    linear = ScalingConfig(kind="linear", factor=2.0)
    with position.scaled(YARN):
        with position.scaled(linear):
            assert torch.equal(position.frequencies(pos)[0], plain / 2)
        assert position.frequencies(pos)[1] > 1
    assert torch.equal(position.frequencies(pos)[0], plain) and position.stable


def test_dynamic_stretch_is_a_function_of_the_current_length(fresh):
    """L, 4 L, L: the last as the first; up to L nothing is stretched, and 4 L as ntk by 4."""
    model = excite(make("rope"), fresh)
    short, long = ids((1, 16), fresh), ids((1, 64), fresh)
    with torch.no_grad():
        plain = model(short)[0]
        with model.position.scaled(DYNAMIC):
            assert torch.equal(model(short)[0], plain)
            stretched = model(long)[0]
            assert torch.equal(model(short)[0], plain)
        with model.position.scaled(ScalingConfig(kind="ntk", factor=4.0)):
            torch.testing.assert_close(stretched, model(long)[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_what_depends_on_the_length_refuses_a_cache_and_the_rest_serves_one(kind, fresh):
    """Across L: a cache that is served gives the logits of one forward."""
    lists = {"short_factors": (1.0, 1.0, 1.0, 1.0), "long_factors": (1.0, 2.0, 3.0, 4.0)} if kind == "longrope" else {}
    for options, refused in (({}, kind == "dynamic"), (lists, kind in ("dynamic", "longrope"))):
        scaling = ScalingConfig(kind=kind, factor=4.0, **options)
        model = excite(make("rope"), fresh)
        trained = make("rope", scaling=scaling)
        trained.load_state_dict(model.state_dict())
        x = ids((1, 40), fresh)
        assert trained.position.stable != refused
        with model.position.scaled(scaling), torch.no_grad():
            assert model.position.stable != refused
            cache = Cache(SMALL.n_layer)
            if refused:
                with pytest.raises(LengthError, match="position=rope: tokens move as the text grows"):
                    model(x[:, :1], cache=cache)
                continue
            parts = [model(x[:, a:b], cache=cache)[0] for a, b in ((0, 10), (10, 11), (11, 40))]
            whole = model(x)[0]
            torch.testing.assert_close(torch.cat(parts, 1), whole, atol=2e-4, rtol=2e-4)
            assert torch.equal(trained(x)[0], whole)


@pytest.mark.parametrize("name", [name for name in SCHEMES if name not in FAMILY])
def test_schemes_without_rotation_refuse_a_rescaling(name):
    position = make(name).position
    assert not position.rescalable
    for scaling, base, message in (
        (YARN, None, f"scaling: got 'yarn', allowed: none: position={name} has no rotations"),
        (ScalingConfig(), 100.0, f"position.base: got 100.0, allowed: null: position={name} has no rotations"),
    ):
        with pytest.raises(ConfigError) as error, position.scaled(scaling, base):
            pass
        assert str(error.value) == message
    with position.scaled(ScalingConfig()):
        pass


@pytest.mark.parametrize("name", RESCALABLE)
def test_a_rescaling_trains(name, fresh):
    """Every parameter gets a finite gradient with a rescaling on, past the original length too."""
    model = excite(make(name, scaling={"kind": "yarn", "factor": 2.0, "original_length": 8}), fresh).train()
    x = ids((2, 16), fresh)
    model(x, x)[1].backward()
    for parameter in model.parameters():
        assert parameter.grad.isfinite().all() and parameter.grad.abs().sum() > 0


# What is refused


def config_of(name, **options):
    return build(SCHEMES[name].Config, as_written(name) | options, "position")


TEN = ModelConfig(n_layer=4, n_head=2, n_embd=20, block_size=64)


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("rope", {"base": 0}, "position.base: got 0, allowed: a number >= 1e-09 and <= 1e+12"),
        ("rope", {"layout": "halves"}, "position.layout: got 'halves', allowed: interleaved | half"),
        ("rope", {"fraction": 0}, "position.fraction: got 0, allowed: a number > 0 and <= 1"),
        ("rope", {"fraction": 1.5}, "position.fraction: got 1.5, allowed: a number > 0 and <= 1"),
        ("rope", {"fraction": 0.3}, "position.fraction: got 0.3, allowed: an even number of a head's 10 channels"),
        ("rope", {"fraction": 0.25}, "position.fraction: got 0.25, allowed: an even number of a head's 10 channels"),
        ("rope", {"fraction": 0.01}, "position.fraction: got 0.01, allowed: an even number of a head's 10 channels"),
        ("decoupled_rope", {"fraction": 0.5}, "position.fraction: got 0.5, allowed: an even number of a head's 10"),
        ("rope", {"keep": 0}, "position.keep: got 0, allowed: a number > 0 and <= 1"),
        ("rope", {"keep": 1.01}, "position.keep: got 1.01, allowed: a number > 0 and <= 1"),
        ("rope", {"keep": 0.1}, "position.keep: got 0.1, allowed: at least 0.2, one of 5 frequencies"),
        ("rope", {"trainable": 1}, "position.trainable: got 1, allowed: true or false"),
        ("rope", {"scaling": "yarn"}, "position.scaling: got 'yarn', allowed: a section with the keys kind, factor"),
        ("rope", {"scaling": {"kind": "pi"}}, "position.scaling.kind: got 'pi', allowed: none | linear"),
        ("rope", {"scaling": {"factor": 0.5}}, "position.scaling.factor: got 0.5, allowed: a number >= 1"),
        (
            "rope",
            {"scaling": {"beta_fast": 32}},
            "position.scaling.beta_fast: there is no such key; did you mean beta?",
        ),
        ("rope", {"scaling": {"beta": 0.5}}, "position.scaling.beta: got 0.5, allowed: more than position.scaling"),
        (
            "rope",
            {"scaling": {"kind": "longrope", "long_factors": [1, 2]}},
            "position.scaling.long_factors: got [1.0, 2.0], allowed: 5 numbers, one a pair",
        ),
        (
            "pope",
            {"scaling": {"kind": "longrope", "long_factors": [1, 2]}},
            "position.scaling.long_factors: got [1.0, 2.0], allowed: 10 numbers, one a pair",
        ),
        (
            "rope",
            {"fraction": 0.2, "scaling": {"kind": "ntk", "factor": 4}},
            "position.scaling.kind: got 'ntk', allowed: none | linear",
        ),
        ("xpos", {"scale_base": 0}, "position.scale_base: got 0, allowed: a number >= 1e-09"),
        ("xpos", {"scale_base": 0.1}, "position.scale_base: got 0.1, allowed: at least 1 for 64 positions"),
        ("xpos", {"scale_base": 2, "randomized": 16}, "position.scale_base: got 2.0, allowed: at least 9 for 1024"),
        ("pope", {"phase": "learned"}, "position.phase: got 'learned', allowed: zero | uniform | none"),
        ("pope", {"layout": "half"}, "position.layout: got 'half', allowed: interleaved"),
        ("pope", {"fraction": 0.5}, "position.fraction: got 0.5, allowed: 1"),
        ("nope", {"scaling": {"kind": "yarn"}}, "position.scaling: there is no such key"),
        ("alibi", {"scaling": {"kind": "yarn"}}, "position.scaling: there is no such key"),
    ],
)
def test_wrong_values_are_one_line(name, options, message):
    with pytest.raises(UserError) as error:
        config_of(name, **options).check(TEN)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_the_smallest_scale_base_that_is_named_is_allowed():
    config_of("xpos", scale_base=9, randomized=16).check(TEN)


@pytest.mark.parametrize("width", [1, 5, 65])
def test_odd_head_widths_are_refused(width):
    model = ModelConfig(n_layer=1, n_head=2, n_embd=2 * width, block_size=8)
    for name in ("rope", "xpos", "decoupled_rope"):
        for fraction in (1.0, 2 / width):  # two of five channels make a pair too, but no kernel takes it from there
            with pytest.raises(ConfigError, match=f"model.n_embd.*{width}"):
                config_of(name, fraction=min(1.0, fraction)).check(model)


@pytest.mark.parametrize("base", [0.0, -1.0, math.inf, math.nan])
def test_an_evaluation_with_a_base_that_is_none_is_refused(base):
    with pytest.raises(ConfigError, match="position.base: got .*a number > 0"), scheme().scaled(ScalingConfig(), base):
        pass


@pytest.mark.parametrize("kind", KINDS)
def test_random_ids_are_not_rescaled(kind):
    """All ids of an evaluation up to the last length were trained on: in training and evaluation one line says so."""
    reason = "allowed: none where position.randomized=8: its ids are all trained on"
    with pytest.raises(ConfigError) as error:
        config_of("randomized_rope", scaling={"kind": kind}).check(WIDE)
    assert str(error.value).startswith(f"position.scaling.kind: got '{kind}', {reason}")
    position, q = scheme("randomized_rope"), torch.ones(1, 2, 50, 32)
    with pytest.raises(ConfigError) as error, position.scaled(ScalingConfig(kind=kind)):
        pass
    assert str(error.value).startswith(f"scaling: got '{kind}', {reason}")
    with position.scaled(ScalingConfig(), base=500000.0):  # another base is no stretch
        assert torch.equal(turned(position, q, q)[0], turned(scheme(base=500000.0), q, q)[0])


def test_an_evaluation_that_does_not_fit_the_model_is_refused():
    lists = ScalingConfig(kind="longrope", factor=2.0, long_factors=(1.0,))
    with pytest.raises(ConfigError, match="scaling.long_factors: .*16 numbers"), scheme().scaled(lists):
        pass
    with pytest.raises(ConfigError, match="scaling.ramp: got 'index'"), scheme().scaled(YARN, base=1.0):
        pass


@pytest.mark.parametrize("name", RESCALABLE)
def test_a_rescaling_is_a_section_of_every_relatives_configuration(name):
    words = [f"position={name}", "position.scaling.kind=yarn", "position.scaling.factor=4", "position.scaling.beta=8"]
    config = load(compose("train", words))
    assert config.position.scaling == ScalingConfig(kind="yarn", factor=4.0, beta=8.0)
    assert config.position == replace(config_of(name), scaling=config.position.scaling)


def test_shares_of_a_head_need_not_be_exact_fractions():
    """A third of 192 channels, written with three digits; floating noise in keep loses no pair."""
    model = ModelConfig(n_layer=1, n_head=1, n_embd=192, block_size=64)
    assert config_of("rope", fraction=0.3333).rotary_width(model) == 64
    config_of("rope", fraction=0.3333).check(model)
    assert config_of("rope", keep=0.29).kept_pairs(replace(model, n_embd=200)) == 29
