"""The six laws of position schemes, on a small model in float32, with random weights and inputs.

A scheme that by nature breaks one says so in its class (`relative`, `stable`); then the law must not hold.
"""

import itertools

import pytest
import torch

from gpt.attention import Kind, prepare
from gpt.cache import Cache
from gpt.errors import LengthError
from gpt.position import SCHEMES
from gpt.position.base import Position
from gpt.schema import ModelConfig, PositionConfig
from tests.helpers import SMALL, excite, ids, make

L = SMALL.block_size


def longest(model) -> int:
    """Four training lengths, or as far as the scheme reaches."""
    return min(4 * L, model.position.max_len or 4 * L)


@pytest.fixture(params=SCHEMES)
def name(request):
    return request.param


def test_a_law_without_heads_is_that_of_every_head():
    """A `pair` that does not read `head` broadcasts over them."""

    class Plain(Position):
        def pair(self, head, i, j):
            return -0.2 * (i - j).float()

    pos, scheme = torch.arange(9), Plain(PositionConfig("plain"), SMALL)
    for scheme.relative in (True, False):
        bias = scheme.dense(pos, pos)
        assert bias.shape == (4, 9, 9) and torch.equal(bias, -0.2 * (pos[:, None] - pos).float().expand(4, 9, 9))


def test_causality(name, fresh):
    """Changing token t + 1 leaves the logits up to t bit-identical, and moves a later one."""
    model = excite(make(name), fresh)
    T = longest(model)
    a = ids((2, T), fresh)
    for t in {0, T // 2, T - 2}:
        b = a.clone()
        b[:, t + 1] = (b[:, t + 1] + 1) % model.vocab_size
        with torch.no_grad():
            before, after = model(a)[0], model(b)[0]
        assert torch.equal(before[:, : t + 1], after[:, : t + 1])
        assert not torch.equal(before[:, t + 1 :], after[:, t + 1 :])


@pytest.mark.parametrize("chunks", [[1] * 20, [7, 1, 1, 11], [20]])
def test_cached_is_uncached(name, chunks, fresh):
    """Prefill, chunks and one by one give the logits of a single forward, across the training length too."""
    model = excite(make(name), fresh)
    T = min(sum(chunks), longest(model))
    x = ids((2, T), fresh)
    cache, parts, start = Cache(SMALL.n_layer), [], 0
    if not model.position.stable:
        with pytest.raises(LengthError, match=f"position={name}: .*without a cache"):
            model(x[:, :1], cache=cache)
        return
    with torch.no_grad():
        whole = model(x)[0]
        for n in chunks:
            if start < T:
                parts.append(model(x[:, start : start + n], cache=cache)[0])
            start += n
    assert cache.length == T
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=2e-4, rtol=2e-4)


