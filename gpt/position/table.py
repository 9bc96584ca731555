"""Tables with one trained row for each position, and what may be read past their end."""

from typing import ClassVar, Literal

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from gpt.position.base import Position
from gpt.schema import STRICT, ModelConfig, PositionConfig

# What happens past the last row. Anything but `error` is a choice of the evaluation, named in its rows.
Overflow = Literal["error", "clamp", "wrap", "interpolate"]


@dataclass(frozen=True, config=STRICT)
class TabledConfig(PositionConfig):
    overflow: Overflow = "error"  # past the table's last row


class Tabled(Position):
    """What schemes with a table (rows, D) share, one row for each id of the training.

    Past the table `overflow` decides, see `lookup`. The model raises LengthError where it is `error`, and for a cache
    that `interpolate` would invalidate.
    """

    Config: ClassVar[type] = TabledConfig
    relative: ClassVar[bool] = False

    def __init__(self, config: TabledConfig, model: ModelConfig):
        super().__init__(config, model)
        self.table = nn.Parameter(torch.empty(self.trained_ids, model.n_embd))

    @property
    def max_len(self) -> int | None:
        ends = self.config.overflow == "error" or self.config.randomized is not None
        return self.trained_ids if ends else None

    @property
    def stable(self) -> bool:
        return self.config.overflow != "interpolate" and self.config.randomized is None

    def rows(self, pos: Tensor) -> Tensor:
        """(T, D) at rising ids (T,)."""
        return lookup(self.table, pos, self.config.overflow)


def lookup(table: Tensor, pos: Tensor, overflow: Overflow) -> Tensor:
    """(T, width) vectors at rising ids (T,) from a table (rows, width).

    Past its rows there is no right answer; the policy names the wrong one to measure. `error`: the scheme's max_len
    refuses. `clamp` repeats the last row, `wrap` starts again at row 0, `interpolate` squeezes all T positions into the
    table (row i rows / T), which re-places every token as a text grows.
    """
    rows = len(table)
    last = rows - 1
    if overflow == "clamp":
        pos = pos.clamp(max=last)
    elif overflow == "wrap":
        pos = pos % rows
    elif overflow == "interpolate" and int(pos[-1]) >= rows:
        place = (pos.float() * (rows / (int(pos[-1]) + 1))).clamp(max=last)
        low = place.floor().long()
        share = (place - low).unsqueeze(-1).to(table.dtype)
        return torch.lerp(table[low], table[(low + 1).clamp(max=last)], share)
    return table[pos]
