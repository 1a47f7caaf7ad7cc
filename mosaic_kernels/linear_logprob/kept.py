"""The lists of kept ids, as kernels read them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def sorted_lists(
    ids: Tensor, offsets: Tensor, target: Tensor, active: Tensor, start: int, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """What each row is normalised over on the rank that holds the ids [start, start + size).

    Returns:
        ids [K + T]: from 0 (the global id `start`), ascending and distinct inside each row, the target among them.
            Shorter in truth: what is behind offsets[T] means nothing. The length is one that torch.compile knows.
        offsets [T+1]: where each row's ids start.
        whole [T] bool: rows of an empty list (and inactive ones) keep the whole vocabulary. A row that is not whole
            may still have no ids here, when all of them are on other ranks.
    """
    rows = target.shape[0]
    whole = (offsets.diff() == 0) | ~active
    every_row = torch.arange(rows, device=ids.device)
    row = torch.cat([torch.repeat_interleave(every_row, offsets.diff(), output_size=ids.shape[0]), every_row])
    local = torch.cat([ids.to(torch.int64), target]) - start
    here = ~whole[row] & (local >= 0) & (local < size)
    stride = max(size, 1)
    place = (row[here] * stride + local[here]).sort().values.unique_consecutive()
    bounds = torch.searchsorted(place, torch.arange(rows + 1, device=ids.device) * stride)
    return F.pad(place % stride, (0, row.shape[0] - place.shape[0])), bounds, whole


def lists_of(rows: Tensor, ids: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """The lists of `rows` only, in that order: (ids, offsets [len(rows)+1])."""
    lengths = offsets.diff()[rows]
    bounds = F.pad(lengths.cumsum(0), (1, 0))
    shift = torch.repeat_interleave(offsets[rows] - bounds[:-1], lengths)
    return ids[shift + torch.arange(shift.shape[0], device=ids.device)], bounds
