"""Dates as people write them in 33 languages, each with its ISO form: the demo's data, made from Babel's locale data.

Every text has one meaning. "3/4/1987" is March in one country and April in another, and "listopada" is October in Croatian
and November in Polish; a form that two of the languages read differently is never used (see `_unambiguous`).
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import date, timedelta
from functools import cache
from random import Random
from typing import Any, Literal, NamedTuple, get_args

from clearhead.errors import InputError, MissingExtraError, did_you_mean

# Languages whose everyday calendar is Gregorian and whose digits are 0-9.
LOCALES = (
    "en", "de", "fr", "es", "it", "pt", "nl", "sv", "da", "nb", "fi", "pl", "cs", "sk", "hu", "ro", "tr",
    "ru", "uk", "bg", "el", "ja", "zh", "ko", "vi", "id", "hr", "ca", "lt", "lv", "et", "sl", "hi",
)  # fmt: skip
FIRST_YEAR, LAST_YEAR = 1900, 2099
Split = Literal["all", "train", "held_out"]

# Besides "short" to "full", the forms that CLDR names by their fields.
_SKELETONS = ("yMd", "yMEd", "yMMMd", "yMMMEd", "yMMMMd")
# Forms that people write and CLDR does not list, in CLDR's pattern letters; `o` is the day as it is spoken: 3rd, 1er, il 3.
_CASUAL = {
    "en": ("d MMMM y", "d MMM y", "MMMM o, y", "'on' MMMM o, y", "'the' o 'of' MMMM y", "'on' EEEE, MMMM d, y"),
    "de": ("'am' d. MMMM y", "'den' d. MMMM y", "EEEE, 'den' d. MMMM y"),
    "fr": ("'le' o MMMM y", "'le' EEEE o MMMM y"),
    "es": ("'el' d 'de' MMMM 'de' y", "'el' EEEE d 'de' MMMM 'de' y", "d 'de' MMMM 'del' y"),
    "pt": ("'em' d 'de' MMMM 'de' y", "'dia' d 'de' MMMM 'de' y"),
    "nl": ("'op' d MMMM y", "'op' EEEE d MMMM y"), "sv": ("'den' d MMMM y", "EEEE 'den' d MMMM y"),
    "pl": ("d MMMM y 'r'.", "'dnia' d MMMM y"), "it": ("o MMMM y",), "ro": ("'pe' d MMMM y",),
    "da": ("'den' d. MMMM y",), "nb": ("'den' d. MMMM y",), "cs": ("'dne' d. MMMM y",), "sk": ("'dňa' d. MMMM y",),
    "sl": ("'dne' d. MMMM y",), "hr": ("'dana' d. MMMM y.",), "ca": ("'el' d MMMM 'del' y",), "hi": ("d MMMM, y",),
    "ru": ("d MMMM y 'года'",), "uk": ("d MMMM y 'року'",), "bg": ("d MMMM y 'година'",), "el": ("'στις' d MMMM y",),
    "lt": ("y 'metų' MMMM d 'diena'",), "vi": ("'ngày' d 'tháng' M 'năm' y",), "id": ("'tanggal' d MMMM y",),
    "zh": ("y年M月d号",),
}  # fmt: skip
_TOKEN = re.compile(r"'(?P<quoted>[^']*)'|(?P<field>([yMdEco])\3*)|(?P<literal>[^'yMdEco]+)")


class DatePair(NamedTuple):
    text: str
    iso: str
    locale: str


class _Locale(NamedTuple):
    """The forms of one locale: usual and casual ones for each month, and the names of each weekday."""

    usual: dict[int, tuple[str, ...]]
    casual: dict[int, tuple[str, ...]]
    weekdays: list[dict[str, str]]


def make_dates(
    n: int, seed: int, *, locales: Sequence[str] = LOCALES, split: Split = "all", casual: float = 0.25
) -> list[DatePair]:
    """`n` dates from 1900 to 2099, the locales in turn. Equal arguments and versions of Babel give equal dates.

    `casual` is the share of dates in forms that CLDR does not have: with articles and ordinals, or without punctuation;
    independently, the same share is in lower case. `split` selects dates that are, or are not, held out (see `is_held_out`).
    """
    if n < 0 or not 0 <= casual <= 1:
        raise InputError(f"n={n} dates with casual={casual} can not be made; give n >= 0 and casual from 0 to 1")
    if split not in get_args(Split):
        raise InputError(f"there is no split {split!r}; {did_you_mean(split, get_args(Split))}")
    if not locales:
        raise InputError(f"locales={tuple(locales)} names no language; give at least one, such as 'en'")
    if unknown := [name for name in locales if name not in LOCALES]:
        raise InputError(f"dates are not made in {unknown[0]!r}; {did_you_mean(unknown[0], LOCALES)}")
    known, days, rng = _load_locales(), _days(split), Random(seed)

    def pick(choices: Sequence[Any]) -> Any:  # rng.choice may change between versions of Python; random() may not
        return choices[int(rng.random() * len(choices))]

    pairs: list[DatePair] = []
    for index in range(n):
        name, day = locales[index % len(locales)], pick(days)
        forms = known[name].usual[day.month]
        if rng.random() < casual:
            forms = known[name].casual[day.month] or forms
        text = _fill(pick(forms), day, name, known[name].weekdays[day.weekday()])
        pairs.append(DatePair(text.lower() if rng.random() < casual else text, day.isoformat(), name))
    return pairs


def split_dates(
    seed: int, n_train: int = 128_000, n_held_out: int = 2_000, **options: Any
) -> tuple[list[DatePair], list[DatePair]]:
    """Pairs for training and pairs for testing, with no day in common; `options` are those of `make_dates`.

    The second list does not depend on `seed`: all models and programs are tested on the same strings.
    """
    train = make_dates(n_train, seed, split="train", **options)
    return train, make_dates(n_held_out, 0, split="held_out", **options)


def is_held_out(day: date) -> bool:
    """Whether a day is never trained on, in any language: one in ten, chosen by its hash."""
    return hashlib.sha256(day.isoformat().encode()).digest()[0] % 10 == 0


@cache
def _days(split: Split) -> tuple[date, ...]:
    first = date(FIRST_YEAR, 1, 1)
    every = [first + timedelta(days) for days in range((date(LAST_YEAR, 12, 31) - first).days + 1)]
    return tuple(day for day in every if split == "all" or is_held_out(day) == (split == "held_out"))


def _fill(form: str, day: date, locale: str, weekdays: dict[str, str]) -> str:
    d, m = day.day, day.month
    return form.format(d=d, dd=f"{d:02}", M=m, MM=f"{m:02}", y=day.year, o=_spoken(d, locale), **weekdays)


def _spoken(day: int, locale: str) -> str:
    if locale == "fr":
        return "1er" if day == 1 else str(day)
    if locale == "it":
        return {1: "il 1º", 8: "l'8", 11: "l'11"}.get(day, f"il {day}")
    ending = "th" if day in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
    return f"{day}{ending}"


@cache
def _load_locales() -> dict[str, _Locale]:
    """The forms of all locales. All are read even if few are needed: whether a form is ambiguous depends on the others."""
    try:
        from babel import Locale
    except ImportError:
        raise MissingExtraError("the dates are Babel's, which is missing; pip install 'clearhead[demo]'") from None
    found: dict[str, Any] = {name: Locale.parse(name) for name in LOCALES}
    months = range(1, 13)
    usual = _unambiguous({(name, m): _usual_forms(found[name], m) for name in LOCALES for m in months}, {})
    casual = _unambiguous({(name, m): _casual_forms(found[name], m, usual[name, m]) for name, m in usual}, usual)
    known: dict[str, _Locale] = {}
    for name, locale in found.items():
        short, wide = (locale.days["format"][width] for width in ("abbreviated", "wide"))
        weekdays = [{"E": short[day], "EEEE": wide[day]} for day in range(7)]
        known[name] = _Locale({m: usual[name, m] for m in months}, {m: casual[name, m] for m in months}, weekdays)
    return known


def _usual_forms(locale: Any, month: int) -> tuple[str, ...]:
    patterns = [form.pattern for form in locale.date_formats.values()]
    patterns += [locale.datetime_skeletons[name].pattern for name in _SKELETONS if name in locale.datetime_skeletons]
    return tuple(dict.fromkeys(_form(pattern, locale, month) for pattern in patterns))


def _casual_forms(locale: Any, month: int, usual: Iterable[str]) -> tuple[str, ...]:
    forms = [_form(pattern, locale, month) for pattern in _CASUAL.get(str(locale), ())]
    # Where the month is a number, the punctuation must stay: it separates the numbers.
    forms += [re.sub(r"[.,]", "", form) for form in usual if "{M" not in form and re.search("[.,]", form)]
    return tuple(dict.fromkeys(forms))


def _form(pattern: str, locale: Any, month: int) -> str:
    """A CLDR pattern as a format string with the month's name. Years get four digits: 87 could be 1887."""

    def translate(token: re.Match[str]) -> str:
        field = token["field"]
        if not field:
            return token["quoted"] or token["literal"] or ""
        # In Babel 2.18, names that a locale inherits (c, a weekday by itself; Korean's short months) depend on which locale
        # was read before. They are not used.
        if len(field) > 2 and field[0] == "M":
            return locale.months["format"]["abbreviated" if len(field) == 3 and str(locale) != "ko" else "wide"][month]
        if field[0] in "Ec":
            return "{EEEE}" if len(field) == 4 else "{E}"
        return "{y}" if field[0] == "y" else "{" + field + "}"

    # CLDR's narrow and unbreakable spaces are not on keyboards.
    return " ".join(_TOKEN.sub(translate, pattern).split())


_Forms = dict[tuple[str, int], tuple[str, ...]]


def _unambiguous(forms: _Forms, settled: _Forms) -> _Forms:
    """The forms that all locales read alike, among these and the forms in `settled`.

    Forms are compared in lower case, without weekdays, with "#" for each number of a day or month. Two equal ones must mean
    the same month or, where the month is a number, have their numbers in the same order.
    """
    readings: defaultdict[str, set[str]] = defaultdict(set)
    for (_, month), some in [*forms.items(), *settled.items()]:
        for form in some:
            shape, order = _reading(form)
            readings[shape].add(order if "M" in order else str(month))
    return {key: tuple(form for form in some if len(readings[_reading(form)[0]]) == 1) for key, some in forms.items()}


def _reading(form: str) -> tuple[str, str]:
    slots = re.findall(r"\{([dMyo])", form)
    shape = re.sub(r"\{[dM]+\}", "#", re.sub(r"\{E+\}", "", form))
    return shape.lower().strip(" .,()"), "".join(slots)
