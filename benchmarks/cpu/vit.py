"""Pictures to classes on the CPU: one forward pass of ViT-B/16, random weights, 1 and 8 pictures at once.

All contenders have the same weights and must give the same scores.
"""

from __future__ import annotations

import statistics
import tempfile
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

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
from clearhead.kernels.onednn import Copies, laid_out
from clearhead.models import Model

BATCHES = (1, 8)


def measure(options: Namespace) -> Iterator[Table]:
    yield in_fresh_process(time_batches, 3 if options.quick else 5, options.shared)


@torch.no_grad()
def time_batches(rounds: int, shared: bool) -> Table:
    warnings.filterwarnings("ignore")
    be_quiet()
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    threads = choose_threads(shared)
    model = ViTForImageClassification(ViTConfig(attn_implementation="sdpa", num_labels=1000)).eval()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        ours = load(Path(folder)).eval()
        model.set_attn_implementation("eager")
        example = {"pixel_values": torch.randn(2, 3, 224, 224)}
        exported = onnx_runtime(model, example, "logits", Path(folder), threads, "vit")
        model.set_attn_implementation("sdpa")
    contenders = {
        "clearhead": lambda pictures: ours(pictures),
        "clearhead, laid out": prepared(ours),
        "transformers": lambda pictures: model(pictures).logits,
        **{who: lambda pictures, run=run: torch.from_numpy(run(pictures.numpy())) for who, run in exported.items()},
    }
    peak = product_peak(shared)
    rows: list[list[str]] = []
    raw: dict[str, object] = {"peak": peak}
    for batch in BATCHES:
        pictures = torch.randn(batch, 3, 224, 224)
        found = {who: run(pictures) for who, run in contenders.items()}
        for who, scores in found.items():
            # float32, twelve layers, scores near 1
            torch.testing.assert_close(
                scores, found["clearhead"], rtol=0, atol=1e-4, msg=lambda text, who=who: f"{who}: {text}"
            )
        runs = {who: lambda run=run, pictures=pictures: run(pictures) for who, run in contenders.items()}
        more = 3 if batch == 1 else 1  # as it is over soon
        raw[f"times, {batch}"] = times = interleave(runs, rounds=more * rounds, shared=shared)
        flops = cost(ours.config, batch=batch).useful_flops
        for who, taken in times.items():
            middle = statistics.median(taken)
            ahead = ["" if who.startswith("clearhead") else f"{ratio(times, us, who):.2f} x" for us in list(times)[:2]]
            used = utilisation(flops, middle, peak)
            rows.append([who, str(batch), f"{batch / middle:,.2f}", f"{spread(taken):.1%}", used, *ahead])
    return Table(
        title="forward pass, ViT-B/16",
        columns=["library", "pictures at once", "pictures/s", "spread", "MFU", "clearhead is", "laid out"],
        rows=rows,
        note=f"224 x 224, float32; {how_timed(rounds, shared)}, three times as many of one picture; laid out: weights, beforehand; "
        f"MFU: over this machine's best product, {peak / 1e9:.0f} GFLOP/s",
        raw=raw,
    )


def prepared(model: Model) -> Callable[[torch.Tensor], torch.Tensor]:
    """The weights in the layout of the CPU's products, once for all calls, as ONNX Runtime does it; in memory they are twice."""
    copies: Copies = {}

    def run(pictures: torch.Tensor) -> torch.Tensor:
        with laid_out(copies):
            return model(pictures)

    return run
