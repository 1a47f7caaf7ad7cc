"""Which token belongs to which segment, trajectory and prompt group: the one description every op shares."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

IdsLike = Tensor | Sequence[int]
_INT_DTYPES = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
_INT32_MAX = 2**31 - 1


def _as_ids(name: str, value: IdsLike, device: torch.device | None = None) -> Tensor:
    """A new 1-D int64 tensor of `value`, or ValueError naming `name` and the first value that is no integer."""
    if not isinstance(value, Tensor):
        if not isinstance(value, Iterable):
            raise ValueError(f"{name} must be a sequence of integers or an integer tensor, got {value!r}")
        value = torch.tensor([_as_int(name, entry) for entry in value], dtype=torch.int64)
    if value.dtype not in _INT_DTYPES:
        raise ValueError(f"{name} must be an integer tensor, got dtype {value.dtype}")
    if value.dim() != 1:
        raise ValueError(f"{name} must be one-dimensional, got shape {tuple(value.shape)}")
    # A copy: what was checked here must not change when the caller's tensor does.
    return value.to(device=device or value.device, dtype=torch.int64).clone(memory_format=torch.contiguous_format)


def _as_int(name: str, entry: object) -> int:
    try:
        number = None if isinstance(entry, bool) else operator.index(entry)
    except TypeError:
        number = None
    if number is None or abs(number) >= 2**63:
        raise ValueError(f"{name} must hold integers, got {entry!r}")
    return number


def _check_ids(name: str, ids: Tensor) -> None:
    if not ids.numel():
        return
    if (lowest := int(ids.min())) < 0:
        raise ValueError(f"{name} must hold ids >= 0, got {lowest}")
    if (highest := int(ids.max())) >= _INT32_MAX:
        raise ValueError(f"{name} must hold ids below 2**31 - 1, got {highest}: number the entities from 0")


class Layout:
    """Packed tokens, split into segments that belong to trajectories that belong to prompt groups.

    Args:
        cu_seqlens: [S+1] token offsets, starting at 0 and never decreasing; a zero-length segment is legal.
            List, int32 or int64; stored as int32.
        segment_trajectory: [S] id of each segment's trajectory; default: each segment its own trajectory. Segments of
            one trajectory stand in time order (by their last policy token) but need not be adjacent.
        trajectory_group: [R] id of each trajectory's prompt group; default: one group. It may be longer than the
            largest trajectory id demands: the rest are empty trajectories (on a data-parallel rank, those of others).

    R and G are 1 + the largest id; gaps in the ids are legal and name empty entities.

    Raises:
        ValueError: an argument does not start at 0, decreases, is negative, non-integer or of the wrong length.

    >>> layout = Layout([0, 3, 5], segment_trajectory=[0, 0])
    >>> layout.token_segment.tolist(), layout.num_trajectories
    ([0, 0, 0, 1, 1], 1)
    """

    cu_seqlens: Tensor
    segment_trajectory: Tensor
    trajectory_group: Tensor

    def __init__(
        self,
        cu_seqlens: IdsLike,
        segment_trajectory: IdsLike | None = None,
        trajectory_group: IdsLike | None = None,
    ):
        offsets = _as_ids("cu_seqlens", cu_seqlens)
        device = offsets.device
        if offsets.numel() == 0:
            raise ValueError("cu_seqlens must have at least one entry, the leading 0, got an empty sequence")
        if (first := int(offsets[0])) != 0:
            raise ValueError(f"cu_seqlens must start at 0, got {first}")
        lengths = offsets.diff()
        if lengths.numel() and int(lengths.min()) < 0:
            at = int((lengths < 0).nonzero()[0])
            raise ValueError(f"cu_seqlens must not decrease, got {int(offsets[at + 1])} after {int(offsets[at])}")
        if (total := int(offsets[-1])) > _INT32_MAX:
            raise ValueError(f"cu_seqlens must fit int32, got {total} tokens: split the batch")

        self.num_tokens = total
        self.num_segments = offsets.numel() - 1
        self.cu_seqlens = offsets.to(torch.int32)

        if segment_trajectory is None:
            trajectory = torch.arange(self.num_segments, device=device)
        else:
            trajectory = _as_ids("segment_trajectory", segment_trajectory, device)
            _check_ids("segment_trajectory", trajectory)
        if trajectory.numel() != self.num_segments:
            raise ValueError(
                f"segment_trajectory must have one id for each of the {self.num_segments} segments, "
                f"got length {trajectory.numel()}"
            )
        self.segment_trajectory = trajectory
        self.num_trajectories = 1 + int(trajectory.max()) if trajectory.numel() else 0

        if trajectory_group is None:
            group = torch.zeros(self.num_trajectories, dtype=torch.int64, device=device)
        else:
            group = _as_ids("trajectory_group", trajectory_group, device)
            _check_ids("trajectory_group", group)
            if group.numel() < self.num_trajectories:
                raise ValueError(
                    f"trajectory_group must have one id for each of the {self.num_trajectories} trajectories, "
                    f"got length {group.numel()}"
                )
            self.num_trajectories = group.numel()
        self.trajectory_group = group
        self.num_groups = 1 + int(group.max()) if group.numel() else 0

        self._token_segment: Tensor | None = None
        self._token_trajectory: Tensor | None = None

    @classmethod
    def from_lengths(
        cls,
        lengths: IdsLike,
        segment_trajectory: IdsLike | None = None,
        trajectory_group: IdsLike | None = None,
    ) -> Layout:
        """The layout of segments of the given `lengths` [S], packed one after the other."""
        lengths = _as_ids("lengths", lengths)
        if lengths.numel() and (shortest := int(lengths.min())) < 0:
            raise ValueError(f"lengths must be >= 0, got {shortest}")
        cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        return cls(cu_seqlens, segment_trajectory, trajectory_group)

    @classmethod
    def from_padded(cls, mask: Tensor) -> tuple[Layout, Tensor]:
        """The layout of the kept tokens of a padded batch, and where they lie.

        Args:
            mask: [B, L] bool or 0/1 integers; non-zero entries are tokens, in any pattern. Each row becomes a segment.

        Returns:
            (layout, index): index [T] int64 into the flattened batch, so that `x.flatten(0, 1)[index]` packs any
            `x` [B, L, ...] and `out.flatten(0, 1)[index] = packed` puts values back.
        """
        if not isinstance(mask, Tensor):
            raise TypeError(f"mask must be a tensor of shape [B, L], got {type(mask).__name__}")
        if mask.dim() != 2:
            raise ValueError(f"mask must have shape [B, L], got {tuple(mask.shape)}")
        if mask.dtype != torch.bool and mask.dtype not in _INT_DTYPES:
            raise ValueError(f"mask must be bool or integer, got dtype {mask.dtype}: pass mask.bool()")
        kept = mask.bool()
        return cls.from_lengths(kept.sum(dim=1)), kept.flatten().nonzero().flatten()

    @property
    def device(self) -> torch.device:
        return self.cu_seqlens.device

    @property
    def lengths(self) -> Tensor:
        """[S] tokens of each segment, int64."""
        return self.cu_seqlens.diff().to(torch.int64)

    @property
    def token_segment(self) -> Tensor:
        """[T] the segment of each token, int64. Made when first asked for: compiled kernels do without."""
        return self._made_once("_token_segment", self._spread_segments)

    @property
    def token_trajectory(self) -> Tensor:
        """[T] the trajectory of each token, int64. Made when first asked for."""
        return self._made_once("_token_trajectory", lambda: self.segment_trajectory[self.token_segment])

    def _spread_segments(self) -> Tensor:
        segment = torch.arange(self.num_segments, device=self.device)
        return torch.repeat_interleave(segment, self.lengths, output_size=self.num_tokens)

    def _made_once(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        if torch.compiler.is_compiling():  # always made: a graph for each state of the cache would cost more
            return make()
        if getattr(self, name) is None:
            setattr(self, name, make())
        return getattr(self, name)

    def to(self, device: torch.device | str) -> Layout:
        """The same layout with its tensors on `device`."""
        moved = Layout.__new__(Layout)
        for name, value in vars(self).items():
            setattr(moved, name, value.to(device) if isinstance(value, Tensor) else value)
        return moved

    def segment_to_token(self, x: Tensor) -> Tensor:
        """Spreads `x` [S] to its tokens: [T]."""
        _check_length("x", x, self.num_segments, "S segments")
        return x[self.token_segment]

    def trajectory_to_token(self, x: Tensor) -> Tensor:
        """Spreads `x` [R] to its tokens: [T]."""
        _check_length("x", x, self.num_trajectories, "R trajectories")
        return x[self.token_trajectory]

    def trajectory_to_segment(self, x: Tensor) -> Tensor:
        """Spreads `x` [R] to its segments: [S]."""
        _check_length("x", x, self.num_trajectories, "R trajectories")
        return x[self.segment_trajectory]

    def __repr__(self) -> str:
        return (
            f"Layout(tokens={self.num_tokens}, segments={self.num_segments}, "
            f"trajectories={self.num_trajectories}, groups={self.num_groups})"
        )


def _check_length(name: str, x: Tensor, length: int, what: str) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(
            f"{name} must be a tensor with one entry for each of the {length} {what}, got {type(x).__name__}"
        )
    if x.dim() < 1 or x.shape[0] != length:
        raise ValueError(f"{name} must have one entry for each of the {length} {what}, got shape {tuple(x.shape)}")


@dataclass(frozen=True)
class Branches:
    """Segments that continue a prefix of another segment instead of starting from nothing.

    Args:
        parent: [S] index of the segment that segment s branches from, or -1 for a root.
        prefix_length: [S] how many of the parent's leading tokens segment s sees; 0 <= prefix_length <= the parent's
            length, and 0 where the parent is -1. Token j of segment s has position prefix_length[s] + j.

    A parent must itself be a root. Checked against a layout by the ops that take branches.
    """

    parent: Tensor
    prefix_length: Tensor

    def __post_init__(self):
        object.__setattr__(self, "parent", _as_ids("parent", self.parent))
        object.__setattr__(self, "prefix_length", _as_ids("prefix_length", self.prefix_length))

    def check(self, layout: Layout) -> None:
        """Raises ValueError, naming the field and the segment, unless these branches fit `layout`."""
        parent, prefix, size = self.parent, self.prefix_length, layout.num_segments
        for name, ids in (("parent", parent), ("prefix_length", prefix)):
            if ids.numel() != size:
                raise ValueError(
                    f"{name} must have one entry for each of the {size} segments, got length {ids.numel()}"
                )
        lengths = layout.lengths.to(parent.device)
        is_branch = parent != -1
        safe_parent = parent.clamp(0, max(size - 1, 0))
        segment = torch.arange(size, device=parent.device)
        for fault, name, ids, why in (
            ((parent < -1) | (parent >= size), "parent", parent, f"is no segment index in [0, {size}) and not -1"),
            (parent == segment, "parent", parent, "is the segment itself"),
            (~is_branch & (prefix != 0), "prefix_length", prefix, "must be 0 where parent is -1"),
            (prefix < 0, "prefix_length", prefix, "must be >= 0"),
            (is_branch & (prefix > lengths[safe_parent]), "prefix_length", prefix, "exceeds the parent's length"),
            (is_branch & is_branch[safe_parent], "parent", parent, "is itself a branch: give the root instead"),
        ):
            if size and bool(fault.any()):
                at = int(fault.nonzero()[0])
                raise ValueError(f"{name} of segment {at}: {int(ids[at])} {why}")
