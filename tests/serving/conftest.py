"""One server of tiny models for each file of tests."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import openai
import pytest

from tests.serving.live_server import make_models, served


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def address(places: dict[str, Path]) -> Generator[str]:
    with served(*map(str, places.values())) as (url, _):
        yield url


@pytest.fixture
def client(address: str) -> Generator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        yield client
