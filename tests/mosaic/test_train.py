"""Whole runs of the loop: with a tiny random policy, and with an expert in its place where sessions must be many."""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

import mosaic.train
from mosaic.advantages import ADVANTAGES
from mosaic.agents.chat import ChatFormat
from mosaic.batch import pack
from mosaic.config import ConfigError, parse_config
from mosaic.expert import ExpertEngine
from mosaic.log import RunLog
from mosaic.models import load_policy
from mosaic.parts import make_decoder, make_tasks
from mosaic.report import build_report
from mosaic.rollout.engine import Generation
from mosaic.scoring import TrajectoryScore
from mosaic.tools.local import local_tools
from mosaic.train import add_scores, batch_metrics, make_optimizer, tasks_of_step, train
from mosaic.trajectory import Session, Trajectory
from tests.mosaic.small import made_trajectories, make_tools, settings, small_tokenizer, with_rewards, write_policy

# The expert's sessions: a little more than the demo's numbers, as the small vocabulary makes longer texts.
ROOMY = {"session_limit": 900, "reserve": 200, "max_turn_tokens": 200, "max_turns": 8, "summary_tokens": 200}


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return write_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def atlas_tools():
    return local_tools()


@pytest.fixture
def random_policy(monkeypatch):
    monkeypatch.setattr(mosaic.train, "make_tools", make_tools)
    monkeypatch.setattr(mosaic.train, "collect", with_rewards(mosaic.train.collect))


class Experts:
    """An engine that plays the expert of each prompt; every second rollout of a prompt answers wrongly."""

    def __init__(self, config):
        self.config, self.chat, self.tasks = (
            config,
            ChatFormat(small_tokenizer(), tool_format="hermes"),
            make_tasks(config),
        )

    def load_weights(self, weights, version):
        self.weights_version, self.prompts = version, tasks_of_step(self.tasks, self.config, version + 1)

    @contextmanager
    def running(self):
        yield

    waiting = running

    async def generate(self, request):
        prompt, rollout = request.order[:2]
        task, forks = self.prompts[prompt], self.config.rollout.scenarios[prompt % 2] == "forking"
        if rollout % 2:
            task = replace(task, answers=("nowhere at all",))
        generation = await ExpertEngine(task, self.chat, forks=forks).generate(request)
        return replace(generation, logprobs=[-0.5] * len(generation.logprobs), weights_version=self.weights_version)


@pytest.fixture
def expert_policy(monkeypatch, atlas_tools):
    monkeypatch.setattr(mosaic.train, "make_tools", lambda config: atlas_tools)
    monkeypatch.setattr(mosaic.train, "make_engine", lambda model, config: Experts(config))


def expert_settings(tmp_path, policy, **changes):
    changes = {"rollout": {"group_size": 2, **changes.pop("rollout", {})}, **changes}
    return settings(tmp_path, policy, steps=1, task={"source": "atlas", "hops": [2]}, agent=ROOMY, **changes)


def numbers(metrics):
    for key, value in metrics.items():
        if isinstance(value, dict):
            yield from numbers({f"{key}/{inner}": number for inner, number in value.items()})
        elif isinstance(value, list):
            for part in value:
                yield from numbers(part)
        else:
            yield key, value


def assert_run_is_whole(directory, steps):
    log = RunLog(directory)
    assert [m["step"] for m in log.metrics()] == log.steps() == list(range(1, steps + 1))
    for metrics in log.metrics():
        assert all(math.isfinite(value) for _, value in numbers(metrics))
        assert metrics["skipped_updates"] == 0 and metrics["dropped"] == {}
        assert metrics["time"].keys() == {"rollout", "score", "update"}
        assert 0.05 < metrics["peak_memory_gib"] < 64
    for step in log.steps():
        for record in log.read_trajectories(step):
            trajectory = Trajectory.from_dict({k: v for k, v in record.items() if k != "training"})
            assert all(isinstance(session, Session) for session in trajectory.sessions)
            assert all(session.weights_version == step - 1 for session in trajectory.sessions)
            count = len(trajectory.sessions)
            assert all(len(record["training"][k]) == count for k in ("gain", "eligible", "session_advantage"))
    assert list((directory / "tensorboard").glob("events*"))


