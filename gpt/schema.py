"""What may be chosen: one frozen dataclass a section, with types and ranges. Nothing here imports torch or Hydra.

Values are checked strictly (no "3" for 3, no true for 1, no unknown keys) by pydantic, through `build`.
"""

import json
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from gpt.errors import ConfigError, UnknownKey

CONFIGS = Path(__file__).resolve().parent.parent / "configs"  # the same choices, to be composed
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

Count = Annotated[int, Field(ge=1)]  # at least one of something
Natural = Annotated[int, Field(ge=0)]  # zero allowed
Seed = Annotated[int, Field(ge=0, lt=2**63)]  # what torch takes
Factor = Annotated[int, Field(ge=1, le=4096)]  # beyond, a window is a whole text
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Moderate = Annotated[float, Field(ge=1e-9, le=1e12)]  # of a formula: float32 holds it, its square and their inverses
Rows = Annotated[int, Field(ge=1, le=2**24)]  # of a table, or a length: more is a slip of the hand
Fraction = Annotated[float, Field(ge=0, lt=1)]  # a share that must leave something
Name = Annotated[str, Field(min_length=1)]
# Rescalings of RoPE, see gpt/position/scaling.py.
Scaling = Literal["none", "linear", "ntk", "dynamic", "by_parts", "yarn", "llama3", "longrope"]


@dataclass(frozen=True, config=STRICT)
class ModelConfig:
    """Sizes of the GPT. `block_size` is the training length L, in tokens."""

    n_layer: Count = 4
    n_head: Count = 4
    n_embd: Count = 128
    block_size: Annotated[int, Field(ge=2)] = 64
    dropout: Fraction = 0.0
    bias: bool = False
    vocab_multiple: Count = 1  # the embedding has rows up to a multiple of this; padding is never predicted

    @property
    def head_width(self) -> int:
        return self.n_embd // self.n_head

    def check(self) -> None:
        if self.n_embd % self.n_head:
            raise ConfigError("model.n_embd", self.n_embd, f"a multiple of model.n_head={self.n_head}")


@dataclass(frozen=True, config=STRICT)
class PositionConfig:
    """What every position scheme has; each scheme's own class adds its parameters."""

    name: Name
    layers: Annotated[str, Field(pattern="^[PN]+$")] = "P"  # tiled over layers: P = with position, N = without
    window: Count | None = None  # tokens that a query sees in a windowed layer, itself included; null: all
    window_layers: Annotated[str, Field(pattern="^[WF]+$")] = "W"  # tiled over layers: W = windowed, F = full
    log_scale: bool = False  # products with queries, in full layers, grow with the logarithm of the context past L
    # training draws ids from so many training lengths; null: ids are 0, 1, 2, ...
    randomized: Annotated[int, Field(ge=2, le=4096)] | None = None
    ids: Literal["spaced", "random"] = "spaced"  # where randomized ids lie at evaluation

    def check(self, model: ModelConfig) -> None:
        """Raises ConfigError where this scheme cannot be built into `model`."""
        if "P" not in self.layers:
            raise ConfigError("position.layers", self.layers, "at least one P; without any it is position=nope")
        if self.window is None and self.window_layers != "W":
            raise ConfigError("position.window_layers", self.window_layers, "W where position.window is null")
        if "W" not in self.window_layers:
            raise ConfigError("position.window_layers", self.window_layers, "at least one W; for none: window=null")
        for key in ("layers", "window_layers"):
            pattern = getattr(self, key)
            if len(pattern) > model.n_layer:
                raise ConfigError(f"position.{key}", pattern, f"at most model.n_layer={model.n_layer} letters")
        if self.randomized is None and self.ids != "spaced":
            raise ConfigError("position.ids", self.ids, "spaced where position.randomized is null")

    def trained_ids(self, model: ModelConfig) -> int:
        """How many ids occur in training, from 0 on."""
        return (self.randomized or 1) * model.block_size

    def positioned(self, layer: int) -> bool:
        """Whether the scheme acts in this layer."""
        return self.layers[layer % len(self.layers)] == "P"

    def windowed(self, layer: int) -> bool:
        """Whether this layer sees only the last `window` tokens."""
        return self.window is not None and self.window_layers[layer % len(self.window_layers)] == "W"


