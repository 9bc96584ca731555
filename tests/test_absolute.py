"""Absolute schemes at the embedding: exact values, counts, options, refusals, and what is claimed about them.

Claims have numbers (C05 ...); a claim that is false has a test that it is.
"""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpt.attention import Kind
from gpt.cache import Cache
from gpt.cli import compose
from gpt.config import load
from gpt.errors import ConfigError, LengthError
from gpt.model import GPT, Block
from gpt.position import SCHEMES, build_position
from gpt.position.binary import bits_of
from gpt.position.sinusoidal import encoding
from gpt.position.table import lookup
from gpt.schema import ModelConfig, build
from tests.helpers import SMALL, as_written, excite, ids, make

ABSOLUTE = ("learned", "sinusoidal", "raw_index", "normalized_index", "binary", "concat", "concat_sinusoidal")
GPT2 = ModelConfig(n_layer=12, n_head=12, n_embd=768, block_size=1024, bias=True)
L = SMALL.block_size


def codes(n: int, width: int, base: float = 10000.0) -> torch.Tensor:
    """PE(0) .. PE(n - 1) in float64."""
    return encoding(torch.arange(n, dtype=torch.float64), width, base)


def added(model: GPT, pos: torch.Tensor) -> torch.Tensor:
    """(T, D): what the scheme adds to an embedding of zeros."""
    with torch.no_grad():
        return model.position.embed(torch.zeros(1, len(pos), model.config.n_embd), pos)[0]


def parameters(name: str, model: ModelConfig, **options) -> int:
    with torch.device("meta"):
        position = build_position(SCHEMES[name].Config(**as_written(name) | options), model)
    return sum(p.numel() for p in position.parameters())


@pytest.mark.parametrize(
    "name, options, count",
    [
        ("learned", {}, 786_432),
        ("learned", {"randomized": 4}, 4 * 786_432),
        ("sinusoidal", {}, 1),
        ("sinusoidal", {"scale": "fixed"}, 0),
        ("sinusoidal", {"functions": "sin"}, 1),
        ("raw_index", {}, 768),
        ("normalized_index", {}, 768),
        ("binary", {}, 16 * 768),
        ("binary", {"bits": 10, "signed": True}, 7_680),
        ("binary", {"projected": False}, 0),
        ("concat", {}, 786_432 + 2 * 768**2),
        ("concat_sinusoidal", {}, 1_179_648),
    ],
)
def test_parameters_at_gpt2(name, options, count):
    assert parameters(name, GPT2, **options) == count


# The laws hold for the options too; the schemes as their files say them are under all laws in test_laws.py.

OPTIONS = [
    ("learned", {"overflow": "clamp"}),
    ("learned", {"overflow": "wrap"}),
    ("sinusoidal", {"scale": "fixed"}),
    ("sinusoidal", {"functions": "sin"}),
    ("binary", {"signed": True}),
    ("binary", {"projected": False}),
    ("binary", {"projected": False, "signed": True}),
    ("concat", {"overflow": "clamp"}),
    ("concat", {"overflow": "wrap"}),
]


