"""GPT-2 with a replaceable position scheme.

Shapes: B sequences, T tokens, D = n_embd, V = size of the vocabulary.
"""

import hashlib
import math
import os

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt.attention import Attention, Kind, Shared, prepare
from gpt.cache import Cache
from gpt.errors import LengthError, UserError
from gpt.position import build_position
from gpt.schema import ModelConfig, PositionConfig


class LayerNorm(nn.Module):
    """LayerNorm with an optional bias."""

    def __init__(self, width: int, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class MLP(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, kind: Kind):
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd, config.bias)
        self.attn = Attention(config, layer, kind)
        self.ln_2 = LayerNorm(config.n_embd, config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, shared: Shared, cache: Cache | None) -> Tensor:
        x = x + self.attn(self.ln_1(x), shared, cache)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """Radford et al. 2019 (GPT-2) as in nanoGPT, without a position table of its own: it owns one `Position`.

    Every weight is a function of (seed, its name), so the weights two schemes share are bit-identical at step 0.
    """

    def __init__(self, config: ModelConfig, position: PositionConfig, vocab_size: int, seed: int = 0):
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        # sdpa is what runs. reference is the definition, for the tests. flex is tested for its values, but not offered
        # in the configuration: it needs a GPU to be fast, and its gradients have not been checked on one.
        self.kernel = "sdpa"
        rows = -(-vocab_size // config.vocab_multiple) * config.vocab_multiple
        check_size(config, rows)
        self.wte = nn.Embedding(rows, config.n_embd)  # also the output head: tied
        self.drop = nn.Dropout(config.dropout)
        kinds = [Kind(position.positioned(n), position.windowed(n)) for n in range(config.n_layer)]
        self.h = nn.ModuleList(Block(config, n, kind) for n, kind in enumerate(kinds))
        self.kinds = set(kinds)
        self.ln_f = LayerNorm(config.n_embd, config.bias)
        self.position = build_position(position, config)  # last, so that it moves nothing else
        self.initialize(seed)

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """GPT-2's initial values: std 0.02, residual projections smaller by sqrt(2 n_layer), norms 1, biases 0."""
        if self.wte.weight.is_meta:  # shapes without values, of which costs are counted
            return
        for name, parameter in self.named_parameters():
            if name.startswith("position."):
                continue
            if name.endswith("bias"):
                parameter.zero_()
            elif ".ln_" in f".{name}":
                parameter.fill_(1)
            else:
                residual = name.endswith("c_proj.weight")
                std = 0.02 / math.sqrt(2 * self.config.n_layer) if residual else 0.02
                parameter.copy_(normal(seed, name, parameter.shape, std))
        own = dict(self.position.named_parameters())
        self.position.initialize(lambda name, std: normal(seed, f"position.{name}", own[name].shape, std))

    def forward(
        self, idx: Tensor, targets: Tensor | None = None, cache: Cache | None = None, offset: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """(B, T) ids -> logits (B, T, V) and, given targets (B, T), the mean loss in nats a token.

        With a cache, idx are the tokens after those in it. `offset` is added to every position id.
        Raises LengthError beyond what the position scheme reaches, and for a cache that it would invalidate.
        """
        logits = self.head(self.hidden(idx, cache, offset))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def losses(self, idx: Tensor, targets: Tensor, last: int | None = None, offset: int = 0) -> Tensor:
        """Loss of each target, or of the `last` ones of each sequence: (B, T or last) float32, nats."""
        x = self.hidden(idx, offset=offset)
        if last is not None:
            x, targets = x[:, -last:], targets[:, -last:]
        logits = self.head(x).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)

    def hidden(self, idx: Tensor, cache: Cache | None = None, offset: int = 0) -> Tensor:
        """(B, T) ids -> (B, T, D), normalized."""
        T = idx.shape[1]
        start = 0 if cache is None else cache.length
        self.check_length(offset + start + T)
        if cache is not None and not self.position.stable:
            raise LengthError(
                f"position={self.position.config.name}: tokens move as the text grows; go without a cache"
            )
        k_pos = self.position.positions(offset, start + T, idx.device)
        q_pos = k_pos if start == 0 else k_pos[start:]
        shared = prepare(self.position, q_pos, k_pos, self.kernel, self.kinds)
        x = self.drop(self.position.embed(self.wte(idx), q_pos))
        for block in self.h:
            x = block(x, shared, cache)
        if cache is not None:
            cache.length += T
        return self.ln_f(x)

    def head(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, V); rows of padding are cut off, so that nothing is ever predicted there."""
        return F.linear(x, self.wte.weight)[..., : self.vocab_size]

    def check_length(self, length: int) -> None:
        """Refuse before any kernel runs what the scheme cannot place."""
        limit = self.position.max_len
        if limit is not None and length > limit:
            config = self.position.config
            table = hasattr(config, "overflow") and config.randomized is None
            reach = f"its table has {limit} rows" if table else f"its ids end at {limit - 1}"
            raise LengthError(f"position={config.name}: {length} tokens, {reach}")

    def count_parameters(self) -> dict[str, int]:
        """`total`, `position` (the scheme's own), `embedding` (tokens, tied with the head)."""
        position = sum(p.numel() for p in self.position.parameters())
        return {
            "total": sum(p.numel() for p in self.parameters()),
            "position": position,
            "embedding": self.wte.weight.numel(),
        }

    def flops_per_token(self, length: int) -> float:
        """Forward and backward, as in PaLM appendix B (https://arxiv.org/abs/2204.02311): 6 N + 12 layers D T."""
        count = self.count_parameters()
        return 6 * (count["total"] - count["position"]) + 12 * self.config.n_layer * self.config.n_embd * length


def check_size(config: ModelConfig, rows: int) -> None:
    """Raises UserError where the weights alone, of a table of `rows` tokens, exceed this machine's memory."""
    needed = 4 * config.n_embd * (rows + 12 * config.n_layer * config.n_embd)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory:
        raise UserError(
            f"model.n_layer={config.n_layer}, model.n_embd={config.n_embd}, {rows:,} rows of tokens (a multiple of "
            f"model.vocab_multiple={config.vocab_multiple}): the weights need {needed / 1e9:,.1f} GB, this machine has "
            f"{memory / 1e9:,.1f} GB; choose a smaller model"
        )


def normal(seed: int, name: str, shape: torch.Size, std: float) -> Tensor:
    """Normal noise as a function of (seed, name): float32, drawn by numpy, whatever device the model is for."""
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16], "little")
    noise = np.random.Generator(np.random.Philox(key=key)).standard_normal(tuple(shape), dtype=np.float32)
    return torch.from_numpy(noise * np.float32(std))
