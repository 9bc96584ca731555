"""Sampling from a GPT with the key/value cache."""

from collections.abc import Iterator

import torch
from torch import Tensor

from gpt.cache import Cache
from gpt.errors import DataError
from gpt.model import GPT
from gpt.tokenizer import Tokenizer


def beginning(tokenizer: Tokenizer) -> list[int]:
    """What a text without a prompt starts from: the separator of documents, or a line's end, or else the first id."""
    if tokenizer.separator is not None:
        return [tokenizer.separator]
    try:
        return tokenizer.encode("\n").tolist()
    except DataError:  # characters among which there is none
        return [0]


def generate(
    model: GPT,
    prompt: list[int],
    tokens: int,
    context: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
) -> Iterator[int]:
    """Ids that follow `prompt` (at least one id), one by one; temperature 0 takes the likeliest.

    The model sees at most `context` tokens. When they are full it goes on from the last half of them, so each token is
    predicted from context / 2 to context tokens, and a cache entry never outlives the text it was computed from.
    """
    device = model.wte.weight.device
    stable = model.position.stable  # else each step reads all of its tokens again
    generator = torch.Generator().manual_seed(seed)
    seen = list(prompt)[-context:]
    cache, fresh = Cache(model.config.n_layer), list(seen)
    for _ in range(tokens):
        if cache.length + len(fresh) > context:
            cache, fresh = Cache(model.config.n_layer), seen[-max(1, context // 2) :]
        with torch.inference_mode():
            logits = model(torch.tensor([fresh], device=device), cache=cache if stable else None)[0]
        chosen = pick(logits[0, -1].float().cpu(), temperature, top_k, generator)
        seen.append(chosen)
        fresh = [chosen] if stable else [*fresh, chosen]
        yield chosen


def pick(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    """One id from (V,) logits."""
    if temperature == 0:
        return int(logits.argmax())
    logits = logits / temperature
    if top_k is not None and top_k < len(logits):
        logits[logits < logits.topk(top_k).values[-1]] = -torch.inf
    return int(torch.multinomial(logits.softmax(-1), 1, generator=generator))