@pytest.mark.parametrize("name, options", OPTIONS)
def test_options_keep_the_laws(name, options, fresh):
    """Up to 4 L: causal, the prefix law, cached = uncached, alive, absolute, every parameter trained."""
    model = excite(make(name, **options), fresh)
    x = ids((2, 4 * L), fresh)
    other = x.clone()
    other[:, 20] = (other[:, 20] + 1) % model.vocab_size
    order = torch.cat((torch.arange(L - 1).flip(0), torch.tensor([L - 1])))
    with torch.no_grad():
        whole, changed, short = model(x)[0], model(other)[0], model(x[:, :L])[0]
        cache = Cache(SMALL.n_layer)
        chunks = torch.cat([model(part, cache=cache)[0] for part in x.split([5, 1, 30, 28], dim=1)], dim=1)
        shuffled, there = model(x[:, :L][:, order])[0], model(x[:, :9], offset=3)[0]
    assert torch.equal(whole[:, :20], changed[:, :20]) and not torch.equal(whole[:, 20:], changed[:, 20:])
    torch.testing.assert_close(short, whole[:, :L], atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(chunks, whole, atol=2e-4, rtol=2e-4)
    assert (shuffled[:, -1] - short[:, -1]).abs().max() > 1e-3
    assert (there - whole[:, :9]).abs().max() > 1e-2
    model.train()(x[:, :L], x[:, 1 : L + 1])[1].backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize("name", ABSOLUTE)
def test_randomized(name, fresh):
    """Each scheme takes sorted random ids below 4 L, and longer texts are in their range."""
    model = excite(make(name, randomized=4), fresh, std=0.1)
    model.train()
    model.position.redraw("step 1")
    seen = []
    embed = model.position.embed
    model.position.embed = lambda x, pos: seen.append(pos) or embed(x, pos)
    model(ids((2, L), fresh), ids((2, L), fresh))[1].backward()
    assert seen[0][-1] >= L and seen[0][-1] < 4 * L and (seen[0].diff() > 0).all()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    model.eval()
    with torch.no_grad():
        assert model(ids((2, 4 * L), fresh))[0].isfinite().all()
        with pytest.raises(LengthError, match=f"position={name}: 65 tokens, its ids end at 63"):
            model(ids((2, 4 * L + 1), fresh))


REFUSED = [
    ("normalized_index", {"normalize_by": "current"}, "position.normalize_by: got 'current', allowed: train; by the"),
    ("normalized_index", {"normalize_by": "max"}, "position.normalize_by: got 'max', allowed: train | current"),
    ("binary", {"bits": 0}, "position.bits: got 0, allowed: a whole number >= 1 and <= 62"),
    ("binary", {"bits": 63}, "position.bits: got 63, allowed: a whole number >= 1 and <= 62"),
    ("binary", {"bits": 3}, "position.bits: got 3, allowed: at least 4, for training on 16 ids"),
    ("binary", {"bits": 6, "randomized": 8}, "position.bits: got 6, allowed: at least 7, for training on 128 ids"),
    ("binary", {"bits": 33, "projected": False}, "position.bits: got 33, allowed: at most model.n_embd=32 where"),
    ("binary", {"signed": 1}, "position.signed: got 1, allowed: true or false"),
    ("binary", {"projected": "no"}, "position.projected: got 'no', allowed: true or false"),
    ("learned", {"overflow": "extend"}, "position.overflow: got 'extend', allowed: error | clamp | wrap"),
    ("concat", {"overflow": "extend"}, "position.overflow: got 'extend', allowed: error | clamp | wrap"),
    ("concat", {"base": 10.0}, "position.base: there is no such key"),
    ("concat_sinusoidal", {"overflow": "clamp"}, "position.overflow: there is no such key"),
    ("concat_sinusoidal", {"base": 0.0}, "position.base: got 0.0, allowed: a number >= 1e-09 and <= 1e+12"),
    ("sinusoidal", {"base": -1.0}, "position.base: got -1.0, allowed: a number >= 1e-09 and <= 1e+12"),
    ("sinusoidal", {"functions": "cos"}, "position.functions: got 'cos', allowed: both | sin"),
    ("sinusoidal", {"scale": "none"}, "position.scale: got 'none', allowed: learned | fixed"),
    ("raw_index", {"normalize_by": "train"}, "position.normalize_by: there is no such key"),
]


@pytest.mark.parametrize("name, options, message", REFUSED)
def test_wrong_values_are_one_line_that_names_the_key(name, options, message):
    with pytest.raises(ConfigError) as error:
        build(SCHEMES[name].Config, as_written(name) | options, "position").check(SMALL)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["sinusoidal", "concat_sinusoidal"])
def test_odd_widths_are_refused(name):
    with pytest.raises(ConfigError, match="model.n_embd: got 5, allowed: an even width"):
        SCHEMES[name].Config(name=name).check(ModelConfig(n_layer=1, n_head=1, n_embd=5))


@pytest.mark.parametrize("name", ABSOLUTE)
def test_a_layer_pattern_means_nothing_at_the_embedding(name):
    with pytest.raises(ConfigError, match="position.layers: got 'PN', allowed: P"):
        load(compose("train", [f"position={name}", "position.layers=PN"]))


# raw_index


def test_c05_raw_index_has_no_bound_and_swamps_the_token(fresh):
    """C05: at 999 the code is 999 times that at 1, and LayerNorm leaves nothing of the token; but nothing explodes.

    Behind LayerNorm the norm is bounded, the direction's gradient stays, and the token's vanishes as 1/i.
    """
    model = make("raw_index", ModelConfig(n_layer=1, n_head=4, n_embd=128, block_size=64))
    w = model.position.direction.detach().double()
    code = added(model, torch.arange(10_000)).double()
    norms = code.norm(dim=1)
    torch.testing.assert_close(norms, torch.arange(10_000).double() * w.norm(), atol=1e-6, rtol=1e-5)
    assert float(norms[999] / norms[1]) == pytest.approx(999, rel=1e-5)

    a, b = 0.02 * torch.randn(2, 128, generator=fresh, dtype=torch.float64)
    similar, token_gradients, direction_gradients = [], [], []
    for i in (1, 10, 100, 1000, 10_000):
        token, direction = a.clone().requires_grad_(), w.clone().requires_grad_()
        y = F.layer_norm(token + i * direction, (128,))
        assert y.norm() <= math.sqrt(128)
        similar.append(float(F.cosine_similarity(y.detach(), F.layer_norm(b + i * w, (128,)), dim=0)))
        (y * torch.linspace(-1, 1, 128)).sum().backward()
        token_gradients.append(float(token.grad.norm()))
        direction_gradients.append(float(direction.grad.norm()))
    assert similar == sorted(similar) and similar[-1] > 1 - 1e-6
    assert token_gradients[-2] / token_gradients[-1] == pytest.approx(10, rel=0.01)
    assert max(direction_gradients[2:]) < 1.1 * min(direction_gradients[2:])


