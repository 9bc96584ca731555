"""sandwich: a fixed bias on the score, the inner product of two sinusoidal codes, fainter with each head."""

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from gpt.errors import ConfigError
from gpt.position.base import Position
from gpt.schema import STRICT, ModelConfig, PositionConfig


@dataclass(frozen=True, config=STRICT)
class SandwichConfig(PositionConfig):
    width: Annotated[int, Field(ge=2, le=2**24)] = 128  # of the codes, not that of a head

    def check(self, model: ModelConfig) -> None:
        super().check(model)
        if self.width % 2:
            raise ConfigError("position.width", self.width, "an even number, of cosines and sines")


class Sandwich(Position):
    """score += (sum_r cos((i - j) 10000^(-2r/w)) - w/2) / (8h/H), r = 1 .. w/2, h = 1 .. H.

    Chi et al. 2023, https://arxiv.org/abs/2212.10356. The sum is the product of the sinusoidal codes of i and j: so the
    dense form is a product of two matrices (T, w), and nothing of size (T, T, w) is built.
    """

    Config: ClassVar[type] = SandwichConfig

    def pair(self, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        cosines = ((i - j).unsqueeze(-1) * self.turns(i.device)).cos().sum(-1)
        return self.compressed(cosines, head)

    def dense(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        last = k_pos[-1]  # counted from there: small angles are exact, and a shift of all ids changes nothing
        codes = [(pos - last).unsqueeze(-1) * self.turns(pos.device) for pos in (q_pos, k_pos)]
        q, k = (torch.cat((code.cos(), code.sin()), dim=-1) for code in codes)  # (Tq, w), (Tk, w)
        return self.compressed(q @ k.T, torch.arange(self.n_head, device=q_pos.device).view(-1, 1, 1))

    def turns(self, device: torch.device) -> Tensor:
        """(w/2,) float32 radians a position; r from 1, so that the fastest turns by less than 1."""
        width = self.config.width
        return 10000.0 ** (-torch.arange(2, width + 1, 2, device=device) / width)

    def compressed(self, cosines: Tensor, head: Tensor) -> Tensor:
        return (cosines - self.config.width / 2) * (self.n_head / 8 / (head + 1))
