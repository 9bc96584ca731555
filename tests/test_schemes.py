"""The table of schemes and their files."""

from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter

from gpt.errors import ConfigError
from gpt.position import SCHEMES
from gpt.position.scaling import PARAMETERS, ScalingConfig
from gpt.schema import ModelConfig, build
from tests.helpers import SMALL, as_written, ids, make

GPT2 = ModelConfig(n_layer=12, n_head=12, n_embd=768, block_size=1024)


def test_every_scheme_has_its_yaml():
    """The table of schemes, their files and their names are one list; the first row of a class has its defaults.

    (A checkpoint from before a key existed is read with the default of the class.)
    """
    folder = Path(__file__).parents[1] / "configs" / "position"
    assert {path.stem for path in folder.glob("*.yaml")} == set(SCHEMES)
    seen = set()
    for name, cls in SCHEMES.items():
        values = as_written(name)
        config = build(cls.Config, values, "position")
        config.check(GPT2)
        assert config.name == name
        assert (config == cls.Config(name=name)) != (cls in seen), name
        seen.add(cls)


def ends(config: type) -> list[tuple[str, float]]:
    """The least and the largest value of each key that has both, but for tables that would fill the memory."""
    found = []
    for key, schema in TypeAdapter(config).json_schema()["properties"].items():
        for one in schema.get("anyOf", [schema]):
            if {"minimum", "maximum"} <= set(one):
                values = one["minimum"], one["maximum"]
                found += [(key, v) for v in values if one["type"] == "number" or v <= 4096 or key == "max_distance"]
    return found


@pytest.mark.parametrize("name", SCHEMES)
def test_every_number_that_is_allowed_gives_a_loss(name, fresh):
    """What float32 does not hold is refused in one line, never a loss of nan or an error of torch's."""
    x, y = ids((2, SMALL.block_size), fresh), ids((2, SMALL.block_size), fresh)
    for key, value in ends(SCHEMES[name].Config):
        try:
            model = make(name, **{key: value})
            model.position.config.check(SMALL)
            loss = model(x, y)[1]
        except ConfigError as error:  # two keys that do not go together
            assert str(error).startswith("position."), error
            continue
        loss.backward()
        assert torch.isfinite(loss), (key, value)


@pytest.mark.parametrize("kind", [kind for kind in PARAMETERS if kind != "none"])
def test_every_rescaling_that_is_allowed_gives_a_loss(kind, fresh):
    x = ids((2, 3 * SMALL.block_size), fresh)
    model = make("rope")
    for key, value in [("factor", 4.0), *(end for end in ends(ScalingConfig) if end[0] in PARAMETERS[kind])]:
        values = {"kind": kind, "factor": 4.0, key: value}
        try:
            with model.position.scaled(build(ScalingConfig, values, "rescaling")):
                loss = model(x, x)[1]
        except ConfigError as error:
            assert str(error).startswith("rescaling."), error
            continue
        assert torch.isfinite(loss), (key, value)
