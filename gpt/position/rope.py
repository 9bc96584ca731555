"""rope: queries and keys turned by an angle that grows with the position."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from gpt.errors import ConfigError
from gpt.position.base import Position
from gpt.position.scaling import ScalingConfig, rescale
from gpt.schema import STRICT, ModelConfig, Moderate, PositionConfig

Share = Annotated[float, Field(gt=0, le=1)]


@dataclass(frozen=True, config=STRICT)
class RopeConfig(PositionConfig):
    base: Moderate = 10000.0
    layout: Literal["interleaved", "half"] = "interleaved"  # pairs of channels (2r, 2r+1) or (r, r + w/2)
    fraction: Share = 1.0  # of a head's channels that are turned, the first ones
    keep: Share = 1.0  # of the pairs' frequencies, the highest ones; the other pairs do not turn
    trainable: bool = False  # the frequencies, shared by all layers
    scaling: ScalingConfig = ScalingConfig()  # a rescaling that is there in training already

    def check(self, model: ModelConfig) -> None:
        super().check(model)
        self.check_width(model)
        if self.kept_pairs(model) < 1:
            pairs = self.schedule_width(model) // 2
            raise ConfigError("position.keep", self.keep, f"at least {1 / pairs:.4g}, one of {pairs} frequencies")
        self.scaling.check(self.base, self.schedule_width(model), "position.scaling", "position.scaling.kind")
        self.check_ids(self.scaling, "position.scaling.kind")

    def check_ids(self, scaling: ScalingConfig, key: str) -> None:
        """Raises ConfigError where a rescaling would squeeze ids that were all trained on."""
        if scaling.kind != "none" and self.randomized is not None:
            allowed = (
                f"none where position.randomized={self.randomized}: its ids are all trained on, nothing to squeeze"
            )
            raise ConfigError(key, scaling.kind, allowed)

    def check_width(self, model: ModelConfig) -> None:
        d, width = model.head_width, self.rotary_width(model)
        if d % 2:
            allowed = f"an even head width for rotation, got n_embd / n_head = {d}"
            raise ConfigError("model.n_embd", model.n_embd, allowed)
        if width < 2 or width % 2 or not math.isclose(width, self.fraction * d, rel_tol=1e-3):
            allowed = (
                f"an even number of a head's {d} channels, such as {2 / d:.4g}; this is {self.fraction * d:g} of them"
            )
            raise ConfigError("position.fraction", self.fraction, allowed)

    def rotary_width(self, model: ModelConfig) -> int:
        """Channels of a head that are turned."""
        return round(self.fraction * model.head_width)

    def schedule_width(self, model: ModelConfig) -> int:
        """The width w of the schedule base^(-2r/w): twice the number of frequencies."""
        return self.rotary_width(model)

    def kept_pairs(self, model: ModelConfig) -> int:
        return math.floor(self.keep * self.schedule_width(model) / 2 + 1e-9)


class Rope(Position):
    """Rotary embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864).

    Pair r of the w turned channels of every query and key at position i is rotated by i base^(-2r/w), so that the
    product of a query at i and a key at j depends on i - j. Values are not rotated.

    fraction: partial rotation as in GPT-J and GPT-NeoX (https://arxiv.org/abs/2204.06745): w is less than the head
    width and the schedule is that of w. keep: p-RoPE (Barbero et al. 2024, https://arxiv.org/abs/2410.06205): w is
    the head width, and the lowest frequencies of its schedule are 0. A rescaling that depends on the length reads the
    last id, where torch.compile breaks its graph.
    """

    Config: ClassVar[type] = RopeConfig
    rescalable: ClassVar[bool] = True

    def __init__(self, config: RopeConfig, model: ModelConfig):
        super().__init__(config, model)
        self.width = config.rotary_width(model)
        self.schedule_width = config.schedule_width(model)
        self.kept_pairs = config.kept_pairs(model)
        self.stretch: tuple[ScalingConfig, float | None] = (ScalingConfig(), None)  # of `scaled`
        if config.trainable:
            self.turns = nn.Parameter(torch.empty(self.kept_pairs))

    def initialize(self, draw) -> None:
        if self.config.trainable:
            self.turns.copy_(frequencies(self.schedule_width, self.config.base, self.turns.device)[: self.kept_pairs])

    @property
    def stable(self) -> bool:
        depends = self.config.scaling.depends_on_length or self.stretch[0].depends_on_length
        return self.config.randomized is None and not depends

    @contextmanager
    def scaled(self, scaling: ScalingConfig, base: float | None = None) -> Iterator[None]:
        """While it lasts the frequencies are slowed by `scaling`, on top of a rescaling trained with, and those of the
        schedule are at `base`. Nested, the inner one alone counts. Raises ConfigError where that cannot be."""
        if base is not None and not (base > 0 and math.isfinite(base)):
            raise ConfigError("position.base", base, "a number > 0")
        self.config.check_ids(scaling, "scaling")
        scaling.check(self.config.base if base is None else base, self.schedule_width)
        before, self.stretch = self.stretch, (scaling, base)
        try:
            yield
        finally:
            self.stretch = before

    def frequencies(self, k_pos: Tensor) -> tuple[Tensor, float]:
        """(w/2,) float32 radians a position at this length, and the factor of cosine and sine."""
        stretch, base = self.stretch
        base = self.config.base if base is None else base
        turns = frequencies(self.schedule_width, base, k_pos.device)[: self.kept_pairs]
        if self.config.trainable:  # another base moves them as it moves the schedule they came from
            turns = turns / frequencies(self.schedule_width, self.config.base, k_pos.device)[: self.kept_pairs]
            turns = turns * self.turns.float()
        turns = F.pad(turns, (0, self.schedule_width // 2 - self.kept_pairs))
        size, length = 1.0, 0
        for scaling in (self.config.scaling, stretch):
            if scaling.depends_on_length:
                length = int(k_pos[-1]) + 1
            turns, more = rescale(turns, scaling, base, self.schedule_width, self.block_size, length)
            size *= more
        return turns, size

    def prepare(self, q_pos: Tensor, k_pos: Tensor) -> tuple[Tensor, Tensor]:
        turns, size = self.frequencies(k_pos)
        k_turn = self.rotation(k_pos, turns, size)
        return (k_turn if q_pos is k_pos else self.rotation(q_pos, turns, size)), k_turn

    def rotation(self, pos: Tensor, turns: Tensor, size: float | Tensor) -> Tensor:
        """What `turn` takes, of tokens at ids (T,), which are also stretched by `size`, a number or (T, w/2)."""
        return (rotation if self.config.layout == "interleaved" else half_rotation)(pos, turns, size)

    def rotate(self, q: Tensor, k: Tensor, ctx: tuple[Tensor, Tensor], layer: int) -> tuple[Tensor, Tensor]:
        return self.turn(q, ctx[0]), self.turn(k, ctx[1])

    def turn(self, x: Tensor, rotation: Tensor) -> Tensor:
        """x (B, H, T, d) with its first w channels turned."""
        rotate = rotate_pairs if self.config.layout == "interleaved" else rotate_halves
        if self.width == x.shape[-1]:
            return rotate(x, rotation)
        return torch.cat((rotate(x[..., : self.width], rotation), x[..., self.width :]), dim=-1)


def frequencies(width: int, base: float, device: torch.device | None = None) -> Tensor:
    """(width/2,) float32: radians a position for each pair of channels."""
    return torch.exp(torch.arange(0, width, 2, device=device) * (-math.log(base) / width))


def rotation(pos: Tensor, turns: Tensor, size: float | Tensor = 1.0) -> Tensor:
    """Rotations at ids (T,), of interleaved pairs, that also stretch by `size`: complex (T, w/2) in eager mode on the
    CPU, else cosine and sine as (T, w/2, 2) float32."""
    angle = pos.float().unsqueeze(-1) * turns
    if angle.is_cpu and not torch.compiler.is_compiling():  # one fused product there; inductor has no complex numbers
        return torch.polar(torch.ones_like(angle) * size, angle)
    return torch.stack((angle.cos() * size, angle.sin() * size), dim=-1)


def rotate_pairs(x: Tensor, rotation: Tensor) -> Tensor:
    """x (B, H, T, w) with each pair of channels turned, computed in float32, returned in x's type."""
    pairs = x.float().unflatten(-1, (-1, 2))  # (B, H, T, w/2, 2)
    if rotation.is_complex():
        return torch.view_as_real(torch.view_as_complex(pairs) * rotation).flatten(-2).to(x.dtype)
    a, b = pairs.unbind(-1)
    cos, sin = rotation.unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2).to(x.dtype)


def half_rotation(pos: Tensor, turns: Tensor, size: float | Tensor = 1.0) -> Tensor:
    """The same for pairs (r, r + w/2): (2, T, w) float32, what a channel and what its partner are multiplied with."""
    angle = pos.float().unsqueeze(-1) * turns
    cos, sin = angle.cos() * size, angle.sin() * size
    return torch.stack((torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)))


def rotate_halves(x: Tensor, rotation: Tensor) -> Tensor:
    """x (B, H, T, w) with the pairs (r, r + w/2) turned, computed in float32, returned in x's type."""
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = rotation
    return torch.addcmul(x.float() * cos, torch.cat((b, a), dim=-1), sin).to(x.dtype)
