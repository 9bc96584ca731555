"""The door between Hydra's command line and the entry points. Errors of the user come out as one line, exit code 2."""

import difflib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gpt import sweep
from gpt.errors import UserError
from gpt.schema import flatten

Job = Callable[[dict, list[str]], int]
CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def run(config_name: str, job: Job, final: Callable[[dict, list[str]], object] | None = None) -> None:
    """Compose configs/<config_name>.yaml with the command line and exit with what `job(values, overrides)` returns.

    `final` turns values and overrides into the checked configuration; where it is given, -m starts a sweep.
    """
    sweep.register(final or refuse_sweep)

    @hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=config_name)
    def app(cfg) -> None:
        overrides = list(HydraConfig.get().overrides.task)
        values = OmegaConf.to_container(cfg, resolve=True)
        # caught in here: Hydra would print a line of its own about an error that passes through it
        report_errors(lambda: sys.exit(job(values, overrides)))

    report_errors(app, config_name)


def refuse_sweep(values: dict, overrides: list[str]) -> object:
    raise UserError("-m sweeps over train.py only; eval.py takes all runs of a sweep at once: runs=<folder>")


def compose(config_name: str, overrides: list[str]) -> dict:
    """The plain values that configs/<config_name>.yaml and the overrides give, as an entry point would see them."""
    sweep.register(refuse_sweep)
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return OmegaConf.to_container(hydra.compose(config_name, overrides), resolve=True)


def report_errors(main: Callable[[], object], config_name: str | None = None) -> None:
    """Call main; what the user can mend becomes one line on stderr, everything else keeps its traceback."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises instead of printing pages of its own
    try:
        main()
    except UserError as error:
        fail(str(error))
    except (HydraException, OmegaConfBaseException) as error:
        fail(explain(error, config_name))
    except ValueError as error:
        if "Config group override" not in str(error):
            raise
        fail("null is no option of a group (the scheme without positions is position=nope); --help lists the options")
    except BrokenPipeError:  # the reader of our output went away: | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:  # before a run is there to save anything
        sys.exit(130)


def fail(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def explain(error: Exception, config_name: str | None = None) -> str:
    """Hydra's message in one line, in the words of our own errors."""
    text = str(error)
    if found := re.search(r"Could not (?:override|append to config|delete from config)[^']*'([^'=]+)", text):
        key = found.group(1)
        close = difflib.get_close_matches(key, known_keys(config_name), n=1) if config_name else []
        hint = f"did you mean {close[0]}?" if close else f"python {Path(sys.argv[0]).name} --help lists all keys"
        return f"{key}: there is no such key; {hint}"
    if found := re.search(r"Could not find '([^']+)/([^'/]+)'", text):
        options = re.findall(r"^\t(\S+)$", text, re.MULTILINE)
        return f"{found.group(1)}: got '{found.group(2)}', allowed: {' | '.join(options)}"
    text = text.split("\nSet the environment variable")[0]
    return " ".join(line.strip() for line in text.splitlines() if line.strip() and "object_type" not in line)


def known_keys(config_name: str) -> list[str]:
    """Dotted names of all keys of the default configuration."""
    keys = [key.split(".") for key in flatten(compose(config_name, []))]
    return list(dict.fromkeys(".".join(key[:n]) for key in keys for n in range(1, len(key) + 1)))
