"""Parameter groups by role, schedules at their corners, and an optimizer that comes back as it was."""

import pytest
import torch

from gpt.optim import build_optimizer, learning_rate, optimizer_tensors, parameter_groups, restore_optimizer
from gpt.position import SCHEMES
from gpt.schema import ModelConfig, OptimConfig
from tests.helpers import ids, make


@pytest.mark.parametrize("name", SCHEMES)
def test_groups_cover_every_parameter_once(name):
    model = make(name, ModelConfig(n_layer=2, n_head=4, n_embd=32, block_size=16, bias=True))
    names = {id(p): key for key, p in model.named_parameters()}
    groups = {group["name"]: [names[id(p)] for p in group["params"]] for group in parameter_groups(model, 0.1)}
    assert sorted(sum(groups.values(), [])) == sorted(names.values())
    decay = {group["name"]: group["weight_decay"] for group in parameter_groups(model, 0.1)}
    assert decay.pop("decayed") == 0.1 and set(decay.values()) == {0.0}
    expected = {"wte.weight"} | {f"h.{n}.{part}.weight" for n in (0, 1) for part in PROJECTIONS}
    assert set(groups["decayed"]) == expected
    assert all(key.startswith("position.") for key in groups.get("position", []))


PROJECTIONS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")


def test_cosine_schedule():
    config = OptimConfig(lr=1.0, min_lr=0.1, warmup=9, schedule="cosine")
    rates = [learning_rate(step, 109, config) for step in range(109)]
    assert rates[:9] == pytest.approx([n / 10 for n in range(1, 10)])  # nanoGPT's warm-up: never 0, below lr
    assert rates[9] == 1.0 and max(rates) == 1.0
    assert rates[59] == pytest.approx(0.55)  # half way: the mean of both ends
    assert all(a > b for a, b in zip(rates[9:], rates[10:], strict=False)) and rates[-1] > 0.1
    assert learning_rate(109, 109, config) == pytest.approx(0.1)


def test_wsd_schedule():
    config = OptimConfig(lr=1.0, min_lr=0.0, warmup=10, schedule="wsd", decay=0.25)
    rates = [learning_rate(step, 200, config) for step in range(201)]
    assert rates[10:151] == [1.0] * 141
    assert rates[175] == pytest.approx(0.5) and rates[200] == pytest.approx(0)


def test_constant_schedule():
    config = OptimConfig(lr=0.3, min_lr=0.1, warmup=0, schedule="constant")
    assert {learning_rate(step, 50, config) for step in range(50)} == {0.3}


@pytest.mark.parametrize("steps, warmup", [(1, 0), (1, 100), (5, 5)])
def test_short_runs_have_finite_rates(steps, warmup):
    for schedule in ("cosine", "wsd", "constant"):
        config = OptimConfig(lr=0.3, min_lr=0.1, warmup=warmup, schedule=schedule)
        assert all(0 < learning_rate(step, steps, config) <= 0.3 for step in range(steps))


@pytest.mark.parametrize("name", ["learned", "t5", "sinusoidal"])
def test_optimizer_comes_back_as_it_was(name, fresh):
    """Save after 3 steps, restore into a new optimizer: 3 further steps are bit-identical."""
    config = OptimConfig()
    x = ids((4, 16), fresh)

    def steps(model, optimizer, n):
        for _ in range(n):
            model(x, x)[1].backward()
            optimizer.step()
            optimizer.zero_grad()

    model = make(name).train()
    optimizer = build_optimizer(model, config)
    steps(model, optimizer, 3)
    tensors = {key: value.clone() for key, value in optimizer_tensors(optimizer, model).items()}
    twin = make(name).train()
    twin.load_state_dict(model.state_dict())
    second = build_optimizer(twin, config)
    restore_optimizer(second, twin, tensors)
    steps(model, optimizer, 3)
    steps(twin, second, 3)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)
    assert len(tensors) == 3 * len(list(model.parameters()))


def test_fused_step_is_the_formula(fresh):
    """One AdamW step with decoupled decay, by hand."""
    config = OptimConfig(lr=0.01, beta1=0.9, beta2=0.99, weight_decay=0.1)
    model = make("learned")
    optimizer = build_optimizer(model, config)
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=fresh)
    optimizer.step()
    for key, p in model.named_parameters():
        decay = 0.1 if key.endswith(".weight") and "ln_" not in key else 0.0
        expected = before[key] * (1 - 0.01 * decay) - 0.01 * p.grad / (p.grad.abs() + config.eps)
        torch.testing.assert_close(p.detach(), expected, atol=1e-6, rtol=1e-4)
