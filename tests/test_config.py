"""Every group and experiment composes into checked dataclasses; every wrong value is one line that names its key."""

import itertools
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gpt.cli import compose, explain
from gpt.config import load, load_evaluation
from gpt.errors import ConfigError, UserError
from gpt.schema import SECTIONS, build, differences, flatten, plain

CONFIGS = Path(__file__).parents[1] / "configs"
OPTIONS = {group.name: sorted(p.stem for p in group.glob("*.yaml")) for group in CONFIGS.iterdir() if group.is_dir()}


@pytest.mark.parametrize("group", sorted(OPTIONS))
def test_every_option_of_every_group(group):
    for option in OPTIONS[group]:
        text = ["data.path=somewhere"] if option == "text" else []
        config = load(compose("train", [f"{group}={option}", *text]))
        if group in ("position", "data", "tokenizer"):
            assert getattr(config, group).name == option


@pytest.mark.parametrize("position, model", list(itertools.product(OPTIONS["position"], OPTIONS["model"])))
def test_every_scheme_fits_every_model(position, model):
    config = load(compose("train", [f"position={position}", f"model={model}"]))
    assert config.position.name == position


def test_defaults_of_yaml_and_schema_agree():
    """A checkpoint written before a key existed is read with the schema's default; the YAML must not say another."""
    values = compose("train", [])
    for key, cls in SECTIONS.items():
        given = {k: v for k, v in values[key].items() if k != "name"}
        fresh = plain(build(cls, {"name": values[key]["name"]} if "name" in values[key] else {}, key))
        assert {k: fresh[k] for k in given} == given, key


def test_headers_say_what_a_reader_needs():
    for path in (CONFIGS / "position").glob("*.yaml"):
        head = path.read_text()
        assert all(f"# {word}" in head for word in ("Paper", "Where", "Cost", "Past L")), path.name
    for path in (CONFIGS / "experiment").glob("*.yaml"):
        head = path.read_text()
        assert all(f"# {word}" in head for word in ("Command", "Time", "Result")), path.name
        command = re.search(r"# Command +(.+)", head).group(1)
        assert path.stem in command


WRONG = [
    ("train.steps", 0, "a whole number >= 1"),
    ("train.steps", 1.0, "a whole number >= 1"),
    ("train.steps", True, "a whole number >= 1"),
    ("train.steps", "3", "a whole number >= 1"),
    ("train.steps", None, "a whole number >= 1"),
    ("train.steps", [1], "a whole number >= 1"),
    ("optim.lr", "fast", "a number > 0"),
    ("optim.lr", -1e-3, "a number > 0"),
    ("optim.beta1", 1.0, "a number >= 0 and < 1"),
    ("optim.schedule", "linear", "cosine | wsd | constant"),
    ("optim.min_lr", 1.0, "at most optim.lr=0.001"),
    ("model.bias", "no", "true or false"),
    ("model.bias", 0, "true or false"),
    ("model.n_embd", 130, "a multiple of model.n_head=4"),
    ("eval.stride", 65, "at most model.block_size=64"),
    ("eval.stride", 0, "a whole number >= 1 or null"),
    ("train.eval_tokens", 63, "at least model.block_size=64"),
    ("wandb.mode", False, "auto | online | offline | disabled"),
    ("wandb.tags", "a", "a list, each a text"),
    ("runtime.device", "gpu", "a text of the form (auto|cpu|mps|cuda(:\\d+)?)"),
    ("tokenizer.name", "bert", "byte | char | gpt2"),
    ("position.name", "rotary", "nope | learned | sinusoidal | "),
    ("position.layers", "", "a text of the form [PN]+"),
    ("position.overflow", "extend", "error | clamp | wrap | interpolate"),
    ("seed", -1, "a whole number >= 0"),
    ("seed", 0.5, "a whole number >= 0"),
    ("seed", 2**63, "a whole number >= 0 and < 2^63"),
    ("seed", True, "a whole number >= 0"),
    ("sweep", 3, "a text"),
]


@pytest.mark.parametrize("key, value, allowed", WRONG)
def test_wrong_values_name_the_key_the_value_and_what_is_allowed(key, value, allowed):
    values = compose("train", [])
    *section, last = key.split(".")
    (values[section[0]] if section else values)[last] = value
    with pytest.raises(ConfigError) as error:
        load(values)
    message = str(error.value)
    assert message.startswith(f"{key}: got ") and allowed in message and "\n" not in message


@pytest.mark.parametrize("section", [*SECTIONS, "position"])
def test_unknown_and_missing_keys(section):
    values = compose("train", [])
    values[section]["lenght"] = 1
    with pytest.raises(ConfigError, match=f"{section}.lenght: there is no such key.*the keys are"):
        load(values)
    values = compose("train", [])
    del values[section]
    with pytest.raises(ConfigError, match=f"{section}: got null, allowed: a value"):
        load(values)
    values[section] = 5
    with pytest.raises(ConfigError, match=f"{section}"):
        load(values)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda x: st.lists(x)))