ALGORITHMS = {
    "mosaic": {"name": "mosaic"},
    "broadcast": {"name": "broadcast", "normalization": "token"},
    "grpo": {"name": "grpo", "objective": "cispo", "normalization": "prompt"},
    "igpo_v2": {"name": "igpo"},
    "igpo_v1": {"name": "igpo", "options": {"version": "v1"}, "gain_space": "prob"},
    "supo": {"name": "supo", "mask_overlong": True, "normalization": "token"},
    "compaction_grpo": {"name": "compaction_grpo", "objective_options": {"dual": 3.0}},
    "reinforce": {"name": "mosaic", "objective": "reinforce", "entropy_coef": 0.01, "normalization": "segment"},
    "trajectory_ratio": {"name": "mosaic", "objective_options": {"level": "trajectory"}},
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_trains_on_many_sessions(tmp_path, policy, expert_policy, name):
    scenarios = ["compaction"] * 2 if name == "compaction_grpo" else ["compaction", "forking"]
    tree = expert_settings(tmp_path, policy, algorithm=ALGORITHMS[name], rollout={"scenarios": scenarios})
    directory = train(parse_config(tree))
    assert_run_is_whole(directory, steps=1)
    (metrics,) = RunLog(directory).metrics()
    assert metrics["groups_mixed"] == 2 and metrics["reward_mean"] == 0.5
    assert metrics["compaction_share"] >= 0.5
    assert metrics["fork_share"] == (0.0 if name == "compaction_grpo" else 0.5)
    first, second = metrics["updates"]
    assert first["ratio_max"] == pytest.approx(1, abs=1e-4) and second["ratio_max"] > 1.001
    assert metrics["parameter_change"] > 0 and metrics["grad_norm"] > 0
    assert metrics["engine_logprob_diff_mean"] > 1  # the expert's log-probs are not the policy's
    trained, _ = load_policy(directory / "checkpoints" / "step_000001" / "policy")
    before, _ = load_policy(policy)
    assert not torch.equal(trained.lm_head.weight, before.lm_head.weight)


def test_mosaic_shapes_the_sessions_before_the_last(tmp_path, policy, expert_policy):
    directory = train(parse_config(expert_settings(tmp_path, policy, algorithm={"options": {"lambda_r": 0.5}})))
    records = RunLog(directory).read_trajectories(1)
    assert [record["reward"] for record in records] == [1.0, 0.0, 1.0, 0.0]
    for record in records:
        training = record["training"]
        sign = 1 if record["reward"] else -1
        assert sign * training["trajectory_advantage"] > 0
        assert training["session_advantage"][-1] == training["trajectory_advantage"]
        assert [not e for e in training["eligible"]] == [s["terminal"] for s in record["sessions"]]
        assert [g is None for g in training["gain"]] == [s["terminal"] for s in record["sessions"]]
        assert all(sign * advantage >= 0 for advantage in training["session_advantage"])  # the gate keeps the sign
    report = build_report(directory, decode=make_decoder(directory)).read_text()
    assert "&lt;answer&gt;nowhere at all&lt;/answer&gt;" in report  # what the sessions said
    shaped = [a != r["training"]["trajectory_advantage"] for r in records for a in r["training"]["session_advantage"]]
    assert any(shaped)


def test_overlong_trajectories_are_left_out_of_the_loss(tmp_path, policy, random_policy):
    """A random policy always runs out of a limit: with mask_overlong nothing is left, and the run goes on."""
    algorithm = {"name": "supo", "mask_overlong": True}
    directory = train(parse_config(settings(tmp_path, policy, steps=1, algorithm=algorithm)))
    (metrics,) = RunLog(directory).metrics()
    assert metrics["updates"] == [] and metrics["parameter_change"] == 0
    build_report(directory)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"precision": "bf16"}},
        {"model": {"activation_checkpointing": True}},
        {"optimizer": {"minibatches": 2, "epochs": 1, "schedule": "cosine", "warmup_updates": 2}},
        {"rollout": {"scenarios": ["single"]}, "checkpoint_every": 5},
    ],
    ids=["bf16", "activation_checkpointing", "minibatches", "single"],
)
def test_a_random_policy_trains(tmp_path, policy, random_policy, changes):
    directory = train(parse_config(settings(tmp_path, policy, **changes)))
    assert_run_is_whole(directory, steps=2)
    metrics = RunLog(directory).metrics()
    bound = 0.2 if changes.get("model", {}).get("precision") == "bf16" else 1e-4
    assert all(m["engine_logprob_diff_max"] < bound for m in metrics)
    assert all(m["parameter_change"] > 0 for m in metrics)
    kept = sorted(path.name for path in (directory / "checkpoints").iterdir())
    assert kept == (["step_000002"] if "checkpoint_every" in changes else ["step_000001", "step_000002"])
    assert yaml.safe_load((directory / "config.yaml").read_text()) == parse_config(
        settings(tmp_path, policy, **changes)
    ).model_dump(mode="json")


