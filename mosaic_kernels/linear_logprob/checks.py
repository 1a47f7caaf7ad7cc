"""What `linear_logprob` accepts: shapes and types for every backend, and values where looking at them costs no wait."""

from __future__ import annotations

import torch
from torch import Tensor

from mosaic_kernels._checks import as_mask, check_number, check_tensor
from mosaic_kernels.linear_logprob.targets import IGNORED_TARGET


def check_arguments(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    temperature: float | Tensor,
    softcap: float | None,
    kept: tuple[Tensor, Tensor] | None,
) -> None:
    """Raises, naming the argument, unless types, shapes and devices fit each other. Looks at no tensor's values."""
    for name, x in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if hasattr(x, "full_tensor"):
            raise TypeError(
                f"{name} must be a plain tensor, got a DTensor: pass {name}.full_tensor(), or each rank's rows "
                f"({name}.to_local()) with vocab_group"
            )
    check_tensor("hidden", hidden, (None, None), "[T, H]")
    check_tensor("weight", weight, (None, hidden.shape[1]), "[V, H]")
    rows = hidden.shape[0]
    _check_ids("target", target, rows, "[T]")
    tensors = {"weight": weight, "target": target}
    if bias is not None:
        check_tensor("bias", bias, (weight.shape[0],), "[V]")
        tensors["bias"] = bias
    if isinstance(temperature, Tensor):
        check_tensor("temperature", temperature, (rows,), "[T]")
        tensors["temperature"] = temperature
    else:
        check_number("temperature", temperature, "> 0 and finite", lambda value: 0 < value < float("inf"))
    if softcap is not None:
        check_number("softcap", softcap, "> 0 and finite, or None", lambda value: 0 < value < float("inf"))
    if kept is not None:
        if not isinstance(kept, tuple) or len(kept) != 2:
            raise TypeError(f"kept must be a pair (ids [K], offsets [T+1]) of tensors, got {type(kept).__name__}")
        _check_ids("kept ids", kept[0], None, "[K]")
        _check_ids("kept offsets", kept[1], rows + 1, "[T+1]")
        tensors |= {"kept ids": kept[0], "kept offsets": kept[1]}
    for name, x in tensors.items():
        if x.device != hidden.device:
            raise ValueError(f"{name} must be on hidden's device {hidden.device}, got {x.device}: move one of them")


def _check_ids(name: str, ids: Tensor, size: int | None, symbols: str) -> None:
    check_tensor(name, ids, (size,), symbols, floating=False)
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"{name} must be an integer tensor, got {ids.dtype}")


def active_rows(target: Tensor, mask: Tensor | None) -> Tensor:
    """[T] bool: the rows to score."""
    return as_mask(mask, target.shape[0], target.device) & (target != IGNORED_TARGET)


def check_values(
    target: Tensor,
    active: Tensor,
    temperature: float | Tensor,
    kept: tuple[Tensor, Tensor] | None,
    vocab_size: int,
) -> None:
    """Raises if an active row has a target, temperature or kept id that means nothing. Waits for the device."""
    if (at := _first(active & _outside(target, vocab_size))) is not None:
        raise IndexError(
            f"target of row {at} is {int(target[at])}, outside the vocabulary [0, {vocab_size}): "
            f"mask the row or give it the target {IGNORED_TARGET}"
        )
    if isinstance(temperature, Tensor) and (at := _first(active & ~usable_temperature(temperature))) is not None:
        raise ValueError(f"temperature must be > 0 and finite, got {float(temperature[at])} at row {at}")
    if kept is None:
        return
    ids, offsets = kept
    lengths = offsets.diff()
    if int(offsets[0]) != 0 or int(offsets[-1]) != ids.shape[0] or bool((lengths < 0).any()):
        raise ValueError(
            f"kept offsets must rise from 0 to the number of kept ids, {ids.shape[0]}, got {offsets.tolist()[:8]}"
            f"{' ...' if offsets.shape[0] > 8 else ''}"
        )
    row = torch.repeat_interleave(torch.arange(lengths.shape[0], device=ids.device), lengths)
    if (at := _first(active[row] & _outside(ids, vocab_size))) is not None:
        raise IndexError(f"kept id {int(ids[at])} of row {int(row[at])} is outside the vocabulary [0, {vocab_size})")


def usable_temperature(temperature: Tensor) -> Tensor:
    """[T] bool: where the temperature is > 0 and finite."""
    return (temperature > 0) & temperature.isfinite()


def _outside(ids: Tensor, size: int) -> Tensor:
    return (ids < 0) | (ids >= size)


def _first(fault: Tensor) -> int | None:
    """Index of the first True, or None."""
    return int(fault.nonzero()[0]) if bool(fault.any()) else None
