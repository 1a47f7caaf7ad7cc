"""The scripted expert solves real tasks in the settings of the warm-start, and what it does can be learnt from."""

from __future__ import annotations

import asyncio
import itertools
import json

import pytest
import torch

from mosaic.agents import SCENARIOS
from mosaic.agents.chat import ChatFormat
from mosaic.demo import demo_config
from mosaic.expert import ExpertEngine
from mosaic.models import load_policy, tiny_policy
from mosaic.rewards import ExactMatchJudge
from mosaic.tasks import atlas
from mosaic.tools.local import local_tools
from mosaic.trajectory import SessionType
from mosaic.warmstart import check_adapter, expert_trajectories, merge_adapter, roomier, train_adapter


@pytest.fixture(scope="module")
def settings():
    config = demo_config("unused")
    return config.model_copy(update={"agent": roomier(config.agent)})


@pytest.fixture(scope="module")
def played(tokenizer, settings):
    """20 trajectories of the demo's tasks in each scenario."""
    chat, tools = ChatFormat(tokenizer, tool_format=settings.agent.tool_format), local_tools()
    tasks = atlas.tasks("train", seed=3, count=20, hops=settings.task.hops)

    async def play(scenario, at, task):
        return await SCENARIOS[scenario](
            task,
            engine=ExpertEngine(task, chat, forks=scenario == "forking"),
            chat=chat,
            tools=tools,
            config=settings.agent,
            seed=0,
            prompt_index=at,
            rollout_index=0,
        )

    return {
        scenario: [(task, asyncio.run(play(scenario, at, task))) for at, task in enumerate(tasks)]
        for scenario in ("compaction", "forking")
    }


@pytest.mark.parametrize("scenario", ["compaction", "forking"])
def test_the_answer_is_right(played, scenario):
    judge = ExactMatchJudge()
    for task, trajectory in played[scenario]:
        assert asyncio.run(judge(task.question, task.answers, trajectory.metadata["answer"])) == 1.0
        assert trajectory.metadata["counts"]["format_errors"] == trajectory.metadata["counts"]["tool_errors"] == 0


def test_it_compacts_and_forks_most_of_the_time(played):
    compacted = [t for _, t in played["compaction"] if t.metadata["counts"]["compactions"]]
    forked = [t for _, t in played["forking"] if t.metadata["counts"]["forks"]]
    assert len(compacted) >= 12 and len(forked) >= 12
    assert all(t.sessions[1].type is SessionType.COMPACTION for t in compacted)
    assert all(t.metadata["counts"]["failed_compactions"] == 0 for t in compacted)
    assert all(t.sessions[0].type is SessionType.SUBAGENT for t in forked)
    assert all(2 <= t.metadata["counts"]["subagents"] <= 3 for t in forked)


def test_every_session_keeps_its_limit(played, settings):
    for scenario in played.values():
        for _, trajectory in scenario:
            assert all(len(s.token_ids) <= settings.agent.session_limit for s in trajectory.sessions)


def test_what_is_learnt_from_ends_right_and_of_its_own_accord(tokenizer, settings):
    chat = ChatFormat(tokenizer, tool_format="hermes")
    trajectories = list(itertools.islice(expert_trajectories(chat, settings.agent, seed=0), 8))
    assert {t.metadata["scenario"] for t in trajectories} == {"compaction", "forking"}
    for trajectory in trajectories:
        assert trajectory.reward == 1.0 and trajectory.metadata["end_reason"] == "answer"
        assert not any(key.startswith("forced") for key in trajectory.metadata["counts"])
    assert trajectories == list(itertools.islice(expert_trajectories(chat, settings.agent, seed=0), 8))


def test_adapters_that_are_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"adapter '.*' is no folder with an adapter_config.json"):
        check_adapter(str(tmp_path))
    with pytest.raises(FileNotFoundError, match="give a LoRA adapter's folder"):
        load_policy(
            tmp_path / "no_model_either", adapter=str(tmp_path / "none")
        )  # refused before the model is looked for


def test_merging_adds_the_adapters_update(tmp_path):
    peft = pytest.importorskip("peft")
    model = tiny_policy(100)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    lora = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, lora)
    adapted.save_pretrained(tmp_path)
    layer = adapted.base_model.model.model.layers[0].self_attn.q_proj
    update = 2 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    model = merge_adapter(tiny_policy(100), str(tmp_path))
    assert all(parameter.requires_grad for parameter in model.parameters())  # peft freezes what it adapts
    merged = model.state_dict()
    name = "model.layers.0.self_attn.q_proj.weight"
    torch.testing.assert_close(merged[name], before[name] + update)
    assert update.abs().max() > 0
    assert merged.keys() == before.keys()  # a plain model again
    assert all(torch.equal(merged[key], before[key]) for key in before if "q_proj" not in key)


@pytest.mark.slow
def test_the_warm_start_trains_an_adapter_of_the_real_model(tmp_path, smollm2, settings):
    from mosaic.progress import Progress

    train_adapter(
        tmp_path / "adapter", agent=settings.agent, hops=(2,), seed=0, updates=2, progress=Progress(quiet=True)
    )
    origin = json.loads((tmp_path / "adapter" / "origin.json").read_text())
    assert (origin["seed"], origin["updates"]) == (0, 2) and origin["loss"] > 0
    assert origin["agent"]["session_limit"] == settings.agent.session_limit
    plain, _ = load_policy(smollm2)
    merged, _ = load_policy(smollm2, adapter=str(tmp_path / "adapter"))
    moved = {n for n, w in plain.state_dict().items() if not torch.equal(w, merged.state_dict()[n])}
    assert moved and all("proj" in name for name in moved)
