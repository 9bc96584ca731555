"""Self-attention: projections, and `attend`, the only place that knows masks, scale, softmax and kernels.

Shapes: B sequences, T new tokens, H heads, Tq = T queries, Tk keys (cached ones included), d head width, D width.
"""

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt.cache import Cache
from gpt.position.base import Position, exactly
from gpt.schema import ModelConfig


class Kind(NamedTuple):
    """What sets a layer's mask apart from other layers' masks."""

    positioned: bool = True  # the scheme acts
    windowed: bool = False  # a query sees only the last `window` tokens


PLAIN = Kind()


@dataclass
class Shared:
    """What all layers of one forward share: made once from the positions, not once a layer.

    `masks` has one entry for each kind of layer: an additive mask (H or 1, Tq, Tk) float32 of the scheme's bias and
    -inf where a query may not look, or None where the kernel's own causal mask says it all.
    """

    position: Position
    ctx: object  # what the scheme prepared
    q_pos: Tensor  # (Tq,) int64
    k_pos: Tensor  # (Tk,) int64
    masks: dict[Kind, Tensor | None]
    kernel: str
    sharpness: Tensor | None = None  # (Tq, 1): what log_scale multiplies products with queries by, in full layers
    seen: dict[Kind, Tensor] = field(default_factory=dict)  # (Tq, Tk) bool: where a query may look
    rounded: dict = field(default_factory=dict)  # masks in the type of the queries

    def mask_in(self, dtype: torch.dtype, kind: Kind) -> Tensor | None:
        """The mask in the kernel's type, converted once a forward. In bfloat16 a bias is off by up to 1 part in 256."""
        mask = self.masks[kind]
        if mask is None or mask.dtype == dtype:
            return mask
        if (dtype, kind) not in self.rounded:
            self.rounded[dtype, kind] = mask.to(dtype)
        return self.rounded[dtype, kind]


def prepare(
    position: Position, q_pos: Tensor, k_pos: Tensor, kernel: str = "sdpa", kinds: Iterable[Kind] = (PLAIN,)
) -> Shared:
    """Prepare one forward of layers of these kinds."""
    with exactly(q_pos.device):
        shared = Shared(position, position.prepare(q_pos, k_pos), q_pos, k_pos, {}, kernel)
        if position.config.log_scale:
            shared.sharpness = sharpness(len(q_pos), len(k_pos), position.block_size, q_pos.device)
        needed, bias = set(kinds), None
        if kernel == "flex" and position.explicit():
            raise NotImplementedError(f"flex: position={position.config.name} needs the scores, which no kernel gives")
        pointwise = kernel == "flex" and position.pair is not None  # the kernel calls the law itself
        if position.biased() and not pointwise and any(kind.positioned for kind in needed):
            bias = position.dense(q_pos, k_pos)
        for kind in needed:
            own = bias if kind.positioned else None
            shared.masks[kind] = own if kernel == "flex" else mask(own, shared, kind)
    return shared


def visible(Tq: int, Tk: int, window: int | None, device: torch.device) -> Tensor:
    """(Tq, Tk) bool: causal, and within the last `window` tokens.

    Bottom-right aligned: the last query sees the last key. (The kernels' own `is_causal` is top-left aligned, which is
    another mask as soon as there are cached keys.)
    """
    seen = torch.ones(Tq, Tk, dtype=torch.bool, device=device).tril(Tk - Tq)
    return seen if window is None else seen.triu(Tk - Tq - window + 1)


def mask(bias: Tensor | None, shared: Shared, kind: Kind) -> Tensor | None:
    """The scheme's bias where a query may look, -inf where not; None where the kernel's causal mask says it all."""
    Tq, Tk = len(shared.q_pos), len(shared.k_pos)
    window = shared.position.config.window if kind.windowed else None
    plain = bias is None and (window is None or window >= Tk) and (Tq == Tk or Tq == 1)
    if plain and shared.kernel == "sdpa" and not (kind.positioned and shared.position.explicit()):
        return None
    shared.seen[kind] = visible(Tq, Tk, window, shared.q_pos.device)
    if bias is None:
        bias = torch.zeros(1, 1, 1, device=shared.q_pos.device)
    return bias.masked_fill(~shared.seen[kind], -math.inf)


