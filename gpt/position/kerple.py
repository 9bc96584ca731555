"""kerple: a trained penalty on the score, logarithmic or a power of the distance, with its own shape for each head."""

from typing import ClassVar, Literal

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from gpt.position.base import Position, uniform, within
from gpt.schema import STRICT, ModelConfig, PositionConfig

LEAST = 0.01  # of a and p, as in the authors' code


@dataclass(frozen=True, config=STRICT)
class KerpleConfig(PositionConfig):
    kernel: Literal["log", "power"] = "log"


class Kerple(Position):
    """score += -p_h ln(1 + a_h (i - j)), or -a_h (i - j)^p_h, shared by all layers.

    Chi et al. 2022, https://arxiv.org/abs/2205.09921. Initial values are those of the authors' code: a uniform on
    (0, 1), p on (0, 2) for each head. That code clamps the parameters in place; here they are clamped in the forward,
    and the gradient passes the clamp unchanged, so that a parameter beyond it can come back.
    """

    Config: ClassVar[type] = KerpleConfig

    def __init__(self, config: KerpleConfig, model: ModelConfig):
        super().__init__(config, model)
        self.a = nn.Parameter(torch.empty(model.n_head))
        self.p = nn.Parameter(torch.empty(model.n_head))

    def pair(self, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = (i - j).clamp(min=0).float()
        if self.config.kernel == "log":
            a, p = within(self.a, LEAST), within(self.p, LEAST)
            return -p[head] * torch.log1p(a[head] * distance)
        a, p = within(self.a, LEAST), within(self.p, LEAST, 2.0)
        # 0^p is 0, but its gradient would be 0 log 0
        return -a[head] * torch.where(distance > 0, distance.clamp(min=1) ** p[head], 0.0)

    def initialize(self, draw) -> None:
        self.a.copy_(uniform(draw("a", 1.0)))
        self.p.copy_(2 * uniform(draw("p", 1.0)))
