"""Sampling: the cache changes nothing, the context is never exceeded, the seed decides."""

import pytest
import torch

from gpt.errors import ConfigError
from gpt.generate import generate, pick
from gpt.position import SCHEMES
from gpt.schema import SampleConfig, parse
from tests.helpers import SMALL, VOCAB, excite, ids, make


@pytest.mark.parametrize("name", SCHEMES)
def test_greedy_text_is_that_of_whole_forwards(name, fresh):
    """Each token is the likeliest after the very tokens that the documented crop leaves."""
    model = excite(make(name), fresh)
    prompt = ids((5,), fresh).tolist()
    found = list(generate(model, prompt, 30, SMALL.block_size, temperature=0))
    seen, held = list(prompt), len(prompt)  # `held`: how many tokens the model sees
    for token in found:
        if held > SMALL.block_size:
            held = SMALL.block_size // 2
        with torch.no_grad():
            logits = model(torch.tensor([seen[-held:]]))[0][0, -1]
        best = logits.max()
        assert logits[token] > best - 1e-3
        seen.append(token)
        held += 1


def test_context_is_never_exceeded(fresh):
    """A learned table of 16 rows generates 100 tokens, from a prompt of 40."""
    model = excite(make("learned"), fresh)
    assert len(list(generate(model, ids((40,), fresh).tolist(), 100, SMALL.block_size))) == 100


def test_same_seed_same_text(fresh):
    model = excite(make("rope"), fresh, std=0.1)
    texts = [list(generate(model, [1, 2], 40, 16, seed=seed)) for seed in (3, 3, 4)]
    assert texts[0] == texts[1] != texts[2]
    torch.manual_seed(1)
    assert list(generate(model, [1, 2], 40, 16, seed=3)) == texts[0]


def test_top_k_and_temperature(fresh):
    logits = torch.randn(VOCAB, generator=fresh)
    best = set(logits.topk(3).indices.tolist())
    drawn = {pick(logits.clone(), 2.0, 3, fresh) for _ in range(200)}
    assert drawn == best
    assert pick(logits, 0, None, fresh) == int(logits.argmax())
    counts = torch.zeros(VOCAB)
    for _ in range(4000):
        counts[pick(logits.clone(), 1.0, None, fresh)] += 1
    assert (counts / 4000 - logits.softmax(-1)).abs().max() < 0.04


def test_words_of_the_command_line():
    """A prompt is taken letter by letter: its spaces, quotes and equals signs too."""
    config = parse(
        SampleConfig, ["checkpoint=a=b/c", "prompt= x = {1: 'no'} ", "tokens=5", "temperature=0", "top_k=null"]
    )
    assert config == SampleConfig(checkpoint="a=b/c", prompt=" x = {1: 'no'} ", tokens=5, temperature=0.0, top_k=None)
    for words, message in (
        (["checkpoint=a", "tokens=0"], "tokens: got 0, allowed: a whole number >= 1"),
        (["checkpoint=a", "promt=x"], "promt: there is no such key; did you mean prompt"),
        (["checkpoint=a", "prompt"], "prompt: got 'no value', allowed: key=value"),
        (["checkpoint=a", f"seed={10**20}"], "seed: got 1.*, allowed: a whole number >= 0 and < 2\\^63"),
        (["checkpoint=a", "tokens=["], "tokens: got '\\[', allowed: a whole number >= 1"),
        (["checkpoint=a", "prompt=\udcff"], "prompt: got .*, allowed: a text in UTF-8"),
        (["checkpoint=a", "seed=\udcff"], "seed: got .*, allowed: "),
        ([], "checkpoint: got null, allowed: a value"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse(SampleConfig, words)
