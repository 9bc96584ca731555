"""The position contract: every place where a GPT can learn where its tokens are.

Shapes: B sequences, H heads, Tq queries, Tk keys, d head width, D model width.
"""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from gpt.schema import ModelConfig, PositionConfig


class Position(nn.Module):
    """No position at all (NoPE): each hook does nothing. A scheme overrides the hooks where it acts.

    Causal attention without positions: Haviv et al. 2022, https://arxiv.org/abs/2203.16634;
    Kazemnejad et al. 2023, https://arxiv.org/abs/2305.19466.

    Nothing that depends on a length is stored: `prepare` computes it once a forward, from integer positions, and all
    layers share the result. So any length and offset works, and there is nothing to save, outgrow or rebuild.
    """

    Config: ClassVar[type] = PositionConfig

    # A law in `score(query i, key j) += pair(head, i, j)`, pointwise on broadcastable integer tensors, result float32.
    # None: no bias. Written once: the dense path broadcasts it, FlexAttention calls it.
    pair: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None

    # Whether scores depend on i - j alone, so that p and p + 1000 score alike (a law in the tests).
    relative: ClassVar[bool] = True

    def __init__(self, config: PositionConfig, model: ModelConfig):
        super().__init__()
        self.config = config
        self.n_head = model.n_head

    @classmethod
    def acts_in_layers(cls) -> bool:
        """Whether it matters to a layer that it is marked P or N."""
        return cls.pair is not None or cls.rotate is not Position.rotate

    @property
    def max_len(self) -> int | None:
        """The longest sequence the scheme can place, in tokens; None where it reaches any length."""
        return None

    def positions(self, start: int, n: int, device: torch.device) -> Tensor:
        """(n,) int64 ids of n tokens that follow `start` others."""
        return torch.arange(start, start + n, device=device)

    def embed(self, x: Tensor, pos: Tensor) -> Tensor:
        """(B, T, D) token embeddings at ids (T,) -> the first block's input."""
        return x

    def prepare(self, q_pos: Tensor, k_pos: Tensor) -> object:
        """What all layers of one forward share; called with autocast off. Result goes to `rotate` as `ctx`."""
        return None

    def rotate(self, q: Tensor, k: Tensor, ctx: object, layer: int) -> tuple[Tensor, Tensor]:
        """Queries (B, H, Tq, d) and all keys (B, H, Tk, d), cached ones included, before their product."""
        return q, k

    def initialize(self, draw: Callable[[str, float], Tensor]) -> None:
        """Set every parameter; `draw(name, std)` is normal noise of its shape, fixed by seed and name."""
