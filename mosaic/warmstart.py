"""The demo's warm-start: a LoRA adapter trained on a scripted expert's trajectories, so that the model speaks the
protocol (calls, forks, summaries, answers) well enough for rewards to vary."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch

from mosaic.agents import SCENARIOS
from mosaic.agents.chat import ChatFormat
from mosaic.batch import Batch, pack
from mosaic.checkpoint import derive_seed, seed_everything
from mosaic.config import AgentConfig
from mosaic.expert import ExpertEngine
from mosaic.models import head, load_policy
from mosaic.progress import Progress
from mosaic.rewards import ExactMatchJudge
from mosaic.tasks import atlas
from mosaic.tools.local import local_tools
from mosaic.trajectory import Trajectory
from mosaic.update import packed_hidden
from mosaic_kernels import linear_logprob

SHIPPED = Path(__file__).parent / "warmstart_adapter"
RANK = 8
PEAK_LR = 1e-3
TRAJECTORIES_PER_UPDATE = 3


def check_adapter(adapter: str) -> Path:
    """The folder of a LoRA adapter that can be merged; "warmstart" names the shipped one.

    Raises:
        FileNotFoundError: the folder holds no adapter.
        ImportError: the package peft is missing.
    """
    folder = SHIPPED if adapter == "warmstart" else Path(adapter)
    if not (folder / "adapter_config.json").is_file():
        raise FileNotFoundError(
            f"adapter {str(folder)!r} is no folder with an adapter_config.json: give a LoRA adapter's folder"
        )
    import peft  # noqa: F401

    return folder


def merge_adapter(model: torch.nn.Module, adapter: str) -> torch.nn.Module:
    """`model` with a LoRA adapter's update added to its weights; raises as `check_adapter`."""
    folder = check_adapter(adapter)
    from peft import PeftModel

    merged = PeftModel.from_pretrained(model, str(folder)).merge_and_unload()
    return merged.requires_grad_(True)  # peft froze what it put the adapter on


def roomier(agent: AgentConfig) -> AgentConfig:
    """`agent` with the limits under which the shipped adapter was trained: a little above the demo's, so that the
    expert's subagents, which cannot compact, are rarely cut short."""
    return agent.model_copy(update={"session_limit": 704, "reserve": 128})


def expert_trajectories(
    chat: ChatFormat, agent: AgentConfig, *, seed: int, hops: Collection[int] = (1, 2, 3)
) -> Iterator[Trajectory]:
    """Trajectories of the scripted expert on train tasks that end in an answer of its own accord, and a right one;
    scenarios take turns, without end."""
    tools, judge = local_tools(), ExactMatchJudge()
    tasks = atlas.tasks("train", seed=seed, hops=hops)
    accepted = 0
    for number in itertools.count():
        task, scenario = tasks[number % len(tasks)], ("compaction", "forking")[accepted % 2]
        rollout = SCENARIOS[scenario](
            task,
            engine=ExpertEngine(task, chat, forks=scenario == "forking"),
            chat=chat,
            tools=tools,
            config=agent,
            seed=derive_seed(seed, "expert", number),
            prompt_index=number,
            rollout_index=0,
        )
        trajectory = asyncio.run(rollout)
        if isinstance(trajectory, Trajectory):
            trajectory.reward = asyncio.run(judge(task.question, task.answers, trajectory.metadata["answer"]))
            forced = any(key.startswith("forced") for key in trajectory.metadata["counts"])
            if trajectory.reward == 1.0 and not forced:
                accepted += 1
                yield trajectory


def train_adapter(
    output: Path, *, agent: AgentConfig, hops: Collection[int], seed: int, updates: int, progress: Progress
) -> None:
    """Trains a rank-8 LoRA adapter of SmolLM2 by maximum likelihood of the expert's policy tokens and saves it."""
    from peft import LoraConfig, get_peft_model

    seed_everything(seed, "warmstart")
    model, tokenizer = load_policy("smollm2")
    chat = ChatFormat(tokenizer, tool_format=agent.tool_format)
    model = get_peft_model(
        model, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=PEAK_LR, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LR, total_steps=updates, pct_start=0.1)
    trajectories = expert_trajectories(chat, agent, seed=seed, hops=hops)
    model.train()
    with progress.stage("warm-start", updates) as advance:
        for _ in range(updates):
            batch = pack([next(trajectories) for _ in range(TRAJECTORIES_PER_UPDATE)])
            loss = 0.0
            for micro in batch.micro_batches(2048):
                part = -_logprob(model, micro).sum() / batch.mask.sum()
                part.backward()
                loss += float(part.detach())
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
            advance()
            progress.console.print(f"loss {loss:.3f}", highlight=False)
    for parameter in parameters:
        parameter.data = parameter.data.to(torch.bfloat16)
    model.peft_config["default"].base_model_name_or_path = "smollm2"  # not the folder it had on this machine
    model.save_pretrained(output)
    facts = {
        "command": f"mosaic warmstart --output {output.name} --seed {seed} --updates {updates}",
        "seed": seed,
        "updates": updates,
        "loss": loss,
    }
    (output / "origin.json").write_text(json.dumps({**facts, "agent": agent.model_dump(mode="json")}, indent=2) + "\n")


def _logprob(model: Any, batch: Batch) -> torch.Tensor:
    weight, bias, softcap = head(model)
    hidden = packed_hidden(model, batch, None)
    return linear_logprob(hidden, weight, batch.target, bias=bias, softcap=softcap, mask=batch.mask).logprob
