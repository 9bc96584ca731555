"""The length protocol: counts by hand, a uniform model, a loop without batches, and nothing that crosses a block."""

import math

import numpy as np
import pytest
import torch

import gpt.evaluate
from gpt.errors import ConfigError, LengthError
from gpt.evaluate import Blocks, cut, disjoint, fitting, sliding, standard_error, validation_loss
from gpt.position import SCHEMES
from gpt.runtime import Runtime
from gpt.schema import ModelConfig
from tests.helpers import VOCAB, excite, make

CPU = Runtime(torch.device("cpu"), torch.float32)
L = 8
MODEL = ModelConfig(n_layer=2, n_head=4, n_embd=32, block_size=L)
ONE_BYTE = np.ones(VOCAB, dtype=np.int64)


@pytest.fixture
def tokens(fresh):
    return torch.randint(0, VOCAB, (203,), generator=fresh).numpy().astype(np.uint16)


def uniform(name="alibi"):
    """All logits 0: every token costs exactly ln(vocabulary)."""
    model = make(name, MODEL)
    with torch.no_grad():
        model.wte.weight.zero_()
    return model


def test_blocks_by_hand():
    assert cut(203, 8, [1, 2, 4]) == Blocks(length=32, count=6, total=6, dropped=10)  # 202 targets, 6 * 32 = 192
    assert cut(203, 8, [1, 2, 4]).starts.tolist() == [0, 32, 64, 96, 128, 160]
    assert cut(203, 8, [1, 2, 4], limit=100) == Blocks(32, 3, 6, 106)
    assert cut(203, 8, [1, 2, 4], limit=100).starts.tolist() == [0, 64, 128]
    assert cut(203, 8, [1, 2, 4], limit=128).starts.tolist() == [0, 32, 96, 128]
    assert cut(33, 8, [4]) == Blocks(32, 1, 1, 0)
    assert cut(203, 8, [1, 2, 3]) == Blocks(48, 4, 4, 10)  # 3 is no multiple of 2: blocks of 6 L serve all three
    with pytest.raises(LengthError, match="32 tokens, 33 are needed"):
        cut(32, 8, [4])
    with pytest.raises(ConfigError, match="eval.tokens: got 31, allowed: at least 32"):
        cut(203, 8, [4], limit=31)


def test_factors_that_fit():
    assert fitting(203, 8, [1, 2, 4, 64]) == [1, 2, 4]
    assert fitting(9, 8, [1, 2]) == [1] and fitting(8, 8, [1]) == []


def test_blocks_within_documents_by_hand():
    starts = np.array([0, 33, 40, 140], dtype=np.uint64)  # documents of 33, 7, 100 and 63 tokens
    blocks = cut(203, 8, [1, 2, 4], documents=starts)
    assert (blocks.length, blocks.count, blocks.total, blocks.dropped) == (32, 5, 5, 202 - 160)
    assert blocks.starts.tolist() == [0, 40, 72, 104, 140]
    assert cut(203, 8, [4], 100, starts).starts.tolist() == [0, 40, 104]
    with pytest.raises(LengthError, match="longest document of the validation split has 100 tokens, 129 are needed"):
        cut(203, 8, [16], documents=starts)
    assert fitting(203, 8, [1, 4, 8, 16], starts) == [1, 4, 8] and fitting(203, 8, [1], np.arange(203)) == []


def test_no_block_within_documents_crosses_an_end_and_none_is_missed(fresh):
    for _ in range(50):
        starts = np.cumsum([0, *torch.randint(1, 120, (11,), generator=fresh).tolist()]).tolist()
        end = starts[-1] + 90
        blocks = cut(end, L, [1, 2], documents=np.array(starts, dtype=np.uint64))
        expected = [
            at
            for start, stop in zip(starts, [*starts[1:], end], strict=True)
            for at in range(start, stop - 2 * L, 2 * L)  # 2 L targets need one token more
        ]
        assert blocks.starts.tolist() == expected and blocks.dropped == end - 1 - 2 * L * len(expected)


def test_within_a_document_nothing_outside_of_it_is_read(fresh):
    """Another text around a document changes no number."""
    model = excite(make("rope", MODEL), fresh)
    text = torch.randint(0, VOCAB, (100,), generator=fresh).numpy()
    alone = {}
    for before, after in ((0, 0), (5, 7), (30, 2)):
        around = [torch.randint(0, VOCAB, (n,), generator=fresh).numpy() for n in (before, after)]
        tokens = np.concatenate([around[0], text, around[1]])
        starts = np.unique([0, before, before + 100] if after else [0])
        blocks = cut(len(tokens), L, [1, 2, 4], documents=starts.astype(np.uint64))
        for factor in (1, 2, 4):
            row = disjoint(model, tokens, blocks, factor, ONE_BYTE, CPU)
            slide = sliding(model, tokens, blocks, factor, 4, ONE_BYTE, CPU)
            found = [row["loss"], slide["loss"], row["n_targets"], slide["n_targets"]]
            assert alone.setdefault(factor, found) == pytest.approx(found, rel=1e-6)


