"""From a checkpoint back to the model, the configuration and the text it was trained on."""

import os
from dataclasses import fields, replace
from pathlib import Path

import torch
from torch import Tensor

from gpt.checkpoint import Checkpoint
from gpt.config import RunConfig, load
from gpt.corpus import Corpus, find_corpus
from gpt.errors import CheckpointError, ConfigError
from gpt.model import GPT
from gpt.position import SCHEMES
from gpt.prepare import prepare
from gpt.schema import PositionConfig, as_written, differences, plain
from gpt.tokenizer import Tokenizer, load_tokenizer


def describe(config: dict, corpus: Corpus) -> dict:
    """What a checkpoint's state needs so that `restore` finds everything again."""
    return {
        "config": config,
        "vocab_size": corpus.tokenizer.vocab_size,
        "tokenizer": corpus.tokenizer.state(),
        **corpus.hashes(),
    }


def named(path: str) -> Path:
    """The folder that a user names with checkpoint=; raises ConfigError where it is a file."""
    if os.path.isfile(path):  # False, where Path.is_file raises, for a name that is too long
        raise ConfigError("checkpoint", path, "a folder, a run's or <run>/checkpoints/step-000500; this is a file")
    return Path(path)


def restore(checkpoint: Checkpoint, device: torch.device) -> tuple[GPT, RunConfig]:
    """The model with its weights, on `device`, and the configuration of its run; raises CheckpointError."""
    try:
        config = load(as_written(checkpoint.state["config"]))
        vocab_size = checkpoint.state["vocab_size"]
    except KeyError as error:
        raise CheckpointError(f"{checkpoint.path}: its state lacks {error}; it was not written by train.py") from None
    except ConfigError as error:
        raise CheckpointError(f"{checkpoint.path}: its configuration cannot be read any more: {error}") from None
    model = GPT(config.model, config.position, vocab_size, config.seed)
    load_weights(model, checkpoint)
    return model.to(device).eval(), config


def load_weights(model: GPT, checkpoint: Checkpoint) -> None:
    """Weights of a checkpoint into a model of the same scheme and sizes; raises CheckpointError.

    The scheme is compared by name: rope, alibi and nope have the same weights, so their names would all fit.
    """
    stored, asked = checkpoint.state["config"]["position"], model.position.config
    if stored["name"] != asked.name or stored["layers"] != asked.layers:
        raise CheckpointError(
            f"{checkpoint.path}: was trained with position={stored['name']} (layers {stored['layers']}), "
            f"this model has position={asked.name} (layers {asked.layers})"
        )
    weights = checkpoint.model_state()
    compare_shapes(checkpoint, weights, model.state_dict())
    model.load_state_dict(weights)


def compare_shapes(checkpoint: Checkpoint, weights: dict[str, Tensor], own: dict[str, Tensor]) -> None:
    """Raises CheckpointError at the first parameter that only one of the two has, or in another shape."""
    for name in sorted(weights.keys() | own.keys()):
        found = tuple(weights[name].shape) if name in weights else "nothing"
        wanted = tuple(own[name].shape) if name in own else "nothing"
        if found != wanted:
            raise CheckpointError(f"{checkpoint.path}: {name} is {found}, this model has {wanted}")


def begin_with(model: GPT, checkpoint: Checkpoint, tokenizer: Tokenizer) -> dict[str, list[str]]:
    """Weights of another run as the first ones of a new run.

    All but the position scheme's must be there: the model must have the same sizes, but for its training length. The
    scheme's own are taken over where it is the same one with the same parameters; what a rescaling or a policy past a
    table's end changes is no matter. So a model trained with RoPE goes on without positions (DroPE,
    https://arxiv.org/abs/2512.12167), with another base or with a rescaling.

    Returns the names of the parameters that are `fresh`, as they were drawn, and of those that were `dropped`.
    Raises CheckpointError where sizes or the tokenizer differ.
    """
    theirs = load(checkpoint.state["config"])
    if checkpoint.state["tokenizer_sha256"] != tokenizer.sha256:
        raise CheckpointError(
            f"init_from: {checkpoint.path} was trained with tokenizer {theirs.tokenizer.name} "
            f"({checkpoint.state['tokenizer_sha256'][:12]}), this run has {tokenizer.name} ({tokenizer.sha256[:12]})"
        )
    free = ("block_size", "dropout")
    for key, (given, wanted) in differences(plain(theirs.model), plain(model.config)).items():
        if key not in free:
            raise CheckpointError(f"init_from: {checkpoint.path} has model.{key}={given}, this run has {wanted}")
    weights, own = checkpoint.model_state(), model.state_dict()
    dropped = []
    if parameters_of(theirs.position) != parameters_of(model.position.config):
        dropped = [name for name in weights if name.startswith("position.")]
    fresh = [name for name in own if name.startswith("position.") and (name in dropped or name not in weights)]
    kept = {name: value for name, value in weights.items() if name not in dropped}
    compare_shapes(checkpoint, kept, {name: value for name, value in own.items() if name not in fresh})
    model.load_state_dict(kept, strict=False)
    return {"fresh": fresh, "dropped": dropped}


def parameters_of(position: PositionConfig) -> dict:
    """What the weights of a scheme mean: its class and its own parameters."""
    everyones = {f.name for f in fields(PositionConfig)}
    own = {key: value for key, value in plain(position).items() if key not in (*everyones, "scaling", "overflow")}
    return own | {"class": SCHEMES[position.name].__name__}


def corpus_of(config: RunConfig, checkpoint: Checkpoint | None, root: Path = Path("data"), log=print) -> Corpus:
    """The tokens of a run: with a checkpoint those it was trained on, whatever has become of their source since.

    Where these are no longer there, the text is prepared as it is now; raises CheckpointError where it is another.
    """
    corpus, data = None, config.data
    if checkpoint:
        corpus = find_corpus(data.name, checkpoint.state, root)
        data = replace(data, test_fraction=as_written(checkpoint.state["config"])["data"]["test_fraction"])
    corpus = corpus or prepare(data, config.tokenizer, root, log)
    if checkpoint:
        check_corpus(checkpoint, corpus)
    return corpus


def check_corpus(checkpoint: Checkpoint, corpus: Corpus) -> None:
    """Raises CheckpointError where the tokens or the tokenizer are not those of the checkpoint, naming both."""
    if key := corpus.differing(checkpoint.state):
        raise CheckpointError(
            f"{checkpoint.path}: was trained with {key} {checkpoint.state[key][:12]}, "
            f"{corpus.folder} has {corpus.hashes()[key][:12]}; bring that text back, or train again in another sweep"
        )


def tokenizer_of(checkpoint: Checkpoint) -> Tokenizer:
    return load_tokenizer(checkpoint.state["tokenizer"])
