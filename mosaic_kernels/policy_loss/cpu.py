"""The compiled CPU kernel of `policy_loss` as a torch.library op."""

from __future__ import annotations

import torch
from torch import Tensor

from mosaic_kernels._backend import extension
from mosaic_kernels._cpu import address, as_float32, refusal
from mosaic_kernels.layout import Layout
from mosaic_kernels.policy_loss.objectives import BUILT_IN, Objective

_library = torch.library.Library("mosaic_kernels", "FRAGMENT")
_library.define(
    "policy_loss(Tensor logprob, Tensor old_logprob, Tensor advantage, Tensor mask, Tensor? token_weight, "
    "Tensor? importance_weight, Tensor? ref_logprob, Tensor? entropy, Tensor cu_seqlens, Tensor segment_trajectory, "
    "SymInt num_trajectories, str objective, str level, str estimator, Tensor options, bool dlogprob_wanted, "
    "bool dentropy_wanted) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def supports(objective: Objective, logprob: Tensor) -> str:
    if type(objective) not in BUILT_IN:
        return f"it does not know the objective {type(objective).__name__}: use backend='reference'"
    return refusal(logprob=logprob)


def forward(
    logprob: Tensor,
    old_logprob: Tensor,
    advantage: Tensor,
    layout: Layout,
    mask: Tensor,
    token_weight: Tensor | None,
    objective: str,
    level: str,
    importance_weight: Tensor | None,
    ref_logprob: Tensor | None,
    estimator: str,
    entropy: Tensor | None,
    options: Tensor,
    dlogprob_wanted: bool,
    dentropy_wanted: bool,
) -> tuple[Tensor, ...]:
    """loss, statistics, counts, dlogprob, dentropy; a gradient that is not wanted is empty."""
    return torch.ops.mosaic_kernels.policy_loss(
        logprob, old_logprob, advantage, mask, token_weight, importance_weight, ref_logprob, entropy,
        layout.cu_seqlens, layout.segment_trajectory, layout.num_trajectories, objective, level, estimator, options,
        dlogprob_wanted, dentropy_wanted,
    )  # fmt: skip


def backward(gradient: Tensor, dloss: Tensor) -> Tensor:
    """`gradient` [T] times the 0-d `dloss`."""
    # The usual case, and the product would move half as many bytes again as the whole forward pass.
    if not torch.compiler.is_compiling() and dloss.item() == 1:
        return gradient
    return gradient * dloss


def _policy_loss(
    logprob: Tensor,
    old_logprob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    token_weight: Tensor | None,
    importance_weight: Tensor | None,
    ref_logprob: Tensor | None,
    entropy: Tensor | None,
    cu_seqlens: Tensor,
    segment_trajectory: Tensor,
    num_trajectories: int,
    objective: str,
    level: str,
    estimator: str,
    options: Tensor,
    dlogprob_wanted: bool,
    dentropy_wanted: bool,
) -> tuple[Tensor, ...]:
    # Named, so that what an address points at lives until the kernel is done.
    floats = {
        "logprob": as_float32(logprob),
        "old_logprob": as_float32(old_logprob),
        "advantage": as_float32(advantage),
        "token_weight": as_float32(token_weight),
        "importance_weight": as_float32(importance_weight),
        "ref_logprob": as_float32(ref_logprob),
        "entropy": as_float32(entropy),
    }
    mask, cu_seqlens, segment_trajectory = mask.contiguous(), cu_seqlens.contiguous(), segment_trajectory.contiguous()
    outputs = _outputs(floats["logprob"], dlogprob_wanted, dentropy_wanted)
    loss, statistics, counts, dlogprob, dentropy = outputs
    extension.policy_loss(
        **{name: address(x) for name, x in floats.items()},
        mask=mask.data_ptr(),
        cu_seqlens=cu_seqlens.data_ptr(),
        segment_trajectory=segment_trajectory.data_ptr(),
        num_segments=segment_trajectory.numel(),
        num_trajectories=num_trajectories,
        objective=getattr(extension.Objective, objective),
        level=getattr(extension.Level, level),
        estimator=getattr(extension.KlEstimator, estimator),
        options=options.data_ptr(),
        threads=torch.get_num_threads(),
        loss=loss.data_ptr(),
        statistics=statistics.data_ptr(),
        counts=counts.data_ptr(),
        dlogprob=dlogprob.data_ptr() if dlogprob_wanted else 0,
        dentropy=dentropy.data_ptr() if dentropy_wanted else 0,
    )
    return outputs


def _outputs(logprob: Tensor, dlogprob_wanted: bool, dentropy_wanted: bool) -> tuple[Tensor, ...]:
    size = logprob.shape[0]
    return (
        logprob.new_empty((), dtype=torch.float32),
        logprob.new_empty(6, dtype=torch.float32),
        logprob.new_empty(2, dtype=torch.int64),
        logprob.new_empty(size if dlogprob_wanted else 0, dtype=torch.float32),
        logprob.new_empty(size if dentropy_wanted else 0, dtype=torch.float32),
    )


def _fake_policy_loss(logprob: Tensor, *arguments: object) -> tuple[Tensor, ...]:
    return _outputs(logprob, *arguments[-2:])


_library.impl("policy_loss", _policy_loss, "CPU")
torch.library.register_fake("mosaic_kernels::policy_loss", _fake_policy_loss, lib=_library)
