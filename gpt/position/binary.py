"""binary: the bits of the position, added to the token embedding."""

from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from gpt.errors import ConfigError
from gpt.position.base import Position, exactly
from gpt.schema import STRICT, ModelConfig, PositionConfig


@dataclass(frozen=True, config=STRICT)
class BinaryConfig(PositionConfig):
    bits: Annotated[int, Field(ge=1, le=62)] = 16
    signed: bool = False  # bits as -1 and 1, else as 0 and 1
    projected: bool = True  # through a trained matrix, else one channel a bit and zeros in the others

    def check(self, model: ModelConfig) -> None:
        super().check(model)
        ids = self.trained_ids(model)
        if 2**self.bits < ids:
            raise ConfigError(
                "position.bits", self.bits, f"at least {(ids - 1).bit_length()}, for training on {ids} ids"
            )
        if not self.projected and self.bits > model.n_embd:
            raise ConfigError(
                "position.bits", self.bits, f"at most model.n_embd={model.n_embd} where position.projected=false"
            )


class Binary(Position):
    """x_i = token_i + bits(i) W, bit k of i in row k of W (bits, D); the counter that leads tutorials to sinusoids.

    Bits from ceil(log2 L) on are never set in training: past L the model adds rows of W that it never saw (`signed`:
    saw with the other sign only). From 2^bits on it refuses. Not projected, the bits have amplitude D^-1/2 as in
    `sinusoidal`: at 1 they would drown the embeddings.
    """

    Config: ClassVar[type] = BinaryConfig
    relative: ClassVar[bool] = False

    def __init__(self, config: BinaryConfig, model: ModelConfig):
        super().__init__(config, model)
        self.width = model.n_embd
        self.weight = nn.Parameter(torch.empty(config.bits, model.n_embd)) if config.projected else None

    @property
    def max_len(self) -> int:
        return 2**self.config.bits if self.config.randomized is None else self.trained_ids

    def embed(self, x: Tensor, pos: Tensor) -> Tensor:
        code = bits_of(pos, self.config.bits).to(x.dtype)
        if self.config.signed:
            code = 2 * code - 1
        if self.weight is None:
            return x + F.pad(code * self.width**-0.5, (0, self.width - self.config.bits))
        with exactly(x.device):
            return x + code @ self.weight

    def initialize(self, draw) -> None:
        if self.weight is not None:
            self.weight.copy_(draw("weight", 0.02))


def bits_of(pos: Tensor, count: int) -> Tensor:
    """(T, count) int64 of 0 and 1 at ids (T,), the lowest bit first."""
    return (pos.unsqueeze(-1) >> torch.arange(count, device=pos.device)) & 1
