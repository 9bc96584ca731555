"""What every scheme may have: windows, a logarithmic scale, random ids, doors of its own for content and weights."""

import math

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from gpt.attention import Kind, attend, prepare
from gpt.cache import Cache
from gpt.errors import ConfigError, LengthError
from gpt.position import SCHEMES, Position
from gpt.position.base import sample
from gpt.schema import ModelConfig, PositionConfig
from tests.helpers import SMALL, as_written, excite, ids, make

L = SMALL.block_size
ONE = ModelConfig(n_layer=1, n_head=4, n_embd=32, block_size=16)
FOUR = ModelConfig(n_layer=4, n_head=4, n_embd=32, block_size=16)


# windows


@pytest.mark.parametrize("name", ["nope", "rope", "alibi", "t5"])
def test_a_window_is_a_mask(name, fresh):
    """Query by query: attention to the last `window` keys alone."""
    W, T = 5, 23
    scheme = excite(make(name, window=W), fresh).position
    q, k, v = (torch.randn(2, 4, T, 8, generator=fresh) for _ in range(3))
    pos = torch.arange(T)
    kind = Kind(windowed=True)
    shared = prepare(scheme, pos, pos, kinds=[kind])
    q, k = scheme.rotate(q, k, shared.ctx, 0)
    found = attend(q, k, v, shared, kind)
    for i in range(T):
        seen = slice(max(0, i - W + 1), i + 1)
        row = prepare(scheme, pos[i : i + 1], pos[seen], "reference")
        one = attend(q[:, :, i : i + 1], k[:, :, seen], v[:, :, seen], row)
        torch.testing.assert_close(found[:, :, i : i + 1], one, atol=1e-5, rtol=1e-4)


def test_windowed_layers_alone_cannot_see_further(fresh):
    """With window 4 in both layers the last token sees 1 + 2 * 3 tokens; one full layer lets it see all."""
    x = ids((1, L), fresh)
    for pattern, reach in (("W", 6), ("WF", L - 1)):
        model = excite(make("rope", window=4, window_layers=pattern), fresh)
        with torch.no_grad():
            last = model(x)[0][0, -1]
            for back in range(1, L):
                changed = x.clone()
                changed[0, -1 - back] = (changed[0, -1 - back] + 1) % model.vocab_size
                assert torch.equal(model(changed)[0][0, -1], last) == (back > reach), (pattern, back)


@pytest.mark.parametrize("name", ["rope", "alibi"])
def test_windows_and_a_cache(name, fresh):
    model = excite(make(name, FOUR, layers="PPPN", window=3, window_layers="WWWF"), fresh)
    x, cache, parts = ids((2, 20), fresh), Cache(4), []
    with torch.no_grad():
        whole = model(x)[0]
        for chunk in x.split([7, 1, 1, 1, 10], dim=1):
            parts.append(model(chunk, cache=cache)[0])
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=2e-4, rtol=2e-4)


def test_a_window_as_long_as_the_text_is_none(fresh):
    x = ids((2, L), fresh)
    plain = excite(make("rope"), torch.Generator().manual_seed(2))
    wide = excite(make("rope", window=L), torch.Generator().manual_seed(2))
    assert torch.equal(plain(x)[0], wide(x)[0])
    assert prepare(wide.position, torch.arange(L), torch.arange(L), kinds=wide.kinds).masks == {Kind(True, True): None}


# the logarithmic scale


def test_log_scale_leaves_the_training_length_alone_and_sharpens_beyond(fresh):
    """Past L the scores of the t-th query are times ln t / ln L; windowed layers keep theirs."""
    T = 4 * L
    q, k, v = (torch.randn(2, 4, T, 8, generator=fresh) for _ in range(3))
    pos = torch.arange(T)
    scheme = make("nope", log_scale=True).position
    found = attend(q, k, v, prepare(scheme, pos, pos))
    factor = torch.tensor([max(1.0, math.log(t) / math.log(L)) for t in range(1, T + 1)])
    plain = prepare(make("nope").position, pos, pos)
    torch.testing.assert_close(found, attend(q * factor.view(-1, 1), k, v, plain))
    torch.testing.assert_close(found[:, :, :L], attend(q, k, v, plain)[:, :, :L])
    windowed = Kind(windowed=True)
    shared = [
        prepare(make("nope", log_scale=scaled, window=9).position, pos, pos, kinds=[windowed])
        for scaled in (False, True)
    ]
    assert torch.equal(*(attend(q, k, v, one, windowed) for one in shared))


