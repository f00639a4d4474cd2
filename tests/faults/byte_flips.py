"""Every byte of our own files changed, one at a time: loading refuses the file, or returns exactly what was saved.

.venv/bin/python -m tests.faults.byte_flips                       # every byte of tiny files: a minute or two
.venv/bin/python -m tests.faults.byte_flips --share 0.05 --seed 3 # some of them, drawn from this seed

Files: a model's config.json and model.safetensors (header and numbers), a checkpoint of a run (state.json and tensors), a store of
tokens, a tokenizer. A byte is replaced by another one, drawn from the seed. What reads the same after it (a space for a line break
in JSON) is counted as harmless.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import clearhead as ch
from clearhead.checkpoint import load, save
from clearhead.checkpoint.run_checkpoint import describe
from clearhead.data import load_tokenizer, train_tokenizer
from clearhead.data.token_store import Store, StoreWriter
from clearhead.data.tokenizer import ROLES
from clearhead.errors import ClearheadError
from clearhead.training.checkpoints import Checkpoints, State
from clearhead.training.distributed import Processes

Read = Callable[[], Any]  # what a folder holds, as plain values that can be compared


def model_files(folder: Path) -> tuple[list[Path], Read]:
    model: Any = ch.build(
        ch.preset("gpt2", n_layers=1, d_model=4, n_heads=2, d_ff=5, vocab_size=7, max_len=5),
        seed=0,
        dtype=torch.float16,
    )
    save(model, folder)

    def read() -> Any:
        found: Any = load(folder)
        state = {name: (str(t.dtype), t.tolist()) for name, t in found.state_dict().items()}
        return found.config, found.generation, state, {name: t.tolist() for name, t in found.extras.items()}

    return sorted(folder.iterdir()), read


def checkpoint_files(folder: Path) -> tuple[list[Path], Read]:
    model: Any = ch.build(ch.preset("gpt2", n_layers=1, d_model=4, n_heads=2, d_ff=5, vocab_size=7, max_len=5), seed=0)
    tensors = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    place = Processes(torch.device("cpu"))
    checkpoints = Checkpoints(folder, place, describes=describe(model), note=lambda _: None)
    checkpoints.write(State(step=3, tokens=41, seconds=1.5, best=2.5), tensors)

    def read() -> Any:
        found = checkpoints.newest()
        if found is None:
            raise ClearheadError("damaged, and passed over")
        into = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
        checkpoints.read(found[0], into)
        return found, {name: t.tolist() for name, t in into.items()}

    return sorted((folder / "step-00000003").iterdir()), read


def store_files(folder: Path) -> tuple[list[Path], Read]:
    with StoreWriter(folder, {"text": np.uint16, "label": np.int64}, {"label": ()}) as writer:
        for row in range(7):
            writer.add(text=list(range(row)), label=row)
        writer.info = {"fingerprint": "x" * 20}

    def read() -> Any:
        store = Store(folder)
        store.check()  # as `Preparation.is_done` does before a store is used again
        columns = {name: [np.asarray(row).tolist() for row in store[name]] for name in ("text", "label")}  # type: ignore[union-attr]
        return store.info, len(store), columns

    return sorted(folder.iterdir()), read


def tokenizer_files(folder: Path) -> tuple[list[Path], Read]:
    train_tokenizer(texts=["a text of some words, and another text"], vocab_size=270).save(folder)

    def read() -> Any:
        found = load_tokenizer(folder)
        return found.core.to_str(), [getattr(found, role) for role in ROLES], found.chat_template

    return sorted(folder.iterdir()), read


KINDS = {"model": model_files, "checkpoint": checkpoint_files, "store": store_files, "tokenizer": tokenizer_files}


def flip_all(files: list[Path], read: Read, share: float, rng: random.Random) -> dict[str, Counter[str]]:
    """What became of each changed byte, by file."""
    expected = repr(read())
    ends: dict[str, Counter[str]] = {}
    for file in files:
        whole, count = file.read_bytes(), ends.setdefault(file.name, Counter())
        for at in range(len(whole)):
            if rng.random() >= share:
                continue
            other = (whole[at] + rng.randrange(1, 256)) % 256
            file.write_bytes(whole[:at] + bytes([other]) + whole[at + 1 :])
            try:
                end = "harmless" if repr(read()) == expected else "undetected"
            except ClearheadError:
                end = "refused"
            if end == "undetected":
                print(
                    f"undetected: byte {at} of {file.name}: {whole[at]} became {other}: {whole[max(0, at - 20) : at + 20]!r}"
                )
            count[end] += 1
        file.write_bytes(whole)
    assert repr(read()) == expected
    return ends


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=1.0, help="of the bytes")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    began, total = time.monotonic(), Counter[str]()
    with tempfile.TemporaryDirectory() as made:
        for kind, make in KINDS.items():
            for name, ends in flip_all(
                *make(Path(made) / kind), args.share, random.Random(f"{kind} {args.seed}")
            ).items():
                total += ends
                print(f"bytes: {kind}, {name}: {ends.total():,} changed, one at a time:", dict(ends), flush=True)
    print(f"bytes: {total.total():,} in all, seed {args.seed}: {dict(total)}, in {time.monotonic() - began:.0f} s")
    return 1 if total["undetected"] else 0


if __name__ == "__main__":
    sys.exit(main())
