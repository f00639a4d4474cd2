"""Training and encoding on one CUDA GPU, beside other libraries, each in a process of its own; one after the other, in rounds.

    python3 benchmarks/gpu.py --nanogpt nanoGPT/model.py --multi30k multi30k/ --out benchmarks/results/gpu.json
    python3 benchmarks/gpu.py --only gpt2 translate --rounds 3

Works: gpt2, gpt2-long, translate, vit, bert (training steps: forward, backward, clipping, AdamW), encode-minilm, encode-bert.
All contenders compile side by side first; then each is timed alone, in turns. Weights and tokens are random, lengths real
where said. bfloat16 products by autocast for all; clearhead with train.stream=bfloat16. A work that --out already tells of is
replaced, the others stay.

A contender is a function that takes the options and returns a step and how much one step does; WORKS names them.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import multiprocessing as mp
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent.parent))

Step = Callable[[], Any]
VOCAB = 50304
BATCHES = 12  # of real lengths, taken in turn
EACH = {"translate": BATCHES, "encode-minilm": 1, "encode-bert": 1}  # steps between two looks at the clock, else 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(WORKS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.5, help="of one timing")
    parser.add_argument("--patience", type=float, default=75, help="seconds until all contenders must be ready")
    parser.add_argument("--nanogpt", default="", help="path of nanoGPT's model.py")
    parser.add_argument("--multi30k", default="", help="folder with train.en.gz and train.de.gz, for their lengths")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("gpu.py needs a CUDA GPU, and torch sees none here; run.py measures the CPU")
    before = json.loads(options.out.read_text())["works"] if options.out and options.out.exists() else {}
    told: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "works": before,
    }
    for name in options.only:
        told["works"][name] = compare(name, options)
        if options.out:
            options.out.write_text(json.dumps(told, indent=1) + "\n")


def compare(work: str, options: argparse.Namespace) -> dict[str, Any]:
    """All contenders of a work, in turns."""
    spawn = mp.get_context("spawn")
    names = [name for name in WORKS[work] if name != "nanogpt" or options.nanogpt]
    pipes = {name: spawn.Pipe() for name in names}
    workers = [
        spawn.Process(target=serve, args=(work, name, vars(options), pipes[name][1]), daemon=True) for name in names
    ]
    for worker in workers:
        worker.start()
    last = time.perf_counter() + options.patience
    ready: dict[str, dict[str, Any]] = {}
    for worker, name in zip(workers, names, strict=True):
        ready[name] = answer(pipes[name][0], max(0.0, last - time.perf_counter()))
        print(f"  {work}: {name} {ready[name]}", flush=True)
        if "error" in ready[name]:
            worker.kill()
    times: dict[str, list[float]] = {name: [] for name in names if "error" not in ready[name]}
    for _ in range(options.rounds):
        for name in times:
            pipes[name][0].send(options.seconds)
            told = answer(pipes[name][0], 60)
            times[name].append(told.pop("rate", 0.0))
            ready[name] |= told
    for worker in workers:
        worker.kill()
    found: dict[str, Any] = {}
    print(f"\n{work}: {UNITS.get(work, 'tokens/s')}, {options.rounds} rounds in turns")
    for name in names:
        if name not in times:
            found[name] = ready[name]
            print(f"  {name:28} {ready[name]['error'][-300:]}", flush=True)
            continue
        rate = statistics.median(times[name])
        found[name] = {"rate": rate, "all": times[name], **ready[name]}
        print(
            f"  {name:28} {rate:12,.0f}  ({min(times[name]):,.0f} .. {max(times[name]):,.0f})  {ready[name]['peak']:5.1f} GB  "
            f"first step {ready[name]['first']:.0f} s  loss {ready[name]['loss'] or ''}, "
            f"after {ready[name].get('steps')} steps {ready[name].get('last_loss')}",
            flush=True,
        )
    return found


def answer(pipe: Any, seconds: float) -> dict[str, Any]:
    try:
        return pipe.recv() if pipe.poll(seconds) else {"error": f"nothing after {seconds:.0f} s"}
    except EOFError:
        return {"error": "its process ended"}


def serve(work: str, name: str, options: dict[str, Any], pipe: Any) -> None:
    """One contender in a process of its own: made ready, then timed whenever asked."""
    try:
        torch.set_float32_matmul_precision("high")
        torch.manual_seed(0)
        begin = time.perf_counter()
        step, amount = WORKS[work][name](options)
        loss = number(step())
        torch.cuda.synchronize()
        first = time.perf_counter() - begin
        each = EACH.get(work, 3)
        for _ in range(each):
            step()
        torch.cuda.synchronize()
        pipe.send({"first": first, "peak": torch.cuda.max_memory_allocated() / 1e9, "loss": loss})
        done, last = 0, None
        while seconds := pipe.recv():
            step()
            torch.cuda.synchronize()
            begin, n = time.perf_counter(), 0
            while n < each or time.perf_counter() - begin < seconds:
                for _ in range(each):
                    last = step()
                torch.cuda.synchronize()
                n += each
            done += n
            pipe.send({"rate": amount * n / (time.perf_counter() - begin), "steps": done, "last_loss": number(last)})
    except Exception as error:
        pipe.send({"error": f"{type(error).__name__}: {error}"})


def number(loss: Any) -> float | None:
    return float(loss.float().mean()) if isinstance(loss, torch.Tensor) else None


def bfloat16() -> Any:
    return torch.autocast("cuda", torch.bfloat16)


def trained(objective: Callable[..., Any], parameters: Any, optimizer: Any) -> Step:
    """A training step of somebody else's model, as one is usually written. `objective` returns the mean loss."""

    def step() -> Any:
        with bfloat16():
            loss = objective()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def theirs(model: Any, objective: Callable[..., Any], amount: int) -> tuple[Step, int]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), fused=True)
    return trained(objective, list(model.parameters()), optimizer), amount


