"""Sentences to vectors on the CPU: encoders of MiniLM's and of BERT-base's shape, random weights.

All contenders have the same weights and must give the same vectors. Each computes sentences of like length together.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common.onnx_contenders import be_quiet, onnx_runtime
from benchmarks.common.results import Table
from benchmarks.common.timing import (
    choose_threads,
    how_timed,
    in_fresh_process,
    interleave,
    product_peak,
    ratio,
    spread,
    utilisation,
)
from clearhead.checkpoint import load
from clearhead.costs import cost
from clearhead.generation import embeddings as vectors
from clearhead.models import Encoder

SIZES = {
    "MiniLM-L6": dict(num_hidden_layers=6, hidden_size=384, num_attention_heads=12, intermediate_size=1536),
    "BERT-base": dict(num_hidden_layers=12, hidden_size=768, num_attention_heads=12, intermediate_size=3072),
}
SENTENCES = {"MiniLM-L6": 256, "BERT-base": 48}
BATCH = 16  # of those that pad


def measure(options: Namespace) -> Iterator[Table]:
    for name in list(SIZES)[: 1 if options.quick else None]:
        yield in_fresh_process(time_size, name, 3 if options.quick else 4, options.shared)


def time_size(name: str, rounds: int, shared: bool) -> Table:
    warnings.filterwarnings("ignore")
    be_quiet()
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    # CTranslate2's converter asks for the kind of positions, which transformers 5 no longer writes.
    config = BertConfig(attn_implementation="sdpa", position_embedding_type="absolute", **SIZES[name])
    model = BertModel(config, add_pooling_layer=False).eval()
    rows = sentences(SENTENCES[name])
    threads = choose_threads(shared)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        ours = load(Path(folder)).eval()
        assert isinstance(ours, Encoder)
        contenders = {
            "clearhead": lambda: embed(ours, rows),
            "transformers": lambda: in_batches(rows, lambda ids, real: run_torch(model, ids, real)),
            "CTranslate2": ctranslate(Path(folder), rows, threads),
            **onnx(model, Path(folder), rows, threads),
        }
        check_same({who: run() for who, run in contenders.items()})
        times = interleave(contenders, rounds=rounds, shared=shared)
    peak, flops = product_peak(shared), sum(cost(ours.config, batch=1, length=len(row)).useful_flops for row in rows)
    table = [
        [
            who,
            f"{len(rows) / statistics.median(times[who]):,.1f}",
            f"{spread(times[who]):.1%}",
            utilisation(flops, statistics.median(times[who]), peak),
            "" if who == "clearhead" else f"{ratio(times, 'clearhead', who):.2f} x",
        ]
        for who in contenders
    ]
    return Table(
        title=f"encoding, {name}'s shape",
        columns=["library", "sentences/s", "spread", "MFU", "clearhead is"],
        rows=table,
        note=f"{len(rows)} sentences of 5 to 128 tokens, float32; {how_timed(rounds, shared)}; MFU: operations of real tokens "
        f"over this machine's best product, {peak / 1e9:.0f} GFLOP/s",
        raw={"times": times, "flops": flops, "peak": peak},
    )


def sentences(n: int) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randint(1000, 29000) for _ in range(draw.randint(5, 128))] for _ in range(n)]


def embed(model: Encoder, rows: list[list[int]]) -> np.ndarray:
    """From ids, so that nobody's time has tokenising in it."""
    return vectors.embed_ids(model, rows, pool="mean")


Run = Callable[[np.ndarray, np.ndarray], np.ndarray]


def in_batches(rows: list[list[int]], run: Run) -> np.ndarray:
    """Means of the states, brought to length 1, by a function of padded ids and what of them is real."""
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
    found: list[np.ndarray | None] = [None] * len(rows)
    for first in range(0, len(order), BATCH):
        part = order[first : first + BATCH]
        width = max(len(rows[i]) for i in part)
        ids = np.zeros((len(part), width), np.int64)
        real = np.zeros((len(part), width), np.int64)
        for place, i in enumerate(part):
            ids[place, : len(rows[i])], real[place, : len(rows[i])] = rows[i], 1
        states = run(ids, real) * real[..., None]
        for place, i in enumerate(part):
            mean = states[place].sum(0) / real[place].sum()
            found[i] = mean / np.linalg.norm(mean)
    return np.stack([row for row in found if row is not None])


@torch.no_grad()
def run_torch(model: Any, ids: np.ndarray, real: np.ndarray) -> np.ndarray:
    return model(input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(real)).last_hidden_state.numpy()


def ctranslate(folder: Path, rows: list[list[int]], threads: int) -> Callable[[], np.ndarray]:
    import ctranslate2
    from transformers import BertTokenizerFast

    words = folder / "vocab.txt"
    words.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(5, 30522))]))
    BertTokenizerFast(str(words)).save_pretrained(folder)
    ctranslate2.converters.TransformersConverter(str(folder)).convert(str(folder / "ct2"), force=True)
    encoder = ctranslate2.Encoder(str(folder / "ct2"), device="cpu", intra_threads=threads)

    def run(ids: np.ndarray, real: np.ndarray) -> np.ndarray:
        given = [row[:n].tolist() for row, n in zip(ids, real.sum(1), strict=True)]
        return np.array(encoder.forward_batch(given).last_hidden_state)

    return lambda: in_batches(rows, run)


def onnx(model: Any, folder: Path, rows: list[list[int]], threads: int) -> dict[str, Callable[[], np.ndarray]]:
    ids, real = torch.randint(5, 99, (3, 17)), torch.ones(3, 17, dtype=torch.int64)
    real[1, 9:] = 0  # so that no exporter takes it for a mask of nothing
    examples = {"input_ids": ids, "attention_mask": real}
    # As written out, attention is what ONNX Runtime's fusions know.
    model.set_attn_implementation("eager")
    made = onnx_runtime(model, examples, "last_hidden_state", folder, threads, "bert")
    model.set_attn_implementation("sdpa")
    return {who: lambda run=run: in_batches(rows, run) for who, run in made.items()}


def check_same(found: dict[str, np.ndarray]) -> None:
    for who, rows in found.items():
        apart = float(np.abs(rows - found["clearhead"]).max())
        if apart > 1e-3:
            raise SystemExit(f"{who}'s vectors are not clearhead's: {apart:.1e} apart")
