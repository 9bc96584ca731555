"""transformer_xl: scores of content and distance apart, distance as a sinusoidal code through its own projection."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from gpt.position.base import Position, each_layer
from gpt.position.sinusoidal import EncodingConfig, encoding
from gpt.schema import ModelConfig


class TransformerXL(Position):
    """score(i, j) = ((q_i + u) k_j + (q_i + v) W R_(i-j)) / sqrt(d)
    (Dai et al. 2019, https://arxiv.org/abs/1901.02860), without its recurrence.

    R is the sinusoidal code of the distance, of width D. W is of each layer, u and v are shared by the layers (the
    authors' untie_r=False).
    """

    Config: ClassVar[type] = EncodingConfig

    def __init__(self, config: EncodingConfig, model: ModelConfig):
        super().__init__(config, model)
        self.width = model.n_embd
        self.project = each_layer(config, model, self.width, self.width)
        self.u = nn.Parameter(torch.empty(model.n_head, 1, model.head_width))
        self.v = nn.Parameter(torch.empty(model.n_head, 1, model.head_width))

    def prepare(self, q_pos: Tensor, k_pos: Tensor) -> tuple[Tensor, Tensor]:
        """Codes (n, D) of the distances 0 .. n - 1, and the distance (Tq, Tk) of each query and key."""
        n = len(k_pos) if self.config.randomized is None else self.trained_ids
        codes = encoding(torch.arange(n, device=k_pos.device), self.width, self.config.base)
        return codes, (q_pos.unsqueeze(1) - k_pos).clamp(min=0)

    def scores(
        self, s: Tensor, q: Tensor, k: Tensor, visible: Tensor, ctx: tuple[Tensor, Tensor], layer: int
    ) -> Tensor:
        codes, distance = ctx
        r = codes.to(s.dtype) @ (self.project[str(layer)].to(s.dtype).T * self.score_scale)  # (n, D)
        r = r.unflatten(1, (self.n_head, -1)).permute(1, 2, 0)  # (H, d, n)
        u, v = self.u.to(s.dtype), self.v.to(s.dtype)
        by_distance = (q + v) @ r  # (B, H, Tq, n)
        by_key = (u * self.score_scale) @ k.transpose(-2, -1)  # (B, H, 1, Tk)
        return s + by_key + by_distance.gather(-1, distance.expand_as(s))

    def initialize(self, draw) -> None:
        for name, parameter in self.named_parameters():
            parameter.copy_(draw(name, 0.02))
