"""Training steps of GPT-2, ViT and BERT for throughput.py: ours, and those of other libraries as their users write them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Step = Callable[[], Any]
VOCAB = 50304


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
    from clearhead.training.loop import configure_torch
    from clearhead.training.optimizers import Optimizers
    from clearhead.training.precision import set_residual_dtype
    from clearhead.training.recipe import Train
    from clearhead.training.train_step import ForwardBackward, Update

    train = Train(lr=6e-4, compile=True, stream=stream, precision=precision)  # type: ignore[arg-type]
    configure_torch(train, torch.device("cuda"))
    autocast = bfloat16()
    set_residual_dtype(model, train, autocast)
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
    from clearhead.kernels.cross_entropy import IGNORED
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
