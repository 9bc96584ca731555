"""The position contract: every place where a GPT can learn where its tokens are.

Shapes: B sequences, H heads, Tq queries, Tk keys, d head width, D model width.
"""

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from gpt.errors import ConfigError
from gpt.position.scaling import ScalingConfig
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

    # What a scheme keeps by its nature; the laws are tested to hold, or not to hold, as it says.
    relative: ClassVar[bool] = True  # scores depend on i - j alone, so that p and p + 1000 score alike
    takes_ids: ClassVar[bool] = True  # other position ids give other scores
    rescalable: ClassVar[bool] = False  # it rotates by frequencies that can be slowed

    def __init__(self, config: PositionConfig, model: ModelConfig):
        super().__init__()
        self.config = config
        self.n_head = model.n_head
        self.block_size = model.block_size
        self.score_scale = model.head_width**-0.5  # of the product of queries and keys
        self.trained_ids = config.trained_ids(model)
        if config.randomized is not None:
            self.register_buffer("drawn", torch.arange(model.block_size), persistent=False)

    @classmethod
    def biased(cls) -> bool:
        """Whether positions alone add something to the score."""
        return cls.pair is not None or cls.dense is not Position.dense

    @classmethod
    def explicit(cls) -> bool:
        """Whether the scheme needs the scores or weights themselves, so that no fused kernel can serve it."""
        return cls.scores is not Position.scores or cls.values is not Position.values

    @classmethod
    def acts_in_layers(cls) -> bool:
        """Whether it matters to a layer that it is marked P or N."""
        return cls.biased() or cls.explicit() or cls.rotate is not Position.rotate

    @property
    def max_len(self) -> int | None:
        """The longest sequence the scheme can place, in tokens; None where it reaches any length."""
        return None if self.config.randomized is None else self.trained_ids

    @property
    def stable(self) -> bool:
        """Whether a token's place does not depend on how many follow. Where it does, no cache can serve."""
        return self.config.randomized is None

    def scaled(self, scaling: ScalingConfig, base: float | None = None) -> AbstractContextManager[None]:
        """`with position.scaled(...)`: rotations slowed for evaluation, and back to what they were afterwards.

        Raises ConfigError where there are none, unless nothing is asked for.
        """
        if scaling.kind != "none" or base is not None:
            key, given, allowed = ("scaling", scaling.kind, "none") if base is None else ("position.base", base, "null")
            raise ConfigError(key, given, f"{allowed}: position={self.config.name} has no rotations")
        return nullcontext()

    def positions(self, start: int, n: int, device: torch.device) -> Tensor:
        """(n,) int64 rising ids of n tokens; of whole sequences they begin at `start`.

        Randomized (Ruoss et al. 2023, https://arxiv.org/abs/2305.16843): in training a sorted sample of the trained
        ids, at evaluation n ids evenly spaced over them or, with ids=random, one sample fixed for each n.
        """
        if self.config.randomized is None:
            return torch.arange(start, start + n, device=device)
        count = self.trained_ids
        if self.training:
            return start + self.drawn[:n]
        if self.config.ids == "random" and n <= count:
            return start + sample(count, n, f"evaluation/{n}").to(device)
        return start + torch.arange(n, device=device) * count // n

    def redraw(self, address: str) -> None:
        """New randomized ids for a training step, a function of its address; the same for the whole batch."""
        if self.config.randomized is not None:
            self.drawn.copy_(sample(self.trained_ids, len(self.drawn), address))

    def embed(self, x: Tensor, pos: Tensor) -> Tensor:
        """(B, T, D) token embeddings at ids (T,) -> the first block's input."""
        return x

    def prepare(self, q_pos: Tensor, k_pos: Tensor) -> object:
        """What all layers of one forward share; called with autocast off. Result goes to the hooks below as `ctx`."""
        return None

    def dense(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """`pair` at every head, query and key: (H, Tq, Tk) float32, made once a forward for all layers.

        Overridden where the dense form is cheaper than broadcasting the law, or where there is no pointwise one.
        """
        heads, Tk = torch.arange(self.n_head, device=q_pos.device), len(k_pos)
        if self.relative and k_pos.is_cpu and not torch.compiler.is_compiling() and k_pos[-1] - k_pos[0] == Tk - 1:
            # consecutive ids: the law once for each distance, in order, of which every query takes Tk
            distances = torch.arange(q_pos[0] - k_pos[-1], q_pos[-1] - k_pos[0] + 1)
            law = self.pair(heads.view(-1, 1), distances, torch.zeros_like(distances))
            return law.unfold(-1, Tk, 1).flip(-1).expand(self.n_head, -1, -1)  # of a law that is the same for all heads
        return self.pair(heads.view(-1, 1, 1), q_pos.view(1, -1, 1), k_pos.view(1, 1, -1)).expand(self.n_head, -1, -1)

    def rotate(self, q: Tensor, k: Tensor, ctx: object, layer: int) -> tuple[Tensor, Tensor]:
        """Queries (B, H, Tq, d) and all keys (B, H, Tk, d), cached ones included, before their product."""
        return q, k

    def scores(self, s: Tensor, q: Tensor, k: Tensor, visible: Tensor, ctx: object, layer: int) -> Tensor:
        """Scores (B, H, Tq, Tk), scaled and not yet masked, of rotated q and k -> with what content and position add.

        `visible` (Tq, Tk) bool: which keys a query may see. What is added for others is masked afterwards. Float32.
        """
        return s

    def values(self, y: Tensor, p: Tensor, ctx: object, layer: int) -> Tensor:
        """Attention's output y (B, H, Tq, d) from weights p (B, H, Tq, Tk) -> with what positions add to it."""
        return y

    def initialize(self, draw: Callable[[str, float], Tensor]) -> None:
        """Set every parameter; `draw(name, std)` is normal noise of its shape, fixed by seed and name."""


def sample(count: int, n: int, address: str) -> Tensor:
    """(n,) int64: a sorted sample of 0 .. count - 1 without replacement, a function of the address."""
    key = int.from_bytes(hashlib.sha256(f"ids/{address}".encode()).digest()[:16], "little")
    chosen = np.random.Generator(np.random.Philox(key=key)).choice(count, n, replace=False, shuffle=False)
    return torch.from_numpy(np.sort(chosen).astype(np.int64))


def exactly(device: torch.device) -> AbstractContextManager:
    """Around what low precision would spoil: autocast off. The meta device, on which costs are counted, has none."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def each_layer(config: PositionConfig, model: ModelConfig, *shape: int) -> nn.ParameterDict:
    """A parameter of this shape for each layer in which the scheme acts, under the layer's number as text."""
    layers = filter(config.positioned, range(model.n_layer))
    return nn.ParameterDict({str(layer): nn.Parameter(torch.empty(shape)) for layer in layers})


def within(x: Tensor, least: float, most: float | None = None) -> Tensor:
    """x clamped, in float32; its gradient is passed straight through, so that it can come back from beyond."""
    x = x.float()
    return x + (x.clamp(least, most) - x).detach()


def uniform(noise: Tensor) -> Tensor:
    """Standard normal noise, as `draw` gives it -> uniform between 0 and 1, through its distribution function."""
    return torch.special.ndtr(noise)
