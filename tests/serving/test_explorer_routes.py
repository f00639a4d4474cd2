"""The explorer over HTTP."""

from __future__ import annotations

import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import clearhead as ch
from clearhead.explorer import Explorer, cost_panel, tokenizer_of
from clearhead.explorer.wire_format import unpack
from clearhead.serving.guards import Limits
from tests.serving.live_server import served, served_here

MEASURE = json.dumps({"model": "gpt", "lengths": [4, 16, 8]}).encode()


@pytest.fixture(scope="module")
def address(places: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    sizes: dict[str, Any] = dict(n_layers=2, d_model=24, n_heads=3, d_ff=31, image_size=8, patch_size=2, n_channels=1)
    vit = ch.save(
        ch.build(ch.preset("vit-b-16", **sizes, head="classes", n_classes=3)), tmp_path_factory.mktemp("m") / "vit"
    )
    with served(*map(str, places.values()), str(vit)) as (url, _):
        yield url


def post(url: str, body: bytes, **headers: str) -> tuple[int, bytes, Any]:
    request = urllib.request.Request(url, body, headers, method="POST")
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.read(), answer.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(), error.headers


def run_of(model: str, text: str) -> dict[str, Any]:
    return {"model": model, "text": text, "target": None, "second": None, "changes": []}


@pytest.mark.parametrize("name", ["gpt", "translator", "encoder"])
def test_answers_are_the_explorers(address: str, places: dict[str, Path], name: str) -> None:
    model = ch.load(places[name])
    explorer = Explorer(model, tokenizer_of(places[name], model), name=name, path=places[name])
    run = run_of(name, "the cat sat on the mat")
    attention = explorer.description()["attentions"][0]
    for kind, params in (
        ("read", {"run": run}),
        ("grid", {"run": run, "attention": attention["name"], "layer": 1, "size": 16}),
        ("map", {"run": run, "site": attention["sites"][0], "head": 2, "box": None, "most": 256}),
        ("row", {"run": run, "site": attention["sites"][0], "head": 2, "row": 3}),
    ):
        status, body, headers = post(f"{address}/explore/{kind}", json.dumps(params).encode())
        assert (status, headers["content-type"]) == (200, "application/octet-stream")
        told, arrays = unpack(body)
        expected, numbers = unpack(explorer.answer(kind, params))
        assert told.keys() == expected.keys()
        for key, array in numbers.items():
            assert arrays[key] == pytest.approx(array.astype(float), abs=1 if array.dtype == "uint8" else 1e-5)


def test_every_model_is_told_of(address: str) -> None:
    _, body, _ = post(f"{address}/explore/models", b"{}")
    models = {each["name"]: each for each in unpack(body)[0]["models"]}
    assert set(models) == {"gpt", "translator", "encoder", "vit"}
    assert models["vit"]["inputs"] == "patches"
    assert [each["name"] for each in models["translator"]["attentions"]] == ["encoder", "decoder", "cross"]
    _, body, _ = post(f"{address}/explore/read", json.dumps({"run": run_of("vit", "sample:1")}).encode())
    assert unpack(body)[1]["picture"].shape == (8, 8, 3)


def test_the_page_may_load_nothing_from_elsewhere(address: str) -> None:
    for path, kind in (("/", "text/html"), ("/page/main.js", "text/javascript"), ("/page/style.css", "text/css")):
        with urllib.request.urlopen(address + path) as answer:
            policy, text = answer.headers["content-security-policy"], answer.read().decode()
            assert answer.headers["content-type"].startswith(kind)
        rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
        assert rules["default-src"] == "'none'"
        assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
        assert rules["frame-ancestors"] == "'none'"
        assert "http://" not in text.replace("http://www.w3.org", "")


@pytest.mark.parametrize(
    "path", ["/page/nothing.js", "/page/tsconfig.json", "/page/..%2fprobe.py", "/page/../probe.py", "/page/"]
)
def test_only_the_pages_files_are_served(address: str, path: str) -> None:
    connection = http.client.HTTPConnection(urlsplit(address).netloc)
    connection.request("GET", path)  # unchanged: urllib would normalise it
    assert connection.getresponse().status == 404
    connection.close()


def test_pages_of_other_sites_are_refused(address: str) -> None:
    body = json.dumps({"run": run_of("gpt", "the")}).encode()
    assert post(f"{address}/explore/read", body, Host="evil.example")[0] == 421
    assert post(f"{address}/explore/read", body, Origin="https://evil.example")[0] == 403
    assert post(f"{address}/explore/read", body, Origin=address)[0] == 200


@pytest.mark.parametrize(
    ("name", "body", "words"),
    [
        ("read", b"", "JSON"),
        ("read", b"[" * 100_000, "JSON"),
        ("read", b'{"run": 3}', "names its model"),
        ("read", b'{"run": {"model": "gqt", "text": "x"}}', "did you mean 'gpt'"),
        ("read", b'{"run": {"model": "gpt", "text": 7}}', "a text"),
        ("map", b'{"run": {"model": "gpt", "text": "x"}, "site": "blocks.0.attention", "head": 99}', "from 0 to 3"),
        ("nothing", b'{"model": "gpt"}', "have no 'nothing'"),
        ("picture", b"not a picture", "no picture that can be read (of no known kind)"),
        ("sound", b"not a sound", "takes a sound"),
    ],
)
def test_what_is_wrong_is_said(address: str, name: str, body: bytes, words: str) -> None:
    status, answer, _ = post(f"{address}/explore/{name}", body)
    assert 400 <= status < 500
    assert words in json.loads(answer)["error"]["message"]


@pytest.mark.slow
def test_with_keys_the_page_is_open_and_its_answers_are_not(places: dict[str, Path]) -> None:
    with served(str(places["gpt"]), env={"CLEARHEAD_API_KEYS": "k1"}) as (url, _):
        with urllib.request.urlopen(f"{url}/page/main.js") as answer:
            assert answer.status == 200
        with urllib.request.urlopen(url) as answer:
            assert answer.status == 200
        assert post(f"{url}/explore/models", b"{}")[0] == 401
        assert post(f"{url}/explore/models", b"{}", Authorization="Bearer k1")[0] == 200
        status, answer, _ = post(f"{url}/explore/measure", MEASURE, Authorization="Bearer k1")
        assert status == 403
        assert "see --measure" in json.loads(answer)["error"]["message"]


def test_a_measurement_holds_nobody_up(places: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a thread of its own, and ends when its client has gone."""
    began, may_end, n_calls = threading.Event(), threading.Event(), 0

    def slow(*_: Any) -> float:
        nonlocal n_calls
        n_calls += 1
        began.set()
        assert may_end.wait(60)
        return 0.1

    monkeypatch.setattr(cost_panel, "_time", slow)
    with served_here(places["gpt"]) as url:
        place = urlsplit(url)
        client = http.client.HTTPConnection(place.hostname or "", place.port, timeout=60)
        client.request("POST", "/explore/measure", MEASURE)
        assert began.wait(60)
        asked = json.dumps({"model": "gpt", "prompt": "the cat", "max_tokens": 3}).encode()
        status, _, _ = post(f"{url}/v1/completions", asked, **{"content-type": "application/json"})
        assert status == 200
        assert post(f"{url}/explore/read", json.dumps({"run": run_of("gpt", "the cat")}).encode())[0] == 200
        client.close()
        while b'route="/explore/{name}",status="499"' not in urllib.request.urlopen(f"{url}/metrics").read():
            time.sleep(0.02)
        may_end.set()
        monkeypatch.undo()
        status, answer, _ = post(f"{url}/explore/measure", MEASURE)  # after the first one has ended
        assert (status, unpack(answer)[0]["lengths"]) == (200, [4, 8, 16])
        assert n_calls == 1  # of nine


def test_measuring_can_be_switched_off(places: dict[str, Path]) -> None:
    with served_here(places["gpt"], Limits(measures=False)) as url:
        status, answer, _ = post(f"{url}/explore/measure", MEASURE)
        assert (status, json.loads(answer)["error"]["type"]) == (403, "permission_error")
