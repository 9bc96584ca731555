"""learned: one trained vector a position, added to the token embedding."""

from typing import ClassVar, Literal

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from gpt.errors import LengthError
from gpt.position.base import Position
from gpt.schema import STRICT, ModelConfig, PositionConfig


@dataclass(frozen=True, config=STRICT)
class LearnedConfig(PositionConfig):
    # What happens past the table's last row. Anything but `error` is a choice of the evaluation, named in its rows.
    overflow: Literal["error", "clamp", "wrap", "interpolate"] = "error"


class Learned(Position):
    """x_i = token_i + P[i], P of block_size rows (Gehring et al. 2017, https://arxiv.org/abs/1705.03122; GPT-2).

    Past the table there is no right answer. `overflow` names the wrong one to measure: `error` refuses, `clamp` repeats
    the last row, `wrap` starts again at row 0, `interpolate` squeezes all T positions into the table (row i L / T).

    Raises LengthError past the table where overflow is `error`, and for a cache that `interpolate` would invalidate.
    """

    Config: ClassVar[type] = LearnedConfig
    relative: ClassVar[bool] = False

    def __init__(self, config: LearnedConfig, model: ModelConfig):
        super().__init__(config, model)
        self.rows = model.block_size
        self.table = nn.Parameter(torch.empty(model.block_size, model.n_embd))

    @property
    def overflow(self) -> str:
        return self.config.overflow

    @property
    def max_len(self) -> int | None:
        return self.rows if self.overflow == "error" else None

    def embed(self, x: Tensor, pos: Tensor) -> Tensor:
        return x + self.lookup(pos)

    def lookup(self, pos: Tensor) -> Tensor:
        """(T, D) vectors at ids (T,)."""
        last = self.rows - 1
        if self.overflow == "clamp":
            pos = pos.clamp(max=last)
        elif self.overflow == "wrap":
            pos = pos % self.rows
        elif self.overflow == "interpolate":
            length = int(pos[-1]) + 1
            if length > self.rows:
                if len(pos) < length:  # the rows of the tokens before would have to move
                    raise LengthError("overflow=interpolate re-places every token and cannot extend a cache; use clamp")
                place = (pos.float() * (self.rows / length)).clamp(max=last)
                low = place.floor().long()
                share = (place - low).unsqueeze(-1).to(self.table.dtype)
                return torch.lerp(self.table[low], self.table[(low + 1).clamp(max=last)], share)
        return self.table[pos]

    def initialize(self, draw) -> None:
        self.table.copy_(draw("table", 0.02))
