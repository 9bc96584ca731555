"""Tables with one trained row for each position, and what may be read past their end."""

from typing import Literal

import torch
from torch import Tensor

# What happens past the last row. Anything but `error` is a choice of the evaluation, named in its rows.
Overflow = Literal["error", "clamp", "wrap", "interpolate"]


def lookup(table: Tensor, pos: Tensor, overflow: Overflow) -> Tensor:
    """(T, width) vectors at rising ids (T,) from a table (rows, width).

    Past its rows there is no right answer; the policy names the wrong one to measure. `error`: the scheme's max_len
    refuses. `clamp` repeats the last row, `wrap` starts again at row 0, `interpolate` squeezes all T positions into the
    table (row i rows / T), which re-places every token as a text grows.
    """
    rows = len(table)
    last = rows - 1
    if overflow == "clamp":
        pos = pos.clamp(max=last)
    elif overflow == "wrap":
        pos = pos % rows
    elif overflow == "interpolate" and int(pos[-1]) >= rows:
        place = (pos.float() * (rows / (int(pos[-1]) + 1))).clamp(max=last)
        low = place.floor().long()
        share = (place - low).unsqueeze(-1).to(table.dtype)
        return torch.lerp(table[low], table[(low + 1).clamp(max=last)], share)
    return table[pos]