def test_activation_checkpointing_does_not_change_the_training(tmp_path, policy, random_policy):
    runs = []
    for switch in (False, True):
        tree = settings(
            tmp_path, policy, model={"activation_checkpointing": switch}, output=str(tmp_path / str(switch))
        )
        runs.append(RunLog(train(parse_config(tree))).metrics())
    for plain, recomputed in zip(*runs):
        assert recomputed["loss"] == pytest.approx(plain["loss"], abs=1e-5)


def test_the_same_seed_gives_the_same_run_and_another_seed_another(tmp_path, policy, random_policy):
    def weights(name, seed):
        tree = settings(tmp_path, policy, output=str(tmp_path / name), seed=seed)
        return (train(parse_config(tree)) / "checkpoints" / "step_000002" / "policy" / "model.safetensors").read_bytes()

    assert weights("a", 0) == weights("b", 0) != weights("c", 1)


@pytest.fixture
def registered():
    """Registers an algorithm of the user's own, for one test."""
    names = []

    def enter(name, function):
        names.append(name)
        ADVANTAGES[name] = function

    yield enter
    for name in names:
        del ADVANTAGES[name]


def test_an_algorithm_of_ones_own(tmp_path, policy, random_policy, registered):
    seen = []

    def constant(batch, *, level=1.0):
        seen.append(level)
        return torch.where(batch.mask, level, 0.0)

    registered("constant", constant)
    algorithm = {"name": "constant", "options": {"level": 0.5}}
    directory = train(parse_config(settings(tmp_path, policy, steps=1, algorithm=algorithm)))
    (metrics,) = RunLog(directory).metrics()
    assert metrics["updates"][0]["loss"] == pytest.approx(-0.5, abs=1e-5)
    assert seen == [0.5, 0.5]  # once on nothing, to check its options
    with pytest.raises(ConfigError, match="algorithm.options: constant has no option 'lewel'; it has level"):
        parse_config({"algorithm": {"name": "constant", "options": {"lewel": 1}}})


def test_a_step_that_is_not_finite_is_skipped_saved_and_counted(tmp_path, policy, random_policy, registered):
    def poisoned(batch):
        return torch.where(batch.mask, math.nan, 0.0)

    registered("poisoned", poisoned)
    directory = train(parse_config(settings(tmp_path, policy, steps=1, algorithm={"name": "poisoned"})))
    (metrics,) = RunLog(directory).metrics()
    assert metrics["skipped_updates"] == 2 and metrics["parameter_change"] == 0
    assert math.isnan(metrics["loss"]) and metrics["nonfinite_tokens"] > 0
    saved = sorted((directory / "skipped").iterdir())
    assert [path.name for path in saved] == ["step_000001_update_1.pt", "step_000001_update_2.pt"]
    assert torch.load(saved[0])["batch"]["advantage"].isnan().any()
    final, _ = load_policy(directory / "checkpoints" / "step_000001" / "policy")
    before, _ = load_policy(policy)
    assert all(torch.equal(a, b) for a, b in zip(final.parameters(), before.parameters()))
    build_report(directory)


