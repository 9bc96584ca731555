"""normalized_index: the share of the training length that has passed, times one trained direction."""

from typing import ClassVar, Literal

from pydantic.dataclasses import dataclass
from torch import Tensor

from gpt.errors import ConfigError
from gpt.position.raw_index import RawIndex
from gpt.schema import STRICT, ModelConfig, PositionConfig


@dataclass(frozen=True, config=STRICT)
class NormalizedIndexConfig(PositionConfig):
    normalize_by: Literal["train", "current"] = "train"  # current is refused, with the reason

    def check(self, model: ModelConfig) -> None:
        super().check(model)
        if self.normalize_by == "current":
            raise ConfigError(
                "position.normalize_by",
                self.normalize_by,
                "train; by the current length each new token would move all those before it, "
                "and no prefix or cached key would stay valid",
            )


class NormalizedIndex(RawIndex):
    """x_i = token_i + (i / L) w, L the training length: in [0, 1) while training, beyond 1 past L.

    Randomized ids are divided by L too, and so reach `randomized`.
    """

    Config: ClassVar[type] = NormalizedIndexConfig

    def number(self, pos: Tensor) -> Tensor:
        return pos.float() / self.block_size
