"""Training and encoding on one CUDA GPU, beside other libraries, each in a process of its own; one after the other, in rounds.

    python3 benchmarks/gpu.py --nanogpt nanoGPT/model.py --multi30k multi30k/ --out benchmarks/results/gpu.json
    python3 benchmarks/gpu.py --only gpt2 --rounds 3

Works: gpt2, gpt2-long, translate, vit, bert (training steps: forward, backward, clipping, AdamW), encode-minilm, encode-bert.
All contenders compile side by side first; then each is timed alone, in turns. Weights and tokens are random, lengths real
where said. bfloat16 products by autocast for all.
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
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent.parent))

Step = Callable[[], Any]
VOCAB = 50304


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(WORKS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.5, help="of one timing")
    parser.add_argument("--nanogpt", default="", help="path of nanoGPT's model.py")
    parser.add_argument("--multi30k", default="", help="folder with train.en.gz and train.de.gz, for their lengths")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    told: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "works": {},
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
    ready = {name: answer(pipes[name][0], 240) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names if "error" not in ready[name]}
    for _ in range(options.rounds):
        for name in times:
            pipes[name][0].send(options.seconds)
            times[name].append(answer(pipes[name][0], 60).get("rate", 0.0))
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
            f"first step {ready[name]['first']:.0f} s  loss {ready[name]['loss']}",
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
        loss = step()
        loss = float(loss.float().mean()) if isinstance(loss, torch.Tensor) else None
        torch.cuda.synchronize()
        first = time.perf_counter() - begin
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        pipe.send({"first": first, "peak": torch.cuda.max_memory_allocated() / 1e9, "loss": loss})
        while seconds := pipe.recv():
            step()
            torch.cuda.synchronize()
            begin, n = time.perf_counter(), 0
            while n < 3 or time.perf_counter() - begin < seconds:
                for _ in range(3):
                    step()
                torch.cuda.synchronize()
                n += 3
            pipe.send({"rate": amount * n / (time.perf_counter() - begin)})
    except Exception as error:
        pipe.send({"error": f"{type(error).__name__}: {error}"})


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
    stream: str,
    dynamic: bool | None = None,
) -> tuple[Step, int]:
    """A step as `clearhead train` with train.compile=true takes it: its passes, its update, its loss."""
    from clearhead.training.loop import narrow
    from clearhead.training.optimizers import Optimizers
    from clearhead.training.passes import Passes, Update
    from clearhead.training.recipe import Train

    train = Train(lr=6e-4, compile=True, stream=stream)  # type: ignore[arg-type]
    autocast = bfloat16()
    narrow(model, train, autocast)

    def objective(batch: dict[str, Any]) -> tuple[Any, Any, Any]:
        found = losses(model, batch)
        return found.goal, found.loss, found.correct

    passes = Passes(torch.compile(objective, dynamic=dynamic), autocast, record=False)
    update = Update(Optimizers(model, train, lr=train.lr), train.clip, record=False)
    turn = 0

    def step() -> Any:
        nonlocal turn
        batch = batches[turn % len(batches)]
        turn += 1
        count = batch["count"]
        loss = passes({key: value for key, value in batch.items() if key != "count"}, 1 / count)
        update()
        return loss / count

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


def clearhead_gpt2(B: int, T: int, stream: str) -> Callable[[dict[str, Any]], tuple[Step, int]]:
    def make(_: dict[str, Any]) -> tuple[Step, int]:
        import clearhead as ch
        from clearhead.training.tasks.task import token_losses

        fields = dict(vocab_size=VOCAB, max_len=T, bias=False, attention_bias="", dropout=0.0, attention_dropout=0.0)
        model: Any = ch.build(ch.preset("gpt2", **fields), device="cuda").train()
        x, y = gpt2_batch(B, T)
        batch = {"tokens": x, "targets": y, "count": B * T}
        return ours(
            *(model, lambda m, b: token_losses(m, m.states(b["tokens"]), b["targets"], 0.0), [batch], B * T),
            stream=stream,
        )

    return make


def transformers_gpt2(B: int, T: int) -> Callable[[dict[str, Any]], tuple[Step, int]]:
    def make(_: dict[str, Any]) -> tuple[Step, int]:
        from transformers import GPT2Config, GPT2LMHeadModel

        none = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        config = GPT2Config(vocab_size=VOCAB, n_positions=T, use_cache=False, attn_implementation="sdpa", **none)
        model = GPT2LMHeadModel(config).cuda().train()
        compiled, (x, _) = torch.compile(model), gpt2_batch(B, T)
        return theirs(model, lambda: compiled(input_ids=x, labels=x).loss, B * T)

    return make


# Translation: batches of real lengths, each sentence's four times as long


def pair_batches(folder: str, budget: int = 32768, n: int = 12) -> list[tuple[Any, Any, Any, Any]]:
    """Sources, targets and their masks; rows of like length together, at most `budget` tokens with padding, sizes rounded."""
    if folder:
        files = [Path(folder, f"train.{side}.gz") for side in ("en", "de")]
        sides = [gzip.decompress(file.read_bytes()).decode().splitlines() for file in files]
        lengths = [(4 * len(a.split()) + 1, 4 * len(b.split()) + 1) for a, b in zip(*sides, strict=True)]
    else:
        draw = random.Random(0)
        lengths = [
            (s, max(4, s + draw.randint(-8, 8))) for s in (int(draw.gauss(52, 18)) for _ in range(29000)) if s > 8
        ]
    draw = random.Random(1)
    lengths.sort(key=lambda pair: (max(pair) + draw.random() * 8, pair))
    rows: list[list[tuple[int, int]]] = [[]]
    for pair in lengths:
        widest = max(max(p) for p in [*rows[-1], pair])
        if (len(rows[-1]) + 1) * widest > budget:
            rows.append([])
        rows[-1].append(pair)
    draw.shuffle(rows)
    batches: list[tuple[Any, Any, Any, Any]] = []
    for part in rows[:n]:
        widths = [-(-max(pair[side] for pair in part) // 8) * 8 for side in (0, 1)]
        tokens = [torch.randint(4, 32000, (len(part), width), device="cuda") for width in widths]
        reals = [
            torch.arange(width, device="cuda") < torch.tensor([pair[side] for pair in part], device="cuda")[:, None]
            for side, width in zip((0, 1), widths, strict=True)
        ]
        batches.append((*tokens, *reals))
    return batches


def real_tokens(batches: list[Any]) -> int:
    """Target tokens of a mean batch, padding left out."""
    return int(sum(int(batch[3].sum()) for batch in batches) / len(batches))


def clearhead_translate(stream: str) -> Callable[[dict[str, Any]], tuple[Step, int]]:
    def make(options: dict[str, Any]) -> tuple[Step, int]:
        import clearhead as ch
        from clearhead.models.encoder_decoder import source_mask
        from clearhead.training.losses import IGNORED
        from clearhead.training.tasks.task import token_losses

        model: Any = ch.build(ch.preset("transformer-base", vocab_size=32000, dropout=0.0), device="cuda").train()
        given = pair_batches(options["multi30k"])
        batches: list[dict[str, Any]] = []
        for source, target, real_source, real in given:
            targets = torch.where(real, target, IGNORED)
            batches.append(
                {"source": source, "target": target, "mask": real_source, "targets": targets, "count": int(real.sum())}
            )

        def losses(m: Any, b: dict[str, Any]) -> Any:
            states = m.states(b["target"], m.encode(b["source"], b["mask"]), source_mask(b["mask"]))
            return token_losses(m, states, b["targets"], 0.1)

        return ours(model, losses, batches, real_tokens(given), stream=stream, dynamic=True)

    return make


def marian(options: dict[str, Any]) -> tuple[Step, int]:
    from transformers import MarianConfig, MarianMTModel

    sizes = dict(encoder_layers=6, decoder_layers=6, encoder_ffn_dim=2048, decoder_ffn_dim=2048, d_model=512)
    config = MarianConfig(
        vocab_size=32000, encoder_attention_heads=8, decoder_attention_heads=8, dropout=0.0, use_cache=False,
        pad_token_id=0, eos_token_id=1, decoder_start_token_id=0, max_position_embeddings=1024, attn_implementation="sdpa", **sizes,
    )  # fmt: skip
    model = MarianMTModel(config).cuda().train()
    compiled, given, turn = torch.compile(model, dynamic=True), pair_batches(options["multi30k"]), [0]

    def objective() -> Any:
        source, target, real_source, real = given[turn[0] % len(given)]
        turn[0] += 1
        out = compiled(input_ids=source, attention_mask=real_source.long(), decoder_input_ids=target)
        labels = torch.where(real, target, -100)
        return F.cross_entropy(out.logits.flatten(0, 1).float(), labels.flatten(), label_smoothing=0.1)

    return theirs(model, objective, real_tokens(given))


class TorchTranslator(torch.nn.Module):
    """torch.nn.Transformer with the embeddings and the head that it lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(32000, 512)
        self.places = torch.nn.Embedding(1024, 512)
        self.core = torch.nn.Transformer(512, 8, 6, 6, 2048, dropout=0.0, batch_first=True)

    def forward(self, source: Any, target: Any, real_source: Any, real: Any) -> Any:
        enter = [self.tokens(x) + self.places.weight[: x.shape[1]] for x in (source, target)]
        n = target.shape[1]
        future = torch.nn.Transformer.generate_square_subsequent_mask(n, device=target.device, dtype=torch.bool)
        hidden = dict(src_key_padding_mask=~real_source, memory_key_padding_mask=~real_source)
        states = self.core(*enter, tgt_mask=future, tgt_is_causal=True, tgt_key_padding_mask=~real, **hidden)
        return states @ self.tokens.weight.T


