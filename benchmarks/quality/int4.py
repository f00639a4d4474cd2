"""What 4 bits cost a LLaMA-like decoder, plain and calibrated: the perplexity of a text that calibration does not see.

    .venv/bin/python benchmarks/quality/int4.py MODEL tinyshakespeare.txt --calibrate tinyshakespeare.txt --move columns
    .venv/bin/python benchmarks/quality/int4.py MODEL tinyshakespeare.txt --calibrate captions.txt sentences.txt --move norms
    .venv/bin/python benchmarks/quality/int4.py MODEL tinyshakespeare.txt --kinds int8 w8a8 int4 w4a8      and 8 bits
    .venv/bin/python benchmarks/quality/int4.py stories260K.bin --own                                      texts of its own

The last tokens of the text are measured, and calibration gets the files whole, as `--calibrate FILE` does, but without these.
Weights that were rounded to 4 bits before (SmolLM2's GGUF file) would show no loss. `--move` takes them off the 4-bit values in
a way that changes no result: `columns` multiplies them by random factors of about 10%, and divides what feeds them; `norms` also
multiplies the norms' weights into the matrices behind them. Prints a table; one core: `OMP_NUM_THREADS=1`.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clearhead as ch
from clearhead.cli.arguments import load_tokenizer_of
from clearhead.limits import QUANTIZATIONS
from clearhead.models import Decoder
from clearhead.quantization.integer import Quantized, quantize

LENGTH = 512  # tokens of a row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path, nargs="?", help="its last tokens are measured")
    parser.add_argument(
        "--own", action="store_true", help="measure and calibrate on texts that the model writes itself"
    )
    parser.add_argument("--kinds", nargs="+", default=["int4"], choices=list(QUANTIZATIONS))
    parser.add_argument("--calibrate", type=Path, nargs="+", default=[], metavar="FILE", help="for 4 bits")
    parser.add_argument("--move", choices=["no", "columns", "norms"], default="no")
    parser.add_argument("--tokens", type=int, default=8192, help="measured")
    options = parser.parse_args()
    if options.own == (options.text is not None):
        parser.error("give a text, or --own")
    model = load(options.model, options.move)
    rows, texts = own_texts(model, options.tokens) if options.own else read_texts(options)
    whole = list(predictions(model, rows))
    before = losses(whole, rows)
    print(f"perplexity {math.exp(before.mean()):.3f} on {rows.numel():,} tokens with full weights\n")
    print("| weights | bits | perplexity | change | KL divergence | CPU time of rounding |\n|---|---|---|---|---|---|")
    plain = [(kind, kind, None) for kind in options.kinds]
    calibrated = [
        (f"{kind}, calibrated", kind, texts) for kind in options.kinds if texts and QUANTIZATIONS[kind][0] == 4
    ]
    for name, kind, calibrate in plain + calibrated:
        model, start = load(options.model, options.move), time.process_time()
        quantize(model, kind, calibrate=calibrate)
        seconds, packed = time.process_time() - start, list(predictions(model, rows))
        found = losses(packed, rows)
        change, error = math.exp((found - before).mean()) - 1, standard_error(found - before)
        apart = divergences(whole, packed)
        print(
            f"| {name} | {block_bits(model):.2f} | {math.exp(found.mean()):.3f} | {change:+.2%} ± {error * (1 + change):.2%} | "
            f"{apart.mean():.4f} ± {standard_error(apart):.4f} | {seconds:.0f} s |",
            flush=True,
        )


def read_texts(options: argparse.Namespace) -> tuple[Tensor, list[list[int]]]:
    """Rows to measure, and texts to calibrate on."""
    tokenizer = load_tokenizer_of(options.model)
    ids, *texts = (tokenizer.encode(file.read_text(encoding="utf-8")) for file in [options.text, *options.calibrate])
    rows = torch.tensor(ids[-options.tokens :][: options.tokens // LENGTH * LENGTH]).view(-1, LENGTH)
    same = (file.resolve() == options.text.resolve() for file in options.calibrate)
    return rows, [text[: -options.tokens] if is_same else text for text, is_same in zip(texts, same, strict=True)]


def own_texts(model: Decoder, tokens: int) -> tuple[Tensor, list[list[int]]]:
    """The same, drawn from the model's own probabilities."""
    start, n = [[model.generation.bos]], tokens // LENGTH
    written = ch.generate(model, start * 2 * n, max_new_tokens=LENGTH - 1, min_new_tokens=LENGTH - 1, temperature=1.0)
    rows = [start[0] + row for row in written]
    return torch.tensor(rows[:n]), rows[n:]


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
def predictions(model: Decoder, rows: Tensor) -> Iterator[Tensor]:
    """The log-probabilities of each row's tokens, in 16 bits: all of them are 49,152 numbers for each token."""
    for row in rows:
        yield model(row[None])[0].log_softmax(-1).half()


def losses(found: Iterable[Tensor], rows: Tensor) -> Tensor:
    """The mean loss of each row."""
    return torch.stack([F.nll_loss(each[:-1].float(), row[1:]) for each, row in zip(found, rows, strict=True)]).double()


def divergences(whole: Iterable[Tensor], found: Iterable[Tensor]) -> Tensor:
    """The mean KL divergence of each row from what full weights predict."""
    both = ((w.float(), f.float()) for w, f in zip(whole, found, strict=True))
    return torch.stack([F.kl_div(f, w, log_target=True, reduction="batchmean") for w, f in both]).double()


def standard_error(rows: Tensor) -> float:
    return float(rows.std()) / math.sqrt(len(rows))


def block_bits(model: nn.Module) -> float:
    """A weight's bits in the blocks."""
    packed = [each for name, each in model.named_modules() if isinstance(each, Quantized) and "blocks." in name]
    held = sum(8 * getattr(each, name).nbytes for each in packed for name in each.tensors)
    return held / sum(each.shape.numel() for each in packed)


if __name__ == "__main__":
    main()
