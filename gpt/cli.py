"""The door between Hydra's command line and the entry points. Errors of the user come out as one line, exit code 2."""

import argparse
import contextlib
import difflib
import io
import os
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import hydra
import yaml
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gpt import sweep
from gpt.errors import UserError, shown
from gpt.schema import CONFIGS, flatten
from gpt.terminal import guard

Job = Callable[[dict, list[str]], int]


def run(config_name: str, job: Job, final: Callable[[dict, list[str]], object] | None = None) -> None:
    """Compose configs/<config_name>.yaml with the command line and exit with what `job(values, overrides)` returns.

    `final` turns values and overrides into the checked configuration; where it is given, -m starts a sweep.
    """
    sweep.end_with_parent()
    sweep.register(final or refuse_sweep)

    @hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=config_name)
    def app(cfg) -> None:
        overrides = OmegaConf.to_container(HydraConfig.get().overrides.task)  # as typed: ${...} stays
        # caught in here: Hydra would print a line of its own about an error that passes through it
        report_errors(lambda: sys.exit(job(OmegaConf.to_container(cfg, resolve=True), overrides)), config_name)

    def checked() -> None:
        if not check_words(sys.argv[1:]).help:
            return app()
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
            app()
        return print(with_comments(shown.getvalue(), config_name), end="")

    report_errors(checked, config_name)


def refuse_sweep(values: dict, overrides: list[str]) -> object:
    raise UserError("-m sweeps over train.py only; eval.py takes all runs of a sweep at once: runs=<folder>")


def compose(config_name: str, overrides: list[str]) -> dict:
    """The plain values that configs/<config_name>.yaml and the overrides give, as an entry point would see them."""
    check_utf8(overrides)
    sweep.register(refuse_sweep)
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return OmegaConf.to_container(hydra.compose(config_name, overrides), resolve=True)


def report_errors(main: Callable[[], object], config_name: str | None = None) -> None:
    """Call main; what the user can mend becomes one line on stderr, everything else keeps its traceback."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises instead of printing pages of its own

    def explained() -> None:
        try:
            main()
        except (HydraException, OmegaConfBaseException) as error:
            raise UserError(explain(error, config_name)) from None
        except ValueError as error:
            if "Config group override" not in str(error):
                raise
            raise UserError(
                "null is no option of a group, nor is a number (without positions it is position=nope); --help lists "
                "the options"
            ) from None

    guard(explained)


def check_utf8(words: list[str]) -> None:
    """Raises UserError for a word that is no text, such as the name of a file in another encoding."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise UserError(
                f"{shown(word)}: is not UTF-8, which cannot be given here; rename or link the file"
            ) from None


def check_words(words: list[str]) -> argparse.Namespace:
    """What Hydra reads there. UserError where it would answer with its usage or errors of its own configuration."""
    check_utf8(words)
    script = Path(sys.argv[0]).name
    parser = get_args_parser()

    def refuse(message: str) -> NoReturn:
        raise UserError(
            f"{message}; all key=value words stand together, options such as -m before them: "
            f"python {script} -m seed=0,1; --help lists the keys"
        )

    parser.error = refuse
    given = parser.parse_args(words)
    if given.config_name or given.config_path:
        raise UserError(
            f"--config-name, --config-path: {script} has one configuration; change it with key=value, or put "
            "what belongs together into configs/experiment/<name>.yaml and choose experiment=<name>"
        )
    for word in given.overrides:
        if word.startswith("="):
            raise UserError(f"{word}: has no key; write key=value; python {script} --help lists all keys")
    return given


