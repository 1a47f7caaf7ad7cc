"""The run directory: what one training run leaves on disk, safe against a kill at any moment.

metrics.jsonl is the truth about the scalars; tensorboard/ is a view of it that `RunLog.rewind` can make anew. JSON has
no NaN or infinity, so a non-finite float is written as {"$float": "nan" | "inf" | "-inf"} and read back as that float.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import zstandard

_STEP = re.compile(r"step_(\d+)[._]")
_NONFINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class RunError(Exception):
    """What is wrong with a run directory or a trajectory file, and what to do about it."""


def atomic_write(path: str | os.PathLike, data: bytes | str) -> None:
    """Writes a whole file so that a reader, also one after a crash, sees either the old content or the new.

    The data go to a temporary file in the same folder, are flushed to the disk and renamed over `path`; the folder is
    flushed last, so that the rename itself survives a power cut. Missing folders are made.

    Args:
        path: the file to write.
        data: its whole content; str is encoded as UTF-8.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def to_json(value: Any) -> str:
    """One line of valid JSON; tensors and arrays become (lists of) numbers, non-finite floats {"$float": name}.

    Raises:
        TypeError: for a value that has no JSON form, by its type.

    >>> to_json({"loss": float("inf"), "step": 1})
    '{"loss": {"$float": "inf"}, "step": 1}'
    """
    try:
        return json.dumps(value, default=_as_list, allow_nan=False)
    except ValueError:  # a non-finite float somewhere: rare, so only then is the whole value walked in Python
        return json.dumps(_tag_nonfinite(value), allow_nan=False)


def from_json(text: str) -> Any:
    """The value that `to_json` wrote.

    >>> from_json('{"loss": {"$float": "-inf"}}')
    {'loss': -inf}
    """
    return json.loads(
        text, object_hook=lambda item: _NONFINITE.get(str(item.get("$float")), item) if len(item) == 1 else item
    )


def write_trajectory_file(path: str | os.PathLike, records: Iterable[dict[str, Any]]) -> None:
    """Writes one record a line, JSON compressed with zstd (usual name: *.jsonl.zst), as `atomic_write` does."""
    stream = zstandard.ZstdCompressor(write_checksum=True).compressobj()
    packed = [stream.compress(to_json(record).encode() + b"\n") for record in records]
    atomic_write(path, b"".join([*packed, stream.flush()]))


def read_trajectory_file(path: str | os.PathLike) -> list[dict[str, Any]]:
    """The records of a trajectory file.

    Raises:
        FileNotFoundError: there is none.
        RunError: it is not one whole zstd frame, or a line is not JSON; the message names it.
    """
    records = []
    try:
        frame = zstandard.ZstdDecompressor().decompressobj()
        text = frame.decompress(Path(path).read_bytes()).decode()
        if not frame.eof or frame.unused_data:  # cut short, it would read as a shorter file
            raise ValueError("the file is cut short, or something follows its end")
        for line in text.split("\n")[:-1]:
            records.append(from_json(line))
    except (zstandard.ZstdError, ValueError) as error:
        raise RunError(
            f"{path} is no trajectory file (JSON lines in one zstd frame): after {len(records)} good lines: {error}"
        ) from error
    return records


