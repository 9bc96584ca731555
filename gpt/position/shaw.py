"""shaw: a trained vector for each distance, added to the keys and to the values."""

from typing import ClassVar, NamedTuple

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from gpt.position.base import Position, each_layer
from gpt.schema import STRICT, ModelConfig, PositionConfig, Rows


@dataclass(frozen=True, config=STRICT)
class ShawConfig(PositionConfig):
    k: Rows = 16  # tokens; distances from here on share one vector
    values: bool = True  # whether values get vectors too


class Near(NamedTuple):
    """The last k keys up to each query: ids rise, so that all keys nearer than k are among them.

    Tq queries, n = min(k, Tk) columns.
    """

    key: Tensor  # (Tq, n) int64: index of the key
    row: Tensor  # (Tq, n) int64: its distance, clipped at k
    exists: Tensor  # (Tq, n) bool: false before the first token
    far: tuple[Tensor, Tensor]  # (Tq, 1) bool: whether a query sees any key at k or beyond: in full, windowed layers


class Shaw(Position):
    """score(i, j) = q_i (k_j + a_c) / sqrt(d) and y_i = sum_j p_ij (v_j + b_c), c = min(i - j, k)
    (Shaw et al. 2018, https://arxiv.org/abs/1803.02155).

    a and b are of each layer and shared by its heads. The paper's 2 k + 1 rows serve both directions; a causal model
    never reads the k rows of the future, so that they do not exist here: 2 (k + 1) d parameters a layer.
    """

    Config: ClassVar[type] = ShawConfig

    def __init__(self, config: ShawConfig, model: ModelConfig):
        super().__init__(config, model)
        self.key = each_layer(config, model, config.k + 1, model.head_width)
        if config.values:
            self.value = each_layer(config, model, config.k + 1, model.head_width)

    def prepare(self, q_pos: Tensor, k_pos: Tensor) -> Near:
        k, Tq, Tk = self.config.k, len(q_pos), len(k_pos)
        query = torch.arange(Tk - Tq, Tk, device=k_pos.device).unsqueeze(1)  # indices of the queries among the keys
        key = query - torch.arange(min(k, Tk), device=k_pos.device)
        exists = key >= 0
        key = key.clamp(min=0)
        row = (q_pos.unsqueeze(1) - k_pos[key]).clamp(max=k)
        oldest = [torch.zeros_like(query), (query - (self.config.window or Tk) + 1).clamp(min=0)]
        full, windowed = (q_pos.unsqueeze(1) - k_pos[index] >= k for index in oldest)
        return Near(key, row, exists, (full, windowed))

    def scores(self, s: Tensor, q: Tensor, k: Tensor, visible: Tensor, near: Near, layer: int) -> Tensor:
        """Softmax does not see what all keys of a query have in common. So instead of adding the last row's product to
        all far keys, it is taken from the near ones: O(T k), not O(T^2)."""
        products = q @ (self.key[str(layer)].to(s.dtype).T * self.score_scale)  # (B, H, Tq, k + 1)
        far = products[..., -1:] * near.far[self.config.windowed(layer)]
        added = (products.gather(-1, expand(near.row, s)) - far) * near.exists
        return s.scatter_add(-1, expand(near.key, s), added)

    def values(self, y: Tensor, p: Tensor, near: Near, layer: int) -> Tensor:
        """Weights are summed by distance first, (B, H, Tq, k + 1), then multiplied with the rows."""
        if not self.config.values:
            return y
        weights = p.gather(-1, expand(near.key, p)) * near.exists
        rest = (p.sum(-1, keepdim=True) - weights.sum(-1, keepdim=True)) * near.far[self.config.windowed(layer)]
        by_row = p.new_zeros(*p.shape[:-1], self.config.k + 1).scatter_add(-1, expand(near.row, p), weights)
        table = self.value[str(layer)].to(p.dtype)
        return y + by_row @ table + rest * table[-1]

    def initialize(self, draw) -> None:
        for name, parameter in self.named_parameters():
            parameter.copy_(draw(name, 0.02))


def expand(index: Tensor, like: Tensor) -> Tensor:
    """(Tq, n) -> (B, H, Tq, n), without a copy."""
    return index.expand(*like.shape[:2], *index.shape)
