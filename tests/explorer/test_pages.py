"""The wire format, the keys of requests, and the page as one file."""

from __future__ import annotations

import base64
import html
import json
import re
import shutil
import subprocess
from typing import Any

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.explorer import Explorer, export_page
from clearhead.explorer.standalone_page import MAX_BYTES, PAGE_FILES, read_lean
from clearhead.explorer.wire_format import key_of, pack, unpack
from clearhead.inside import probe
from tests.explorer.models import TEXT, make_explorer, make_run


def test_packed_is_unpacked() -> None:
    arrays = {
        "a": np.arange(15, dtype=np.uint8).reshape(3, 5),
        "b.c": np.linspace(0, 1, 7, dtype=np.float32),
        "empty": np.zeros((0, 4), np.int32),
        "turned": np.arange(6, dtype=np.int32).reshape(2, 3).T,
    }
    packed = pack({"text": "日本 🙂 </script>", "nothing": float("nan"), "list": [1, (2, float("inf"))]}, **arrays)
    reply, found = unpack(packed)
    assert reply == {"text": "日本 🙂 </script>", "nothing": None, "list": [1, [2, None]]}
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
    n = int.from_bytes(packed[:4], "little")
    places = json.loads(packed[4 : 4 + n])["arrays"]
    assert (4 + n) % 8 == 0
    assert all(place["at"] % 8 == 0 for place in places.values())


CASES: list[Any] = [
    {"b": 1, "a": {"d": [1, 2.0, 0.5], "c": None}},
    {"text": 'ñ 🙂 \u2028 "q" \\ \n\t\b\x01\x7f', "on": True, "off": False},
    {"x": [1e21, 1e-7, 1.5e-7, 0.00001, 0.000123, 123456789.125, -0.5, -3.0, 1e300, 2**53]},
    {},
]


@pytest.mark.skipif(shutil.which("node") is None, reason="no node found")
@pytest.mark.parametrize("params", CASES)
def test_the_page_makes_the_same_keys(params: dict[str, Any]) -> None:
    source = (PAGE_FILES / "ask.js").read_text()
    function = source[source.index("export function canonical") : source.index("/** The packed form")]
    script = f"{function.removeprefix('export ')}; process.stdout.write(canonical('read', {json.dumps(params)}))"
    found = subprocess.run(["node", "-e", script], capture_output=True, check=True).stdout.decode()
    assert key_of("read", params) == found


@pytest.fixture(scope="module")
def explorer() -> Explorer:
    return make_explorer("decoder")


def answers_in(page: str) -> dict[str, bytes]:
    found = re.search(r"window\.CLEARHEAD_ANSWERS=(\{.*?\})</script>", page)
    assert found is not None
    return {key: base64.b64decode(value) for key, value in json.loads(found[1]).items()}


def loads_nothing(page: str) -> bool:
    """No address to load from, in the file or in the modules it carries."""
    modules = re.findall(r"data:text/javascript;base64,([A-Za-z0-9+/=]+)", page)
    texts = [page, *(base64.b64decode(module).decode() for module in modules)]
    # The name of SVG's elements, written into saved pictures, is loaded by nobody.
    texts = [text.replace('xmlns="http://www.w3.org/2000/svg"', "") for text in texts]
    assert len(texts) > 5
    return not any(
        re.search(r"(?:https?:)?//(?:[\w-]+\.)+\w+/|src=\"(?!data:)|url\((?!data:|#)|from '\./", text) for text in texts
    )


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")  # hundreds of answers, whose shapes test_explorer.py checks
@pytest.mark.parametrize("kind", ["decoder", "pair", "classes", "vit"])
def test_an_exported_page_has_what_the_page_asks(kind: str) -> None:
    explorer = make_explorer(kind)
    page = export_page(explorer.model, explorer.inputs.maybe_tokenizer, name=kind)
    reply = answers_in(page)
    assert len(page.encode()) < 3_000_000
    assert loads_nothing(page)
    run = make_run(explorer, explorer.description()["example"])
    run = {**run, "text": explorer.description()["example"]}
    assert reply[key_of("read", {"run": run})] == explorer.answer("read", {"run": run})
    for attention in explorer.description()["attentions"]:
        for layer, site in enumerate(attention["sites"]):
            asked: dict[str, Any] = {"run": run, "attention": attention["name"], "layer": layer, "size": 32}
            assert key_of("grid", asked) in reply
            for head in range(attention["n_heads"][layer]):
                asked = {"run": run, "site": site, "head": head, "box": None, "most": 256}
                assert reply[key_of("map", asked)] == explorer.answer("map", asked)
    assert key_of("lens", {"run": run, "first": 0, "n": 256}) in reply
    assert "left_out" in page


@pytest.mark.usefixtures("unchecked")
def test_a_page_stays_below_its_size_and_says_what_it_left_out(explorer: Explorer) -> None:
    small = export_page(explorer.model, explorer.inputs.tokenizer, TEXT * 2, name="decoder")
    least = len(export_page(explorer.model, explorer.inputs.tokenizer, "the", name="decoder", most=1))
    most = least + 60_000
    page = export_page(explorer.model, explorer.inputs.tokenizer, TEXT * 2, name="decoder", most=most)
    assert len(page.encode()) <= most < len(small.encode())
    assert "maps did not fit" in page
    assert MAX_BYTES == 10_000_000


@pytest.mark.usefixtures("unchecked")
def test_the_page_without_a_model_is_small() -> None:
    """What a browser loads, without answers: at most 200 kB. Comments and indentation stay in the repository."""
    files = [file for file in PAGE_FILES.iterdir() if file.suffix in (".js", ".css")]
    size = sum(len(read_lean(file).encode()) for file in files) + (PAGE_FILES / "index.html").stat().st_size
    assert 150_000 < size <= 200_000
    assert all("/**" not in read_lean(file) for file in files)


def test_a_text_can_not_end_the_script_it_is_in(explorer: Explorer) -> None:
    page = export_page(explorer.model, explorer.inputs.tokenizer, "</script><script>alert(1)</script>", name="decoder")
    assert "<script>alert" not in page


def test_show_is_a_frame_with_the_maps(explorer: Explorer) -> None:
    tokens = torch.randint(0, 90, (2, 7))
    with torch.no_grad(), probe(explorer.model, "blocks.*.attention.weights") as seen:
        explorer.model(tokens)
    frame = seen.show([f"t{i}" for i in range(7)], batch=1)._repr_html_()
    page = html.unescape(re.search(r'srcdoc="([^"]*)"', frame)[1])  # type: ignore[index]
    reply = answers_in(page)
    run = {"model": "seen", "text": "", "target": None, "second": None, "changes": []}
    asked = {"run": run, "site": "blocks.2.attention", "head": 1, "box": None, "most": 256}
    _, arrays = unpack(reply[key_of("map", asked)])
    np.testing.assert_array_equal(arrays["map"], seen["blocks.2.attention.weights"][1, 1])
    assert unpack(reply[key_of("read", {"run": run})])[0]["source"]["tokens"][6] == "t6"
    answer = unpack(reply[key_of("read", {"run": run})])[0]["answer"]
    assert answer["kind"] == "seen"  # not "states": this decoder has a head
    with pytest.raises(ch.InputError, match="7 tokens, but 2 names"):
        seen.show(["a", "b"])
    with probe(explorer.model, "blocks.0.residual") as nothing:
        explorer.model(tokens)
    with pytest.raises(ch.InputError, match="no attention to show"):
        nothing.show()