def test_history_independence(name, fresh):
    """The loss at L is the same before and after a forward at 4 L, and a training step right after works."""
    model = excite(make(name), fresh)
    short, long = ids((2, L), fresh), ids((2, longest(model)), fresh)
    with torch.no_grad():
        first = model(short, short)[1]
        model(long, long)
        again = model(short, short)[1]
    assert torch.equal(first, again)
    model.train()
    loss = model(short, short)[1]
    loss.backward()
    if model.position.config.randomized is None:  # whose ids in training are others
        torch.testing.assert_close(loss.detach(), first)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_prefix(name, fresh):
    """The logits of the first L tokens do not depend on what follows, nor on how much."""
    model = excite(make(name), fresh)
    x = ids((2, longest(model)), fresh)
    with torch.no_grad():
        long = model(x)[0]
        for T in (2, L // 2, L):
            short = model(x[:, :T])[0]
            if model.position.stable:
                torch.testing.assert_close(short, long[:, :T], atol=2e-4, rtol=2e-4)
            else:
                assert (short - long[:, :T]).abs().max() > 1e-2


def test_liveness(name, fresh):
    """Permuting the prefix changes the last logit of a one-layer model, for every scheme but nope."""
    one = ModelConfig(n_layer=1, n_head=4, n_embd=32, block_size=16)
    model = excite(make(name, one), fresh)
    x = torch.arange(L).unsqueeze(0)
    order = torch.cat((torch.arange(L - 1).flip(0), torch.tensor([L - 1])))
    with torch.no_grad():
        change = (model(x)[0][:, -1] - model(x[:, order])[0][:, -1]).abs().max()
    assert (change > 1e-3) == (name != "nope"), change


def test_other_scheme_other_logits(fresh):
    """No two schemes with the same weights agree: one that does nothing would."""
    four = ModelConfig(n_layer=4, n_head=4, n_embd=32, block_size=16)  # room for a pattern of four layers
    x = ids((2, 3 * L), fresh)
    with torch.no_grad():
        found = {name: excite(make(name, four), torch.Generator().manual_seed(1)) for name in SCHEMES}
        found = {name: model(x[:, : min(3 * L, longest(model))])[0] for name, model in found.items()}
    for a, b in itertools.combinations(found, 2):
        T = min(found[a].shape[1], found[b].shape[1])
        assert not torch.allclose(found[a][:, :T], found[b][:, :T], atol=1e-4), f"{a} and {b}"


def test_a_relative_law_reads_the_distance_alone(name, fresh):
    """What a class with `relative` promises: its bias is computed once for each distance."""
    position = excite(make(name), fresh).position
    if position.pair is None or not position.relative:
        pytest.skip("no pointwise law, or one that says relative = False")
    head, i, j = torch.arange(4).view(-1, 1), *torch.randint(0, 3 * L, (2, 200), generator=fresh).sort(0).values.flip(0)
    with torch.no_grad():
        there, at_zero = position.pair(head, i, j), position.pair(head, i - j, torch.zeros_like(i))
    message = f"{name}: pair(head, i, j) reads more than i - j; say relative: ClassVar[bool] = False"
    torch.testing.assert_close(there, at_zero, msg=message)


@pytest.mark.parametrize("shift", [1, 1000])
def test_translation(name, shift, fresh):
    """A relative scheme scores p and p + shift alike; an absolute one must not."""
    options = {"threshold": 8.0} if name == "fire" else {}  # up to it fire is relative
    model = excite(make(name, **options), fresh)
    n = longest(model) if model.position.max_len is None else L - shift
    if n < 2:
        pytest.skip("a table of L rows cannot be read 1000 further; shift 1 shows that it is absolute")
    x = ids((2, n), fresh)
    with torch.no_grad():
        here, there = model(x)[0], model(x, offset=shift)[0]
    if model.position.relative:
        torch.testing.assert_close(there, here, atol=5e-3, rtol=5e-3)
    else:
        assert (there - here).abs().max() > 1e-2


def test_layer_pattern(name, fresh):
    """A layer marked N computes what nope computes; PN is neither all P nor all N."""
    two = ModelConfig(n_layer=2, n_head=4, n_embd=32, block_size=16)
    x = ids((2, L), fresh)
    found = {}
    for pattern in ("P", "N", "PN", "NP"):
        options = {"window": None, "window_layers": "W", "log_scale": False, "layers": pattern}
        model = excite(make(name, two, **options), torch.Generator().manual_seed(3))
        with torch.no_grad():
            found[pattern] = model(x)[0]
    acts_in_layers = SCHEMES[name].acts_in_layers()
    for a, b in (("P", "N"), ("P", "PN"), ("P", "NP"), ("PN", "NP")):
        assert torch.allclose(found[a], found[b]) != acts_in_layers
    if acts_in_layers:
        nope = excite(make("nope", two), torch.Generator().manual_seed(3))
        with torch.no_grad():
            torch.testing.assert_close(found["N"], nope(x)[0])


def test_bias_is_made_once_a_forward(name, fresh, monkeypatch):
    """All layers share one mask and one preparation."""
    calls = []
    model = excite(make(name), fresh)
    prepare = model.position.prepare
    monkeypatch.setattr(model.position, "prepare", lambda *a: calls.append("prepare") or prepare(*a))
    if model.position.pair is not None:
        pair = model.position.pair
        monkeypatch.setattr(model.position, "pair", lambda *a: calls.append("pair") or pair(*a))
    model(ids((1, L), fresh))
    assert sorted(set(calls)) == sorted(calls)


def test_kernels_get_no_mask_where_causal_says_it_all():
    """The fast kernel is lost as soon as a mask is passed, so plain schemes pass none."""
    pos = torch.arange(L)
    for name in SCHEMES:
        scheme = make(name).position
        assert (prepare(scheme, pos, pos).masks[Kind()] is None) == (not scheme.biased() and not scheme.explicit())
