"""A run that is killed and resumed equals one that was never interrupted, in everything but the times."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import mosaic.train
from mosaic.config import ConfigError, parse_config
from mosaic.log import RunLog
from mosaic.train import train
from tests.mosaic.small import make_tools, settings, with_rewards, write_policy

ROOT = Path(__file__).parents[2]
KILLED = -9
STEPS = 3


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return write_policy(tmp_path_factory.mktemp("policy"))


def job(tree, *, resume=False, kill=None):
    return {"config": tree, "resume": resume, "kill": kill}


def run_jobs(jobs):
    """The exit status of each job, run one after the other."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.mosaic.killed_run"],
        input=json.dumps(jobs),
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def facts(run):
    """All that a run leaves which must not depend on kills: metrics without times, and files bit by bit."""
    metrics = [{k: v for k, v in m.items() if k not in ("time", "peak_memory_gib")} for m in RunLog(run).metrics()]
    names = sorted(str(path.relative_to(run)) for path in Path(run).rglob("*") if "tensorboard" not in path.parts)
    last = Path(run) / "checkpoints" / f"step_{STEPS:06d}"
    files = [last / "policy" / "model.safetensors", last / "optimizer.pt", last / "state.json"]
    files += sorted((Path(run) / "trajectories").iterdir())
    return metrics, names, [path.read_bytes() for path in files]


# Where a run is killed: (function, its call). A step has four trajectories and two updates; two checkpoints are kept.
KILLS = {
    "scoring of the first step": ["mosaic.scoring:MarginalGainScorer._score", 2],
    "second update of the second step": ["torch.optim:AdamW.step", 4],
    "second checkpoint, half written": ["mosaic.checkpoint:sync", 18],
    "third checkpoint, written, the first one not yet removed": ["mosaic.checkpoint:shutil.rmtree", 7],
}
MORE_KILLS = {
    "before anything": ["mosaic.log:os.replace", 1],
    "rollouts of the second step": ["mosaic.rollout.hf:HFEngine._run_pending", 5],
    "trajectories of the second step written, metrics not": ["mosaic.log:RunLog.write_metrics", 2],
    "metrics of the second step written, no checkpoint yet": ["mosaic.train:save_checkpoint", 2],
}


def killed_and_resumed(tmp_path, policy, kills):
    """The facts of an uninterrupted run, and those of a run for each of `kills`."""
    plain = settings(tmp_path, policy, steps=STEPS, output=str(tmp_path / "plain"))
    jobs = [job(plain)]
    for name, kill in kills.items():
        tree = {**plain, "output": str(tmp_path / name)}
        jobs += [job(tree, kill=kill), job(tree, resume=True)]
    statuses, errors = run_jobs(jobs)
    assert statuses == [0] + [KILLED, 0] * len(kills), errors
    return facts(tmp_path / "plain"), {name: facts(tmp_path / name) for name in kills}


def test_killed_anywhere_and_resumed_it_equals_an_uninterrupted_run(tmp_path, policy):
    expected, resumed = killed_and_resumed(tmp_path, policy, KILLS)
    assert [m["step"] for m in expected[0]] == [1, 2, 3]
    assert all(m["ratio_max"] > 1 and m["parameter_change"] > 0 for m in expected[0])
    for name, run in resumed.items():
        assert run == expected, name


@pytest.mark.slow
def test_killed_at_more_places(tmp_path, policy):
    expected, resumed = killed_and_resumed(tmp_path, policy, MORE_KILLS)
    for name, run in resumed.items():
        assert run == expected, name


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path, policy):
    """12 runs, each killed again and again at a moment of chance until it gets to its end."""
    chance = random.Random(0)
    plain = settings(tmp_path, policy, steps=STEPS, output=str(tmp_path / "plain"))
    jobs, runs = [job(plain)], []
    for number in range(12):
        runs.append(tmp_path / f"run{number}")
        tree = {**plain, "output": str(runs[-1])}
        jobs += [job(tree, resume=at > 0, kill=chance.uniform(0.05, 3.0)) for at in range(3)]
        jobs.append(job(tree, resume=True))
    statuses, errors = run_jobs(jobs)
    assert set(statuses) <= {0, KILLED} and statuses.count(KILLED) > 12, errors
    for run in runs:
        assert facts(run) == facts(tmp_path / "plain")


