"""GAE over ragged segments against a copy of the same bytes, and over padded batches against other packages' own."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks import peers
from benchmarks.bench_policy_loss import COPY, COPY_NEW, MILLION, copies, packed_layout
from benchmarks.case import (
    Case,
    Check,
    Outputs,
    Problem,
    compiled_sides,
    heavy_tailed_lengths,
    largest_error,
    our_sides,
    ours,
    rotations,
    turn_mask,
)
from mosaic_kernels import Layout, segment_gae, terminal_reward

GAMMA, LAM = 1.0, 0.95
VERL_LOOP, TORCHRL = "verl compute_gae_advantage_return", "torchrl vec_generalized_advantage_estimate"
# reward, value and mask in; advantage and returns out
BYTES_IN, BYTES_OUT = 9, 8


def ragged_inputs(tokens: int) -> tuple[Layout, Tensor, Tensor, Tensor]:
    """Layout, mask, reward and value; an outcome reward on each segment's last token, which is active."""
    layout, mask = packed_layout(tokens), turn_mask(tokens)
    last = layout.cu_seqlens[1:].long() - 1
    mask[last] = True
    reward, value = torch.zeros(tokens), torch.randn(tokens)
    reward[last] = torch.rand(layout.num_segments)
    return layout, mask, reward, value


def ragged(tokens: int, correction: str = "position") -> Problem:
    """advantage, returns of 200 ragged segments with masks; outcome rewards at the segments' ends."""
    layout, mask, reward, value = ragged_inputs(tokens)
    count, note = rotations(BYTES_IN * tokens)
    turn = itertools.cycle([(reward.clone(), value.clone(), mask.clone()) for _ in range(count)])
    part, truth = float64_truth(reward, value, mask, layout, correction)

    def check(side: str, outputs: Outputs) -> list[Check]:
        if side in (COPY, COPY_NEW):
            return []
        names = ("advantage", "returns")
        return [
            Check(name, largest_error(x[:part], true, relative=True), 1e-5)
            for name, x, true in zip(names, outputs, truth)
        ]

    def mosaic(**backend: str) -> Outputs:
        reward, value, mask = next(turn)
        return segment_gae(reward, value, layout, mask=mask, gamma=GAMMA, lam=LAM, correction=correction, **backend)

    moved = (BYTES_IN + BYTES_OUT) * tokens
    sides = {**copies(moved), **ours(segment_gae, mosaic)}
    return Problem(sides, COPY, check, bytes=moved, note=note)


def float64_truth(
    reward: Tensor, value: Tensor, mask: Tensor, layout: Layout, correction: str
) -> tuple[int, tuple[Tensor, Tensor]]:
    """The reference in float64 over the first trajectories, about 100,000 tokens: (their tokens, truth).

    Trajectories do not touch one another, so the first ones can be computed alone.
    """
    ends = layout.cu_seqlens[1:].tolist()
    trajectory = layout.segment_trajectory.tolist()
    last_of_trajectory = [s for s in range(len(ends)) if s + 1 == len(ends) or trajectory[s + 1] != trajectory[s]]
    last = next((s for s in last_of_trajectory if ends[s] >= 100_000), last_of_trajectory[-1])
    part = ends[last]
    head = Layout([0, *ends[: last + 1]], segment_trajectory=trajectory[: last + 1])
    out = segment_gae(
        reward[:part].double(),
        value[:part].double(),
        head,
        mask=mask[:part],
        gamma=GAMMA,
        lam=LAM,
        correction=correction,
        backend="reference",
    )
    return part, tuple(out)


