"""How the `dateparser` library reads the demo's held-out dates: the figure to set beside the trained model's.

    python3 -m venv /tmp/dateparser && /tmp/dateparser/bin/pip install dateparser==1.5.0 Babel==2.18.0
    /tmp/dateparser/bin/python benchmarks/quality/dates.py            prints two tables; needs no torch
    /tmp/dateparser/bin/python benchmarks/quality/dates.py -n 200     the first 200 strings only

Three ways to ask: the bare string; with the order of its numbers (in all of these strings that are numbers only, the day
comes before the month or after year and month); with its language. A demo model gets no hint. Much of what dateparser
does not read are articles ("den 3. mars 1987"), so the second table leaves them out.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import dateparser

ROOT = Path(__file__).resolve().parents[2]


def load_dates() -> Any:
    """clearhead/data/dates.py by its path: the package around it would import torch."""
    sys.path.insert(0, str(ROOT))
    spec = importlib.util.spec_from_file_location("dates_of_the_demo", ROOT / "clearhead" / "data" / "dates.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


ASKED: dict[str, Callable[[Any], Any]] = {
    "the string": lambda pair: dateparser.parse(pair.text),
    "and the order of numbers": lambda pair: dateparser.parse(pair.text, settings={"DATE_ORDER": "DMY"}),
    "and the language": lambda pair: dateparser.parse(pair.text, languages=[pair.locale]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure dateparser on the demo's held-out dates.")
    parser.add_argument("-n", type=int, help="how many strings (all 2,000)")
    options = parser.parse_args()
    split_dates = load_dates().split_dates
    print(f"dateparser {version('dateparser')}, Babel {version('Babel')}")
    warnings.simplefilter("ignore")
    for title, casual in (("the demo's strings", {}), ("CLDR's forms only", {"casual": 0.0})):
        pairs = split_dates(0, n_train=0, **casual)[1][: options.n]
        print(f"\n{title}, {len(pairs)} held out\n")
        print("| hint | right | wrong | not read | time per string | worst five locales |")
        print("|---|---|---|---|---|---|")
        for hint, ask in ASKED.items():
            print(f"| {hint} | {measure(pairs, ask)} |", flush=True)


def measure(pairs: list[Any], ask: Callable[[Any], Any]) -> str:
    for pair in pairs:  # once untimed: languages are loaded, and their expressions compiled, at their first use
        ask(pair)
    right: defaultdict[str, list[bool]] = defaultdict(list)
    unread = 0
    start = time.process_time()
    for pair in pairs:
        found = ask(pair)
        unread += found is None
        right[pair.locale].append(found is not None and found.date().isoformat() == pair.iso)
    milliseconds = 1000 * (time.process_time() - start) / len(pairs)
    share = {locale: sum(seen) / len(seen) for locale, seen in right.items()}
    worst = ", ".join(f"{locale} {share[locale]:.0%}" for locale in sorted(share, key=share.__getitem__)[:5])
    total = sum(map(sum, right.values()))
    columns = [f"{count / len(pairs):.1%}" for count in (total, len(pairs) - total - unread, unread)]
    return f"{' | '.join(columns)} | {milliseconds:.1f} ms | {worst}"


if __name__ == "__main__":
    main()
