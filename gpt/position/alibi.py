"""alibi: a penalty on the score that grows with the distance, with another slope for each head."""

import math

import torch
from torch import Tensor

from gpt.position.base import Position
from gpt.schema import ModelConfig, PositionConfig


class Alibi(Position):
    """score += -m_h (i - j), not divided by sqrt(d) (Press et al. 2022, https://arxiv.org/abs/2108.12409).

    Slopes are those of the authors' code. For a number of heads that is no power of two the paper's text says
    something else (a ratio of 2^(-8/n) for any n); BLOOM, MPT and Baichuan follow the code too.
    """

    def __init__(self, config: PositionConfig, model: ModelConfig):
        super().__init__(config, model)
        self.slopes = slopes(model.n_head)

    def pair(self, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        slope = torch.tensor(self.slopes, device=head.device)[head]
        return -slope * (i - j).float()


def slopes(n_head: int) -> list[float]:
    """m_h for h = 1..n: 2^(-8h/n) at a power of two, else that of the power below, filled up from the power above."""
    power = 2 ** math.floor(math.log2(n_head))
    exact = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    if power == n_head:
        return exact
    between = [2 ** (-8 * h / (2 * power)) for h in range(1, 2 * power + 1)][0::2]
    return exact + between[: n_head - power]