def ours(
    model: Any,
    losses: Callable[..., Any],
    batches: list[dict[str, Any]],
    amount: int,
    *,
    stream: str = "bfloat16",
    precision: str = "bfloat16",
    record: bool = True,
) -> tuple[Step, int]:
    """A step as `clearhead train` with train.compile=true takes it: its passes, its update, its loss; batches of one shape
    are replayed."""
    from clearhead.engine.cuda_graphs import Recorder
    from clearhead.quantization.float8 import Products
    from clearhead.training.loop import narrow, set_up
    from clearhead.training.optimizers import Optimizers
    from clearhead.training.recipe import Train
    from clearhead.training.train_step import ForwardBackward, Update

    train = Train(lr=6e-4, compile=True, stream=stream, precision=precision)  # type: ignore[arg-type]
    set_up(train)
    autocast = bfloat16()
    narrow(model, train, autocast)
    counts = [batch.pop("count") for batch in batches]

    def objective(batch: dict[str, Any]) -> tuple[Any, Any, Any]:
        found = losses(model, batch)
        return found.goal, found.loss, found.correct

    recorder = Recorder(next(model.parameters()).device) if record else None
    forward_backward = ForwardBackward(torch.compile(objective), autocast, recorder)
    optimizers = Optimizers(model, train, lr=train.lr, record=record)
    products = Products(model) if precision == "fp8" else None
    if products is not None:
        wide = ForwardBackward(objective, autocast)
        products.calibrate(lambda: wide(batches[0], 1 / counts[0]))
        optimizers.zero_grad()
    update = Update(optimizers, train.clip, products, recorder)
    turn = 0

    def step() -> Any:
        nonlocal turn
        at = turn % len(batches)
        turn += 1
        loss = forward_backward(batches[at], 1 / counts[at])
        update()
        return loss / counts[at]

    return step, amount


# GPT-2


def gpt2_batch(B: int, T: int) -> tuple[Any, Any]:
    x = torch.randint(0, VOCAB, (B, T + 1), device="cuda")
    return x[:, :-1].contiguous(), x[:, 1:].contiguous()


