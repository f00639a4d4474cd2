"""Damaged and hostile checkpoints: each raises a CheckpointError or loads correctly; no code runs, and nothing hangs."""

from __future__ import annotations

import json
import pickle
import random
import resource
import shutil
from pathlib import Path

import pytest
import torch

import clearhead as ch
from clearhead.checkpoint import load, save
from clearhead.errors import CheckpointError

# Invalid values must reach our own checks, as they do for a user: the annotations are not checked here.
pytestmark = pytest.mark.usefixtures("unchecked")

TINY = dict(n_layers=2, d_model=12, n_heads=3, d_ff=20, vocab_size=31, max_len=17)
TOKENS = torch.arange(22).reshape(2, 11)


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A valid checkpoint in each layout; copies of it are damaged."""
    folder = tmp_path_factory.mktemp("valid")
    model = ch.build(ch.preset("gpt2", **TINY))
    save(model, folder / "ours")
    save(model, folder / "hf", format="hf")
    save(model, folder / "shards", format="hf", shard_bytes=4000)
    bins = folder / "bins"
    shutil.copytree(folder / "hf", bins)
    (bins / "model.safetensors").unlink()
    from safetensors.torch import load_file

    torch.save(load_file(folder / "hf" / "model.safetensors"), bins / "pytorch_model.bin")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ours", "hf", "shards", "bins"])
def test_a_thousand_damaged_checkpoints(valid: Path, tmp_path: Path, layout: str) -> None:
    """250 mutations of each layout: bytes flipped, cut off, doubled, replaced by noise; JSON fields replaced by wrong values."""
    wanted = load(valid / layout)(TOKENS)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rng = random.Random(layout)
    loaded = 0
    for number in range(250):
        victim = tmp_path / f"{number}"
        shutil.copytree(valid / layout, victim)
        what = damage(victim, rng)
        try:
            model = load(victim)
        except CheckpointError:
            pass
        except Exception as error:  # a crash is what this test looks for: report its cause
            pytest.fail(f"{what}: {type(error).__name__}: {error}")
        else:
            # A checkpoint that still loads has every weight; the model differs only by a valid config or by numbers.
            loaded += 1
            assert {p.shape for p in model.parameters()}
            if what == "nothing":
                assert torch.equal(model(TOKENS), wanted)
        shutil.rmtree(victim)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < 300, f"{grown:.0f} MB taken by damaged files of a few kB"
    assert loaded > 0  # some mutations are harmless, so the other branch was tested too


NONSENSE = [None, -1, 0, 1, 2**40, 1e30, float("nan"), "", "x" * 50, [], {}, True, [1, 2], {"a": 1}, "relu", 7, 3]


def damage(folder: Path, rng: random.Random) -> str:
    """Change one thing in a checkpoint. Returns what was changed."""
    files = sorted(folder.iterdir())
    file = rng.choice(files)
    if file.suffix == ".json" and rng.random() < 0.8:
        values = json.loads(file.read_text())
        place = values
        while (
            isinstance(place, dict)
            and place
            and rng.random() < 0.6
            and any(isinstance(v, dict) for v in place.values())
        ):
            place = rng.choice([v for v in place.values() if isinstance(v, dict)])
        if not place:
            return "nothing"
        key = rng.choice(sorted(place))
        value = rng.choice(NONSENSE)
        if rng.random() < 0.2:
            del place[key]
        else:
            place[key] = value
        file.write_text(json.dumps(values))
        return f"{file.name}: {key} = {value!r}"
    data = bytearray(file.read_bytes())
    match rng.choice(["flip", "cut", "double", "noise", "header", "empty", "gone", "nothing"]):
        case "flip":
            at = rng.randrange(len(data))
            data[at] ^= 1 << rng.randrange(8)
            what = f"flip at {at}"
        case "cut":
            at = rng.randrange(len(data))
            data = data[:at]
            what = f"cut at {at}"
        case "double":
            data = data * 2
            what = "doubled"
        case "noise":
            at, n = rng.randrange(len(data)), rng.randrange(1, 200)
            data[at : at + n] = rng.randbytes(n)
            what = f"noise at {at}"
        case "header":  # safetensors: a false length of the header
            data[:8] = rng.choice([0, 1, 2**20, 2**40, 2**63, 2**64 - 1]).to_bytes(8, "little")
            what = "header length"
        case "empty":
            data = bytearray()
            what = "empty"
        case "gone":
            file.unlink()
            return f"{file.name} gone"
        case _:
            return "nothing"
    file.write_bytes(bytes(data))
    return f"{file.name}: {what}"


class Payload:
    """A hostile pickle: loading it would create a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "whisper.pt"])
def test_a_pickle_with_a_payload_does_not_run(valid: Path, tmp_path: Path, name: str) -> None:
    mark = tmp_path / "ran"
    victim = tmp_path / "victim"
    shutil.copytree(valid / "bins", victim)
    (victim / "pytorch_model.bin").unlink()
    (victim / name).write_bytes(pickle.dumps({"wte.weight": Payload(mark)}))
    path = victim if name == "pytorch_model.bin" else victim / name
    with pytest.raises(CheckpointError, match="never code"):
        load(path)
    torch.save({"wte.weight": Payload(mark)}, victim / name)
    with pytest.raises(CheckpointError, match="never code"):
        load(path)
    assert not mark.exists()


def test_a_shard_index_must_not_leave_its_folder(valid: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    shutil.copytree(valid / "shards", victim)
    index = victim / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    values["weight_map"] = dict.fromkeys(values["weight_map"], "../hf/model.safetensors")
    index.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="outside its folder"):
        load(victim)


def test_a_config_too_large_is_refused_before_memory_is_taken(valid: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    shutil.copytree(valid / "hf", victim)
    values = json.loads((victim / "config.json").read_text())
    for field, value in (("vocab_size", 2**45), ("n_layer", 10**9), ("n_embd", 12 * 2**30)):
        (victim / "config.json").write_text(json.dumps({**values, field: value}))
        with pytest.raises(CheckpointError):
            load(victim)
