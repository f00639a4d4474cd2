"""Free memory, and the check before much of it is taken."""

from __future__ import annotations

import builtins
from pathlib import Path

import pytest
import torch

import clearhead as ch
from clearhead.costs.measurement import Workload, measure
from clearhead.errors import InputError
from clearhead.kernels import huge_pages, memory

VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               10007.
Pages active:                            250000.
Pages inactive:                           20011.
Pages speculative:                          101.
Pages wired down:                         90000.
Pages purgeable:                             31.
"""


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 300 MB free."""
    monkeypatch.setattr(memory, "available_memory", lambda device: 300_000_000)


def write_group(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content + "\n")
    return folder


def test_this_machine() -> None:
    assert 2**20 < memory.available_memory() < 2**50


def test_control_groups_count_and_their_cached_files_are_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outer = write_group(tmp_path / "a", memory__max="max", memory__current="5")
    inner = write_group(tmp_path / "a" / "b", memory__max="1000000", memory__current="400000")
    monkeypatch.setattr(memory, "cgroup_folders", lambda: iter([inner, outer]))
    assert memory.available_memory() == 600_000
    write_group(inner, memory__stat="anon 90000\ninactive_file 200000\nactive_file 100000")
    assert memory.available_memory() == 900_000
    write_group(outer, memory__max="700000", memory__current="500000")  # a group above is narrower
    assert memory.available_memory() == 200_000
    old = write_group(tmp_path / "old", memory__limit_in_bytes="3000", memory__usage_in_bytes="1000")
    monkeypatch.setattr(memory, "cgroup_folders", lambda: iter([old]))
    assert memory.available_memory() == 2000


def test_the_groups_of_a_process_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "cgroup"
    table.write_text("4:memory:/slice/job\n1:cpu:/other\n0::/user/shell\n")
    was = memory.Path
    monkeypatch.setattr(memory, "Path", lambda name: table if name == "/proc/self/cgroup" else was(name))
    assert list(memory.cgroup_folders()) == [
        *(memory.CGROUPS / "memory" / path for path in ("slice/job", "slice", "")),
        *(memory.CGROUPS / path for path in ("user/shell", "user", "")),
    ]


def test_macos() -> None:
    assert memory.read_vm_stat(VM_STAT) == 16384 * (10007 + 20011 + 101 + 31)
    assert memory.read_vm_stat("something else") == memory.UNKNOWN


def test_what_is_not_known_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    def unusual() -> int:
        raise OSError("no such table")

    monkeypatch.setattr(memory, "_system_memory", unusual)
    assert memory.available_memory() == memory.UNKNOWN


def test_a_model_that_does_not_fit_is_refused() -> None:
    """698 GB. No machine that runs these tests has so much."""
    words = r"174,604,259,328 parameters needs 698\.4 GB of memory, and [\d.,]+ GB are free; .*device=\"meta\""
    with pytest.raises(InputError, match=words):
        ch.build(ch.preset("gpt3-175b"))
    assert ch.build(ch.preset("gpt3-175b"), device="meta").config.n_layers == 96


@pytest.mark.usefixtures("free")
def test_what_would_fit_is_named() -> None:
    with pytest.raises(
        InputError, match=r"needs 0\.5 GB of memory, and 0\.3 GB are free; dtype=torch\.bfloat16 fits; n_layers=5 would"
    ):
        ch.build(ch.preset("gpt2"))
    fits = sum(p.nbytes for p in ch.build(ch.preset("gpt2", n_layers=5), device="meta").parameters())
    over = sum(p.nbytes for p in ch.build(ch.preset("gpt2", n_layers=6), device="meta").parameters())
    assert fits <= 300_000_000 < over


def test_small_models_and_meta_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda device: pytest.fail("asked"))
    monkeypatch.setattr(builtins, "open", lambda *_: pytest.fail("a file was read"))
    ch.build(ch.preset("gpt2", n_layers=1, d_model=48, n_heads=3, vocab_size=97))
    ch.build(ch.preset("llama-7b"), device="meta")


def test_mapped_weights_need_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """90 MB of weights load where 1 MB is free, as the file is mapped; converted they do not."""
    config = ch.preset("llama-7b", n_layers=1, d_model=512, n_heads=8, d_ff=1024, vocab_size=40_000)
    ch.save(ch.build(config), tmp_path / "model")
    monkeypatch.setattr(memory, "available_memory", lambda device: 1_000_000)
    assert ch.load(tmp_path / "model").config.vocab_size == 40_000
    with pytest.raises(
        InputError, match=r"and 1\.0 MB are free; without dtype=float64, weights stay in the file as float32"
    ):
        ch.load(tmp_path / "model", dtype=torch.float64)


@pytest.mark.usefixtures("free")
def test_a_measurement_that_does_not_fit_is_refused() -> None:
    config = ch.preset("gpt2", n_layers=2)
    with pytest.raises(
        InputError, match=r"measuring batch=500, .*needs [\d.]+ GB of memory, and 0\.3 GB are free; batch=\d+ fits"
    ):
        measure(Workload(config=config, batch=500, length=64))
    with pytest.raises(InputError, match=r"try precision bfloat16, a smaller length or a smaller model"):
        measure(Workload(config=ch.preset("gpt2-xl"), batch=1, length=64, mode="train"))


def test_a_file_larger_than_memory_stays_in_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.zeros(2**20)
    start = tensor.data_ptr()
    monkeypatch.setattr(huge_pages.sys, "platform", "linux")
    monkeypatch.setattr(huge_pages, "_maps", lambda: [(start, start + tensor.nbytes, True)])
    monkeypatch.setattr(huge_pages, "_copy", lambda *_: pytest.fail("copied"))
    monkeypatch.setattr(huge_pages, "available_memory", lambda: tensor.nbytes)
    assert list(huge_pages.move([tensor], shared=False)) == []
