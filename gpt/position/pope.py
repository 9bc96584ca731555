"""pope: the content of a channel decides how strongly it scores, the distance alone at which angle."""

import math
from collections.abc import Callable
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic.dataclasses import dataclass
from torch import Tensor

from gpt.errors import ConfigError
from gpt.position.base import each_layer, uniform, within
from gpt.position.rope import Rope, RopeConfig
from gpt.schema import STRICT, ModelConfig

LEAST = -2 * math.pi  # of a phase, and 0 the most


@dataclass(frozen=True, config=STRICT)
class PopeConfig(RopeConfig):
    phase: Literal["zero", "uniform", "none"] = "zero"  # where the trained phases start; none: there are none

    def check_width(self, model: ModelConfig) -> None:
        if self.layout != "interleaved":
            raise ConfigError("position.layout", self.layout, "interleaved: here a channel turns alone, not in a pair")
        if self.fraction != 1:
            raise ConfigError("position.fraction", self.fraction, "1: here all channels turn; fewer with position.keep")

    def schedule_width(self, model: ModelConfig) -> int:
        return 2 * model.head_width  # a frequency for each channel


class Pope(Rope):
    """Polar coordinate embedding (Gopalakrishnan et al. 2025, https://arxiv.org/abs/2509.10534).

    Channel c of query i and key j scores softplus(q_c) softplus(k_c) cos((j - i) base^(-c/d) + phase_c), with d
    frequencies where RoPE has d/2, and a phase for each layer, head and channel, trained and clamped to [-2 pi, 0].
    Unlike a plain clamp, this one lets the gradient through: phases start at its edge, and would stay beyond it for
    ever. Queries and keys become cosine and sine parts, twice as wide; the scale of scores stays d^-1/2.
    """

    Config: ClassVar[type] = PopeConfig

    def __init__(self, config: PopeConfig, model: ModelConfig):
        super().__init__(config, model)
        if config.phase != "none":
            self.phase = each_layer(config, model, model.n_head, 1, model.head_width)

    def initialize(self, draw: Callable[[str, float], Tensor]) -> None:
        super().initialize(draw)
        for layer, phase in self.phase.items() if self.config.phase != "none" else ():
            phase.zero_()
            if self.config.phase == "uniform":
                phase.copy_(LEAST * uniform(draw(f"phase.{layer}", 1.0)))

    def prepare(self, q_pos: Tensor, k_pos: Tensor) -> tuple[Tensor, Tensor, float]:
        turns, size = self.frequencies(k_pos)
        return q_pos.float().unsqueeze(-1) * turns, k_pos.float().unsqueeze(-1) * turns, size

    def rotate(self, q: Tensor, k: Tensor, ctx: tuple[Tensor, Tensor, float], layer: int) -> tuple[Tensor, Tensor]:
        q_angle, k_angle, size = ctx
        if self.config.phase != "none":
            k_angle = k_angle + within(self.phase[str(layer)], LEAST, 0)  # (H, Tk, d)
        return polar(q, q_angle, size), polar(k, k_angle, size)


def polar(x: Tensor, angle: Tensor, size: float) -> Tensor:
    """x (B, H, T, d) -> (B, H, T, 2 d): softplus of it at these angles, computed in float32, returned in x's type."""
    length = F.softplus(x.float()) * size
    return torch.cat((length * angle.cos(), length * angle.sin()), dim=-1).to(x.dtype)
