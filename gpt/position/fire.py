"""fire: a trained function of the distance relative to the query's position, a small network shared by all layers."""

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpt.position.base import Position, uniform
from gpt.schema import STRICT, Count, ModelConfig, Moderate, PositionConfig

EPS = 1e-6  # of the normaliser, as in published code; keeps the first position finite where the threshold is 0
PIECE = 2**22  # numbers of the hidden layer at a time


@dataclass(frozen=True, config=STRICT)
class FireConfig(PositionConfig):
    width: Annotated[Count, Field(le=1024)] = 32  # of the hidden layer
    scale: Moderate = 0.1  # initial c
    threshold: Moderate = 512.0  # initial position up to which the normaliser is constant


class Fire(Position):
    """score += f_h(psi(i - j) / psi(max(i, |m L|))), psi(x) = ln(|c x| + 1), f a ReLU network 1-32-H.

    Li et al. 2024, https://arxiv.org/abs/2310.04418, as FIRE-S: one network for all layers. c and the multiplier m of
    the threshold L are trained. The normaliser takes the query's own position, so that the input stays within 0 and 1;
    past the threshold scores depend on more than the distance. Initial weights as in published code: uniform, as in
    torch's Linear. (The last bias adds a constant to a row of scores, which softmax does not see; it is the paper's.)
    """

    Config: ClassVar[type] = FireConfig
    relative: ClassVar[bool] = False

    def __init__(self, config: FireConfig, model: ModelConfig):
        super().__init__(config, model)
        self.c = nn.Parameter(torch.empty(()))
        self.multiplier = nn.Parameter(torch.empty(()))
        self.hidden_weight = nn.Parameter(torch.empty(config.width))
        self.hidden_bias = nn.Parameter(torch.empty(config.width))
        self.weight = nn.Parameter(torch.empty(model.n_head, config.width))
        self.bias = nn.Parameter(torch.empty(model.n_head))

    def pair(self, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (self.weight.float()[head].movedim(-1, 0) * self.hidden(i, j)).sum(0) + self.bias.float()[head]

    def dense(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """A few rows at a time, whose hidden layer is computed anew in the backward: it has 32 numbers a pair."""

        def rows(some: Tensor) -> Tensor:
            hidden = self.hidden(some.view(-1, 1), k_pos)  # (width, rows, Tk)
            bias = torch.addmm(self.bias.float().unsqueeze(1), self.weight.float(), hidden.flatten(1))
            return bias.view(-1, *hidden.shape[1:])

        pieces = q_pos.split(max(1, PIECE // (self.config.width * len(k_pos))))
        if torch.is_grad_enabled() and len(pieces) > 1:
            return torch.cat([checkpoint(rows, piece, use_reentrant=False) for piece in pieces], dim=1)
        return torch.cat([rows(piece) for piece in pieces], dim=1)

    def hidden(self, i: Tensor, j: Tensor) -> Tensor:
        """(width, *): the hidden layer at the distance relative to the normaliser."""
        far = torch.maximum(i.float(), (self.multiplier.float() * self.config.threshold).abs())
        x = self.psi((i - j).clamp(min=0).float()) / (self.psi(far) + EPS)
        weight, bias = self.hidden_weight.float().unsqueeze(1), self.hidden_bias.float().unsqueeze(1)
        return torch.relu(torch.addmm(bias, weight, x.reshape(1, -1))).view(-1, *x.shape)

    def psi(self, x: Tensor) -> Tensor:
        return torch.log1p((self.c.float() * x).abs())

    def initialize(self, draw) -> None:
        self.c.fill_(self.config.scale)
        self.multiplier.fill_(1)
        inputs = {"hidden_weight": 1, "hidden_bias": 1, "weight": self.config.width, "bias": self.config.width}
        for name, count in inputs.items():
            getattr(self, name).copy_((2 * uniform(draw(name, 1.0)) - 1) / count**0.5)
