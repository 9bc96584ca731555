"""learned: one trained vector a position, added to the token embedding."""

from typing import ClassVar

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from gpt.position.base import Position
from gpt.position.table import Overflow, lookup
from gpt.schema import STRICT, ModelConfig, PositionConfig


@dataclass(frozen=True, config=STRICT)
class LearnedConfig(PositionConfig):
    overflow: Overflow = "error"  # past the table's last row


class Learned(Position):
    """x_i = token_i + P[i], P of block_size rows (Gehring et al. 2017, https://arxiv.org/abs/1705.03122; GPT-2).

    Past the table `overflow` decides, see `lookup`. The model raises LengthError where it is `error`, and for a cache
    that `interpolate` would invalidate.
    """

    Config: ClassVar[type] = LearnedConfig
    relative: ClassVar[bool] = False

    def __init__(self, config: LearnedConfig, model: ModelConfig):
        super().__init__(config, model)
        self.table = nn.Parameter(torch.empty(self.trained_ids, model.n_embd))

    @property
    def max_len(self) -> int | None:
        return self.trained_ids if self.config.overflow == "error" else super().max_len

    @property
    def stable(self) -> bool:
        return super().stable and self.config.overflow != "interpolate"

    def embed(self, x: Tensor, pos: Tensor) -> Tensor:
        return x + lookup(self.table, pos, self.config.overflow)

    def initialize(self, draw) -> None:
        self.table.copy_(draw("table", 0.02))