def test_raw_index_in_the_direction_one_is_nope(fresh):
    """i added to every channel is taken out by LayerNorm, whatever i is."""
    model = excite(make("raw_index"), torch.Generator().manual_seed(1)).double()
    nope = excite(make("nope"), torch.Generator().manual_seed(1)).double()
    nope.load_state_dict(model.state_dict(), strict=False)
    x = ids((2, 4 * L), fresh)
    with torch.no_grad():
        assert (model(x)[0] - nope(x)[0]).abs().max() > 1e-2
        model.position.direction.fill_(1)
        torch.testing.assert_close(model(x)[0], nope(x)[0], atol=1e-9, rtol=0)


# normalized_index


def test_normalized_index_is_the_share_of_the_training_length():
    number = make("normalized_index", ModelConfig(n_layer=1, n_embd=32, block_size=512)).position.number
    assert float(number(torch.tensor(1))) == pytest.approx(1 / 512)
    assert number(torch.arange(512)).max() < 1 and float(number(torch.tensor(512))) == 1
    randomized = make("normalized_index", randomized=8).position
    assert float(randomized.number(torch.tensor(8 * L - 1))) == pytest.approx(8 - 1 / L)  # may exceed 1 in training


def test_c06_dividing_by_the_current_length_breaks_the_prefix_law(fresh):
    """C06: the same position gets another code in another text: 1/512 = 0.00195, 1/1024 = 0.00098.

    So the first 64 logits change with what follows, and a cache gives other logits than a whole forward.
    """

    def by_current(pos):
        return pos / (pos[-1] + 1)

    assert [round(float(by_current(torch.arange(T))[1]), 5) for T in (512, 1024)] == [0.00195, 0.00098]
    model = excite(make("normalized_index", ModelConfig(n_layer=2, n_head=4, n_embd=32, block_size=64)), fresh)
    x = ids((2, 128), fresh)
    changes, cached = [], []
    for number in (model.position.number, by_current):
        model.position.number = number
        cache = Cache(2)
        with torch.no_grad():
            long, short = model(x)[0], model(x[:, :64])[0]
            one_by_one = torch.cat([model(part, cache=cache)[0] for part in x[:, :64].split(16, dim=1)], dim=1)
        changes.append(float((long[:, :64] - short).abs().max()))
        cached.append(float((one_by_one - short).abs().max()))
    assert changes[0] < 1e-3 < 1e-2 < changes[1] and cached[0] < 1e-3 < 1e-2 < cached[1]


# binary


def test_binary_codes():
    assert bits_of(torch.tensor([0, 1, 2, 6, 13]), 4).tolist() == [
        [0, 0, 0, 0],
        [1, 0, 0, 0],
        [0, 1, 0, 0],
        [0, 1, 1, 0],
        [1, 0, 1, 1],
    ]
    far = [12_345, 2**40 + 5, 2**62 - 1]
    found = bits_of(torch.tensor(far), 62)
    assert [sum(int(bit) << k for k, bit in enumerate(row)) for row in found] == far


def test_c07_bit_k_flips_every_two_to_the_k():
    """C07: a binary counter."""
    bits = bits_of(torch.arange(256), 8)
    for k in range(8):
        flips = (bits[1:, k] != bits[:-1, k]).nonzero().flatten() + 1
        assert flips.tolist() == list(range(2**k, 256, 2**k))


@pytest.mark.parametrize("length", [16, 24])
def test_c07_past_the_training_length_a_bit_is_set_that_never_was(length, fresh):
    """C07: from 2^ceil(log2 L) on; the rows of such bits get no gradient (signed: see one sign only)."""
    first = math.ceil(math.log2(length))
    trained = bits_of(torch.arange(length), 16)
    assert trained[:, first:].sum() == 0 and (trained[:, :first].sum(0) > 0).all()
    assert bits_of(torch.tensor([2**first]), 16)[0, first] == 1
    model = make("binary", ModelConfig(n_layer=1, n_head=4, n_embd=32, block_size=length)).train()
    model(ids((2, length), fresh), ids((2, length), fresh))[1].backward()
    moved = model.position.weight.grad.abs().sum(1) > 0
    assert moved.tolist() == [k < first for k in range(16)]


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("projected", [False, True])
def test_binary_places_its_bits(signed, projected):
    model = make("binary", bits=6, signed=signed, projected=projected)
    weight = model.position.weight.detach() if projected else 32**-0.5 * torch.eye(6, 32)
    found = added(model, torch.arange(40))
    for i in range(40):
        digits = [float(b) for b in reversed(f"{i:06b}")]
        digits = [2 * b - 1 for b in digits] if signed else digits
        expected = sum(digit * row for digit, row in zip(digits, weight, strict=True))
        torch.testing.assert_close(found[i], expected, atol=1e-6, rtol=1e-5)


