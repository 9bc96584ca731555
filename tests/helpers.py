"""Small models and noise that several test files share."""

import functools
import operator
from pathlib import Path

import torch
import yaml

from gpt.model import GPT
from gpt.position import SCHEMES
from gpt.schema import ModelConfig, build, plain

VOCAB = 61
SMALL = ModelConfig(n_layer=2, n_head=4, n_embd=32, block_size=16)


def make(name: str, model: ModelConfig = SMALL, seed: int = 0, vocab: int = VOCAB, **options) -> GPT:
    """A GPT with the scheme `name` as its YAML says, but for `options`."""
    return GPT(model, build(SCHEMES[name].Config, as_written(name) | plain(options), "position"), vocab, seed).eval()


@functools.cache
def as_written(name: str) -> dict:
    """The values of a scheme's YAML, on top of those of the YAML that its `defaults` name."""
    values = yaml.safe_load((Path(__file__).parents[1] / "configs" / "position" / f"{name}.yaml").read_text())
    parents = [as_written(parent) for parent in values.pop("defaults", []) if parent != "_self_"]
    return functools.reduce(operator.or_, [*parents, values])


def excite(model: GPT, generator: torch.Generator, std: float = 0.3) -> GPT:
    """Random weights of a size at which every part of the model moves its output."""
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.shape == (model.config.n_head,):  # near 0 or below it, a slope would do nothing
                noise = 0.5 + noise.abs()
            parameter.copy_(std * (noise if noise.numel() > 1 else noise.sign()))  # a single one must not be near 0
    return model


def ids(shape: tuple[int, ...], generator: torch.Generator, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randint(0, vocab, shape, generator=generator)
