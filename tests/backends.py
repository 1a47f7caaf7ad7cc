"""Every way to run an op here: the reference, and the "cpu" backend with each instruction set of this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from mosaic_kernels.testing import assert_as_accurate, instruction_set, instruction_sets

CPU_VARIANTS = [f"cpu-{name}" for name in instruction_sets()]
VARIANTS = ["reference", *CPU_VARIANTS]


@contextmanager
def using(variant: str) -> Iterator[str]:
    """Inside, the backend of that name runs as `variant` says."""
    backend, _, name = variant.partition("-")
    if not name:
        yield backend
        return
    with instruction_set(name):
        yield backend


def exact_dtype(backend: str) -> torch.dtype:
    """The widest dtype in which a backend computes."""
    return torch.float64 if backend == "reference" else torch.float32


def assert_draws_as_accurate(
    draw: Callable[[int], tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]], draws: int = 6
) -> None:
    """Asserts that results are as close to the truth as PyTorch's own, by name, over several draws at once.

    Of a single number PyTorch's own error may happen to be 0; its largest error over several draws says what it is.

    Args:
        draw: gives (actual, peer, truth) of a seed; tensors of integers must be equal.
    """
    every = [draw(seed) for seed in range(draws)]
    for name in every[0][0]:
        actual, peer, truth = (torch.cat([sides[k][name].reshape(-1) for sides in every]) for k in range(3))
        if actual.is_floating_point():
            assert_as_accurate(actual, peer, truth, what=name)
        else:
            assert torch.equal(actual, truth), name
