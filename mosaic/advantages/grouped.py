"""Statistics inside cells of a flat list: standard scores and centred ranks. Everything here is float64 on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor


def compact(label: Tensor) -> tuple[Tensor, int]:
    """Labels [N] renumbered without gaps, and how many there are."""
    distinct, label = torch.unique(label, return_inverse=True)
    return label, distinct.numel()


def extremes(x: Tensor, cell: Tensor, cells: int) -> tuple[Tensor, Tensor]:
    """Smallest and largest `x` of each cell, [cells] both."""
    low = x.new_full((cells,), torch.inf).scatter_reduce(0, cell, x, "amin")
    high = x.new_full((cells,), -torch.inf).scatter_reduce(0, cell, x, "amax")
    return low, high


def standard_score(x: Tensor, label: Tensor, ddof: int, eps: float) -> Tensor:
    """(x - mean) / (std + eps) inside each cell; exactly 0 where a cell has one member or equal members."""
    cell, cells = compact(label)
    size = torch.bincount(cell, minlength=cells).double()
    mean = x.new_zeros(cells).index_add(0, cell, x) / size
    centred = x - mean[cell]
    variance = x.new_zeros(cells).index_add(0, cell, centred.square()) / (size - ddof).clamp(min=1)
    low, high = extremes(x, cell, cells)
    # Equal members leave a residue of rounding in `centred`, which eps would blow up: they are told by comparison.
    return torch.where((high > low)[cell], centred / (variance.sqrt() + eps)[cell], 0.0)


def centred_rank(x: Tensor, label: Tensor) -> Tensor:
    """(members below - members above) / (size - 1) inside each cell, in [-1, 1]; 0 in a cell of one member."""
    cell, cells = compact(label)
    level, levels = compact(x)
    size = torch.bincount(cell, minlength=cells)
    first = size.cumsum(0) - size
    # One key a (cell, value) pair; keys sort by cell, then value, so counting earlier keys counts smaller values.
    key, tie, tied = torch.unique(cell * levels + level, return_inverse=True, return_counts=True)
    owner = key // max(levels, 1)
    below = tied.cumsum(0) - tied - first[owner]
    above = size[owner] - below - tied
    return ((below - above).double() / (size[owner] - 1).clamp(min=1))[tie]
