"""RoPE stretched past its training length: its frequencies slowed, by one rule a kind."""

import math
from dataclasses import replace
from typing import Annotated, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from gpt.errors import ConfigError
from gpt.schema import STRICT, Moderate, Scaling

PARAMETERS = {  # what each kind reads
    "none": (),
    "linear": ("factor",),
    "ntk": ("factor",),
    "dynamic": ("factor", "original_length"),
    "by_parts": ("factor", "alpha", "beta", "original_length", "ramp"),
    "yarn": ("factor", "alpha", "attention_factor", "beta", "original_length", "ramp", "temperature"),
    "llama3": ("factor", "high", "low", "original_length"),
    "longrope": ("factor", "attention_factor", "long_factors", "original_length", "short_factors"),
}


@dataclass(frozen=True, config=STRICT)
class ScalingConfig:
    """A kind of rescaling and the parameters of all kinds; each kind reads its own and leaves the rest."""

    kind: Scaling = "none"
    factor: Annotated[float, Field(ge=1, le=1e6)] = 1.0  # s; dynamic takes s from the length and overshoots it by this
    original_length: Annotated[int, Field(ge=2, le=2**40)] | None = None  # L, tokens; null: the one of the model
    alpha: Moderate = 1.0  # pairs with fewer turns in L are slowed by the whole factor
    beta: Moderate = 32.0  # pairs with more turns in L are left alone
    ramp: Literal["index", "turns"] = "index"  # between alpha and beta: linear in the pair's index or in its turns
    temperature: Annotated[float, Field(ge=0, le=100)] = 0.1  # yarn: cosine and sine times temperature ln(s) + 1
    low: Moderate = 1.0  # llama3: its alpha
    high: Moderate = 4.0  # llama3: its beta
    attention_factor: Annotated[float, Field(ge=1e-3, le=1e3)] | None = (
        None  # yarn, longrope: multiplies cosine and sine; null: the paper's
    )
    long_factors: tuple[Moderate, ...] | None = None  # longrope: how much slower each pair turns; null: as in ntk
    short_factors: tuple[Moderate, ...] | None = None  # longrope: the same up to L; null: long_factors there too

    @property
    def depends_on_length(self) -> bool:
        """Whether longer texts turn their first tokens otherwise: no prefix law, and no cache of rotated keys."""
        return self.kind == "dynamic" or (self.kind == "longrope" and self.short_factors is not None)

    def changes(self, train_length: int, length: int) -> bool:
        """Whether texts of `length` tokens are read otherwise than without it."""
        if self.kind == "dynamic":
            return length > (self.original_length or train_length)
        return self.kind != "none" and self.factor != 1

    def stretched(self, factor: float) -> "ScalingConfig":
        """This scaling for lengths up to `factor` L; dynamic stays as it is, since the length says it all."""
        return self if self.kind in ("none", "dynamic") else replace(self, factor=factor)

    def check_order(self, key: str) -> None:
        """Raises ConfigError, which names the keys below `key`, where bounds are not one below the other."""
        if self.beta <= self.alpha:
            raise ConfigError(f"{key}.beta", self.beta, f"more than {key}.alpha={self.alpha:g}")
        if self.high <= self.low:
            raise ConfigError(f"{key}.high", self.high, f"more than {key}.low={self.low:g}")

    def check(self, base: float, width: int, key: str = "rescaling", kind: str = "scaling") -> None:
        """Raises ConfigError where a RoPE of this base and rotary width cannot be scaled so.

        `key` is where the parameters stand, `kind` where the kind does.
        """
        self.check_order(key)
        if self.kind != "none" and (width < 2 or width % 2):
            raise ConfigError(kind, self.kind, f"none, or an even rotary width; here it is {width}")
        by_ntk = self.kind in ("ntk", "dynamic") or (self.kind == "longrope" and self.long_factors is None)
        if by_ntk and width == 2:
            others = "none | linear | by_parts | yarn | llama3"
            raise ConfigError(kind, self.kind, f"{others} at rotary width 2, where d / (d - 2) is infinite")
        if self.kind in ("by_parts", "yarn") and self.ramp == "index" and base <= 1:
            raise ConfigError(f"{key}.ramp", self.ramp, f"turns where the base is at most 1, here {base:g}")
        if self.kind == "longrope":
            for name in ("long_factors", "short_factors"):
                given = getattr(self, name)
                if given is not None and len(given) != width // 2:
                    raise ConfigError(f"{key}.{name}", list(given), f"{width // 2} numbers, one a pair, or null")


def describe(scaling: ScalingConfig) -> str:
    """The parameters that the kind reads, as "factor=4 alpha=1 ...": the same text for the same measurement."""
    chosen = {name: getattr(scaling, name) for name in PARAMETERS[scaling.kind]}
    if chosen.get("attention_factor") is not None:
        chosen.pop("temperature", None)
    return " ".join(f"{name}={words(value)}" for name, value in chosen.items() if value is not None)


