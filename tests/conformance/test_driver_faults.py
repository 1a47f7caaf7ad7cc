"""Faults of other trainers' drivers, each as its smallest case. Numbers as in the project's list of peers' faults."""

from __future__ import annotations

import random

import numpy
import pytest
import torch

import mosaic.train
from mosaic.batch import pack
from mosaic.config import parse_config
from mosaic.log import RunLog
from mosaic.train import train
from mosaic.update import optimizer_batches
from tests.mosaic.small import made_trajectories, make_tools, settings, with_rewards, write_policy


@pytest.mark.parametrize("minibatches", [1, 2, 3, 4])
def test_21_the_sessions_of_a_trajectory_stay_in_one_optimiser_step(minibatches):
    """Elsewhere: one step a turn sample, or compaction switched off because trajectories fragment."""
    batch = pack(made_trajectories())
    optimizer = {"minibatches": minibatches, "micro_batch_tokens": 1}
    updates = list(optimizer_batches(batch, parse_config({"optimizer": optimizer})))
    assert len(updates) == minibatches
    homes = [
        {update for update, part in enumerate(updates) if (part.layout.segment_trajectory == i).any()} for i in range(4)
    ]
    assert [len(home) for home in homes] == [1] * 4
    for trajectory, (home,) in enumerate(homes):
        rows = updates[home].layout.token_trajectory == trajectory
        # Cut into micro-batches of one session each, its tokens still bear what they do in the uncut update.
        pieces = [m for m in updates[home].micro_batches(1) if (m.layout.segment_trajectory == trajectory).any()]
        assert torch.equal(torch.cat([piece.weight for piece in pieces]), updates[home].weight[rows])


def test_31_resume_neither_repeats_nor_skips_samples(tmp_path, monkeypatch):
    """Elsewhere: weights come back, but not every random state, the engine's seeds, the data's place or the schedule.

    tests/mosaic/test_resume.py does the same with real kills, at many places and at random moments.
    """
    monkeypatch.setattr(mosaic.train, "make_tools", make_tools)
    monkeypatch.setattr(mosaic.train, "collect", with_rewards(mosaic.train.collect))
    optimizer = {"schedule": "linear", "warmup_updates": 1, "minibatches": 2}
    tree = settings(tmp_path, write_policy(tmp_path / "policy"), optimizer=optimizer)

    def result(name):
        run = tmp_path / name
        weights = (run / "checkpoints" / "step_000002" / "policy" / "model.safetensors").read_bytes()
        rates = [[update["lr"] for update in metrics["updates"]] for metrics in RunLog(run).metrics()]
        return weights, rates, RunLog(run).read_trajectories(2)

    train(parse_config({**tree, "output": str(tmp_path / "plain")}))
    interrupted = parse_config({**tree, "output": str(tmp_path / "interrupted")})
    with monkeypatch.context() as patch:
        scored = iter([mosaic.train.add_scores])
        patch.setattr(mosaic.train, "add_scores", lambda *arguments: next(scored)(*arguments))
        with pytest.raises(StopIteration):
            train(interrupted)
    assert [metrics["step"] for metrics in RunLog(tmp_path / "interrupted").metrics()] == [1]
    random.seed(99), numpy.random.seed(99), torch.manual_seed(99)  # a new process starts anywhere
    train(interrupted, resume=True)
    assert result("interrupted") == result("plain")
