"""The algorithms by name: f(batch, **options) -> advantage [T]."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mosaic.advantages.grouped import compact

if TYPE_CHECKING:
    from mosaic.batch import Batch

Advantage = Callable[..., Tensor]
ADVANTAGES: dict[str, Advantage] = {}


def register(name: str) -> Callable[[Advantage], Advantage]:
    """Decorator that enters an algorithm into ADVANTAGES.

    The function is called as f(batch, **options) with a `mosaic.batch.Batch` and gives advantage [T], 0 off
    `batch.mask`; its keyword arguments are the options a configuration may set.

    Raises:
        ValueError: the name is taken; TypeError: it is no text.

    >>> @register("constant")
    ... def constant(batch, *, level=1.0):
    ...     return torch.where(batch.mask, level, 0.0)
    >>> ADVANTAGES.pop("constant") is constant
    True
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f'name must be a non-empty string, got {name!r}: write @register("my_algorithm")')

    def enter(function: Advantage) -> Advantage:
        if name in ADVANTAGES:
            raise ValueError(f"name {name!r} is taken by {ADVANTAGES[name].__module__}: choose another")
        ADVANTAGES[name] = function
        return function

    return enter


def over_present(batch: Batch, function: Callable[..., Tensor]) -> Tensor:
    """`function(reward, session_count, group)` over the trajectories that exist, 0 for the others: [R] float32.

    An id that no trajectory carries (a gap) has a session count of 0; its reward must not enter a group's mean.
    """
    present = batch.session_count > 0
    advantage = torch.zeros(present.shape, dtype=torch.float32, device=present.device)
    advantage[present] = function(batch.reward[present], batch.session_count[present], batch.group[present])
    return advantage


def all_failed(batch: Batch, success_threshold: float) -> Tensor:
    """[S] bool: no trajectory of the session's prompt group succeeded."""
    group, groups = compact(batch.group)
    won = (batch.session_count > 0) & (batch.reward >= success_threshold)
    wins = torch.zeros(groups, dtype=torch.int64, device=won.device).index_add(0, group, won.long())
    return batch.layout.trajectory_to_segment((wins == 0)[group])


def to_policy_tokens(batch: Batch, session_advantage: Tensor) -> Tensor:
    """Spreads [S] to the sessions' policy tokens, 0 elsewhere: [T] float32."""
    return torch.where(batch.mask, batch.layout.segment_to_token(session_advantage).float(), 0.0)
