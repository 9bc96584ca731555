"""sinusoidal: fixed sines and cosines of the position, added to the token embedding."""

import math
from typing import ClassVar, Literal

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from gpt.errors import ConfigError
from gpt.position.base import Position
from gpt.schema import STRICT, ModelConfig, Moderate, PositionConfig

Functions = Literal["both", "sin"]


@dataclass(frozen=True, config=STRICT)
class EncodingConfig(PositionConfig):
    base: Moderate = 10000.0

    def check(self, model: ModelConfig) -> None:
        super().check(model)
        if model.n_embd % 2:
            raise ConfigError("model.n_embd", model.n_embd, "an even width, for pairs of sine and cosine")


@dataclass(frozen=True, config=STRICT)
class SinusoidalConfig(EncodingConfig):
    scale: Literal["learned", "fixed"] = "learned"  # of the amplitude; both start at D^-1/2
    functions: Functions = "both"  # sin: no cosines


class Sinusoidal(Position):
    """x_i = token_i + s PE(i), PE(i)[2r] = sin(i base^(-2r/D)), PE(i)[2r+1] = cos(same) (Vaswani et al. 2017,
    https://arxiv.org/abs/1706.03762).

    At amplitude 1 the norm of PE is sqrt(D/2), 35 times that of an embedding drawn with std 0.02: it would drown the
    tokens. So s starts at D^-1/2 and by default is trained (one parameter).

    With functions=sin, PE(i)[r] = sin(i base^(-r/D)): as many channels, but no linear map takes PE(i) to PE(i + 1).
    """

    Config: ClassVar[type] = SinusoidalConfig
    relative: ClassVar[bool] = False

    def __init__(self, config: SinusoidalConfig, model: ModelConfig):
        super().__init__(config, model)
        self.width = model.n_embd
        self.start = model.n_embd**-0.5
        self.scale = nn.Parameter(torch.empty(())) if config.scale == "learned" else None

    def embed(self, x: Tensor, pos: Tensor) -> Tensor:
        scale = self.start if self.scale is None else self.scale
        return x + scale * encoding(pos, self.width, self.config.base, self.config.functions).to(x.dtype)

    def initialize(self, draw) -> None:
        if self.scale is not None:
            self.scale.fill_(self.start)


def encoding(pos: Tensor, width: int, base: float, functions: Functions = "both") -> Tensor:
    """(T, width) sine and cosine of width/2 angles, interleaved, or the sines of `width` angles; float32, and float64
    at ids in float64."""
    pos = pos if pos.is_floating_point() else pos.float()
    step = 2 if functions == "both" else 1
    rate = torch.exp(torch.arange(0, width, step, dtype=pos.dtype, device=pos.device) * (-math.log(base) / width))
    angle = pos.unsqueeze(-1) * rate
    if functions == "sin":
        return angle.sin()
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(-2)
