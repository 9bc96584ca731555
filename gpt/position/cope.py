"""cope: distance as a count of the keys that a query's gates let through."""

from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from gpt.position.base import Position, each_layer
from gpt.schema import STRICT, ModelConfig, PositionConfig


@dataclass(frozen=True, config=STRICT)
class CopeConfig(PositionConfig):
    npos_max: Annotated[int, Field(ge=2, le=2**24)] = 64  # rows; counts from npos_max - 1 on share the last


class Cope(Position):
    """score(i, j) += q_i e[c_ij], where c_ij = min(sum of g_it over j <= t <= i, npos_max - 1), g_it = sigmoid(s_it)
    (Golovneva et al. 2024, https://arxiv.org/abs/2405.18719).

    Between whole counts the products with e are interpolated. Gates of keys that a query does not see are 0. As in the
    paper's listing a gate reads the scaled score s_it = q_i k_t / sqrt(d), and q_i e is added unscaled (the authors'
    repository scales it too). e is of each layer, shared by its heads, and starts at 0.
    """

    Config: ClassVar[type] = CopeConfig
    takes_ids: ClassVar[bool] = False

    def __init__(self, config: CopeConfig, model: ModelConfig):
        super().__init__(config, model)
        self.table = each_layer(config, model, config.npos_max, model.head_width)

    def scores(self, s: Tensor, q: Tensor, k: Tensor, visible: Tensor, ctx: object, layer: int) -> Tensor:
        last = self.config.npos_max - 1
        gates = s.sigmoid() * visible
        count = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=last)  # (B, H, Tq, Tk)
        whole = count.detach().floor().clamp(max=last - 1)  # the row below; at the cap too there is one above
        row = whole.long()
        products = q @ self.table[str(layer)].to(s.dtype).T  # (B, H, Tq, npos_max)
        slopes = products.diff(dim=-1)
        return s + products.gather(-1, row) + slopes.gather(-1, row) * (count - whole)

    def initialize(self, draw) -> None:
        for parameter in self.parameters():
            parameter.zero_()
