"""Saving: a checkpoint loads back bit for bit; a save is complete or has no effect."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import random
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import clearhead as ch
from clearhead.checkpoint import load, save
from clearhead.checkpoint.durable_files import stage
from clearhead.checkpoint.weight_files import open_weights, write_safetensors
from clearhead.config import Generation
from clearhead.errors import CheckpointError

TINY: dict[str, dict[str, object]] = {
    "transformer-base": dict(vocab_size=31, max_len=17),
    "gpt2": dict(vocab_size=31, max_len=17),
    "llama-7b": dict(vocab_size=31, n_kv_heads=1),
    "qwen3-0.6b": dict(vocab_size=31, n_kv_heads=1),
    "bert-base": dict(vocab_size=31, max_len=17),
    "esm2-8m": dict(),
    "vit-b-16": dict(image_size=14, patch_size=7, n_classes=5),
    "t5-small": dict(vocab_size=31),
    "opus-mt-en-de": dict(vocab_size=31),
    "whisper-tiny": dict(vocab_size=31, max_len=17, max_source_len=19),
}


def tiny(name: str, **changes: object) -> ch.Decoder | ch.Encoder | ch.EncoderDecoder:
    sizes = dict(n_layers=2, d_model=12, n_heads=3, d_head=4, d_ff=20)
    return ch.build(ch.preset(name, **{**sizes, **TINY[name], **changes}))


def same(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ours_loads_back_bit_for_bit(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    model = tiny(name).to(dtype)
    model.generation = Generation(bos=1, eos=(2, 3), suppress=(7, 9), decoder_start=0)
    again = load(save(model, tmp_path / "x"))
    assert same(model, again)
    assert again.config == model.config
    assert again.generation == model.generation
    assert next(again.parameters()).dtype == dtype


@pytest.mark.parametrize("format", ["clearhead", "hf"])
def test_many_shards_are_one_model(tmp_path: Path, format: str) -> None:
    model = tiny("gpt2")
    save(model, tmp_path / "x", format=format, shard_bytes=2000)
    assert len(list((tmp_path / "x").glob("model-*.safetensors"))) > 3
    assert same(model, load(tmp_path / "x"))


def test_a_smaller_save_leaves_no_shard_of_the_larger_one(tmp_path: Path) -> None:
    save(tiny("gpt2"), tmp_path / "x", shard_bytes=2000)
    model = tiny("gpt2", n_layers=1)
    save(model, tmp_path / "x")
    assert same(model, load(tmp_path / "x"))
    assert sorted(file.name for file in (tmp_path / "x").iterdir()) == ["config.json", "model.safetensors"]


def test_other_files_in_the_folder_stay(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "metrics.jsonl").write_text("{}")
    save(tiny("gpt2"), tmp_path / "x")
    assert (tmp_path / "x" / "metrics.jsonl").read_text() == "{}"


def test_dtype_and_device_are_chosen_at_load(tmp_path: Path) -> None:
    model = tiny("gpt2")
    save(model, tmp_path / "x")
    double = load(tmp_path / "x", dtype=torch.float64)
    assert same(model.double(), double)


def test_a_changed_byte_is_noticed(tmp_path: Path) -> None:
    save(tiny("gpt2"), tmp_path / "x")
    file = tmp_path / "x" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 4
    file.write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match="checksum"):
        load(tmp_path / "x")


@pytest.mark.parametrize("format", ["clearhead", "hf"])
def test_another_type_in_the_header_is_noticed(tmp_path: Path, format: Any) -> None:
    """F32 and I32 have the same size: the numbers were read as integers, and their checksum was right."""
    save(tiny("gpt2").float(), tmp_path / "x", format=format)
    file = tmp_path / "x" / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"F32"', b'"I32"', 1))
    with pytest.raises(CheckpointError, match="checksum"):
        load(tmp_path / "x")


def test_no_flipped_bit_of_config_or_header_loads_another_model(tmp_path: Path) -> None:
    """Each load fails with one line, or gives the same model: a space of the JSON was changed."""
    model, draw = tiny("gpt2"), random.Random(0)
    folder = save(model, tmp_path / "x")
    n_header = 8 + int.from_bytes((folder / "model.safetensors").read_bytes()[:8], "little")
    wrong = 0
    for name, n in (("config.json", (folder / "config.json").stat().st_size), ("model.safetensors", n_header)):
        whole = (folder / name).read_bytes()
        for at in draw.sample(range(n), 150):
            changed = bytearray(whole)
            changed[at] ^= 1 << draw.randrange(7)
            (folder / name).write_bytes(bytes(changed))
            try:
                assert same(model, load(folder)), (name, at)
            except CheckpointError:
                wrong += 1
        (folder / name).write_bytes(whole)
    assert wrong > 200


def test_a_config_changed_on_purpose(tmp_path: Path) -> None:
    folder = save(tiny("gpt2"), tmp_path / "x")
    content = json.loads((folder / "config.json").read_text())
    content["generation"]["eos"] = [5]
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(
        CheckpointError, match=r"config.json is damaged: .* changed on purpose, remove its field 'checksum'"
    ):
        load(folder)
    del content["checksum"]
    (folder / "config.json").write_text(json.dumps(content))
    assert load(folder).generation.eos == (5,)


def test_a_read_only_folder_gives_one_line_and_keeps_what_was_there(tmp_path: Path) -> None:
    save(tiny("gpt2"), tmp_path / "x")
    target = tmp_path / "file"
    target.write_text("mine")
    with pytest.raises(CheckpointError, match="is a file"):
        save(tiny("gpt2"), target)
    with pytest.raises(CheckpointError, match="could not be written"):
        save(tiny("gpt2"), target / "below")
    assert target.read_text() == "mine"


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("gpt2")
    save(model, tmp_path / "x")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("clearhead.checkpoint.saving.write_safetensors", full)
    with pytest.raises(CheckpointError, match="No space left"):
        save(tiny("gpt2", n_layers=1), tmp_path / "x")
    assert same(model, load(tmp_path / "x"))
    assert [file.name for file in tmp_path.iterdir()] == ["x"]  # no incomplete files are left


SAVER = """
import os, signal, sys, time
import clearhead as ch
from clearhead.checkpoint import save
config = ch.preset("gpt2", n_layers=2, d_model=128, n_heads=2, vocab_size=5000, max_len=17)
models = [ch.build(config, seed=seed) for seed in (0, 1)]
for attempt in range(20):
    target = f"{sys.argv[1]}/{attempt}"
    save(models[0], target)
    if (child := os.fork()) == 0:
        while True:
            for model in models:
                save(model, target, shard_bytes=int(sys.argv[2]))
    time.sleep(0.007 * attempt)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("shard_bytes", [2**30, 2**20])
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path, shard_bytes: int) -> None:
    """A process that saves two models in turn is killed at 20 moments: the folder holds one of them."""
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SAVER, str(tmp_path), str(shard_bytes)], check=True, timeout=300
    )
    config = ch.preset("gpt2", n_layers=2, d_model=128, n_heads=2, vocab_size=5000, max_len=17)
    models = [ch.build(config, seed=seed) for seed in (0, 1)]
    for attempt in range(20):
        found = load(tmp_path / str(attempt))
        assert any(same(found, model) for model in models)


