"""The interface between agents and whatever samples tokens for them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor


@dataclass(frozen=True)
class GenerationRequest:
    """One continuation to sample.

    Args:
        token_ids: the exact context.
        max_new_tokens: most tokens to sample, the stop token included.
        temperature: of the sampling distribution; > 0.
        seed: of this request's own random stream; the same request with the same seed, weights and batch gives the
            same tokens.
        stop_token_ids: sampling ends after one of these; the sampled stop token is part of the result.
        order: where the request stands in a lock-step batch (ids of prompt, rollout, session, turn), so that batches
            do not depend on the order in which agents happened to ask.
    """

    token_ids: list[int]
    max_new_tokens: int
    temperature: float
    seed: int
    stop_token_ids: tuple[int, ...]
    order: tuple[int, ...] = ()


@dataclass(frozen=True)
class Generation:
    """What was sampled.

    Args:
        token_ids: the sampled tokens, a sampled stop token included.
        logprobs: of each sampled token under the sampling distribution (after temperature).
        finish_reason: "stop" (a stop token was sampled) or "length" (max_new_tokens was reached).
        weights_version: of the weights that sampled it.
    """

    token_ids: list[int]
    logprobs: list[float | None]
    finish_reason: Literal["stop", "length"]
    weights_version: int = 0


class RolloutEngine(Protocol):
    """Samples tokens; agents run concurrently under asyncio and share one engine."""

    weights_version: int

    async def generate(self, request: GenerationRequest) -> Generation:
        """Samples one continuation."""

    def running(self) -> AbstractContextManager[None]:
        """Entered for as long as an agent may ask for tokens: a lock-step engine runs a batch once every running
        agent has asked."""

    def waiting(self) -> AbstractContextManager[None]:
        """Entered by a running agent while it waits for its children."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replaces the weights in place and forgets every cached key of the old ones."""
