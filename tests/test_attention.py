"""Fast attention equals the definition, forward and gradient, and the definition equals a loop over the formula."""

import math

import pytest
import torch

from gpt.attention import Kind, Shared, TrainedMask, attend, prepare, visible
from gpt.position import SCHEMES
from gpt.schema import ModelConfig
from tests.helpers import SMALL, excite, ids, make


def qkv(shape, generator, dtype=torch.float32):
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for _ in range(3)]


def attend_reference(q, k, v, mask):
    """The definition under an additive mask of our own."""
    q_pos, k_pos = torch.arange(q.shape[2]), torch.arange(k.shape[2])
    model = ModelConfig(n_layer=1, n_head=q.shape[1], n_embd=q.shape[1] * q.shape[3], block_size=16)
    return attend(q, k, v, Shared(make("nope", model).position, None, q_pos, k_pos, {Kind(): mask}, "reference"))


def test_reference_is_the_formula(fresh):
    """Query by query, key by key, in float64."""
    B, H, T, d = 2, 4, 7, 5
    q, k, v = (t.detach() for t in qkv((B, H, T, d), fresh, torch.float64))
    bias = torch.randn(H, T, T, generator=fresh, dtype=torch.float64)
    causal = bias.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -math.inf)
    found = attend_reference(q, k, v, causal)
    for b in range(B):
        for h in range(H):
            for i in range(T):
                scores = [float(q[b, h, i] @ k[b, h, j]) / math.sqrt(d) + float(bias[h, i, j]) for j in range(i + 1)]
                total = sum(math.exp(s) for s in scores)
                expected = sum(math.exp(s) / total * v[b, h, j] for j, s in enumerate(scores))
                torch.testing.assert_close(found[b, h, i], expected)


