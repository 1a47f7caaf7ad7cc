"""Argument checks shared by the ops: shapes, dtypes and masks, named in the message."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mosaic_kernels.layout import Layout


def check_tensor(name: str, x: Tensor, shape: tuple[int | None, ...], symbols: str, *, floating: bool = True) -> None:
    """Raises unless `x` is a tensor of `shape` (None = any size); `symbols` is the shape as the docstring writes it."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor of shape {symbols}, got {type(x).__name__}")
    if x.dim() != len(shape) or any(want is not None and got != want for got, want in zip(x.shape, shape)):
        want = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} must have shape {symbols} = [{want}], got {list(x.shape)}")
    if floating and not x.is_floating_point():
        raise TypeError(f"{name} must be floating point, got {x.dtype}")


def as_mask(mask: Tensor | None, size: int, device: torch.device, name: str = "mask") -> Tensor:
    """`mask` [size] as bool, all True for None. Raises unless it is bool or integer of that shape."""
    if mask is None:
        return torch.ones(size, dtype=torch.bool, device=device)
    check_tensor(name, mask, (size,), "[T]", floating=False)
    if mask.is_floating_point() or mask.is_complex():
        raise TypeError(f"{name} must be bool or integer, got {mask.dtype}: pass {name}.bool()")
    return mask.to(device=device, dtype=torch.bool)


def check_number(name: str, value: float, want: str, fits: Callable[[float], bool]) -> None:
    """Raises unless `value` is a real number that `fits`; `want` says the rule in words.

    `fits` is made of comparisons, which NaN fails, and not of math functions, which torch.compile cannot trace.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not fits(value):
        raise ValueError(f"{name} must be {want}, got {value}")


def check_layout(layout: Layout) -> None:
    if not isinstance(layout, Layout):
        raise TypeError(f"layout must be a Layout, got {type(layout).__name__}: make one with Layout(cu_seqlens)")


def check_packed(
    layout: Layout, mask: Tensor | None, tensors: dict[str, Tensor], optional: dict[str, Tensor | None] | None = None
) -> Tensor:
    """Raises unless every tensor given is floating point [T] on the layout's device; returns the mask [T] as bool.

    Looks at no value: that would wait for the device.
    """
    check_layout(layout)
    given = {name: x for name, x in (optional or {}).items() if x is not None}
    for name, x in {**tensors, **given}.items():
        check_tensor(name, x, (layout.num_tokens,), "[T]")
        if x.device != layout.device:
            raise ValueError(f"{name} must be on the layout's device {layout.device}, got {x.device}: move one of them")
    return as_mask(mask, layout.num_tokens, layout.device)