@pytest.mark.parametrize("name", SCHEMES)
def test_log_scale_is_the_same_for_every_scheme(name, fresh):
    """What a query scores against keys, be it content, distance or both, is stretched; a bias of positions is not.

    Read off the weights: their logarithms, without the bias, are the scores but for a constant of the row.
    """
    T, t = 4 * L, 3 * L
    found = {}
    for scaled in (False, True):
        options = {"overflow": "clamp"} if hasattr(SCHEMES[name].Config, "overflow") else {}
        options |= {"values": False} if name == "shaw" else {}  # so that the output is the weights
        options |= {"log_scale": scaled, "layers": "P", "window": None, "window_layers": "W"}
        scheme = excite(make(name, **options), torch.Generator().manual_seed(1), std=0.1).position.double()
        pos = scheme.positions(0, T, torch.device("cpu"))
        shared = prepare(scheme, pos, pos)
        shared.masks = {kind: mask if mask is None else mask.double() for kind, mask in shared.masks.items()}
        q, k = (torch.randn(1, 4, T, 8, generator=fresh.manual_seed(2), dtype=torch.float64) for _ in range(2))
        q, k = scheme.rotate(q, k, shared.ctx, 0)
        weights = attend(q, k, torch.eye(T, dtype=torch.float64).expand(1, 4, T, T), shared)[0, :, t - 1, :t]
        bias = 0 if not scheme.biased() else scheme.dense(pos, pos)[:, t - 1, :t].double()
        scores = weights.log() - bias
        found[scaled] = scores - scores[..., :1]
    torch.testing.assert_close(found[True], found[False] * (math.log(t) / math.log(L)), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", ["nope", "alibi"])
def test_log_scale_with_a_cache(name, fresh):
    model = excite(make(name, log_scale=True), fresh)
    x, cache, parts = ids((2, 3 * L), fresh), Cache(2), []
    with torch.no_grad():
        whole = model(x)[0]
        for chunk in x.split([L + 3, 1, 2 * L - 4], dim=1):
            parts.append(model(chunk, cache=cache)[0])
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=2e-4, rtol=2e-4)


# random ids


def test_a_sample_is_sorted_without_replacement_and_addressed():
    for count, n in ((32, 16), (16, 16), (4096, 7)):
        one = sample(count, n, "5/3")
        assert one.tolist() == sorted(set(one.tolist())) and len(one) == n and 0 <= one[0] and one[-1] < count
        assert torch.equal(one, sample(count, n, "5/3"))
    assert not torch.equal(sample(4096, 7, "5/3"), sample(4096, 7, "5/4"))
    hits = torch.zeros(32)
    for step in range(2000):
        hits[sample(32, 16, f"0/{step}")] += 1
    assert (hits / 2000 - 0.5).abs().max() < 0.07  # every id as often as any other


