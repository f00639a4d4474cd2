"""What 4 bits cost a LLaMA-like decoder, plain and calibrated: the perplexity of a text that calibration does not see.

    .venv/bin/python benchmarks/quality/int4.py MODEL tinyshakespeare.txt --calibrate captions.txt sentences.txt --move columns
    .venv/bin/python benchmarks/quality/int4.py MODEL tinyshakespeare.txt --kinds int8 w8a8 int4 w4a8      and 8 bits

Weights that were rounded to 4 bits before (SmolLM2's GGUF file) would show no loss. `--move` takes them off the 4-bit values in
a way that changes no result: `columns` multiplies them by random factors of about 10%, and divides what feeds them; `norms` also
multiplies the norms' weights into the matrices behind them. Prints a table; one core: `OMP_NUM_THREADS=1`.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clearhead as ch
from clearhead.cli.arguments import load_tokenizer_of
from clearhead.limits import QUANTIZATIONS
from clearhead.models import Decoder
from clearhead.quantization.integer import quantize

LENGTH = 512  # tokens of a row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path, help="its last tokens are measured")
    parser.add_argument("--kinds", nargs="+", default=["int4"], choices=list(QUANTIZATIONS))
    parser.add_argument("--calibrate", type=Path, nargs="+", default=[], metavar="FILE", help="for 4 bits")
    parser.add_argument("--move", choices=["no", "columns", "norms"], default="no")
    parser.add_argument("--tokens", type=int, default=8192, help="measured, and used to calibrate")
    options = parser.parse_args()
    tokenizer = load_tokenizer_of(options.model)
    ids = tokenizer.encode(options.text.read_text(encoding="utf-8"))[-options.tokens :]
    rows = torch.tensor(ids[: len(ids) // LENGTH * LENGTH]).view(-1, LENGTH)
    each = options.tokens // max(1, len(options.calibrate))
    texts = [tokenizer.encode(file.read_text(encoding="utf-8"))[:each] for file in options.calibrate]
    whole = measure(load(options.model, options.move), rows)
    print(f"perplexity {math.exp(whole.mean()):.3f} on {rows.numel():,} tokens with full weights\n")
    print("| weights | perplexity | change | CPU time of rounding |\n|---|---|---|---|")
    plain = [(kind, kind, None) for kind in options.kinds]
    calibrated = [
        (f"{kind}, calibrated", kind, texts) for kind in options.kinds if texts and QUANTIZATIONS[kind][0] == 4
    ]
    for name, kind, calibrate in plain + calibrated:
        model, start = load(options.model, options.move), time.process_time()
        quantize(model, kind, calibrate=calibrate)
        seconds, found = time.process_time() - start, measure(model, rows)
        change = math.exp((found - whole).mean()) - 1
        error = float((found - whole).std()) / math.sqrt(len(rows)) * (1 + change)  # one standard error over rows
        print(f"| {name} | {math.exp(found.mean()):.3f} | {change:+.2%} ± {error:.2%} | {seconds:.0f} s |", flush=True)


def load(path: Path, move: str) -> Decoder:
    model = ch.load(path, dtype=torch.float32)
    assert isinstance(model, Decoder)
    if move != "no":
        move_weights(model, into_norms=move == "norms")
    return model


@torch.no_grad()
def move_weights(model: Decoder, *, into_norms: bool) -> None:
    """Multiply columns of the blocks' matrices, and divide the rows or norms before them, by the same factors."""
    config, generator = model.config, torch.Generator().manual_seed(0)

    def factors(n: int) -> Tensor:
        return torch.exp(0.1 * torch.randn(n, generator=generator))

    for block in model.blocks:
        attention, feedforward = block.attention, block.feedforward
        for norm, product in ((block.attention_norm, attention.qkv), (block.feedforward_norm, feedforward.gate_up)):
            by = norm.weight.clone() if into_norms else factors(config.d_model)
            product.weight, norm.weight = nn.Parameter(product.weight * by), nn.Parameter(norm.weight / by)
        n, d_ff = config.n_kv_heads * config.d_head, config.d_ff
        by = factors(n)
        shared = by.view(config.n_kv_heads, 1, -1).expand(-1, config.n_heads // config.n_kv_heads, -1).flatten()
        attention.qkv.weight[-n:] /= by[:, None]
        attention.o_proj.weight *= shared
        by = factors(d_ff)
        feedforward.gate_up.weight[d_ff:] /= by[:, None]
        feedforward.down.weight *= by


@torch.no_grad()
def measure(model: Decoder, rows: Tensor) -> Tensor:
    """The mean loss of each row."""
    return torch.stack([F.cross_entropy(model(row[None])[0, :-1], row[1:]) for row in rows]).double()


if __name__ == "__main__":
    main()
