"""Small things to train on: a tiny policy's folder, settings that fit it, and hand-made trajectories."""

from __future__ import annotations

import json
import random
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mosaic.agents import prompts
from mosaic.config import RunConfig, parse_config
from mosaic.models import tiny_policy
from mosaic.tasks.atlas import corpus
from mosaic.tools.local import Document, local_tools
from mosaic.trajectory import Session, SessionType, Trajectory

QUESTIONS = [
    {"id": "a", "question": "What is the capital of France?", "answers": ["Paris", "City of Light"]},
    {"id": "b", "question": "What is the capital of Estonia?", "answer": "Tallinn"},
    {"id": "c", "question": "What is the capital of Peru?", "answer": "Lima"},
]


def make_tools(config: RunConfig):
    """Stands in for mosaic.train.make_tools: an index of one document is made at once."""
    return local_tools([Document("https://france.example", "France", "France. Capital: Paris.")])


@lru_cache(maxsize=1)
def small_tokenizer() -> PreTrainedTokenizerFast:
    """ChatML with a vocabulary of 1,000, learnt from what the agents read: with so small a head, runs take seconds."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = [document.text for document in corpus()[::20]]
    texts += [prompts.system_prompt(max_children=most) for most in (None, 3)] * 20
    special = ["<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1000, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=special, eos_token=special[1])
    fast.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return fast


def write_policy(folder: Path) -> Path:
    """The folder of a tiny random policy."""
    tokenizer = small_tokenizer()
    tiny_policy(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_tasks(folder: Path) -> Path:
    path = folder / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    return path


def settings(folder: Path, policy: Path, **changes: Any) -> dict[str, Any]:
    """A whole run in seconds: two groups of two, few and short turns. `changes` replace keys of sections."""
    tree: dict[str, Any] = {
        "output": str(folder / "run"),
        "steps": 2,
        "model": {"path": str(policy), "precision": "fp32"},
        "task": {"source": str(write_tasks(folder))},
        "rollout": {"prompts": 2, "group_size": 2, "scenarios": ["compaction", "forking"], "cache_tokens": 4096},
        "agent": {
            "session_limit": 800,
            "reserve": 64,
            "max_turn_tokens": 12,
            "max_turns": 2,
            "max_format_errors": 1,
            "summary_tokens": 12,
            "tool_format": "hermes",
        },
        "optimizer": {"lr": 1e-3, "epochs": 2, "micro_batch_tokens": 2048},
    }
    for key, value in changes.items():
        tree[key] = {**tree.get(key, {}), **value} if isinstance(value, dict) else value
    return tree


def small_config(folder: Path, policy: Path, **changes: Any) -> RunConfig:
    return parse_config(settings(folder, policy, **changes))


def with_rewards(collect):
    """`mosaic.train.collect`, with rewards that vary inside each group: a random policy never earns one."""

    async def collect_rewarded(*arguments, **options):
        trajectories, dropped = await collect(*arguments, **options)
        for at, trajectory in enumerate(trajectories):
            trajectory.reward = float(at % 2)
        return trajectories, dropped

    return collect_rewarded


def made_trajectories(vocabulary: int = 1000, seed: int = 0) -> list[Trajectory]:
    """A compaction chain, a fork with two children, and two single sessions of one more prompt; random tokens."""
    rng = random.Random(seed)

    def session(type: SessionType, prompt: int, *runs: int, **options: Any) -> Session:
        """`runs`: lengths that alternate between the policy and the environment."""
        mask = [at % 2 == 0 for at, length in enumerate(runs) for _ in range(length)]
        ids = [[rng.randrange(vocabulary) for _ in range(length)] for length in (prompt, len(mask))]
        return Session(type, *ids, mask, [-rng.random() if sampled else None for sampled in mask], **options)

    normal, compaction, subagent = SessionType.NORMAL, SessionType.COMPACTION, SessionType.SUBAGENT
    chain = [
        session(normal, 7, 5, 4, 6, 3),
        session(compaction, 9, 5, temperature=0.5, parent=0),
        session(normal, 6, 4, terminal=True, parent=1),
    ]
    fork = [
        session(subagent, 5, 3, 2, 4, parent=2, fork_index=0),
        session(subagent, 4, 6, parent=2, fork_index=0),
        session(normal, 8, 5, 9, 3, terminal=True),
    ]
    return [
        Trajectory("chain", chain, reward=1.0, answers=("Paris",)),
        Trajectory("fork", fork, reward=0.0, answers=("Lima",), metadata={"overlong": True}),
        Trajectory("single", [session(normal, 3, 1, terminal=True)], reward=1.0, answers=("Rome",)),
        Trajectory("single", [session(normal, 3, 30, 2, 8, terminal=True)], reward=0.0, answers=("Rome",)),
    ]
