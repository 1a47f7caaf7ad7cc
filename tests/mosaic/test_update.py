"""Optimiser updates: the loss does not depend on how it is cut, and a bad update leaves no trace in the weights."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from mosaic.batch import pack
from mosaic.config import parse_config
from mosaic.log import RunLog
from mosaic.models import tiny_policy
from mosaic.scoring import MarginalGainScorer
from mosaic.train import add_scores, make_optimizer
from mosaic.update import accumulate_gradients, optimizer_batches, packed_hidden, update_policy
from mosaic_kernels import normalization_weights
from tests.mosaic.small import made_trajectories

VOCABULARY = 1000


def config(*, precision="fp32", algorithm=None, rollout=None, **optimizer):
    return parse_config(
        {
            "model": {"precision": precision},
            "algorithm": algorithm or {},
            "rollout": rollout or {},
            "optimizer": {"lr": 1e-2, **optimizer},
        }
    )


@pytest.fixture(scope="module")
def scored():
    """The hand-made trajectories as a batch, with a tiny model's log-probs from plain logits, and random advantages."""
    batch = pack(made_trajectories(VOCABULARY))
    logprob = [part.gather(-1, target.clamp(min=0)[:, None])[:, 0] for part, target in _distributions(batch)]
    batch.old_logprob = torch.where(batch.mask, torch.cat(logprob).float(), 0.0)
    torch.manual_seed(1)
    batch.advantage = torch.where(batch.mask, torch.randn(batch.mask.shape), 0.0)
    return batch


def _distributions(batch):
    """(log-probs [L, V] of every next token at the session's temperature, targets [L]) of each segment."""
    model, lengths = tiny_policy(VOCABULARY), batch.layout.lengths.tolist()
    for ids, target, temperature in zip(
        *(x.split(lengths) for x in (batch.input_ids, batch.target, batch.temperature))
    ):
        with torch.no_grad():
            logits = model(ids[None]).logits[0].double()
        yield (logits / temperature[:, None]).log_softmax(-1), target


@pytest.fixture
def batch(scored):
    return copy.copy(scored)


@pytest.fixture
def model():
    return tiny_policy(VOCABULARY)


def weighted(batch, options):
    batch.weight = normalization_weights(batch.layout, batch.mask, options.algorithm.normalization)
    return batch


def gradient(model, batch, options):
    model.zero_grad(set_to_none=True)
    metrics = accumulate_gradients(model, weighted(batch, options), options)
    return metrics, torch.cat([p.grad.flatten() for p in model.parameters()])


def run_updates(model, batch, options, on_skip=None, on_update=lambda: None):
    optimizer, schedule = make_optimizer(model, options)
    skips = []
    metrics = update_policy(
        model,
        optimizer,
        schedule,
        batch,
        options,
        on_skip=on_skip or (lambda number, what: skips.append(number)),
        on_update=on_update,
    )
    return metrics, skips


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("normalization", ["trajectory", "token", "prompt", "segment", "segment_flat"])
@pytest.mark.parametrize("tokens", [1, 20, 47, 90])
def test_loss_and_gradient_do_not_depend_on_the_micro_batches(model, batch, normalization, tokens):
    algorithm = {"normalization": normalization, "entropy_coef": 0.01}
    # Old log-probs a little off, so that ratios differ and some are clipped.
    batch.old_logprob = batch.old_logprob - 0.2 * torch.randn(
        batch.mask.shape, generator=torch.Generator().manual_seed(2)
    )
    whole_metrics, whole = gradient(model, batch, config(algorithm=algorithm, micro_batch_tokens=10_000))
    metrics, cut = gradient(model, batch, config(algorithm=algorithm, micro_batch_tokens=tokens))
    assert (cut - whole).norm() < 1e-5 * whole.norm()
    assert whole_metrics["clip_fraction"] > 0
    assert metrics == pytest.approx(whole_metrics, rel=1e-5, abs=1e-7)
    assert metrics["policy_tokens"] == int(batch.mask.sum())


def test_the_loss_is_the_weighted_sum_over_policy_tokens(model, batch):
    # The first update: every ratio is 1, so that each token's loss is -A, whatever the clip.
    metrics, _ = gradient(model, batch, config(algorithm={"normalization": "token"}))
    assert metrics["loss"] == pytest.approx(-float(batch.advantage.sum()) / int(batch.mask.sum()), abs=1e-6)


def test_trajectory_level_ratios_do_not_depend_on_the_micro_batches(model, batch):
    algorithm = {"objective_options": {"level": "trajectory", "low": 0.05, "high": 0.05}}
    batch.old_logprob = batch.old_logprob - 0.3 * batch.layout.segment_to_token(torch.arange(8) % 3 - 1).float()
    whole_metrics, whole = gradient(model, batch, config(algorithm=algorithm, micro_batch_tokens=10_000))
    metrics, cut = gradient(model, batch, config(algorithm=algorithm, micro_batch_tokens=1))
    assert (cut - whole).norm() < 1e-5 * whole.norm()
    assert metrics == pytest.approx(whole_metrics, rel=1e-5, abs=1e-7)
    assert whole_metrics["ratio_max"] != pytest.approx(1, abs=1e-3)


