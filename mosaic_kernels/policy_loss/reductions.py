"""Sums whose bits depend on the numbers alone: not on the run, the thread count, or atomics."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mosaic_kernels.layout import Layout

LEVELS = ("token", "segment", "trajectory")
MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8: far beyond any cap in use, far below what float32 holds
_CHUNK = 1024


def check_level(level: str) -> None:
    if level not in LEVELS:
        raise ValueError(f"level must be one of {', '.join(LEVELS)}, got {level!r}")


def compute_dtype(x: Tensor) -> torch.dtype:
    """float64 for float64 input, float32 for every other."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def as_options(*numbers: float) -> Tensor:
    """`numbers` as a float64 CPU tensor. While compiling by products: torch.tensor would be compiled anew for each."""
    if not torch.compiler.is_compiling():
        return torch.tensor(numbers, dtype=torch.float64, device="cpu")
    return torch.stack([torch.ones((), dtype=torch.float64, device="cpu") * x for x in numbers])


def at_most(x: Tensor, bound: float) -> Tensor:
    """min(x, bound). Not by clamp, which torch.compile would compile anew for each bound."""
    return torch.minimum(x, torch.ones_like(x) * bound)


def ordered_sum(x: Tensor) -> Tensor:
    """Sum of `x` [T], 0-d: chunks of fixed size, then the chunks.

    PyTorch splits one long sum by the number of threads; it never splits a row of a two-dimensional one.
    """
    return F.pad(x, (0, -x.shape[0] % _CHUNK)).reshape(-1, _CHUNK).sum(dim=1).sum()


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of `x` [T] over the mask, 0-d; 0 where nothing is active."""
    return ordered_sum(torch.where(mask, x, 0.0)) / mask.sum().clamp(min=1)


def masked_max(x: Tensor, mask: Tensor) -> Tensor:
    """Maximum over the mask of `x` [T] >= 0, 0-d; 0 where nothing is active."""
    return F.pad(torch.where(mask, x, 0.0), (0, 1)).amax()


def nonfinite_and_poison(used: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Where any tensor of `used` [T] is not finite [T] bool, and a factor [T] that is NaN there and 1 elsewhere.

    Inputs are tested, not results: a clamp or a comparison on the way makes something finite of inf and NaN. A loss
    multiplies by the factor at both ends, so that value and gradient of such a token are NaN whatever branch it takes.
    """
    nonfinite = ~torch.stack([x.detach().isfinite() for x in used]).all(dim=0)
    return nonfinite, torch.where(nonfinite, torch.full_like(used[0].detach(), torch.nan), 1.0)


def count_by(ids: Tensor, mask: Tensor, size: int) -> Tensor:
    """How many active tokens bear each id: [size] int64. Integers, so that the order of additions is no matter."""
    return torch.zeros(size, dtype=torch.int64, device=ids.device).index_add(0, ids, mask.to(torch.int64))


def unit_of_token(layout: Layout, level: str) -> tuple[Tensor, int]:
    """Each token's segment or trajectory [T], and how many there are."""
    if level == "segment":
        return layout.token_segment, layout.num_segments
    return layout.token_trajectory, layout.num_trajectories


def unit_sum(x: Tensor, layout: Layout, level: str) -> Tensor:
    """Sum of `x` [T] over each segment [S] or trajectory [R], in float64. Not differentiable.

    Two contiguous reductions instead of index_add, whose atomics add in any order on a GPU.
    """
    totals = _contiguous_sum(x.detach().double(), layout.lengths)
    if level == "segment":
        return totals
    order = torch.argsort(layout.segment_trajectory, stable=True)
    every = torch.ones_like(order, dtype=torch.bool)
    return _contiguous_sum(totals[order], count_by(layout.segment_trajectory, every, layout.num_trajectories))


def _contiguous_sum(x: Tensor, lengths: Tensor) -> Tensor:
    # unsafe: the layout has checked that the lengths add up; checking again would wait for the device
    return torch.segment_reduce(x, "sum", lengths=lengths, unsafe=True, initial=0)
