"""Questions with known answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Task:
    """A question and its accepted answers (the first is canonical)."""

    id: str
    question: str
    answers: tuple[str, ...]
    metadata: dict[str, Any] = field(default_factory=dict)