BORDER = errno.EXDEV, "Invalid cross-device link"


def test_a_mount_point_is_saved_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file crosses the target's border: it may be a mount point, where a rename from outside fails with EXDEV."""
    target = tmp_path / "mount"
    target.mkdir()
    for name in ("replace", "rename", "link"):
        plain = getattr(os, name)

        def inside(a: Any, b: Any, *, plain: Any = plain, **more: Any) -> None:
            if Path(a).is_relative_to(target) != Path(b).is_relative_to(target):
                raise OSError(*BORDER)
            plain(a, b, **more)

        monkeypatch.setattr(os, name, inside)
    for seed, shard_bytes in ((0, 2**30), (1, 2000), (2, 2**30)):
        model = ch.build(tiny("gpt2").config, seed=seed)
        save(model, target, shard_bytes=shard_bytes)
        assert same(model, load(target))
        assert not [file.name for file in target.iterdir() if file.name.startswith(".")]
    assert [path.name for path in tmp_path.iterdir()] == ["mount"]


CALLS = ("mkdir", "open", "replace", "rename", "link", "unlink", "fsync", "rmdir")


def fail_at(monkeypatch: pytest.MonkeyPatch, n: int) -> list[str]:
    """The n-th of the calls that change the disk fails, and all after it: a disk that went away. Returns the calls so far."""
    made: list[str] = []
    for name in CALLS:
        plain = getattr(os, name)

        def call(*a: Any, plain: Any = plain, name: str = name, **more: Any) -> Any:
            made.append(name)
            if len(made) >= n:
                raise OSError(errno.EIO, "Input/output error")
            return plain(*a, **more)

        monkeypatch.setattr(os, name, call)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("shards", [(2**30, 2**30), (2000, 2**30), (2**30, 2000)])