class RunLog:
    """Writes and reads the metrics and trajectories of one run directory; makes nothing until the first write.

    One process writes at a time; any number may read meanwhile. After a kill, `rewind` to the last step that has a
    checkpoint before writing again.

    Args:
        directory: the run directory.
    """

    def __init__(self, directory: str | os.PathLike):
        self.directory = Path(directory)
        self._board = None  # the open TensorBoard writer
        self._last_step: int | None = None  # of metrics.jsonl; None: not looked at yet

    def write_trajectories(self, step: int, records: Iterable[dict[str, Any]]) -> Path:
        """Writes trajectories/step_NNNNNN.jsonl.zst, one record a line, replacing an earlier file of the step.

        Args:
            step: 1-based training step.
            records: `Trajectory.to_dict()` with a further key "training" (advantages, gains, group).
        """
        path = self._trajectory_path(_checked(step))
        write_trajectory_file(path, records)
        return path

    def read_trajectories(self, step: int) -> list[dict[str, Any]]:
        """The records written for one step.

        Raises:
            FileNotFoundError: the step has no trajectories; the message names the steps that have.
        """
        path = self._trajectory_path(step)
        if not path.exists():
            raise FileNotFoundError(f"step {step} has no trajectories in {path.parent}; steps there: {self.steps()}")
        return read_trajectory_file(path)

    def steps(self) -> list[int]:
        """The steps whose trajectories are on disk, in order."""
        return sorted(step for step, _ in self._step_files("trajectories"))

    def write_metrics(self, step: int, metrics: dict[str, Any]) -> None:
        """Appends one line to metrics.jsonl (flushed to the disk) and the same scalars to TensorBoard.

        Args:
            step: 1-based training step, above every step written before.
            metrics: scalars, and dicts of scalars such as "time" (TensorBoard tag "time/<stage>"). Lists are kept in
                metrics.jsonl alone.

        Raises:
            ValueError: the step, or one after it, is already there; or metrics has its own, different "step".
        """
        if metrics.get("step", step) != step:
            raise ValueError(
                f"metrics['step'] is {metrics['step']}, but the step to write is {step}: leave the key out"
            )
        if self._last_step is None:
            self._last_step = self._keep_metrics(math.inf)
        if _checked(step) <= self._last_step:
            raise ValueError(
                f"step {step} must be above {self._last_step}, the last step in {self._metrics_path}: "
                f"call rewind({step - 1}) to write it again"
            )
        line = to_json({"step": step, **metrics})
        self._metrics_path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._metrics_path, "ab") as file:
            file.write(line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self._last_step = step
        self._to_board(step, metrics)
        self._board.flush()

    def save_skipped(self, step: int, number: int, what: dict[str, Any]) -> Path:
        """Writes skipped/step_NNNNNN_update_N.pt: what an update that was not applied had been made from.

        Args:
            step: 1-based training step.
            number: 1-based update inside the step.
            what: tensors and plain values; `torch.load` gives them back.
        """
        import torch

        path = self.directory / "skipped" / f"step_{_checked(step):06d}_update_{number}.pt"
        buffer = io.BytesIO()
        torch.save(what, buffer)
        atomic_write(path, buffer.getvalue())
        return path

    def metrics(self) -> list[dict[str, Any]]:
        """Every whole line of metrics.jsonl; a torn last line is left out. No file: an empty list.

        Raises:
            RunError: a line before the last is not JSON; the message names it.
        """
        return [metrics for _, metrics in self._metric_lines()]

    def rewind(self, step: int) -> None:
        """Forgets everything after `step` (0: everything), so that a resumed run writes those steps afresh.

        metrics.jsonl keeps the lines up to `step`, later trajectory and skipped files are deleted, and TensorBoard's
        events are written anew from what was kept. Killed inside, it can be called again with the same result.
        """
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(f"step must be a whole number >= 0, got {step!r}")
        self.close()
        self._last_step = self._keep_metrics(step)
        for number, path in [*self._step_files("trajectories"), *self._step_files("skipped")]:
            if number > step:
                path.unlink()
        for left_by_a_kill in (
            *self.directory.glob(".*.tmp"),
            *(self.directory / "trajectories").glob(".*.tmp"),
            *(self.directory / "skipped").glob(".*.tmp"),
        ):
            left_by_a_kill.unlink()
        for events in (self.directory / "tensorboard").glob("events.out.tfevents.*"):
            events.unlink()
        for metrics in self.metrics():
            self._to_board(metrics["step"], metrics)
        if self._board is not None:
            self._board.flush()

    def close(self) -> None:
        """Closes the TensorBoard file; a later write opens another."""
        if self._board is not None:
            self._board.close()
            self._board = None

    @property
    def _metrics_path(self) -> Path:
        return self.directory / "metrics.jsonl"

    def _trajectory_path(self, step: int) -> Path:
        return self.directory / "trajectories" / f"step_{step:06d}.jsonl.zst"

    def _step_files(self, folder: str) -> Iterator[tuple[int, Path]]:
        for path in sorted((self.directory / folder).glob("step_*")):
            if number := _STEP.match(path.name):
                yield int(number[1]), path

    def _metric_lines(self) -> list[tuple[str, dict[str, Any]]]:
        """Each whole line with its value."""
        if not self._metrics_path.exists():
            return []
        lines = self._metrics_path.read_bytes().decode(errors="replace").rstrip("\n").split("\n")
        read = []
        for number, line in enumerate(lines, start=1):
            try:
                read.append((line, from_json(line)))
            except ValueError as error:
                if number < len(lines):
                    raise RunError(f"{self._metrics_path}, line {number} is not JSON: {error}") from error
        return read

    def _keep_metrics(self, last: float) -> int:
        """Cuts metrics.jsonl down to the whole lines of steps <= last; returns the last step left, 0 for none."""
        kept = [(line, metrics["step"]) for line, metrics in self._metric_lines() if metrics["step"] <= last]
        content = "".join(line + "\n" for line, _ in kept).encode()
        if self._metrics_path.exists() and self._metrics_path.read_bytes() != content:
            atomic_write(self._metrics_path, content)
        return max((step for _, step in kept), default=0)

    def _to_board(self, step: int, metrics: dict[str, Any]) -> None:
        if self._board is None:
            from torch.utils.tensorboard import SummaryWriter  # here: reading a run needs neither torch nor tensorboard

            # purge_step makes a TensorBoard that already shows the run drop the points that are written again
            self._board = SummaryWriter(str(self.directory / "tensorboard"), purge_step=step)
        for tag, value in _scalars(metrics):
            self._board.add_scalar(tag, value, step)


def _checked(step: int) -> int:
    if isinstance(step, bool) or not isinstance(step, int) or step < 1:
        raise ValueError(f"step must be a whole number >= 1, got {step!r}")
    return step


def _scalars(metrics: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in metrics.items():
        if isinstance(value, dict):
            yield from _scalars(value, f"{prefix}{key}/")
        elif prefix + key != "step":
            value = _as_list(value) if hasattr(value, "tolist") else value
            if isinstance(value, (bool, int, float)):
                yield prefix + key, float(value)


def _as_list(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} has no JSON form: turn it into numbers, text, lists or dicts first")


def _tag_nonfinite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tag_nonfinite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_tag_nonfinite(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": str(float(value))}
    return value if isinstance(value, (str, int, type(None))) else _tag_nonfinite(_as_list(value))


def sync(path: Path) -> None:
    """Flushes a file, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
