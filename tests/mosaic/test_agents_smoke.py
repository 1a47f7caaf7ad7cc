"""Every scenario once with a real model: the one place where agents, engine, tools and tasks meet untouched."""

from __future__ import annotations

import asyncio
import math

import pytest

from mosaic.agents import SCENARIOS
from mosaic.agents.chat import ChatFormat
from mosaic.models import load_policy
from mosaic.rollout.hf import HFEngine
from mosaic.tools.local import Document, local_tools
from tests.mosaic.scripted import TASK, config

NARVA = Document("https://narva.example", "Narva", "The Narva is a river. It flows into the Gulf of Finland.")


@pytest.mark.slow
def test_the_real_model_plays_every_scenario(smollm2):
    model, tokenizer = load_policy(smollm2, "bf16")
    chat = ChatFormat(tokenizer)

    async def play(run):
        engine = HFEngine(model)
        options = dict(engine=engine, chat=chat, tools=local_tools([NARVA]), seed=1, rollout_index=0, config=run)
        return await asyncio.gather(
            *(rollout(TASK, prompt_index=at, **options) for at, rollout in enumerate(SCENARIOS.values()))
        )

    limits = config(session_limit=400, reserve=60, max_turn_tokens=16, summary_tokens=16, max_turns=2)
    trajectories = asyncio.run(play(limits))
    assert [trajectory.metadata["scenario"] for trajectory in trajectories] == list(SCENARIOS)
    for trajectory in trajectories:
        assert trajectory.sessions[-1].terminal and trajectory.metadata["counts"]["turns"] > 0
        for session in trajectory.sessions:
            assert len(session.token_ids) <= 400
            logprobs = [logprob for logprob in session.response_logprobs if logprob is not None]
            assert len(logprobs) == session.num_policy_tokens and all(math.isfinite(x) for x in logprobs)
    assert asyncio.run(play(limits)) == trajectories  # same seeds, same tokens
