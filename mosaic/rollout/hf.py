"""Rollout engine over a transformers model in this process: lock-step batches, exact and reproducible."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mosaic.models import backbone, head
from mosaic.rollout.attention import attention_window, sampling_mode
from mosaic.rollout.engine import Generation, GenerationRequest
from mosaic.rollout.kv import GROWTH, PrefixCache, RowBuffers, common_prefix

# Rounds of the event loop without news after which every agent is taken to wait for tokens or for the outside.
_QUIET_ROUNDS = 16
# Most prompt tokens of one forward: bounds the attention mask, not the prompt.
_PREFILL_TOKENS = 2048


class HFEngine:
    """Samples from a causal language model of transformers, in this process and thread.

    Lock-step: a batch runs once every agent inside `running()`, those inside `waiting()` left out, has a request
    pending; pending requests are sorted by their `order` and cut into chunks of `max_batch_size`. What is sampled
    depends on the requests and the weights alone, never on the order or the time in which agents asked, so long as an
    agent enters `running()` (and a parent `waiting()`) without waiting for I/O once it is started. Outside of any
    `running()` block, requests made at the same time form a batch.

    Each request has its own random stream, drawn once a token and inverted through the cumulative distribution in
    float64; log-probs are float32, of the very distribution sampled from, whose logits have the model's dtype.
    Between turns the keys and values of finished sequences are kept, and a context that starts like a kept one, or
    like another of its batch, is computed from where they part.

    Args:
        model: a causal language model whose layers are all attention; moved or changed by nobody else while sampling.
        max_batch_size: most rows decoded at once.
        cache_tokens: most tokens whose keys and values are kept between turns (2 * layers * Hkv * D numbers each).

    Raises:
        NotImplementedError: the model has recurrent or chunked layers, or logits that `mosaic.models.head` refuses.
    """

    def __init__(self, model: Any, *, max_batch_size: int = 16, cache_tokens: int = 16384):
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size must be >= 1, got {max_batch_size}")
        if cache_tokens < 0:
            raise ValueError(f"cache_tokens must be >= 0, got {cache_tokens}")
        self.model, self.max_batch_size, self.weights_version = model, max_batch_size, 0
        self._backbone, self._window = backbone(model), attention_window(model)
        head(model)
        self._cache = PrefixCache(cache_tokens)
        self._running = self._waiting = self._news = 0
        self._pending: list[tuple[GenerationRequest, asyncio.Future[Generation]]] = []
        self._watch: asyncio.Task[None] | None = None

    async def generate(self, request: GenerationRequest) -> Generation:
        """Samples one continuation in the next lock-step batch.

        A row whose logits are not finite ends with a token whose log-prob is NaN; the rest of the batch goes on.

        Raises:
            ValueError: the request is empty, or its limits are out of range.
            NotImplementedError: the request is longer than the model's sliding window.
            RuntimeError: more requests are pending than agents are running.
        """
        self._check(request)
        if self._running and len(self._pending) >= self._running - self._waiting:
            raise RuntimeError("generate was called by an agent that is not inside running(), or is inside waiting()")
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._pending.append((request, future))
        self._changed()
        try:
            return await future
        finally:
            if future.cancelled():
                self._pending = [entry for entry in self._pending if entry[1] is not future]
                self._changed()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Entered for as long as an agent may ask for tokens: batches wait for it."""
        self._running += 1
        self._changed()
        try:
            yield
        finally:
            self._running -= 1
            self._changed()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Entered by a running agent while it waits for its children: batches do not wait for it."""
        self._waiting += 1
        self._changed()
        try:
            yield
        finally:
            self._waiting -= 1
            self._changed()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copies weights in, converted to the model's dtype, and forgets the keys and values of the old ones.

        Args:
            weights: (name, tensor) for every parameter, as `named_parameters` or `state_dict` name them. A tensor
                that is the model's own, as when the trainer shares it, is left where it is.
            version: reported by what is sampled from now on.

        Raises:
            ValueError: a name or shape does not fit, or a parameter got no tensor.
            RuntimeError: requests are pending.
        """
        if self._pending:
            raise RuntimeError(f"load_weights was called while {len(self._pending)} requests are pending")
        own = self.model.state_dict(keep_vars=True)
        missing = {id(parameter): name for name, parameter in self.model.named_parameters()}
        self._cache.clear()
        with torch.no_grad():
            for name, tensor in weights:
                if name not in own:
                    raise ValueError(f"weights: the engine's model has no tensor named {name!r}")
                if own[name].shape != tensor.shape:
                    raise ValueError(
                        f"weights: {name} must have shape {list(own[name].shape)}, got {list(tensor.shape)}"
                    )
                if own[name].data_ptr() != tensor.data_ptr():
                    own[name].copy_(tensor)
                missing.pop(id(own[name]), None)
        if missing:
            raise ValueError(
                f"weights: no tensor came for {len(missing)} parameters, {next(iter(missing.values()))} first"
            )
        self.weights_version = version

    def _check(self, request: GenerationRequest) -> None:
        if not request.token_ids:
            raise ValueError("token_ids must not be empty: the first sampled token needs a context")
        if request.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be >= 1, got {request.max_new_tokens}")
        if not request.temperature > 0:
            raise ValueError(f"temperature must be > 0, got {request.temperature}")
        length = len(request.token_ids) + request.max_new_tokens
        if self._window is not None and length > self._window:
            raise NotImplementedError(
                f"a request of {length} tokens exceeds the model's attention window of {self._window}, which this "
                "engine does not mask: lower the session limit, or use the vLLM engine"
            )

    def _changed(self) -> None:
        self._news += 1
        if self._pending and (self._watch is None or self._watch.get_loop().is_closed()):
            self._watch = asyncio.get_running_loop().create_task(self._run_when_quiet())

    async def _run_when_quiet(self) -> None:
        """Runs the pending requests once nothing has moved for some rounds of the event loop: agents that were just
        started, or whose children just ended, have had their turn by then."""
        try:
            while self._pending:
                seen = self._news
                for _ in range(_QUIET_ROUNDS):
                    await asyncio.sleep(0)
                    if self._news != seen:
                        break
                else:
                    if len(self._pending) < self._running - self._waiting:
                        return  # the next request, or the next agent to leave, starts another watch
                    self._run_pending()
        finally:
            self._watch = None

    def _run_pending(self) -> None:
        pending, self._pending = [entry for entry in self._pending if not entry[1].done()], []
        pending.sort(key=lambda entry: (entry[0].order, entry[0].token_ids, entry[0].seed))
        for start in range(0, len(pending), self.max_batch_size):
            chunk = pending[start : start + self.max_batch_size]
            try:
                results = self._generate([request for request, _ in chunk])
            except Exception as error:
                for _, future in chunk:
                    future.set_exception(error)
            else:
                for (_, future), result in zip(chunk, results, strict=True):
                    future.set_result(result)

    def _generate(self, requests: list[GenerationRequest]) -> list[Generation]:
        with torch.inference_mode(), sampling_mode(self.model):
            rows = [_Row(request) for request in requests]
            buffers = RowBuffers(len(rows), max(len(row.token_ids) for row in rows) + GROWTH)
            live: list[_Row] = []
            hidden = []
            for row in rows:
                hidden.append(self._prefill(row, live, buffers))
                live.append(row)
            states = torch.cat(hidden)
            while True:
                self._sample(live, states)
                self._retire(live, buffers)
                if not live:
                    return [row.result(self.weights_version) for row in rows]
                states = self._decode(live, buffers)

    def _prefill(self, row: _Row, earlier: list[_Row], buffers: RowBuffers) -> Tensor:
        """Fills the next row's buffer with its context; the last token's hidden state, [1, H]."""
        context = row.token_ids
        known, layers = self._cache.longest(context)
        shared = [0 if other.broken else common_prefix(context, other.token_ids) for other in earlier]
        if shared and max(shared) > known:
            known = max(shared)
            layers = buffers.read(shared.index(known), known)
        start = min(known, len(context) - 1)  # the last token is run in any case: its hidden state is wanted
        buffers.load(len(earlier), start, layers)
        while start < len(context):
            end = min(start + _PREFILL_TOKENS, len(context))
            buffers.write_row(len(earlier), start, end)
            positions = torch.arange(start, end, device=self.model.device)[None]
            slots = torch.arange(end, device=self.model.device)
            tokens = torch.tensor([context[start:end]], device=self.model.device)
            hidden = self._forward(tokens, positions, slots <= positions[..., None], buffers)
            start = end
        row.broken = not bool(hidden[:, -1].isfinite().all())  # a NaN reaches even the keys before it
        return hidden[:, -1]

    def _decode(self, live: list[_Row], buffers: RowBuffers) -> Tensor:
        """Runs the last token of every live row; hidden states [B, H]."""
        tokens = torch.tensor([row.token_ids[-1:] for row in live], device=self.model.device)
        positions = torch.tensor([[len(row.token_ids) - 1] for row in live], device=self.model.device)
        buffers.write_last(positions[:, 0])
        slots = torch.arange(buffers.get_seq_length(), device=self.model.device)
        return self._forward(tokens, positions, slots <= positions[..., None], buffers)[:, -1]

    def _forward(self, tokens: Tensor, positions: Tensor, visible: Tensor, buffers: RowBuffers) -> Tensor:
        """Hidden states [b, q, H] of tokens [b, q] that see the slots where `visible` [b, q, n] is True."""
        mask = torch.zeros(visible.shape, dtype=self.model.dtype, device=visible.device)
        mask = mask.masked_fill(~visible, torch.finfo(mask.dtype).min)[:, None]  # four dimensions: used as it is
        output = self._backbone(
            input_ids=tokens, position_ids=positions, attention_mask=mask, past_key_values=buffers, use_cache=True
        )
        return output.last_hidden_state

    def _sample(self, live: list[_Row], states: Tensor) -> None:
        """Draws one token for each live row from its hidden state [B, H]."""
        weight, bias, softcap = head(self.model)
        logits = functional.linear(states, weight, bias).float()
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits / logits.new_tensor([row.request.temperature for row in live])[:, None]
        logprobs = logits.log_softmax(dim=-1)
        cumulative = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
        draws = cumulative.new_tensor([[row.random.random()] for row in live]) * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, draws, right=True).clamp(max=logits.shape[1] - 1)
        chosen = logprobs.gather(1, tokens)[:, 0].tolist()
        finite = cumulative[:, -1].isfinite().tolist()
        for row, token, logprob, sound in zip(live, tokens[:, 0].tolist(), chosen, finite, strict=True):
            row.add(token, logprob if sound else float("nan"))

    def _retire(self, live: list[_Row], buffers: RowBuffers) -> None:
        """Takes finished rows out of `live`; the last row takes the place of each, so that live rows stay in front."""
        for at in reversed(range(len(live))):
            row = live[at]
            if row.finish_reason is None:
                continue
            if not row.broken:
                known = len(row.token_ids) - 1  # the last sampled token was never run
                self._cache.keep(row.token_ids[:known], buffers.read(at, known))
            last = live.pop()
            if at < len(live):
                live[at] = last
                buffers.move(len(live), at)


@dataclass
class _Row:
    """A request while it is decoded."""

    request: GenerationRequest
    token_ids: list[int] = field(init=False)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    broken: bool = False

    def __post_init__(self):
        self.token_ids = list(self.request.token_ids)
        self.random = random.Random(self.request.seed)

    def add(self, token: int, logprob: float) -> None:
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        self.broken = logprob != logprob
        if token in self.request.stop_token_ids and not self.broken:
            self.finish_reason = "stop"
        elif self.broken or len(self.logprobs) == self.request.max_new_tokens:
            self.finish_reason = "length"

    def result(self, version: int) -> Generation:
        return Generation(self.token_ids[len(self.request.token_ids) :], self.logprobs, self.finish_reason, version)
