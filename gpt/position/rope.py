"""rope: queries and keys turned by an angle that grows with the position."""

import math
from typing import ClassVar

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from gpt.errors import ConfigError
from gpt.position.base import Position
from gpt.schema import STRICT, ModelConfig, PositionConfig, Positive


@dataclass(frozen=True, config=STRICT)
class RopeConfig(PositionConfig):
    base: Positive = 10000.0

    def check(self, model: ModelConfig) -> None:
        super().check(model)
        if model.head_width % 2:
            raise ConfigError(
                "model.n_embd",
                model.n_embd,
                f"an even head width for rotation, got n_embd / n_head = {model.head_width}",
            )


class Rope(Position):
    """Rotary embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864).

    The pair of channels (2r, 2r+1) of every query and key at position i is rotated by i base^(-2r/d), so that the
    product of a query at i and a key at j depends on i - j. Values are not rotated.
    """

    Config: ClassVar[type] = RopeConfig

    def __init__(self, config: RopeConfig, model: ModelConfig):
        super().__init__(config, model)
        self.head_width = model.head_width

    def prepare(self, q_pos: Tensor, k_pos: Tensor) -> tuple[Tensor, Tensor]:
        turns = frequencies(self.head_width, self.config.base, k_pos.device)
        k_turn = rotation(k_pos, turns)
        return (k_turn if q_pos is k_pos else rotation(q_pos, turns)), k_turn

    def rotate(self, q: Tensor, k: Tensor, ctx: tuple[Tensor, Tensor], layer: int) -> tuple[Tensor, Tensor]:
        return rotate_pairs(q, ctx[0]), rotate_pairs(k, ctx[1])


def frequencies(width: int, base: float, device: torch.device | None = None) -> Tensor:
    """(width/2,) float32: radians a position for each pair of channels."""
    return torch.exp(torch.arange(0, width, 2, device=device) * (-math.log(base) / width))


def rotation(pos: Tensor, turns: Tensor) -> Tensor:
    """Rotations at ids (T,): complex (T, d/2) in eager mode on the CPU, else cosine and sine as (T, d/2, 2) float32."""
    angle = pos.float().unsqueeze(-1) * turns
    if angle.is_cpu and not torch.compiler.is_compiling():  # one fused product there; inductor has no complex numbers
        return torch.polar(torch.ones_like(angle), angle)
    return torch.stack((angle.cos(), angle.sin()), dim=-1)


def rotate_pairs(x: Tensor, rotation: Tensor) -> Tensor:
    """x (B, H, T, d) with each pair of channels turned, computed in float32, returned in x's type."""
    pairs = x.float().unflatten(-1, (-1, 2))  # (B, H, T, d/2, 2)
    if rotation.is_complex():
        return torch.view_as_real(torch.view_as_complex(pairs) * rotation).flatten(-2).to(x.dtype)
    a, b = pairs.unbind(-1)
    cos, sin = rotation.unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2).to(x.dtype)
