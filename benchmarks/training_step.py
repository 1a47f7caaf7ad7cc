"""`python -m benchmarks.training_step RUN`: the first step of a run with and without the "cpu" kernels.

Scores and one update's gradients for the run's own policy and trajectories, by turns in one process: what the kernels
change in training as a whole, where the model's layers take most of the time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.measure import interleave
from mosaic.advantages import ADVANTAGES
from mosaic.batch import pack
from mosaic.config import load_config
from mosaic.log import read_trajectory_file
from mosaic.models import load_policy
from mosaic.scoring import MarginalGainScorer
from mosaic.train import add_scores
from mosaic.trajectory import Trajectory
from mosaic.update import accumulate_gradients, optimizer_batches
from mosaic_kernels import available_backends, linear_logprob, policy_loss

ROUNDS = 3


@contextmanager
def reference_only() -> Iterator[None]:
    """Inside, the ops of a training step have no backend but the reference."""
    tables = [sys.modules[op.__module__]._MODULES for op in (linear_logprob, policy_loss)]
    before = [dict(table) for table in tables]
    for table in tables:
        for name in set(table) - {"reference"}:
            del table[name]
    try:
        yield
    finally:
        for table, entries in zip(tables, before):
            table.clear()
            table.update(entries)


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    if (state := available_backends()["cpu"]) != "available":
        print(f"there is nothing to compare: {state}", file=sys.stderr)
        return 1
    run = Path(arguments[0])
    config = load_config(run / "config.yaml", [])
    records = read_trajectory_file(run / "trajectories" / "step_000001.jsonl.zst")
    trajectories = [
        Trajectory.from_dict({key: value for key, value in record.items() if key != "training"}) for record in records
    ]
    model, tokenizer = load_policy(config.model.path, adapter=config.model.adapter)
    scorer = MarginalGainScorer(model, tokenizer, space=config.algorithm.gain_space, autocast=config.autocast_dtype)
    batch = pack(trajectories)
    add_scores(batch, trajectories, scorer.score(trajectories), config.algorithm.gain_space)
    batch.advantage = ADVANTAGES[config.algorithm.name](batch, **config.algorithm.options)
    torch.manual_seed(0)
    update = next(optimizer_batches(batch, config))

    def gradients() -> None:
        model.zero_grad()
        accumulate_gradients(model, update, config)

    def alone(call) -> None:
        with reference_only():
            call()

    calls = {"scores": lambda: scorer.score(trajectories), "gradients of one update": gradients}
    for name, part in (("scores", batch), ("update", update)):
        print(f"{name}: {part.layout.num_tokens} tokens, {int(part.mask.sum())} sampled")
    for name, call in calls.items():
        sides = {"cpu": call, "reference": lambda call=call: alone(call)}
        timing = interleave(sides, ROUNDS, side_seconds=600)
        ours, theirs = timing["cpu"].median, timing["reference"].median
        print(f"{name}: cpu {ours:.1f} s, reference {theirs:.1f} s, {theirs / ours:.2f} times as long")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