def sharpness(Tq: int, Tk: int, block_size: int, device: torch.device) -> Tensor:
    """(Tq, 1) float32: max(1, ln t / ln L) for the t-th token (Chiang and Cholak 2022, https://arxiv.org/abs/2202.12172;
    past L alone as in Qwen). Softmax over more keys stays as sharp as it was trained."""
    t = torch.arange(Tk - Tq + 1, Tk + 1, device=device).float()
    return (t.log() / math.log(block_size)).clamp(min=1).unsqueeze(-1)


def attend(
    q: Tensor, k: Tensor, v: Tensor, shared: Shared, kind: Kind = PLAIN, layer: int = 0, dropout: float = 0.0
) -> Tensor:
    """softmax(scale q k^T + bias, masked) v: q (B, H, Tq, d), k and v (B, H, Tk, d) -> (B, H, Tq, d)."""
    position = shared.position if kind.positioned else None
    scale = position.score_scale if position else v.shape[-1] ** -0.5
    explicit = position is not None and position.explicit()
    sharpness = None if kind.windowed else shared.sharpness
    if sharpness is not None and not explicit:
        q = q * sharpness.to(q.dtype)
    if shared.kernel == "flex":
        return attend_flex(q, k, v, shared, kind, scale)
    mask = shared.masks[kind]
    # on a CPU the kernel would take the bias in low precision too; there the definition keeps it exact
    rounds = mask is not None and q.is_cpu and q.dtype != torch.float32
    if shared.kernel == "reference" or rounds or explicit:
        return attend_explicit(q, k, v, shared, kind, layer, scale, dropout)
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=q.shape[2] > 1, scale=scale)
    mask = shared.mask_in(q.dtype, kind)
    if mask.requires_grad and q.is_cpu and not dropout and not torch.compiler.is_compiling():
        return TrainedMask.apply(q, k, v, mask, scale)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.unsqueeze(0), dropout_p=dropout, scale=scale)


class TrainedMask(torch.autograd.Function):
    """softmax(scale q k^T + mask) v, for a mask (H, Tq, Tk) that needs a gradient, on the CPU.

    There torch's fused kernel has no gradient for the mask, and what torch does instead works on whole matrices of
    scores again and again, at more than twice the time. This goes a head and some rows at a time, so that they stay in
    the cache, and leaves out the keys after the rows' last, which every mask hides. It keeps the weights for the
    backward, half of what torch would keep.
    """

    ROWS = 64

    @staticmethod
    def pieces(mask: Tensor) -> Iterable[tuple[int, slice, slice]]:
        """Heads, rows, and the keys that some of these rows may look at."""
        H, Tq, Tk = mask.shape
        for h in range(H):
            for start in range(0, Tq, TrainedMask.ROWS):
                end = min(start + TrainedMask.ROWS, Tq)
                yield h, slice(start, end), slice(0, Tk - Tq + end)

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
        (B, H, Tq, _), weights = q.shape, []
        y = q.new_empty(B, Tq, H, v.shape[-1]).transpose(1, 2)  # in the order in which heads are put together
        for h, rows, keys in TrainedMask.pieces(mask):
            bias = mask[h, rows, keys].expand(B, -1, -1)
            p = torch.softmax(torch.baddbmm(bias, q[:, h, rows], k[:, h, keys].mT, alpha=scale), dim=-1)
            p = F.threshold_(p, 1e-20, 0.0)  # a steep bias leaves numbers that float32 is slow with
            y[:, h, rows] = torch.bmm(p, v[:, h, keys])
            weights.append(p)
        ctx.save_for_backward(q, k, v, mask, y, *weights)
        ctx.scale = scale
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, y, *weights = ctx.saved_tensors
        dq, dk, dv, dmask = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v), torch.zeros_like(mask)
        mean = (dy * y).sum(-1, keepdim=True)  # of the gradients of a row's weights, under these weights
        for p, (h, rows, keys) in zip(weights, TrainedMask.pieces(mask), strict=True):
            ds = torch.bmm(dy[:, h, rows], v[:, h, keys].mT).sub_(mean[:, h, rows]).mul_(p)
            dmask[h, rows, keys] = ds.sum(0)
            dq[:, h, rows] = torch.bmm(ds, k[:, h, keys])
            dk[:, h, keys] += torch.bmm(ds.mT, q[:, h, rows])
            dv[:, h, keys] += torch.bmm(p.mT, dy[:, h, rows])
        return dq.mul_(ctx.scale), dk.mul_(ctx.scale), dv, dmask, None


