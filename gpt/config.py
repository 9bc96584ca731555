"""From a composed configuration, as plain values, to the frozen dataclasses that the code sees."""

from dataclasses import dataclass, fields, replace

from gpt.errors import ConfigError, UnknownKey
from gpt.position import scheme
from gpt.position.scaling import ScalingConfig
from gpt.schema import (
    SECTIONS,
    AskedConfig,
    AskedEval,
    AskedPosition,
    DataConfig,
    EvalConfig,
    ModelConfig,
    OptimConfig,
    PositionConfig,
    RuntimeConfig,
    TokenizerConfig,
    TrainConfig,
    WandbConfig,
    build,
)


@dataclass(frozen=True)
class RunConfig:
    """All that determines one run."""

    seed: int
    sweep: str
    name: str  # of the run's folder; empty: made from what was chosen
    init_from: str | None  # a run or checkpoint whose weights training begins with
    model: ModelConfig
    position: PositionConfig
    data: DataConfig
    tokenizer: TokenizerConfig
    optim: OptimConfig
    train: TrainConfig
    eval: EvalConfig
    runtime: RuntimeConfig
    wandb: WandbConfig


def load(raw: dict) -> RunConfig:
    """The typed configuration of a run; ConfigError on the first key that is unknown, missing or out of range."""
    keys = [f.name for f in fields(RunConfig)]
    for key in raw:
        if key not in keys:
            raise UnknownKey(key, keys)
    raw = {"init_from": None} | raw  # a key younger than some runs
    for key in keys:
        if key not in raw:
            raise ConfigError(key, None, "a value (it has no default)")
    if type(raw["seed"]) is not int or not 0 <= raw["seed"] < 2**63:
        raise ConfigError("seed", raw["seed"], "a whole number >= 0 and < 2^63")
    for key in ("sweep", "name"):
        if not isinstance(raw[key], str):
            raise ConfigError(key, raw[key], "a text")
    if raw["init_from"] is not None and not (isinstance(raw["init_from"], str) and raw["init_from"]):
        raise ConfigError("init_from", raw["init_from"], "null, or the folder of a run or of a checkpoint")
    parts = {key: build(cls, raw[key], key) for key, cls in SECTIONS.items()}
    position = load_position(raw["position"])
    config = RunConfig(position=position, **{key: raw[key] for key in ("seed", "sweep", "name", "init_from")}, **parts)
    check(config)
    return config


@dataclass(frozen=True)
class EvaluationConfig:
    """What eval.py is asked for. None in `eval` and `position`: as each run's own configuration says."""

    asked: AskedConfig
    position: AskedPosition
    rescaling: ScalingConfig  # the parameters of every kind that is asked for
    fixed_factor: bool  # whether its factor was given, else it follows the evaluation's
    eval: AskedEval
    runtime: RuntimeConfig

    def scaling(self, kind: str, factor: int) -> ScalingConfig:
        """The rescaling of a kind at `factor` training lengths."""
        chosen = replace(self.rescaling, kind=kind)
        return chosen if self.fixed_factor else chosen.stretched(factor)


def load_evaluation(raw: dict) -> EvaluationConfig:
    """The typed configuration of an evaluation; raises ConfigError."""
    sections = {"position": AskedPosition, "rescaling": ScalingConfig, "eval": AskedEval, "runtime": RuntimeConfig}
    given = {key: raw.get(key) for key in sections}
    fixed = True
    if isinstance(given["rescaling"], dict):
        if "kind" in given["rescaling"]:
            raise ConfigError(
                "rescaling.kind", given["rescaling"]["kind"], "no such key here; choose it with scaling=[…]"
            )
        fixed = given["rescaling"].get("factor") is not None
        given["rescaling"] = {k: v for k, v in given["rescaling"].items() if k != "factor" or fixed}
    parts = {key: build(cls, given[key], key) for key, cls in sections.items()}
    parts["rescaling"].check_order("rescaling")
    asked = build(AskedConfig, {k: v for k, v in raw.items() if k not in sections}, "")
    return EvaluationConfig(asked, fixed_factor=fixed, **parts)


def load_position(raw: object) -> PositionConfig:
    """The configuration of one scheme, of that scheme's own class: keys of another scheme are refused."""
    if not isinstance(raw, dict) or "name" not in raw:
        raise ConfigError("position", raw, "a section with a name; choose one with position=<scheme>")
    return build(scheme(raw["name"]).Config, raw, "position")


def check(config: RunConfig) -> None:
    """What concerns two sections at once."""
    config.model.check()
    config.optim.check()
    config.position.check(config.model)
    L = config.model.block_size
    if config.eval.stride is not None and config.eval.stride > L:
        raise ConfigError("eval.stride", config.eval.stride, f"at most model.block_size={L}")
    if config.train.eval_tokens < L:
        raise ConfigError("train.eval_tokens", config.train.eval_tokens, f"at least model.block_size={L}")
    if config.position.randomized is not None and not scheme(config.position.name).takes_ids:
        allowed = f"null: {config.position.name} does not read position ids"
        raise ConfigError("position.randomized", config.position.randomized, allowed)
    layers = config.position.layers
    if layers != "P" and not scheme(config.position.name).acts_in_layers():
        allowed = f"P: {config.position.name} does nothing in a layer, so a pattern of layers changes nothing"
        raise ConfigError("position.layers", layers, allowed)
