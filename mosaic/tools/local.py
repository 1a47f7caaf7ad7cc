"""Search and visit over documents held in memory: BM25, no network."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mosaic.text import words
from mosaic.tools import Tool, ToolError


@dataclass(frozen=True)
class Document:
    """One page of a corpus; `url` is its name."""

    url: str
    title: str
    text: str


class LocalCorpus:
    """Documents with a BM25 index over title and text.

    A document whose whole title stands in the query comes before every other one, the longest such title first, since
    BM25 alone prefers a page that repeats a name to the page about it. Then the BM25 score decides, then the order in
    which the documents were given: results never depend on chance.

    Args:
        documents: with distinct urls; at least one.
    Raises:
        ValueError: no documents, or two with one url. ImportError: bm25s is missing.
    """

    def __init__(self, documents: Iterable[Document]):
        self.documents = list(documents)
        if not self.documents:
            raise ValueError("documents must not be empty: an index needs at least one document")
        self._by_url: dict[str, Document] = {}
        self._by_title: dict[tuple[str, ...], list[int]] = {}
        for at, document in enumerate(self.documents):
            if document.url in self._by_url:
                raise ValueError(f"documents must have distinct urls, got {document.url!r} twice")
            self._by_url[document.url] = document
            self._by_title.setdefault(tuple(words(document.title)), []).append(at)
        self._by_title.pop((), None)
        self._longest_title = max(map(len, self._by_title), default=0)
        self._index, self._vocabulary = _build_index(self.documents)

    def search(self, query: str, k: int = 3) -> list[Document]:
        """The `k` best documents, best first; fewer if fewer share a word with the query."""
        tokens = words(query)
        known = [token for token in tokens if token in self._vocabulary]
        if not known:
            return []
        scores = self._index.get_scores(known)
        titled = self._titles_in(tokens)
        hits = sorted(titled.keys() | set((scores > 0).nonzero()[0].tolist()))
        hits.sort(key=lambda at: (-titled.get(at, 0), -float(scores[at])))
        return [self.documents[at] for at in hits[:k]]

    def get(self, url: str) -> Document | None:
        return self._by_url.get(url)

    def _titles_in(self, tokens: list[str]) -> dict[int, int]:
        """Documents whose whole title stands in the query, with the number of words of that title."""
        found: dict[int, int] = {}
        for start in range(len(tokens)):
            for end in range(start + 1, min(len(tokens), start + self._longest_title) + 1):
                for at in self._by_title.get(tuple(tokens[start:end]), ()):
                    found[at] = end - start
        return found


def _build_index(documents: list[Document]) -> tuple[Any, set[str]]:
    try:
        import bm25s
    except ImportError as error:
        raise ImportError("local search needs the package bm25s: pip install 'mosaic-rl[demo]'") from error
    tokens = [words(f"{document.title} {document.text}") for document in documents]
    vocabulary = {token for document in tokens for token in document}
    if not vocabulary:
        raise ValueError("documents must hold at least one word, got only titles and texts without letters or digits")
    index = bm25s.BM25(backend="numpy")
    index.index(tokens, show_progress=False)
    return index, vocabulary


def snippet(text: str, query: str, length: int) -> str:
    """The first run of `length` words of `text` that holds the most different words of the query."""
    wanted, parts = set(words(query)), text.split()
    matches = [wanted.intersection(words(part)) for part in parts]
    last_start = max(0, len(parts) - length)
    start = max(range(last_start + 1), key=lambda at: (len(set().union(*matches[at : at + length])), -at))
    return ("... " if start else "") + " ".join(parts[start : start + length]) + (" ..." if start < last_start else "")


class SearchTool:
    """`search`: the titles, urls and short snippets of the best documents.

    Args:
        corpus: what is searched.
        k: most results. snippet_words: most words of each snippet (3 results of 12 words are about 120 tokens).
    """

    name = "search"
    schema: dict[str, Any] = {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Finds documents. Returns titles, urls and short snippets, best first.",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string", "description": "a few keywords, such as a name"}},
                "required": ["query"],
            },
        },
    }

    def __init__(self, corpus: LocalCorpus, *, k: int = 3, snippet_words: int = 12):
        for name, value in (("k", k), ("snippet_words", snippet_words)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.corpus, self.k, self.snippet_words = corpus, k, snippet_words

    async def __call__(self, query: str) -> str:
        _check_text("query", query, "give a few keywords")
        documents = self.corpus.search(query, self.k)
        if not documents:
            return "No document shares a word with this query. Try a name or other keywords."
        return "\n".join(
            f"{document.title} ({document.url})\n{snippet(document.text, query, self.snippet_words)}"
            for document in documents
        )


class VisitTool:
    """`visit`: one document in full. The goal is asked for so that calls read as they would on the web, where it
    steers what is extracted from a page; these documents are short and come whole."""

    name = "visit"
    schema: dict[str, Any] = {
        "type": "function",
        "function": {
            "name": "visit",
            "description": "Opens one document from the search results.",
            "parameters": {
                "type": "object",
                "properties": {
                    "url": {"type": "string", "description": "a url from the search results"},
                    "goal": {"type": "string", "description": "what to find out there"},
                },
                "required": ["url", "goal"],
            },
        },
    }

    def __init__(self, corpus: LocalCorpus):
        self.corpus = corpus

    async def __call__(self, url: str, goal: str) -> str:
        _check_text("url", url, "give a url from the search results")
        _check_text("goal", goal, "say what to find out there")
        document = self.corpus.get(url.strip())
        if document is None:
            raise ToolError(f"no document has the url {url!r}: search first and visit a url from the results")
        return f"{document.title}\n{document.text}"


def _check_text(name: str, value: Any, remedy: str) -> None:
    if not isinstance(value, str) or not value.strip():
        raise ToolError(f"{name} must be non-empty text, got {value!r}: {remedy}")


def local_tools(documents: Iterable[Document] | None = None) -> dict[str, Tool]:
    """`search` and `visit` by name, over `documents` (None: the atlas corpus)."""
    if documents is None:
        from mosaic.tasks.atlas import corpus

        documents = corpus()
    index = LocalCorpus(documents)
    return {tool.name: tool for tool in (SearchTool(index), VisitTool(index))}