def attend_explicit(
    q: Tensor, k: Tensor, v: Tensor, shared: Shared, kind: Kind, layer: int, scale: float, dropout: float = 0.0
) -> Tensor:
    """The definition, slow and obvious, in float32 or better. Every kernel is tested against it; schemes that change
    scores or weights by content run on it."""
    given, exact = v.dtype, torch.promote_types(q.dtype, torch.float32)
    ctx = shared.ctx
    hooks = shared.position if kind.positioned and shared.position.explicit() else None
    sharpness = shared.sharpness if hooks and not kind.windowed else None
    with exactly(q.device):
        q, k, v = q.to(exact), k.to(exact), v.to(exact)
        scores = q @ k.transpose(-2, -1) * scale  # (B, H, Tq, Tk)
        if hooks:
            scores = hooks.scores(scores, q, k, shared.seen[kind], ctx, layer)
        if sharpness is not None:  # of what content and position score together; else queries carry it already
            scores = scores * sharpness
        weights = F.dropout(torch.softmax(scores + shared.masks[kind], dim=-1), dropout, training=dropout > 0)
        y = weights @ v
        if hooks:
            y = hooks.values(y, weights, ctx, layer)
    return y.to(given)


def attend_flex(q: Tensor, k: Tensor, v: Tensor, shared: Shared, kind: Kind, scale: float) -> Tensor:
    """FlexAttention (https://arxiv.org/abs/2412.05496): `pair` inside the kernel; without one, the dense bias."""
    q_pos, k_pos = shared.q_pos, shared.k_pos
    pair = shared.position.pair if kind.positioned else None
    dense = shared.masks[kind]

    def score(s, batch, head, i, j):
        if pair is not None:
            return s + pair(head, q_pos[i], k_pos[j])
        return s if dense is None else s + dense[head, i, j]

    blocks = flex_blocks(len(q_pos), len(k_pos), shared.position.config.window if kind.windowed else None, q.device)
    return flex_kernel(q.is_cuda)(q, k, v, score_mod=score, block_mask=blocks, scale=scale)


@functools.lru_cache(maxsize=8)
def flex_blocks(Tq: int, Tk: int, window: int | None, device: torch.device):
    """`visible` as FlexAttention wants it; queries and keys by index."""
    from torch.nn.attention.flex_attention import create_block_mask

    def seen(b, h, i, j):
        causal = j <= i + (Tk - Tq)
        return causal if window is None else causal & (j > i + (Tk - Tq) - window)

    return create_block_mask(seen, None, None, Tq, Tk, device=str(device))


@functools.cache
def flex_kernel(fused: bool):
    """Only the compiled function is fused; the plain one materializes the scores, which does for the CPU."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False) if fused else flex_attention


class Attention(nn.Module):
    """Multi-head causal self-attention with the scheme's hooks between the projections and the kernel."""

    def __init__(self, config: ModelConfig, layer: int, kind: Kind):
        super().__init__()
        self.layer = layer
        self.kind = kind
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, shared: Shared, cache: Cache | None = None) -> Tensor:
        """(B, T, D) -> (B, T, D)"""
        B, T, D = x.shape
        q, k, v = self.c_attn(x).split(D, dim=2)  # each (B, T, D)
        q = q.view(B, T, self.n_head, D // self.n_head).transpose(1, 2)  # (B, H, T, d)
        k = k.view(B, T, self.n_head, D // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, D // self.n_head).transpose(1, 2)
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)  # (B, H, Tk, d), keys as they were before any rotation
        if self.kind.positioned:
            q, k = shared.position.rotate(q, k, shared.ctx, self.layer)
        y = attend(q, k, v, shared, self.kind, self.layer, self.dropout if self.training else 0.0)
        y = y.transpose(1, 2).reshape(B, T, D)
        return self.resid_dropout(self.c_proj(y))
