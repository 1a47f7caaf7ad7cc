"""Every question of the atlas, each with the steps that answer it."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mosaic.tasks import Task
from mosaic.tasks.atlas_facts import CAPITAL_ALIASES, COUNTRY_ALIASES, NOT_ASKED, City, Country, load_facts

Step = dict[str, Any]
MARGIN = 1.2  # the larger of two compared quantities is at least this many times the other
MARGIN_DEGREES = 1.0


def stable_hash(text: str) -> int:
    """A number that depends on `text` alone, unlike hash(), which is salted by the process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def shuffled(items: Sequence[Any], rng: random.Random) -> list[Any]:
    """A new order by rng.random(), whose numbers, unlike those of rng.shuffle, are promised for every Python."""
    return sorted(items, key=lambda _: rng.random())


@dataclass(frozen=True)
class Question:
    """A question with its answers, expert path and, beyond one hop, what could be delegated."""

    kind: str
    text: str
    answers: tuple[str, ...]
    path: list[Step]
    subtasks: list[Question] = field(default_factory=list)
    fork_after: int = 0

    @property
    def hops(self) -> int:
        """Documents that must be consulted: each is searched for once."""
        return sum(step["tool"] == "search" for step in self.path)

    def task(self) -> Task:
        metadata: dict[str, Any] = {"kind": self.kind, "hops": self.hops, "path": self.path}
        if self.hops > 1:
            metadata["subtasks"] = [
                {"question": part.text, "answers": list(part.answers), "path": part.path} for part in self.subtasks
            ]
            metadata["fork_after"] = self.fork_after
        return Task(f"atlas/{self.kind}/{stable_hash(self.text):016x}", self.text, self.answers, metadata)


@dataclass(frozen=True)
class Reference:
    """A country as a question refers to it: by name, or by what leads to it (`finders`, in order)."""

    kind: str
    phrase: str
    country: Country
    finders: list[Question] = field(default_factory=list)

    @property
    def path(self) -> list[Step]:
        return self.finders[-1].path if self.finders else []


def search(name: str, finding: str, evidence: str) -> Step:
    return {"tool": "search", "arguments": {"query": name}, "finding": finding, "evidence": evidence}


def look_up(title: str, url: str, goal: str, finding: str, evidence: str) -> list[Step]:
    """Search for a document, then open it for a fact that its snippet does not show."""
    arguments = {"url": url, "goal": goal}
    visit = {"tool": "visit", "arguments": arguments, "finding": finding, "evidence": evidence}
    return [search(title, f"The document about {title} is {url}.", url), visit]


def all_questions() -> Iterator[Question]:
    countries, cities = load_facts()
    asked = {iso: country for iso, country in countries.items() if iso not in NOT_ASKED}
    asked_cities = [city for city in cities if city.country in asked]
    capitals = {city.country: city for city in asked_cities if city.is_capital and city.title == city.name}
    unshared = [city for city in asked_cities if not city.shares_name]
    named = [Reference("", country.name, country) for country in asked.values()]
    by_capital = [_by_capital(asked[iso], capital) for iso, capital in capitals.items()]
    by_city = [_by_city(city, asked[city.country]) for city in unshared]
    bordered = [reference for reference in [*named, *by_capital] if _sole_neighbour(reference, asked)]
    by_neighbour = [_by_sole_neighbour(reference, asked) for reference in bordered]
    for reference in [*by_capital, *by_city, *by_neighbour]:
        if len(reference.finders) == 1:
            yield reference.finders[0]
    for reference in [*named, *by_capital, *by_city, *by_neighbour]:
        yield from _about_country(reference, capitals)
    for city in unshared:
        text = f"What is the time zone of the city of {city.name}?"
        yield Question("timezone", text, (city.timezone,), _timezone_steps(city))
    yield from _comparisons(list(asked.values()), unshared)
    yield from _neighbour_comparisons(asked)


def _question(
    kind: str, text: str, answers: tuple[str, ...], path: list[Step], parts: Sequence[Question] = ()
) -> Question:
    """A chain: what can be delegated is each link on the way and the question itself, to check one by the other."""
    question = Question(kind, text, answers, path)
    return Question(kind, text, answers, path, [*parts, question]) if parts else question


def _country_answers(country: Country) -> tuple[str, ...]:
    aliases = COUNTRY_ALIASES.get(country.iso, ())
    saint = (country.name.replace("Saint ", "St. "),) if country.name.startswith("Saint ") else ()
    return (country.name, *aliases, *saint)


