"""The table of schemes and their files."""

from pathlib import Path

from gpt.position import SCHEMES
from gpt.schema import ModelConfig, build
from tests.helpers import as_written

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
