"""Training steps of a translator for throughput.py: ours, and those of other libraries, on batches of real lengths."""

from __future__ import annotations

import gzip
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.gpu.train_contenders import Step, ours, theirs

BATCHES = 12  # of real lengths, taken in turn


# Translation: batches of real lengths, each sentence's four times as long


def pair_lengths(folder: str) -> list[tuple[int, int]]:
    if not folder:
        draw = random.Random(0)
        sources = [int(draw.gauss(52, 18)) for _ in range(29000)]
        return [(s, max(4, s + draw.randint(-8, 8))) for s in sources if s > 8]
    files = [Path(folder, f"train.{side}.gz") for side in ("en", "de")]
    sides = [gzip.decompress(file.read_bytes()).decode().splitlines() for file in files]
    return [(4 * len(a.split()) + 1, 4 * len(b.split()) + 1) for a, b in zip(*sides, strict=True)]


def padded_pairs(options: dict[str, Any], budget: int = 32768) -> list[tuple[Any, ...]]:
    """Sources, targets and their masks: rows of like length together, at most `budget` tokens with padding."""
    draw = random.Random(1)
    lengths = sorted(pair_lengths(options["multi30k"]), key=lambda pair: (max(pair) + draw.random() * 8, pair))
    rows: list[list[tuple[int, int]]] = [[]]
    for pair in lengths:
        widest = max(max(p) for p in [*rows[-1], pair])
        if (len(rows[-1]) + 1) * widest > budget:
            rows.append([])
        rows[-1].append(pair)
    draw.shuffle(rows)
    batches: list[tuple[Any, ...]] = []
    for part in rows[:BATCHES]:
        widths = [-(-max(pair[side] for pair in part) // 8) * 8 for side in (0, 1)]
        tokens = [torch.randint(4, 32000, (len(part), width), device="cuda") for width in widths]
        reals = [
            torch.arange(width, device="cuda") < torch.tensor([pair[side] for pair in part], device="cuda")[:, None]
            for side, width in zip((0, 1), widths, strict=True)
        ]
        batches.append((*tokens, *reals))
    return batches


def clearhead_translate(options: dict[str, Any]) -> tuple[Step, int]:
    """As `clearhead train` lays pairs on a GPU: one after the other, nothing padded, all batches of one shape."""
    import clearhead as ch
    from clearhead.data.batch_order import PackedOrder
    from clearhead.kernels.cross_entropy import IGNORED
    from clearhead.training.tasks.packed_pairs import PackedShape, pack, pair_states
    from clearhead.training.tasks.task import token_losses

    model: Any = ch.build(ch.preset("transformer-base", vocab_size=32000, dropout=0.0), device="cuda").train()
    lengths = [np.array(side) for side in zip(*pair_lengths(options["multi30k"]), strict=True)]
    shape = PackedShape.of(lengths, 32768, 256)
    order = PackedOrder(lengths, shape.free, 0, shape.texts - shape.sizes[0] // 256)
    draw, batches = np.random.default_rng(0), list[dict[str, Any]]()
    for rows in map(order.rows, range(BATCHES)):
        texts = [[draw.integers(4, 32000, n) for n in side[rows]] for side in lengths]
        (source, starts), (targets, at) = pack((texts[0], texts[1]), (0, IGNORED), shape)
        batch = dict(source=source, starts=starts, target=targets.clamp(min=0), at=at, targets=targets)
        batches.append({name: x.cuda() for name, x in batch.items()} | {"count": int(lengths[1][rows].sum())})

    def losses(m: Any, b: dict[str, Any]) -> Any:
        states = pair_states(m, (b["source"], b["starts"]), (b["target"], b["at"]), shape.longest)
        return token_losses(m, states, b["targets"], 0.1)

    return ours(model, losses, batches, sum(b["count"] for b in batches) // BATCHES, record=False)


def their_pairs(
    model: Any, logits: Callable[..., Any], parts: Sequence[Any], options: dict[str, Any]
) -> tuple[Step, int]:
    """Padded batches for a model that gives logits. Its `parts` and the loss are compiled, each kind once, for any shape."""
    for part in parts:
        part.compile(dynamic=True)
    given, turn = padded_pairs(options), [0]

    @torch.compile(dynamic=True)
    def loss(scores: Any, labels: Any) -> Any:
        return F.cross_entropy(scores.flatten(0, 1).float(), labels.flatten(), label_smoothing=0.1)

    def objective() -> Any:
        source, target, real_source, real = given[turn[0] % len(given)]
        turn[0] += 1
        return loss(logits(source, target, real_source), torch.where(real, target, -100))

    return theirs(model, objective, int(sum(int(batch[3].sum()) for batch in given) / len(given)))


def marian(options: dict[str, Any]) -> tuple[Step, int]:
    from transformers import MarianConfig, MarianMTModel

    sizes = dict(encoder_layers=6, decoder_layers=6, encoder_ffn_dim=2048, decoder_ffn_dim=2048, d_model=512)
    config = MarianConfig(
        vocab_size=32000, encoder_attention_heads=8, decoder_attention_heads=8, dropout=0.0, use_cache=False, pad_token_id=0,
        eos_token_id=1, decoder_start_token_id=0, max_position_embeddings=1024, attn_implementation="sdpa",
        activation_function="relu", **sizes,
    )  # fmt: skip
    model = MarianMTModel(config).cuda().train()

    def logits(source: Any, target: Any, real: Any) -> Any:
        return model(input_ids=source, attention_mask=real.long(), decoder_input_ids=target).logits

    return their_pairs(model, logits, [*model.model.encoder.layers, *model.model.decoder.layers], options)


class EncoderLayer(torch.nn.TransformerEncoderLayer):
    """torch's; a class of our own, since torch's compiler leaves out layers of torch that are called by torch."""

    def forward(self, *given: Any, **more: Any) -> Any:
        return super().forward(*given, **more)


class DecoderLayer(torch.nn.TransformerDecoderLayer):
    def forward(self, *given: Any, **more: Any) -> Any:
        return super().forward(*given, **more)


class TorchTranslator(torch.nn.Module):
    """torch.nn.Transformer with the embeddings and the head that it lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(32000, 512)
        self.places = torch.nn.Embedding(1024, 512)
        sizes: dict[str, Any] = dict(d_model=512, nhead=8, dim_feedforward=2048, dropout=0.0, batch_first=True)
        encoder = torch.nn.TransformerEncoder(EncoderLayer(**sizes), 6, torch.nn.LayerNorm(512))
        decoder = torch.nn.TransformerDecoder(DecoderLayer(**sizes), 6, torch.nn.LayerNorm(512))
        self.core = torch.nn.Transformer(512, 8, custom_encoder=encoder, custom_decoder=decoder, batch_first=True)
        torch.nn.init.normal_(self.tokens.weight, std=512**-0.5)  # it is the head too

    def forward(self, source: Any, target: Any, real: Any) -> Any:
        enter = [self.tokens(x) + self.places.weight[: x.shape[1]] for x in (source, target)]
        n = target.shape[1]
        future = torch.nn.Transformer.generate_square_subsequent_mask(n, device=target.device, dtype=torch.bool)
        hidden = dict(src_key_padding_mask=~real, memory_key_padding_mask=~real)
        states = self.core(*enter, tgt_mask=future, tgt_is_causal=True, **hidden)  # padding on the right is never seen
        return states @ self.tokens.weight.T


def torch_translate(options: dict[str, Any]) -> tuple[Step, int]:
    model = TorchTranslator().cuda().train()
    return their_pairs(model, model, [*model.core.encoder.layers, *model.core.decoder.layers], options)


def x_translate(options: dict[str, Any]) -> tuple[Step, int]:
    """Its attention would be compiled anew for each shape, so that it runs as it is."""
    from x_transformers import XTransformer

    side = dict(num_tokens=32000, depth=6, heads=8, max_seq_len=1024, attn_flash=True)
    both = {f"{part}_{name}": value for part in ("enc", "dec") for name, value in side.items()}
    model = XTransformer(dim=512, tie_token_emb=True, **both).cuda().train()
    encoder, decoder = model.encoder, model.decoder.net

    def logits(source: Any, target: Any, real: Any) -> Any:
        memory = encoder(source, mask=real, return_embeddings=True)
        return decoder(target, context=memory, context_mask=real)

    steps = [layer[1] for stack in (encoder, decoder) for layer in stack.attn_layers.layers]
    return their_pairs(model, logits, [step for step in steps if type(step).__name__ == "FeedForward"], options)
