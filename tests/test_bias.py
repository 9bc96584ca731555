"""Schemes that add a bias from positions to the score: ALiBi, T5, KERPLE, Sandwich, FIRE, TUPE."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from gpt.attention import Kind, prepare
from gpt.cache import Cache
from gpt.errors import ConfigError, LengthError
from gpt.model import normal
from gpt.position import SCHEMES, build_position
from gpt.position.alibi import slopes, text_slopes
from gpt.position.base import uniform
from gpt.position.t5 import bucket
from gpt.schema import ModelConfig, build
from tests.helpers import SMALL, as_written, excite, ids, make

GPT2 = ModelConfig(n_layer=12, n_head=12, n_embd=768, block_size=1024)
BIASED = [name for name in SCHEMES if SCHEMES[name].biased()]
RISING = torch.tensor([0, 1, 2, 5, 9, 40, 41, 300])  # ids as randomized ones are


def scheme(name, generator=None, heads=4, **options):
    """A scheme alone; with a generator, its parameters at random."""
    model = make(name, ModelConfig(n_layer=1, n_head=heads, n_embd=8 * heads, block_size=512), **options)
    return (excite(model, generator) if generator else model).position


def by_hand(formula, q_pos, k_pos, heads=4):
    """(H, Tq, Tk) float64 of `formula(h, i, j)`, future keys as at distance 0."""
    values = [[[formula(h, i, min(i, j)) for j in k_pos.tolist()] for i in q_pos.tolist()] for h in range(heads)]
    return torch.tensor(values, dtype=torch.float64)


def assert_is(position, formula, q_pos=RISING[3:], k_pos=RISING, **tolerance):
    """Dense and pointwise forms are the formula where a query may look."""
    seen = (q_pos.unsqueeze(-1) >= k_pos).expand(position.n_head, -1, -1)
    expected = by_hand(formula, q_pos, k_pos, position.n_head)[seen]
    forms = [position.dense(q_pos, k_pos)]
    if position.pair is not None:
        heads = torch.arange(position.n_head).view(-1, 1, 1)
        forms.append(position.pair(heads, q_pos.view(1, -1, 1), k_pos.view(1, 1, -1)))
    for found in forms:
        assert found.shape == seen.shape and found.dtype == torch.float32
        torch.testing.assert_close(found[seen].double(), expected, **({"atol": 1e-5, "rtol": 1e-5} | tolerance))


@pytest.mark.parametrize(
    "name, options, count",
    [
        ("alibi", {}, 0),
        ("alibi", {"slopes": "learned"}, 12),
        ("t5", {}, 32 * 12),
        ("kerple", {}, 2 * 12),
        ("kerple_power", {}, 2 * 12),
        ("sandwich", {}, 0),
        ("fire", {}, 64 + 33 * 12 + 2),
        ("tupe", {"relative": False}, 786_432 + 1_179_648 + 768),
        ("tupe", {}, 786_432 + 1_179_648 + 768 + 384),
    ],
)
def test_parameter_table_at_gpt2(name, options, count):
    """C52, C53: one table for all layers, and none at all for ALiBi."""
    with torch.device("meta"):
        position = build_position(build(SCHEMES[name].Config, as_written(name) | options, "position"), GPT2)
    assert sum(p.numel() for p in position.parameters()) == count


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("alibi", {"slopes": "linear"}, "position.slopes: got 'linear', allowed: code | text | learned"),
        ("kerple", {"kernel": "exp"}, "position.kernel: got 'exp', allowed: log | power"),
        ("sandwich", {"width": 0}, "position.width: got 0, allowed: a whole number >= 2"),
        ("sandwich", {"width": 7}, "position.width: got 7, allowed: an even number, of cosines and sines"),
        ("fire", {"width": 0}, "position.width: got 0, allowed: a whole number >= 1 and <= 1024"),
        ("fire", {"scale": 0.0}, "position.scale: got 0.0, allowed: a number >= 1e-09"),
        ("fire", {"threshold": -1.0}, "position.threshold: got -1.0, allowed: a number >= 1e-09"),
        ("tupe", {"relative": "no"}, "position.relative: got 'no', allowed: true or false"),
        ("tupe", {"overflow": "grow"}, "position.overflow: got 'grow', allowed: error | clamp | wrap | interpolate"),
        ("t5", {"bidirectional": True}, "position.bidirectional: there is no such key"),
        ("t5", {"buckets": 0}, "position.buckets: got 0, allowed: a whole number >= 2 and <= 16777216"),
        ("t5", {"max_distance": 16}, "position.max_distance: got 16, allowed: more than position.buckets / 2 = 16"),
    ],
)
def test_wrong_values_are_named_in_one_line(name, options, message):
    with pytest.raises(ConfigError) as error:
        build(SCHEMES[name].Config, as_written(name) | options, "position").check(SMALL)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


# ALiBi


@pytest.mark.parametrize(
    "heads, expected",
    [
        (1, [2**-8]),
        (2, [2**-4, 2**-8]),
        (4, [0.25, 0.0625, 0.015625, 0.00390625]),
        (6, [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]),
        (8, [2**-h for h in range(1, 9)]),
        (12, [*(2**-h for h in range(1, 9)), 0.70711, 0.35355, 0.17678, 0.08839]),
    ],
)
def test_alibi_slopes_are_those_of_the_authors_code(heads, expected):
    """C54: and not 1, 1/2, 1/4 ..., whatever the number of heads."""
    assert slopes(heads) == pytest.approx(expected, abs=5e-6)
    assert slopes(heads)[0] < 1
    assert make("alibi", ModelConfig(n_layer=1, n_head=heads, n_embd=heads)).position.slopes == slopes(heads)


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 6, 7, 8, 12, 16, 20, 25, 32])
def test_alibi_is_transformers_and_x_transformers(heads, fresh):
    """C57: BLOOM's bias m j is the same in each row; ours differs from it by a constant in each row, which softmax
    does not see."""
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor
    from x_transformers.x_transformers import AlibiPositionalBias

    T = 40
    pos = torch.arange(T)
    ours = scheme("alibi", heads=heads).dense(pos, pos)
    past = torch.ones(T, T, dtype=torch.bool).tril()
    torch.testing.assert_close(ours[:, past], AlibiPositionalBias(heads)(T, T)[:, past])

    bloom = build_alibi_tensor(torch.ones(1, T, dtype=torch.long), heads, torch.float32)  # (H, 1, T)
    scores = torch.randn(heads, T, T, generator=fresh).masked_fill(~past, -math.inf)
    torch.testing.assert_close((scores + bloom).softmax(-1), (scores + ours).softmax(-1), atol=1e-5, rtol=1e-4)


def test_alibi_row_constant_is_not_invisible_in_bfloat16(fresh):
    """C57: m j and -m (i - j), the same attention in float32, are not in bfloat16, which has no 1,001 m."""
    i, j = torch.arange(1000, 1024).view(-1, 1), torch.arange(1024)
    m = torch.tensor(slopes(4)).view(4, 1, 1)
    scores = torch.randn(4, 24, 1024, generator=fresh).masked_fill(j > i, -math.inf)
    for dtype, same in ((torch.float32, True), (torch.bfloat16, False)):
        row, distance = ((scores.to(dtype) + bias.to(dtype)).float().softmax(-1) for bias in (m * j, -m * (i - j)))
        assert torch.allclose(row, distance, atol=1e-4) == same


def test_alibi_bias_is_zero_on_the_diagonal_and_falls_with_distance():
    """C53: -m |i - j|."""
    for heads in (4, 8):
        assert_is(scheme("alibi", heads=heads), lambda h, i, j, n=heads: -slopes(n)[h] * (i - j))


def test_alibi_slopes_of_the_text_differ_where_heads_are_no_power_of_two():
    """A geometric sequence from 2^(-8/n) for any n."""
    for heads in (1, 2, 3, 4, 6, 8, 12):
        position = scheme("alibi", heads=heads, slopes="text")
        assert (
            position.slopes == text_slopes(heads) == pytest.approx([2 ** (-8 * h / heads) for h in range(1, heads + 1)])
        )
        assert (text_slopes(heads) == slopes(heads)) == (heads in (1, 2, 4, 8))
        assert_is(position, lambda h, i, j, n=heads: -(2 ** (-8 * (h + 1) / n)) * (i - j))


def test_alibi_learned_slopes_start_at_the_codes_and_stay_positive(fresh):
    for heads in (4, 6):
        position = scheme("alibi", heads=heads, slopes="learned")
        assert_is(position, lambda h, i, j, n=heads: -slopes(n)[h] * (i - j))
    model = make("alibi", slopes="learned").train()
    optimizer = torch.optim.SGD(model.position.parameters(), lr=1e4)  # absurd, to push a slope where it must not go
    x = ids((4, 16), fresh)
    for _ in range(3):
        model(x, x)[1].backward()
        optimizer.step()
    assert (model.position.log_slopes.exp() > 0).all()
    assert (model.position.dense(torch.arange(9), torch.arange(9)).tril() <= 0).all()


def test_alibi_favours_near_tokens_by_construction():
    """C64: without content, the mean distance a head attends over falls with its slope."""
    T = 512
    pos = torch.arange(T)
    bias = scheme("alibi", heads=8).dense(pos[-1:], pos)[:, 0]
    distance = (bias.softmax(-1) * (T - 1 - pos)).sum(-1)
    assert distance.tolist() == sorted(distance.tolist())  # slopes are falling
    assert distance[0] == pytest.approx(1 / (math.exp(0.5) - 1), rel=1e-4)  # of a geometric distribution
    assert distance[-1] < (T - 1) / 2  # without a bias


# T5


def test_t5_buckets_are_exact():
    """C52: first distance of each causal bucket: 0 to 15 alone, then logarithmic; the last begins at 113, not 128."""
    starts = [*range(16), 16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]
    found = bucket(torch.arange(4096))
    expected = [max(b for b, start in enumerate(starts) if start <= d) for d in range(4096)]
    assert found.tolist() == expected
    assert bucket(torch.tensor([-1, -200])).tolist() == [0, 0]


@pytest.mark.parametrize("buckets, reach", [(32, 128), (8, 20), (64, 1000), (4, 3), (16, 9)])
def test_t5_buckets_are_those_of_transformers(buckets, reach):
    """Its decoder's, bidirectional=False; the encoder's, which would give the past half the buckets, are others."""
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = torch.arange(-50, 3000)
    theirs = [T5Attention._relative_position_bucket(-distance, both, buckets, reach) for both in (False, True)]
    assert torch.equal(bucket(distance, buckets, reach), theirs[0])
    assert not torch.equal(theirs[0], theirs[1])


def test_t5_is_shared_by_all_layers_and_keeps_the_scale(fresh):
    """C52"""
    model = excite(make("t5"), fresh)
    assert [name for name, _ in model.named_parameters() if "position" in name] == ["position.bias"]
    assert model.position.score_scale == 8**-0.5
    table = model.position.bias.tolist()
    assert_is(model.position, lambda h, i, j: table[int(bucket(torch.tensor(i - j)))][h])


# KERPLE


@pytest.mark.parametrize("name", ["kerple", "kerple_power"])
def test_kerple_is_the_formula(name, fresh):
    """Both kernels, with parameters inside and outside of their range: a, p >= 0.01, and p <= 2 for the power."""
    position = scheme(name)
    with torch.no_grad():
        position.a.copy_(torch.tensor([*torch.rand(3, generator=fresh), -1.0]))
        position.p.copy_(torch.tensor([*(2 * torch.rand(2, generator=fresh)), -0.5, 3.0]))
    a = [max(0.01, x) for x in position.a.double().tolist()]
    p = [max(0.01, x) for x in position.p.double().tolist()]
    if name == "kerple":
        assert_is(position, lambda h, i, j: -p[h] * math.log(1 + a[h] * (i - j)))
    else:
        p = [min(2.0, x) for x in p]
        assert_is(position, lambda h, i, j: -a[h] * (i - j) ** p[h] if i > j else 0.0, rtol=1e-4)


def test_kerple_power_at_1_is_alibi():
    position, alibi = scheme("kerple_power"), scheme("alibi")
    with torch.no_grad():
        position.a.copy_(torch.tensor(slopes(4)))
        position.p.fill_(1)
    past = torch.ones(50, 50, dtype=torch.bool).tril()
    found, expected = (one.dense(torch.arange(50), torch.arange(50))[:3, past] for one in (position, alibi))
    torch.testing.assert_close(found, expected)  # the fourth slope is below what KERPLE allows


@pytest.mark.parametrize("name", ["kerple", "kerple_power"])
def test_kerple_gradients_are_finite_and_pass_the_clamp(name, fresh):
    """Also at distance 0, where the power's would be 0 log 0; a parameter beyond its range can come back."""
    position = scheme(name)
    with torch.no_grad():
        position.a.fill_(-1.0)
        position.p.copy_(torch.tensor([-1.0, 0.5, 1.0, 2.5]))
    pos = torch.arange(20)
    (position.dense(pos, pos) * torch.rand(4, 20, 20, generator=fresh)).sum().backward()
    for parameter in position.parameters():
        assert parameter.grad.isfinite().all() and (parameter.grad != 0).all()
    inside = scheme(name)
    with torch.no_grad():  # the gradient is that at the edge
        inside.a.fill_(0.01)
        inside.p.copy_(torch.tensor([0.01, 0.5, 1.0, 2.5 if name == "kerple" else 2.0]))
    weight = torch.rand(4, 20, 20, generator=fresh)
    found = []
    for one in (position, inside):
        one.zero_grad()
        (one.dense(pos, pos) * weight).sum().backward()
        found.append([p.grad for p in one.parameters()])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("name", ["kerple", "kerple_power"])
