"""Damaged and hostile checkpoints: each is a CheckpointError or loads as it should; nothing runs, hangs or explodes."""

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

# Nonsense must reach our own checks, as it does for a user: the annotations' checks are off.
pytestmark = pytest.mark.usefixtures("unchecked")

TINY = dict(n_layers=2, d_model=12, n_heads=3, d_ff=20, vocab_size=31, max_len=17)
TOKENS = torch.arange(22).reshape(2, 11)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole checkpoint in each layout, to be damaged in copies."""
    folder = tmp_path_factory.mktemp("sound")
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


@pytest.mark.parametrize("layout", ["ours", "hf", "shards", "bins"])
def test_a_thousand_damaged_checkpoints(sound: Path, tmp_path: Path, layout: str) -> None:
    """250 mutations of each layout: bytes flipped, cut off, doubled, swapped for noise; JSON fields changed for nonsense."""
    wanted = load(sound / layout)(TOKENS)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rng = random.Random(layout)
    loaded = 0
    for number in range(250):
        victim = tmp_path / f"{number}"
        shutil.copytree(sound / layout, victim)
        what = damage(victim, rng)
        try:
            model = load(victim)
        except CheckpointError:
            pass
        except Exception as error:  # a crash is what this test is for: say what made it
            pytest.fail(f"{what}: {type(error).__name__}: {error}")
        else:
            # What still loads has every weight; the model it makes can differ only as a valid config or other numbers allow.
            loaded += 1
            assert {p.shape for p in model.parameters()}
            if what == "nothing":
                assert torch.equal(model(TOKENS), wanted)
        shutil.rmtree(victim)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < 300, f"{grown:.0f} MB taken by damaged files of a few kB"
    assert loaded > 0  # the mutations are not all fatal, so the other branch was reached too


NONSENSE = [None, -1, 0, 1, 2**40, 1e30, float("nan"), "", "x" * 50, [], {}, True, [1, 2], {"a": 1}, "relu", 7, 3]


def damage(folder: Path, rng: random.Random) -> str:
    """Change one thing in a checkpoint, and say what."""
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
        case "header":  # safetensors: the length of the header lies
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
    """What a hostile pickle does when it is loaded: leave a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "whisper.pt"])
def test_a_pickle_with_a_payload_does_not_run(sound: Path, tmp_path: Path, name: str) -> None:
    mark = tmp_path / "ran"
    victim = tmp_path / "victim"
    shutil.copytree(sound / "bins", victim)
    (victim / "pytorch_model.bin").unlink()
    (victim / name).write_bytes(pickle.dumps({"wte.weight": Payload(mark)}))
    path = victim if name == "pytorch_model.bin" else victim / name
    with pytest.raises(CheckpointError, match="never code"):
        load(path)
    torch.save({"wte.weight": Payload(mark)}, victim / name)
    with pytest.raises(CheckpointError, match="never code"):
        load(path)
    assert not mark.exists()


def test_a_shard_index_may_not_point_elsewhere(sound: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    shutil.copytree(sound / "shards", victim)
    index = victim / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    values["weight_map"] = dict.fromkeys(values["weight_map"], "../hf/model.safetensors")
    index.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="outside its folder"):
        load(victim)


def test_a_config_too_large_is_refused_before_memory_is_taken(sound: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    shutil.copytree(sound / "hf", victim)
    values = json.loads((victim / "config.json").read_text())
    for field, value in (("vocab_size", 2**45), ("n_layer", 10**9), ("n_embd", 12 * 2**30)):
        (victim / "config.json").write_text(json.dumps({**values, field: value}))
        with pytest.raises(CheckpointError):
            load(victim)
