"""For tests, benchmarks and users: run every backend that runs here, and judge a result as PyTorch's own is judged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mosaic_kernels._backend import BACKENDS, available_backends, extension


def runnable(*candidates: str) -> list[str]:
    """The backends among `candidates` (default: all) that are available here, "reference" always first."""
    state = available_backends()
    return [name for name in BACKENDS if name in (candidates or BACKENDS) and state[name] == "available"]


def value_and_grads(
    fn: Callable[..., Any], inputs: dict[str, Tensor], wrt: tuple[str, ...]
) -> tuple[Tensor, dict[str, Tensor]]:
    """`fn(**inputs)` and the gradients of a fixed random projection of it with respect to the inputs named in `wrt`.

    `fn` returns one tensor. A gradient that does not flow is returned as zeros.
    """
    leaves = {k: v.detach().clone().requires_grad_(k in wrt) if isinstance(v, Tensor) else v for k, v in inputs.items()}
    out = fn(**leaves)
    generator = torch.Generator(device="cpu").manual_seed(0)
    cotangent = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out)
    grads = torch.autograd.grad(out, [leaves[k] for k in wrt], cotangent, allow_unused=True)
    return out.detach(), {k: torch.zeros_like(leaves[k]) if g is None else g for k, g in zip(wrt, grads)}


def assert_as_accurate(
    actual: Tensor, peer: Tensor, truth: Tensor, *, factor: float = 2.0, what: str = "result"
) -> None:
    """Asserts that `actual` is as close to `truth` as PyTorch's own `peer` is, up to `factor` and one rounding.

    Args:
        actual: what the backend gave.
        peer: what plain PyTorch gave from the same inputs in the same dtype.
        truth: the float64 result.
    """
    truth = truth.double()
    scale = truth.abs().max().item() if truth.numel() else 0.0
    rounding = torch.finfo(actual.dtype).eps * scale
    error = (actual.double() - truth).abs().max().item() if truth.numel() else 0.0
    own = (peer.double() - truth).abs().max().item() if truth.numel() else 0.0
    assert error <= factor * own + rounding, (
        f"{what}: error {error:.3g} exceeds {factor:g} x PyTorch's own {own:.3g} + one rounding {rounding:.3g}"
    )


def instruction_sets() -> list[str]:
    """The instruction sets of the "cpu" backend that run here, the plainest first; empty if it is not built."""
    if extension is None:
        return []
    every = extension.InstructionSet.__members__
    return [name for name, value in every.items() if int(value) <= int(extension.best_instruction_set())]


@contextmanager
def instruction_set(name: str) -> Iterator[None]:
    """Inside, the "cpu" backend uses this instruction set, one of `instruction_sets()`, instead of the best.

    ValueError if it is none of them.
    """
    if name not in instruction_sets():
        available = ", ".join(instruction_sets()) or "none, for the extension is not built"
        raise ValueError(f"name must be one of {available}, got {name!r}")
    before = extension.instruction_set()
    extension.use_instruction_set(extension.InstructionSet.__members__[name])
    try:
        yield
    finally:
        extension.use_instruction_set(before)
