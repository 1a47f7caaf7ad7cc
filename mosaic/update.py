"""Optimiser updates on one packed batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from mosaic.batch import Batch
from mosaic.config import RunConfig
from mosaic.models import backbone, head
from mosaic.objectives import objective_from
from mosaic_kernels import EntropyBonus, Sao, linear_logprob, normalization_weights, policy_loss


def update_policy(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: Any,
    batch: Batch,
    config: RunConfig,
    *,
    on_skip: Callable[[int, dict[str, Any]], None],
    on_update: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """`epochs` x `minibatches` updates on `batch`; returns their mean metrics and, under "updates", each one's own.

    A minibatch without a policy token in the loss makes no update. An update whose loss or gradient is not finite is
    not applied: `on_skip(number, what made it)` is called instead.
    """
    model.train()
    before = _sample_weights(model)
    history: list[dict[str, Any]] = []
    for number, part in enumerate(optimizer_batches(batch, config), start=1):
        metrics = accumulate_gradients(model, part, config)
        grad_norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.grad_clip))
        finite = math.isfinite(metrics["loss"]) and math.isfinite(grad_norm)
        lr = optimizer.param_groups[0]["lr"]
        if finite:
            optimizer.step()
            schedule.step()
        else:
            on_skip(number, {"batch": part.tensors(), "metrics": metrics, "grad_norm": grad_norm})
        optimizer.zero_grad(set_to_none=True)
        history.append({**metrics, "grad_norm": grad_norm, "lr": lr, "skipped": not finite})
        on_update()
    change = (_sample_weights(model) - before).square().mean().sqrt()
    means = [key for key in (history[0] if history else ()) if key not in ("ratio_max", "skipped")]
    return {
        **{key: sum(update[key] for update in history) / len(history) for key in means},
        "ratio_max": max((update["ratio_max"] for update in history), default=0.0),
        "skipped_updates": sum(update["skipped"] for update in history),
        "parameter_change": float(change),
        "updates": history,
    }


def optimizer_batches(batch: Batch, config: RunConfig) -> Iterator[Batch]:
    """One batch an update: in each epoch the trajectories are dealt anew, and whole, to the minibatches.

    `weight` is counted over the whole update, so that micro-batches of any size give the same loss.
    """
    count = batch.layout.num_trajectories
    for _ in range(config.optimizer.epochs):
        for chosen in torch.randperm(count).tensor_split(min(config.optimizer.minibatches, count)):
            part = batch.trajectories(torch.zeros(count, dtype=torch.bool).index_fill(0, chosen, True))
            if not part.mask.any():
                continue
            part.weight = normalization_weights(part.layout, part.mask, config.algorithm.normalization)
            yield part


def accumulate_gradients(model: torch.nn.Module, batch: Batch, config: RunConfig) -> dict[str, float]:
    """Adds the gradient of the loss over the whole of `batch` to the parameters, micro-batch by micro-batch.

    Returns the loss (a sum over micro-batches) and the metrics of `policy_loss` over all policy tokens.
    """
    objective = objective_from(config.algorithm.objective, config.algorithm.objective_options)
    whole = getattr(objective, "level", "token") == "trajectory"
    loss, tokens, sums, ratio_max = 0.0, 0, {}, 0.0
    for micro in batch.micro_batches(config.optimizer.micro_batch_tokens, whole_trajectories=whole):
        if not micro.mask.any():
            continue
        result = _loss(model, micro.to(model.device), objective, config)
        result.loss.backward()
        metrics = {key: float(value) for key, value in result.metrics.items()}
        loss += float(result.loss.detach())
        ratio_max = max(ratio_max, metrics.pop("ratio_max"))
        count = metrics.pop("policy_tokens")
        tokens += int(count)
        for key, value in metrics.items():
            # Means over active tokens become sums here; counts are sums already.
            sums[key] = sums.get(key, 0.0) + value * (1 if key == "nonfinite_tokens" else count)
    means = {key: value if key == "nonfinite_tokens" else value / max(1, tokens) for key, value in sums.items()}
    return {"loss": loss, **means, "ratio_max": ratio_max, "policy_tokens": tokens}


def _loss(model: torch.nn.Module, batch: Batch, objective: Any, config: RunConfig):
    weight, bias, softcap = head(model)
    entropy_coef = config.algorithm.entropy_coef
    out = linear_logprob(
        packed_hidden(model, batch, config.autocast_dtype),
        weight,
        batch.target,
        bias=bias,
        softcap=softcap,
        temperature=batch.temperature,
        mask=batch.mask,
        return_entropy=entropy_coef > 0,
    )
    return policy_loss(
        out.logprob,
        batch.rollout_logprob if isinstance(objective, Sao) else batch.old_logprob,  # SAO: ratio to the rollout policy
        batch.advantage,
        batch.layout,
        mask=batch.mask,
        token_weight=batch.weight,
        objective=objective,
        entropy_bonus=EntropyBonus(out.entropy, entropy_coef) if entropy_coef > 0 else None,
    )


def packed_hidden(model: torch.nn.Module, batch: Batch, autocast: torch.dtype | None) -> Tensor:
    """Hidden states [T, H] of every row, each segment under its own context and nothing else."""
    device = batch.input_ids.device
    hidden = []
    with torch.autocast(device.type, autocast, enabled=autocast is not None):
        for ids in batch.input_ids.split(batch.layout.lengths.tolist()):
            hidden.append(backbone(model)(input_ids=ids[None], use_cache=False).last_hidden_state[0])
    return torch.cat(hidden)


def _sample_weights(model: torch.nn.Module) -> Tensor:
    """Every 97th weight, enough to tell that and how far they moved."""
    return torch.cat([p.detach().flatten()[::97].float().cpu() for p in model.parameters()])
