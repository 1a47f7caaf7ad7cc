"""Advantages: from outcome rewards, session counts and marginal gains to one number a policy token.

The plain functions take tensors on any device. `ADVANTAGES` holds whole algorithms as f(batch, **options) -> advantage
[T]; `register` adds one's own.
"""

from __future__ import annotations

from mosaic.advantages import compaction, outcome, turn  # noqa: F401  (each registers its algorithms)
from mosaic.advantages.registry import ADVANTAGES, register
from mosaic.advantages.session import normalize_gain, session_utility, shape_session_advantage
from mosaic.advantages.trajectory import group_relative_advantage, session_aware_advantage, session_rank_signal

__all__ = [
    "ADVANTAGES",
    "group_relative_advantage",
    "normalize_gain",
    "register",
    "session_aware_advantage",
    "session_rank_signal",
    "session_utility",
    "shape_session_advantage",
]
