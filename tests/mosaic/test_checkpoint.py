"""Checkpoints: whole or not there, and all that a resumed run needs is in them."""

from __future__ import annotations

import itertools
import os
import random
import shutil

import numpy
import torch

from mosaic import checkpoint
from mosaic.checkpoint import (
    derive_seed,
    discard_leftovers,
    list_checkpoints,
    restore_training,
    save_checkpoint,
    seed_everything,
)
from mosaic.config import parse_config
from mosaic.models import load_policy, tiny_policy
from mosaic.train import make_optimizer


class Tokenizer:
    """Saves something; the real one takes a second."""

    def save_pretrained(self, folder):
        (folder / "tokenizer.txt").write_text("words")


class Training:
    """A tiny policy with the optimiser and the schedule of a run of `steps` steps."""

    def __init__(self, steps=4, **options):
        self.model = tiny_policy(100)
        config = parse_config({"steps": steps, "optimizer": {"lr": 1e-2, "schedule": "linear", **options}})
        self.optimizer, self.schedule = make_optimizer(self.model, config)

    def update(self):
        self.model(input_ids=torch.randint(100, (1, 8))).logits.logsumexp(-1).mean().backward()
        rate = self.optimizer.param_groups[0]["lr"]
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return rate

    def save(self, folder, step, keep=2):
        parts = dict(model=self.model, optimizer=self.optimizer, schedule=self.schedule)
        return save_checkpoint(folder, step, tokenizer=Tokenizer(), keep=keep, **parts)

    def restore(self, path):
        return restore_training(path, optimizer=self.optimizer, schedule=self.schedule)


def test_seeds_are_the_same_everywhere():
    assert derive_seed(0, "rollout", 1) == 8911054625556009685
    assert derive_seed(0, "rollout", 2) != derive_seed(0, "rollout", 1) != derive_seed(1, "rollout", 1)
    assert all(0 <= derive_seed(i) < 2**63 for i in range(100))


def draws():
    return random.random(), random.gauss(0, 1), numpy.random.normal(), float(torch.randn(()))


def test_every_random_stream_is_seeded():
    seed_everything(0, "step", 1)
    first = draws()
    seed_everything(0, "step", 1)
    assert draws() == first
    seed_everything(0, "step", 2)
    assert all(a != b for a, b in zip(draws(), first))


def test_random_state_of_every_library_comes_back(tmp_path):
    training = Training()
    seed_everything(3)
    draws()  # an odd number of normals: each library keeps a second one back
    path = training.save(tmp_path, 1)
    expected = [draws() for _ in range(3)]
    assert training.restore(path) == 1
    assert [draws() for _ in range(3)] == expected


def test_contents(tmp_path):
    training = Training()
    training.update()
    path = training.save(tmp_path / "checkpoints", 12)
    assert path == tmp_path / "checkpoints" / "step_000012"
    assert {p.name for p in path.iterdir()} == {"policy", "optimizer.pt", "state.json"}
    assert (path / "policy" / "tokenizer.txt").exists()
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(path / "policy")
    for name, tensor in training.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor) and tensor.dtype == torch.float32


def test_a_real_tokenizer_loads_with_the_policy(tmp_path, tokenizer, tiny_model):
    optimizer, schedule = make_optimizer(tiny_model, parse_config({}))
    path = save_checkpoint(
        tmp_path, 1, model=tiny_model, tokenizer=tokenizer, optimizer=optimizer, schedule=schedule, keep=1
    )
    model, loaded = load_policy(path / "policy")
    assert loaded.chat_template == tokenizer.chat_template and len(loaded) == len(tokenizer)
    assert torch.equal(model.lm_head.weight, tiny_model.lm_head.weight)


def test_training_goes_on_as_if_never_interrupted(tmp_path):
    training = Training()
    training.update()
    path = training.save(tmp_path, 1)
    resumed = Training()
    resumed.model.load_state_dict(training.model.state_dict())
    rates = [training.update() for _ in range(2)]
    resumed.restore(path)
    assert [resumed.update() for _ in range(2)] == rates == [0.0075, 0.005]
    for a, b in zip(training.model.parameters(), resumed.model.parameters()):
        assert torch.equal(a, b)
    for a, b in zip(training.optimizer.state.values(), resumed.optimizer.state.values()):
        assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_a_longer_run_goes_on_at_its_own_learning_rate(tmp_path):
    training = Training(steps=2)
    assert [training.update() for _ in range(2)] == [0.01, 0.005]  # the next one would be 0
    path = training.save(tmp_path, 2)
    longer = Training(steps=4)
    longer.restore(path)
    assert [longer.update() for _ in range(2)] == [0.005, 0.0025]


def test_only_the_newest_are_kept_and_listed_oldest_first(tmp_path):
    training = Training()
    for step in (9, 10, 11, 100):
        training.save(tmp_path, step, keep=3)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_000010", "step_000011", "step_000100"]
    training.save(tmp_path, 101, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000101"]


def test_saving_a_step_again_replaces_it(tmp_path):
    training = Training()
    path = training.save(tmp_path, 1)
    (path / "stray").touch()
    assert training.save(tmp_path, 1) == path
    assert not (path / "stray").exists()


class Killed(BaseException):
    """Stands in for a kill: nothing in the code may catch it."""


class Fuse:
    """Lets `at` calls of the functions it is put on pass, then kills."""

    def __init__(self, at):
        self.left = at

    def on(self, function):
        def call(*arguments, **options):
            self.left -= 1
            if self.left < 0:
                raise Killed
            return function(*arguments, **options)

        return call


def test_killed_at_any_write_there_is_the_old_checkpoint_or_the_new_one(tmp_path, monkeypatch):
    """Every flush, rename and removal in turn is where the save ends."""
    for at in itertools.count():
        folder, training, fuse = tmp_path / str(at), Training(), Fuse(at)
        training.save(folder, 1, keep=1)
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "sync", fuse.on(checkpoint.sync))
            patch.setattr(checkpoint.os, "replace", fuse.on(os.replace))
            patch.setattr(checkpoint.shutil, "rmtree", fuse.on(shutil.rmtree))
            try:
                training.save(folder, 2, keep=1)
                break  # it ended before the fuse did: every place was tried
            except Killed:
                pass
        newest = list_checkpoints(folder)[-1]
        assert Training().restore(newest) in (1, 2)
        discard_leftovers(folder, 1)
        assert [path.name for path in folder.iterdir()] == [newest.name]
        training.save(folder, 2, keep=1)
        assert [path.name for path in folder.iterdir()] == ["step_000002"]
    assert at > 10


def test_no_folder_has_no_checkpoints(tmp_path):
    assert list_checkpoints(tmp_path / "none") == []
    discard_leftovers(tmp_path / "none", 1)
