"""What the ops are compared with: eager PyTorch, torch.compile of it, and other packages' own functions.

A peer is the installed package's function, called as its documentation or its own trainer calls it, never an imitation.
One that is not installed, or cannot run on this machine, raises NotApplicable with the reason met.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.case import NotApplicable


def peer(package: str) -> Callable:
    """Marks a call into `package`: whatever stops it becomes NotApplicable with the reason."""

    def wrap(call: Callable) -> Callable:
        @functools.wraps(call)
        def wrapped(*args: Any) -> Any:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    return call(*args)
            except NotApplicable:
                raise
            except ModuleNotFoundError as error:
                missing = (error.name or "").partition(".")[0]
                own = missing.replace("_", "-") in (package, package.partition("-")[0])
                raise NotApplicable(
                    f"{package} is not installed" if own else f"{package} needs {missing}, which is not installed"
                ) from None
            except Exception as error:
                # A foreign package may fail in any way: with AttributeError where its API moved, with its own classes.
                line = (str(error).strip() or "no message").splitlines()[0][:160]
                raise NotApplicable(f"{package} on this machine: {type(error).__name__}: {line}") from None

        return wrapped

    return wrap


def _from(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


# Log-probs: (hidden [T, H], weight [V, H], target [T]) -> [T]


def eager_logprob(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    logits = hidden @ weight.T
    return logits.float().log_softmax(-1).gather(1, target[:, None])[:, 0]


@functools.cache
def _compiled(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(call, dynamic=False)


@peer("torch.compile")
def compiled_logprob(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return _compiled(eager_logprob)(hidden, weight, target)


@peer("torch")
def native_reference(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """torch 2.13's linear_cross_entropy without options: the whole [T, V]."""
    return -functional.linear_cross_entropy(hidden, weight, target, reduction="none")


@peer("torch")
def native_chunked(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The same in chunks of rows, with the chunk size and precision that torch picks."""
    options = torch.nn.LinearCrossEntropyOptions()
    return -functional.linear_cross_entropy(hidden, weight, target, reduction="none", options=options)


@peer("trl")
def trl_chunked(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The function of TRL's fused head, with the chunk size of its trainers."""
    chunk = _from("trl.trainer.utils", "_CHUNKED_LOGPROB_CHUNK_SIZE")
    function = _from("trl.kernels.chunked_logprob", "ChunkedLogProbFunction")
    return function.apply(hidden, weight, None, target, 1.0, chunk, None, 1.0, ())[0]


@peer("trl")
def trl_selective(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return _from("trl.trainer.utils", "selective_log_softmax")(hidden @ weight.T, target)


@peer("cut-cross-entropy")
def cut_cross_entropy_compiled(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    function = _from("cut_cross_entropy", "linear_cross_entropy")
    return -function(hidden, weight, target, reduction="none", impl="torch_compile")


@peer("cut-cross-entropy")
def cut_cross_entropy_triton(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return -_from("cut_cross_entropy", "linear_cross_entropy")(hidden, weight, target, reduction="none", impl="cce")


@peer("liger-kernel")
def liger_chunked(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The log-probs of Liger's chunked PPO losses: plain PyTorch, so it runs on a CPU."""
    base = _from("liger_kernel.chunked_loss.fused_linear_ppo", "LigerFusedLinearPPOBase")
    return base.chunk_forward(hidden[None], weight, target[None])[0]


@peer("liger-kernel")
def liger_triton(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    function = _from("liger_kernel.ops.fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction")
    out = function.apply(hidden, weight, target, None, None, -100, 0.0, 0.0, "none")
    return -(out[0] if isinstance(out, tuple) else out)


# Losses, advantages


def eager_policy_loss(logprob: Tensor, old_logprob: Tensor, advantage: Tensor, mask: Tensor, weight: Tensor) -> Tensor:
    """The clipped loss and its metrics, written as a trainer writes it."""
    log_ratio = (logprob - old_logprob).clamp(-20, 20)
    ratio = log_ratio.exp()
    plain, clipped = -ratio * advantage, -ratio.clamp(0.8, 1.28) * advantage
    loss = (weight * torch.where(mask, torch.maximum(plain, clipped), 0)).sum()
    with torch.no_grad():
        tokens = mask.sum().clamp(min=1)
        _ = torch.where(mask, clipped > plain, False).sum() / tokens  # clip_fraction
        _ = torch.where(mask, ratio - 1 - log_ratio, 0).sum() / tokens  # approx_kl
        _ = torch.where(mask, ratio, 0).sum() / tokens  # ratio_mean
        _ = torch.where(mask, ratio, 0).max()  # ratio_max
        _ = torch.where(mask, ~torch.isfinite(log_ratio), False).sum()  # nonfinite_tokens
    return loss


@peer("torch.compile")
def compiled_policy_loss(
    logprob: Tensor, old_logprob: Tensor, advantage: Tensor, mask: Tensor, weight: Tensor
) -> Tensor:
    return _compiled(eager_policy_loss)(logprob, old_logprob, advantage, mask, weight)


@peer("verl")
def verl_policy_loss(logprob: Tensor, old_logprob: Tensor, advantage: Tensor, mask: Tensor, weight: Tensor) -> Tensor:
    """verl's clipped loss over one row of tokens, averaged over tokens, which is what `weight` holds."""
    function = _from("verl.trainer.ppo.core_algos", "compute_policy_loss")
    rows = (x[None] for x in (old_logprob, logprob, advantage, mask))
    return function(*rows, cliprange_low=0.2, cliprange_high=0.28, loss_agg_mode="token-mean")[0]


def eager_value_loss(value: Tensor, old_value: Tensor, returns: Tensor, mask: Tensor, weight: Tensor) -> Tensor:
    bounded = old_value + (value - old_value).clamp(-0.2, 0.2)
    plain, clipped = (value - returns) ** 2, (bounded - returns) ** 2
    with torch.no_grad():
        _ = torch.where(mask, clipped > plain, False).sum() / mask.sum().clamp(min=1)
    return (weight * torch.where(mask, 0.5 * torch.maximum(plain, clipped), 0)).sum()


@peer("verl")
def verl_value_loss(value: Tensor, old_value: Tensor, returns: Tensor, mask: Tensor, weight: Tensor) -> Tensor:
    function = _from("verl.trainer.ppo.core_algos", "compute_value_loss")
    return function(value[None], returns[None], old_value[None], mask[None], 0.2)[0]


def eager_rollout_weight(logprob: Tensor, rollout_logprob: Tensor, mask: Tensor) -> Tensor:
    ratio = (logprob - rollout_logprob).clamp(-20, 20).exp()
    tokens = mask.sum().clamp(min=1)
    _ = torch.where(mask, ratio, 0).sum() / tokens
    _ = torch.where(mask, ratio > 2, False).sum() / tokens
    return torch.where(mask, ratio.clamp(max=2), 0)


@peer("verl")
def verl_gae(reward: Tensor, value: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """verl's loop over the columns of a padded batch [B, L]; it whitens the advantages as well."""
    return _from("verl.trainer.ppo.core_algos", "compute_gae_advantage_return")(reward, value, mask, gamma, lam)


@peer("torchrl")
def torchrl_gae(reward: Tensor, value: Tensor, done: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """torchrl's vectorised GAE over [B, L, 1]; `done` ends every row, and the value after it counts 0."""
    function = _from("torchrl.objectives.value.functional", "vec_generalized_advantage_estimate")
    next_value = torch.cat([value[:, 1:], torch.zeros_like(value[:, :1])], dim=1)
    return function(gamma, lam, value, next_value, reward, done)
