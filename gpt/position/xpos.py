"""xpos: RoPE whose queries grow and whose keys shrink with the position, so that scores fall with the distance."""

import math
from typing import ClassVar

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from gpt.errors import ConfigError, LengthError
from gpt.position.rope import Rope, RopeConfig
from gpt.schema import STRICT, ModelConfig, Moderate

STRONGEST = math.log(0.4 / 1.4)  # of the first pair: ln of what it shrinks by over scale_base tokens
LARGEST = 80.0  # e^80 and e^-80 leave room in float32 and bfloat16 for a product with a query


@dataclass(frozen=True, config=STRICT)
class XposConfig(RopeConfig):
    scale_base: Moderate = 512.0  # tokens

    def check(self, model: ModelConfig) -> None:
        super().check(model)
        ids = self.trained_ids(model)
        if ids > self.reach:
            smallest = math.ceil(ids * -STRONGEST / (2 * LARGEST))
            raise ConfigError("position.scale_base", self.scale_base, f"at least {smallest} for {ids} positions")

    @property
    def reach(self) -> int:
        """Positions of a text at most, so that nothing overflows: a growth of e^80 to either side of its middle."""
        return int(2 * LARGEST * self.scale_base / -STRONGEST)


class Xpos(Rope):
    """xPos (Sun et al. 2022, https://arxiv.org/abs/2212.10554), as in torchscale.

    On top of RoPE, pair r of a query at i is multiplied by zeta_r^(i/scale_base) and of a key at j by the inverse, with
    zeta_r = (2r + 0.4 w) / (1.4 w): their product falls by zeta_r^((i - j)/scale_base), fastest for the first pairs.
    Counting i and j from any centre gives the same product; here it is the middle of the text, where float32 reaches
    furthest. A cache keeps keys as they were before any of this, so no centre is ever mixed with another.
    """

    Config: ClassVar[type] = XposConfig

    def prepare(self, q_pos: Tensor, k_pos: Tensor) -> tuple[Tensor, Tensor]:
        if len(k_pos) > self.config.reach:
            raise LengthError(
                f"position={self.config.name}: {len(k_pos)} tokens, in float32 it reaches {self.config.reach} with "
                f"position.scale_base={self.config.scale_base:g}"
            )
        turns, size = self.frequencies(k_pos)
        centre = (k_pos[0] + k_pos[-1]) // 2
        growth = decay(self.schedule_width, k_pos.device).log() / self.config.scale_base
        grow, shrink = (growth * (pos - centre).float().unsqueeze(-1) for pos in (q_pos, k_pos))
        return self.rotation(q_pos, turns, size * grow.exp()), self.rotation(k_pos, turns, size * (-shrink).exp())


def decay(width: int, device: torch.device | None = None) -> Tensor:
    """(w/2,) float32: zeta, what a product shrinks by over scale_base tokens."""
    return (torch.arange(0, width, 2, device=device) + 0.4 * width) / (1.4 * width)
