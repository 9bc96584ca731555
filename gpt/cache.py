"""Key/value cache for decoding."""

import torch
from torch import Tensor


class Cache:
    """Keys and values of the tokens read so far, per layer.

    Keys are kept as they come out of the projection, before any rotation: a scheme turns all of them at each step, so
    a rescaling that depends on the current length never mixes with angles of another length.
    """

    def __init__(self, n_layer: int):
        self.length = 0  # tokens in every layer; the GPT moves it on after a forward
        self._kv: list[tuple[Tensor, Tensor] | None] = [None] * n_layer

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append (B, H, T, d) keys and values; returns all of that layer, (B, H, length + T, d)."""
        end = self.length + k.shape[2]
        kept = self._kv[layer]
        if kept is None or kept[0].shape[2] < end:  # grow by doubling, so that decoding copies O(length) in all
            B, H, _, d = k.shape
            room = [torch.empty(B, H, max(64, 2 * end), d, dtype=k.dtype, device=k.device) for _ in range(2)]
            if kept is not None:
                for new, old in zip(room, kept, strict=True):
                    new[:, :, : self.length] = old[:, :, : self.length]
            kept = self._kv[layer] = (room[0], room[1])
        kept[0][:, :, self.length : end] = k
        kept[1][:, :, self.length : end] = v
        return kept[0][:, :, :end], kept[1][:, :, :end]
