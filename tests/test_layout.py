from __future__ import annotations

import pytest
import torch

from mosaic_kernels import (
    Branches,
    Layout,
    adaptive_lambda,
    normalization_weights,
    segment_logprob,
    shifted_targets,
)


def test_ids_of_a_packed_batch():
    layout = Layout([0, 3, 3, 5], segment_trajectory=[1, 0, 1], trajectory_group=[2, 0])
    assert (layout.num_tokens, layout.num_segments, layout.num_trajectories, layout.num_groups) == (5, 3, 2, 3)
    assert layout.cu_seqlens.dtype == torch.int32
    assert layout.lengths.tolist() == [3, 0, 2]
    assert layout.token_segment.tolist() == [0, 0, 0, 2, 2]
    assert layout.token_trajectory.tolist() == [1, 1, 1, 1, 1]
    assert repr(layout) == "Layout(tokens=5, segments=3, trajectories=2, groups=3)"


def test_defaults_are_own_trajectories_in_one_group():
    layout = Layout([0, 1, 4])
    assert layout.segment_trajectory.tolist() == [0, 1]
    assert layout.trajectory_group.tolist() == [0, 0]
    assert layout.num_groups == 1


def test_gaps_in_the_ids_are_empty_entities():
    layout = Layout([0, 1, 2], segment_trajectory=[3, 0], trajectory_group=[0, 0, 0, 5])
    assert (layout.num_trajectories, layout.num_groups) == (4, 6)


def test_a_longer_group_list_names_trajectories_of_other_ranks():
    assert Layout([0, 1], segment_trajectory=[0], trajectory_group=[0, 0, 1]).num_trajectories == 3


@pytest.mark.parametrize("offsets", [[0], torch.zeros(1, dtype=torch.int32)])
def test_no_segments(offsets):
    layout = Layout(offsets)
    assert (layout.num_tokens, layout.num_segments, layout.num_trajectories, layout.num_groups) == (0, 0, 0, 0)
    assert layout.token_segment.shape == layout.segment_to_token(torch.zeros(0)).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_tensor_offsets_and_strided_ids(dtype):
    layout = Layout(torch.tensor([0, 9, 2, 9, 5], dtype=dtype)[::2], torch.tensor([7, 9, 1, 9])[::2])
    assert layout.cu_seqlens.tolist() == [0, 2, 5]
    assert layout.segment_trajectory.is_contiguous() and layout.segment_trajectory.tolist() == [7, 1]


def test_later_changes_of_the_callers_tensors_do_not_reach_the_layout():
    trajectory = torch.tensor([0, 1])
    layout = Layout([0, 1, 2], trajectory)
    trajectory[1] = 100
    assert layout.segment_trajectory.tolist() == [0, 1]


def test_from_lengths():
    assert Layout.from_lengths([2, 0, 3]).cu_seqlens.tolist() == [0, 2, 2, 5]
    layout = Layout.from_lengths(torch.tensor([2, 3], dtype=torch.int32), [0, 0], [4])
    assert (layout.num_trajectories, layout.num_groups) == (1, 5)
    assert Layout.from_lengths([]).num_segments == 0


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_from_padded_packs_and_unpacks(dtype):
    mask = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0], [1, 0, 1, 1]], dtype=dtype)
    layout, index = Layout.from_padded(mask)
    assert layout.cu_seqlens.tolist() == [0, 2, 2, 5]
    assert index.tolist() == [1, 2, 8, 10, 11]
    x = torch.arange(12.0).reshape(3, 4)
    packed, back = x.flatten()[index], torch.zeros(12)
    back[index] = packed
    assert torch.equal(back.reshape(3, 4), torch.where(mask.bool(), x, 0))


def test_spreading():
    layout = Layout([0, 2, 3], segment_trajectory=[1, 0])
    x = torch.tensor([10.0, 20.0])
    assert layout.segment_to_token(x).tolist() == [10, 10, 20]
    assert layout.trajectory_to_token(x).tolist() == [20, 20, 10]
    assert layout.trajectory_to_segment(x).tolist() == [20, 10]


@pytest.mark.parametrize("asked", [True, False])
def test_to_moves_every_tensor(asked):
    layout = Layout([0, 2, 3])
    if asked:  # the ids of the tokens are there before the move, or made after it
        assert layout.token_trajectory.tolist() == [0, 0, 1]
    moved = layout.to("meta")
    tensors = [value for value in vars(moved).values() if isinstance(value, torch.Tensor)]
    tensors += [moved.token_segment, moved.token_trajectory]
    assert len(tensors) == (7 if asked else 5) and all(x.device.type == "meta" for x in tensors)
    assert moved.num_tokens == 3 and moved.token_segment.shape == moved.token_trajectory.shape == (3,)