@pytest.fixture
def finished(tmp_path, policy, monkeypatch):
    """The settings of a run of two steps that has ended."""
    monkeypatch.setattr(mosaic.train, "make_tools", make_tools)
    monkeypatch.setattr(mosaic.train, "collect", with_rewards(mosaic.train.collect))
    tree = settings(tmp_path, policy)
    train(parse_config(tree))
    return tree


def test_a_run_is_neither_overwritten_nor_resumed_with_other_settings(finished):
    run = Path(finished["output"])
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=r"output: .*run holds a run already; give another output .*--resume"):
        train(parse_config(finished))
    other = {**finished, "seed": 1, "optimizer": {**finished["optimizer"], "lr": 1e-4, "grad_clip": 2.0}}
    message = r"--resume: optimizer.grad_clip, optimizer.lr, seed differ from .*config.yaml; only steps may change"
    with pytest.raises(ConfigError, match=message):
        train(parse_config(other), resume=True)
    with pytest.raises(ConfigError, match=r"--resume: algorithm.options.rho differ from"):
        train(parse_config({**finished, "algorithm": {"options": {"rho": 0.3}}}), resume=True)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_resuming_a_finished_run_changes_nothing(finished):
    before = RunLog(finished["output"]).metrics()
    assert train(parse_config(finished), resume=True) == Path(finished["output"])
    assert RunLog(finished["output"]).metrics() == before


def test_steps_may_grow(tmp_path, finished):
    longer = {**finished, "steps": STEPS}
    train(parse_config(longer), resume=True)
    assert yaml.safe_load((Path(finished["output"]) / "config.yaml").read_text())["steps"] == STEPS
    train(parse_config({**longer, "output": str(tmp_path / "at_once")}))
    grown, at_once = facts(finished["output"]), facts(tmp_path / "at_once")
    assert grown == at_once


def test_resume_without_a_run_starts_one(tmp_path, policy, monkeypatch):
    monkeypatch.setattr(mosaic.train, "make_tools", make_tools)
    directory = train(parse_config(settings(tmp_path, policy, steps=1)), resume=True)
    assert [m["step"] for m in RunLog(directory).metrics()] == [1]


def test_a_run_whose_model_does_not_load_leaves_nothing_behind(tmp_path, policy, monkeypatch):
    monkeypatch.setattr(mosaic.train, "make_tools", make_tools)
    tree = settings(tmp_path, tmp_path / "no_policy", steps=1)
    with pytest.raises(FileNotFoundError, match="no folder with a config.json"):
        train(parse_config(tree))
    assert not Path(tree["output"]).exists()
    tree["model"]["path"] = str(policy)
    assert train(parse_config(tree)).exists()


def test_the_data_goes_on_where_it_was(tmp_path, policy):
    """Each epoch has its own order and no task twice; which step sees which tasks is a matter of the step alone."""
    config = parse_config(settings(tmp_path, policy, rollout={"prompts": 1}))
    tasks = mosaic.train.make_tasks(config)
    epochs = [[mosaic.train.tasks_of_step(tasks, config, 3 * e + s)[0].id for s in (1, 2, 3)] for e in range(6)]
    assert all(sorted(epoch) == ["a", "b", "c"] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    with pytest.raises(ConfigError, match="rollout.prompts: 4 prompts a step exceed the 3 tasks there are"):
        mosaic.train.tasks_of_step(tasks, parse_config(settings(tmp_path, policy, rollout={"prompts": 4})), 1)


def test_checkpoints_without_a_configuration_are_not_gone_on_with_unasked(finished):
    (Path(finished["output"]) / "config.yaml").unlink()
    with pytest.raises(ConfigError, match="run holds a run already"):
        train(parse_config(finished))
