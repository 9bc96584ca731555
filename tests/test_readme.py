"""README against the code: every command composes, every file it names is there, every scheme is named."""

import re
import shlex
from pathlib import Path

import pytest

from gpt.cli import compose
from gpt.config import load, load_evaluation
from gpt.costs import asked
from gpt.position import SCHEMES
from gpt.schema import AskedBench, AskedCosts, SampleConfig, parse

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TEXTS = [README, *(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))]
HEADERS = [path.read_text(encoding="utf-8") for path in (ROOT / "configs" / "experiment").glob("*.yaml")]


def commands() -> list[str]:
    """Everything in back quotes, indented or behind `Command` that a user would type."""
    found = set()
    for text in (*TEXTS, *HEADERS):
        for line in re.findall(r"`([^`\n]+)`|^    (.+)$|# Command +(.+)$", text, re.MULTILINE):
            command = "".join(line).split("   #")[0].split("  #")[0].strip()
            if re.match(r"(\.venv/bin/)?(python|torchrun|make) ", command) and "<" not in command:
                found.add(command)
    return sorted(found)


def test_there_are_commands():
    assert len(commands()) > 10 and any("make ablation" in command for command in commands())


@pytest.mark.parametrize("command", commands())
def test_command(command):
    words = shlex.split(command)
    if words[0] == "make":
        targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        goals = [word for word in words[1:] if "=" not in word]
        assert goals and set(goals) <= set(targets)
        for word in words[1:]:
            if word.startswith("EXPERIMENT="):
                assert (ROOT / "configs" / "experiment" / f"{word.split('=')[1]}.yaml").is_file()
        return
    script = next(word for word in words if word.endswith(".py"))
    arguments = words[words.index(script) + 1 :]
    assert (ROOT / script).is_file()
    if "--help" in arguments:
        return
    if script == "train.py":
        swept = "-m" in arguments
        for word in arguments:
            if swept and "," in word:
                for value in word.split("=")[1].split(","):
                    load(compose("train", [f"{word.split('=')[0]}={value}"]))
        load(compose("train", [word for word in arguments if word != "-m" and not (swept and "," in word)]))
    elif script == "eval.py":
        load_evaluation(compose("eval", arguments))
    elif script == "scripts/sample.py":
        parse(SampleConfig, arguments)
    elif script in ("data/prepare.py", "data/inspect.py"):
        compose("train", arguments)
    elif script in ("scripts/schemes.py", "scripts/bench_schemes.py"):
        asked(AskedCosts if script.endswith("/schemes.py") else AskedBench, arguments)
    else:
        assert script in ("scripts/compare.py", "scripts/bench_nanogpt.py", "scripts/bench_data.py") and arguments


def test_the_tree_is_the_tree():
    """Each line of README's tree is a file or folder, and each module of gpt/ has its line."""
    tree = README.split("## The tree")[1].split("\n## ")[0]
    named = re.findall(r"^    (\S+)  +\S", tree, re.MULTILINE)
    assert len(named) > 30
    for name in named:
        assert (ROOT / name).exists(), name
    for path in (ROOT / "gpt").glob("*.py"):
        assert path.name == "__init__.py" or f"gpt/{path.name}" in named, path.name


def test_links_and_pictures_exist():
    for text in TEXTS:
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            assert target.startswith("http") or any((base / target).exists() for base in (ROOT, ROOT / "docs")), target


def test_nothing_is_left_to_fill_in():
    for text in (*TEXTS, *HEADERS):
        assert not re.search(r"\b(TODO|TBD|FIXME|[A-Z]+_TABLE|[A-Z]+_TIME|TIME|RESULT)\b", text)


def test_every_scheme_is_in_the_docs():
    for name in SCHEMES:
        assert any(re.search(rf"\b{name}\b", text) for text in TEXTS), name


def test_requirements_say_why_and_are_pinned():
    for line in (ROOT / "requirements.txt").read_text().splitlines():
        assert re.fullmatch(r"[a-z-]+==[\d.]+ +# .+", line), line
