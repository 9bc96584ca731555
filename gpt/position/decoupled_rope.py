"""decoupled_rope: heads have channels without rotation of their own, and few with, whose key all heads share."""

from typing import ClassVar

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from gpt.position.rope import Rope, RopeConfig, Share
from gpt.schema import STRICT


@dataclass(frozen=True, config=STRICT)
class DecoupledRopeConfig(RopeConfig):
    fraction: Share = 0.25


class DecoupledRope(Rope):
    """The decoupled RoPE of DeepSeek-V2's attention (https://arxiv.org/abs/2405.04434, equations 14 to 18).

    The first w channels of a head's query are turned, and so are those of one key for all heads, here the mean over the
    heads of their first w channels, so that the projections stay those of the other schemes. The other channels carry
    no position. Scores are scaled by the full head width. The low-rank compression of keys and values is no matter of
    position and is not here.
    """

    Config: ClassVar[type] = DecoupledRopeConfig

    def rotate(self, q: Tensor, k: Tensor, ctx: tuple[Tensor, Tensor], layer: int) -> tuple[Tensor, Tensor]:
        shared = self.turn(k[..., : self.width].mean(dim=1, keepdim=True), ctx[1])  # (B, 1, Tk, w)
        k = torch.cat((shared.expand(-1, k.shape[1], -1, -1), k[..., self.width :]), dim=-1)
        return self.turn(q, ctx[0]), k