def test_first_update_has_ratio_one_and_a_second_epoch_has_not(model, batch):
    metrics, _ = run_updates(model, batch, config(epochs=2))
    first, second = metrics["updates"]
    assert first["ratio_max"] == pytest.approx(1, abs=1e-5)
    assert first["ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert first["clip_fraction"] == 0 and first["approx_kl"] == pytest.approx(0, abs=1e-6)
    assert second["ratio_max"] > 1.01 and second["approx_kl"] > 0
    assert metrics["ratio_max"] == second["ratio_max"]
    assert metrics["loss"] == pytest.approx((first["loss"] + second["loss"]) / 2)
    assert metrics["parameter_change"] > 0 and metrics["skipped_updates"] == 0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_first_ratio_against_the_scorers_log_probs_is_one(tokenizer, precision):
    """Scorer and update run the same forward, in the same precision."""
    model, options = tiny_policy(tokenizer), config(precision=precision)
    trajectories = made_trajectories()
    batch = pack(trajectories)
    scorer = MarginalGainScorer(model, tokenizer, autocast=options.autocast_dtype)
    add_scores(batch, trajectories, scorer.score(trajectories), "log")
    batch.advantage = batch.mask.float()
    metrics, _ = run_updates(model, batch, options)
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-5)
    assert metrics["parameter_change"] > 0
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_bf16_gradient_is_close_to_fp32(model, batch):
    _, exact = gradient(model, batch, config())
    _, rounded = gradient(model, batch, config(precision="bf16"))
    assert not torch.equal(exact, rounded)
    assert torch.cosine_similarity(exact, rounded, dim=0) > 0.99