@pytest.mark.parametrize("factor", [1, 2, 4])
def test_a_uniform_model_scores_ln_vocabulary_on_exactly_the_counted_targets(tokens, factor):
    blocks = cut(len(tokens), L, [1, 2, 4])
    row = disjoint(uniform(), tokens, blocks, factor, ONE_BYTE, CPU)
    assert row["loss"] == pytest.approx(math.log(VOCAB), abs=1e-6) and row["loss_se"] == pytest.approx(0, abs=1e-7)
    assert row["n_targets"] == row["n_bytes"] == 192
    assert row["perplexity"] == pytest.approx(VOCAB, rel=1e-6)
    assert row["bits_per_byte"] == pytest.approx(math.log2(VOCAB), rel=1e-6)
    assert (row["tail_loss"] is None) == (factor == 1)
    row = sliding(uniform(), tokens, blocks, factor, 4, ONE_BYTE, CPU)
    assert row["loss"] == pytest.approx(math.log(VOCAB), abs=1e-6)
    assert row["n_targets"] == 6 * 4


def one_by_one(model, tokens, start, length):
    """Losses of the targets of one window, each from a forward of its own prefix."""
    found = []
    with torch.no_grad():
        for n in range(1, length + 1):
            x = torch.tensor(tokens[start : start + n].astype(np.int64)).unsqueeze(0)
            found.append(-model(x)[0][0, -1].log_softmax(-1)[int(tokens[start + n])].item())
    return found


@pytest.mark.parametrize("name", ["alibi", "rope", "nope"])
def test_disjoint_is_a_hand_written_sum(tokens, name, fresh):
    """Window by window and token by token, without batches, masks or reshapes."""
    model = excite(make(name, MODEL), fresh)
    blocks = cut(len(tokens), L, [1, 2, 4])
    for factor in (1, 2, 4):
        length = factor * L
        windows = [one_by_one(model, tokens, start, length) for start in range(0, 192, length)]
        flat = sum(windows, [])
        row = disjoint(model, tokens, blocks, factor, ONE_BYTE, CPU)
        assert row["loss"] == pytest.approx(sum(flat) / 192, abs=1e-4)
        means = [sum(flat[n : n + 32]) / 32 for n in range(0, 192, 32)]
        error = math.sqrt(sum((m - sum(means) / 6) ** 2 for m in means) / 5 / 6)
        assert row["loss_se"] == pytest.approx(error, abs=1e-4)
        if factor > 1:
            tail = [loss for window in windows for loss in window[L:]]
            assert row["tail_loss"] == pytest.approx(sum(tail) / len(tail), abs=1e-4)
        bins = row["position_bins"]
        assert bins[0] == 0 and bins[-1] == length and len(row["position_curve"]) == len(bins) - 1
        for a, b, found in zip(bins, bins[1:], row["position_curve"], strict=False):
            values = [loss for window in windows for loss in window[a:b]]
            assert found == pytest.approx(sum(values) / len(values), abs=1e-4)


def test_a_limit_spreads_the_blocks_over_the_text(tokens, fresh):
    """Blocks 0, 2 and 4 of 6, at every factor and in both protocols."""
    model = excite(make("rope", MODEL), fresh)
    blocks = cut(len(tokens), L, [1, 2, 4], limit=100)
    for factor in (1, 2, 4):
        length = factor * L
        starts = [block + n for block in (0, 64, 128) for n in range(0, 32, length)]
        flat = [loss for start in starts for loss in one_by_one(model, tokens, start, length)]
        row = disjoint(model, tokens, blocks, factor, np.arange(VOCAB), CPU)
        assert row["loss"] == pytest.approx(sum(flat) / 96, abs=1e-4) and row["n_targets"] == 96
        targets = [int(tokens[s + n]) for s in (0, 64, 128) for n in range(1, 33)]
        assert row["n_bytes"] == sum(targets)
        ends = [sum(one_by_one(model, tokens, s + 32 - length, length)[-3:]) for s in (0, 64, 128)]
        row = sliding(model, tokens, blocks, factor, 3, np.arange(VOCAB), CPU)
        assert row["loss"] == pytest.approx(sum(ends) / 9, abs=1e-4)
        assert row["n_bytes"] == sum(int(tokens[s + n]) for s in (0, 64, 128) for n in (30, 31, 32))


@pytest.mark.parametrize("stride", [1, 4, 8])
def test_sliding_is_a_hand_written_sum(tokens, stride, fresh):
    """The last `stride` targets of each block, each with at least f L - stride tokens of its block before it."""
    model = excite(make("rope", MODEL), fresh)
    blocks = cut(len(tokens), L, [1, 2, 4])
    for factor in (1, 2, 4):
        length = factor * L
        expected = [
            loss
            for block in range(6)
            for loss in one_by_one(model, tokens, (block + 1) * 32 - length, length)[-stride:]
        ]
        row = sliding(model, tokens, blocks, factor, stride, ONE_BYTE, CPU)
        assert row["n_targets"] == 6 * stride
        assert row["loss"] == pytest.approx(sum(expected) / len(expected), abs=1e-4)