def test_kerple_starts_uniform(name):
    """a on (0, 1), p on (0, 2): each tenth of the range holds a tenth of 4,000 heads, within 5 standard deviations."""
    config = build(SCHEMES[name].Config, as_written(name), "position")
    position = build_position(config, ModelConfig(n_layer=1, n_head=4000, n_embd=4000))
    with torch.no_grad():
        position.initialize(lambda name, std: normal(0, name, torch.Size([4000]), std))
    for values, most in ((position.a, 1), (position.p, 2)):
        assert values.min() > 0 and values.max() < most
        counts = torch.histc(values.detach(), 10, 0, most)
        assert (counts - 400).abs().max() < 5 * math.sqrt(4000 * 0.1 * 0.9)
    assert abs(torch.corrcoef(torch.stack((position.a, position.p)))[0, 1]) < 0.1  # two draws, not one


def test_uniform_is_the_normal_distribution_function():
    found = uniform(torch.tensor([-1.959964, -1.0, 0.0, 1.0, 1.959964]))
    torch.testing.assert_close(found, torch.tensor([0.025, 0.158655, 0.5, 0.841345, 0.975]), atol=1e-6, rtol=0)


# Sandwich


@pytest.mark.parametrize("heads, width", [(4, 128), (8, 128), (6, 2), (12, 64)])
def test_sandwich_is_the_formula(heads, width):
    """(sum of cosines - w/2) / (8h/H), h from 1, r from 1: 0 on the diagonal, weakest in the last head."""

    def formula(h, i, j):
        total = sum(math.cos((i - j) / 10000 ** (2 * r / width)) for r in range(1, width // 2 + 1))
        return (total - width / 2) / (8 * (h + 1) / heads)

    assert_is(scheme("sandwich", heads=heads, width=width), formula, atol=2e-4, rtol=1e-4)


def test_sandwich_has_its_exact_values():
    """Sums of 64 cosines at width 128, H = 8, so that head h divides by h: computed apart, to six digits."""
    pos = torch.arange(2049)
    bias = scheme("sandwich", heads=8).dense(pos[-1:], pos)[:, 0].flip(-1)
    assert bias[:, 0].abs().max() < 1e-4
    for distance in (1, 2, 10, 100, 1000):
        cosines = math.fsum(math.cos(distance * 10000 ** (-r / 64)) for r in range(1, 65))
        for h in range(8):
            assert float(bias[h, distance]) == pytest.approx((cosines - 64) / (h + 1), abs=1e-3)
    assert (bias[0, 1:] < -0.4).all() and bias[0].min() > -64 * 1.3  # bounded, unlike ALiBi's


def test_sandwich_is_a_product_of_sinusoidal_codes():
    """The codes of this project's sinusoidal scheme, but for its first frequency: theirs start at r = 1, not 0."""
    from gpt.position.sinusoidal import encoding

    pos, width = torch.arange(200), 128
    wider = encoding(pos, width + 2, 10000.0 ** ((width + 2) / width))[:, 2:].double()  # frequencies r = 1 .. w/2
    expected = (wider @ wider.T - width / 2) / (8 / 4)
    torch.testing.assert_close(scheme("sandwich").dense(pos, pos)[0].double(), expected, atol=1e-3, rtol=1e-4)


def test_sandwich_is_bit_identical_far_out():
    position, pos = scheme("sandwich"), torch.arange(64)
    assert torch.equal(position.dense(pos + 10**6, pos + 10**6), position.dense(pos, pos))


# FIRE


def fire_by_hand(position):
    """f_h(psi(i - j) / psi(max(i, |m L|))) from the paper, in float64."""
    w1, b1, w2, b2 = (
        x.detach().double() for x in (position.hidden_weight, position.hidden_bias, position.weight, position.bias)
    )
    c, threshold = position.c.item(), abs(position.multiplier.item() * position.config.threshold)

    def psi(x):
        return math.log(abs(c * x) + 1)

    def formula(h, i, j):
        x = psi(i - j) / (psi(max(i, threshold)) + 1e-6)
        return float(w2[h] @ (w1 * x + b1).clamp(min=0) + b2[h])

    return formula


@pytest.mark.parametrize("threshold", [512.0, 16.0])
def test_fire_is_the_formula(threshold, fresh):
    position = scheme("fire", fresh, threshold=threshold)
    assert_is(position, fire_by_hand(position))
    assert_is(position, fire_by_hand(position), torch.arange(20), torch.arange(20))


def test_fire_starts_as_published():
    """c = 0.1, multiplier 1; the network uniform within 1 and within 1 / sqrt(32)."""
    position = make("fire", ModelConfig(n_layer=1, n_head=64, n_embd=128), vocab=2).position
    assert position.c.item() == pytest.approx(0.1) and position.multiplier.item() == 1
    for values, most in ((position.hidden_weight, 1), (position.hidden_bias, 1), (position.weight, 32**-0.5)):
        assert values.abs().max() < most
        assert values.std().item() == pytest.approx(most / math.sqrt(3), rel=0.35 if values.ndim == 1 else 0.05)


def test_fire_normalises_by_the_querys_own_position(fresh):
    """Up to the threshold scores depend on the distance alone; past it rows are squeezed, and the input stays within
    0 and 1, so that the first key of a long text is what the first key of a shorter one was."""
    position = scheme("fire", fresh, threshold=100.0)
    with torch.no_grad():
        position.multiplier.fill_(-1)  # its size counts
        position.c.fill_(0.1)

    def bias(i, j):
        return position.dense(torch.tensor([i]), torch.tensor([j]))[:, 0, 0]

    torch.testing.assert_close(bias(90, 80), bias(20, 10))
    assert not torch.allclose(bias(400, 390), bias(200, 190), atol=1e-4)
    torch.testing.assert_close(bias(400, 0), bias(200, 0), atol=1e-5, rtol=1e-5)


def test_fire_at_a_quarter_of_the_training_length_sees_nothing_new():
    """The paper's ratio (512 at 2,048). At 4 L the network's inputs stay within those of the training; at a threshold
    that no query passes they leave them, since nothing is squeezed."""
    L = 64
    for threshold, within in ((16.0, True), (512.0, False)):
        position = scheme("fire", threshold=threshold)
        with torch.no_grad():
            position.hidden_weight.fill_(1)  # so that the hidden layer is its input
            position.hidden_bias.zero_()
            trained, found = (position.hidden(torch.arange(n).view(-1, 1), torch.arange(n))[0] for n in (L, 4 * L))
        assert trained.min() == found.min() == 0 and found.max() <= 1
        assert (found.max() <= trained.max() + 1e-5) == within  # the normaliser has an epsilon


@pytest.mark.parametrize("multiplier, c", [(0.0, 0.1), (1.0, 0.0), (0.0, 0.0)])
def test_fire_is_finite_at_the_first_position(multiplier, c, fresh):
    """Whatever training does to the threshold and c, at i = 0 too: values and gradients."""
    position = scheme("fire", fresh)
    with torch.no_grad():
        position.multiplier.fill_(multiplier)
        position.c.fill_(c)
    bias = position.dense(torch.arange(5), torch.arange(5))
    (bias * torch.randn(bias.shape, generator=fresh)).sum().backward()
    assert bias.isfinite().all() and all(p.grad.isfinite().all() for p in position.parameters())


def test_fire_in_pieces_is_fire(fresh, monkeypatch):
    """Rows by rows, with the hidden layer computed again in the backward: the same values and gradients."""
    found = []
    pos = torch.arange(50)
    position = scheme("fire", fresh, threshold=20.0)
    weight = torch.randn(4, 50, 50, generator=fresh)
    for piece in (2**30, 32 * 50 * 7, 1):
        monkeypatch.setattr("gpt.position.fire.PIECE", piece)
        position.zero_grad()
        bias = position.dense(pos, pos)
        (bias * weight).sum().backward()
        found.append((bias.detach(), [p.grad.clone() for p in position.parameters()]))
    torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found[2], found[0], atol=1e-4, rtol=1e-4)


class Largest(TorchDispatchMode):
    """The size of the largest tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for one in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(one, torch.Tensor):
                self.numel = max(self.numel, one.untyped_storage().nbytes() // one.element_size())
        return result


@pytest.mark.parametrize("name", BIASED)
def test_nothing_larger_than_the_bias_is_built(name, fresh):
    """No (T, T, w) tensor, forward and backward, in training: the bias is (4, T, T), FIRE works in pieces of 4 million
    numbers."""
    T = 700
    position = scheme(name, fresh) if name != "tupe" else scheme(name, fresh, overflow="wrap")
    pos = torch.arange(T)
    with Largest() as largest:
        bias = position.dense(pos, pos)
        if bias.requires_grad:
            bias.sum().backward()
    assert largest.numel <= max(4 * T * T, 2**22)


# TUPE


@pytest.mark.parametrize("relative", [True, False])
def test_tupe_is_the_formula(relative, fresh):
    """LN(p_i) U_Q (LN(p_j) U_K)^T / sqrt(2d), and T5's bias, in float64."""
    position = scheme("tupe", fresh, relative=relative)
    rows = F.layer_norm(position.table.detach().double(), (32,), position.norm.weight.detach().double())
    q, k = rows @ position.query.detach().double().T, rows @ position.key.detach().double().T

    def formula(h, i, j):
        score = float(q[i, 8 * h : 8 * h + 8] @ k[j, 8 * h : 8 * h + 8]) / math.sqrt(16)
        return score + (position.bias[int(bucket(torch.tensor(i - j))), h].item() if relative else 0)

    assert hasattr(position, "bias") == relative
    assert_is(position, formula, atol=1e-4)


def test_tupe_halves_the_scores_of_tokens_too(fresh):
    """Both terms are divided by sqrt(2d): without the position term, attention is that of nope with q / sqrt(2)."""
    from gpt.attention import attend

    pos = torch.arange(12)
    q, k, v = (torch.randn(2, 4, 12, 8, generator=fresh) for _ in range(3))
    tupe, nope = make("tupe").position, make("nope").position
    with torch.no_grad():
        tupe.query.zero_()
        tupe.bias.zero_()
    found = attend(q, k, v, prepare(tupe, pos, pos))
    torch.testing.assert_close(found, attend(q / math.sqrt(2), k, v, prepare(nope, pos, pos)))


def test_tupe_reads_past_its_table_as_learned_does(fresh):
    model = excite(make("tupe"), fresh)
    with pytest.raises(LengthError, match="position=tupe: 17 tokens, its table has 16 rows"):
        model(ids((1, 17), fresh))
    state = model.state_dict()
    rows = {"clamp": [*range(16), 15, 15], "wrap": [*range(16), 0, 1]}
    for policy, order in rows.items():
        other = make("tupe", overflow=policy, relative=False)
        other.load_state_dict(state, strict=False)
        long = make("tupe", ModelConfig(n_layer=2, n_head=4, n_embd=32, block_size=18), relative=False)
        long.load_state_dict(
            {key: value for key, value in state.items() if "table" not in key and "bias" not in key}, False
        )
        with torch.no_grad():
            long.position.table.copy_(model.position.table[order])
            x = ids((1, 18), fresh)
            torch.testing.assert_close(other(x)[0], long(x)[0])
    squeezed = make("tupe", overflow="interpolate")
    assert not squeezed.position.stable
    with torch.no_grad(), pytest.raises(LengthError, match="tupe: tokens move as the text grows"):
        squeezed(ids((1, 18), fresh), cache=Cache(2))


@pytest.mark.parametrize("bias", [True, False])
def test_tupe_norm_has_a_bias_where_the_model_has(bias):
    model = ModelConfig(n_layer=1, n_head=4, n_embd=32, block_size=16, bias=bias)
    position = make("tupe", model).position
    assert (position.norm.bias is not None) == bias
    assert torch.equal(position.norm.weight, torch.ones(32)) and (not bias or not position.norm.bias.any())


# All of them


@pytest.mark.parametrize("name", ["alibi", "kerple", "kerple_power", "t5"])
def test_consecutive_ids_take_the_law_once_a_distance(name, fresh):
    """Values and gradients are those of the law at each pair; wherever the ids start, with cached keys too."""
    options = {"slopes": "learned"} if name == "alibi" else {}
    position = scheme(name, fresh, **options)
    heads = torch.arange(4).view(-1, 1, 1)
    for start, Tq, Tk in ((0, 40, 40), (1000, 40, 40), (7, 1, 40), (0, 13, 40), (3, 1, 1)):
        k_pos = torch.arange(start, start + Tk)
        q_pos = k_pos[Tk - Tq :]
        weight = torch.randn(4, Tq, Tk, generator=fresh)
        weight[:, q_pos.unsqueeze(-1) < k_pos] = 0  # the future is masked
        found = []
        for slow in (False, True):
            position.zero_grad()
            bias = position.dense(q_pos, k_pos)
            if slow:
                bias = position.pair(heads, q_pos.view(1, -1, 1), k_pos.view(1, 1, -1))
            (bias * weight).sum().backward()
            found.append((bias.detach() * (weight != 0), [p.grad.clone() for p in position.parameters()]))
        torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", BIASED)
def test_a_bias_is_no_causal_mask(name, fresh):
    """C55: biases of future keys are finite and would be attended to; the mask forbids them."""
    position, pos = scheme(name, fresh), torch.arange(20)
    bias = position.dense(pos, pos)
    future = torch.ones(20, 20, dtype=torch.bool).triu(1)
    assert bias.isfinite().all()
    assert (bias.softmax(-1)[:, future] > 0).all()
    mask = prepare(position, pos, pos).masks[Kind()]
    assert (mask[:, future] == -math.inf).all() and torch.equal(mask[:, ~future], bias[:, ~future])


@pytest.mark.parametrize("name", BIASED)
def test_one_row_of_bias_decodes_what_a_full_forward_computes(name, fresh):
    """C50: a bias on distances goes with a cache: at each step one row of it, for the new query."""
    model = excite(make(name), fresh, std=0.1)
    x, cache, parts = ids((2, 16), fresh), Cache(2), []
    rows = []
    dense = model.position.dense
    model.position.dense = lambda q, k: rows.append((len(q), len(k))) or dense(q, k)
    with torch.no_grad():
        for t in range(16):
            parts.append(model(x[:, t : t + 1], cache=cache)[0])
        assert rows == [(1, t + 1) for t in range(16)]
        torch.testing.assert_close(torch.cat(parts, dim=1), model(x)[0], atol=1e-5, rtol=1e-5)


def test_only_a_rolling_cache_renumbers_absolute_positions(fresh):
    """C51: tokens that are appended keep their numbers, absolute or not. Where old tokens are dropped, the ones that
    stay may keep their numbers with a relative scheme; with an absolute one the numbers are part of what they are."""
    x = ids((2, 12), fresh)
    for name, same in (("learned", False), ("tupe", False), ("alibi", True), ("t5", True), ("kerple", True)):
        model = excite(make(name), fresh)
        with torch.no_grad():
            cache = Cache(2)
            appended = torch.cat([model(x[:, :8], cache=cache)[0], model(x[:, 8:], cache=cache)[0]], dim=1)
            torch.testing.assert_close(appended, model(x)[0], atol=2e-4, rtol=2e-4)
            kept, renumbered = model(x[:, 4:], offset=4)[0], model(x[:, 4:])[0]
        assert torch.allclose(kept, renumbered, atol=1e-3) == same