def _by_capital(country: Country, capital: City) -> Reference:
    fact = f"is the capital of {country.name}"
    path = [search(capital.title, f"{capital.name} {fact}.", f"{capital.name} {fact}")]
    text = f"Which country has {capital.name} as its capital?"
    finder = Question("country_of_capital", text, _country_answers(country), path)
    return Reference("of_capital", f"the country whose capital is {capital.name}", country, [finder])


def _by_city(city: City, country: Country) -> Reference:
    fact = f"is {'the capital of' if city.is_capital else 'a city in'} {country.name}"
    path = [search(city.title, f"{city.name} lies in {country.name}.", f"{city.name} {fact}")]
    text = f"In which country does the city of {city.name} lie?"
    finder = Question("country_of_city", text, _country_answers(country), path)
    return Reference("of_city", f"the country home to the city of {city.name}", country, [finder])


def _sole_neighbour(reference: Reference, asked: dict[str, Country]) -> Country | None:
    neighbours = reference.country.neighbours
    return asked.get(neighbours[0]) if len(neighbours) == 1 else None


def _by_sole_neighbour(reference: Reference, asked: dict[str, Country]) -> Reference:
    country, neighbour = reference.country, _sole_neighbour(reference, asked)
    goal, finding = f"the neighbours of {country.name}", f"The only neighbour of {country.name} is {neighbour.name}."
    steps = look_up(country.name, country.url, goal, finding, f"Neighbours: {neighbour.name}.")
    kind = f"neighbour{'_' if reference.kind else ''}{reference.kind}"
    phrase = f"the only country that borders {reference.phrase}"
    path = reference.path + steps
    finder = _question(kind, f"Which is {phrase}?", _country_answers(neighbour), path, reference.finders)
    return Reference(kind, phrase, neighbour, [*reference.finders, finder])


def _about_country(reference: Reference, capitals: dict[str, City]) -> Iterator[Question]:
    """What can be asked of a country, however it is referred to; at most three documents."""
    country, phrase = reference.country, reference.phrase
    suffix = f"_{reference.kind}" if reference.kind else ""
    finding = f"The capital of {country.name} is {country.capital}."
    capital_steps = [*reference.path, search(country.name, finding, f"Capital: {country.capital}.")]
    capital_answers = (country.capital, *CAPITAL_ALIASES.get(country.iso, ()))
    text = f"What is the capital of {phrase}?"
    capital = _question(f"capital{suffix}", text, capital_answers, capital_steps, reference.finders)
    known_capital = reference.kind == "of_capital" or (reference.kind == "of_city" and country.capital in phrase)
    if not known_capital:
        yield capital
    code, name = country.currency, country.currency_name
    finding = f"The currency of {country.name} is the {name} ({code})."
    yield _question(
        f"currency{suffix}",
        f"Which currency does {phrase} use? Answer with its three-letter code.",
        (code, f"{name} ({code})", f"{code} ({name})"),
        reference.path + [search(country.name, finding, f"{name} ({code})")],
        reference.finders,
    )
    if country.languages:
        first = country.languages[0]
        goal, finding = f"the first language of {country.name}", f"The first language of {country.name} is {first}."
        steps = reference.path + look_up(country.name, country.url, goal, finding, f"First language: {first}.")
        text = f"Which language does the atlas give as the first language of {phrase}?"
        yield _question(f"language{suffix}", text, (first,), steps, reference.finders)
    if country.iso in capitals and capital.hops < 3 and not known_capital:
        city = capitals[country.iso]
        text, parts = f"What is the time zone of the capital of {phrase}?", [*reference.finders, capital]
        steps = capital_steps + _timezone_steps(city)
        yield _question(f"timezone_of_capital{suffix}", text, (city.timezone,), steps, parts)


def _timezone_steps(city: City) -> list[Step]:
    finding = f"{city.name} lies in the time zone {city.timezone}."
    return look_up(city.title, city.url, f"the time zone of {city.name}", finding, f"Time zone: {city.timezone}.")


@dataclass(frozen=True)
class Measure:
    """A quantity to compare: the question's words, its value, how a document writes it, and the margin that counts."""

    kind: str
    comparative: str
    superlative: str
    noun: str
    value: Callable[[Any], float]
    written: Callable[[Any], tuple[str, ...]]
    evidence: Callable[[Any], str]
    apart: Callable[[float, float], bool]


def _written_latitude(city: City) -> tuple[str, ...]:
    side = "north" if city.latitude >= 0 else "south"
    return (f"{abs(city.latitude)} {side}", f"{abs(city.latitude)} degrees {side}")


def _far_apart(larger: float, smaller: float) -> bool:
    return larger >= MARGIN * smaller


