"""learned: one trained vector a position, added to the token embedding."""

from torch import Tensor

from gpt.position.table import Tabled


class Learned(Tabled):
    """x_i = token_i + P[i], P of block_size rows (Gehring et al. 2017, https://arxiv.org/abs/1705.03122; GPT-2)."""

    def embed(self, x: Tensor, pos: Tensor) -> Tensor:
        return x + self.rows(pos)

    def initialize(self, draw) -> None:
        self.table.copy_(draw("table", 0.02))
