"""What the "cpu" backends share: which tensors they serve, and how a tensor reaches a kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from mosaic_kernels._backend import available_backends, extension

# What kernels read and write in place, by the extension's names.
ELEMENT_TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def refusal(*, in_place: bool = False, **tensors: Tensor) -> str:
    """Why the kernels cannot serve these tensors, or "". `in_place`: they read the tensors' own elements."""
    if extension is None:
        return available_backends()["cpu"]
    for name, x in tensors.items():
        if x.device.type != "cpu":
            return f"{name} is on {x.device}"
        if x.dtype == torch.float64:
            return f"it computes in float32, and the float64 {name} asks for float64: use backend='reference'"
        if in_place and x.dtype not in ELEMENT_TYPES:
            return f"{name} is {x.dtype}: convert it to float32, bfloat16 or float16"
    return ""


def as_float32(x: Tensor | None) -> Tensor | None:
    """What a kernel of packed tokens reads: contiguous float32."""
    return None if x is None else x.float().contiguous()


def address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
