"""Comparing words that were typed in different ways."""

from __future__ import annotations

import re
import unicodedata

# Latin letters that carry their stroke or dot inside the code point, so that decomposition does not free it.
_SINGLE_LETTERS = str.maketrans("øØłŁđĐðÐħĦı", "oOlLdDdDhHi") | str.maketrans(
    {"æ": "ae", "Æ": "Ae", "œ": "oe", "Œ": "Oe", "þ": "th", "Þ": "Th"}
)
_WORD = re.compile(r"\w+")


def strip_accents(text: str) -> str:
    """`text` without the accents of Latin, Greek and Cyrillic letters (U+0300 to U+036F). In other scripts combining
    marks are vowels, so they stay.

    >>> strip_accents("São Tomé, Łódź")
    'Sao Tome, Lodz'
    """
    letters = (char for char in unicodedata.normalize("NFD", text) if not 0x300 <= ord(char) <= 0x36F)
    return unicodedata.normalize("NFC", "".join(letters)).translate(_SINGLE_LETTERS)


def fold(text: str) -> str:
    """`text` without case, accents and compatibility forms (full width, ligatures).

    >>> fold("Ｓão Tomé"), fold("STRASSE") == fold("Straße")
    ('sao tome', True)
    """
    return strip_accents(unicodedata.normalize("NFKC", text).casefold())


def words(text: str) -> list[str]:
    """The folded words of `text`, in order; an apostrophe joins.

    >>> words("N'Djamena, Chad")
    ['ndjamena', 'chad']
    """
    return _WORD.findall(re.sub(r"['’ʼ`´]", "", fold(text)))
