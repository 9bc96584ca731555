"""AdamW with parameter groups by role, and learning-rate schedules."""

import math

import torch
from torch import Tensor, nn

from gpt.schema import OptimConfig


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Projections and the token embedding decay; norms, biases and whatever the position scheme owns do not."""
    decayed, kept, position = [], [], []
    for name, parameter in model.named_parameters():
        if name.startswith("position."):
            position.append(parameter)
        elif name.endswith(".weight") and ".ln_" not in f".{name}":
            decayed.append(parameter)
        else:
            kept.append(parameter)
    groups = [
        {"name": "decayed", "params": decayed, "weight_decay": weight_decay},
        {"name": "kept", "params": kept, "weight_decay": 0.0},
        {"name": "position", "params": position, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW (https://arxiv.org/abs/1711.05101), fused where the device has that."""
    device = next(model.parameters()).device.type
    return torch.optim.AdamW(
        parameter_groups(model, config.weight_decay),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=device in ("cpu", "cuda"),
    )


def learning_rate(step: int, steps: int, config: OptimConfig) -> float:
    """Rate of step 0, 1, ... steps - 1: linear warm-up, then cosine (https://arxiv.org/abs/1608.03983), WSD
    (https://arxiv.org/abs/2404.06395: constant, then a linear fall) or constant."""
    if step < config.warmup:
        return config.lr * (step + 1) / (config.warmup + 1)
    if config.schedule == "constant":
        return config.lr
    if config.schedule == "wsd":
        start = max(config.warmup, steps - round(config.decay * steps))
        share = (step - start) / max(1, steps - start)
        return config.lr - max(0.0, share) * (config.lr - config.min_lr)
    share = min(1.0, (step - config.warmup) / max(1, steps - config.warmup))
    return config.min_lr + 0.5 * (1 + math.cos(math.pi * share)) * (config.lr - config.min_lr)


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The optimizer's state as named tensors: `<parameter>/<quantity>`."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{names[parameter]}/{quantity}": value
        for parameter, state in optimizer.state.items()
        for quantity, value in state.items()
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """The inverse of `optimizer_tensors`, into an optimizer built for the same model."""
    named: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        name, quantity = key.rsplit("/", 1)
        named.setdefault(name, {})[quantity] = value
    names = {parameter: name for name, parameter in model.named_parameters()}
    order = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    state = {index: named[name] for index, name in enumerate(order) if name in named}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