@dataclass(frozen=True, config=STRICT)
class DataConfig:
    """Which corpus; data/__init__.py says which keys it has. Fractions are shares of the text."""

    name: Name
    path: str | None = None  # a local file or folder
    marker: str | None = None  # of text: where a document ends; null: with the file
    site_packages: bool = False  # of stdlib: the packages installed beside it too
    text_field: Name = "text"  # of hf, jsonl and parquet: the column, or key
    repo: str | None = None  # of hf: a dataset of the Hugging Face hub
    revision: str | None = None  # of hf: a commit, tag or branch of the repository; null: its newest commit
    config: str | None = None  # of hf: one configuration of the dataset
    split: Name = "train"  # of hf: the split to train on
    val_split: str | None = None  # of hf: the split for validation; null: a share of `split`
    test_split: str | None = None  # of hf: the sealed one; null: a share of `split`, or none where there is a val_split
    val_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    test_fraction: Fraction = 0.05  # sealed: only eval.split=test scores it; 0: none
    max_tokens: Count | None = None  # of all splits together; null: the whole corpus
    packing: Literal["random", "sequential", "documents"] = "random"  # how training windows are laid over the text

    def check(self) -> None:
        if self.val_fraction + self.test_fraction >= 1:
            allowed = f"below {1 - self.val_fraction:g}, since data.val_fraction={self.val_fraction:g}"
            raise ConfigError("data.test_fraction", self.test_fraction, allowed)


@dataclass(frozen=True, config=STRICT)
class TokenizerConfig:
    """Which tokenizer. `file` is a file for hf (tokenizer.json) and, if it likes, char (JSON of its characters)."""

    name: Literal[
        "byte",
        "char",
        "gpt2",
        "r50k_base",
        "p50k_base",
        "p50k_edit",
        "cl100k_base",
        "o200k_base",
        "o200k_harmony",
        "bpe",
        "hf",
    ] = "byte"
    file: str | None = None
    vocab_size: Count | None = None  # of bpe, separator included


@dataclass(frozen=True, config=STRICT)
class OptimConfig:
    """AdamW and its learning-rate schedule; lengths in steps, rates per step."""

    lr: Positive = 1e-3
    min_lr: NonNegative = 1e-4
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup: Natural = 100
    decay: Annotated[float, Field(gt=0, le=1)] = 0.2  # wsd: the last share of the steps, in which the rate falls
    beta1: Fraction = 0.9
    beta2: Fraction = 0.99
    eps: Positive = 1e-8
    weight_decay: NonNegative = 0.1
    grad_clip: NonNegative = 1.0  # largest gradient norm; 0 turns clipping off

    def check(self) -> None:
        if self.min_lr > self.lr:
            raise ConfigError("optim.min_lr", self.min_lr, f"at most optim.lr={self.lr}")


@dataclass(frozen=True, config=STRICT)
class TrainConfig:
    """One run: `batch_size` is in sequences a micro-step, over all processes; a step has `accumulate` micro-steps."""

    steps: Count = 2000
    batch_size: Count = 12
    accumulate: Count = 1
    eval_every: Count = 250
    eval_tokens: Count = 16384  # validation targets of an evaluation during training
    checkpoint_every: Count = 500
    log_every: Count = 10


@dataclass(frozen=True, config=STRICT)
class EvalConfig:
    """The length protocol: how many targets, and the stride of the sliding window (null: half the training length).

    `documents` is concat (one text, documents one after the other) or within (windows that lie inside one document).
    """

    tokens: Count = 131072
    stride: Count | None = None
    documents: Literal["concat", "within"] = "concat"
    split: Literal["val", "test"] = "val"  # test is for the end: who looks often trains on it (char has its characters)