AREA = Measure(
    "area", "has the larger area", "has the largest area", "area", lambda x: x.area,
    lambda x: (f"{x.area:,} square kilometres", f"{x.area:,}", f"{x.area:,} km2", f"{x.area:,} sq km"),
    lambda x: f"Area: {x.area:,} square kilometres", _far_apart,
)  # fmt: skip
POPULATION = Measure(
    "population", "has the larger population", "has the largest population", "population", lambda x: x.population,
    lambda x: (f"{x.population:,}", f"{x.population:,} people", f"{x.population:,} inhabitants"),
    lambda x: f"Population: {x.population:,}.", _far_apart,
)  # fmt: skip
LATITUDE = Measure(
    "latitude", "lies farther north", "lies farthest north", "latitude", lambda x: x.latitude, _written_latitude,
    lambda x: f"Latitude: {_written_latitude(x)[0]}.", lambda north, south: north - south >= MARGIN_DEGREES,
)  # fmt: skip


def _comparisons(countries: list[Country], cities: list[City]) -> Iterator[Question]:
    """For each country, and each of the larger cities, a comparison with one and with two others."""
    continents: dict[str, list[Country]] = {}
    for country in countries:
        continents.setdefault(country.continent, []).append(country)
    for measure, kind, pools in (
        (AREA, "country", list(continents.values())),
        (POPULATION, "country", list(continents.values())),
        (POPULATION, "city", [cities[:400]]),
        (LATITUDE, "city", [cities[:400]]),
    ):
        for pool in pools:
            for place in pool:
                for size in (2, 3):
                    rivals = _rivals(place, pool, measure, size)
                    if len(rivals) == size:
                        yield _compare(f"compare_{kind}_{measure.kind}", kind, measure, rivals)


def _rivals(place: Any, pool: Sequence[Any], measure: Measure, size: int) -> list[Any]:
    """`size` places that differ clearly in pairs, `place` among them, in an order unrelated to the answer."""
    rng = random.Random(stable_hash(f"{measure.kind} {size} {place.url}"))
    chosen = [place]
    for other in shuffled(pool, rng):
        pairs = [sorted((measure.value(other), measure.value(one)), reverse=True) for one in chosen]
        if all(measure.apart(*pair) for pair in pairs):
            chosen.append(other)
        if len(chosen) == size:
            break
    return shuffled(chosen, rng)


def _compare(kind: str, noun: str, measure: Measure, places: Sequence[Any]) -> Question:
    what = measure.comparative if len(places) == 2 else measure.superlative
    names = [place.name for place in places]
    listed = f"{', '.join(names[:-1])} or {names[-1]}"
    parts = [_measurement(measure, noun, place) for place in places]
    winner = max(places, key=measure.value)
    text = f"Which {noun} {what}: {listed}?"
    path = [step for part in parts for step in part.path]
    return Question(f"{kind}_{len(places)}", text, _place_answers(winner), path, parts)


def _place_answers(place: Country | City) -> tuple[str, ...]:
    if isinstance(place, Country):
        return _country_answers(place)
    return (place.name, *(CAPITAL_ALIASES.get(place.country, ()) if place.is_capital else ()))


def _measurement(measure: Measure, noun: str, place: Any) -> Question:
    subject = place.name if noun == "country" else f"the city of {place.name}"
    written = measure.written(place)
    title = place.name if noun == "country" else place.title
    finding = f"The {measure.noun} of {place.name} is {written[0]}."
    steps = look_up(title, place.url, f"the {measure.noun} of {place.name}", finding, measure.evidence(place))
    return Question(f"{noun}_{measure.kind}", f"What is the {measure.noun} of {subject}?", written, steps)


def _neighbour_comparisons(asked: dict[str, Country]) -> Iterator[Question]:
    """Which of a country's two neighbours is larger: the neighbours must be found before anything can be delegated."""
    for country in asked.values():
        neighbours = [asked[iso] for iso in country.neighbours if iso in asked]
        if len(country.neighbours) != 2 or len(neighbours) != 2:
            continue
        listed = f"{neighbours[0].name} and {neighbours[1].name}"
        goal, finding = f"the neighbours of {country.name}", f"The neighbours of {country.name} are {listed}."
        evidence = f"Neighbours: {neighbours[0].name}, {neighbours[1].name}."
        first = look_up(country.name, country.url, goal, finding, evidence)
        for measure in (AREA, POPULATION):
            values = sorted(map(measure.value, neighbours), reverse=True)
            if measure.apart(*values):
                compared = _compare("", "country", measure, neighbours)
                text = f"Which of the two countries that border {country.name} {measure.comparative}?"
                kind, path = f"neighbours_{measure.kind}", first + compared.path
                yield Question(kind, text, compared.answers, path, compared.subtasks, len(first))
