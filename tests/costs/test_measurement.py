"""Forecasts against runs on this machine. Times are only bounded, since other programs may run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import clearhead as ch
from clearhead.costs import cost
from clearhead.costs.measurement import Calibration, Measured, Workload, measure
from clearhead.kernels import native, onednn
from tests.fresh_process import run_in_fresh_process

SMALL: dict[str, Any] = dict(d_model=64, n_heads=4, n_layers=2, vocab_size=307)
CASES: list[tuple[str, dict[str, Any]]] = [
    ("gpt2", dict(length=97)),
    ("gpt2", dict(length=97, mode="train")),
    ("gpt2", dict(length=97, mode="train", precision="bfloat16", optimizer="sgd")),
    ("gpt2", dict(length=97, mode="decode", precision="bfloat16")),
    ("smollm2-135m", dict(length=61, mode="decode", quantize="int4")),
    ("t5-small", dict(length=31, source_length=41, mode="train")),
    ("t5-small", dict(length=31, source_length=41, mode="decode", quantize="int8")),
    ("bert-base", dict(length=53, mode="train")),
    ("deit-ti-16", dict(mode="train")),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*")  # torch's profiler has its own to say
@pytest.mark.parametrize(("name", "asked"), CASES)
def test_a_run_holds_what_is_said(name: str, asked: dict[str, Any]) -> None:
    if "quantize" in asked and not native.is_there():
        # Without the kernels, 4 million weights at a time are unpacked: more than all that such small models hold.
        pytest.skip(str(native.why_not()))
    changes: dict[str, Any] = SMALL | ({"n_kv_heads": 2} if name.startswith("smollm") else {})
    if name == "deit-ti-16":
        changes = dict(d_model=64, n_heads=4, n_layers=2, image_size=64)
    config = ch.preset(name, **changes | dict(d_ff=160, d_head=16, dropout=0.0, attention_dropout=0.0))
    (found,) = measure(Workload(config=config, batch=3, **asked), repeats=1)
    said = cost(config, batch=3, chunked_loss=False, **asked)
    assert found.params == said.params
    assert found.weight_bytes == said.weight_bytes
    assert found.kv_cache_bytes == said.kv_cache_bytes
    assert found.optimizer_bytes == said.optimizer_bytes
    assert found.flops in (None, said.flops)
    assert (found.flops is None) == (asked.get("mode") == "decode")
    # Small models: what works for a moment in an operator weighs much here, most of all in a convolution.
    assert said.peak_bytes == pytest.approx(found.peak_bytes, rel=0.25 if config.inputs == "patches" else 0.2)
    assert sum(found.seconds_of.values()) == pytest.approx(found.seconds)


@pytest.mark.slow
@pytest.mark.skipif(not onednn.HAS_BOTH, reason="here torch has no oneDNN, whose products the forecast assumes")
def test_a_forward_call_holds_what_is_said() -> None:
    """In a process of its own: the checks of shapes hold arguments longer than the model does."""
    run_in_fresh_process(Path(__file__).parent / "cases_forward.py")


def test_a_fixed_bias_is_held_and_not_trained() -> None:
    config = ch.preset("opus-mt-en-de", **SMALL, n_decoder_layers=2, d_ff=160)
    model = ch.build(config)
    assert "head.bias" in dict(model.named_buffers())
    said = cost(config, batch=1, length=5, source_length=7)
    assert said.params == sum(p.numel() for p in model.parameters())
    assert said.weight_bytes == 4 * said.params + 4 * config.vocab_size


def test_time_grows_with_each_kind_of_work() -> None:
    """A machine with known speeds, forecast from half the length."""
    work = Workload(config=ch.preset("gpt2"), batch=2, length=1024, mode="train")
    speeds = {"attention": 1e9, "products": 7e9, "rest": 1e4, "fixed": 3.0}

    def taken(work: Workload) -> dict[str, float]:
        return {kind: n / speeds[kind] for kind, n in work.operations().items()}

    short = work.shorter()
    assert short.length == 512
    run: dict[str, Any] = dict(params=0, flops=0, weight_bytes=0, kv_cache_bytes=0, optimizer_bytes=0, peak_bytes=0)
    measured = Measured(**run, seconds=sum(taken(short).values()), seconds_of=taken(short))
    assert Calibration(short, measured).seconds(work) == pytest.approx(sum(taken(work).values()))
    assert work.operations()["attention"] == pytest.approx(4 * short.operations()["attention"], rel=0.01)


def test_shorter_runs() -> None:
    assert Workload(config=ch.preset("vit-b-16"), batch=4).shorter().batch == 2
    both = Workload(config=ch.preset("t5-small"), batch=1, length=10, source_length=20).shorter()
    assert (both.length, both.source_length) == (5, 10)
    sound = Workload(config=ch.preset("whisper-tiny"), batch=1, length=10).shorter()
    assert (sound.length, sound.source_length) == (5, None)
    reading = Workload(config=ch.preset("gpt2"), batch=1, length=64, mode="decode")
    assert reading.operations().keys() == {"reading"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*")
def test_a_forecast_of_time_is_of_the_right_size() -> None:
    config = ch.preset("gpt2", d_model=256, n_heads=4, n_layers=2, vocab_size=1009)
    work = Workload(config=config, batch=2, length=512, mode="train")
    short, found = measure(work.shorter(), work, repeats=5)
    # Beside other work single runs are off by a third and more.
    assert 0.5 < Calibration(work.shorter(), short).seconds(work) / found.seconds < 2


def test_what_can_not_be_measured() -> None:
    work = Workload(config=ch.preset("gpt2", **SMALL), batch=1, length=1, mode="decode")
    with pytest.raises(ch.ClearheadError, match=r"after one token or more, in a decoder; got length=1"):
        measure(work)
    with pytest.raises(ch.ClearheadError, match=r"with optimizer 'adamw' or 'sgd'; got 'muon'"):
        measure(replace(work, mode="train", optimizer="muon"))