def test_a_failure_at_any_call_leaves_the_old_model_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: tuple[int, int]
) -> None:
    old, new, last = tiny("gpt2"), tiny("gpt2", n_layers=1), tiny("gpt2", n_layers=3)
    n, outcomes, made = 0, set[str](), list[str]()
    while len(made) >= n:
        n += 1
        target = tmp_path / str(n)
        save(old, target, shard_bytes=shards[0])
        with monkeypatch.context() as patch:
            made = fail_at(patch, n)
            try:
                save(new, target, shard_bytes=shards[1])
            except CheckpointError as error:
                message = str(error)
            else:
                message = "saved"
        found = load(target)
        outcome = "new" if found.config.n_layers == 1 else "old"
        assert same(found, new if outcome == "new" else old), (n, made)
        assert ("untouched" in message) == (outcome == "old"), (n, message)
        outcomes.add(f"{outcome} {'whole' in message}")
        save(last, target)  # goes on from whatever the failure left, and clears it away
        assert same(last, load(target))
        assert sorted(file.name for file in target.iterdir()) == ["config.json", "model.safetensors"]
    assert outcomes == {"old False", "new True", "new False"}
    assert n > 15


DYING = """
import os, sys
import clearhead as ch
from clearhead.checkpoint import load, save
config = ch.preset("gpt2", n_layers=1, d_model=12, n_heads=3, d_ff=20, vocab_size=31, max_len=17)
old, new = (ch.build(config, seed=seed) for seed in (0, 1))
key = "blocks.0.feedforward.up.weight"
outcomes, n, code = [], 0, 9
while code == 9:
    n += 1
    target = f"{sys.argv[1]}/{n}"
    save(old, target, shard_bytes=int(sys.argv[2]))
    if (child := os.fork()) == 0:
        made = []
        for name in ("mkdir", "open", "replace", "rename", "link", "unlink", "fsync", "rmdir"):
            def call(*a, plain=getattr(os, name), **more):
                made.append(0)
                if len(made) == n:
                    os._exit(9)
                return plain(*a, **more)
            setattr(os, name, call)
        save(new, target, shard_bytes=int(sys.argv[3]))
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    found = load(target).state_dict()
    whole = [all((found[k] == v).all() for k, v in model.state_dict().items()) for model in (old, new)]
    assert any(whole), (n, whole)
    outcomes.append(whole.index(True))
assert outcomes == sorted(outcomes) and len(outcomes) > 15, outcomes
"""


@pytest.mark.slow
@pytest.mark.parametrize("shards", [("99999999", "99999999"), ("2000", "99999999"), ("99999999", "2000")])
def test_a_kill_before_any_call_leaves_the_old_model_or_the_new_one(tmp_path: Path, shards: tuple[str, str]) -> None:
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", DYING, str(tmp_path), *shards],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr


def test_what_a_kill_left_is_swept_and_a_running_save_is_not(tmp_path: Path) -> None:
    target = save(tiny("gpt2"), tmp_path / "x")
    (target / ".save-dead").mkdir()
    (target / ".save-dead" / "model.safetensors").write_text("half")
    with stage(target, ".save-") as running:
        save(tiny("gpt2"), target)
        assert [path for path in target.iterdir() if path.name.startswith(".")] == [running]


def test_the_umask_holds_and_folders_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr("clearhead.checkpoint.saving.sync_folder", synced.append)
    before = os.umask(0o077)
    try:
        target = save(tiny("gpt2"), tmp_path / "x")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (target, *target.iterdir())}
    assert modes == {"x": 0o700, "config.json": 0o600, "model.safetensors": 0o600}
    assert synced.count(target) == 3  # after the save became valid, after the files are in place, and at the end


def test_every_key_is_used_and_every_parameter_filled(tmp_path: Path) -> None:
    save(tiny("gpt2"), tmp_path / "x", format="hf")
    from safetensors.torch import load_file, save_file

    file = tmp_path / "x" / "model.safetensors"
    state = load_file(file)
    short = {name: tensor for name, tensor in state.items() if "c_fc" not in name}
    save_file({**short, **{f"spare.{i}": torch.zeros(1) for i in range(7)}}, file)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path / "x")
    message = str(caught.value)
    assert "4 of its tensors are not in the file" in message
    assert "blocks.0.feedforward.up.weight" in message
    assert "7 of the file's are not in the model" in message
    assert message.count("spare.") == 5


