"""concat: the position's vector beside the token's instead of added to it, and a trained matrix back to width D."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt.position.base import Position, exactly
from gpt.position.learned import Learned
from gpt.position.sinusoidal import EncodingConfig, encoding
from gpt.position.table import TabledConfig
from gpt.schema import ModelConfig


class Concat(Learned):
    """x_i = W [token_i; P[i]], P as in `learned`, W (D, 2D) starting as [I | I]: at step 0 this is `learned`.

    2 D^2 parameters beside the table. Addition is the case where both halves of W are I. Both tables are trained: the
    halves could be folded into them; all that W adds is a token embedding at the input other than the tied head's. A
    residual stream 2D wide throughout would instead make the blocks four times as large.
    """

    def __init__(self, config: TabledConfig, model: ModelConfig):
        super().__init__(config, model)
        self.mix = nn.Parameter(torch.empty(model.n_embd, 2 * model.n_embd))

    def embed(self, x: Tensor, pos: Tensor) -> Tensor:
        return beside(x, self.rows(pos), self.mix)

    def initialize(self, draw) -> None:
        super().initialize(draw)
        self.mix.copy_(torch.eye(len(self.mix)).repeat(1, 2))


class ConcatSinusoidal(Position):
    """x_i = W [token_i; D^-1/2 PE(i)], PE as in `sinusoidal`, W (D, 2D) starting as [I | I]. 2 D^2 parameters."""

    Config: ClassVar[type] = EncodingConfig
    relative: ClassVar[bool] = False

    def __init__(self, config: EncodingConfig, model: ModelConfig):
        super().__init__(config, model)
        self.mix = nn.Parameter(torch.empty(model.n_embd, 2 * model.n_embd))

    def embed(self, x: Tensor, pos: Tensor) -> Tensor:
        width = x.shape[-1]
        return beside(x, (width**-0.5 * encoding(pos, width, self.config.base)).to(x.dtype), self.mix)

    def initialize(self, draw) -> None:
        self.mix.copy_(torch.eye(len(self.mix)).repeat(1, 2))


def beside(x: Tensor, code: Tensor, mix: Tensor) -> Tensor:
    """mix [x; code] of x (B, T, D), code (T, D) and mix (D, 2D), without repeating the codes for each sequence.

    In the parameters' own precision: under autocast the whole residual stream would begin in bfloat16.
    """
    width = x.shape[-1]
    with exactly(x.device):
        return F.linear(x, mix[:, :width]) + F.linear(code, mix[:, width:])
