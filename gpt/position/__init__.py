"""The table of position schemes: a new one is a module here, a YAML in configs/position, and a row below.

Several rows may share a class: then their YAMLs differ.
"""

from gpt.errors import ConfigError
from gpt.position.alibi import Alibi
from gpt.position.base import Position
from gpt.position.binary import Binary
from gpt.position.concat import Concat, ConcatSinusoidal
from gpt.position.cope import Cope
from gpt.position.decoupled_rope import DecoupledRope
from gpt.position.fire import Fire
from gpt.position.kerple import Kerple
from gpt.position.learned import Learned
from gpt.position.normalized_index import NormalizedIndex
from gpt.position.pope import Pope
from gpt.position.raw_index import RawIndex
from gpt.position.rope import Rope
from gpt.position.sandwich import Sandwich
from gpt.position.shaw import Shaw
from gpt.position.sinusoidal import Sinusoidal
from gpt.position.t5 import T5
from gpt.position.transformer_xl import TransformerXL
from gpt.position.tupe import Tupe
from gpt.position.xpos import Xpos
from gpt.schema import ModelConfig, PositionConfig

SCHEMES: dict[str, type[Position]] = {
    "nope": Position,
    "learned": Learned,
    "sinusoidal": Sinusoidal,
    "raw_index": RawIndex,
    "normalized_index": NormalizedIndex,
    "binary": Binary,
    "concat": Concat,
    "concat_sinusoidal": ConcatSinusoidal,
    "rope": Rope,
    "alibi": Alibi,
    "kerple": Kerple,
    "kerple_power": Kerple,
    "sandwich": Sandwich,
    "fire": Fire,
    "t5": T5,
    "tupe": Tupe,
    "shaw": Shaw,
    "transformer_xl": TransformerXL,
    "cope": Cope,
    "randomized_rope": Rope,
    "partial_rope": Rope,
    "p_rope": Rope,
    "trainable_rope": Rope,
    "rope_nope": Rope,
    "rope_nope_alternating": Rope,
    "rope_window_nope": Rope,
    "swan": Rope,
    "xpos": Xpos,
    "pope": Pope,
    "decoupled_rope": DecoupledRope,
}


def scheme(name: object) -> type[Position]:
    """The class of a scheme; raises ConfigError naming all of them."""
    if name not in SCHEMES:
        raise ConfigError("position.name", name, " | ".join(SCHEMES))
    return SCHEMES[name]


def build_position(config: PositionConfig, model: ModelConfig) -> Position:
    return scheme(config.name)(config, model)