@dataclass(frozen=True, config=STRICT)
class RuntimeConfig:
    device: Annotated[str, Field(pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    compile: bool = False


@dataclass(frozen=True, config=STRICT)
class WandbConfig:
    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    project: Name = "nanope"
    entity: str | None = None
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, config=STRICT)
class AskedConfig:
    """An evaluation: `runs` or `checkpoint` is a folder, factors are evaluation lengths in training lengths."""

    runs: Name | None = None
    checkpoint: Name | None = None
    factors: Annotated[tuple[Factor, ...], Field(min_length=1)] = (1, 2, 4)
    scaling: Annotated[tuple[Scaling, ...], Field(min_length=1)] = ("none",)


@dataclass(frozen=True, config=STRICT)
class AskedPosition:
    """How positions are read, other than a run's own configuration says."""

    overflow: Literal["error", "clamp", "wrap", "interpolate"] | None = None
    base: Moderate | None = None
    ids: Literal["spaced", "random"] | None = None


@dataclass(frozen=True, config=STRICT)
class AskedEval:
    tokens: Count | None = None
    stride: Count | None = None
    documents: Literal["concat", "within"] | None = None
    split: Literal["val", "test"] | None = None


@dataclass(frozen=True, config=STRICT)
class SampleConfig:
    """What scripts/sample.py is asked for."""

    checkpoint: Name  # a run's folder or a checkpoint's
    prompt: str = ""  # empty: the separator between documents, or a line's end, or the first id
    tokens: Count = 300
    temperature: NonNegative = 0.8  # 0: always the likeliest token
    top_k: Count | None = None  # sample among the k likeliest
    context: Annotated[int, Field(ge=2)] | None = None  # tokens the model sees at most; null: its training length
    seed: Seed = 0
    device: Annotated[str, Field(pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")] = "auto"


@dataclass(frozen=True, config=STRICT)
class AskedCosts:
    """What scripts/schemes.py is asked for, besides keys of train.py."""

    position: Name | None = None  # schemes, with commas between; null: all
    length: Rows | None = None  # tokens; null: model.block_size


@dataclass(frozen=True, config=STRICT)
class AskedBench:
    """What scripts/bench_schemes.py is asked for, besides keys of train.py."""

    position: Name | None = None  # schemes, with commas between; null: all
    rounds: Count = 5
    steps: Count = 10  # of each scheme in a round


# What a run did before there was such a key, where that is not the key's default today.
BEFORE = {"data.test_fraction": 0.0}

SECTIONS = {
    "model": ModelConfig,
    "data": DataConfig,
    "tokenizer": TokenizerConfig,
    "optim": OptimConfig,
    "train": TrainConfig,
    "eval": EvalConfig,
    "runtime": RuntimeConfig,
    "wandb": WandbConfig,
}


def build(cls: type, raw: object, key: str):
    """A `cls` from the plain mapping `raw`; ConfigError names `key.<field>`, what was given and what is allowed."""
    if not isinstance(raw, dict):
        raise ConfigError(key, raw, f"a section with the keys {', '.join(f.name for f in fields(cls))}")
    try:
        text = json.dumps(raw)  # strict JSON mode takes lists for tuples and nothing else in place of something else
        return TypeAdapter(cls).validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0]) if first["loc"] else ""
        section = next((f.type for f in fields(cls) if f.name == field and is_dataclass(f.type)), None)
        if section and field in raw:
            build(section, raw[field], f"{key}.{field}".lstrip("."))  # raises, and names the key inside
        if first["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
            raise UnknownKey(f"{key}.{field}".lstrip("."), [f.name for f in fields(cls)]) from None
        if first["type"] in ("missing", "missing_argument"):
            allowed = "a value (it has no default)"
        else:
            allowed = allowed_values(cls, field)
        raise ConfigError(f"{key}.{field}".lstrip("."), raw.get(field), allowed) from None
    except (TypeError, ValueError):
        raise ConfigError(key, raw, "plain numbers, texts, true or false, null and lists of these") from None


def parse(cls: type, arguments: list[str]):
    """A `cls` from key=value words; the values are YAML's, texts are taken as they are. Raises ConfigError."""
    raw = {}
    texts = {f.name for f in fields(cls) if f.type in (str, Name)}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals:
            raise ConfigError(argument, "no value", "key=value; the keys are " + ", ".join(f.name for f in fields(cls)))
        try:
            raw[key] = value if key in texts else yaml.safe_load(value)
            value.encode()
        except UnicodeEncodeError:  # bytes of the command line that are no UTF-8
            raise ConfigError(key, value, "a text in UTF-8") from None
        except (yaml.YAMLError, ValueError, RecursionError):
            raise ConfigError(key, value, allowed_values(cls, key)) from None
    return build(cls, raw, "")


def allowed_values(cls: type, field: str) -> str:
    """The field's type and range in words, read off its own schema."""
    return describe(TypeAdapter(cls).json_schema()["properties"].get(field, {}))


def describe(schema: dict) -> str:
    if "anyOf" in schema:
        return " or ".join(describe(one) for one in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(str(value) for value in schema["enum"])
    words = {
        "integer": "a whole number",
        "number": "a number",
        "string": "a text",
        "boolean": "true or false",
        "array": "a list",
        "null": "null",
    }
    text = words.get(schema.get("type"), "a value of another type")
    if "prefixItems" not in schema and isinstance(schema.get("items"), dict):
        text += f", each {describe(schema['items'])}"
    if "const" in schema:
        return str(schema["const"])
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    limits = [f"{sign} {large(schema[word])}" for word, sign in signs.items() if word in schema]
    if schema.get("minLength"):
        limits.append("not empty")
    if "pattern" in schema:
        limits.append(f"of the form {schema['pattern'].strip('^$')}")
    return f"{text} {' and '.join(limits)}".strip()


def large(limit: float) -> str:
    return "2^63" if limit == 2**63 else str(limit) if isinstance(limit, int) else f"{limit:g}"


def plain(value: object) -> object:
    """Dataclasses, tuples and mappings as what JSON and YAML hold: dicts, lists, numbers, texts, booleans, null."""
    if is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value


def as_written(config: dict) -> dict:
    """A stored, plain configuration with what BEFORE says of the keys that are younger than it."""
    made = dict(config)
    for key, value in BEFORE.items():
        section, _, name = key.partition(".")
        if isinstance(made.get(section), dict):
            made[section] = {name: value} | made[section]
    return made


def flatten(config: dict, prefix: str = "") -> dict:
    """{dotted key: value} of nested mappings."""
    flat = {}
    for key, value in config.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return flat


def differences(old: dict, new: dict) -> dict:
    """{dotted key: (old value, new value)} where two plain configurations differ; a missing key counts as null."""
    old, new = flatten(old), flatten(new)
    return {key: (old.get(key), new.get(key)) for key in (old | new) if old.get(key) != new.get(key)}
