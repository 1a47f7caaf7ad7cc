"""Which backends exist here, and which one serves a call: the whole of dispatch."""

from __future__ import annotations

import functools
import importlib.util
import os
from types import ModuleType
from typing import Any

import torch

try:
    from mosaic_kernels import _C as extension
except ImportError as error:
    extension = None
    _extension_reason = f"the compiled extension does not load ({error}); reinstall with: pip install -e ."
else:
    _extension_reason = ""

# Triton's own switch, which it reads when it is imported: kernels then run on CPU tensors, slowly, for tests.
TRITON_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

BACKENDS = ("reference", "cpu", "triton", "cuda")


def available_backends() -> dict[str, str]:
    """Each backend's name with "available", or why it is not.

    >>> available_backends()["reference"]
    'available'
    """
    return {
        "reference": "available",
        "cpu": _extension_reason or "available",
        "triton": _triton_reason() or "available",
        "cuda": "no op has a CUDA kernel in this version",
    }


@functools.cache
def _triton_reason() -> str:
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed: pip install triton"
    if not TRITON_INTERPRETED:
        if torch.version.cuda is None or not torch.cuda.is_available():
            return "there is no NVIDIA GPU (TRITON_INTERPRET=1, set before Python starts, runs kernels on CPU tensors)"
        if torch.cuda.get_device_capability() < (8, 0):
            return f"the GPU has compute capability {torch.cuda.get_device_capability()}, and the kernels need (8, 0)"
    if importlib.util.find_spec("triton.tools.tensor_descriptor") is None:
        return "triton is older than 3.4, which has no tensor descriptors: pip install -U triton"
    return ""


# A traced call need not look for packages. torch.compiler.assume_constant_result sets just this, but it imports the
# compiler.
_triton_reason._dynamo_marked_constant = True  # type: ignore[attr-defined]


def pick(op: str, backend: str | None, modules: dict[str, ModuleType], **call: Any) -> ModuleType:
    """The module that serves `call`.

    Args:
        op: the op's name, for messages.
        backend: a name of BACKENDS, or None for the fastest that can serve the call.
        modules: the op's backends, fastest first, "reference" last. Each but the reference has
            `supports(**call) -> str`: "" or the reason why it cannot serve the call.

    Raises:
        ValueError: `backend` is no backend's name.
        NotImplementedError: the backend asked for cannot serve the call; the message names the reason.
    """
    if backend is None:
        return next(m for name, m in modules.items() if name == "reference" or not m.supports(**call))
    if backend not in BACKENDS:
        raise ValueError(f"backend must be None or one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "reference":
        return modules["reference"]
    reason = modules[backend].supports(**call) if backend in modules else f"it has no {backend} kernel in this version"
    if reason:
        raise NotImplementedError(f"{op}: backend={backend!r} cannot serve this call: {reason}")
    return modules[backend]
