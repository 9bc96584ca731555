"""alibi: a penalty on the score that grows with the distance, with another slope for each head."""

import math
from typing import ClassVar, Literal

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from gpt.position.base import Position
from gpt.schema import STRICT, ModelConfig, PositionConfig


@dataclass(frozen=True, config=STRICT)
class AlibiConfig(PositionConfig):
    slopes: Literal["code", "text", "learned"] = "code"


class Alibi(Position):
    """score += -m_h (i - j), not divided by sqrt(d) (Press et al. 2022, https://arxiv.org/abs/2108.12409).

    `code`: the slopes of the authors' code, which BLOOM, MPT and Baichuan follow. `text`: those of the paper's text,
    which differ where the number of heads is no power of two. `learned`: trained ones that start at the code's; what
    is trained are their logarithms, so that a slope can never turn negative.
    """

    Config: ClassVar[type] = AlibiConfig

    def __init__(self, config: AlibiConfig, model: ModelConfig):
        super().__init__(config, model)
        self.slopes = text_slopes(model.n_head) if config.slopes == "text" else slopes(model.n_head)
        if config.slopes == "learned":
            self.log_slopes = nn.Parameter(torch.empty(model.n_head))

    def pair(self, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if self.config.slopes == "learned":
            slope = self.log_slopes.float().exp()
        else:
            slope = torch.tensor(self.slopes, device=head.device)
        return -slope[head] * (i - j).float()

    def initialize(self, draw) -> None:
        if self.config.slopes == "learned":
            self.log_slopes.copy_(torch.tensor(self.slopes).log())


def slopes(n_head: int) -> list[float]:
    """m_h for h = 1..n: 2^(-8h/n) at a power of two, else that of the power below, filled up from the power above."""
    power = 2 ** math.floor(math.log2(n_head))
    return text_slopes(power) + text_slopes(2 * power)[0::2][: n_head - power]


def text_slopes(n_head: int) -> list[float]:
    """m_h = 2^(-8h/n) for h = 1..n, whatever n is."""
    return [2 ** (-8 * h / n_head) for h in range(1, n_head + 1)]
