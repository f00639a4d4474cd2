"""Dates: each text has one meaning, forms of Babel are as Babel writes them, and no held-out day is in the training pairs."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections import defaultdict
from datetime import date, timedelta
from typing import Any

import pytest

from clearhead.data import dates
from clearhead.data.dates import LOCALES, is_held_out, make_dates, split_dates
from clearhead.errors import InputError, MissingExtraError

babel = pytest.importorskip("babel")

YEAR = [date(1987, 1, 1) + timedelta(days) for days in range(365)]  # in every form, so one year is enough


def read_alone(form: str) -> tuple[str, str]:
    """A numeric form with "#" for its numbers, and their order."""
    slots = re.findall(r"\{([dMy])", form)
    return re.sub(r"\{[dM]+\}", "#", form), "".join(slots)


@pytest.mark.slow
def test_every_text_has_one_meaning() -> None:
    """Every form of every locale, for every day of the month that could be a month, and one more."""
    meaning: dict[str, date] = {}
    for name, locale in dates._load_locales().items():
        for day in (day for day in YEAR if day.day <= 13):
            for form in locale.usual[day.month] + locale.casual[day.month]:
                text = dates._fill(form, day, name, locale.weekdays[day.weekday()]).lower()
                assert "1987" in text
                assert meaning.setdefault(text, day) == day, text
    assert len(meaning) > 20_000


def test_no_region_reads_the_numbers_in_another_order() -> None:
    """Regions such as en_GB or pt_PT may have other forms, but not one of our numeric forms with another meaning."""
    ours = [form for locale in dates._load_locales().values() for form in locale.usual[3] + locale.casual[3]]
    order = dict(read_alone(re.sub(r",? ?\(?\{E+\}\)?,? ?", "", form)) for form in ours if "{M" in form)
    assert order["#.#.{y}"] == "dMy"
    assert order["{y}-#-#"] == "yMd"
    assert "#/#/{y}" not in order
    for name in babel.localedata.locale_identifiers():
        if name.split("_")[0] in LOCALES:
            locale = babel.Locale.parse(name)
            for pattern in (locale.date_formats["short"], locale.datetime_skeletons["yMd"]):
                shape, seen = read_alone(dates._form(pattern.pattern, locale, 3))
                assert order.get(shape, seen) == seen, (name, shape)


def test_listopada_is_october_in_croatian_and_november_in_polish() -> None:
    """Both are used only where the punctuation distinguishes them."""
    months: defaultdict[str, set[tuple[str, str]]] = defaultdict(set)
    for text, iso, locale in make_dates(20_011, 1, locales=("hr", "pl"), casual=0.5):
        if found := re.search(r"\d+(\.? listopada )\d", text):
            months[found[1]].add((locale, iso[5:7]))
    assert months == {". listopada ": {("hr", "10")}, " listopada ": {("pl", "11")}}


@pytest.mark.parametrize("name", LOCALES)
def test_forms_are_babels(name: str) -> None:
    """Babel's texts for a day are among ours, except for spaces, ambiguous orders, and Finnish."""
    from babel.dates import format_date, format_skeleton

    locale = dates._load_locales()[name]
    for day in (date(1987, month, 3 * month - month // 2) for month in range(1, 13)):
        ours = {dates._fill(form, day, name, locale.weekdays[day.weekday()]) for form in locale.usual[day.month]}
        theirs = {format_date(day, form, name) for form in ("medium", "long", "full")}
        theirs |= {format_skeleton(skeleton, day, locale=name) for skeleton in ("yMd", "yMMMd", "yMMMEd")}
        theirs = {" ".join(text.split()) for text in theirs if not re.search(r"\d/\d+/\d{4}", text)}
        if name == "fi":  # "tiistai", Tuesday; ours is "tiistaina", on Tuesday: see the comment in _form
            theirs.remove(" ".join(format_date(day, "full", name).split()))
        assert theirs <= ours


@pytest.mark.slow
def test_casual_forms_have_articles_ordinals_and_lower_case() -> None:
    texts = {pair.text for pair in make_dates(40_009, 2, locales=("en", "fr", "de", "it"), casual=0.5)}
    for pattern in (
        r"on \w+ 3rd, \d{4}",
        r"the 11th of \w+ \d{4}",
        r"\w+ 21st, \d{4}",
        r"le 1er \w+ \d{4}",
        r"le \d+ mars \d{4}",
        r"am \d+\. März \d{4}",
        r"\d+ märz \d{4}",
        r"l'8 \w+ \d{4}",
    ):
        assert any(re.fullmatch(pattern, text) for text in texts), pattern
    assert not any(re.search(r"1th|11st|12nd|13rd|2th|3th", re.sub("1[123]th", "", text)) for text in texts)


def test_every_locale_and_every_year_occurs() -> None:
    pairs = make_dates(33 * 101, 3)
    assert [pair.locale for pair in pairs] == list(LOCALES) * 101
    assert {pair.iso[:4] for pair in pairs} == {str(year) for year in range(1900, 2100)}
    # only ASCII digits and plain spaces
    assert not any(re.search(r"[^\S ]|(?![0-9])\d", pair.text) for pair in pairs)
    assert len(LOCALES) == len(set(LOCALES)) >= 33


@pytest.mark.slow
def test_no_day_is_in_both_splits() -> None:
    train, held_out = split_dates(7, n_train=20_011, n_held_out=2_003)
    assert (len(train), len(held_out)) == (20_011, 2_003)
    days = [{pair.iso for pair in pairs} for pairs in (train, held_out)]
    assert not days[0] & days[1]
    assert {pair.locale for pair in held_out} == set(LOCALES)
    # training has every month, day of the month and year, so that all of them can be learnt
    for part in (slice(4), slice(5, 7), slice(8, 10)):
        assert {day[part] for day in days[0]} >= {day[part] for day in days[1]}
    share = sum(map(is_held_out, YEAR)) / len(YEAR)
    assert 0.05 < share < 0.15


def test_the_held_out_pairs_do_not_depend_on_the_seed() -> None:
    (one, held_out), (two, again) = split_dates(1, 101, 103), split_dates(2, 101, 103)
    assert one != two
    assert held_out == again


PROGRAM = """
import hashlib, sys
from babel import Locale
for name in ("th", "rm", "en_GB", "ko", "zh"):  # in Babel, reading a locale can change another one
    for names in (Locale.parse(name).months, Locale.parse(name).days):
        [list(names[context][width].values()) for context in names for width in names[context]]
from clearhead.data.dates import make_dates
print(hashlib.sha256(repr(make_dates(3_001, 11)).encode()).hexdigest())
"""


@pytest.mark.slow
def test_the_same_seed_gives_the_same_dates_in_another_process() -> None:
    pairs = make_dates(3_001, 11)
    assert pairs[:211] == make_dates(211, 11)
    assert pairs != make_dates(3_001, 13)
    environment = {**os.environ, "PYTHONHASHSEED": "17"}
    there = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    assert there.stdout.strip() == hashlib.sha256(repr(pairs).encode()).hexdigest()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(locales=("en", "dee")), "dates are not made in 'dee'; did you mean 'de'"),
        (dict(locales=()), "names no language"),
        (dict(n=-1), "n=-1 .* give n >= 0"),
        (dict(casual=1.5), "casual=1.5 .* from 0 to 1"),
    ],
)
def test_refusals(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        make_dates(**{"n": 3, "seed": 0, **arguments})


def test_an_unknown_split(unchecked: None) -> None:
    with pytest.raises(InputError, match="no split 'heldout'; did you mean 'held_out'"):
        make_dates(3, 0, split="heldout")  # type: ignore[arg-type]


def test_without_babel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "babel", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'clearhead\[demo\]'"):
        dates._load_locales.__wrapped__()  # without the cache
