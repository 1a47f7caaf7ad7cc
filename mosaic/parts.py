"""What a configuration names, made: tasks, tools, judge and rollout engine."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from mosaic.checkpoint import list_checkpoints
from mosaic.config import ConfigError, RunConfig
from mosaic.rewards import ExactMatchJudge, Judge, LLMJudge
from mosaic.rollout.engine import RolloutEngine
from mosaic.rollout.hf import HFEngine
from mosaic.tasks import Task
from mosaic.tools import Tool


def make_tasks(config: RunConfig) -> Sequence[Task]:
    """The tasks of `config.task`, in a fixed order."""
    if config.task.source == "atlas":
        from mosaic.tasks import atlas

        return atlas.tasks(config.task.split, seed=config.seed, hops=config.task.hops)
    return read_jsonl(Path(config.task.source))


def read_jsonl(path: Path) -> list[Task]:
    """Tasks from a JSONL file: question (text), answers (list of text) or answer (text), optional id."""
    try:
        # Not splitlines(): JSON strings may hold U+2028 and its like, which are no line ends of a JSONL file.
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ConfigError(f"task.source: cannot read {path}: {error.strerror}; give atlas or a JSONL file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"task.source: {path} is no text in UTF-8; give atlas or a JSONL file") from None
    tasks: dict[str, Task] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"task.source: {path}, line {number}"
        try:
            row = json.loads(line)
        except ValueError:
            raise ConfigError(f"{where}: no valid JSON") from None
        if not isinstance(row, dict):
            raise ConfigError(f"{where}: must be an object with question and answers, got {type(row).__name__}")
        field = "answers" if "answers" in row or "answer" not in row else "answer"
        answers = row.get("answers") if field == "answers" else [row["answer"]]
        if not isinstance(row.get("question"), str) or not row["question"].strip():
            raise ConfigError(f"{where}: field question must be a non-empty text, got {row.get('question')!r}")
        if not isinstance(answers, list) or not answers or not all(isinstance(a, str) and a.strip() for a in answers):
            wanted = "a list of non-empty texts" if field == "answers" else "a non-empty text"
            raise ConfigError(f"{where}: field {field} must be {wanted}, got {row.get(field)!r}")
        name = row.get("id", number)
        if not isinstance(name, (str, int)) or str(name) in tasks:
            raise ConfigError(f"{where}: field id must be a text or whole number that no line before has, got {name!r}")
        tasks[str(name)] = Task(str(name), row["question"], tuple(answers))
    if not tasks:
        raise ConfigError(f"task.source: {path} holds no task; each line is an object with question and answers")
    return list(tasks.values())


def make_tools(config: RunConfig) -> dict[str, Tool]:
    """The agent's tools; in this version search and visit over the embedded corpus."""
    from mosaic.tools.local import local_tools

    return local_tools()


def make_judge(config: RunConfig) -> Judge:
    if config.judge.kind == "exact":
        return ExactMatchJudge()
    try:
        return LLMJudge(config.judge.base_url, config.judge.model, thinking=config.judge.thinking)
    except ValueError as error:
        raise ConfigError(f"judge.{error}") from None


def check_context(model: torch.nn.Module, config: RunConfig, *, probe_tokens: int = 0) -> None:
    """Raises ConfigError unless a session, and `probe_tokens` behind it, fit the model's context."""
    context = model.config.get_text_config().max_position_embeddings
    if config.agent.session_limit + probe_tokens > context:
        behind = f" and {probe_tokens} tokens of a probe" if probe_tokens else ""
        raise ConfigError(
            f"agent.session_limit: {config.agent.session_limit} tokens{behind} exceed the model's context of "
            f"{context}; give at most {context - probe_tokens}"
        )


def make_engine(model: torch.nn.Module, config: RunConfig) -> RolloutEngine:
    """A Hugging Face engine with weights of its own, in the run's precision."""
    sampler = copy.deepcopy(model).requires_grad_(False)
    if config.autocast_dtype is not None:
        sampler = sampler.to(config.autocast_dtype)
    return HFEngine(sampler, max_batch_size=config.rollout.max_batch_size, cache_tokens=config.rollout.cache_tokens)


def make_decoder(directory: Path) -> Callable[[Sequence[int]], str] | None:
    """Token ids to text as the run's newest checkpoint reads them; None without a checkpoint."""
    from transformers import AutoTokenizer

    checkpoints = list_checkpoints(directory / "checkpoints")
    return AutoTokenizer.from_pretrained(checkpoints[-1] / "policy").decode if checkpoints else None
