"""t5: a trained bias on the score for each head and bucket of distances."""

import math
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from gpt.errors import ConfigError
from gpt.position.base import Position
from gpt.schema import STRICT, ModelConfig, PositionConfig


@dataclass(frozen=True, config=STRICT)
class T5Config(PositionConfig):
    buckets: Annotated[int, Field(ge=2, le=2**24, multiple_of=2)] = 32
    max_distance: Annotated[int, Field(ge=2, le=2**40)] = 128  # from here on one bucket takes all

    def check(self, model: ModelConfig) -> None:
        super().check(model)
        if self.max_distance <= self.buckets // 2:
            raise ConfigError(
                "position.max_distance", self.max_distance, f"more than position.buckets / 2 = {self.buckets // 2}"
            )


class T5(Position):
    """score += b[bucket(i - j), h], one table for all layers (Raffel et al. 2020, https://arxiv.org/abs/1910.10683).

    The causal form: all buckets serve the past. Half of them hold one distance each, the rest grow logarithmically.
    T5 itself leaves out the 1/sqrt(d) of the scores; here it stays and the bias is added after it.
    """

    Config: ClassVar[type] = T5Config

    def __init__(self, config: T5Config, model: ModelConfig):
        super().__init__(config, model)
        self.bias = nn.Parameter(torch.empty(config.buckets, model.n_head))

    def pair(self, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return self.bias[bucket(i - j, self.config.buckets, self.config.max_distance), head].float()

    def initialize(self, draw) -> None:
        self.bias.copy_(draw("bias", 0.02))


def bucket(distance: Tensor, buckets: int = 32, max_distance: int = 128) -> Tensor:
    """Bucket number of each distance i - j (int64); the future (negative) falls into bucket 0."""
    exact = buckets // 2
    distance = distance.clamp(min=0)
    far = distance.clamp(min=exact).float()  # clamped first: log(0) would be -inf
    step = torch.log(far / exact) / math.log(max_distance / exact) * (buckets - exact)
    return torch.where(distance < exact, distance, (exact + step.long()).clamp(max=buckets - 1))
