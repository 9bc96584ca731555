"""Self-attention: projections, and `attend`, the only place that knows masks, scale, softmax and kernels.

Shapes: B sequences, T new tokens, H heads, Tq = T queries, Tk keys (cached ones included), d head width, D width.
"""

import functools
import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt.cache import Cache
from gpt.position.base import Position
from gpt.schema import ModelConfig

# sdpa is what runs. reference is the definition, for the tests. flex is tested for its values but not offered in the
# configuration: it needs a GPU to be fast, and its gradients have not been checked on one.
KERNELS = ("sdpa", "reference", "flex")


@dataclass
class Shared:
    """What all layers of one forward share: made once from the positions, not once a layer.

    `masks` has one entry for layers with position (True) and one for layers without (False): an additive mask (H or 1,
    Tq, Tk) float32 of the scheme's bias and -inf in the future, or None where the kernel's own causal mask says it all.
    """

    position: Position
    ctx: object  # what the scheme prepared
    q_pos: Tensor  # (Tq,) int64
    k_pos: Tensor  # (Tk,) int64
    masks: dict[bool, Tensor | None]
    kernel: str
    visible: object = None  # FlexAttention's own form of the causal mask
    rounded: dict = field(default_factory=dict)  # masks in the type of the queries

    def mask_in(self, dtype: torch.dtype, positioned: bool) -> Tensor | None:
        """The mask in the kernel's type, converted once a forward. In bfloat16 a bias is off by up to 1 part in 256."""
        mask = self.masks[positioned]
        if mask is None or mask.dtype == dtype:
            return mask
        if (dtype, positioned) not in self.rounded:
            self.rounded[dtype, positioned] = mask.to(dtype)
        return self.rounded[dtype, positioned]


def prepare(position: Position, q_pos: Tensor, k_pos: Tensor, kernel: str = "sdpa", patterned: bool = True) -> Shared:
    """Prepare one forward; `patterned`: some layers are without position, so their mask is needed too."""
    with torch.autocast(q_pos.device.type, enabled=False):
        ctx = position.prepare(q_pos, k_pos)
        if kernel == "flex":  # calls pair itself
            return Shared(position, ctx, q_pos, k_pos, {}, kernel, causal_blocks(q_pos, k_pos))
        masks = {True: mask(position, q_pos, k_pos)}
        masks[False] = masks[True] if position.pair is None else mask(None, q_pos, k_pos) if patterned else None
    return Shared(position, ctx, q_pos, k_pos, masks, kernel)


def mask(position: Position | None, q_pos: Tensor, k_pos: Tensor) -> Tensor | None:
    """Additive mask: the scheme's bias where a query may look, -inf where not; None where plain causal says it all.

    Bottom-right aligned: the last query sees every key. (The kernels' own `is_causal` is top-left aligned, which is
    another mask as soon as there are cached keys.)
    """
    Tq, Tk = len(q_pos), len(k_pos)
    biased = position is not None and position.pair is not None
    if not biased and (Tq == Tk or Tq == 1):
        return None
    future = torch.ones(Tq, Tk, dtype=torch.bool, device=q_pos.device).triu(Tk - Tq + 1)
    bias = dense_bias(position, q_pos, k_pos) if biased else torch.zeros(1, 1, 1, device=q_pos.device)
    return bias.masked_fill(future, -math.inf)


def dense_bias(position: Position, q_pos: Tensor, k_pos: Tensor) -> Tensor:
    """The pointwise law `pair` at every head, query and key: (H, Tq, Tk) float32."""
    heads = torch.arange(position.n_head, device=q_pos.device)
    return position.pair(heads.view(-1, 1, 1), q_pos.view(1, -1, 1), k_pos.view(1, 1, -1))


def attend(q: Tensor, k: Tensor, v: Tensor, shared: Shared, positioned: bool = True, dropout: float = 0.0) -> Tensor:
    """softmax(q k^T / sqrt(d) + bias, causal) v: q (B, H, Tq, d), k and v (B, H, Tk, d) -> (B, H, Tq, d)."""
    if shared.kernel == "flex":
        return attend_flex(q, k, v, shared, positioned)
    mask = shared.masks[positioned]
    # on a CPU the kernel would take the bias in low precision too; there the definition keeps it exact
    if shared.kernel == "reference" or (mask is not None and q.is_cpu and q.dtype != torch.float32):
        return attend_reference(q, k, v, mask, dropout)
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=q.shape[2] > 1)
    mask = shared.mask_in(q.dtype, positioned).unsqueeze(0)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)


def attend_reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float = 0.0) -> Tensor:
    """The definition, slow and obvious, in float32 or better; every kernel is tested against it."""
    exact = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        scores = q.to(exact) @ k.to(exact).transpose(-2, -1) / math.sqrt(q.shape[-1])  # (B, H, Tq, Tk)
        if mask is None:
            Tq, Tk = scores.shape[-2:]
            future = torch.ones(Tq, Tk, dtype=torch.bool, device=q.device).triu(Tk - Tq + 1)
            scores = scores.masked_fill(future, -math.inf)
        else:
            scores = scores + mask
        weights = F.dropout(torch.softmax(scores, dim=-1), dropout, training=dropout > 0)
        return (weights @ v.to(exact)).to(q.dtype)


def attend_flex(q: Tensor, k: Tensor, v: Tensor, shared: Shared, positioned: bool) -> Tensor:
    """FlexAttention (https://arxiv.org/abs/2412.05496): `pair` inside the kernel."""
    q_pos, k_pos = shared.q_pos, shared.k_pos
    pair = shared.position.pair if positioned else None

    def score(s, batch, head, i, j):
        return s if pair is None else s + pair(head, q_pos[i], k_pos[j])

    return flex_kernel(q.is_cuda)(q, k, v, score_mod=score, block_mask=shared.visible)


def causal_blocks(q_pos: Tensor, k_pos: Tensor):
    """The causal mask as FlexAttention wants it, bottom-right aligned; queries and keys by index."""
    from torch.nn.attention.flex_attention import create_block_mask

    Tq, Tk = len(q_pos), len(k_pos)
    return create_block_mask(lambda b, h, i, j: j <= i + (Tk - Tq), None, None, Tq, Tk, device=str(q_pos.device))


@functools.cache
def flex_kernel(fused: bool):
    """Only the compiled function is fused; the plain one materializes the scores, which does for the CPU."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False) if fused else flex_attention


class Attention(nn.Module):
    """Multi-head causal self-attention with the scheme's hooks between the projections and the kernel."""

    def __init__(self, config: ModelConfig, layer: int, positioned: bool):
        super().__init__()
        self.layer = layer
        self.positioned = positioned
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
        if self.positioned:
            q, k = shared.position.rotate(q, k, shared.ctx, self.layer)
        y = attend(q, k, v, shared, self.positioned, self.dropout if self.training else 0.0)
        y = y.transpose(1, 2).reshape(B, T, D)
        return self.resid_dropout(self.c_proj(y))
