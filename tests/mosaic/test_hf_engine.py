"""The Hugging Face engine: exact against plain forwards, reproducible, lock-step."""

from __future__ import annotations

import asyncio
import math
import random

import pytest
import torch
import transformers

from mosaic.models import load_policy, tiny_policy
from mosaic.rollout.engine import GenerationRequest
from mosaic.rollout.hf import HFEngine
from mosaic.rollout.kv import PrefixCache, RowBuffers

VOCABULARY = 50


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def model():
    return tiny_policy(VOCABULARY)


def context(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=length)


def request(token_ids, *, seed=0, temperature=1.0, max_new_tokens=8, stop=(), order=()):
    return GenerationRequest(list(token_ids), max_new_tokens, temperature, seed, tuple(stop), tuple(order))


def sample(engine, *requests):
    async def together():
        return await asyncio.gather(*(engine.generate(r) for r in requests))

    return asyncio.run(together())


def plain_logprobs(model, token_ids, generated, temperature=1.0):
    """The sampled tokens' log-probs by one forward over the whole sequence, without cache or batch."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*token_ids, *generated]]), use_cache=False).logits[0].float()
    logprobs = (logits / temperature).log_softmax(-1)
    return [float(logprobs[len(token_ids) - 1 + i, token]) for i, token in enumerate(generated)]


def assert_exact(model, requests, generations):
    for r, g in zip(requests, generations, strict=True):
        expected = plain_logprobs(model, r.token_ids, g.token_ids, r.temperature)
        assert g.logprobs == pytest.approx(expected, abs=1e-4)
        assert len(g.token_ids) == len(g.logprobs) <= r.max_new_tokens


def small(family: str, **options):
    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        pad_token_id=None,
        initializer_range=0.2,
        **options,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return getattr(transformers, f"{family}ForCausalLM")(config).eval()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Mistral"])
def test_ragged_batch_equals_plain_forwards(family, attention):
    model = small(family)
    model.set_attn_implementation(attention)
    lengths = [1, 2, 17, 5, 33]
    requests = [
        request(context(i, n), seed=i, temperature=0.5 + 0.3 * i, max_new_tokens=3 + 2 * i, order=[i])
        for i, n in enumerate(lengths)
    ]
    generations = sample(HFEngine(model), *requests)
    assert [len(g.token_ids) for g in generations] == [3, 5, 7, 9, 11]
    assert_exact(model, requests, generations)


def test_soft_capped_logits_and_attention():
    model = small("Gemma2", final_logit_softcapping=1.5, attn_logit_softcapping=0.5, sliding_window=64)
    r = request(context(0, 9))
    model.set_attn_implementation("sdpa")
    with pytest.raises(NotImplementedError, match="loaded with attn_implementation='eager'"):
        sample(HFEngine(model), r)
    model.set_attn_implementation("eager")
    assert_exact(model, [r], sample(HFEngine(model), r))


def test_tiny_temperature_is_the_greedy_continuation(model):
    token_ids = context(3, 12)
    (generation,) = sample(HFEngine(model), request(token_ids, temperature=1e-4, max_new_tokens=10))
    for token in generation.token_ids:
        with torch.no_grad():
            assert token == int(model(input_ids=torch.tensor([token_ids])).logits[0, -1].argmax())
        token_ids = [*token_ids, token]


def test_long_contexts_are_run_in_parts(model, monkeypatch):
    monkeypatch.setattr("mosaic.rollout.hf._PREFILL_TOKENS", 7)
    requests = [request(context(i, n), seed=i, order=[i]) for i, n in enumerate([7, 8, 30])]
    assert_exact(model, requests, sample(HFEngine(model), *requests))


def test_buffers_grow(model, monkeypatch):
    monkeypatch.setattr("mosaic.rollout.kv.GROWTH", 2)
    monkeypatch.setattr("mosaic.rollout.hf.GROWTH", 0)
    requests = [request(context(i, n), seed=i, order=[i], max_new_tokens=9) for i, n in enumerate([3, 6])]
    assert_exact(model, requests, sample(HFEngine(model), *requests))


@pytest.mark.parametrize("max_batch_size", [1, 2, 16])
def test_same_tokens_in_whatever_order_agents_ask(model, max_batch_size):
    requests = [request(context(i, 5 + 3 * i), seed=i, max_new_tokens=4 + i, order=[i // 2, i % 2]) for i in range(5)]
    expected = sample(HFEngine(model, max_batch_size=max_batch_size), *requests)
    for seed in range(4):
        order = random.Random(seed).sample(range(5), 5)
        engine = HFEngine(model, max_batch_size=max_batch_size)

        async def late(r, rounds, engine=engine):
            with engine.running():
                for _ in range(rounds):
                    await asyncio.sleep(0)
                return await engine.generate(r)

        async def together(order=order, late=late):
            return await asyncio.gather(*(late(requests[i], 3 * at) for at, i in enumerate(order)))

        got = asyncio.run(together())
        assert [got[order.index(i)] for i in range(5)] == expected  # tokens and log-probs, to the bit


def test_a_row_does_not_depend_on_its_neighbours(model):
    requests = [request(context(i, 10), seed=i, order=[i]) for i in range(4)]
    together = sample(HFEngine(model), *requests)
    for r, g in zip(requests, together, strict=True):
        (alone,) = sample(HFEngine(model), r)
        assert alone.token_ids == g.token_ids
        assert alone.logprobs == pytest.approx(g.logprobs, abs=1e-5)


def test_seed_decides(model):
    engine = HFEngine(model, cache_tokens=0)
    token_ids = context(0, 6)
    first, again, other = sample(engine, *(request(token_ids, seed=s, order=[i]) for i, s in enumerate([1, 1, 2])))
    assert first.token_ids == again.token_ids != other.token_ids
    (shorter,) = sample(engine, request(token_ids, seed=1, max_new_tokens=3))
    assert shorter.token_ids == first.token_ids[:3]


def test_tokens_are_drawn_from_the_distribution(model):
    token_ids, temperature, count = context(1, 4), 1.7, 400
    requests = [request(token_ids, seed=s, temperature=temperature, max_new_tokens=1, order=[s]) for s in range(count)]
    drawn = [g.token_ids[0] for g in sample(HFEngine(model, max_batch_size=100), *requests)]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([token_ids])).logits[0, -1]
    expected = (logits / temperature).softmax(-1) * count
    observed = torch.bincount(torch.tensor(drawn), minlength=VOCABULARY)
    # 49 degrees of freedom: a chi-square above 100 has a probability below 1e-4, and the seeds are fixed
    assert float(((observed - expected) ** 2 / expected).sum()) < 100


def test_each_request_has_its_own_temperature(model):
    token_ids = context(2, 6)
    requests = [request(token_ids, seed=0, temperature=t, order=[i]) for i, t in enumerate([0.05, 1.0, 5.0])]
    generations = sample(HFEngine(model), *requests)
    assert_exact(model, requests, generations)
    means = [sum(g.logprobs) / len(g.logprobs) for g in generations]
    assert means[0] > means[1] > means[2]


def test_stop_token_is_kept_and_ends_the_row(model):
    token_ids = context(4, 8)
    (free,) = sample(HFEngine(model), request(token_ids, max_new_tokens=12))
    stop = free.token_ids[4]
    first = free.token_ids.index(stop)
    stopped, other = sample(
        HFEngine(model),
        request(token_ids, max_new_tokens=12, stop=[stop, 999], order=[0]),
        request(token_ids, max_new_tokens=12, seed=0, order=[1]),
    )
    assert stopped.token_ids == free.token_ids[: first + 1] and stopped.finish_reason == "stop"
    assert other.token_ids == free.token_ids and other.finish_reason == "length"
    (at_limit,) = sample(HFEngine(model), request(token_ids, max_new_tokens=first + 1, stop=[stop]))
    assert at_limit.finish_reason == "stop"


def count_forwards(model):
    """Tokens that each forward of the decoder ran."""
    counts = []
    model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: counts.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    return counts


def test_next_turn_runs_only_what_is_new(model):
    engine = HFEngine(model)
    counts = count_forwards(model)
    (first,) = sample(engine, request(context(0, 20), max_new_tokens=5))
    assert counts == [20, 1, 1, 1, 1]
    turn = [*context(0, 20), *first.token_ids, *context(1, 3)]
    counts.clear()
    hit_request = request(turn, seed=7)
    (hit,) = sample(engine, hit_request)
    assert counts[0] == 4  # the three new tokens, and the last sampled one, which had not been run
    (miss,) = sample(HFEngine(model, cache_tokens=0), hit_request)
    assert hit.token_ids == miss.token_ids
    assert hit.logprobs == pytest.approx(miss.logprobs, abs=1e-5)
    assert_exact(model, [hit_request], [hit])


def test_contexts_of_a_batch_share_what_they_have_in_common(model):
    counts = count_forwards(model)
    system = context(0, 20)
    contexts = [system, [*system, 1, 2, 3], [*system, 1, 2, 4], system]
    requests = [request(c, seed=i, order=[i], max_new_tokens=2) for i, c in enumerate(contexts)]
    generations = sample(HFEngine(model), *requests)
    assert counts == [20, 3, 1, 1, 4]
    assert_exact(model, requests, generations)


def test_finished_rows_are_not_computed(model):
    counts = count_forwards(model)
    requests = [request(context(i, 4), seed=i, max_new_tokens=n, order=[i]) for i, n in enumerate([1, 4, 2])]
    generations = sample(HFEngine(model), *requests)
    assert counts == [4, 4, 4, 2, 1, 1]
    assert_exact(model, requests, generations)


def test_kept_tokens_are_bounded(model):
    engine = HFEngine(model, cache_tokens=30)
    for i in range(5):
        sample(engine, request(context(i, 8), max_new_tokens=4))
        assert engine._cache.num_tokens <= 30
    assert engine._cache.num_tokens == 22


def test_prefix_cache_keeps_what_was_used_last():
    layer = [(torch.zeros(1, 4, 2), torch.zeros(1, 4, 2))]
    cache = PrefixCache(8)
    cache.keep([1, 2, 3, 4], layer)
    cache.keep([5, 6, 7, 8], layer)
    assert cache.longest([1, 2, 9])[0] == 2  # now used last
    cache.keep([0, 0, 0, 0], layer)
    assert cache.longest([5, 6])[0] == 0 and cache.longest([1, 2, 3, 4, 5])[0] == 4
    cache.keep([0] * 9, layer)
    assert cache.num_tokens == 8
    cache.clear()
    assert cache.longest([1, 2]) == (0, []) and cache.num_tokens == 0


def test_prefix_cache_drops_what_a_longer_sequence_holds():
    layer = [(torch.zeros(1, 4, 2), torch.zeros(1, 4, 2))]
    cache = PrefixCache(100)
    cache.keep([1, 2], layer)
    cache.keep([1, 2, 3], layer)
    cache.keep([1, 2], layer)
    assert cache.num_tokens == 3
    cache.keep([], layer)
    assert cache.num_tokens == 3


def test_moved_row_leaves_no_stale_slots():
    buffers = RowBuffers(2, 4)
    buffers.write_row(0, 0, 3)
    nan = torch.full((1, 1, 3, 2), math.nan)
    buffers.update(nan, nan, 0)
    buffers.write_row(1, 0, 1)
    buffers.update(torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2), 0)
    buffers.move(1, 0)
    assert buffers.keys[0][0, 0, :, 0].tolist() == buffers.values[0][0, 0, :, 0].tolist() == [1, 0, 0, 0]


def test_new_weights_change_the_output_there_and_back(model):
    other = tiny_policy(VOCABULARY, seed=1)
    old = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine = HFEngine(model)
    r = request(context(0, 10), temperature=0.01, max_new_tokens=6)
    (before,) = sample(engine, r)

    engine.load_weights(other.named_parameters(), version=1)
    (changed,) = sample(engine, r)
    (fresh,) = sample(HFEngine(other), r)
    assert changed.token_ids == fresh.token_ids != before.token_ids
    assert changed.logprobs == fresh.logprobs  # a kept key of the old weights would show here
    assert (before.weights_version, changed.weights_version, engine.weights_version) == (0, 1, 1)

    engine.load_weights(old.items(), version=2)
    (back,) = sample(engine, r)
    assert (back.token_ids, back.logprobs) == (before.token_ids, before.logprobs)


def test_shared_model_forgets_its_keys(model):
    engine = HFEngine(model)
    r = request(context(0, 10), max_new_tokens=6)
    sample(engine, r)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1.5)  # the trainer's step, on the very tensors
    engine.load_weights(model.named_parameters(), version=1)
    assert_exact(model, [r], sample(engine, r))


def test_weights_are_converted(model):
    engine = HFEngine(tiny_policy(VOCABULARY, dtype=torch.bfloat16))
    engine.load_weights(model.named_parameters(), version=3)
    for name, tensor in engine.model.named_parameters():
        assert torch.equal(tensor, model.get_parameter(name).to(torch.bfloat16))


def test_weights_that_do_not_fit_are_named(model):
    engine = HFEngine(model)
    weights = dict(model.named_parameters())
    with pytest.raises(ValueError, match="no tensor named 'nothing'"):
        engine.load_weights([("nothing", torch.zeros(1))], version=1)
    with pytest.raises(ValueError, match=r"model.norm.weight must have shape \[64\], got \[3\]"):
        engine.load_weights([("model.norm.weight", torch.zeros(3))], version=1)
    del weights["model.norm.weight"]
    with pytest.raises(ValueError, match="no tensor came for 1 parameters, model.norm.weight first"):
        engine.load_weights(weights.items(), version=1)
    assert engine.weights_version == 0


def test_broken_weights_give_nan_and_leave_the_batch_alone(model):
    bad = 7
    with torch.no_grad():
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
        model.get_input_embeddings().weight[bad] = math.nan
    clean = [token for token in context(0, 12) if token != bad]
    engine = HFEngine(model)
    requests = [
        request([*clean, bad], max_new_tokens=5, order=[0]),
        request(clean, max_new_tokens=3, seed=2, order=[1]),
        request([bad], max_new_tokens=1, order=[2]),
    ]
    broken, sound, single = sample(engine, *requests)
    for generation in (broken, single):
        assert len(generation.token_ids) == 1 and generation.finish_reason == "length"
        assert math.isnan(generation.logprobs[0])
    assert bad not in sound.token_ids[:-1]
    assert_exact(model, requests[1:2], [sound])
    assert engine._cache.longest([*clean, bad])[0] == len(clean)  # kept from the sound row
    assert engine._cache.longest([bad])[0] == 0


def test_batches_wait_for_every_running_agent(model):
    engine = HFEngine(model)
    batches = []
    generate = engine._generate
    engine._generate = lambda requests: batches.append([r.order for r in requests]) or generate(requests)

    async def agent(name, turns, delay):
        with engine.running():
            for turn in range(turns):
                await asyncio.sleep(delay)  # a tool that takes its time
                await engine.generate(request(context(name, 5), order=[turn, name], max_new_tokens=1))

    async def together():
        await asyncio.gather(agent(0, 3, 0.0), agent(1, 1, 0.02), agent(2, 2, 0.01))

    asyncio.run(together())
    assert batches == [[(0, 0), (0, 1), (0, 2)], [(1, 0), (1, 2)], [(2, 0)]]


@pytest.mark.parametrize("delay", [0.0, 0.01])
def test_a_waiting_parent_is_not_waited_for(model, delay):
    engine = HFEngine(model)
    batches = []
    generate = engine._generate
    engine._generate = lambda requests: batches.append([r.order for r in requests]) or generate(requests)

    async def ask(*order):
        await engine.generate(request(context(0, 3), order=order, max_new_tokens=1))

    async def agent(name, children):
        with engine.running():
            await ask(name, 0)
            if children:
                with engine.waiting():
                    await asyncio.gather(*(agent(child, grandchildren) for child, grandchildren in children.items()))
            await asyncio.sleep(delay)
            await ask(name, 1)

    async def together():
        await asyncio.gather(agent(1, {11: {111: {}, 112: {}}, 12: {}}), agent(2, {}))

    asyncio.run(together())
    assert batches == [
        [(1, 0), (2, 0)],
        [(2, 1), (11, 0), (12, 0)],
        [(12, 1), (111, 0), (112, 0)],
        [(111, 1), (112, 1)],
        [(11, 1)],
        [(1, 1)],
    ]


def test_an_agent_that_fails_or_is_cancelled_is_not_waited_for(model):
    engine = HFEngine(model)

    async def steady():
        with engine.running():
            return await engine.generate(request(context(0, 3)))

    async def failing():
        with engine.running():
            await asyncio.sleep(0.01)
            raise OSError("a tool broke")

    async def asking_and_waiting():
        with engine.running():
            await engine.generate(request(context(1, 3)))

    async def together():
        blocked = asyncio.ensure_future(failing())
        cancelled = asyncio.ensure_future(asking_and_waiting())
        agent = asyncio.ensure_future(steady())
        await asyncio.sleep(0)
        cancelled.cancel()
        results = await asyncio.gather(blocked, cancelled, agent, return_exceptions=True)
        assert [type(r).__name__ for r in results] == ["OSError", "CancelledError", "Generation"]

    asyncio.run(asyncio.wait_for(together(), timeout=20))
    assert engine._pending == [] and engine._running == 0


def test_a_failed_batch_fails_its_requests_only(model):
    engine = HFEngine(model, max_batch_size=1)
    good, bad = request(context(0, 3), order=[0]), request([VOCABULARY + 5], order=[1])

    async def together():
        return await asyncio.gather(engine.generate(good), engine.generate(bad), return_exceptions=True)

    first, second = asyncio.run(together())
    assert len(first.token_ids) == 8 and isinstance(second, IndexError)


def test_an_agent_that_never_said_it_runs_is_refused(model):
    engine = HFEngine(model)

    async def together():
        with engine.running(), engine.waiting():
            await engine.generate(request(context(0, 3)))

    with pytest.raises(RuntimeError, match="not inside running"):
        asyncio.run(together())


def test_the_models_mode_comes_back(model):
    model.train()
    model.model.layers[0].eval()
    engine = HFEngine(model)
    sample(engine, request(context(0, 4)))
    assert model.training and model.model.layers[1].training and not model.model.layers[0].training
    assert model.config._attn_implementation == "sdpa"
    out = model(input_ids=torch.tensor([context(0, 4)]))
    out.logits.sum().backward()  # nothing of the inference mode is left in the model
    assert model.get_input_embeddings().weight.grad is not None


def test_requests_and_options_are_checked(model):
    engine = HFEngine(model)
    for wrong, message in (
        (request([]), "token_ids must not be empty"),
        (request([1], max_new_tokens=0), "max_new_tokens must be >= 1, got 0"),
        (request([1], temperature=0.0), "temperature must be > 0, got 0.0"),
    ):
        with pytest.raises(ValueError, match=message):
            sample(engine, wrong)
    with pytest.raises(ValueError, match="max_batch_size must be >= 1, got 0"):
        HFEngine(model, max_batch_size=0)
    with pytest.raises(ValueError, match="cache_tokens must be >= 0, got -1"):
        HFEngine(model, cache_tokens=-1)


def test_models_with_other_layers_are_refused():
    config = transformers.Qwen3_5TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
    )
    with pytest.raises(NotImplementedError, match="has layers .linear_attention. whose state cannot be cut"):
        HFEngine(transformers.Qwen3_5ForCausalLM(config))


def test_sliding_window_is_served_up_to_its_length():
    model = small("Mistral", sliding_window=16)
    r = request(context(0, 12), max_new_tokens=4)
    assert_exact(model, [r], sample(HFEngine(model), r))
    with pytest.raises(NotImplementedError, match="17 tokens exceeds the model's attention window of 16"):
        sample(HFEngine(model), request(context(0, 12), max_new_tokens=5))


def test_real_model_answers(smollm2):
    model, tokenizer = load_policy(smollm2, "bf16")
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    token_ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    stop = (tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    greedy = request(token_ids, temperature=0.01, max_new_tokens=24, stop=stop, order=[0])
    free = request(token_ids, seed=3, max_new_tokens=24, stop=stop, order=[1])
    answer, other = sample(HFEngine(model), greedy, free)
    assert "Paris" in tokenizer.decode(answer.token_ids)
    assert answer.token_ids[-1] == stop[0] and answer.finish_reason == "stop"
    expected = plain_logprobs(model, token_ids, other.token_ids)
    assert sum(other.logprobs) / len(expected) == pytest.approx(sum(expected) / len(expected), abs=0.05)  # bfloat16
