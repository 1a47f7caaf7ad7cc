"""One step's rollouts: in order, judged, kept whole or dropped with a reason, whatever finishes first."""

from __future__ import annotations

import asyncio
import random
from contextlib import contextmanager

import pytest

import mosaic.rollout.collect
from mosaic.agents.chat import ChatFormat
from mosaic.config import parse_config
from mosaic.models import tiny_policy
from mosaic.rewards import ExactMatchJudge, JudgeError
from mosaic.rollout.collect import collect
from mosaic.rollout.engine import Generation
from mosaic.rollout.hf import HFEngine
from mosaic.tasks import Task
from tests.mosaic.scripted import tools

TASKS = [Task(str(i), f"Question {i}?", (f"answer {i}",)) for i in range(3)]


@pytest.fixture(scope="module")
def chat(tokenizer):
    return ChatFormat(tokenizer, tool_format="hermes")


def config(**rollout):
    agent = {"session_limit": 500, "reserve": 60, "max_turn_tokens": 20, "max_turns": 3, "summary_tokens": 20}
    return parse_config({"rollout": {"group_size": 2, **rollout}, "agent": agent})


def run(engine, chat, judge=None, **options):
    done = []
    options = {"config": config(), "seed": 5, **options}
    trajectories, dropped = asyncio.run(
        collect(
            TASKS,
            engine=engine,
            chat=chat,
            tools=tools(),
            judge=judge or ExactMatchJudge(),
            on_done=lambda: done.append(1),
            **options,
        )
    )
    assert len(done) == len(trajectories) + dropped.total() == 3 * options["config"].rollout.group_size
    return trajectories, dropped


class Answering:
    """Answers each question with its own answer, and names the rollout in a word before it."""

    weights_version = 0

    def __init__(self, chat, *, silent=(), broken=()):
        self.chat, self.silent, self.broken = chat, silent, broken

    @contextmanager
    def running(self):
        yield

    waiting = running

    async def generate(self, request):
        prompt, rollout = request.order[:2]
        for _ in range(7 * (3 - prompt) + rollout):  # the last prompt is the first to be done
            await asyncio.sleep(0)
        text = f"{prompt}-{rollout} <answer>answer {prompt if rollout == 0 else 'no'}</answer>"
        ids = [*self.chat.tokenizer(text)["input_ids"], self.chat.end_of_turn]
        if (prompt, rollout) in self.silent:
            ids = []
        logprobs = [None if (prompt, rollout) in self.broken else -0.5] * len(ids)
        return Generation(ids, logprobs, "stop")


def names(trajectories):
    return [(t.prompt_id, t.metadata["answer"], t.reward) for t in trajectories]


def test_order_and_rewards(chat):
    trajectories, dropped = run(Answering(chat), chat)
    expected = [(str(i), f"answer {word}", reward) for i in range(3) for word, reward in ((i, 1.0), ("no", 0.0))]
    assert names(trajectories) == expected
    assert not dropped


@pytest.mark.parametrize(
    ("scenarios", "dealt"),
    [(["single"], "sss"), (["compaction", "forking"], "cfc"), (["forking", "single", "compaction"], "fsc")],
)
def test_a_group_has_one_scenario_and_they_take_turns(chat, scenarios, dealt):
    trajectories, _ = run(Answering(chat), chat, config=config(scenarios=scenarios, group_size=3))
    seen = [trajectory.metadata["scenario"][0] for trajectory in trajectories]
    assert seen == [letter for letter in dealt for _ in range(3)]


def test_what_the_engine_spoils_is_dropped_and_counted(chat):
    engine = Answering(chat, silent=[(0, 1)], broken=[(1, 0), (2, 1)])
    trajectories, dropped = run(engine, chat)
    assert [t.prompt_id for t in trajectories] == ["0", "1", "2"]
    assert dropped == {
        "the engine returned a log-prob that is None, NaN or infinite": 2,
        "the engine returned no tokens, or not one log-prob for each": 1,
    }


def test_what_the_judge_cannot_judge_is_dropped_and_counted(chat):
    async def judge(question, answers, prediction):
        return None if prediction == "answer no" else 0.25

    trajectories, dropped = run(Answering(chat), chat, judge)
    assert [t.reward for t in trajectories] == [0.25] * 3
    assert dropped == {"the judge gave no verdict": 3}


def test_a_judge_that_refuses_everything_ends_the_run(chat):
    async def judge(question, answers, prediction):
        raise JudgeError("check the key")

    with pytest.raises(JudgeError, match="check the key"):
        run(Answering(chat), chat, judge)


@pytest.mark.parametrize("limit", [2, 32])
def test_answers_are_judged_behind_the_rollouts_and_not_all_at_once(chat, monkeypatch, limit):
    """An engine that holds the event loop for minutes would otherwise let a judge's time limits run out."""
    monkeypatch.setattr(mosaic.rollout.collect, "JUDGED_AT_ONCE", limit)
    asked, judging, most = [], 0, 0

    class Engine(Answering):
        async def generate(self, request):
            assert most == 0, "an answer was judged while an agent still sampled"
            asked.append(request)
            return await super().generate(request)

    async def judge(question, answers, prediction):
        nonlocal judging, most
        judging += 1
        most = max(most, judging)
        await asyncio.sleep(0)
        judging -= 1
        return float(question.split()[1][0] in prediction)

    trajectories, _ = run(Engine(chat), chat, judge)
    assert [t.reward for t in trajectories] == [1.0, 0.0] * 3 and len(asked) == 6 and most == min(limit, 6)


class Late(HFEngine):
    """Lets other coroutines run, for a random while, before a request is made: what else is going on is chance."""

    def __init__(self, *arguments, seed, **options):
        super().__init__(*arguments, **options)
        self.chance = random.Random(seed)

    async def generate(self, request):
        for _ in range(self.chance.randrange(12)):
            await asyncio.sleep(0)
        return await super().generate(request)


def test_tokens_do_not_depend_on_the_scheduling(tokenizer, chat):
    model = tiny_policy(tokenizer)
    settings = config(scenarios=["compaction", "forking", "single"])

    def sample(seed):
        chance = random.Random(seed)

        async def judge(question, answers, prediction):
            for _ in range(chance.randrange(9)):
                await asyncio.sleep(0)
            return 0.0

        return run(Late(model, max_batch_size=4, seed=seed), chat, judge, config=settings)[0]

    first = sample(0)
    assert sum(len(t.sessions[0].turns()) > 1 for t in first) > 0
    assert len({tuple(t.sessions[0].response_ids) for t in first}) == 6  # every rollout has a stream of its own
    for seed in (1, 2):
        assert sample(seed) == first
    assert run(HFEngine(model, max_batch_size=4), chat, config=settings)[0] == first


def test_another_seed_samples_other_tokens(tokenizer, chat):
    engine = HFEngine(tiny_policy(tokenizer))
    first, second = (run(engine, chat, seed=seed)[0] for seed in (1, 2))
    assert all(a.sessions[0].response_ids != b.sessions[0].response_ids for a, b in zip(first, second))