def torch_translate(options: dict[str, Any]) -> tuple[Step, int]:
    model = TorchTranslator().cuda().train()
    compiled, given, turn = torch.compile(model, dynamic=True), pair_batches(options["multi30k"]), [0]

    def objective() -> Any:
        source, target, real_source, real = given[turn[0] % len(given)]
        turn[0] += 1
        labels = torch.where(real, target, -100)
        logits = compiled(source, target, real_source, real)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), label_smoothing=0.1)

    return theirs(model, objective, real_tokens(given))


# Pictures, masked language models


def clearhead_vit(stream: str) -> Callable[[dict[str, Any]], tuple[Step, int]]:
    def make(_: dict[str, Any]) -> tuple[Step, int]:
        import clearhead as ch
        from clearhead.training.tasks.task import Losses

        model: Any = ch.build(ch.preset("vit-b-16", dropout=0.0, attention_dropout=0.0), device="cuda").train()
        x, y = torch.rand(256, 3, 224, 224, device="cuda"), torch.randint(0, 1000, (256,), device="cuda")

        def losses(m: Any, b: dict[str, Any]) -> Any:
            logits = m(b["pictures"]).float()
            loss = F.cross_entropy(logits, b["labels"], reduction="sum")
            return Losses(loss, loss.detach(), (logits.argmax(-1) == b["labels"]).sum())

        return ours(model, losses, [{"pictures": x, "labels": y, "count": 256}], 256, stream=stream)

    return make


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