def test_binary_ends_with_its_bits(fresh):
    model = make("binary", bits=5)
    model(ids((1, 32), fresh))
    with pytest.raises(LengthError, match="position=binary: 33 tokens, its ids end at 31"):
        model(ids((1, 33), fresh))


# sinusoidal


def test_encoding_is_the_formula(fresh):
    """Number by number with Python's own sine; float32 ids give float32, far out too."""
    far = torch.randint(0, 10_000, (50,), generator=fresh)
    for width, base in ((6, 100.0), (64, 10000.0)):
        exact, sines = (encoding(far.double(), width, base, functions) for functions in ("both", "sin"))
        for row, i in enumerate(far.tolist()):
            for r in range(width // 2):
                angle = i * base ** (-2 * r / width)
                assert float(exact[row, 2 * r]) == pytest.approx(math.sin(angle), abs=1e-9)
                assert float(exact[row, 2 * r + 1]) == pytest.approx(math.cos(angle), abs=1e-9)
            for r in range(width):
                assert float(sines[row, r]) == pytest.approx(math.sin(i * base ** (-r / width)), abs=1e-9)
        assert encoding(far, width, base).dtype == torch.float32
        torch.testing.assert_close(encoding(far, width, base).double(), exact, atol=5e-3, rtol=0)


def test_c08_sinusoidal_table():
    """C08: sin(pos/10000^(2i/d)) at 2i, the cosine at 2i + 1."""
    expected = [
        [0, 1, 0, 1, 0, 1, 0, 1],
        [0.841471, 0.540302, 0.099833, 0.995004, 0.01, 0.99995, 0.001, 1.0],
        [0.909297, -0.416147, 0.198669, 0.980067, 0.019999, 0.9998, 0.002, 0.999998],
    ]
    torch.testing.assert_close(encoding(torch.arange(3), 8, 10000.0), torch.tensor(expected), atol=1e-6, rtol=0)


def test_c09_frequencies_and_wavelengths():
    """C09: at d = 8 the frequencies are 1, 0.1, 0.01, 0.001, the wavelengths 6.28, 62.8, 628, 6283."""
    slope = encoding(torch.tensor([1e-7], dtype=torch.float64), 8, 10000.0)[0, 0::2] / 1e-7
    torch.testing.assert_close(slope, torch.tensor([1, 0.1, 0.01, 0.001], dtype=torch.float64), atol=0, rtol=1e-9)
    for r, wavelength in enumerate((6.2832, 62.832, 628.32, 6283.2)):
        turn = encoding(torch.tensor([0, wavelength, wavelength / 2], dtype=torch.float64), 8, 10000.0)
        assert (turn[1] - turn[0])[2 * r : 2 * r + 2].abs().max() < 1e-4  # a whole turn, not half of one
        assert float(turn[2, 2 * r + 1]) == pytest.approx(-1, abs=1e-6)


def test_c10_low_channels_are_fast_high_channels_slow():
    """C10: the sines' changes of sign over 4,096 positions fall from pair to pair."""
    sines = codes(4096, 16)[1:, 0::2]
    flips = (sines[1:].sign() != sines[:-1].sign()).sum(0).tolist()
    assert flips == sorted(flips, reverse=True) and len(set(flips)) == 8


@pytest.mark.parametrize("width, wavelength", [(8, 6283), (64, 47117), (128, 54410), (512, 60611), (768, 61343)])
def test_c11_the_longest_wavelength_is_not_quite_two_pi_base(width, wavelength):
    """C11: misstated; it is 2 pi 10000^((d-2)/d), which tends to 62,832."""
    last = encoding(torch.tensor([1.0], dtype=torch.float64), width, 10000.0)[0, -2:]
    found = 2 * math.pi / math.atan2(float(last[0]), float(last[1]))
    assert found == pytest.approx(wavelength, abs=0.5) and found < 62832


@pytest.mark.parametrize("width, product", [(8, 2.563718), (512, 231.733620), (768, 347.959012)])
def test_c12_equal_distances_have_equal_products(width, product):
    """C12: PE(3).PE(5) = PE(10).PE(12) = PE(100).PE(102)."""
    code = codes(128, width)
    for a, b in ((3, 5), (10, 12), (100, 102)):
        assert float(code[a] @ code[b]) == pytest.approx(product, abs=1e-6)


def test_c13_products_depend_on_the_difference(fresh):
    """C13: for any m, n and shift c."""
    m, n, c = torch.randint(0, 3000, (3, 100), generator=fresh)
    code = codes(6000, 64)
    found, expected = (code[m + c] * code[n + c]).sum(1), (code[m] * code[n]).sum(1)
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize("width, norm", [(768, 19.595918), (64, math.sqrt(32))])
def test_c14_all_codes_have_the_norm_sqrt_of_half_the_width(width, norm):
    """C14: 19.595918 at d = 768."""
    norms = codes(500, width).norm(dim=1)
    torch.testing.assert_close(norms, torch.full_like(norms, norm), atol=1e-6, rtol=0)


def test_c15_a_step_is_a_rotation_that_does_not_depend_on_the_place(fresh):
    """C15: PE(i + k) = M_k PE(i), M_k orthogonal; least squares finds such a map to 1e-12."""
    width, code = 16, codes(2001, 16)
    k = int(torch.randint(1, 900, (1,), generator=fresh))
    blocks = []
    for r in range(width // 2):
        angle = k * 10000.0 ** (-2 * r / width)
        blocks.append([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]])
    M = torch.block_diag(*(torch.tensor(block, dtype=torch.float64) for block in blocks))
    torch.testing.assert_close(M.T @ M, torch.eye(width, dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close(code[: 2001 - k] @ M.T, code[k:], atol=1e-10, rtol=0)
    assert step_error(code[:2000]) < 1e-11


def step_error(code: torch.Tensor) -> float:
    """The largest error of the best linear map from each row to the next."""
    step = torch.linalg.lstsq(code[:-1], code[1:], driver="gelsd").solution
    return float((code[:-1] @ step - code[1:]).abs().max())


def test_c16_sines_alone_have_no_such_map():
    """C16: the best linear step over 2,000 positions at d = 16 is wrong by 0.85 somewhere."""
    alone = encoding(torch.arange(2000, dtype=torch.float64), 16, 10000.0, "sin")
    assert step_error(alone) == pytest.approx(0.85, abs=0.01)
    assert step_error(codes(2000, 16)) < 1e-11
    norms = alone.norm(dim=1)
    assert norms.max() - norms.min() > 1  # nor one norm


def test_c17_one_clock():
    """C17: at 2 pi / 10 a position, m + 10 is m again; at pi / 4, positions two apart are orthogonal."""
    tenth = encoding(torch.arange(40, dtype=torch.float64) * (2 * math.pi / 10), 2, 10000.0)
    torch.testing.assert_close(tenth[10:], tenth[:-10], atol=1e-12, rtol=0)
    half = math.sqrt(0.5)
    table = [[0, 1], [half, half], [1, 0], [half, -half], [0, -1], [-half, -half], [-1, 0], [-half, half]]
    eighth = encoding(torch.arange(8, dtype=torch.float64) * (math.pi / 4), 2, 10000.0)
    torch.testing.assert_close(eighth, torch.tensor(table, dtype=torch.float64), atol=1e-12, rtol=0)
    assert abs(float(eighth[0] @ eighth[2])) < 1e-12 and abs(float(eighth[1] @ eighth[3])) < 1e-12


def test_c18_many_clocks_keep_positions_apart():
    """C18: 4,096 codes differ in float32, even after rounding to bfloat16; positions in bfloat16 collide past 256."""
    pos = torch.arange(4096)
    for width in (8, 64):
        code = encoding(pos, width, 10000.0)
        assert len(code.unique(dim=0)) == 4096 == len(code.bfloat16().float().unique(dim=0))
        nearest = torch.cdist(code[:1024].double(), code[:1024].double()).fill_diagonal_(9).min()
        assert nearest > 1e-3
    rounded = encoding(pos.bfloat16().float(), 64, 10000.0)
    assert torch.equal(rounded[256], rounded[257]) and len(rounded.unique(dim=0)) == 256 + 4 * 128 + 1


def kappa(distance: torch.Tensor, width: int) -> torch.Tensor:
    """(2/d) PE(0).PE(distance) in float64."""
    code = encoding(torch.cat((torch.zeros(1, dtype=torch.float64), distance.double())), width, 10000.0)
    return code[1:] @ code[0] * (2 / width)


def test_c19_similarity_oscillates_as_distance_grows():
    """C19: kappa(0) = 1, neither monotone (it first rises at 43, and 902 times below 2,048) nor tending to 0."""
    near = kappa(torch.tensor([0, 1, 10, 100, 1000, 10_000]), 768).tolist()
    assert near == pytest.approx([1, 0.9734, 0.6800, 0.4369, 0.1623, -0.0543], abs=5e-5)
    rises = kappa(torch.arange(2048), 768).diff() > 0
    assert int(rises.nonzero()[0]) == 43 and int(rises.sum()) == 902


def test_c20_similarity_tends_to_an_integral():
    """C20: of cos(distance b^-t) over t in [0, 1], for wide codes; at d = 64 it is off by 0.2."""
    t = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    rate = 10000.0**-t

    def integral(distance):
        return float((distance * rate).cos().mean())

    found = [integral(distance) for distance in (1, 10, 100, 1000)]
    assert found == pytest.approx([0.9740, 0.6824, 0.4368, 0.1877], abs=1e-4)
    exact = torch.tensor([integral(distance) for distance in range(513)], dtype=torch.float64)
    for width, error in ((768, 0.020), (512, 0.037), (128, 0.128), (64, 0.205)):
        found = float((kappa(torch.arange(513), width) - exact).abs().max())
        assert found == pytest.approx(error, abs=6e-4)


def test_c21_a_trained_score_does_not_depend_on_the_difference_alone(fresh):
    """C21: PE(m) A PE(m + 2) differs from m to m for a general A, as of queries and keys; for A = I it does not."""
    code = codes(100, 64)
    A = torch.randn(64, 64, generator=fresh, dtype=torch.float64)

    def spread(A):
        return float(torch.einsum("md,de,me->m", code[:-2], A, code[2:]).std())

    assert spread(torch.eye(64, dtype=torch.float64)) < 1e-10 and spread(A) > 1


@pytest.mark.parametrize("width", [128, 768])
def test_sinusoidal_does_not_drown_the_embeddings(width):
    """At amplitude 1 the codes are sqrt(width) times as long as here."""
    config = ModelConfig(n_layer=1, n_head=4, n_embd=width, block_size=64)
    model = make("sinusoidal", config)
    code = added(model, torch.arange(64)).norm(dim=-1).mean().item()
    token = model.wte.weight.norm(dim=-1).mean().item()
    assert code == pytest.approx(math.sqrt(0.5), abs=1e-3) and code < 4 * token
    fixed = make("sinusoidal", config, scale="fixed")
    assert not list(fixed.position.parameters())
    assert added(fixed, torch.arange(64)).norm(dim=-1).mean().item() == pytest.approx(code)


@pytest.mark.parametrize("functions", ["both", "sin"])
def test_sinusoidal_adds_what_its_options_say(functions):
    model = make("sinusoidal", functions=functions, base=50.0)
    expected = encoding(torch.arange(2 * L), 32, 50.0, functions) * 32**-0.5
    torch.testing.assert_close(added(model, torch.arange(2 * L)), expected)


# token and position together


def test_c22_a_score_of_sums_has_four_terms(fresh):
    """C22: content-content, content-position, position-content, position-position: exact on e + p.

    Behind LayerNorm it is not, but it is again once the sum's own mean and deviation are folded out.
    """
    model = excite(make("learned"), fresh).double()
    D = SMALL.n_embd
    e = model.wte.weight[ids((L,), fresh)].detach()
    p = model.position.table.detach()
    block = model.h[0]
    q, k, _ = block.attn.c_attn.weight.detach().split(D)

    def score(a, b):
        return (a @ q.T) @ (b @ k.T).T

    four = score(e, e) + score(e, p) + score(p, e) + score(p, p)
    torch.testing.assert_close(score(e + p, e + p), four, atol=1e-9, rtol=1e-12)

    with torch.no_grad():
        e_n, p_n, x_n = (block.ln_1(x) for x in (e, p, e + p))
    assert (score(e_n + p_n, e_n + p_n) - score(x_n, x_n)).abs().max() > 1e-2
    deviation = ((e + p).var(dim=-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    e_f, p_f = ((x - x.mean(-1, keepdim=True)) / deviation * block.ln_1.weight.detach() for x in (e, p))
    four = score(e_f, e_f) + score(e_f, p_f) + score(p_f, e_f) + score(p_f, p_f)
    torch.testing.assert_close(score(x_n, x_n), four, atol=1e-9, rtol=1e-9)


def test_c24_random_directions_are_nearly_orthogonal(fresh):
    """C24: products of random unit vectors in 768 dimensions: mean 0, std 0.0361, mean size 0.0288, 73% below 0.04."""
    x = F.normalize(torch.randn(1500, 768, generator=fresh, dtype=torch.float64), dim=1)
    products = (x @ x.T)[torch.ones(1500, 1500, dtype=torch.bool).triu(1)]
    assert abs(float(products.mean())) < 1e-3
    assert float(products.std()) == pytest.approx(0.03608, abs=2e-4)
    assert float(products.abs().mean()) == pytest.approx(0.02879, abs=2e-4)
    assert float((products.abs() < 0.04).double().mean()) == pytest.approx(0.73, abs=0.005)


def test_c25_positions_are_not_orthogonal_among_themselves():
    """C25, what needs no training: neighbours of the sinusoidal table point almost the same way."""
    code = encoding(torch.arange(2.0, dtype=torch.float64), 768, 10000.0)
    assert float(F.cosine_similarity(code[0], code[1], dim=0)) == pytest.approx(0.973, abs=5e-4)


def test_c26_concatenation_does_not_double_the_model():
    """C26: false. A stream twice as wide makes the blocks 4 times as large; widening the first projection alone costs
    3 d^2; the scheme here, which returns to width d, costs 2 d^2."""

    def blocks(width):
        with torch.device("meta"):
            block = Block(ModelConfig(n_layer=12, n_head=12, n_embd=width, bias=True), 0, Kind())
        return 12 * sum(p.numel() for p in block.parameters())

    assert (blocks(768), blocks(1536)) == (85_054_464, 339_978_240)
    assert blocks(1536) / blocks(768) == pytest.approx(3.997, abs=5e-4)
    with torch.device("meta"):
        wide, narrow = nn.Linear(2 * 768, 3 * 768), nn.Linear(768, 3 * 768)
    assert wide.weight.numel() - narrow.weight.numel() == 1_769_472
    assert parameters("concat_sinusoidal", GPT2) == 1_179_648


def test_c27_addition_costs_nothing_besides_the_table():
    """C27: a learned table's model has L d parameters more than nope's, one with fixed sinusoids none."""
    count = {
        name: sum(p.numel() for p in make(name, **options).parameters())
        for name, options in (("nope", {}), ("learned", {}), ("sinusoidal", {"scale": "fixed"}))
    }
    assert count["learned"] - count["nope"] == SMALL.block_size * SMALL.n_embd
    assert count["sinusoidal"] == count["nope"]


@pytest.mark.parametrize(
    "name, plain, options", [("concat", "learned", {}), ("concat_sinusoidal", "sinusoidal", {"scale": "fixed"})]
)
def test_concatenation_starts_as_addition(name, plain, options, fresh):
    """To the bit, at the first block's input and at the logits."""
    x = ids((2, L), fresh)
    seed = int(torch.randint(0, 1000, (1,), generator=fresh))
    concatenated, sum_of_both = make(name, seed=seed), make(plain, seed=seed, **options)
    with torch.no_grad():
        assert torch.equal(concatenated(x)[0], sum_of_both(x)[0])


@pytest.mark.parametrize("name", ["concat", "concat_sinusoidal"])
def test_concatenation_is_one_matrix_on_token_and_position(name, fresh):
    model = excite(make(name), fresh)
    x, pos = torch.randn(3, L, 32, generator=fresh), torch.arange(L)
    code = model.position.table if name == "concat" else 32**-0.5 * encoding(pos, 32, 10000.0)
    both = torch.cat((x, code.expand(3, L, 32)), dim=-1)
    torch.testing.assert_close(model.position.embed(x, pos), both @ model.position.mix.T, atol=1e-5, rtol=1e-5)


def test_c28_concatenation_can_do_what_addition_cannot(fresh):
    """C28: false that they are equal. A sum is the same when two vectors change places; W [token; position] is not.

    Conversely each sum is W [token; position] with W = [I | I] (above). But both folded into tables of their own,
    E W_t and P W_p, concatenation is addition again.
    """
    model = excite(make("concat"), fresh)
    a, b = torch.randn(2, 32, generator=fresh)
    with torch.no_grad():
        model.position.table[0], model.position.table[1] = b, a
        here = model.position.embed(a.view(1, 1, -1), torch.tensor([0]))  # a at the place whose vector is b
        there = model.position.embed(b.view(1, 1, -1), torch.tensor([1]))
        assert torch.equal(a + model.position.table[0], b + model.position.table[1])
        assert (here - there).abs().max() > 1e-2
        folded = make("learned")
        folded.wte.weight.copy_(model.wte.weight @ model.position.mix[:, :32].T)
        folded.position.table.copy_(model.position.table @ model.position.mix[:, 32:].T)
        x, pos = ids((2, L), fresh), torch.arange(L)
        torch.testing.assert_close(
            folded.position.embed(folded.wte(x), pos), model.position.embed(model.wte(x), pos), atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize("name", [name for name in ABSOLUTE if "concat" not in name])
def test_c29_a_shift_is_the_same_for_all_words(name, fresh):
    """C29: (e + p5) - (e + p0) = p5 - p0."""
    model = excite(make(name), fresh).double()
    words = torch.randn(7, 1, 32, generator=fresh, dtype=torch.float64)
    with torch.no_grad():
        shift = model.position.embed(words, torch.tensor([5])) - model.position.embed(words, torch.tensor([0]))
    torch.testing.assert_close(shift, shift[:1].expand_as(shift), atol=1e-12, rtol=0)


def test_c30_a_shift_depends_on_more_than_the_difference():
    """C30: false; p5 - p0 and p10 - p5 at d = 768 are 23.45 apart with norms 14.10 and cosine -0.38."""
    code = codes(11, 768)
    first, second = code[5] - code[0], code[10] - code[5]
    assert float((first - second).norm()) == pytest.approx(23.45, abs=5e-3)
    assert float(first.norm()) == pytest.approx(14.10, abs=5e-3) == float(second.norm())
    assert float(F.cosine_similarity(first, second, dim=0)) == pytest.approx(-0.38, abs=5e-3)


# learned, and the table of concat


@pytest.mark.parametrize("length, width, count", [(1024, 768, 786_432), (16, 16, 256)])
def test_c32_a_table_has_a_number_for_each_position_and_channel(length, width, count):
    """C32: learned L d, sinusoids 0; a model of 16 positions and 16 channels 256."""
    model = ModelConfig(n_layer=1, n_head=4, n_embd=width, block_size=length)
    assert parameters("learned", model) == count
    assert parameters("sinusoidal", model, scale="fixed") == 0


@pytest.mark.parametrize("name", ["learned", "concat"])
def test_c33_past_the_table_there_is_no_row(name, fresh):
    """C33: a plain embedding raises IndexError; here the model says it before any kernel runs."""
    with pytest.raises(IndexError):
        nn.Embedding(16, 4)(torch.tensor([16]))
    model = make(name)
    model(ids((1, 16), fresh))
    with pytest.raises(LengthError, match=f"position={name}: 17 tokens, its table has 16 rows"):
        model(ids((1, 17), fresh))


@pytest.mark.parametrize("name", ["learned", "concat"])
def test_c33_overflow_policies(name):
    """C33: with a policy the table can be read on; inside it nothing changes."""
    table = torch.arange(4.0).unsqueeze(1) * torch.tensor([1.0, 10.0])
    found = {}
    for policy in ("clamp", "wrap", "interpolate"):
        model = make(name, ModelConfig(n_layer=1, n_head=1, n_embd=2, block_size=4), overflow=policy)
        with torch.no_grad():
            model.position.table.copy_(table)
        assert model.position.max_len is None
        assert torch.equal(added(model, torch.arange(4)), table)
        found[policy] = added(model, torch.arange(8))[:, 0].tolist()
    assert found["clamp"] == [0, 1, 2, 3, 3, 3, 3, 3]
    assert found["wrap"] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert found["interpolate"] == [0, 0.5, 1, 1.5, 2, 2.5, 3, 3]


def test_interpolation_is_linear_between_rows(fresh):
    """Position i of T lies at i rows / T, for T that is no multiple of the rows too."""
    table = torch.randn(7, 3, generator=fresh, dtype=torch.float64)
    for T in (8, 13, 29):
        found = lookup(table, torch.arange(T), "interpolate")
        for i in range(T):
            place = min(i * 7 / T, 6)
            low = min(math.floor(place + 1e-9), 5)
            expected = table[low] + (place - low) * (table[low + 1] - table[low])
            torch.testing.assert_close(found[i], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["learned", "concat"])
def test_interpolation_refuses_a_cache_it_would_invalidate(name, fresh):
    model = make(name, overflow="interpolate")
    cache = Cache(SMALL.n_layer)
    with torch.no_grad(), pytest.raises(LengthError, match=f"{name}: tokens move as the text grows; go without"):
        model(ids((1, 16), fresh), cache=cache)


# precision


@pytest.mark.parametrize("name", ABSOLUTE)
def test_autocast_leaves_the_first_blocks_input_exact(name, fresh):
    """The residual stream begins in float32 there, with the very numbers it has without autocast."""
    config = ModelConfig(n_layer=1, n_head=4, n_embd=32, block_size=4096)
    model = excite(make(name, config), fresh)
    pos = torch.tensor([0, 1, 257, 2049, 4001])
    x = torch.randn(2, 5, 32, generator=fresh)
    with torch.no_grad():
        plain = model.position.embed(x, pos)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mixed = model.position.embed(x, pos)
    assert mixed.dtype == torch.float32 and torch.equal(mixed, plain)
    for a, b in itertools.combinations(plain[0] - x[0], 2):
        assert not torch.equal(a, b)


@pytest.mark.parametrize("name", ["raw_index", "normalized_index"])
def test_ids_never_pass_through_bfloat16(name):
    """A converted model: 4,001 is 4,000 in bfloat16, the factor of the direction must not be."""
    position = make(name, ModelConfig(n_layer=1, n_head=4, n_embd=32, block_size=4096)).bfloat16().position
    found = position.number(torch.tensor([4000, 4001]))
    assert found.dtype == torch.float32 and found[0] < found[1]
    assert (
        position.embed(torch.zeros(1, 2, 32, dtype=torch.bfloat16), torch.tensor([4000, 4001])).dtype == torch.bfloat16
    )