def words(value: object) -> str:
    return ",".join(map(words, value)) if isinstance(value, tuple) else str(value).removesuffix(".0")


def rescale(
    turns: Tensor, scaling: ScalingConfig, base: float, width: int, train_length: int, length: int
) -> tuple[Tensor, float]:
    """Frequencies (d/2,) in radians a token, fastest first -> slowed ones and the factor of cosine and sine.

    `base` and `width` d are those of the schedule base^(-2r/d), `length` T is the largest position plus one. Factor 1
    changes nothing (dynamic: a length up to L). Frequencies of 0 stay 0, and trained ones may be given: only the ramp
    over indices trusts the schedule. Raises ConfigError as `check` does.

    linear: position interpolation, all divided by s (Chen et al. 2023, https://arxiv.org/abs/2306.15595).
    ntk: base s^(d/(d-2)) in place of base, which keeps the first frequency and divides the last by s.
    dynamic: ntk at every length beyond L with s = factor T/L - (factor - 1), so s = T/L at the default factor of 1.
    by_parts: slowed by s where a pair turns fewer than alpha times in L, kept where it turns more than beta times.
    yarn: by_parts with a temperature. All four: Peng et al. 2023, https://arxiv.org/abs/2309.00071, and its code.
    llama3: by_parts over turns with its own bounds (https://arxiv.org/abs/2407.21783 and its code).
    longrope: a divisor for each pair and a temperature (Ding et al. 2024, https://arxiv.org/abs/2402.13753).
    """
    scaling.check(base, width)
    kind, factor = scaling.kind, scaling.factor
    trained = scaling.original_length or train_length
    if kind == "dynamic":
        kind, factor = "ntk", factor * max(length, trained) / trained - (factor - 1)
    if kind == "none" or factor == 1:
        return turns, 1.0
    if kind == "linear":
        return turns / factor, 1.0
    if kind == "ntk":
        return turns / ntk_factors(turns, factor), 1.0
    if kind == "llama3":
        return slow(turns, factor, kept_by_turns(turns, trained, scaling.low, scaling.high)), 1.0
    if kind == "longrope":
        mscale = scaling.attention_factor or math.sqrt(1 + math.log(factor) / math.log(trained))
        short = length <= trained and scaling.short_factors is not None
        factors = scaling.short_factors if short else scaling.long_factors
        # Without a searched list: ntk's, which grows from 1 to s and is one of the three that the search starts from.
        slower = ntk_factors(turns, factor) if factors is None else turns.new_tensor(factors)
        return turns / slower, mscale
    if scaling.ramp == "turns":
        kept = kept_by_turns(turns, trained, scaling.alpha, scaling.beta)
    else:
        kept = kept_by_index(turns, trained, scaling.alpha, scaling.beta, base)
    mscale = 1.0 if kind == "by_parts" else scaling.attention_factor or scaling.temperature * math.log(factor) + 1
    return slow(turns, factor, kept), mscale


def ntk_factors(turns: Tensor, factor: float) -> Tensor:
    """(d/2,) from 1 to s: s^(2r/(d-2)), what base s^(d/(d-2)) in place of base divides frequency r by."""
    pairs = turns.shape[-1]
    return factor ** (torch.arange(pairs, device=turns.device, dtype=turns.dtype) / (pairs - 1))


def slow(turns: Tensor, factor: float, kept: Tensor) -> Tensor:
    """The share `kept` in [0, 1] of each frequency stays, the rest is divided by the factor."""
    return (1 - kept) * turns / factor + kept * turns


def kept_by_turns(turns: Tensor, length: int, low: float, high: float) -> Tensor:
    """YaRN's ramp as its paper has it, and Llama 3's: linear in the turns of a pair over `length` tokens."""
    return ((length / (2 * math.pi) * turns.abs() - low) / (high - low)).clamp(0, 1)


def kept_by_index(turns: Tensor, length: int, alpha: float, beta: float, base: float) -> Tensor:
    """YaRN's ramp as its official code has it: linear in the pair's index, between bounds rounded outwards."""
    first, last = index_bounds(2 * turns.shape[-1], length, alpha, beta, base)
    index = torch.arange(turns.shape[-1], device=turns.device, dtype=turns.dtype)
    # Where all pairs turn more than beta times, or all less than alpha, last < first: the official code's ramp then
    # runs backwards and slows what it should keep. Here it is a step.
    return 1 - ((index - first) / max(last - first, 0.001)).clamp(0, 1)


def index_bounds(width: int, length: int, alpha: float, beta: float, base: float) -> tuple[int, int]:
    """The last pair that is kept and the first that is slowed by the whole factor: those of beta and alpha turns."""
    first, last = (width * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base)) for turns in (beta, alpha))
    return max(math.floor(first), 0), min(math.ceil(last), width - 1)
