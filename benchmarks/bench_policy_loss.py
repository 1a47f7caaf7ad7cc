"""The clipped loss with its metrics and gradient, and the losses beside it, against a copy of the same bytes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks import peers
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
from mosaic_kernels import Layout, normalization_weights, policy_loss, rollout_correction, value_loss

MILLION = 1 << 20
SEGMENTS = 200
COPY, COPY_NEW = "copy", "copy into new memory"


def packed_layout(tokens: int, segments: int = SEGMENTS) -> Layout:
    """`segments` ragged segments, up to four in a row to a trajectory."""
    lengths = heavy_tailed_lengths(tokens, segments)
    return Layout.from_lengths(lengths, segment_trajectory=[segment * 2 // 5 for segment in range(segments)])


def copies(bytes_moved: int) -> dict[str, Callable[[], Outputs]]:
    """A copy that reads and writes `bytes_moved` in all: into memory that is there, and into new memory.

    Random data, in as many pairs of buffers as make it as cold as the case itself.
    """
    count, _ = rotations(bytes_moved)
    source = torch.randn(bytes_moved // 8)
    # the destination is a clone too: memory that was never written would be mapped by the first copies
    pairs = itertools.cycle([(source.clone(), source.clone()) for _ in range(count)])

    def into(source: Tensor, destination: Tensor) -> Outputs:
        return (destination.copy_(source),)

    return {COPY: lambda: into(*next(pairs)), COPY_NEW: lambda: (next(pairs)[0].clone(),)}


def loss_problem(
    tokens: int,
    inputs: tuple[Tensor, ...],
    theirs: dict[str, Callable[..., Tensor]],
    mine: dict[str, Callable[[tuple[Tensor, ...]], Tensor]],
    truth: Callable[..., Tensor],
) -> Problem:
    """Forward and backward of a loss of (x, constant, constant, mask, weight), differentiated in x."""
    set_bytes = sum(x.numel() * x.element_size() for x in inputs)
    count, note = rotations(set_bytes)
    sets = [inputs] + [tuple(x.clone() for x in inputs) for _ in range(count - 1)]
    turn = itertools.cycle([(x.requires_grad_(), *rest) for x, *rest in sets])
    float64 = functools.cache(lambda: _truth_by_parts(truth, inputs))

    def check(side: str, outputs: Outputs) -> list[Check]:
        if side in (COPY, COPY_NEW):
            return []
        loss, gradient = float64()
        # float32 sums of a million terms in PyTorch's order, and in ours; gradients are one rounding each
        return [
            Check("loss", abs(outputs[0].item() - loss) / abs(loss), 1e-4),
            Check("gradient", largest_error(outputs[1], gradient, relative=True), 1e-5),
        ]

    def with_gradient(call: Callable[..., Tensor]) -> Callable[[], Outputs]:
        def run() -> Outputs:
            x, *rest = next(turn)
            loss = call(x, *rest)
            return loss.detach(), *torch.autograd.grad(loss, x)

        return run

    moved = set_bytes + 4 * tokens  # every input read once, the gradient written
    sides = {**copies(moved), **{name: with_gradient(call) for name, call in {**theirs, **mine}.items()}}
    return Problem(sides, COPY, check, bytes=moved, note=note)


def _truth_by_parts(truth: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> tuple[float, Tensor]:
    """The float64 loss and gradient; a part at a time, for the sum is over tokens and float64 is twice as large."""
    total, gradients = 0.0, []
    for x, *constants, mask, weight in zip(*(x.split(MILLION) for x in inputs)):
        leaf = x.detach().double().requires_grad_()
        loss = truth(leaf, *(c.double() for c in constants), mask, weight.double())
        total += loss.item()
        gradients.append(torch.autograd.grad(loss, leaf)[0].float())
    return total, torch.cat(gradients)


def by_backend(op: Callable[..., Outputs], call: Callable[..., Tensor]) -> dict[str, Callable[..., Tensor]]:
    """`call(inputs, **options)` for each backend, to be given its inputs later."""

    def bind(**options: str) -> Callable[..., Tensor]:
        return lambda *inputs: call(*inputs, **options)

    return {name: bound() for name, bound in ours(op, bind).items()}


def policy_loss_forward_backward(tokens: int) -> Problem:
    """Loss, metrics and d loss / d logprob with Clip(0.2, 0.28), every token weighing the same."""
    layout, mask = packed_layout(tokens), turn_mask(tokens)
    old, advantage = -torch.empty(tokens).exponential_(), torch.randn(tokens)
    logprob = old + 0.2 * torch.randn(tokens)
    inputs = (logprob, old, advantage, mask, normalization_weights(layout, mask, "token"))

    def call(logprob, old, advantage, mask, weight, **backend: str) -> Tensor:
        return policy_loss(logprob, old, advantage, layout, mask=mask, token_weight=weight, **backend).loss

    theirs = {
        "eager": peers.eager_policy_loss,
        "torch.compile": peers.compiled_policy_loss,
        "verl compute_policy_loss": peers.verl_policy_loss,
    }
    return loss_problem(tokens, inputs, theirs, by_backend(policy_loss, call), peers.eager_policy_loss)


def value_loss_forward_backward(tokens: int) -> Problem:
    """Clipped value loss, metrics and d loss / d value."""
    layout, mask = packed_layout(tokens), turn_mask(tokens)
    old = torch.randn(tokens)
    inputs = (
        old + 0.2 * torch.randn(tokens),
        old,
        old + 0.5 * torch.randn(tokens),
        mask,
        normalization_weights(layout, mask, "token"),
    )

    def call(value, old, returns, mask, weight, **backend: str) -> Tensor:
        return value_loss(value, old, returns, layout, mask=mask, token_weight=weight, clip=0.2, **backend).loss

    theirs = {"eager": peers.eager_value_loss, "verl compute_value_loss": peers.verl_value_loss}
    return loss_problem(tokens, inputs, theirs, by_backend(value_loss, call), peers.eager_value_loss)


def rollout_correction_weights(tokens: int) -> Problem:
    """Token-level truncated importance weights and their metrics; no gradient."""
    layout, mask = packed_layout(tokens), turn_mask(tokens)
    rollout = -torch.empty(tokens).exponential_()
    logprob = rollout + 0.3 * torch.randn(tokens)
    set_bytes = 9 * tokens
    count, note = rotations(set_bytes)
    turn = itertools.cycle([(logprob.clone(), rollout.clone(), mask.clone()) for _ in range(count)])
    truth = torch.where(mask, (logprob - rollout).clamp(-20, 20).exp().clamp(max=2), 0)

    def check(side: str, outputs: Outputs) -> list[Check]:
        return [] if side in (COPY, COPY_NEW) else [Check("weight", largest_error(outputs[0], truth), 1e-6)]

    def mosaic(**backend: str) -> Outputs:
        logprob, rollout, mask = next(turn)
        out = rollout_correction(logprob, rollout, layout, mask=mask, **backend)
        return out.weight, out.keep

    moved = set_bytes + 5 * tokens  # two log-probs and the mask in, weight and keep out
    sides = {
        **copies(moved),
        "eager": lambda: (peers.eager_rollout_weight(*next(turn)),),
        **ours(rollout_correction, mosaic),
    }
    return Problem(sides, COPY, check, bytes=moved, note=note)


def cases(quick: bool) -> list[Case]:
    limits = (COPY, COPY_NEW)
    everybody = (*our_sides(policy_loss), "eager", "torch.compile", "verl compute_policy_loss")
    return [
        Case(
            "policy_loss",
            policy_loss_forward_backward,
            {"tokens": MILLION},
            (*limits, *everybody),
            11,
        ).without(("torch.compile",) if quick else ()),
        Case(
            "policy_loss",
            policy_loss_forward_backward,
            {"tokens": 16 * MILLION},
            (*limits, *compiled_sides(policy_loss), "eager"),
            7,
        ).without((COPY_NEW, "eager") if quick else ()),  # 1.7 s a call of eager
        Case(
            "value_loss",
            value_loss_forward_backward,
            {"tokens": MILLION},
            (*limits, *our_sides(value_loss), "eager", "verl compute_value_loss"),
            7,
        ),
        Case(
            "rollout_correction",
            rollout_correction_weights,
            {"tokens": MILLION},
            (*limits, *our_sides(rollout_correction), "eager"),
            7,
        ),
    ]


def tiny(case: Case) -> Case:
    """The same case at a size that takes milliseconds."""
    return Case(case.op, case.problem, {"tokens": 1000}, case.sides, 1)


def test_policy_loss(time_side: Callable[[Case, str], None], case: Case, side: str):
    time_side(case, side)
