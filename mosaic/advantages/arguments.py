"""Arguments of the advantage functions: checked by name, then brought to the CPU in float64.

There are as many numbers as trajectories or sessions, so the copy is cheap; it gives float64 on devices that have none
and sums in one fixed order on those that have it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mosaic_kernels._checks import check_tensor


def as_reals(name: str, x: Tensor, size: int | None, symbol: str, used: Tensor | None = None) -> Tensor:
    """`x` as float64; ValueError names the first non-finite entry, looking only where `used` is True."""
    check_tensor(name, x, (size,), f"[{symbol}]", floating=False)
    x = x.detach().cpu().double()
    bad = ~x.isfinite() if used is None else used & ~x.isfinite()
    if bad.any():
        at = int(bad.nonzero()[0])
        raise ValueError(f"{name}[{at}] must be finite, got {x[at].item()}: drop or repair that entry first")
    return x


def as_labels(name: str, x: Tensor, size: int | None, symbol: str) -> Tensor:
    """`x` as int64; any non-negative ids, gaps allowed."""
    check_tensor(name, x, (size,), f"[{symbol}]", floating=False)
    if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise TypeError(f"{name} must hold integers, got {x.dtype}: pass {name}.long()")
    x = x.detach().cpu().long()
    if x.numel() and (lowest := int(x.min())) < 0:
        raise ValueError(f"{name} must hold ids >= 0, got {lowest}")
    return x


def as_flags(name: str, x: Tensor, size: int | None, symbol: str) -> Tensor:
    """`x` as bool."""
    check_tensor(name, x, (size,), f"[{symbol}]", floating=False)
    if x.is_floating_point() or x.is_complex():
        raise TypeError(f"{name} must be bool or integer, got {x.dtype}: pass {name}.bool()")
    return x.detach().cpu().bool()


def like_input(result: Tensor, given: Tensor) -> Tensor:
    """`result` on the device of `given`: float64 where that is float64, else float32."""
    dtype = torch.float64 if given.dtype == torch.float64 else torch.float32
    return result.to(dtype).to(given.device)


def check_range(
    name: str, value: float, low: float = -math.inf, high: float = math.inf, *, below: bool = False
) -> None:
    """Raises unless `value` is a finite number in [low, high], or in [low, high) with `below`."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not low <= value <= high or (below and value == high):
        raise ValueError(f"{name} must be a number in [{low:g}, {high:g}{')' if below else ']'}, got {value!r}")


def check_choice(name: str, value: object, known: tuple[object, ...]) -> None:
    """Raises unless `value` is one of `known`."""
    if isinstance(value, bool) or value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(str, known))}, got {value!r}")