def test_token_ids_are_made_once():
    layout = Layout([0, 2, 3])
    assert layout.token_segment is layout.token_segment and layout.token_trajectory is layout.token_trajectory


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(cu_seqlens=[]), "cu_seqlens must have at least one entry"),
        (dict(cu_seqlens=[1, 2]), "cu_seqlens must start at 0, got 1"),
        (dict(cu_seqlens=[0, 3, 2]), "cu_seqlens must not decrease, got 2 after 3"),
        (dict(cu_seqlens=[0, 1.5]), "cu_seqlens must hold integers, got 1.5"),
        (dict(cu_seqlens=[0, True]), "cu_seqlens must hold integers, got True"),
        (dict(cu_seqlens=[0, torch.tensor(1.5)]), r"cu_seqlens must hold integers, got tensor\(1.5000\)"),
        (dict(cu_seqlens=[0, 2**80]), "cu_seqlens must hold integers, got 1208925819614629174706176"),
        (dict(cu_seqlens=[0, 2**31]), "cu_seqlens must fit int32, got 2147483648 tokens"),
        (dict(cu_seqlens=3), "cu_seqlens must be a sequence of integers or an integer tensor, got 3"),
        (dict(cu_seqlens=torch.tensor([0.0, 1.0])), "cu_seqlens must be an integer tensor, got dtype torch.float32"),
        (dict(cu_seqlens=torch.tensor([[0, 1]])), r"cu_seqlens must be one-dimensional, got shape \(1, 2\)"),
        (dict(cu_seqlens=[0, 1], segment_trajectory=[-2]), "segment_trajectory must hold ids >= 0, got -2"),
        (
            dict(cu_seqlens=[0, 1], segment_trajectory=[2**40]),
            "segment_trajectory must hold ids below .* 1099511627776",
        ),
        (dict(cu_seqlens=[0, 1], segment_trajectory=[0, 0]), "segment_trajectory .* each of the 1 segments.*length 2"),
        (dict(cu_seqlens=[0, 1], segment_trajectory=["a"]), "segment_trajectory must hold integers, got 'a'"),
        (dict(cu_seqlens=[0, 1], trajectory_group=[-1]), "trajectory_group must hold ids >= 0, got -1"),
        (dict(cu_seqlens=[0, 1, 2], trajectory_group=[0]), "trajectory_group .* each of the 2 trajectories.*length 1"),
    ],
)
def test_invalid_layouts_name_the_argument_and_the_value(arguments, message):
    with pytest.raises(ValueError, match=message):
        Layout(**arguments)


def test_other_errors():
    layout = Layout([0, 2, 3], segment_trajectory=[0, 0])
    with pytest.raises(ValueError, match="lengths must be >= 0, got -1"):
        Layout.from_lengths([2, -1])
    with pytest.raises(ValueError, match=r"mask must have shape \[B, L\], got \(3,\)"):
        Layout.from_padded(torch.ones(3, dtype=torch.bool))
    with pytest.raises(ValueError, match="mask must be bool or integer, got dtype torch.float32"):
        Layout.from_padded(torch.ones(3, 2))
    with pytest.raises(ValueError, match=r"x must have one entry for each of the 2 S segments, got shape \(1,\)"):
        layout.segment_to_token(torch.zeros(1))
    with pytest.raises(ValueError, match=r"x must have one entry for each of the 1 R trajectories, got shape \(2,\)"):
        layout.trajectory_to_token(torch.zeros(2))
    with pytest.raises(ValueError, match=r"x must have one entry for each of the 1 R trajectories, got shape \(\)"):
        layout.trajectory_to_segment(torch.tensor(1.0))


BRANCHED = Layout.from_lengths([4, 2, 0])


@pytest.mark.parametrize("prefix", [[0, 0, 0], [0, 4, 4], [0, 1, 3]])
def test_valid_branches(prefix):
    Branches([-1, 0, 0], prefix).check(BRANCHED)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: Layout([0, 2]).segment_to_token([1.0]),
            "x must be a tensor with one entry for each of the 1 S segments",
        ),
        (lambda: Layout.from_padded([[1, 0]]), r"mask must be a tensor of shape \[B, L\], got list"),
        (lambda: shifted_targets(torch.zeros(2, dtype=torch.int64), [0, 2]), "layout must be a Layout, got list: make"),
        (lambda: adaptive_lambda([0, 2], None), "layout must be a Layout, got list"),
        (lambda: normalization_weights([0, 2], None, "token"), "layout must be a Layout, got list"),
        (
            lambda: segment_logprob(torch.zeros(2, 1), torch.zeros(3, 1), torch.zeros(2, dtype=torch.int64), [0, 2]),
            "layout must be a Layout, got list",
        ),
    ],
)
def test_what_is_no_tensor_or_layout_is_named(call, message):
    with pytest.raises(TypeError, match=message):
        call()


def test_branches_of_an_empty_layout():
    Branches([], []).check(Layout([0]))


@pytest.mark.parametrize(
    ("parent", "prefix", "message"),
    [
        ([-1, 0], [0, 1, 0], "parent must have one entry for each of the 3 segments, got length 2"),
        ([-1, 0, 0], [0, 1], "prefix_length must have one entry for each of the 3 segments, got length 2"),
        ([-1, 3, -1], [0, 0, 0], r"parent of segment 1: 3 is no segment index in \[0, 3\) and not -1"),
        ([-2, -1, -1], [0, 0, 0], "parent of segment 0: -2 is no segment index"),
        ([-1, 1, -1], [0, 0, 0], "parent of segment 1: 1 is the segment itself"),
        ([-1, -1, -1], [0, 2, 0], "prefix_length of segment 1: 2 must be 0 where parent is -1"),
        ([-1, 0, -1], [0, -1, 0], "prefix_length of segment 1: -1 must be >= 0"),
        ([-1, 0, -1], [0, 5, 0], "prefix_length of segment 1: 5 exceeds the parent's length"),
        ([-1, 0, 1], [0, 1, 1], "parent of segment 2: 1 is itself a branch"),
    ],
)
def test_invalid_branches_name_the_field_and_the_segment(parent, prefix, message):
    with pytest.raises(ValueError, match=message):
        Branches(parent, prefix).check(BRANCHED)


def test_branches_must_hold_integers():
    with pytest.raises(ValueError, match="parent must hold integers, got None"):
        Branches([None], [0])
    with pytest.raises(ValueError, match="prefix_length must be an integer tensor, got dtype torch.float32"):
        Branches([-1], torch.zeros(1))
