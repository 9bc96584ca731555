"""The mirror of metrics.jsonl in wandb: the only place that imports it, and it can never hurt training."""

import contextlib
import hashlib
import netrc
import os
import queue
import re
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlparse

import yaml

from gpt.files import read_json

WANDB_SECONDS = 15  # how long training waits for wandb at its start or end (wandb adds up to 12 at the exit)


class Mirror:
    """A wandb run that copies metrics.jsonl and can never hurt training.

    All calls of wandb happen in one thread, fed by a queue. Training waits for it at most WANDB_SECONDS at the start
    and at the end; whatever goes wrong there is one warning, after which training goes on without wandb.
    """

    def __init__(self, folder: Path, config: dict, identity: str, say: Callable[[str], None], sent: set = frozenset()):
        self._folder, self._config, self._identity, self._say = folder, config, identity, say
        self._sent = set(sent)
        self._queue: queue.Queue = queue.Queue()
        self._ready, self._ended = threading.Event(), threading.Event()
        self.on = False
        mode = wandb_mode(config.get("wandb", {}).get("mode", "auto"))
        if mode == "disabled":
            return
        if mode == "online" and not has_wandb_key():
            self._give_up("no key is configured (wandb login, or wandb.mode=offline)")
            return
        self.on = True
        threading.Thread(target=self._work, args=(mode,), daemon=True, name="wandb mirror").start()
        if not self._ready.wait(WANDB_SECONDS):
            self._give_up(f"no answer in {WANDB_SECONDS} s")

    def log(self, line: dict) -> None:
        if self.on and line_key(line) not in self._sent:
            self._queue.put(lambda run: self._log(run, line))

    def table(self, rows: list[dict]) -> None:
        """Evaluation rows: one wandb.Table, and each measured one as a point over eval_length."""
        if self.on and rows:
            self._queue.put(lambda run: self._log_rows(run, rows))

    def finish(self, exit_code: int) -> None:
        if not self.on:
            return
        self._queue.put(lambda run: run.finish(exit_code=exit_code))
        self._queue.put(None)
        if not self._ended.wait(WANDB_SECONDS):
            self._give_up(f"the upload did not end in {WANDB_SECONDS} s (wandb sync {self._folder}/wandb/* sends it)")
        self.on = False

    def _give_up(self, why: object) -> None:
        if self.on or not self._ready.is_set():
            self.on = False
            self._ready.set()
            line = hide_secrets(" ".join(str(why).split()))[:300]
            self._say(f"warning: wandb does not mirror this run: {line}; metrics.jsonl is complete")

    def _work(self, mode: str) -> None:
        try:
            run = self._init(mode)
            if not self.on:  # came too late
                run.finish(exit_code=1)
                return
            self._ready.set()
            while (call := self._queue.get()) is not None and self.on:
                call(run)
        except BaseException as error:  # SystemExit too: wandb's troubles are not training's
            self._give_up(f"{type(error).__name__}: {error}")
        finally:
            self._ended.set()

    def _init(self, mode: str):
        import wandb

        config = self._config
        section = config.get("wandb", {})
        tags = [config["position"]["name"], config["data"]["name"], *section.get("tags", ())]
        settings = wandb.Settings(
            silent=True,
            console="off",
            init_timeout=WANDB_SECONDS - 3,
            finish_timeout=WANDB_SECONDS - 3,
        )
        wandb.setup(settings)  # before init, so that it is silent about the login as well
        run = wandb.init(
            project=section.get("project", "nanope"),
            entity=section.get("entity"),
            group=config["sweep"],
            name=config["name"],
            id=self._identity,
            tags=list(dict.fromkeys(tags)),
            config=config,
            dir=str(self._folder),
            mode=mode,
            resume="allow",
            reinit="create_new",
            settings=settings,
        )
        run.define_metric("tokens")
        run.define_metric("eval_length")
        run.define_metric("eval/*", step_metric="eval_length")
        self._defined = {"step", "tokens", "eval_length"}
        self.where = run.url if mode == "online" else f"offline, to send it: wandb sync {self._folder}/wandb/*"
        return run

    def _log(self, run, line: dict) -> None:
        for key in line.keys() - self._defined:
            run.define_metric(key, step_metric="tokens")
            self._defined.add(key)
        run.log({key: value for key, value in line.items() if value is not None}, step=line["step"])

    def _log_rows(self, run, rows: list[dict]) -> None:
        import wandb

        from gpt.results import in_short, reading  # which reads what this mirrors

        columns = list(dict.fromkeys(k for row in rows for k, value in row.items() if not isinstance(value, list)))
        table = wandb.Table(columns=columns, data=[[row.get(key) for key in columns] for row in rows])
        # without a step: wandb counts on from the last one, where a number of our own could be one it has already
        run.log({"eval/rows": table})
        for row in (row for row in rows if row.get("status") == "ok"):
            kind = "-".join([str(row.get("protocol")), *in_short(reading(row)).split()])
            values = {key: row.get(key) for key in ("loss", "tail_loss", "perplexity", "bits_per_byte")}
            points = {f"eval/{kind}/{key}": value for key, value in values.items() if value is not None}
            run.log({"eval_length": row["eval_length"], **points})


def mirror_evaluation(folder: Path, rows: list[dict], log: Callable[[str], None] = print) -> None:
    """Adds rows of eval.jsonl to the wandb run that mirrored the training in `folder`; does nothing if none did.

    The newest call makes the table, so `rows` are all that belong together, not only those of this call.
    """
    status = read_json(Path(folder) / "status.json")
    if not rows or not status.get("wandb"):
        return
    config = yaml.safe_load((Path(folder) / "config.yaml").read_text(encoding="utf-8"))
    mirror = Mirror(Path(folder), config, status["wandb"], log)
    mirror.table(rows)
    mirror.finish(0 if status.get("status") == "done" else 1)


def wandb_mode(asked: str) -> str:
    """online | offline | disabled; "auto" is what WANDB_MODE says, else online where a key is configured."""
    if asked != "auto":
        return asked
    wish = {"dryrun": "offline"}.get(os.environ.get("WANDB_MODE", ""), os.environ.get("WANDB_MODE"))
    if wish in ("online", "offline", "disabled"):
        return wish
    return "online" if has_wandb_key() else "offline"


def has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    files = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    for file in map(os.path.expanduser, files):
        with contextlib.suppress(OSError, netrc.NetrcParseError, UnicodeDecodeError):
            if host in netrc.netrc(file).hosts:
                return True
    return False


def new_wandb_id(config: dict) -> str:
    """An id for the sweep's run of that name; random too, so that a removed and repeated run is another one."""
    text = f"{config['sweep']}/{config['name']}/{secrets.token_hex(8)}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def line_key(line: dict) -> tuple:
    """What makes a line of metrics.jsonl the same as one that an earlier process wrote."""
    return (line["step"], *sorted(line))


def hide_secrets(text: str) -> str:
    """`text` without the values of environment variables that look like secrets."""
    for key, value in os.environ.items():
        if re.search("KEY|TOKEN|SECRET|PASSW|CREDENTIAL", key, re.IGNORECASE) and len(value) >= 6:
            text = text.replace(value, "***")
    return text