def padded(rows: int, length: int, masked: bool) -> Problem:
    """A padded batch [rows, length], as verl and torchrl take it: the same numbers, in the same order, for every side.

    Rows end where their drawn length does and hold tool tokens, which verl's mask skips; without masks every token
    counts. Ours gets the batch as `rows` segments of `length` tokens, padding masked.
    """
    lengths = torch.full((rows,), length)
    mask = torch.ones(rows, length, dtype=torch.bool)
    if masked:
        lengths = (heavy_tailed_lengths(rows * length // 2, rows)).clamp(max=length)
        mask = torch.stack([turn_mask(rows * length).view(rows, length)[row] for row in range(rows)])
        mask &= torch.arange(length) < lengths[:, None]
        mask[:, 0] = True  # every row has a token for its reward
    layout = Layout.from_lengths([length] * rows)
    reward = terminal_reward(torch.rand(rows), layout, mask.flatten(), "none")
    value = torch.randn(rows * length)
    out = segment_gae(
        reward.double(), value.double(), layout, mask=mask.flatten(), gamma=GAMMA, lam=LAM, correction="none"
    )
    truth = out.returns.view(rows, length)
    batch = [x.view(rows, length) for x in (reward, value)]
    float_mask = mask.float()
    done = torch.zeros(rows, length, 1, dtype=torch.bool)
    done[:, -1] = True

    def check(side: str, outputs: Outputs) -> list[Check]:
        if side in (COPY, COPY_NEW):
            return []
        returns = outputs[1].reshape(rows, length)
        return [Check("returns", largest_error(returns[mask], truth[mask], relative=True), 1e-5)]

    def mosaic(**backend: str) -> Outputs:
        return segment_gae(
            reward, value, layout, mask=mask.flatten(), gamma=GAMMA, lam=LAM, correction="none", **backend
        )

    def torchrl() -> Outputs:
        if masked:
            raise peers.NotApplicable("torchrl's function takes no mask of tokens to skip")
        return peers.torchrl_gae(*(x[:, :, None] for x in batch), done, GAMMA, LAM)

    moved = (BYTES_IN + BYTES_OUT) * rows * length
    sides = {
        **copies(moved),
        **ours(segment_gae, mosaic),
        VERL_LOOP: lambda: peers.verl_gae(*batch, float_mask, GAMMA, LAM),
        TORCHRL: torchrl,
    }
    note = "verl's function whitens the advantages as well, a few passes beside its loop"
    return Problem(sides, COPY, check, bytes=moved, note=note)


def padded_segments(tokens: int) -> Problem:
    """The segments and masks of `ragged`, packed for ours and padded to the longest for verl's loop."""
    layout, mask, reward, value = ragged_inputs(tokens)
    part, truth = float64_truth(reward, value, mask, layout, "none")
    valid = torch.arange(int(layout.lengths.max())) < layout.lengths[:, None]
    batch = [torch.zeros(valid.shape) for _ in range(3)]
    for padded_tensor, packed in zip(batch, (reward, value, mask.float())):
        padded_tensor[valid] = packed

    def check(side: str, outputs: Outputs) -> list[Check]:
        if side in (COPY, COPY_NEW):
            return []
        returns = outputs[1][valid] if side == VERL_LOOP else outputs[1]
        active = mask[:part]  # verl's function leaves the value in the returns of masked tokens
        return [Check("returns", largest_error(returns[:part][active], truth[1][active], relative=True), 1e-5)]

    def mosaic(**backend: str) -> Outputs:
        return segment_gae(reward, value, layout, mask=mask, gamma=GAMMA, lam=LAM, correction="none", **backend)

    moved = (BYTES_IN + BYTES_OUT) * tokens
    verl = {VERL_LOOP: lambda: peers.verl_gae(*batch, GAMMA, LAM)}
    sides = {**copies(moved), **ours(segment_gae, mosaic), **verl}
    note = f"ours reads {tokens} packed tokens, verl's loop {valid.numel()} padded ones in {valid.shape[1]} steps"
    return Problem(sides, COPY, check, bytes=moved, note=note)


def cases(quick: bool) -> list[Case]:
    limits, mine = (COPY, COPY_NEW), our_sides(segment_gae)
    fast = compiled_sides(segment_gae)
    found = [
        Case("segment_gae", ragged, {"tokens": MILLION}, (*limits, *(fast if quick else mine)), 15),
        Case("segment_gae", ragged, {"tokens": MILLION, "correction": "chain"}, (*limits, *fast), 15),
        Case("segment_gae", ragged, {"tokens": 16 * MILLION}, (*limits, *fast), 5 if quick else 9),
    ]
    for masked in (True, False):
        sizes = {"rows": 8, "length": 4096, "masked": masked}
        found.append(Case("segment_gae", padded, sizes, (*limits, *mine, VERL_LOOP, TORCHRL), 3 if quick else 7))
    if not quick:  # verl's loop over the longest of the segments: 50,000 steps
        found.append(Case("segment_gae", padded_segments, {"tokens": MILLION}, (*limits, *fast, VERL_LOOP), 1))
    return found


def tiny(case: Case) -> Case:
    """The same case at a size that takes milliseconds."""
    sizes = {**case.sizes, **({"rows": 3, "length": 50} if "rows" in case.sizes else {"tokens": 1000})}
    return Case(case.op, case.problem, sizes, case.sides, 1)


def test_segment_gae(time_side: Callable[[Case, str], None], case: Case, side: str):
    time_side(case, side)
