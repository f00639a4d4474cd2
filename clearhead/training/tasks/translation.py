"""Translation: an encoder-decoder writes a target for a source, in any two languages or formats."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from itertools import islice

import numpy as np
import torch

from clearhead.config import Generation
from clearhead.data import Tokenizer
from clearhead.data.batch_order import PackedOrder, TokenOrder, held_out, in_order, padding_waste
from clearhead.data.corpora import read_pairs
from clearhead.data.text_preparation import prepare_pairs
from clearhead.data.token_store import Store
from clearhead.errors import ConfigError
from clearhead.generation import translate
from clearhead.inside import probe
from clearhead.kernels.cross_entropy import IGNORED
from clearhead.models import EncoderDecoder, Model
from clearhead.models.encoder_decoder import source_mask
from clearhead.training.report_figures import AttentionPicture
from clearhead.training.tasks.corpus import Corpus
from clearhead.training.tasks.packed_pairs import PackedShape, can_pack, pack, pair_states
from clearhead.training.tasks.task import Batch, Facts, Losses, Rows, Sample, Task, pad, token_losses


class Translate(Task):
    """Predict each token of the target from the source and the tokens before it. Both sides share one vocabulary."""

    packed: PackedShape | None = None  # the shape of batches without padding

    def __init__(self, corpus: Corpus) -> None:
        super().__init__(corpus.recipe)
        d, t = self.recipe.data, self.recipe.train
        if find_spec("sacrebleu") is None:
            corpus.show.note("BLEU and chrF are not measured: sacrebleu is missing; pip install 'clearhead[eval]'")
        self.columns = (d.columns[0], d.columns[1]) if len(d.columns) == 2 else ("source", "target")
        self.tokenizer = self.words = self._tokenizer(corpus)
        self.start = start_token(self.words)
        self.pairs = self.valid = self._prepare(corpus, "pairs", d.source, d.target)
        if d.valid_source:
            if (d.valid_source, d.valid_target) != (d.source, d.target):  # `evaluate` measures on all of its data
                self.valid = self._prepare(corpus, "valid", d.valid_source, d.valid_target)
            self.chosen, self.valid_rows = np.arange(len(self.pairs)), np.arange(len(self.valid))
        else:
            self.chosen, self.valid_rows = held_out(len(self.pairs), d.valid_share, t.seed)
        self.lengths = [self.pairs[name].lengths[self.chosen] for name in ("source", "target")]
        self.held_lengths = [self.valid[name].lengths[self.valid_rows] for name in ("source", "target")]
        self.order = TokenOrder(self.lengths, t.batch_tokens, t.seed)
        first = [self.order.rows(step) for step in range(20)]
        rows = round(float(np.mean([len(batch) for batch in first])))
        self.shape = (rows, t.batch_tokens // rows, t.batch_tokens // rows)
        self.facts = self._facts(corpus, f"{padding_waste(self.lengths, first):.1%} of a batch")

    def _tokenizer(self, corpus: Corpus) -> Tokenizer:
        def read() -> Iterator[str]:
            d = self.recipe.data
            for pair in read_pairs(d.source, d.target, columns=self.columns, policy=corpus.policy):
                yield from pair

        return corpus.tokenizer(read, ("<pad>", "<s>", "</s>", "<unk>"), around=False)

    def _prepare(self, corpus: Corpus, name: str, source: tuple[str, ...], target: tuple[str, ...]) -> Store:
        d = self.recipe.data
        return corpus.store(
            name,
            lambda folder: prepare_pairs(
                folder,
                source,
                target,
                self.words,
                max_source_len=d.length,
                max_len=d.length,
                columns=self.columns,
                lowercase=d.lowercase,
                policy=corpus.policy,
                progress=corpus.show.progress(f"tokenising {name}"),
            ),
            self.words.core.to_str(),
        )

    def _facts(self, corpus: Corpus, padding: str) -> Facts:
        length, words = self.recipe.data.length, self.words
        fields = dict(shape="encoder-decoder", vocab_size=words.vocab_size, max_len=length, max_source_len=length)
        assert words.eos is not None, "start_token has checked it"
        return Facts(
            fields=fields,
            generation=Generation(bos=words.bos, eos=(words.eos,), pad=words.pad, decoder_start=self.start),
            table={
                "pairs": f"{len(self.chosen):,} to learn from, {len(self.valid_rows):,} held out",
                "tokens": f"{self.lengths[0].sum():,} source, {self.lengths[1].sum():,} target",
                "vocabulary": f"{words.vocab_size:,} tokens",
                "padding": padding,
            },
            notes=corpus.notes,
        )

    def pack(self, model: Model) -> bool:
        assert isinstance(model, EncoderDecoder)
        t, longest = self.recipe.train, self.recipe.data.length
        packed = PackedShape.of(self.lengths, t.batch_tokens, longest)
        if not can_pack(model, longest) or sum(packed.sizes) > 2 * t.batch_tokens:
            return False
        self.packed = packed
        self.order = PackedOrder(self.lengths, packed.free, t.seed, packed.texts - packed.sizes[0] // longest)
        rows = round(t.batch_tokens * len(self.chosen) / max(int(column.sum()) for column in self.lengths))
        self.shape = (rows, packed.sizes[1] // rows, packed.sizes[0] // rows)
        self.facts.table["padding"] = "none: texts lie one after the other"
        return True

    def predictions(self, rows: Rows, step: int) -> int:
        return int(self.pairs["target"].lengths[self.chosen[rows]].sum())

    def tokens(self, rows: Rows, step: int) -> int:
        chosen = self.chosen[rows]
        return int(sum(self.pairs[name].lengths[chosen].sum() for name in ("source", "target")))

    def batch(self, rows: Rows, step: int) -> Batch:
        # Packed batches have one shape: a part of one, after memory did not suffice, would take as much as the whole.
        if self.packed is None or self.accumulate > 1:
            return self._batch(self.pairs, self.chosen[rows])
        sources, targets = ([self.pairs[name][int(row)] for row in self.chosen[rows]] for name in ("source", "target"))
        (source, source_starts), (wanted, starts) = pack(
            (sources, targets), (self.words.pad or 0, IGNORED), self.packed
        )
        read = torch.cat([wanted.new_zeros(1, 1), wanted[:, :-1].clamp(min=0)], 1)
        read[0, starts[starts < read.shape[1]].long()] = self.start
        batch = {"source": source, "source_starts": source_starts}
        return batch | {"target": read, "target_starts": starts, "targets": wanted}

    def held_out(self) -> list[Rows]:
        budget = max(
            self.recipe.train.batch_tokens // self.recipe.train.accumulate, int(max(map(np.max, self.held_lengths)))
        )
        return in_order(self.held_lengths, budget)

    def held_out_batch(self, rows: Rows) -> Batch:
        return self._batch(self.valid, self.valid_rows[rows])

    def _batch(self, store: Store, rows: Rows) -> Batch:
        source, real = pad([store["source"][int(row)] for row in rows], self.words.pad or 0, self.rounding)
        targets, _ = pad([store["target"][int(row)] for row in rows], IGNORED, self.rounding)
        # The decoder's input is the target, one position later. What comes after the end of a row is not used.
        read = torch.cat([torch.full((len(targets), 1), self.start), targets[:, :-1].clamp(min=0)], 1)
        return {"source": source, "mask": real, "target": read, "targets": targets}

    def losses(self, model: Model, batch: Batch) -> Losses:
        assert isinstance(model, EncoderDecoder)
        checkpointing = self.recipe.train.checkpointing and model.training
        if "source_starts" in batch:
            source, target = ((batch[side], batch[f"{side}_starts"]) for side in ("source", "target"))
            states = pair_states(model, source, target, self.recipe.data.length, checkpointing=checkpointing)
            return token_losses(model, states, batch["targets"], self.recipe.train.label_smoothing)
        memory = model.encode(batch["source"], batch["mask"], checkpointing=checkpointing)
        states = model.states(batch["target"], memory, source_mask(batch["mask"]), checkpointing=checkpointing)
        return token_losses(model, states, batch["targets"], self.recipe.train.label_smoothing)

    def write(self, model: Model, *, final: bool) -> tuple[dict[str, float], list[Sample]]:
        assert isinstance(model, EncoderDecoder)
        t = self.recipe.train
        n = len(self.valid_rows) if final and t.score_rows else min(len(self.valid_rows), max(t.score_rows, t.samples))
        rows = [int(row) for row in self.valid_rows[:n]]
        sources = [self.valid["source"][row].tolist() for row in rows]
        max_new = min(model.config.max_len, 2 * max(len(source) for source in sources) + 20) if sources else 1
        beams = t.beams if final else 1
        outputs = [self.words.decode(ids) for ids in translate(model, sources, beams=beams, max_new_tokens=max_new)]
        wanted = [self.words.decode(self.valid["target"][row].tolist()) for row in rows]
        samples = [
            Sample(self.words.decode(source), output, right)
            for source, output, right in islice(zip(sources, outputs, wanted, strict=True), t.samples)
        ]
        return score(outputs, wanted) if t.score_rows else {}, samples

    def attention_pictures(self, model: Model) -> list[AttentionPicture]:
        """The last layer's attention to the source."""
        assert isinstance(model, EncoderDecoder)
        row = int(self.valid_rows[0])
        return [draw_alignment(model, self.words, self.valid["source"][row].tolist(), self.start)]


