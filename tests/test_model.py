"""The GPT itself: initial weights by address, counts, the shared parts that no scheme may move."""

import math

import pytest
import torch

from gpt.errors import ConfigError
from gpt.model import GPT, normal
from gpt.position import SCHEMES
from gpt.schema import ModelConfig, build
from tests.helpers import SMALL, excite, ids, make


@pytest.mark.parametrize("name", SCHEMES)
def test_shared_weights_are_bit_identical_at_step_0(name):
    """Whatever else a scheme has; and its own parameters are all that is added."""
    base, other = make("nope", seed=7).state_dict(), make(name, seed=7).state_dict()
    for key, value in base.items():
        assert torch.equal(value, other[key])
    assert {key for key in other.keys() - base.keys() if not key.startswith("position.")} == set()


def test_initial_weights_depend_on_the_seed_and_the_name_alone():
    torch.manual_seed(1)
    a = make("learned", seed=3).state_dict()
    torch.manual_seed(2)
    b = make("learned", seed=3).state_dict()
    c = make("learned", seed=4).state_dict()
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert not torch.equal(a["wte.weight"], c["wte.weight"])
    assert not torch.equal(a["h.0.attn.c_attn.weight"], a["h.1.attn.c_attn.weight"])
    deeper = make("learned", ModelConfig(n_layer=3, n_head=4, n_embd=32, block_size=16), seed=3).state_dict()
    assert torch.equal(a["h.1.mlp.c_fc.weight"], deeper["h.1.mlp.c_fc.weight"])


def test_initial_values_are_gpt2s():
    """std 0.02; residual projections 0.02 / sqrt(2 n_layer); norms 1; biases 0."""
    config = ModelConfig(n_layer=4, n_head=4, n_embd=128, block_size=64, bias=True)
    state = make("learned", config).state_dict()
    for key, value in state.items():
        if key.endswith("bias"):
            assert value.abs().max() == 0
        elif "ln_" in key:
            assert torch.equal(value, torch.ones_like(value))
        else:
            std = 0.02 / math.sqrt(8) if key.endswith("c_proj.weight") else 0.02
            assert value.std().item() == pytest.approx(std, rel=0.05) and abs(value.mean()) < 0.05 * std


def test_noise_is_the_same_in_every_version():
    """First numbers of a stream, so that a paper's runs can be repeated; a change here changes all results."""
    found = normal(0, "a", torch.Size([4]), 1.0)
    torch.testing.assert_close(found, torch.tensor([-0.6780127, -0.7582535, 0.9064565, -0.6895076]), atol=0, rtol=1e-6)
    assert torch.equal(normal(0, "a", torch.Size([4]), 0.5), found / 2)


def test_gpt2_parameter_counts():
    """C34: nanoGPT's GPT-2 with biases: 124,475,904 in all with 50,304 rows, 123,689,472 without the position table.

    The token embedding is as much a table, and stays in that count because it is the head too.
    """
    config = ModelConfig(n_layer=12, n_head=12, n_embd=768, block_size=1024, bias=True, vocab_multiple=64)
    with torch.device("meta"):
        count = GPT(config, SCHEMES["learned"].Config(name="learned"), 50257).count_parameters()
    assert count["total"] == 124_475_904 and count["total"] - count["position"] == 123_689_472


def test_learned_table_is_the_only_difference_in_count():
    counts = {name: make(name, ModelConfig()).count_parameters() for name in SCHEMES}
    assert counts["learned"]["total"] - counts["rope"]["total"] == 64 * 128
    assert counts["rope"]["total"] == counts["alibi"]["total"] == counts["nope"]["total"]
    for name, count in counts.items():
        assert count["total"] - count["position"] == counts["nope"]["total"], name


def test_padding_rows_are_never_predicted(fresh):
    model = excite(make("rope", ModelConfig(n_layer=1, n_head=2, n_embd=16, block_size=8, vocab_multiple=64)), fresh)
    assert model.wte.weight.shape[0] == 64
    assert model(ids((2, 8), fresh))[0].shape == (2, 8, 61)


def test_loss_is_the_mean_of_the_losses(fresh):
    model = excite(make("alibi"), fresh)
    x, y = ids((3, 16), fresh), ids((3, 16), fresh)
    logits, loss = model(x, y)
    by_hand = -logits.log_softmax(-1).gather(-1, y.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(model.losses(x, y), by_hand)
    torch.testing.assert_close(model.losses(x, y, last=5), by_hand[:, -5:])
    torch.testing.assert_close(loss, by_hand.mean())


@pytest.mark.parametrize("name", SCHEMES)
def test_every_parameter_gets_a_gradient(name, fresh):
    model = make(name).train()
    model(ids((4, 16), fresh), ids((4, 16), fresh))[1].backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, key


@pytest.mark.parametrize("name", SCHEMES)
def test_low_precision_copies_work(name, fresh):
    """After .bfloat16(), and under autocast, all schemes run and stay near float32."""
    x = ids((2, 16), fresh)
    model = excite(make(name), fresh, std=0.1)
    with torch.no_grad():
        exact = model(x)[0]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mixed = model(x)[0]
        low = model.bfloat16()(x)[0]
    assert low.dtype == torch.bfloat16
    for found in (mixed, low):
        assert (found.float() - exact).abs().mean() < 0.05 * exact.abs().mean() + 0.02


@pytest.mark.parametrize("name", SCHEMES)
def test_no_scheme_sees_its_answer(name, fresh):
    """On fresh random tokens there is nothing to learn: the loss stays at ln(vocabulary)."""
    vocab = 16
    model = make(name, ModelConfig(n_layer=1, n_head=2, n_embd=16, block_size=16), vocab=vocab).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    last = []
    for _ in range(300):
        x = ids((8, 17), fresh, vocab)
        loss = model(x[:, :-1], x[:, 1:])[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        last = (last + [loss.item()])[-100:]
    assert sum(last) / len(last) > math.log(vocab) - 0.01


def test_refused_configurations():
    with pytest.raises(ConfigError, match="model.n_embd: got 30, allowed: a multiple of model.n_head=4"):
        ModelConfig(n_head=4, n_embd=30).check()
    with pytest.raises(ConfigError, match="model.dropout: got 1.0, allowed: a number >= 0 and < 1"):
        build(ModelConfig, {"dropout": 1.0}, "model")
    with pytest.raises(ConfigError, match="position.layers: got 'PPN', allowed: at most model.n_layer=2"):
        SCHEMES["nope"].Config(name="nope", layers="PPN").check(SMALL)