def nanogpt(B: int, T: int) -> Callable[[dict[str, Any]], tuple[Step, int]]:
    def make(options: dict[str, Any]) -> tuple[Step, int]:
        spec = importlib.util.spec_from_file_location("nanogpt", options["nanogpt"])
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["nanogpt"] = module
        spec.loader.exec_module(module)
        model = module.GPT(module.GPTConfig(block_size=T, vocab_size=VOCAB, dropout=0.0, bias=False)).cuda()
        optimizer = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), "cuda")
        compiled, (x, y) = torch.compile(model), gpt2_batch(B, T)
        return trained(lambda: compiled(x, y)[1], list(model.parameters()), optimizer), B * T

    return make


def clearhead_gpt2(B: int, T: int, **how: Any) -> Callable[[dict[str, Any]], tuple[Step, int]]:
    def make(_: dict[str, Any]) -> tuple[Step, int]:
        import clearhead as ch
        from clearhead.training.tasks.task import token_losses

        fields = dict(vocab_size=VOCAB, max_len=T, bias=False, attention_bias="", dropout=0.0, attention_dropout=0.0)
        model: Any = ch.build(ch.preset("gpt2", **fields), device="cuda").train()
        x, y = gpt2_batch(B, T)
        batch = {"tokens": x, "targets": y, "count": B * T}
        return ours(
            model, lambda m, b: token_losses(m, m.states(b["tokens"]), b["targets"], 0.0), [batch], B * T, **how
        )

    return make


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
    from clearhead.training.losses import IGNORED
    from clearhead.training.tasks.packing import Room, pack, pair_states
    from clearhead.training.tasks.task import token_losses

    model: Any = ch.build(ch.preset("transformer-base", vocab_size=32000, dropout=0.0), device="cuda").train()
    lengths = [np.array(side) for side in zip(*pair_lengths(options["multi30k"]), strict=True)]
    room = Room.of(lengths, 32768, 256)
    order = PackedOrder(lengths, room.free, 0, room.texts - room.sizes[0] // 256)
    draw, batches = np.random.default_rng(0), list[dict[str, Any]]()
    for rows in map(order.rows, range(BATCHES)):
        texts = [[draw.integers(4, 32000, n) for n in side[rows]] for side in lengths]
        (source, starts), (targets, at) = pack((texts[0], texts[1]), (0, IGNORED), room)
        batch = dict(source=source, starts=starts, target=targets.clamp(min=0), at=at, targets=targets)
        batches.append({name: x.cuda() for name, x in batch.items()} | {"count": int(lengths[1][rows].sum())})

    def losses(m: Any, b: dict[str, Any]) -> Any:
        states = pair_states(m, (b["source"], b["starts"]), (b["target"], b["at"]), room.longest)
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


# Pictures, masked language models


def clearhead_vit(_: dict[str, Any]) -> tuple[Step, int]:
    import clearhead as ch
    from clearhead.training.tasks.task import Losses

    model: Any = ch.build(ch.preset("vit-b-16", dropout=0.0, attention_dropout=0.0), device="cuda").train()
    x, y = torch.rand(256, 3, 224, 224, device="cuda"), torch.randint(0, 1000, (256,), device="cuda")

    def losses(m: Any, b: dict[str, Any]) -> Any:
        logits = m(b["pictures"]).float()
        loss = F.cross_entropy(logits, b["labels"], reduction="sum")
        return Losses(loss, loss.detach(), (logits.argmax(-1) == b["labels"]).sum())

    return ours(model, losses, [{"pictures": x, "labels": y, "count": 256}], 256)


def transformers_vit(_: dict[str, Any]) -> tuple[Step, int]:
    from transformers import ViTConfig, ViTForImageClassification

    model = ViTForImageClassification(ViTConfig(num_labels=1000, attn_implementation="sdpa")).cuda().train()
    x, y = torch.rand(256, 3, 224, 224, device="cuda"), torch.randint(0, 1000, (256,), device="cuda")
    compiled = torch.compile(model)
    return theirs(model, lambda: F.cross_entropy(compiled(pixel_values=x).logits.float(), y), 256)


GUESSED = 77  # of 512 tokens of a row


def masked(B: int = 64, T: int = 512) -> tuple[Any, Any]:
    tokens = torch.randint(0, 30522, (B, T), device="cuda")
    hidden = torch.zeros(B, T, dtype=torch.bool, device="cuda")
    hidden.scatter_(1, torch.rand(B, T, device="cuda").topk(GUESSED).indices, True)
    return tokens, torch.where(hidden, tokens, -100)


def clearhead_bert(_: dict[str, Any]) -> tuple[Step, int]:
    import clearhead as ch
    from clearhead.training.losses import IGNORED
    from clearhead.training.tasks.task import token_losses

    model: Any = ch.build(
        ch.preset("bert-base", head="tokens", dropout=0.0, attention_dropout=0.0), device="cuda"
    ).train()
    tokens, targets = masked()
    batch = {"tokens": tokens, "targets": targets, "count": GUESSED * len(tokens)}

    def losses(m: Any, b: dict[str, Any]) -> Any:
        places = (b["targets"] != IGNORED).int().topk(GUESSED).indices  # as training/tasks/mask.py
        rows = torch.arange(len(places), device="cuda")[:, None]
        return token_losses(m, m.states(b["tokens"])[rows, places], b["targets"][rows, places], 0.0)

    return ours(model, losses, [batch], tokens.numel())


def transformers_bert(_: dict[str, Any]) -> tuple[Step, int]:
    from transformers import BertConfig, BertForMaskedLM

    none = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = BertForMaskedLM(BertConfig(attn_implementation="sdpa", **none)).cuda().train()
    compiled, (tokens, targets) = torch.compile(model), masked()
    return theirs(model, lambda: compiled(input_ids=tokens, labels=targets).loss, tokens.numel())


# Encoding


def sentences(n: int = 10_000) -> list[list[int]]:
    """Lengths as of sentences in prose: 5 to 128 tokens, most of them short."""
    draw = random.Random(0)
    lengths = [min(128, max(5, int(draw.lognormvariate(3.2, 0.6)))) for _ in range(n)]
    return [[draw.randint(1000, 29000) for _ in range(length)] for length in lengths]


SIZES = {
    "minilm": dict(n_layers=6, d_model=384, n_heads=12, d_ff=1536),
    "bert": dict(n_layers=12, d_model=768, n_heads=12, d_ff=3072),
}


def clearhead_encode(size: str) -> Callable[[dict[str, Any]], tuple[Step, int]]:
    def make(_: dict[str, Any]) -> tuple[Step, int]:
        import clearhead as ch
        from clearhead.generation import embeddings as vectors

        model: Any = ch.build(
            ch.preset("bert-base", pool="mean", dropout=0.0, **SIZES[size]), device="cuda", dtype=torch.bfloat16
        )
        rows, model = sentences(), model.eval()

        # All contenders are given ids: tokenising is the same library's work for each.
        return lambda: vectors.embed_ids(model, rows), len(rows)

    return make


def sentence_transformers_encode(size: str, batch: int) -> Callable[[dict[str, Any]], tuple[Step, int]]:
    """Its own `encode`, from ids: what it calls to tokenise a batch pads the ids that each text carries."""

    def make(_: dict[str, Any]) -> tuple[Step, int]:
        from sentence_transformers import SentenceTransformer, models
        from tokenizers import Tokenizer
        from tokenizers.models import WordPiece
        from transformers import BertModel, PreTrainedTokenizerFast

        with tempfile.TemporaryDirectory() as folder:
            BertModel(bert_config(size)).save_pretrained(folder)
            core = Tokenizer(WordPiece({"[PAD]": 0, "[UNK]": 1}, unk_token="[UNK]"))
            PreTrainedTokenizerFast(tokenizer_object=core, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
            encoder = models.Transformer(folder)
        model: Any = SentenceTransformer(
            modules=[encoder, models.Pooling(SIZES[size]["d_model"], "mean")], device="cuda"
        )
        model.to(torch.bfloat16)

        class Text(str):  # sorted by its length, as texts are
            ids: list[int]

        texts: list[Text] = []
        for row in sentences():
            texts.append(Text("x" * len(row)))
            texts[-1].ids = row

        def features(inputs: list[Text], **_: Any) -> dict[str, Any]:
            part = [torch.tensor(text.ids) for text in inputs]
            ids = torch.nn.utils.rnn.pad_sequence(part, batch_first=True)
            return {"input_ids": ids, "attention_mask": (ids != 0).long()}

        model.preprocess = model.tokenize = features
        return lambda: model.encode(texts, batch_size=batch, show_progress_bar=False), len(texts)

    return make


def bert_config(size: str) -> Any:
    from transformers import BertConfig

    s = SIZES[size]
    sizes = dict(hidden_size=s["d_model"], num_hidden_layers=s["n_layers"], intermediate_size=s["d_ff"])
    return BertConfig(num_attention_heads=s["n_heads"], attn_implementation="sdpa", **sizes)


def transformers_encode(size: str, batch: int) -> Callable[[dict[str, Any]], tuple[Step, int]]:
    """Padded batches, sorted by length."""

    def make(_: dict[str, Any]) -> tuple[Step, int]:
        from transformers import BertModel

        model, rows = (
            BertModel(bert_config(size), add_pooling_layer=False).cuda().to(torch.bfloat16).eval(),
            sentences(),
        )

        @torch.no_grad()
        def step() -> Any:
            order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
            out = torch.empty(len(rows), SIZES[size]["d_model"])
            for at in range(0, len(order), batch):
                part = [torch.tensor(rows[i]) for i in order[at : at + batch]]
                ids = torch.nn.utils.rnn.pad_sequence(part, batch_first=True).cuda()
                real = (ids != 0).long()
                states = model(input_ids=ids, attention_mask=real).last_hidden_state
                pooled = (states * real[..., None]).sum(1) / real.sum(1, keepdim=True)
                out[order[at : at + batch]] = pooled.float().cpu()
            return out

        return step, len(rows)

    return make


WORKS: dict[str, dict[str, Callable[[dict[str, Any]], tuple[Step, int]]]] = {
    "gpt2": {
        "nanogpt": nanogpt(32, 1024),
        "clearhead": clearhead_gpt2(32, 1024),
        "clearhead, fp8": clearhead_gpt2(32, 1024, precision="fp8"),
    },
    "gpt2-long": {
        "nanogpt": nanogpt(4, 8192),
        "clearhead": clearhead_gpt2(4, 8192),
        "clearhead, fp8": clearhead_gpt2(4, 8192, precision="fp8"),
    },
    "translate": {
        "transformers Marian": marian,
        "torch.nn.Transformer": torch_translate,
        "x-transformers": x_translate,
        "clearhead": clearhead_translate,
    },
    "vit": {"transformers": transformers_vit, "clearhead": clearhead_vit},
    "bert": {"transformers": transformers_bert, "clearhead": clearhead_bert},
    "encode-minilm": {
        "sentence-transformers, 32": sentence_transformers_encode("minilm", 32),
        "sentence-transformers, 256": sentence_transformers_encode("minilm", 256),
        "transformers, sorted, 256": transformers_encode("minilm", 256),
        "clearhead": clearhead_encode("minilm"),
    },
    "encode-bert": {
        "sentence-transformers, 32": sentence_transformers_encode("bert", 32),
        "sentence-transformers, 256": sentence_transformers_encode("bert", 256),
        "transformers, sorted, 256": transformers_encode("bert", 256),
        "clearhead": clearhead_encode("bert"),
    },
}
UNITS = {
    "translate": "target tokens/s",
    "vit": "pictures/s",
    "encode-minilm": "sentences/s",
    "encode-bert": "sentences/s",
}

if __name__ == "__main__":
    main()