@pytest.mark.usefixtures("unchecked")
def test_a_config_that_the_layout_can_not_express_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="positions='alibi'"):
        save(tiny("gpt2", positions="alibi"), tmp_path / "x", format="hf")
    custom = ch.build(dataclasses.replace(tiny("gpt2").config, family="custom", positions="alibi"))
    with pytest.raises(CheckpointError, match="GPT-2's layout, the nearest, has no place for positions='alibi'"):
        save(custom, tmp_path / "x", format="hf")
    with pytest.raises(CheckpointError, match="did you mean 'hf'"):
        save(custom, tmp_path / "x", format="hff")  # type: ignore[arg-type]
    assert not (tmp_path / "x").exists()


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is nothing at"):
        load(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"no folder with a config.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(CheckpointError, match="holds no weights"):
        load(tmp_path)
    with pytest.raises(CheckpointError, match="holds no weights"):
        open_weights(tmp_path)


def test_a_hub_name_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[str] = []

    def offline(name: str, **_: object) -> str:
        asked.append(name)
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(CheckpointError, match=r"'hf:someone/model' could not be fetched.*no route.*check the name"):
        load("hf:someone/model")
    with pytest.raises(CheckpointError, match=r"nothing at 'runs/x'; .*the hub is asked for 'hf:runs/x'"):
        load("runs/x")  # a mistyped path does not leave this machine
    with pytest.raises(CheckpointError, match=r"'hf:a/b/c' is no name on the hub; write 'hf:owner/model'"):
        load("hf:a/b/c")
    assert asked == ["someone/model"]
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match=r"pip install 'clearhead\[hub\]'"):
        load("hf:someone/model")


def wrap(model: Any) -> None:
    model.blocks[1].feedforward.forward = lambda x: 2 * x


def swap_part(model: Any) -> None:
    model.blocks[1].feedforward.up.__class__ = type("Doubled", (type(model.blocks[1].feedforward.up),), {})


def replace_part(model: Any) -> None:
    model.blocks[1].feedforward = torch.nn.Identity()


def add_part(model: Any) -> None:
    model.blocks[1].adapter = torch.nn.Linear(12, 12)


def add_parameter(model: Any) -> None:
    model.blocks[1].feedforward.register_parameter("gain", torch.nn.Parameter(torch.ones(12)))


def change_activation(model: Any) -> None:
    model.blocks[1].feedforward.activation = "relu"


def change_eps(model: Any) -> None:
    model.blocks[1].attention_norm.eps = 0.5


@pytest.mark.parametrize("format", ["clearhead", "hf"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (wrap, "'blocks.1.feedforward' .now FeedForward"),
        (swap_part, "'blocks.1.feedforward.up' .now Doubled"),
        (replace_part, "'blocks.1.feedforward', "),
        (add_part, "'blocks.1.adapter' .now Linear"),
        (add_parameter, "'blocks.1.feedforward.gain' was changed"),
        (change_activation, "'blocks.1.feedforward'"),
        (change_eps, "'blocks.1.attention_norm'"),
    ],
)
def test_a_model_changed_in_python_is_refused_by_name(tmp_path: Path, change: Any, words: str, format: Any) -> None:
    model = tiny("gpt2")
    change(model)
    with pytest.raises(CheckpointError, match=rf"not what its config says: {words}.*put it back"):
        save(model, tmp_path / "x", format=format)
    assert not (tmp_path / "x").exists()


def test_parameters_are_the_mapped_file(tmp_path: Path) -> None:
    """Nothing is copied: every parameter of our own layout, fused ones too, is in the mapped file and aligned to cache lines."""
    model = tiny("llama-7b", d_model=32, n_heads=4, d_head=8, n_kv_heads=2, d_ff=64, vocab_size=64)
    file = (save(model, tmp_path / "x") / "model.safetensors").resolve()
    again = load(tmp_path / "x")
    spans: list[tuple[int, int]] = []
    for line in Path("/proc/self/maps").read_text().splitlines() if Path("/proc/self/maps").exists() else ():
        if line.endswith(str(file)):
            first, last = (int(end, 16) for end in line.split()[0].split("-"))
            spans.append((first, last))
    if not spans:
        pytest.skip("this system does not tell what is mapped")
    for name, parameter in again.named_parameters():
        at = parameter.data_ptr()
        assert any(first <= at and at + parameter.nbytes <= last for first, last in spans), name
        assert at % 64 == 0, name
        assert parameter.requires_grad


@pytest.mark.parametrize("format", ["clearhead", "hf"])
def test_a_loaded_model_is_independent_of_its_file(tmp_path: Path, format: str) -> None:
    """Training does not change the file; replacing or deleting the file does not change the model."""
    model = tiny("gpt2")
    save(model, tmp_path / "x", format=format)
    before = (tmp_path / "x" / "model.safetensors").read_bytes()
    first, second = load(tmp_path / "x"), load(tmp_path / "x")
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.add_(1.0)
    assert (tmp_path / "x" / "model.safetensors").read_bytes() == before
    assert same(second, model)
    save(first, tmp_path / "x", format=format)
    assert same(second, model)
    assert same(load(tmp_path / "x"), first)
    shutil.rmtree(tmp_path / "x")
    assert same(second, model)


