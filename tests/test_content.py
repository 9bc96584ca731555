"""Schemes that read content or change weights (Shaw, Transformer-XL, CoPE), and what order a model knows without any.

Each is held to its formula written again, naively, in float64, and to other people's code.
"""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpt.attention import Kind, Shared, attend, prepare
from gpt.cache import Cache
from gpt.config import load
from gpt.errors import ConfigError
from gpt.position import SCHEMES, build_position
from gpt.position.base import Position
from gpt.position.sinusoidal import encoding
from gpt.schema import ModelConfig, build
from tests.helpers import SMALL, excite, ids, make

NAMES = ("shaw", "transformer_xl", "cope")
GPT2 = ModelConfig(n_layer=12, n_head=12, n_embd=768, block_size=1024)
D, H = SMALL.n_embd, SMALL.n_head
d = SMALL.head_width


def scheme(name: str, generator: torch.Generator, model: ModelConfig = SMALL, **options) -> Position:
    """In float64, with random parameters."""
    return excite(make(name, model, **options), generator).position.double()


def noise(*shape: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


# The formulas again, one query and one key at a time: q (H, Tq, d), k and v (H, Tk, d), `seen` the keys of a query.


def shaw(position, q, k, v, q_pos, k_pos, seen, layer):
    most = position.config.k
    a = position.key[str(layer)]
    b = position.value[str(layer)] if position.config.values else torch.zeros_like(a)
    for h in range(len(q)):
        for i in range(q.shape[1]):
            c = [min(int(q_pos[i] - k_pos[j]), most) for j in seen[i]]
            scores = [q[h, i] @ (k[h, j] + a[n]) / math.sqrt(d) for j, n in zip(seen[i], c, strict=True)]
            weights = torch.stack(scores).softmax(0)
            yield sum(w * (v[h, j] + b[n]) for w, j, n in zip(weights, seen[i], c, strict=True))


def transformer_xl(position, q, k, v, q_pos, k_pos, seen, layer):
    W = position.project[str(layer)]
    for h in range(len(q)):
        u_h, v_h, W_h = position.u[h, 0], position.v[h, 0], W[h * d : (h + 1) * d]
        for i in range(q.shape[1]):
            scores = []
            for j in seen[i]:
                delta = int(q_pos[i] - k_pos[j])
                angles = [delta * position.config.base ** (-2 * r / D) for r in range(D // 2)]
                R = torch.tensor([f(x) for x in angles for f in (math.sin, math.cos)], dtype=torch.float64)
                content = q[h, i] @ k[h, j] + u_h @ k[h, j]
                scores.append((content + q[h, i] @ (W_h @ R) + v_h @ (W_h @ R)) / math.sqrt(d))
            yield sum(w * v[h, j] for w, j in zip(torch.stack(scores).softmax(0), seen[i], strict=True))


def cope(position, q, k, v, q_pos, k_pos, seen, layer):
    e = position.table[str(layer)]
    for h in range(len(q)):
        for i in range(q.shape[1]):
            scores = []
            for j in seen[i]:
                between = [t for t in seen[i] if t >= j]
                count = sum(torch.sigmoid(q[h, i] @ k[h, t] / math.sqrt(d)) for t in between)
                count = torch.clamp(count, max=position.config.npos_max - 1)
                low, high = math.floor(count.item()), math.ceil(count.item())
                between = (1 - (count - low)) * e[low] + (count - low) * e[high]
                scores.append(q[h, i] @ k[h, j] / math.sqrt(d) + q[h, i] @ between)
            yield sum(w * v[h, j] for w, j in zip(torch.stack(scores).softmax(0), seen[i], strict=True))


NAIVE = {"shaw": shaw, "transformer_xl": transformer_xl, "cope": cope}
CASES = {  # Tq, Tk, ids, options
    "square": (9, 9, range(9), {}),
    "cached": (3, 9, range(9), {}),
    "one": (1, 7, range(7), {}),
    "scattered": (7, 7, [3, 4, 9, 10, 11, 20, 40], {"randomized": 8}),
    "scattered, cached": (2, 6, [0, 5, 6, 7, 30, 31], {"randomized": 8}),
    "window": (9, 9, range(9), {"window": 3}),
    "window, cached": (2, 9, range(9), {"window": 4}),
}
OPTIONS = {
    "shaw": [{"k": 1}, {"k": 4}, {"k": 4, "values": False}, {"k": 16}],
    "transformer_xl": [{}, {"base": 50.0}],
    "cope": [{"npos_max": 2}, {"npos_max": 3}, {"npos_max": 64}],
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name, own", [(name, own) for name in NAMES for own in OPTIONS[name]])
def test_is_its_formula(name, own, case, fresh):
    """Output, and gradients of queries, keys, values and every parameter of the layer."""
    Tq, Tk, places, options = CASES[case]
    if name == "cope" and "randomized" in options:
        options = {}  # which reads no ids: scattered ones must change nothing
    position = scheme(name, fresh, **own, **options)
    q, k, v = (noise(1, H, T, d, generator=fresh) for T in (Tq, Tk, Tk))
    weights = torch.randn(H, Tq, d, generator=fresh, dtype=torch.float64)
    layer, window = 1, options.get("window")
    kind = Kind(windowed=window is not None)
    k_pos = torch.tensor(list(places))
    q_pos = k_pos[Tk - Tq :]
    seen = [[j for j in range(Tk - Tq + i + 1) if window is None or Tk - Tq + i - j < window] for i in range(Tq)]
    results = []
    for naive in (False, True):
        for tensor in (q, k, v, *position.parameters()):
            tensor.grad = None
        if naive:
            rows = NAIVE[name](position, q[0], k[0], v[0], q_pos, k_pos, seen, layer)
            y = torch.stack(list(rows)).view(H, Tq, d)
        else:
            y = attend(q, k, v, prepare(position, q_pos, k_pos, kinds=[kind]), kind, layer)[0]
        (y * weights).sum().backward()
        gradients = {n: p.grad for n, p in position.named_parameters()} | {"q": q.grad, "k": k.grad, "v": v.grad}
        results.append((y.detach(), {n: g.clone() for n, g in gradients.items() if g is not None}))
    (fast, fast_gradients), (slow, slow_gradients) = results
    close = {"atol": 1e-5, "rtol": 1e-4} if name == "transformer_xl" else {"atol": 1e-10, "rtol": 1e-8}
    torch.testing.assert_close(fast, slow, **close)  # Transformer-XL's codes are float32
    for n, gradient in slow_gradients.items():
        torch.testing.assert_close(fast_gradients[n], gradient, **close)
    for n in fast_gradients.keys() - slow_gradients.keys():
        assert fast_gradients[n].abs().max() == 0, n


@pytest.mark.parametrize("name", NAMES)
def test_gradients_by_finite_differences(name, fresh):
    """Of everything that enters the attention, in float64."""
    own = {"shaw": {"k": 2}, "transformer_xl": {}, "cope": {"npos_max": 4}}[name]
    position = scheme(name, fresh, ModelConfig(n_layer=1, n_head=2, n_embd=4, block_size=8), **own)
    inputs = [noise(1, 2, T, 2, generator=fresh) for T in (3, 5, 5)]
    k_pos = torch.arange(5)

    def f(q, k, v, *parameters):
        return attend(q, k, v, prepare(position, k_pos[2:], k_pos))

    assert torch.autograd.gradcheck(f, (*inputs, *position.parameters()), atol=1e-6)


# Other people's code


@pytest.mark.parametrize("window", [2, 6])
def test_shaw_keys_are_those_of_transformers_relative_key(window, fresh):
    """Wav2Vec2-BERT's `relative_key`: vectors for keys by clipped distance, past both ends."""
    model = pytest.importorskip("transformers.models.wav2vec2_bert.modeling_wav2vec2_bert")
    config = model.Wav2Vec2BertConfig(
        hidden_size=D,
        num_attention_heads=H,
        position_embeddings_type="relative_key",
        left_max_position_embeddings=window,
        right_max_position_embeddings=0,
        attn_implementation="eager",
    )
    theirs = model.Wav2Vec2BertSelfAttention(config).double().eval()
    position = scheme("shaw", fresh, k=window, values=False)
    T = 11
    x = torch.randn(1, T, D, generator=fresh, dtype=torch.float64)
    with torch.no_grad():
        theirs.distance_embedding.weight.copy_(position.key["0"].flip(0))  # their rows run from -window to 0
        for linear in (theirs.linear_q, theirs.linear_k, theirs.linear_v, theirs.linear_out):
            linear.weight.copy_(torch.randn(D, D, generator=fresh, dtype=torch.float64) / 4)
        theirs.linear_out.weight.copy_(torch.eye(D))
        theirs.linear_out.bias.zero_()
        future = torch.full((1, 1, T, T), -math.inf, dtype=torch.float64).triu(1)
        expected = theirs(x, attention_mask=future)[0]
        projections = (theirs.linear_q, theirs.linear_k, theirs.linear_v)
        q, k, v = (p(x).view(1, T, H, d).transpose(1, 2) for p in projections)
        pos = torch.arange(T)
        found = attend(q, k, v, prepare(position, pos, pos)).transpose(1, 2).reshape(1, T, D)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


def test_shaw_keys_and_values_are_those_of_vits(fresh):
    """VITS has both, up to its window (past which it has zeros instead of the last row)."""
    model = pytest.importorskip("transformers.models.vits.modeling_vits")
    T = k = 7
    config = model.VitsConfig(hidden_size=D, num_attention_heads=H, window_size=k, attention_dropout=0.0)
    theirs = model.VitsAttention(config).double().eval()
    position = scheme("shaw", fresh, k=k)
    x = torch.randn(1, T, D, generator=fresh, dtype=torch.float64)
    with torch.no_grad():
        theirs.emb_rel_k[0, : k + 1] = position.key["0"].flip(0)  # key minus query, from -k on
        theirs.emb_rel_v[0, : k + 1] = position.value["0"].flip(0)
        theirs.out_proj.weight.copy_(torch.eye(D))
        theirs.out_proj.bias.zero_()
        future = torch.full((1, 1, T, T), -math.inf, dtype=torch.float64).triu(1)
        expected = theirs(x, attention_mask=future)[0]
        projections = (theirs.q_proj, theirs.k_proj, theirs.v_proj)
        q, key, v = (p(x).view(1, T, H, d).transpose(1, 2) for p in projections)
        pos = torch.arange(T)
        found = attend(q, key, v, prepare(position, pos, pos)).transpose(1, 2).reshape(1, T, D)
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)


def test_transformer_xl_scores_are_those_of_xlnet(fresh):
    """XLNet kept Transformer-XL's attention, with u and v as r_w_bias and r_r_bias; its codes run from T to 1 - T."""
    model = pytest.importorskip("transformers.models.xlnet.modeling_xlnet")
    theirs = model.XLNetRelativeAttention(model.XLNetConfig(d_model=D, n_head=H, d_inner=D, dropout=0.0)).double()
    position = scheme("transformer_xl", fresh)
    T = 9
    q, k, v = (torch.randn(1, H, T, d, generator=fresh, dtype=torch.float64) for _ in range(3))
    with torch.no_grad():
        theirs.r_w_bias.copy_(position.u[:, 0])
        theirs.r_r_bias.copy_(position.v[:, 0])
        codes = encoding(torch.arange(T, -T, -1), D, 10000.0).double()
        r = (codes @ position.project["0"].T).view(2 * T, 1, H, d)
        future = torch.ones(T, T, dtype=torch.float64).triu(1)
        args = (t.permute(2, 0, 1, 3) for t in (q, k, v))
        expected = theirs.rel_attn_core(*args, r, attn_mask=future.view(T, T, 1, 1)).permute(1, 2, 0, 3)
        pos = torch.arange(T)
        found = attend(q, k, v, prepare(position, pos, pos))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("npos_max", [2, 5, 64])
def test_cope_is_that_of_x_transformers(npos_max, fresh):
    theirs = pytest.importorskip("x_transformers.x_transformers").CoPE(d, H, npos_max).double()
    position = scheme("cope", fresh, npos_max=npos_max)
    T = 40
    q, k = (noise(2, H, T, d, generator=fresh) for _ in range(2))
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    with torch.no_grad():
        theirs.pos_emb.copy_(position.table["0"])
    s = q @ k.transpose(-2, -1) / math.sqrt(d)
    expected = (s + theirs(q, s.masked_fill(future, -math.inf))).masked_fill(future, 0)
    found = position.scores(s, q, k, ~future, None, 0).masked_fill(future, 0)
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)
    weights = torch.randn(found.shape, generator=fresh, dtype=torch.float64)
    gradients = [torch.autograd.grad((y * weights).sum(), (q, k), retain_graph=True) for y in (found, expected)]
    torch.testing.assert_close(*gradients, atol=1e-8, rtol=1e-8)


# Counts and memory


@pytest.mark.parametrize(
    "name, options, layer, shared",
    [
        ("shaw", {}, 2 * 17 * 64, 0),  # 2 (k + 1) d; the 4,224 = 2 (2 k + 1) d of the paper count the future
        ("shaw", {"values": False}, 17 * 64, 0),
        ("shaw", {"k": 1}, 2 * 2 * 64, 0),
        ("transformer_xl", {}, 589_824, 1_536),
        ("cope", {}, 4_096, 0),
        ("cope", {"npos_max": 2}, 128, 0),
    ],
)
def test_parameter_table_at_gpt2(name, options, layer, shared):
    for pattern, positioned in (("P", 12), ("PNNN", 3)):
        with torch.device("meta"):
            position = build_position(SCHEMES[name].Config(name=name, layers=pattern, **options), GPT2)
        assert sum(p.numel() for p in position.parameters()) == positioned * layer + shared


class Largest(TorchDispatchMode):
    """The most elements that any operation's result has."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                shown = tensor.untyped_storage().nbytes() // tensor.element_size()  # a view takes no room
                self.elements = max(self.elements, shown)
        return result


@pytest.mark.parametrize("name", NAMES)
def test_nothing_of_size_T_T_d_is_built(name, fresh):
    """Forward and backward, the largest tensor is that of the scores, (H, T, T) with H = 2; (T, T, d) has 8 times as
    many elements, and no other part of this model comes near."""
    T = 128
    gpt = make(name, ModelConfig(n_layer=1, n_head=2, n_embd=32, block_size=T))
    x = ids((1, T), fresh)
    with Largest() as largest:
        gpt(x, x)[1].backward()
    assert largest.elements == 2 * T * T


def test_the_meter_of_memory_sees_both_directions():
    """A (T, T, d) that only the backward pass builds is seen."""

    class Wasteful(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return (g.unsqueeze(0) * torch.ones(64, 1, 1)).sum(0)

    x = torch.ones(64, 32, requires_grad=True)
    with Largest() as largest:
        y = Wasteful.apply(x).sum()
        forward = largest.elements
        y.backward()
    assert forward == 64 * 32 and largest.elements == 64 * 64 * 32


# Past the training length, caches, patterns


def test_shaw_clips_past_k(fresh):
    """k = 16 at 4 L: no index past the table's end, and the order of keys at distance 16 and beyond is not seen."""
    T = 4 * SMALL.block_size
    position = scheme("shaw", fresh)
    q, k, v = (torch.randn(1, H, T, d, generator=fresh, dtype=torch.float64) for _ in range(3))
    pos = torch.arange(T)
    shared = prepare(position, pos, pos)
    order = torch.arange(T)
    order[: T - 16] = torch.randperm(T - 16, generator=fresh)  # the last query is at T - 1
    with torch.no_grad():
        y = attend(q, k, v, shared)[:, :, -1]
        far = attend(q, k[:, :, order], v[:, :, order], shared)[:, :, -1]
        order[[T - 17, T - 16]] = order[[T - 16, T - 17]]  # distances 16 and 15
        near = attend(q, k[:, :, order], v[:, :, order], shared)[:, :, -1]
    assert y.isfinite().all()
    torch.testing.assert_close(far, y, atol=1e-12, rtol=1e-12)
    assert (near - y).abs().max() > 1e-6


@pytest.mark.parametrize("window", [None, 4])
def test_shaw_row_that_no_query_reads_is_not_trained(window, fresh):
    """Not even by rounding noise, which Adam would blow up: no query sees a key at k or beyond."""
    model = make("shaw", ModelConfig(n_layer=2, n_head=4, n_embd=32, block_size=16), k=16, window=window)
    T = 16 if window is None else 40
    x = ids((2, T), fresh)
    model(x, x)[1].backward()
    tables = [*model.position.key.values(), *model.position.value.values()]
    for table in tables:
        assert table.grad[-1].abs().max() == 0 and table.grad[0].abs().max() > 0
    longer = ids((2, 17), fresh)
    reading = make("shaw", ModelConfig(n_layer=2, n_head=4, n_embd=32, block_size=16), k=16)
    reading(longer, longer)[1].backward()
    assert all(table.grad[-1].abs().max() > 0 for table in reading.position.value.values())


@pytest.mark.parametrize("options", [{"window": 3}, {"window": 5, "window_layers": "WF"}, {"layers": "NP"}])
@pytest.mark.parametrize("name", NAMES)
def test_cached_is_uncached_with_windows_and_patterns(name, options, fresh):
    model = excite(make(name, **options), fresh)
    x = ids((2, 24), fresh)
    cache, parts = Cache(SMALL.n_layer), []
    with torch.no_grad():
        whole = model(x)[0]
        for part in x.split([5, 1, 1, 9, 8], dim=1):
            parts.append(model(part, cache=cache)[0])
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=2e-4, rtol=2e-4)


def test_cope_counts_what_its_gates_let_through():
    """Gates 1, 0, 1 behind a query: counts from each key on 2, 1, 1; from npos_max - 1 on they are one."""
    position = build_position(SCHEMES["cope"].Config(name="cope", npos_max=3), ModelConfig(n_head=1, n_embd=1))
    with torch.no_grad():
        position.table["0"].copy_(torch.tensor([[10.0], [20.0], [30.0]]))
        closed, open_ = -1000.0, 1000.0
        s = torch.tensor([open_, open_, closed, open_, 7.0]).view(1, 1, 1, 5)
        seen = torch.tensor([[True, True, True, True, False]])
        added = position.scores(s, torch.ones(1, 1, 1, 1), None, seen, None, 0) - s
    assert added[..., :4].flatten().tolist() == [30, 30, 20, 20]


def test_cope_starts_as_nope_and_reads_no_ids(fresh):
    """Its table starts at 0; other ids change nothing, so that random ones are refused."""
    x = ids((2, 30), fresh)
    model = make("cope")
    with torch.no_grad():
        torch.testing.assert_close(model(x)[0], make("nope")(x)[0], atol=1e-5, rtol=1e-5)
        excited = excite(model, fresh)
        assert torch.equal(excited(x)[0], excited(x, offset=77)[0])


# Claims


def test_shaw_adds_a_vector_not_a_scalar(fresh):
    """C38: the score is x_i W_Q (x_j W_K + a_(i-j))^T, so what a distance adds depends on the query; T5's does not."""
    T, pos = 6, torch.arange(6)
    s = torch.zeros(1, H, T, T, dtype=torch.float64)
    position = scheme("shaw", fresh)
    shared = prepare(position, pos, pos)
    q, k = (torch.randn(1, H, T, d, generator=fresh, dtype=torch.float64) for _ in range(2))
    with torch.no_grad():
        found = position.scores(s, q, k, shared.seen[Kind()], shared.ctx, 0)
        for h in range(H):
            expected = [float(q[0, h, 5] @ position.key["0"][5 - j]) / math.sqrt(d) for j in range(6)]
            assert found[0, h, 5].tolist() == pytest.approx(expected)
        other = position.scores(s, q.flip(2), k, shared.seen[Kind()], shared.ctx, 0)
    assert (found - other)[0, :, 5].abs().max() > 1e-3
    assert scheme("t5", fresh).pair(torch.tensor(0), pos[5], pos).shape == (6,)  # no query enters


def test_shaw_goes_with_a_cache(fresh):
    """C50: said to be impossible for relative schemes; decoding token by token equals the whole forward to 1e-5."""
    model = excite(make("shaw"), fresh, std=0.1)
    x = ids((2, 40), fresh)
    cache = Cache(SMALL.n_layer)
    with torch.no_grad():
        parts = [model(token, cache=cache)[0] for token in x.split(1, dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), model(x)[0], atol=1e-5, rtol=1e-5)


def without_mask(position: Position, kind: Kind, T: int) -> Shared:
    """Attention to the future too, on the definition."""
    pos = torch.arange(T)
    shared = prepare(position, pos, pos, "reference", [kind])
    bias = position.dense(pos, pos) if position.biased() and kind.positioned else torch.zeros(1, T, T)
    shared.masks, shared.seen = {kind: bias}, {kind: torch.ones(T, T, dtype=torch.bool)}
    return shared


def equivariance(name: str, masked: bool, generator: torch.Generator) -> float:
    """max |Attn(P X) - P Attn(X)| of one positioned layer, in float64."""
    T = 12
    model = excite(make(name, ModelConfig(n_layer=4, n_head=4, n_embd=32, block_size=16)), generator).double()
    layer = next(n for n, block in enumerate(model.h) if block.attn.kind.positioned)
    kind = model.h[layer].attn.kind
    pos = torch.arange(T)
    shared = prepare(model.position, pos, pos, "reference", [kind]) if masked else without_mask(model.position, kind, T)
    x = torch.randn(1, T, 32, generator=generator, dtype=torch.float64)
    order = pos.roll(1 + int(torch.randint(T - 1, (), generator=generator)))

    def attention(tokens):
        return model.h[layer].attn(model.position.embed(tokens, pos), shared)

    with torch.no_grad():
        return (attention(x[:, order]) - attention(x)[:, order]).abs().max().item()


@pytest.mark.parametrize("name", SCHEMES)
def test_attention_without_mask_and_positions_does_not_know_order(name, fresh):
    """C01: Attn(P X) = P Attn(X) to 1e-10 without mask and positions; not with the mask, not with any scheme."""
    error = equivariance(name, False, fresh)
    assert error < 1e-10 if name == "nope" else error > 1e-4
    assert equivariance(name, True, fresh) > 1e-4


def pooled(layers: int, masked: bool, order: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Mean over tokens of the output of a stack without positions, its tokens in this order."""
    T = len(order)
    model = excite(make("nope", ModelConfig(n_layer=layers, n_head=4, n_embd=32, block_size=16)), generator).double()
    pos = torch.arange(T)
    shared = prepare(model.position, pos, pos, "reference") if masked else without_mask(model.position, Kind(), T)
    x = model.wte(order.unsqueeze(0))
    with torch.no_grad():
        for block in model.h:
            x = block(x, shared, None)
        return x.mean(dim=1)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_without_mask_and_positions_a_text_is_a_bag_of_words(layers, fresh):
    """C02: the mean over tokens is the same in any order without a mask; with the causal mask it is not."""
    seed, order = int(torch.randint(2**31, (), generator=fresh)), torch.randperm(12, generator=fresh)
    for masked in (False, True):
        change = pooled(layers, masked, torch.arange(12), torch.Generator().manual_seed(seed))
        change = change - pooled(layers, masked, order, torch.Generator().manual_seed(seed))
        assert (change.abs().max() < 1e-10) != masked


def test_one_causal_layer_without_positions_is_blind_to_order_and_two_are_not(fresh):
    """C03: false that the mask is not enough: it alone tells order, but to the last token only from two layers on."""
    x = torch.arange(16).unsqueeze(0)
    order = torch.cat((torch.arange(15).roll(1 + int(torch.randint(14, (), generator=fresh))), torch.tensor([15])))
    for layers, blind in ((1, True), (2, False)):
        model = excite(make("nope", ModelConfig(n_layer=layers, n_head=4, n_embd=32, block_size=16)), fresh).double()
        with torch.no_grad():
            change = (model(x)[0][:, -1] - model(x[:, order])[0][:, -1]).abs().max()
        assert (change < 1e-9) == blind


def test_shuffling_the_prefix_moves_the_loss_of_an_untrained_nope(fresh):
    """C04, the part that needs no training: with the mask alone, the loss of a token depends on the order before it."""
    model = excite(make("nope"), fresh)
    x = torch.arange(16).unsqueeze(0).expand(8, 16).clone()
    for row in x[1:]:
        row[:15] = row[torch.randperm(15, generator=fresh)]
    with torch.no_grad():
        last = model.losses(x, torch.full_like(x, 20), last=1)
    assert (last[1:] - last[0]).abs().min() > 1e-4 and last.std() > 1e-3


# Wrong values


@pytest.mark.parametrize(
    "name, key, value, allowed",
    [
        ("shaw", "k", 0, "a whole number >= 1"),
        ("shaw", "k", -3, "a whole number >= 1"),
        ("shaw", "k", 2.5, "a whole number >= 1"),
        ("shaw", "values", 1, "true or false"),
        ("transformer_xl", "base", 0.0, "a number >= 1e-09"),
        ("transformer_xl", "base", -1.0, "a number >= 1e-09"),
        ("cope", "npos_max", 1, "a whole number >= 2"),
        ("cope", "npos_max", 0, "a whole number >= 2"),
        ("cope", "npos_max", "64", "a whole number >= 2"),
    ],
)
def test_refused_values(name, key, value, allowed):
    with pytest.raises(ConfigError, match=f"^position.{key}: got {value!r}, allowed: {allowed}") as error:
        build(SCHEMES[name].Config, {"name": name, key: value}, "position")
    assert "\n" not in str(error.value)


def test_transformer_xl_refuses_odd_widths():
    with pytest.raises(ConfigError, match="model.n_embd: got 5, allowed: an even"):
        SCHEMES["transformer_xl"].Config(name="transformer_xl").check(ModelConfig(n_layer=1, n_head=1, n_embd=5))


def test_cope_refuses_random_ids():
    from gpt.cli import compose

    with pytest.raises(ConfigError, match="position.randomized: got 8, allowed: null: cope does not read position ids"):
        load(compose("train", ["position=cope", "position.randomized=8"]))