def with_comments(text: str, config_name: str) -> str:
    """Hydra's help, with what the YAML files say of each key behind its default."""
    head, mark, body = text.partition("Keys and their defaults")
    line, _, body = body.partition("\n")
    values = yaml.safe_load(body) or {}
    said = comments(CONFIGS / f"{config_name}.yaml")
    for entry in yaml.safe_load((CONFIGS / f"{config_name}.yaml").read_text(encoding="utf-8"))["defaults"]:
        for group, option in entry.items() if isinstance(entry, dict) else ():
            option = (values.get(group) or {}).get("name", option)  # of model and optim: that of the defaults
            said |= comments(CONFIGS / group / f"{option}.yaml", f"{group}.")
    lines, above = [], []
    for row in body.splitlines():
        if found := re.match(r"( *)(\w+):", row):
            above = [*above[: len(found[1]) // 2], found[2]]
            if comment := said.get(".".join(above)):
                row = f"{row:<26}  # {comment}"
        lines.append(row)
    return f"{head}{mark}{line}\n" + "\n".join(lines) + "\n"


def comments(path: Path, prefix: str = "") -> dict[str, str]:
    """{dotted key: the comment on its line} of a YAML file and of those that it builds on."""
    found, above = {}, []
    if not path.is_file():
        return found
    text = path.read_text(encoding="utf-8")
    for parent in yaml.safe_load(text).get("defaults", []):
        if isinstance(parent, str) and parent != "_self_":
            found |= comments(path.parent / f"{parent}.yaml", prefix)
    for row in text.splitlines():
        if key := re.match(r"( *)(\w+):", row):
            above = [*above[: len(key[1]) // 2], key[2]]
            if comment := re.search(r"\s# *(.+)$", row):
                found[prefix + ".".join(above)] = comment[1]
    return found


def explain(error: Exception, config_name: str | None = None) -> str:
    """Hydra's message in one line, in the words of our own errors."""
    text = str(error)
    script = Path(sys.argv[0]).name
    if isinstance(error, OverrideParseException):
        key, equals, value = error.override.partition("=")
        if not equals:
            return f"{key}: has no value; write {key}=<value>; python {script} --help lists all keys"
        return f"{key}: got {value!r}, which Hydra cannot read; quote it for Hydra: {quoted(key, value)}"
    if found := re.search(r"Ambiguous value for argument '([^=]+)=(.*)'$", text, re.MULTILINE):
        key, value = found.groups()
        return f"{key}: got {value!r}, several values; to sweep over them add -m, as one text: {quoted(key, value)}"
    if found := re.search(r"An item is already at '([^']+)'", text):
        return f"{found.group(1)}: is there already; change it without +: {found.group(1)}=<value>"
    if found := re.search(r"Error merging override ([^=]+)=(.*)", text):
        cause = str(error.__cause__ or "not allowed here").splitlines()[0]
        return f"{found.group(1)}: got {found.group(2)!r}, not allowed: {cause}"
    if found := re.search(r"full_key: (\S+)", text):
        return f"{found.group(1)}: {text.splitlines()[0]}; a plain dollar sign is written \\$"
    if found := re.search(r"Could not (?:override|append to config|delete from config)[^']*'([^'=]+)", text):
        key = found.group(1)
        known = known_keys(config_name) if config_name else []
        if key in known:
            group = key.split(".")[0]
            chosen = [word for word in sys.argv[1:] if word.startswith(f"{group}=")]
            if chosen and not any(word.startswith("~") for word in sys.argv[1:]):
                return f"{key}: {chosen[-1]} has no such key; configs/{group} has those of each"
            return f"{key}: is gone, since another word of this command removes it"
        close = difflib.get_close_matches(key, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"python {script} --help lists all keys"
        return f"{key}: there is no such key; {hint}"
    if found := re.search(r"Could not find '([^']+)/([^'/]*)'", text):
        options = re.findall(r"^\t(\S+)$", text, re.MULTILINE)
        return f"{found.group(1)}: got '{found.group(2)}', allowed: {' | '.join(options)}"
    text = re.split(r"\nSet the environment variable|\nSee https", text)[0]
    return " ".join(line.strip() for line in text.splitlines() if line.strip() and "object_type" not in line)


def quoted(key: str, value: str) -> str:
    """The word as a shell and Hydra take it, whatever is in the value."""
    inside = value.replace("'", "\\'")
    word = f"{key}='{inside}'"
    return shlex.quote(word) if set(word) & set('$`"!') else f'"{word}"'


def known_keys(config_name: str) -> list[str]:
    """Dotted names of all keys of the default configuration."""
    keys = [key.split(".") for key in flatten(compose(config_name, []))]
    return list(dict.fromkeys(".".join(key[:n]) for key in keys for n in range(1, len(key) + 1)))
