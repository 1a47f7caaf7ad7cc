"""Argument checks of the losses: options, and tensors that must all be [T] on the layout's device."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from mosaic_kernels._checks import as_mask, check_tensor
from mosaic_kernels.layout import Layout
from mosaic_kernels.policy_loss.reductions import LEVELS


def check_number(name: str, value: float, want: str, fits: Callable[[float], bool]) -> None:
    """Raises unless `value` is a real number for which `fits` holds; `want` says the rule in words."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if math.isnan(value) or not fits(value):
        raise ValueError(f"{name} must be {want}, got {value}")


def check_level(level: str) -> None:
    if level not in LEVELS:
        raise ValueError(f"level must be one of {', '.join(LEVELS)}, got {level!r}")


def check_packed(
    layout: Layout, mask: Tensor | None, tensors: dict[str, Tensor], optional: dict[str, Tensor | None]
) -> Tensor:
    """Raises unless every tensor given is floating point [T] on the layout's device; returns the mask [T] as bool.

    Looks at no value: that would wait for the device.
    """
    if not isinstance(layout, Layout):
        raise TypeError(f"layout must be a Layout, got {type(layout).__name__}")
    for name, x in {**tensors, **{k: v for k, v in optional.items() if v is not None}}.items():
        check_tensor(name, x, (layout.num_tokens,), "[T]")
        if x.device != layout.device:
            raise ValueError(f"{name} must be on the layout's device {layout.device}, got {x.device}: move one of them")
    return as_mask(mask, layout.num_tokens, layout.device)
