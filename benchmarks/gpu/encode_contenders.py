"""Sentences to vectors for throughput.py: ours, and other libraries."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.train_contenders import Step


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