def test_a_file_system_that_can_not_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(19, "No such device")

    model = tiny("gpt2")
    save(model, tmp_path / "x", shard_bytes=2000)
    monkeypatch.setattr("clearhead.checkpoint.weight_files.mmap.mmap", refuse)
    assert same(model, load(tmp_path / "x"))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_copied_tensors_are_not_held_twice(tmp_path: Path) -> None:
    """Queries, keys and values that are not neighbours are copied from the mapped file, whose memory is then released."""
    sizes: dict[str, Any] = dict(n_layers=4, d_model=512, n_heads=8, d_head=64, d_ff=2048, vocab_size=1000)
    save(ch.build(ch.preset("llama-7b", **sizes)), tmp_path / "x", format="hf")
    size = (tmp_path / "x" / "model.safetensors").stat().st_size
    code = f"""
import clearhead as ch, re
held = lambda: 1024 * int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1])
before = held()
model = ch.load({str(tmp_path / "x")!r})
total = sum(float(p.sum()) for p in model.parameters())
print((held() - before) / {size})
"""
    ran = subprocess.run(
        [sys.executable, "-c", "import torch, clearhead.checkpoint" + code], capture_output=True, text=True
    )
    assert 0.9 < float(ran.stdout) < 1.3, ran.stdout + ran.stderr


def test_unaligned_numbers(tmp_path: Path) -> None:
    """The format needs no alignment: a header may have any length."""
    model = tiny("gpt2")
    file = save(model, tmp_path / "x") / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].rstrip()
    header += b" " * (1 - len(header) % 2)  # odd: no number is aligned to its size
    file.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
    assert same(model, load(tmp_path / "x"))


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16, torch.float64), (torch.float16, torch.float32)])
def test_other_readers_read_what_is_written(tmp_path: Path, dtypes: tuple[torch.dtype, ...]) -> None:
    from safetensors.torch import load_file

    tensors = {f"t{n}": torch.randn(n, 3).to(dtypes[n % len(dtypes)]) for n in range(7)}
    write_safetensors(tmp_path / "x.safetensors", tensors)
    again = load_file(tmp_path / "x.safetensors")
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensors[name]) and again[name].dtype == tensors[name].dtype for name in tensors)


QUICK = """
import sys
import clearhead as ch
model = ch.load(sys.argv[1])
ch.generate(model, [[1, 2, 3]], max_new_tokens=2)
heavy = [name for name in ("torch._dynamo", "sympy", "transformers", "rich", "typer", "scipy", "pandas") if name in sys.modules]
print(heavy)
"""


@pytest.mark.slow
def test_loading_and_writing_import_no_compiler(tmp_path: Path) -> None:
    """Importing torch takes a second; a model on the meta device must not import its compiler or sympy too."""
    save(tiny("gpt2"), tmp_path / "x", format="hf")
    found = subprocess.run(
        [sys.executable, "-c", QUICK, str(tmp_path / "x")], check=True, timeout=300, capture_output=True, text=True
    )
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("format", ["clearhead", "hf"])
def test_loaded_in_inference_mode_a_model_can_be_trained(tmp_path: Path, format: Any) -> None:
    model = ch.build(ch.preset("gpt2", n_layers=1, d_model=32, n_heads=2, d_ff=64, vocab_size=50, max_len=16))
    ch.save(model, tmp_path / "a", format=format)
    with torch.inference_mode():
        again = ch.load(tmp_path / "a")
    again(torch.tensor([[1, 2, 3]])).sum().backward()
    assert all(parameter.grad is not None for parameter in again.parameters())


@pytest.mark.usefixtures("unchecked")
def test_a_dtype_and_a_device_that_are_none(tmp_path: Path) -> None:
    save(tiny("gpt2"), tmp_path / "x")
    for make in (lambda **given: load(tmp_path / "x", **given), lambda **given: ch.build(tiny("gpt2").config, **given)):
        for wrong in ("float16", torch.int8):
            with pytest.raises(
                ch.ConfigError, match=rf"dtype={wrong!r} is no floating-point type of torch's; pass one"
            ):
                make(dtype=wrong)
    with pytest.raises(ch.InputError, match=r"device='gpu' is no device of torch's"):
        load(tmp_path / "x", device="gpu")