def clearhead_bert(stream: str) -> Callable[[dict[str, Any]], tuple[Step, int]]:
    def make(_: dict[str, Any]) -> tuple[Step, int]:
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

        return ours(model, losses, [batch], tokens.numel(), stream=stream)

    return make


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
        from clearhead.generation import vectors

        model: Any = ch.build(
            ch.preset("bert-base", pool="mean", dropout=0.0, **SIZES[size]), device="cuda", dtype=torch.bfloat16
        )
        rows, model = sentences(), model.eval()

        class Given:  # all contenders are given ids: tokenising is the same library's work for each
            def encode_all(self, texts: Any, **_: Any) -> Any:
                return texts

        return lambda: vectors.embed(model, Given(), rows), len(rows)  # type: ignore[arg-type]

    return make


def transformers_encode(size: str, batch: int, *, ordered: bool) -> Callable[[dict[str, Any]], tuple[Step, int]]:
    """Padded batches, sorted by length or as they come (sentence-transformers' encode sorts, then batches of 32 the same way)."""

    def make(_: dict[str, Any]) -> tuple[Step, int]:
        from transformers import BertConfig, BertModel

        s = SIZES[size]
        sizes = dict(hidden_size=s["d_model"], num_hidden_layers=s["n_layers"], intermediate_size=s["d_ff"])
        config = BertConfig(num_attention_heads=s["n_heads"], attn_implementation="sdpa", **sizes)
        model, rows = BertModel(config, add_pooling_layer=False).cuda().to(torch.bfloat16).eval(), sentences()

        @torch.no_grad()
        def step() -> Any:
            order = sorted(range(len(rows)), key=lambda i: -len(rows[i])) if ordered else list(range(len(rows)))
            out = torch.empty(len(rows), s["d_model"])
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
        "transformers": transformers_gpt2(32, 1024),
        "clearhead": clearhead_gpt2(32, 1024, "float32"),
        "clearhead, narrow stream": clearhead_gpt2(32, 1024, "bfloat16"),
    },
    "gpt2-long": {"nanogpt": nanogpt(4, 8192), "clearhead, narrow stream": clearhead_gpt2(4, 8192, "bfloat16")},
    "translate": {
        "transformers Marian": marian,
        "torch.nn.Transformer": torch_translate,
        "clearhead": clearhead_translate("float32"),
        "clearhead, narrow stream": clearhead_translate("bfloat16"),
    },
    "vit": {"transformers": transformers_vit, "clearhead, narrow stream": clearhead_vit("bfloat16")},
    "bert": {"transformers": transformers_bert, "clearhead, narrow stream": clearhead_bert("bfloat16")},
    "encode-minilm": {
        "transformers, sorted, 32": transformers_encode("minilm", 32, ordered=True),
        "transformers, sorted, 256": transformers_encode("minilm", 256, ordered=True),
        "clearhead": clearhead_encode("minilm"),
    },
    "encode-bert": {
        "transformers, sorted, 32": transformers_encode("bert", 32, ordered=True),
        "transformers, sorted, 256": transformers_encode("bert", 256, ordered=True),
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
