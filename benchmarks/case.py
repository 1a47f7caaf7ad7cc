"""What a benchmark is: a case names sizes and sides; building it gives the inputs and one call a side."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.machine import last_level_cache
from mosaic_kernels.testing import runnable

Outputs = tuple[Tensor, ...]
OURS = "mosaic "
# Rotating buffers stop here, whatever the cache: a machine with less memory must still run the suite.
MOST_ROTATING_BYTES = 4 << 30


class NotApplicable(Exception):
    """A side that cannot run here; the message is the reason, for the report's row."""


@dataclass(frozen=True)
class Check:
    """How far one output of a side lies from float64, and how far it may."""

    what: str
    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance  # a NaN does not pass


@dataclass
class Problem:
    """Inputs in memory and the calls that are made on them.

    Args:
        sides: one call a side; it returns the side's outputs. A side that cannot run raises NotApplicable (a peer) or
            NotImplementedError (a backend of ours) when it is first called.
        limit: the side whose time is the physical limit, or the peer to beat, in this case.
        check: compares a side's outputs with float64; empty for sides that compute something else, as the limit.
        bytes: bytes that must be read and written at least.
        flops: floating-point operations of the matrix products.
        note: what the reader must know of the measurement.
        facts: further figures of the row, as the error of PyTorch's own float32 product.
    """

    sides: dict[str, Callable[[], Outputs]]
    limit: str
    check: Callable[[str, Outputs], list[Check]]
    bytes: int
    flops: int = 0
    note: str = ""
    facts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """One row group of the report and one group of pytest-benchmark.

    Args:
        op: the op's name.
        problem: builds the inputs from the sizes; a module-level function, so that another process can build it too.
        sizes: its arguments.
        sides: the sides to run, in order; of those that the problem has.
        repeats: how often each side is timed.
        left_out: sides that the quick form has no time for; they get a row that says so.
    """

    op: str
    problem: Callable[..., Problem]
    sizes: dict[str, Any]
    sides: tuple[str, ...]
    repeats: int = 5
    left_out: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.problem.__name__.replace("_", " ")

    @property
    def key(self) -> str:
        return f"{self.op} {self.name} " + " ".join(f"{name}={value}" for name, value in self.sizes.items())

    def without(self, sides: tuple[str, ...]) -> Case:
        """The case with `sides` left out."""
        kept = tuple(side for side in self.sides if side not in sides)
        return replace(self, sides=kept, left_out=self.left_out + tuple(side for side in self.sides if side in sides))

    def build(self) -> Problem:
        torch.manual_seed(0)
        return self.problem(**self.sizes)


def our_sides(op: Callable[..., Any]) -> tuple[str, ...]:
    """The names of our sides of `op`: one for each backend that runs here, the fastest kind first."""
    if "backend" not in inspect.signature(op).parameters:
        return (OURS + "default",)
    return tuple(OURS + name for name in reversed(runnable()))


def compiled_sides(op: Callable[..., Any]) -> tuple[str, ...]:
    """Our sides without the reference, which a case of full size would wait for."""
    return tuple(side for side in our_sides(op) if side != OURS + "reference")


def ours(op: Callable[..., Any], call: Callable[..., Outputs]) -> dict[str, Callable[[], Outputs]]:
    """`call(**options)` as one side a backend of `op`, or as "mosaic default" where the op lets nobody choose."""
    if "backend" not in inspect.signature(op).parameters:
        return {OURS + "default": call}
    return {OURS + name: (lambda name=name: call(backend=name)) for name in runnable()}


def rotations(set_bytes: int) -> tuple[int, str]:
    """How many equal sets of buffers make a timing cold, and the note that says what it is.

    A call that reads `set_bytes` finds nothing of its set in cache if four times the last-level cache was read since.
    """
    cache = last_level_cache()
    mib = f"{set_bytes / 2**20:.0f} MiB"
    if cache is None:
        return 1, f"one set of {mib}; the size of the last-level cache is unknown"
    if set_bytes <= cache // 4:
        return 1, f"in cache: one set of {mib}, last-level cache {cache >> 20} MiB"
    wanted = max(2, math.ceil(4 * cache / set_bytes))
    count = min(wanted, max(2, MOST_ROTATING_BYTES // set_bytes))
    kind = "cold" if count == wanted else "partly in cache"
    return count, f"{kind}: rotates over {count} sets of {mib}, last-level cache {cache >> 20} MiB"


def largest_error(actual: Tensor, truth: Tensor, *, relative: bool = False) -> float:
    """The largest absolute difference, or the same over the largest |truth|; NaN if either has one."""
    if not truth.numel():
        return 0.0
    error = (actual.double() - truth.double()).abs().max().item()
    return error / max(truth.double().abs().max().item(), 1e-300) if relative else error


def heavy_tailed_lengths(total: int, count: int, *, sigma: float = 1.0) -> Tensor:
    """[count] segment lengths >= 1 that add up to `total`: log-normal, so a few are many times the median."""
    generator = torch.Generator().manual_seed(1)
    share = (sigma * torch.randn(count, generator=generator, dtype=torch.float64)).exp()
    lengths = (share * ((total - count) / share.sum())).floor().long() + 1
    lengths[lengths.argmax()] += total - int(lengths.sum())
    return lengths


def turn_mask(total: int, *, turn: int = 64, active: float = 0.6) -> Tensor:
    """[total] bool: runs of `turn` tokens, sampled by the policy with probability `active`, else by a tool."""
    generator = torch.Generator().manual_seed(2)
    turns = torch.rand(-(-total // turn), generator=generator) < active
    return turns.repeat_interleave(turn)[:total].contiguous()