def test_training_draws_ids_and_evaluation_spreads_them():
    position = make("rope", randomized=8).position.train()
    position.redraw("0/1")
    first = position.positions(0, L, torch.device("cpu")).clone()
    assert torch.equal(first, sample(8 * L, L, "0/1"))
    position.redraw("0/2")
    assert not torch.equal(position.positions(0, L, torch.device("cpu")), first)
    position.eval()
    for n in (1, L, 4 * L, 8 * L):
        found = position.positions(0, n, torch.device("cpu"))
        assert found.tolist() == [i * 8 * L // n for i in range(n)]
    random = make("rope", randomized=8, ids="random").position.eval()
    found = random.positions(0, 4 * L, torch.device("cpu"))
    assert torch.equal(found, random.positions(0, 4 * L, torch.device("cpu"))) and len(set(found.tolist())) == 4 * L


def test_random_ids_serve_a_table_past_the_training_length(fresh):
    model = excite(make("learned", randomized=4), fresh)
    assert model.position.table.shape[0] == model.position.max_len == 4 * L
    model(ids((1, 4 * L), fresh))
    with pytest.raises(LengthError, match=f"learned: {4 * L + 1} tokens, its ids end at {4 * L - 1}"):
        model(ids((1, 4 * L + 1), fresh))


def test_ids_are_no_weights():
    assert make("rope", randomized=4).state_dict().keys() == make("rope").state_dict().keys()


# hooks


def test_the_hooks_of_scores_and_weights(fresh):
    """What `scores` adds is masked afterwards and normalized; `values` sees the weights of each query."""

    class Both(Position):
        def scores(self, s, q, k, visible, ctx, layer):
            assert visible.dtype == torch.bool and visible.shape == s.shape[-2:]
            return s + ctx * (layer + 1)

        def values(self, y, p, ctx, layer):
            return y + p.sum(-1, keepdim=True) + p[..., :1]

        def prepare(self, q_pos, k_pos):
            return torch.randn(len(q_pos), len(k_pos), generator=torch.Generator().manual_seed(4))

    T, scheme = 9, Both(PositionConfig(name="both"), SMALL)
    q, k, v = (torch.randn(2, 4, T, 8, generator=fresh) for _ in range(3))
    pos = torch.arange(T)
    shared = prepare(scheme, pos, pos)
    found = attend(q, k, v, shared, layer=2)
    scores = (q @ k.mT / math.sqrt(8) + 3 * shared.ctx).masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
    p = scores.softmax(-1)
    torch.testing.assert_close(found, p @ v + 1 + p[..., :1])
    unpositioned = Kind(positioned=False)
    plain = attend(q, k, v, prepare(scheme, pos, pos, kinds=[unpositioned]), unpositioned)
    torch.testing.assert_close(plain, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))


# the compiler

COMPILED = [
    *((name, {}) for name in SCHEMES),
    *((name, {"overflow": "clamp"}) for name in ("learned", "concat", "tupe")),
    *((name, {"randomized": 4}) for name in ("nope", "learned", "binary", "rope", "xpos", "alibi", "fire", "tupe")),
    *((name, {"randomized": 4}) for name in ("shaw", "transformer_xl")),
]


@pytest.mark.parametrize("name, options", COMPILED)
def test_the_compiler_takes_the_whole_model(name, options, fresh):
    """The eager forward in one graph without a break, which serves the next step's ids too."""
    model = excite(make(name, FOUR if len(as_written(name).get("layers", "P")) > 1 else ONE, **options), fresh)
    torch.compiler.reset()
    graphs = CompileCounter()
    compiled = torch.compile(model.train(), backend=graphs)
    x = ids((2, L), fresh)
    for step in range(2):
        model.position.redraw(f"0/{step}")
        with torch.no_grad():
            torch.testing.assert_close(compiled(x, x), model(x, x), atol=1e-4, rtol=1e-4)
    assert graphs.frame_count == 1


# what may be asked for


@pytest.mark.parametrize(
    "options, message",
    [
        ({"layers": "N"}, "position.layers: got 'N', allowed: at least one P"),
        ({"layers": "PPN"}, "position.layers: got 'PPN', allowed: at most model.n_layer=2 letters"),
        ({"window_layers": "WF"}, "position.window_layers: got 'WF', allowed: W where position.window is null"),
        ({"window": 4, "window_layers": "F"}, "position.window_layers: got 'F', allowed: at least one W"),
        ({"window": 4, "window_layers": "WFF"}, "position.window_layers: got 'WFF', allowed: at most model.n_layer=2"),
        ({"ids": "random"}, "position.ids: got 'random', allowed: spaced where position.randomized is null"),
    ],
)
def test_patterns_that_mean_nothing_are_refused(options, message):
    with pytest.raises(ConfigError) as error:
        SCHEMES["rope"].Config(name="rope", **options).check(SMALL)
    assert message in str(error.value)
