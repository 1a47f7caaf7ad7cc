from __future__ import annotations

import asyncio
import sys

import pytest

from mosaic.tasks.atlas import corpus
from mosaic.tasks.atlas_facts import load_facts
from mosaic.tools import ToolError
from mosaic.tools.local import Document, LocalCorpus, SearchTool, VisitTool, local_tools, snippet

PAGES = [
    Document("mem://cat", "Cat", "A small animal that hunts mice. It sleeps."),
    Document("mem://dog", "Dog", "A dog chases a cat, a cat, and once more a cat."),
    Document("mem://big cat", "Big cat", "A lion or a tiger."),
    Document("mem://twin/1", "Twin", "The same words."),
    Document("mem://twin/2", "Twin", "The same words."),
]


@pytest.fixture(scope="module")
def atlas():
    return local_tools()


def call(tool, **arguments):
    return asyncio.run(tool(**arguments))


def found(query, k=5):
    return [page.url.removeprefix("mem://") for page in LocalCorpus(PAGES).search(query, k)]


def test_the_page_about_a_name_comes_before_pages_that_repeat_it():
    assert found("cat") == ["cat", "dog", "big cat"]


def test_the_longest_title_in_the_query_wins():
    assert found("where does the big cat live")[:2] == ["big cat", "cat"]


def test_ties_keep_the_order_given():
    assert found("twin") == ["twin/1", "twin/2"]
    assert found("same words") == ["twin/1", "twin/2"]
    assert found("same words", k=1) == ["twin/1"]


def test_case_accents_and_punctuation_do_not_matter():
    pages = [Document("1", "Łódź", "x"), Document("2", "N'Djamena", "y")]
    assert [page.url for page in LocalCorpus(pages).search("LODZ")] == ["1"]
    assert [page.url for page in LocalCorpus(pages).search("n’djamena?")] == ["2"]


def test_unknown_words_are_left_out_of_the_query():
    assert found("zebra cat") == found("cat")
    assert found("zebra") == found("?!") == []


def test_one_document():
    assert LocalCorpus(PAGES[:1]).search("mice", 3) == PAGES[:1]


def test_snippet_shows_the_words_asked_for():
    text = "one two three four five six"
    assert snippet(text, "nothing", 3) == "one two three ..."
    assert snippet(text, "Four", 3) == "... two three four ..."
    assert snippet(text, "five six", 3) == "... four five six"
    assert snippet(text, "six", 6) == snippet(text, "six", 9) == text
    assert snippet("", "six", 3) == ""


def test_search_observation():
    search = SearchTool(LocalCorpus(PAGES), k=2, snippet_words=4)
    assert (
        call(search, query="cat")
        == "Cat (mem://cat)\nA small animal that ...\nDog (mem://dog)\n... dog chases a cat, ..."
    )
    assert call(search, query="zebra") == "No document shares a word with this query. Try a name or other keywords."


def test_visit_observation():
    assert call(VisitTool(LocalCorpus(PAGES)), url=" mem://dog ", goal="who") == f"Dog\n{PAGES[1].text}"


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        (
            "visit",
            {"url": "mem://cow", "goal": "x"},
            "no document has the url 'mem://cow': search first and visit a url",
        ),
        (
            "visit",
            {"url": "mem://cat", "goal": " "},
            "goal must be non-empty text, got ' ': say what to find out there",
        ),
        ("visit", {"url": 3, "goal": "x"}, "url must be non-empty text, got 3"),
        ("search", {"query": ""}, "query must be non-empty text, got '': give a few keywords"),
        ("search", {"query": ["a"]}, r"query must be non-empty text, got \['a'\]"),
    ],
)
def test_refused_calls_say_what_to_do(name, arguments, message):
    with pytest.raises(ToolError, match=message):
        call(local_tools(PAGES)[name], **arguments)


def test_schemas_name_the_arguments_of_the_call():
    for name, tool in local_tools(PAGES).items():
        function = tool.schema["function"]
        assert tool.name == function["name"] == name
        assert list(function["parameters"]["properties"]) == function["parameters"]["required"]
        call(tool, **{argument: "mem://cat" for argument in function["parameters"]["required"]})


def test_bad_arguments():
    with pytest.raises(ValueError, match="documents must not be empty"):
        LocalCorpus([])
    with pytest.raises(ValueError, match="documents must have distinct urls, got 'mem://cat' twice"):
        LocalCorpus([*PAGES, PAGES[0]])
    with pytest.raises(ValueError, match="documents must hold at least one word"):
        LocalCorpus([Document("1", "?", "!")])
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        SearchTool(LocalCorpus(PAGES), k=0)


def test_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(ImportError, match=r"pip install 'mosaic-rl\[demo\]'"):
        LocalCorpus(PAGES)


def test_every_country_and_city_is_found_first_by_name(atlas):
    countries, cities = load_facts()
    index = atlas["search"].corpus
    wanted = {country.name: country.url for country in countries.values()} | {city.title: city.url for city in cities}
    assert len(wanted) == len(index.documents)
    missed = {name: url for name, url in wanted.items() if index.search(name, 1)[0].url != url}
    assert missed == {}


def test_questions_in_full_find_the_place_too(atlas):
    index = atlas["search"].corpus
    assert index.search("What is the currency of Mexico?")[0].title == "Mexico"
    assert index.search("population of Mexico City")[0].title == "Mexico City"
    assert index.search("capital of the Republic of the Congo")[0].title == "Republic of the Congo"
    assert {page.title for page in index.search("area of Niger and of Nigeria", 2)} == {"Niger", "Nigeria"}


def test_observations_are_short(atlas, tokenizer):
    """What the demo's session limit is planned for: about 120 tokens a search, never above 180; 110 a visit."""
    pages = corpus()
    lengths = [len(tokenizer(call(atlas["search"], query=page.title)).input_ids) for page in pages[::5]]
    assert max(lengths) <= 180 and sum(length > 120 for length in lengths) < 0.15 * len(lengths)
    lengths = [len(tokenizer(call(atlas["visit"], url=page.url, goal="facts")).input_ids) for page in pages]
    assert 40 <= min(lengths) and max(lengths) <= 110