def test_every_target_is_scored_once_at_every_factor(tokens, fresh, monkeypatch):
    """Changing the text of one block changes that block's losses at every factor and no other's."""
    model = excite(make("alibi", MODEL), fresh)
    blocks = cut(len(tokens), L, [1, 2, 4])
    changed = tokens.copy()
    changed[2 * 32 + 1 : 3 * 32] = (changed[2 * 32 + 1 : 3 * 32] + 1) % VOCAB  # inside block 2; its edges stay
    scored, statistics = [], gpt.evaluate.statistics

    def seen(losses, targets, token_bytes):
        scored.append((losses.copy(), targets.copy()))
        return statistics(losses, targets, token_bytes)

    monkeypatch.setattr(gpt.evaluate, "statistics", seen)
    ends = range(32, 193, 32)
    for run, expected in (
        (lambda t, f: disjoint(model, t, blocks, f, ONE_BYTE, CPU), tokens[1:193]),
        (lambda t, f: sliding(model, t, blocks, f, 4, ONE_BYTE, CPU), [t for e in ends for t in tokens[e - 3 : e + 1]]),
    ):
        for f in (1, 2, 4):
            scored.clear()
            run(tokens, f), run(changed, f)
            (before, targets), (after, _) = scored
            assert targets.ravel().tolist() == list(expected)
            same = np.isclose(before, after, rtol=0, atol=1e-6).all(axis=1)  # (blocks,)
            assert same.tolist() == [True, True, False, True, True, True]


def test_a_block_never_mixes_with_its_neighbour(tokens, fresh):
    """The losses of block 1 do not move when block 0 is another text."""
    model = excite(make("nope", MODEL), fresh)
    other = tokens.copy()
    other[:32] = torch.randint(0, VOCAB, (32,), generator=fresh).numpy()
    one = Blocks(32, 1, 1, 0)
    for f in (1, 2, 4):
        for run in (
            lambda t, f: disjoint(model, t, one, f, ONE_BYTE, CPU),
            lambda t, f: sliding(model, t, one, f, 4, ONE_BYTE, CPU),
        ):
            assert run(tokens[32:], f)["loss"] == run(other[32:], f)["loss"]


def test_sums_not_means_of_means(fresh):
    """The loss is that of all targets together; bits per byte divides by the bytes of those very targets."""
    tokens = torch.randint(0, VOCAB, (65,), generator=fresh).numpy().astype(np.uint16)
    sizes = torch.randint(0, 4, (VOCAB,), generator=fresh).numpy().astype(np.int64)
    model = excite(make("rope", MODEL), fresh)
    row = disjoint(model, tokens, cut(65, L, [1, 2]), 1, sizes, CPU)
    n_bytes = int(sizes[tokens[1:]].sum())
    assert row["n_bytes"] == n_bytes
    assert row["bits_per_byte"] == pytest.approx(row["loss"] * 64 / math.log(2) / n_bytes)


def test_a_scheme_that_cannot_go_further_says_so(tokens):
    blocks = cut(len(tokens), L, [1, 2])
    disjoint(uniform("learned"), tokens, blocks, 1, ONE_BYTE, CPU)
    for run in (disjoint, lambda m, t, b, f, n, r: sliding(m, t, b, f, 4, n, r)):
        with pytest.raises(LengthError, match="16 tokens, its table has 8 rows"):
            run(uniform("learned"), tokens, blocks, 2, ONE_BYTE, CPU)


def test_batches_do_not_matter(tokens, fresh, monkeypatch):
    """All windows at once or one at a time: the same losses."""
    import gpt.evaluate as evaluate

    model = excite(make("t5", MODEL), fresh)
    whole = evaluate.window_losses(model, tokens, np.arange(20) * L, L, L, CPU)
    model.vocab_size, kept = 2**26, model.vocab_size
    monkeypatch.setattr(model, "head", lambda x: torch.nn.functional.linear(x, model.wte.weight)[..., :kept])
    single = evaluate.window_losses(model, tokens, np.arange(20) * L, L, L, CPU)
    np.testing.assert_allclose(whole, single, atol=1e-5)


@pytest.mark.parametrize("name", SCHEMES)
def test_evaluation_leaves_no_trace(tokens, name, fresh):
    """Neither mode, weights, gradients nor the random state change; the loss before and after is the same."""
    model = excite(make(name, MODEL), fresh).train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    first = validation_loss(model, tokens, 64, CPU)
    if (model.position.max_len or 4 * L) >= 4 * L:
        disjoint(model, tokens, cut(len(tokens), L, [1, 4]), 4, ONE_BYTE, CPU)
    assert validation_loss(model, tokens, 64, CPU) == first
    assert model.training and torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in before.items())
    assert all(p.grad is None for p in model.parameters())


def test_standard_error():
    assert standard_error(np.array([1.0, 2.0, 3.0])) == pytest.approx(1 / math.sqrt(3))
    assert standard_error(np.array([5.0])) is None
