"""Small models and noise that several test files share."""

import torch

from gpt.model import GPT
from gpt.position import SCHEMES
from gpt.schema import ModelConfig

VOCAB = 61
SMALL = ModelConfig(n_layer=2, n_head=4, n_embd=32, block_size=16)


def make(name: str, model: ModelConfig = SMALL, seed: int = 0, vocab: int = VOCAB, **options) -> GPT:
    """A GPT with the scheme `name`, whose parameters are larger than at the start, so that positions matter."""
    return GPT(model, SCHEMES[name].Config(name=name, **options), vocab, seed).eval()


def excite(model: GPT, generator: torch.Generator, std: float = 0.3) -> GPT:
    """Random weights of a size at which every part of the model moves its output."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    return model


def ids(shape: tuple[int, ...], generator: torch.Generator, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randint(0, vocab, shape, generator=generator)
