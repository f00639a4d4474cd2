"""The short form of attack_table.py: each attack is refused or served, and the server answers afterwards."""

from __future__ import annotations

import time
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.serving.attack_table import KEYS, Bystander, make_scribe
from tests.serving.attacks import ATTACKS, Target, run, send_sound
from tests.serving.live_server import served


@pytest.fixture(scope="module")
def url(places: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    scribe = make_scribe(tmp_path_factory.mktemp("scribe"))
    with served(str(places["gpt"]), str(scribe), "--measure", env=KEYS) as (url, _):
        yield url


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ATTACKS if name != "none"])
def test_a_server_under_attack_answers_others(url: str, name: str) -> None:
    statuses = run(name, Target(url, "attacker", time.monotonic() + 0.5, scale=0.1))
    assert set(statuses) <= set(ATTACKS[name].statuses)
    bystander = Bystander(url)
    bystander.ask()
    assert bystander.failed == []


@pytest.mark.slow
def test_half_an_hour_of_silence_is_transcribed(url: str) -> None:
    """As long as a sound may be: it is no attack, and shows that the scribe of this test works."""
    assert send_sound(Target(url, "attacker", time.monotonic())) == [400, 400, 400, 200]
