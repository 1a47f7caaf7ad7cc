"""A scripted expert that speaks the agents' protocol: what the demo's warm-start learns from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from mosaic.agents import prompts
from mosaic.agents.chat import ChatFormat
from mosaic.agents.protocol import ToolCall, render_call
from mosaic.rollout.engine import Generation, GenerationRequest
from mosaic.tasks import Task

_SUMMARISER = prompts.summariser_messages("")[0]["content"]
_LIVE_SUMMARY = prompts.live_instruction(0).partition(".")[0]
_CHILD = prompts.child_prompt("").partition("\n")[0]


class ExpertEngine:
    """Answers every request of one atlas task's rollout as its `path` and `subtasks` say (see mosaic.tasks.atlas).

    It keeps no state: what was done is read off the context, so that a discarded turn is simply done again and a new
    session goes on from the summary.
    """

    weights_version = 0

    def __init__(self, task: Task, chat: ChatFormat, *, forks: bool):
        self.task, self.chat, self.forks = task, chat, forks

    @contextmanager
    def running(self) -> Iterator[None]:
        yield

    waiting = running

    async def generate(self, request: GenerationRequest) -> Generation:
        reply = self.chat.tokenizer(self.reply(self.chat.decode(request.token_ids)), add_special_tokens=False)[
            "input_ids"
        ]
        ids = [*reply, self.chat.end_of_turn][: request.max_new_tokens]
        finished = ids[-1] == self.chat.end_of_turn
        return Generation(ids, [0.0] * len(ids), "stop" if finished else "length", self.weights_version)

    def reply(self, context: str) -> str:
        """The turn that follows `context`."""
        path, answer = self._assignment(context)
        last_message = context[context.rfind("<|im_start|>user") :]
        if _SUMMARISER in context or _LIVE_SUMMARY in last_message:
            return self._summary(path, context)
        if prompts.FORCED_ANSWER in last_message:
            return f"<answer>{answer}</answer>"
        if self.forks and _CHILD not in context and self.task.metadata.get("subtasks"):
            return self._lead(context, answer)
        step = next((step for step in path if not self._done(step, context)), None)
        return _conclusion(path[-1:], answer) if step is None else self._call(step["tool"], step["arguments"])

    def _assignment(self, context: str) -> tuple[Sequence[Mapping[str, Any]], str]:
        """The path and the answer of the task that this context is about: the whole, or a subagent's part."""
        if _CHILD in context:
            for part in self.task.metadata["subtasks"]:
                if prompts.child_prompt(part["question"]) in context:
                    return part["path"], part["answers"][0]
        return self.task.metadata["path"], self.task.answers[0]

    def _lead(self, context: str, answer: str) -> str:
        parts = self.task.metadata["subtasks"]
        first = self.task.metadata["path"][: self.task.metadata["fork_after"]]
        step = next((step for step in first if not self._done(step, context)), None)
        if step is not None:
            return self._call(step["tool"], step["arguments"])
        if "<subagent_results>" not in context:
            return self._call("fork", {"subagents": [{"task": part["question"]} for part in parts]})
        return _conclusion([part["path"][-1] for part in parts], answer)

    def _done(self, step: Mapping[str, Any], context: str) -> bool:
        return step["finding"] in context or self._call(step["tool"], step["arguments"]) in context

    def _summary(self, path: Sequence[Mapping[str, Any]], context: str) -> str:
        found = [step["finding"] for step in path if step["finding"] in context or step["evidence"] in context]
        left = [step for step in path if step["finding"] not in found]
        following = f"Next: {left[0]['tool']} {' '.join(left[0]['arguments'].values())}." if left else "Next: answer."
        return f"<summary>{' '.join([*found, following])}</summary>"

    def _call(self, name: str, arguments: Mapping[str, Any]) -> str:
        return render_call(
            ToolCall(name, dict(arguments)), "xml" if self.chat.supports_tools else self.chat.tool_format
        )


def _conclusion(steps: Sequence[Mapping[str, Any]], answer: str) -> str:
    return f"{' '.join(step['finding'] for step in steps)} <answer>{answer}</answer>"
