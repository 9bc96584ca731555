"""tupe: positions score against positions through projections of their own, untied from those of tokens."""

from typing import ClassVar

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from gpt.position.t5 import bucket
from gpt.position.table import Tabled, TabledConfig
from gpt.schema import STRICT, ModelConfig


@dataclass(frozen=True, config=STRICT)
class TupeConfig(TabledConfig):
    relative: bool = True  # with T5's bias on the distance (TUPE-R), or without (TUPE-A)


class Tupe(Tabled):
    """score(i, j) = x_i W_Q (x_j W_K)^T / sqrt(2d) + LN(p_i) U_Q (LN(p_j) U_K)^T / sqrt(2d) + b[bucket(i - j)].

    Ke et al. 2021, https://arxiv.org/abs/2006.15595. The position terms are computed once a forward and shared by all
    layers. Left out is what serves a [CLS] token, which a GPT has not. The projections have no biases: one of the keys
    would add a constant to each row of scores, which softmax does not see.
    """

    Config: ClassVar[type] = TupeConfig

    def __init__(self, config: TupeConfig, model: ModelConfig):
        super().__init__(config, model)
        width = model.n_embd
        self.score_scale = (2 * model.head_width) ** -0.5  # two terms of equal size
        self.norm = nn.LayerNorm(width, bias=model.bias)
        self.query = nn.Parameter(torch.empty(width, width))
        self.key = nn.Parameter(torch.empty(width, width))
        if config.relative:
            self.bias = nn.Parameter(torch.empty(32, model.n_head))

    def dense(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        q, k = self.projected(q_pos, self.query), self.projected(k_pos, self.key)
        score = q @ k.transpose(-2, -1) * self.score_scale
        if not self.config.relative:
            return score
        return score + self.bias.float()[bucket(q_pos.unsqueeze(-1) - k_pos)].permute(2, 0, 1)

    def projected(self, pos: Tensor, weight: Tensor) -> Tensor:
        """(H, T, d) float32: queries or keys of positions."""
        rows = self.norm(self.rows(pos)).float()
        return (rows @ weight.float().T).unflatten(-1, (self.n_head, -1)).transpose(0, 1)

    def initialize(self, draw) -> None:
        self.norm.reset_parameters()
        for name, parameter in self.named_parameters(recurse=False):
            parameter.copy_(draw(name, 0.02))