def start_token(tokenizer: Tokenizer) -> int:
    """The token that the decoder starts with: <s>, or <pad> if there is none."""
    start = tokenizer.pad if tokenizer.bos is None else tokenizer.bos
    if tokenizer.eos is None or start is None:
        raise ConfigError("translating needs a tokenizer with an end and a start (</s>, <s> or <pad>); choose another")
    return start


def draw_alignment(model: EncoderDecoder, tokenizer: Tokenizer, source: list[int], start: int) -> AttentionPicture:
    """The model's output for a source, and the last layer's attention to the source for each token: the mean of its heads."""
    written = translate(model, [source], beams=1)[0]
    last = len(model.decoder.blocks) - 1
    site = f"decoder.blocks.{last}.cross.weights"
    with probe(model, site) as seen, torch.no_grad():
        model(torch.tensor([source]), torch.tensor([[start, *written]]))
    weights = seen[site][0].mean(0)
    rows, columns = (tokenizer.names(ids) for ids in ([*written, *model.generation.eos[:1]], source))
    return AttentionPicture(f"Cross-attention of layer {last}, the mean of its heads", rows, columns, weights)


def score(outputs: list[str], wanted: list[str]) -> dict[str, float]:
    """The share of exact matches, and BLEU and chrF if sacrebleu is installed."""
    exact = sum(a == b for a, b in zip(outputs, wanted, strict=True)) / max(len(outputs), 1)
    try:
        import sacrebleu
    except ImportError:
        return {"exact": exact}
    bleu, chrf = sacrebleu.corpus_bleu(outputs, [wanted]), sacrebleu.corpus_chrf(outputs, [wanted])
    return {"exact": exact, "bleu": bleu.score, "chrf": chrf.score}
