"""`clearhead cost`, as a user calls it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.testing import CliRunner

import clearhead as ch
from clearhead.cli import app
from clearhead.cli.arguments import Quantize
from clearhead.errors import ClearheadError
from clearhead.limits import QUANTIZATIONS

TINY = [
    "--set",
    "n_layers=2",
    "--set",
    "d_model=64",
    "--set",
    "n_heads=4",
    "--set",
    "d_ff=128",
    "--set",
    "vocab_size=211",
]


def output(*words: str) -> str:
    """The output, with single spaces between columns."""
    result = CliRunner().invoke(app, ["cost", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return re.sub(" +", " ", result.stdout)


def refused(*words: str) -> str:
    result = CliRunner().invoke(app, ["cost", *words])
    assert isinstance(result.exception, ClearheadError), result.output
    return str(result.exception)


def test_gpt3_in_a_table() -> None:
    text = output("gpt3-175b", "--length", "2048")
    assert "gpt3-175b: decoder, 96 layers of width 12,288" in text
    assert "all 174,604,259,328 735 TFLOP 349 GB" in text
    assert "5 devices of 80 GB" in text
    # 735e12 operations at 400e12 a second.
    assert "time 1.84 s" in text
    assert "10 devices of 40 GB" not in text
    assert "9 devices of 40 GB" in output("gpt3-175b", "--length", "2048", "--memory", "40GB")
    assert "time 7.35 s" in output("gpt3-175b", "--length", "2048", "--rate", "100T")


def test_training_decoding_and_options() -> None:
    training = output("t5-base", "--mode", "train")
    assert all(word in training for word in ("gradients", "optimizer", "12+12 layers", "from a source of 512"))
    decoding = output("llama-3-8b", "--mode", "decode", "--quantize", "int4")
    assert "all 8,030,261,248 19.3 GFLOP 5.45 GB" in decoding
    assert "reading weights and cache at 3.3 TB/s" in decoding
    assert "% of each device's 80 GB" in output("gpt2", "--mode", "train", "--shards", "8", "--parallel", "ddp")
    assert "no number of devices of 2 GB is enough" in output(
        "gpt2", "--mode", "train", "--batch", "64", "--memory", "2GB"
    )
    assert "gpt2 is made for 1,024 tokens" in output("gpt2", "--length", "4096")


def test_every_table_of_numbers_is_json_too() -> None:
    batch, length = json.loads(output("gpt2", "--fit", "24GB", "--json"))
    assert (batch["vary"], length["vary"]) == ("batch", "length")
    assert f"{batch['largest']:,}" in output("gpt2", "--fit", "24GB")
    assert batch["peak_bytes"] <= 24e9
    rows = json.loads(output("gpt2", *TINY, "--measure", "--length", "32", "--json"))
    assert {"flops", "weight_bytes", "seconds"} <= {row["what"] for row in rows}
    assert all(row["measured"] > 0 for row in rows)
    assert "--plot has none" in refused("gpt2", "--plot", "x.png", "--json")


def test_json_is_the_forecast() -> None:
    result = json.loads(output("gpt2", "--mode", "train", "--batch", "4", "--json"))
    report = ch.cost(ch.preset("gpt2"), batch=4, mode="train", precision="bfloat16", device="cuda")
    assert result["peak_bytes"] == report.peak_bytes
    assert result["parts"]["flops"] == report.parts["flops"]


def test_fit() -> None:
    text = output("gpt2", "--mode", "train", "--fit", "80GB")
    assert "in 80 GB largest peak memory" in text
    batch = re.search(r"batch at length 1,024 ([\d,]+)", text)
    assert batch is not None
    asked: dict[str, Any] = dict(mode="train", precision="bfloat16", device="cuda")
    n = int(batch[1].replace(",", ""))
    sizes = [ch.cost(ch.preset("gpt2"), batch=n + more, **asked).peak_bytes for more in (0, 1)]
    assert sizes[0] <= 80e9 < sizes[1]
    assert "(the model is made for 1,024)" in text
    assert "length" not in output("vit-b-16", "--fit", "80GB").split("largest")[1].split("batch at length")[1]


@pytest.mark.filterwarnings("ignore:.*")  # torch's profiler warns
def test_measure() -> None:
    text = output("gpt2", *TINY, "--length", "32", "--mode", "train", "--device", "cpu", "--measure")
    for exact in ("parameters", "operations", "weights", "optimizer"):
        assert re.search(rf"{exact} \S+( \wB)? \S+( \wB)? exact", text), text
    assert re.search(r"peak memory .* [+-]\d+\.\d%", text)
    assert "time is forecast from one run at length 16" in text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("measure", [False, True])
def test_plot(tmp_path: Path, measure: bool) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "cost.png"
    text = output("gpt2", *TINY, "--length", "48", "--device", "cpu", "--plot", str(file), *["--measure"] * measure)
    assert ("memory forecast" in text) == measure
    assert file.read_bytes()[:4] == b"\x89PNG"
    assert file.stat().st_size < 150_000


def test_a_models_folder_and_a_config(tmp_path: Path) -> None:
    config = ch.preset("gpt2", n_layers=2, d_model=64, n_heads=4, vocab_size=307)
    ch.save(ch.build(config), tmp_path / "model")
    ch.save(ch.build(config), tmp_path / "theirs", format="hf")
    (tmp_path / "plain.json").write_text(json.dumps(config.to_dict()))
    total = sum(p.numel() for p in ch.build(config, device="meta").parameters())
    for name in ("model", "model/config.json", "theirs", "plain.json"):
        assert f"all {total:,}" in output(str(tmp_path / name)), name
    angles = " ".join(output("--geometry", str(tmp_path / "model")).split())  # a long path changes the line breaks
    assert "307 rows: mean angle" in angles
    assert "307 tokens in 64 dimensions must contain a pair" in angles
    found = json.loads(output("--geometry", str(tmp_path / "model"), "--json"))
    assert [row["n"] for row in found["bounds"]] == [64, 64, 64]
    assert (found["angles"]["count"], sum(found["angles"]["histogram"])) == (307, 307 * 306 // 2)


def test_geometry() -> None:
    text = output("--geometry")
    assert "768 2° 1.3 3.0 768 1,536 11,874" in text
    assert "is wrong: it is above what is proven impossible" in text
    rows = {(row["n"], row["degrees"]): row for row in json.loads(output("--geometry", "--json"))["bounds"]}
    assert len(rows) == 9
    assert (rows[768, 2]["structured"], rows[768, 2]["optimised"]) == (768, 1536)
    assert "2,000 random directions" in text
    assert "50,257 tokens in 768 dimensions must contain a pair at least 2.05° off 90°" in output("--geometry", "gpt2")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gtp2"], "there is no preset or folder 'gtp2'; did you mean 'gpt2'?"),
        (["no/such/folder"], "there is nothing at 'no/such/folder'"),
        ([], "needs a model, such as gpt2"),
        (["gpt2", "--fit", "80XB"], "'80XB' is not a size in bytes such as 80GB or 80GiB"),
        (["gpt2", "--memory", "big"], "'big' is not a size"),
        (["gpt2", "--rate", "fast"], "'fast' is not a rate such as 400T"),
        (["gpt2", "--set", "n_layer=3"], "did you mean 'n_layers'?"),
        (["gpt2", "--set", "n_layers"], "has no value; write it as n_layers=4"),
        (["bert-base", "--mode", "decode"], "mode='decode' is for models that write"),
        (["gpt2", "--mode", "train", "--quantize", "int8"], "quantised weights can not be trained"),
        (["gpt2", "--measure", "--device", "cpu", "--shards", "2"], "--measure runs one device; got --shards 2"),
        (["gpt2", "--plot", "picture"], "has no ending that says its kind"),
        (["gpt2", "--plot", "no/such/picture.png"], "there is no folder 'no/such'"),
        (["gpt2", "--plot", "/proc/picture.png"], "--plot '/proc/picture.png' can not be written"),
        (["vit-b-16", "--plot", "picture.png"], "pictures have one length"),
    ],
)
def test_refusals(words: list[str], message: str) -> None:
    assert message in refused(*words)


def test_broken_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    assert "can not be read as JSON" in refused(str(tmp_path))
    (tmp_path / "config.json").unlink()
    (tmp_path / "recipe.toml").write_text("")
    assert "is a run that has not ended" in refused(str(tmp_path))


def test_every_kind_of_quantization_is_an_option() -> None:
    kinds, _none = get_args(get_args(Quantize)[0])
    assert get_args(kinds) == tuple(QUANTIZATIONS)


def test_a_forecast_does_not_import_torch() -> None:
    code = (
        "import sys; sys.argv = ['clearhead', 'cost', 'gpt2', '--mode', 'train']; from clearhead.cli import app\n"
        "try: app()\nexcept SystemExit: print('torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip().endswith("False")
