"""A rollout engine that says prepared texts, and tools to go with it: the test double of the agents' tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

from mosaic.agents.protocol import ToolCall, render_call
from mosaic.config import AgentConfig
from mosaic.rollout.engine import Generation, GenerationRequest
from mosaic.tasks import Task

TASK = Task("t1", "Which sea does the Narva flow into?", ("Baltic Sea", "the Baltic"))


def call(name: str, tool_format: str = "xml", **arguments: Any) -> str:
    return render_call(ToolCall(name, arguments), tool_format)


SEARCH = "I look it up. " + call("search", query="Narva river")
ANSWER = "<answer>Baltic Sea</answer>"
SUMMARY = "<summary>The Narva is a river at the Baltic coast.</summary>"


class ScriptedEngine:
    """Says `script[session][n]` at the n-th request of a session (numbered as in the request's order).

    A text is encoded as a policy would write it, with the end-of-turn token behind it; a list of ids is taken as it is.
    An exception is raised. `delays[session]` lets other coroutines run that often before each of its replies.
    """

    weights_version = 3

    def __init__(self, chat, script: dict[int, list[Any]], delays: dict[int, int] | None = None):
        self.chat, self.delays = chat, delays or {}
        self.script = {session: list(lines) for session, lines in script.items()}
        self.requests: list[GenerationRequest] = []
        self.replies: list[Generation | None] = []
        self.agents = self.idle = 0
        self.fewest_active: int | None = None
        self.edit: Callable[[Generation], Generation] = lambda generation: generation

    def policy_ids(self, text: str) -> list[int]:
        return [*self.chat.tokenizer(text, add_special_tokens=False)["input_ids"], self.chat.end_of_turn]

    async def generate(self, request: GenerationRequest) -> Generation:
        assert self.agents - self.idle > 0, "an agent asked without being among the running ones"
        assert request.max_new_tokens > 0
        self.requests.append(request)
        self.replies.append(None)
        at, session = len(self.replies) - 1, request.order[2]
        for _ in range(1 + self.delays.get(session, 0)):
            await asyncio.sleep(0)
        line = self.script[session].pop(0)
        if isinstance(line, Exception):
            raise line
        ids = self.policy_ids(line) if isinstance(line, str) else list(line)
        reason = "stop" if ids[-1] in request.stop_token_ids and len(ids) <= request.max_new_tokens else "length"
        ids = ids[: request.max_new_tokens]
        logprobs = [-0.25 - 0.01 * at for at in range(len(ids))]
        self.replies[at] = self.edit(Generation(ids, logprobs, reason, self.weights_version))
        return self.replies[at]

    @contextmanager
    def running(self):
        self._change(1, 0)
        try:
            yield
        finally:
            self._change(-1, 0)

    @contextmanager
    def waiting(self):
        self._change(0, 1)
        try:
            yield
        finally:
            self._change(0, -1)

    def _change(self, agents: int, idle: int) -> None:
        self.agents += agents
        self.idle += idle
        if self.agents:
            active = self.agents - self.idle
            self.fewest_active = active if self.fewest_active is None else min(active, self.fewest_active)

    def load_weights(self, weights, version):
        raise NotImplementedError


class ScriptedTool:
    """Returns (or raises) what it was given, and remembers its calls."""

    def __init__(self, name: str, parameters: dict[str, str], reply: Any = "A river between Estonia and Russia."):
        self.name, self.reply, self.calls = name, reply, []
        self.schema = {
            "type": "function",
            "function": {
                "name": name,
                "description": f"Does a {name}.",
                "parameters": {
                    "type": "object",
                    "properties": {key: {"type": kind} for key, kind in parameters.items()},
                    "required": list(parameters),
                },
            },
        }

    async def __call__(self, **arguments: Any) -> Any:
        self.calls.append(arguments)
        reply = self.reply(**arguments) if callable(self.reply) else self.reply
        if isinstance(reply, BaseException):
            raise reply
        return reply


def tools(search: Any = "A river between Estonia and Russia.", visit: Any = "The Narva ends in the Gulf of Finland."):
    both = (
        ScriptedTool("search", {"query": "string"}, search),
        ScriptedTool("visit", {"url": "string", "goal": "string"}, visit),
    )
    return {tool.name: tool for tool in both}


def config(**options: Any) -> AgentConfig:
    return AgentConfig(
        **{"session_limit": 1024, "reserve": 128, "max_turn_tokens": 200, "summary_tokens": 100, **options}
    )


def play(rollout, engine, *, tools_=None, seed: int = 7, task: Task = TASK, **options: Any):
    """Runs one rollout to its end."""
    return asyncio.run(
        rollout(
            task,
            engine=engine,
            chat=engine.chat,
            tools=tools() if tools_ is None else tools_,
            config=config(**options),
            seed=seed,
            prompt_index=2,
            rollout_index=1,
        )
    )


def assert_faithful(engine: ScriptedEngine, trajectory) -> None:
    """Every policy run of every session was sampled with exactly the tokens that stand before it, and is what the
    engine returned, log-probs included; nothing else carries a log-prob."""
    replies = {tuple(request.token_ids): reply for request, reply in zip(engine.requests, engine.replies, strict=True)}
    for session in trajectory.sessions:
        for start, end in session.turns():
            reply = replies[tuple(session.prompt_ids + session.response_ids[:start])]
            assert session.response_ids[start:end] == reply.token_ids
            assert session.response_logprobs[start:end] == reply.logprobs
        for sampled, logprob in zip(session.response_mask, session.response_logprobs, strict=True):
            assert sampled == (logprob is not None)