@pytest.mark.parametrize("T", [1, 16, 129, 441])
@pytest.mark.parametrize("name", SCHEMES)
def test_sdpa_is_reference(name, T, fresh):
    """Forward, and gradients of queries, keys, values and the scheme's parameters."""
    model = ModelConfig(n_layer=2, n_head=4, n_embd=32, block_size=max(16, T))  # tables must reach
    scheme = excite(make(name, model), fresh).position
    pos = torch.arange(T)
    results = []
    inputs = qkv((2, 4, T, 8), fresh)
    weights = torch.randn(2, 4, T, 8, generator=fresh)
    for kernel in ("sdpa", "reference"):
        for tensor in (*inputs, *scheme.parameters()):
            tensor.grad = None
        shared = prepare(scheme, pos, pos, kernel)
        q, k = scheme.rotate(inputs[0], inputs[1], shared.ctx, 0)
        y = attend(q, k, inputs[2], shared)
        (y * weights).sum().backward()
        gradients = [t.grad.clone() for t in (*inputs, *scheme.parameters()) if t.grad is not None]
        assert y.isfinite().all() and all(g.isfinite().all() for g in gradients)
        results.append((y.detach(), gradients))
    (fast, fast_gradients), (slow, slow_gradients) = results
    torch.testing.assert_close(fast, slow, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(fast_gradients, slow_gradients, atol=1e-4, rtol=1e-3)


def test_long_odd_length_with_bias(fresh):
    """1,025 keys, no multiple of any kernel's block."""
    test_sdpa_is_reference("t5", 1025, fresh)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_is_reference(name, fresh):
    """FlexAttention calls the same law `pair`; with cached keys too."""
    if SCHEMES[name].explicit():
        pytest.skip("scores or weights depend on content: no fused kernel can serve it")
    scheme = excite(make(name), fresh).position
    for Tq, Tk in ((13, 13), (5, 13)):
        k_pos = torch.arange(Tk)
        q, _, _ = (t.detach() for t in qkv((2, 4, Tq, 8), fresh))
        _, k, v = (t.detach() for t in qkv((2, 4, Tk, 8), fresh))
        with torch.no_grad():
            found = [
                attend(q, k, v, prepare(scheme, k_pos[Tk - Tq :], k_pos, kernel)) for kernel in ("flex", "reference")
            ]
        torch.testing.assert_close(*found, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", [name for name, cls in SCHEMES.items() if cls.explicit()])
def test_flex_refuses_what_it_would_leave_out(name):
    with pytest.raises(NotImplementedError, match=f"flex: position={name} needs the scores"):
        prepare(make(name).position, torch.arange(4), torch.arange(4), "flex")


def test_gradient_of_a_trained_bias_by_finite_differences(fresh):
    """A fused kernel that forgets the gradient of its mask would leave T5 untrained."""
    scheme = excite(make("t5"), fresh).position.double()
    T = 16  # so far each distance has a bucket of its own
    pos = torch.arange(T)
    q, k, v = (t.detach() for t in qkv((1, 4, T, 8), fresh, torch.float64))

    def loss(table):
        bias = table[(pos.view(-1, 1) - pos).clamp(min=0)].permute(2, 0, 1)
        future = torch.ones(T, T, dtype=torch.bool).triu(1)
        return attend_reference(q, k, v, bias.masked_fill(future, -math.inf)).pow(2).sum()

    for kernel in ("sdpa", "reference"):
        scheme.bias.grad = None
        shared = prepare(scheme, pos, pos, kernel)
        shared.masks[Kind()] = shared.masks[Kind()].double()
        attend(q, k, v, shared).pow(2).sum().backward()
        row, head, h = 3, 2, 1e-5
        shift = torch.zeros_like(scheme.bias)
        shift[row, head] = h
        with torch.no_grad():
            slope = (loss(scheme.bias + shift) - loss(scheme.bias - shift)) / (2 * h)
        torch.testing.assert_close(scheme.bias.grad[row, head], slope, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("Tq, Tk, window", [(5, 5, None), (130, 130, None), (70, 200, None), (1, 9, None), (90, 90, 7)])
def test_trained_mask_is_the_formula(Tq, Tk, window, fresh):
    """The CPU's path for biases that are trained, in float64 against plain operations: output and every gradient."""
    q, k, v = (qkv((2, 3, *shape), fresh, torch.float64)[0] for shape in ((Tq, 4), (Tk, 4), (Tk, 6)))
    bias = torch.randn(3, Tq, Tk, generator=fresh, dtype=torch.float64).requires_grad_()
    weights = torch.randn(2, 3, Tq, 6, generator=fresh, dtype=torch.float64)
    found = []
    for fast in (True, False):
        mask = bias.masked_fill(~visible(Tq, Tk, window, q.device), -math.inf)
        if fast:
            y = TrainedMask.apply(q, k, v, mask, 0.3)
        else:
            y = torch.softmax(0.3 * q @ k.mT + mask, dim=-1) @ v
        found.append((y, torch.autograd.grad((y * weights).sum(), (q, k, v, bias))))
    torch.testing.assert_close(*found)


def test_trained_mask_leaves_no_subnormal_weights():
    """A steep bias would: products with them take a hundred times as long."""
    pos = torch.arange(300)
    mask = (-0.5 * (pos.view(-1, 1) - pos).float()).expand(1, -1, -1).clone().requires_grad_()
    zero = torch.zeros(1, 1, 300, 8, requires_grad=True)
    kept = TrainedMask.apply(zero, zero, zero, mask, 1.0).grad_fn.saved_tensors[5:]
    assert kept and all(((p == 0) | (p > 1e-20)).all() for p in kept) and any((p == 0).any() for p in kept)


def test_trained_masks_take_their_path_in_training_alone(fresh, monkeypatch):
    """On the CPU, where a bias needs a gradient; otherwise torch's kernel is as fast or knows more (dropout)."""
    calls = []
    apply = TrainedMask.apply
    monkeypatch.setattr(TrainedMask, "apply", lambda *a: calls.append(1) or apply(*a))
    q, k, v = (torch.randn(1, 4, 16, 8, generator=fresh) for _ in range(3))
    pos = torch.arange(16)
    for name, grad, dropout, used in (
        ("t5", True, 0.0, True),
        ("t5", False, 0.0, False),
        ("t5", True, 0.1, False),
        ("alibi", True, 0.0, False),
        ("learned", True, 0.0, False),
    ):
        calls.clear()
        with torch.set_grad_enabled(grad):
            attend(q, k, v, prepare(make(name).position, pos, pos), dropout=dropout)
        assert bool(calls) == used, name


def test_mask_is_bottom_right_aligned():
    """The last query sees every key: with 3 cached keys, query 0 sees keys 0..3."""
    found = prepare(make("nope").position, torch.arange(3, 5), torch.arange(5)).masks[Kind()]
    assert found.tolist() == [[[0, 0, 0, 0, -math.inf], [0, 0, 0, 0, 0]]]
    row = prepare(make("alibi").position, torch.tensor([4]), torch.arange(5)).masks[Kind()]
    assert row[0, 0].tolist() == [-1.0, -0.75, -0.5, -0.25, 0.0]


@pytest.mark.parametrize(
    "Tq, Tk, window", [(5, 5, 1), (5, 5, 2), (2, 5, 3), (1, 5, 4), (5, 5, 5), (5, 5, 9), (3, 3, None)]
)
def test_a_query_sees_its_window(Tq, Tk, window):
    """Itself and the window - 1 tokens before it, whatever is cached."""
    found = visible(Tq, Tk, window, torch.device("cpu"))
    for row in range(Tq):
        i = Tk - Tq + row
        assert found[row].tolist() == [j <= i and (window is None or i - j < window) for j in range(Tk)]


@pytest.mark.parametrize("name", ["alibi", "t5"])
def test_dense_bias_is_the_pointwise_law(name, fresh):
    scheme = excite(make(name), fresh).position
    q_pos, k_pos = torch.tensor([5, 9, 40]), torch.tensor([0, 3, 5, 9, 40])
    dense = scheme.dense(q_pos, k_pos)
    assert dense.shape == (4, 3, 5) and dense.dtype == torch.float32
    for h in range(4):
        for a, i in enumerate(q_pos):
            for b, j in enumerate(k_pos):
                assert dense[h, a, b] == scheme.pair(torch.tensor(h), i, j)


FAR = torch.arange(4096)


def low_precision(name):
    """A scheme converted to bfloat16, at 4,096 positions, prepared as the model does it under autocast."""
    scheme = make(name, ModelConfig(n_layer=1, n_head=4, n_embd=32, block_size=4096)).bfloat16().position
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        return scheme, prepare(scheme, FAR[4000:], FAR)


def test_alibi_stays_exact_in_low_precision():
    """Biases against float64: no distance or slope may pass through bfloat16, where 4,001 is 4,000."""
    _, shared = low_precision("alibi")
    distance = FAR[4000:].double().view(1, -1, 1) - FAR.double().view(1, 1, -1)
    exact = -torch.tensor([2.0**-2, 2**-4, 2**-6, 2**-8], dtype=torch.float64).view(-1, 1, 1) * distance
    found = shared.masks[Kind()]
    seen = (distance >= 0).expand_as(exact)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found[seen].double(), exact[seen], atol=0, rtol=1e-6)


def test_t5_stays_exact_in_low_precision():
    """The table itself is bfloat16 then; the bucket of each distance must not be."""
    scheme, shared = low_precision("t5")
    found = shared.masks[Kind()]
    for i, j in ((4000, 4000), (4095, 4080), (4090, 4003), (4001, 3901), (4095, 0)):
        bucket = max(b for b, start in enumerate(T5_STARTS) if start <= i - j)
        assert torch.equal(found[:, i - 4000, j], scheme.bias[bucket].float())


T5_STARTS = [*range(16), 16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]


def test_rope_stays_exact_in_low_precision():
    """Angles against float64; in bfloat16 they are wrong by more than 0.1 from position 58 on."""
    _, shared = low_precision("rope")
    turns = torch.tensor([10000.0 ** (-2 * r / 8) for r in range(4)], dtype=torch.float64)
    for found, pos in zip(shared.ctx, (FAR[4000:], FAR), strict=True):
        exact = pos.double().unsqueeze(1) * turns
        torch.testing.assert_close(found.real.double(), exact.cos(), atol=1e-3, rtol=0)
        torch.testing.assert_close(found.imag.double(), exact.sin(), atol=1e-3, rtol=0)


def test_sinusoidal_stays_exact_in_low_precision():
    from gpt.position.sinusoidal import encoding

    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = encoding(FAR, 32, 10000.0)
    turns = torch.tensor([10000.0 ** (-2 * r / 32) for r in range(16)], dtype=torch.float64)
    exact = FAR.double().unsqueeze(1) * turns
    torch.testing.assert_close(found[:, 0::2].double(), exact.sin(), atol=1e-3, rtol=0)
    torch.testing.assert_close(found[:, 1::2].double(), exact.cos(), atol=1e-3, rtol=0)


def test_dropout_is_applied_and_scaled(fresh):
    """With rate 0.5 and values 1, the mean output stays 1 and single outputs do not."""
    scheme = make("nope").position
    pos = torch.arange(64)
    q, k = (torch.zeros(8, 4, 64, 8) for _ in range(2))
    for kernel in ("sdpa", "reference"):
        y = attend(q, k, torch.ones(8, 4, 64, 8), prepare(scheme, pos, pos, kernel), dropout=0.5)
        assert abs(y.mean() - 1) < 0.05 and y.std() > 0.1


@pytest.mark.parametrize("kernel", ["sdpa", "reference"])
def test_values_are_not_rotated(kernel, fresh):
    """Equal scores average the values as they are: RoPE turns queries and keys only."""
    model = excite(make("rope", SMALL), fresh)
    shared = prepare(model.position, torch.arange(16), torch.arange(16), kernel)
    zero = torch.zeros(1, 4, 16, 8)
    v = torch.randn(1, 4, 16, 8, generator=fresh)
    q, k = model.position.rotate(zero, zero, shared.ctx, 0)
    y = attend(q, k, v, shared)
    torch.testing.assert_close(y[:, :, -1], v.mean(dim=2))


def test_next_position_is_the_number_of_cached_tokens(fresh, monkeypatch):
    """Decoding neither starts again at 0 nor counts the prompt twice."""
    from gpt.cache import Cache

    model = make("rope")
    seen = []
    prepare = model.position.prepare
    monkeypatch.setattr(model.position, "prepare", lambda q, k: seen.append((q.tolist(), len(k))) or prepare(q, k))
    cache = Cache(SMALL.n_layer)
    with torch.no_grad():
        for n in (3, 1, 2):
            model(ids((1, n), fresh), cache=cache)
    assert seen == [([0, 1, 2], 3), ([3], 4), ([4, 5], 6)]
