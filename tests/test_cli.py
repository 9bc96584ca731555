"""What a user sees when a command line is wrong, interrupted or cut off: one line at most, never a traceback."""

import os
import re
import runpy
import signal
import subprocess
import sys
import threading
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter

from gpt import cli, sweep, terminal
from gpt.cli import compose, explain
from gpt.errors import DataError
from gpt.generate import beginning
from gpt.position import SCHEMES
from gpt.position.scaling import ScalingConfig
from gpt.restore import named
from gpt.schema import SECTIONS, AskedConfig, AskedEval, AskedPosition, RuntimeConfig
from tests.measured_runs import ablation

ROOT = Path(__file__).parents[1]


def answer(capsys, monkeypatch, *words: str, script: str = "train") -> str:
    """The one line that an entry point answers with; its job never starts."""
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *words])
    with pytest.raises(SystemExit) as exit:
        cli.run(script, lambda *_: pytest.fail("the job started"))
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert exit.value.code == 2 and not out and line.startswith("error: ")
    return line.removeprefix("error: ")


@pytest.mark.parametrize(
    "words, expected",
    [
        (["name=ünï"], "name: got 'ünï', which Hydra cannot read; quote it for Hydra: \"name='ünï'\""),
        (["data.path=~x"], "data.path: got '~x', which Hydra cannot read; quote it for Hydra: \"data.path='~x'\""),
        (["name='x'y"], "name: got \"'x'y\", which Hydra cannot read; quote it for Hydra: \"name='\\'x\\'y'\""),
        (["name=${"], "name: got '${', which Hydra cannot read"),
        (["train.steps"], "train.steps: has no value; write train.steps=<value>"),
        (["position="], "position: got '', allowed: alibi | "),
        (["position=null"], "null is no option of a group, nor is a number"),
        (["=3"], "=3: has no key; write key=value"),
        (["a=b", "-m", "c=d"], "unrecognized arguments: c=d; all key=value words stand together"),
        (["--nope"], "unrecognized arguments: --nope; "),
        (["--config-name=eval"], "--config-name, --config-path: train.py has one configuration"),
        (["~data", "data.path=x"], "data.path: is gone, since another word of this command removes it"),
        (
            ["data=nanogpt", "data.val_fraction=0.5"],
            "data.val_fraction: data=nanogpt has no such key; configs/data has",
        ),
        (["data=tinystories", "data.val_fraction=0.1"], "data.val_fraction: data=tinystories has no such key"),
        (["data=text", "data.path=\udcff\udcfe.txt"], r"data.path=\udcff\udcfe.txt: is not UTF-8"),
        (["data=text", "data.path='\udcff'"], r"data.path='\udcff': is not UTF-8, which cannot be given here; rename"),
        (["hydra.mode=FOO"], "hydra.mode: got 'FOO', not allowed: Invalid value 'FOO', expected one of [RUN"),
        (["name=${nokey}"], "name: Interpolation key 'nokey' not found"),
        (["seed=1,2"], "seed: got '1,2', several values; to sweep over them add -m"),
        (["+seed=1"], "seed: is there already; change it without +: seed=<value>"),
        (["trian.steps=3"], "trian.steps: there is no such key; did you mean train.steps?"),
        (["-m", "hydra.mode=FOO"], "hydra.mode: got 'FOO'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_words_are_one_line_that_names_them(capsys, monkeypatch, words, expected):
    assert answer(capsys, monkeypatch, *words).startswith(expected)


def test_an_entry_point_ends_with_its_sweep(capsys, monkeypatch):
    """A sweep marks its jobs; one that it began before it died would be told so at once."""
    told, marked = [], threading.Event()
    monkeypatch.setenv(sweep.PARENT, "1")
    monkeypatch.setattr("os.getppid", lambda: 2)
    monkeypatch.setattr("os.kill", lambda *what: (told.append(what), marked.set()))
    answer(capsys, monkeypatch, "position=")
    assert marked.wait(10) and told == [(os.getpid(), signal.SIGTERM)] and sweep.PARENT not in os.environ


def closed(cls: type, prefix: str = "") -> dict[str, list]:
    """{dotted key: its values} of the fields that take one of a few."""
    found, properties = {}, TypeAdapter(cls).json_schema()["properties"]
    for field in fields(cls):
        if is_dataclass(field.type):
            found |= closed(field.type, f"{prefix}{field.name}.")
        for one in properties[field.name].get("anyOf", [properties[field.name]]):
            if values := one.get("enum") or one.get("items", {}).get("enum"):
                found[prefix + field.name] = values
    return found


def all_said(said: dict[str, str], wanted: dict[str, list]) -> bool:
    return bool(wanted) and all(
        re.search(rf"(^|\W){re.escape(value)}(\W|$)", said.get(key, "")) for key in wanted for value in wanted[key]
    )


def help_of(script: str, monkeypatch, capsys, *words: str) -> dict[str, str]:
    """{dotted key: the comment behind it} of what --help prints."""
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *words, "--help"])
    cli.run(script, lambda *_: pytest.fail("the job started"))
    out, err = capsys.readouterr()
    assert not err and f"python {script}.py" in out
    found, section = {}, ""
    for row in out.partition("Keys and their defaults")[2].splitlines():
        if key := re.match(r"(  )?(\w+):[^#]*(?:# (.*))?$", row):
            section = section if key[1] else key[2]
            found[f"{section}.{key[2]}" if key[1] else section] = key[3] or ""
    return found


def test_help_says_what_each_key_takes(monkeypatch, capsys):
    """Beside its default, for every key with a closed set of values."""
    wanted = {key: values for name, cls in SECTIONS.items() for key, values in closed(cls, f"{name}.").items()}
    del wanted["tokenizer.name"]  # the options of the group
    said = help_of("train", monkeypatch, capsys)
    assert all_said(said, wanted | closed(SCHEMES["learned"].Config, "position."))
    assert said["model.block_size"].startswith("the training length L") and said["data.packing"]
    wanted = closed(AskedConfig) | closed(AskedPosition, "position.") | closed(AskedEval, "eval.")
    wanted |= closed(RuntimeConfig, "runtime.") | {"rescaling.ramp": closed(ScalingConfig)["ramp"]}
    assert all_said(help_of("eval", monkeypatch, capsys), wanted)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_scheme_says_what_its_keys_take(scheme):
    everyones = cli.comments(cli.CONFIGS / "train.yaml")
    own = cli.comments(cli.CONFIGS / "position" / f"{scheme}.yaml", "position.")
    assert all_said(everyones | own, closed(SCHEMES[scheme].Config, "position."))


def test_help_is_of_what_is_chosen(monkeypatch, capsys):
    said = help_of("train", monkeypatch, capsys, "position=p_rope", "data=text", "model=gpt2")
    assert said["position.keep"].startswith("1 is rope") and said["position.layout"].startswith("interleaved: ")
    assert said["data.path"].startswith("needed: data.path=") and said["model.block_size"]
    assert answer(capsys, monkeypatch, "position=banana", "--help").startswith("position: got 'banana', allowed: ")


@pytest.mark.parametrize("value", ["ünï", "~x", "x'y", "a=b", "it's ~ {b"])
def test_the_remedy_works(value):
    """The quoted word, as a shell reads it, is that very value."""
    with pytest.raises(Exception) as error:  # noqa: B017, PT011 (Hydra has many)
        compose("train", [f"name={value}"])
    command = explain(error.value).split("quote it for Hydra: ")[1]
    word = subprocess.run(["sh", "-c", f"printf %s {command}"], capture_output=True, check=True).stdout.decode()
    assert compose("train", [word])["name"] == value


def test_interrupts_and_closed_pipes():
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as exit:
        terminal.guard(interrupted)
    assert exit.value.code == 130
    code = "import sys; sys.path.insert(0, {!r}); from gpt.terminal import guard; guard(lambda: print('x' * 10**6))"
    child = subprocess.Popen(
        [sys.executable, "-c", code.format(str(ROOT))], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    child.stdout.close()
    assert child.wait(60) == 1 and child.stderr.read() == b""


@pytest.mark.parametrize("script", ["compare.py", "sample.py"])
def test_scripts_are_guarded(script, monkeypatch, capsys):
    """Interrupted while heavy libraries load, which is where the first second goes."""

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("gpt.report.write_report", interrupted)
    monkeypatch.setattr("gpt.checkpoint.resolve", interrupted)
    monkeypatch.setattr(sys, "argv", [script, "checkpoint=x"])
    with pytest.raises(SystemExit) as exit:
        runpy.run_path(str(ROOT / "scripts" / script), run_name="__main__")
    assert exit.value.code == 130 and capsys.readouterr() == ("", "")


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "scripts").glob("*.py")))
def test_scripts_say_what_they_take(script, flag, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [script, flag])
    try:
        runpy.run_path(str(ROOT / "scripts" / script), run_name="__main__")
    except SystemExit as ended:
        assert not ended.code
    out, err = capsys.readouterr()
    assert f"python scripts/{script}" in out and not err


