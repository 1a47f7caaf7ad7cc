"""Fused kernels for reinforcement learning over packed, multi-session trajectories."""

from mosaic_kernels._backend import available_backends
from mosaic_kernels.branch_attention import branch_attention
from mosaic_kernels.layout import Branches, Layout
from mosaic_kernels.linear_logprob import (
    LogprobOutput,
    SegmentScore,
    linear_logprob,
    segment_logprob,
    shifted_targets,
)
from mosaic_kernels.policy_loss import (
    Cispo,
    Clip,
    EntropyBonus,
    KLPenalty,
    Objective,
    PolicyLoss,
    Reinforce,
    Sao,
    normalization_weights,
    policy_loss,
    whiten,
)
from mosaic_kernels.rollout_correction import RolloutCorrection, rollout_correction
from mosaic_kernels.segment_gae import GAEOutput, adaptive_lambda, segment_gae, terminal_reward
from mosaic_kernels.value_loss import ValueLoss, value_loss

__all__ = [
    "Branches",
    "Cispo",
    "Clip",
    "EntropyBonus",
    "GAEOutput",
    "KLPenalty",
    "Layout",
    "LogprobOutput",
    "Objective",
    "PolicyLoss",
    "Reinforce",
    "RolloutCorrection",
    "Sao",
    "SegmentScore",
    "ValueLoss",
    "adaptive_lambda",
    "available_backends",
    "branch_attention",
    "linear_logprob",
    "normalization_weights",
    "policy_loss",
    "rollout_correction",
    "segment_gae",
    "segment_logprob",
    "shifted_targets",
    "terminal_reward",
    "value_loss",
    "whiten",
]
