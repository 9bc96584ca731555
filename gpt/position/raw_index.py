"""raw_index: the position itself as a number, times one trained direction, added to the token embedding."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from gpt.position.base import Position
from gpt.schema import ModelConfig, PositionConfig


class RawIndex(Position):
    """x_i = token_i + i w, w of D trained numbers: Linear(1, D) without its bias.

    The direction is trained because the obvious one, w = 1 (i added to each channel), does nothing: LayerNorm takes the
    mean over the channels out again.
    """

    relative: ClassVar[bool] = False

    def __init__(self, config: PositionConfig, model: ModelConfig):
        super().__init__(config, model)
        self.direction = nn.Parameter(torch.empty(model.n_embd))

    def number(self, pos: Tensor) -> Tensor:
        """(T,) float32: what the direction is multiplied by at ids (T,)."""
        return pos.float()

    def embed(self, x: Tensor, pos: Tensor) -> Tensor:
        return x + (self.number(pos).unsqueeze(-1) * self.direction).to(x.dtype)

    def initialize(self, draw) -> None:
        self.direction.copy_(draw("direction", 0.02))
