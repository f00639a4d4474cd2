"""`clearhead explore`, as a user calls it."""

from __future__ import annotations

import csv
import io
import json
import socket
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner, Result

import clearhead as ch
from clearhead.cli import app
from clearhead.errors import ClearheadError, InputError

from .test_explore_tables import make


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    top = tmp_path_factory.mktemp("models")
    for name, preset in (("gpt", "gpt2"), ("pair", "transformer-base")):
        make(top / name, preset, **({"n_decoder_layers": 2} if name == "pair" else {}))
    return {name: top / name for name in ("gpt", "pair")}


def explore(*words: object) -> Result:
    return CliRunner().invoke(app, ["explore", *map(str, words)])


def test_sites_are_listed_and_filtered(folders: dict[str, Path]) -> None:
    found = explore(folders["gpt"], "--sites")
    assert found.exit_code == 0, found.output
    assert "blocks.*.attention.weights" in found.output
    listed = json.loads(explore(folders["gpt"], "blocks.1.*.q", "--sites", "--json").output)
    assert listed == [{"site": "blocks.1.attention.q", "shape": "(B, H, T, E)", "here": "(B, 3, T, 8)"}]


@pytest.mark.slow
def test_every_head_is_ablated_once(folders: dict[str, Path]) -> None:
    rows = list(csv.DictReader(io.StringIO(explore(folders["gpt"], "the cat sat on", "--ablate", "--csv").output)))
    assert {(row["place"], row["head"]) for row in rows} == {
        (f"blocks.{layer}.attention", str(head)) for layer in range(2) for head in range(3)
    }
    table = explore(folders["pair"], "the cat", "--target", "the mat", "--ablate", "--heads", "decoder.*.cross")
    assert table.exit_code == 0, table.output
    assert "decoder.blocks.1.cross" in table.output
    assert "encoder.blocks" not in table.output
    result = explore(
        folders["pair"], "the cat", "--target", "the mat", "--ablate", "--bleu", "--json", "--heads", "*.0.cross"
    )
    assert set(json.loads(result.output)["base"]) == {"loss", "logit", "bleu", "chrf"}


def test_a_picture_is_named_by_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = ch.preset("vit-b-16", n_layers=1, d_model=8, n_heads=2, d_ff=8, image_size=8, patch_size=4, n_classes=3)
    ch.save(ch.build(config), "vit")
    Image.new("RGB", (9, 7), (255, 0, 0)).save("a red.png")
    found = explore("vit", "a red.png", "--export", "page.html")
    assert found.exit_code == 0, found.output
    assert "upload:" in Path("page.html").read_text(encoding="utf-8")
    for words, message in (
        (
            ("no.png", "--export", "page.html"),
            r"there is no 'no.png' here; name a file, or one of sample:0 to sample:9",
        ),
        (("a red.png", "--no-open"), r"a file is chosen on the page; got 'a red.png'; .*add --export FILE"),
    ):
        with pytest.raises(InputError, match=message):
            CliRunner().invoke(app, ["explore", "vit", *words], catch_exceptions=False)
    with pytest.raises(InputError, match=r"vit is a model of pictures: .* give it to classify or explore"):
        CliRunner().invoke(app, ["generate", "vit", "hello"], catch_exceptions=False)


def test_a_page_is_written(folders: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    found = explore(folders["gpt"], "the cat sat", "--export", file)
    assert found.exit_code == 0, found.output
    assert "needs no network" in found.output
    assert "CLEARHEAD_ANSWERS" in file.read_text()


def test_a_page_that_computes_is_written(folders: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    found = explore(folders["gpt"], "the cat sat", "--export", file, "--live")
    assert found.exit_code == 0, found.output
    assert "CLEARHEAD_MODEL" in file.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["the cat", "--live"], "add --export FILE"),
        (["--sites", "--ablate"], "--sites and --ablate are different things"),
        (["--csv"], "add --sites or --ablate"),
        (["x", "--ablate", "--csv", "--json"], "give one of them"),
        (["x", "--bleu"], "are for --ablate"),
        (["nothing.*", "--sites"], "no site matches 'nothing.*'"),
        (["--ablate"], "needs a text"),
        (["the cat", "--ablate", "--heads", "decoder.*"], "no attention matches 'decoder.*'"),
        (["the cat", "--export", "."], "--export '.' can not be written (Is a directory); name another file"),
        (["the cat", "--export", "/proc/page.html"], "--export '/proc/page.html' can not be written"),
        (["the cat", "--export", "no/such/folder/page.html"], "there is no folder 'no/such/folder'"),
    ],
)
def test_refusals(folders: dict[str, Path], words: list[str], message: str) -> None:
    found = explore(folders["gpt"], *words)
    assert found.exit_code == 1
    assert isinstance(found.exception, ClearheadError)  # which `main` prints as one line
    assert message in str(found.exception)


def test_a_port_in_use_is_one_line(folders: dict[str, Path]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for words in (["explore", folders["gpt"], "--no-open"], ["serve", folders["gpt"]]):
            found = CliRunner().invoke(app, [*map(str, words), "--port", str(port)])
            assert isinstance(found.exception, InputError)
            assert f"port {port} of 127.0.0.1 can not be listened on (Address already in use)" in str(found.exception)
