"""What an agent can call."""

from __future__ import annotations

from typing import Any, Protocol


class ToolError(Exception):
    """A call that the tool refuses or that failed; its message goes back to the model as the observation."""


class Tool(Protocol):
    """An asynchronous function with an OpenAI-style function schema."""

    name: str
    schema: dict[str, Any]

    async def __call__(self, **arguments: Any) -> str:
        """The observation, plain text; raises ToolError with a message for the model."""
