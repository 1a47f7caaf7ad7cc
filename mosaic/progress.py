"""What a person sees while a run goes on: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars


class Progress:
    """Stages with a count, and a line after each step."""

    def __init__(self, *, quiet: bool = False, console: Console | None = None):
        self.console = Console(quiet=True) if quiet else console or Console()

    @contextmanager
    def stage(self, title: str, total: int) -> Iterator[Callable[[], None]]:
        """A stage of `total` parts; the caller calls what it is given once a part."""
        if not self.console.is_terminal:
            self.console.print(title, highlight=False)
            yield lambda: None
            return
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Bars(*columns, console=self.console) as bars:
            task = bars.add_task(title, total=total)
            yield lambda: bars.advance(task)

    def step_done(self, step: int, metrics: dict[str, Any]) -> None:
        shown = ("reward_mean", "sessions_mean", "compaction_share", "fork_share", "loss", "clip_fraction", "ratio_max")
        values = "  ".join(f"{key} {metrics[key]:.3g}" for key in shown if key in metrics)
        self.console.print(f"step {step} done: {values}", highlight=False)