def test_whatever_stands_in_a_section_is_a_configuration_or_one_line(value):
    for key, cls in SECTIONS.items():
        for field in cls.__dataclass_fields__:
            try:
                build(cls, {"name": "text", field: value} if key == "data" else {field: value}, key)
            except UserError as error:
                assert "\n" not in str(error) and str(error).startswith(key)


def test_keys_of_another_scheme_are_refused():
    values = compose("train", ["position=t5"])
    values["position"]["name"] = "rope"
    with pytest.raises(ConfigError, match="position.buckets: there is no such key; the keys are name, .*, base"):
        load(values)


def test_t5_needs_room_for_its_buckets():
    with pytest.raises(
        ConfigError, match="position.max_distance: got 16, allowed: more than position.buckets / 2 = 16"
    ):
        load(compose("train", ["position=t5", "position.max_distance=16"]))
    with pytest.raises(ConfigError, match="position.buckets: got 31"):
        load(compose("train", ["position=t5", "position.buckets=31"]))


def test_layer_patterns_that_change_nothing_are_refused():
    for scheme, pattern, allowed in (
        ("learned", "PN", "P: learned does nothing in a layer"),
        ("nope", "NP", "P: nope does nothing in a layer"),
        ("rope", "N", "at least one P"),
        ("rope", "PNNNN", "at most model.n_layer=4 letters"),
    ):
        with pytest.raises(ConfigError, match=f"position.layers: got '{pattern}', allowed: {allowed}"):
            load(compose("train", [f"position={scheme}", f"position.layers={pattern}"]))
    assert load(compose("train", ["position=rope", "position.layers=PPPN"])).position.layers == "PPPN"


def test_evaluation_configuration():
    config = load_evaluation(compose("eval", ["runs=runs/pos", "factors=[1,2]", "position.overflow=clamp"]))
    assert config.asked.factors == (1, 2) and config.position.overflow == "clamp"
    for override, message in (
        ("factors=[]", "factors: got \\[\\], allowed: a list"),
        ("factors=[0]", "factors: got \\[0\\]"),
        ("factors=2", "factors: got 2"),
        ("factors=[1.5]", "factors: got \\[1.5\\]"),
        ("scaling=[yarm]", "scaling: got \\['yarm'\\]"),
        ("position.overflow=extend", "position.overflow: got 'extend'"),
        ("eval.tokens=0", "eval.tokens: got 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_evaluation(compose("eval", [override]))


def test_differences_name_dotted_keys():
    old = {"a": 1, "b": {"c": 2, "d": [1]}, "e": 0}
    new = {"a": 1, "b": {"c": 3, "d": [1]}, "f": None, "e": [], "g": {"h": {"i": 1}, "j": {}}}
    assert differences(old, new) == {"b.c": (2, 3), "e": (0, []), "g.h.i": (None, 1), "g.j": (None, {})}
    assert flatten(new) == {"a": 1, "b.c": 3, "b.d": [1], "f": None, "e": [], "g.h.i": 1, "g.j": {}}


@pytest.mark.parametrize(
    "override, message",
    [
        ("trian.steps=3", "trian.steps: there is no such key; did you mean train.steps?"),
        ("position=rop", "position: got 'rop', allowed: alibi | "),
        ("model=huge", "model: got 'huge', allowed: gpt2 | gpt2-medium | small | tiny"),
        ("train.steps", "train.steps"),
    ],
)
def test_hydras_errors_in_one_line(override, message):
    with pytest.raises(Exception) as error:  # noqa: B017, PT011 (Hydra has many)
        compose("train", [override])
    text = explain(error.value, "train")
    assert message in text and "\n" not in text


def test_shakespeare_brings_its_tokenizer_and_the_user_may_choose_another():
    assert compose("train", ["data=shakespeare_char"])["tokenizer"]["name"] == "char"
    assert compose("train", ["data=shakespeare_char", "tokenizer=byte"])["tokenizer"]["name"] == "byte"


def test_yaml_files_hold_plain_values_only():
    """Nothing in a configuration names code: no _target_, no interpolation, no tags."""
    for path in CONFIGS.rglob("*.yaml"):
        text = path.read_text()
        assert "_target_" not in text and "${" not in text and "!!" not in text, path
        assert isinstance(yaml.safe_load(text), dict)


def test_the_largest_experiment_has_every_scheme():
    from gpt.position import SCHEMES

    values = yaml.safe_load((CONFIGS / "experiment" / "schemes_cpu.yaml").read_text())
    named = values["hydra"]["sweeper"]["params"]["position"].split(",")
    assert sorted(named) == sorted(SCHEMES)