def test_a_step_without_a_trajectory_goes_by(tmp_path, policy, random_policy, monkeypatch):
    """Every rollout is dropped: there is nothing to train on, and the reasons are counted."""

    class Broken(Experts):
        async def generate(self, request):
            return Generation([1], [None], "length")

    monkeypatch.setattr(mosaic.train, "make_engine", lambda model, config: Broken(config))
    directory = train(parse_config(settings(tmp_path, policy)))
    log = RunLog(directory)
    assert log.read_trajectories(1) == log.read_trajectories(2) == []
    for metrics in log.metrics():
        assert metrics["trajectories"] == 0
        assert metrics["dropped"] == {"the engine returned a log-prob that is None, NaN or infinite": 4}
    build_report(directory, decode=make_decoder(directory))


def test_sessions_must_leave_room_for_a_probe(tmp_path, policy, random_policy):
    tree = settings(tmp_path, policy, agent={"session_limit": 8192})
    with pytest.raises(ConfigError, match="8192 tokens and 128 tokens of a probe exceed the model's context of 8192"):
        train(parse_config(tree))
    assert not Path(tree["output"]).exists()


def test_too_few_tasks_are_found_before_a_model_loads(tmp_path, random_policy):
    tree = settings(tmp_path, tmp_path / "no_model", rollout={"prompts": 4})
    with pytest.raises(ConfigError, match="rollout.prompts: 4 prompts a step exceed the 3 tasks"):
        train(parse_config(tree))


def test_scores_reach_their_rows():
    trajectories = made_trajectories()[2:]  # responses 3 + [1 sampled], and 3 + [30 sampled, 2 seen, 8 sampled]
    batch = pack(trajectories)
    scores = [
        TrajectoryScore(torch.tensor([0.5]), torch.tensor([False]), {}, [[7.0]], [torch.tensor([-1.0])], "Rome"),
        TrajectoryScore(
            torch.tensor([0.25]), torch.tensor([True]), {}, [[2.0, 3.0]], [-torch.arange(40.0).clamp(min=1)], "Rome"
        ),
    ]
    add_scores(batch, trajectories, scores, "prob")
    assert batch.turn_gain.tolist() == [0, 0, 7, 0] + [0, 0] + [2] * 30 + [0] * 2 + [3] * 8 + [0]
    assert batch.old_logprob[:7].tolist() == [0, 0, -1, 0, 0, 0, -1]
    assert batch.gain.tolist() == [0.5, 0.25] and batch.eligible.tolist() == [False, True]
    assert batch.gain_space == "prob"
    batch.rollout_logprob = torch.where(batch.mask, batch.old_logprob - 0.5, 9.0)
    assert batch_metrics(batch) == {
        "positive_ig_rate": 1.0,
        "ig_per_session": 0.25,
        "engine_logprob_diff_mean": 0.5,
        "engine_logprob_diff_max": 0.5,
    }


@pytest.mark.parametrize(
    ("options", "rates"),
    [
        ({}, [1, 1, 1, 1]),
        ({"warmup_updates": 2}, [0.5, 1, 1, 1]),
        ({"schedule": "linear"}, [1, 0.75, 0.5, 0.25]),
        ({"schedule": "linear", "warmup_updates": 2}, [0.5, 1, 1, 0.5]),
        ({"schedule": "cosine"}, [1, 0.853553, 0.5, 0.146447]),
    ],
)
def test_learning_rates_by_hand(options, rates):
    config = parse_config({"steps": 2, "optimizer": {"lr": 1.0, "epochs": 2, **options}})
    optimizer, schedule = make_optimizer(torch.nn.Linear(1, 1), config)
    seen = []
    for _ in range(4):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert seen == pytest.approx(rates, abs=1e-6)