def test_activation_checkpointing_gives_the_same_gradient(model, batch):
    model.train()
    _, plain = gradient(model, batch, config())
    model.gradient_checkpointing_enable({"use_reentrant": False})
    calls = []
    handle = model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    _, recomputed = gradient(model, batch, config())
    handle.remove()
    assert len(calls) == 2 * batch.layout.num_segments  # forward, and again in backward
    torch.testing.assert_close(recomputed, plain, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_hidden_states_of_a_segment_ignore_the_other_segments(model, batch, autocast):
    hidden = packed_hidden(model, batch, autocast)
    changed = copy.copy(batch)
    inside = batch.layout.token_segment == 3
    changed.input_ids = torch.where(inside, batch.input_ids, (batch.input_ids + 17) % 1000)
    assert torch.equal(packed_hidden(model, changed, autocast)[inside], hidden[inside])
    assert not torch.equal(packed_hidden(model, changed, autocast)[~inside], hidden[~inside])


def test_trajectories_stay_whole_and_each_is_used_once_an_epoch(batch):
    torch.manual_seed(3)
    options = config(epochs=3, minibatches=3)
    parts = list(optimizer_batches(batch, options))
    assert len(parts) == 9
    sessions = batch.layout.segment_trajectory.bincount()
    deals = set()
    for epoch in range(3):
        seen = []
        for part in parts[3 * epoch : 3 * epoch + 3]:
            ids, counts = part.layout.segment_trajectory.unique(return_counts=True)
            assert torch.equal(counts, sessions[ids])
            seen.append(tuple(ids.tolist()))
        assert sorted(i for ids in seen for i in ids) == [0, 1, 2, 3]
        deals.add(tuple(seen))
    assert len(deals) > 1  # dealt anew in each epoch


def test_weights_are_counted_over_one_update(batch):
    for part in optimizer_batches(batch, config(minibatches=2)):
        assert float(part.weight.sum()) == pytest.approx(1)


def test_more_minibatches_than_trajectories(model, batch):
    rollout = {"prompts": 4, "group_size": 2}
    metrics, _ = run_updates(model, batch, config(minibatches=8, rollout=rollout))
    assert len(metrics["updates"]) == 4


def test_minibatch_without_a_policy_token_makes_no_update(model, batch):
    """Dropped overlong trajectories may leave a minibatch with nothing to learn from."""
    batch.mask = batch.mask & ~batch.layout.trajectory_to_token(torch.tensor([True, False, True, False]))
    metrics, skips = run_updates(model, batch, config(minibatches=4))
    assert len(metrics["updates"]) == 2 and skips == []
    assert all(math.isfinite(value) for value in metrics.values() if not isinstance(value, list))


def test_nothing_to_learn_from_at_all(model, batch):
    before = flat(model)
    batch.mask = torch.zeros_like(batch.mask)
    metrics, _ = run_updates(model, batch, config())
    assert metrics["updates"] == [] and metrics["parameter_change"] == 0 and metrics["skipped_updates"] == 0
    assert torch.equal(flat(model), before)


def test_entropy_bonus_raises_the_entropy(batch):
    def entropy_after(coef):
        trained = tiny_policy(VOCABULARY)
        flat_advantage = copy.copy(batch)
        flat_advantage.advantage = torch.zeros_like(batch.advantage)
        return run_updates(trained, flat_advantage, config(algorithm={"entropy_coef": coef}, epochs=4))[0]["updates"]

    updates = entropy_after(0.5)
    assert updates[0]["entropy"] > 0
    assert updates[0]["loss"] == pytest.approx(-0.5 * float(_mean_entropy(batch)), rel=1e-4)
    assert updates[-1]["entropy"] > updates[0]["entropy"]
    assert entropy_after(0.0)[0]["entropy"] == 0  # not computed where it has no weight


def _mean_entropy(batch):
    """Mean over trajectories of the mean over policy tokens."""
    entropy = torch.cat([-(logprob.exp() * logprob).sum(-1) for logprob, _ in _distributions(batch)])
    owner = batch.layout.token_trajectory
    return torch.stack([entropy[batch.mask & (owner == trajectory)].mean() for trajectory in range(4)]).mean()


def test_gradient_is_clipped_to_the_norm(model, batch):
    options = config(grad_clip=1e-3)
    norms = []

    class Recorder(torch.optim.SGD):
        def step(self, closure=None):
            norms.append(torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item())

    optimizer = Recorder(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 1.0)
    metrics = update_policy(model, optimizer, schedule, batch, options, on_skip=None)
    assert metrics["grad_norm"] > 1e-3  # the norm before clipping is what is reported
    assert norms == pytest.approx([1e-3], rel=1e-3)


def break_loss(model, batch):
    batch.advantage = batch.advantage.clone()
    batch.advantage[batch.mask.nonzero()[3]] = math.nan


def break_gradient(model, batch):
    model.model.norm.weight.register_hook(lambda grad: grad * math.inf)


def break_weight(model, batch):
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = math.nan


@pytest.mark.parametrize("fault", [break_loss, break_gradient, break_weight])
def test_an_update_that_is_not_finite_is_not_applied(tmp_path, model, batch, fault):
    fault(model, batch)
    before, log = flat(model), RunLog(tmp_path)
    saved, options = [], config(epochs=2, schedule="linear")
    metrics, _ = run_updates(model, batch, options, on_skip=lambda n, what: saved.append(log.save_skipped(4, n, what)))
    assert torch.equal(flat(model).nan_to_num(7.0), before.nan_to_num(7.0))
    assert metrics["skipped_updates"] == 2 and [u["skipped"] for u in metrics["updates"]] == [True, True]
    assert metrics["updates"][0]["lr"] == metrics["updates"][1]["lr"]  # the schedule counts updates that were made
    assert [path.name for path in saved] == ["step_000004_update_1.pt", "step_000004_update_2.pt"]
    what = torch.load(saved[0])  # without trusting any class
    assert torch.equal(what["batch"]["input_ids"], batch.input_ids)
    assert torch.equal(what["batch"]["cu_seqlens"], batch.layout.cu_seqlens)
    assert what["batch"]["weight"].shape == batch.mask.shape
    assert not (math.isfinite(what["metrics"]["loss"]) and math.isfinite(what["grad_norm"]))


def test_a_good_update_after_a_skipped_one(model, batch):
    """The bad gradient is gone, and the optimiser never saw it."""
    twin = copy.deepcopy(model)
    bad = copy.copy(batch)
    break_loss(model, bad)
    options = config()
    optimizer, schedule = make_optimizer(model, options)
    skips = []
    for part in (bad, batch):
        update_policy(model, optimizer, schedule, part, options, on_skip=lambda n, what: skips.append(n))
    run_updates(twin, batch, options)
    assert skips == [1]
    assert torch.equal(flat(model), flat(twin))


def test_progress_is_told_of_every_update(model, batch):
    calls = []
    run_updates(model, batch, config(epochs=2, minibatches=2), on_update=lambda: calls.append(1))
    assert len(calls) == 4


def test_the_ratio_of_sao_is_to_the_rollout_policy(model, batch):
    """Tokens outside its band get no weight: with log-probs of the engine that are far off, none is left."""
    options = config(algorithm={"objective": "sao", "objective_options": {"low": 0.5, "high": 1.0}})
    batch.rollout_logprob = torch.where(batch.mask, batch.old_logprob - math.log(1.5), 0.0)
    metrics, some = gradient(model, batch, options)
    assert metrics["ratio_mean"] == pytest.approx(1.5, abs=1e-4) and some.abs().max() > 0
    batch.rollout_logprob = torch.where(batch.mask, batch.old_logprob - 1.0, 0.0)
    metrics, none = gradient(model, batch, options)
    assert metrics["ratio_mean"] == pytest.approx(math.e, abs=1e-3) and not none.any()
    metrics, _ = gradient(model, batch, config())
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-4)
