"""Every scheme learns: a few hundred steps on real text, then the lengths it was and was not trained for."""

import math

import numpy as np
import pytest
import torch

from gpt.data import batch
from gpt.errors import LengthError
from gpt.evaluate import cut, disjoint
from gpt.optim import build_optimizer
from gpt.position import SCHEMES
from gpt.prepare import prepare
from gpt.runtime import Runtime
from gpt.schema import DataConfig, ModelConfig, OptimConfig, TokenizerConfig
from tests.helpers import as_written, make

CPU = Runtime(torch.device("cpu"), torch.float32)
STEPS, BATCH, L = 300, 16, 32


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """The source of Python's standard library, in bytes."""
    return prepare(DataConfig("stdlib"), TokenizerConfig(), tmp_path_factory.mktemp("data"), lambda line: None)


def unigram_entropy(tokens: np.ndarray) -> float:
    """Nats a token: the least loss that is possible without looking at the context."""
    share = np.bincount(tokens) / len(tokens)
    return -sum(p * math.log(p) for p in share if p)


def test_entropy_of_known_texts():
    assert unigram_entropy(np.array([3, 3, 3])) == 0
    assert unigram_entropy(np.array([0, 1, 1, 0])) == pytest.approx(math.log(2))
    assert unigram_entropy(np.array([0, 0, 0, 1])) == pytest.approx(2 * math.log(2) - 0.75 * math.log(3))


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_trains(name, corpus):
    """Below the unigram entropy after 300 steps, all parameters at work; then 1x, 2x and 4x, or the reason why not."""
    n_layer = max(2, len(as_written(name).get("layers", "P")))  # a pattern of layers needs as many
    tokenizer = corpus.tokenizer
    config = ModelConfig(n_layer=n_layer, n_head=4, n_embd=32, block_size=L)
    model = make(name, config, vocab=tokenizer.vocab_size).train()
    optimizer = build_optimizer(model, OptimConfig(lr=5e-3))
    for step in range(STEPS):
        model.position.redraw(f"0/{step}")
        optimizer.zero_grad()
        model(*batch(corpus.train, L, 0, step, range(BATCH)))[1].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, key

    blocks = cut(len(corpus.val), L, [1, 2, 4], limit=4096)
    longest = model.position.max_len or math.inf
    for factor in (1, 2, 4):
        if factor * L > longest:
            with pytest.raises(LengthError, match=f"position={name}: {factor * L} tokens, .* {longest}"):
                disjoint(model, corpus.val, blocks, factor, tokenizer.token_bytes(), CPU)
            continue
        row = disjoint(model, corpus.val, blocks, factor, tokenizer.token_bytes(), CPU)
        assert row["n_targets"] == 4096 and math.isfinite(row["loss"])
        if factor == 1:
            assert row["loss"] < unigram_entropy(corpus.val) - 0.2
        else:
            assert math.isfinite(row["tail_loss"])