def test_a_terminal_of_ascii_gets_question_marks(tmp_path):
    ablation(tmp_path, seeds=1)
    ascii = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, ROOT / "scripts/compare.py", tmp_path]
    ended = subprocess.run(command, capture_output=True, env=ascii, timeout=180)
    assert ended.returncode == 0 and not ended.stderr and b"change 1x?4x" in ended.stdout


class Characters:
    """A tokenizer without a separator, and with or without a line's end."""

    separator = None

    def __init__(self, known: str):
        self.known = known

    def encode(self, text: str):
        if set(text) - set(self.known):
            raise DataError("unknown")
        return torch.tensor([self.known.index(c) for c in text])


def test_where_a_text_without_a_prompt_begins():
    assert beginning(Characters("ab\nc")) == [2]
    assert beginning(Characters("abc")) == [0]
    one = Characters("abc")
    one.separator = 256
    assert beginning(one) == [256]


def test_a_file_is_no_checkpoint(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("x")
    main = runpy.run_path(str(ROOT / "scripts/sample.py"))["main"]
    with pytest.raises(SystemExit) as exit:
        terminal.guard(lambda: main([f"checkpoint={tmp_path / 'notes.txt'}"]))
    (line,) = capsys.readouterr().err.splitlines()
    assert exit.value.code == 2 and line.startswith("error: checkpoint: got ") and "this is a file" in line
    assert named(str(tmp_path)) == tmp_path
