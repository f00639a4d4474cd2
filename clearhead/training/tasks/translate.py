"""Translation, in the widest sense: a target written from a source, by an encoder-decoder."""

from __future__ import annotations

from collections.abc import Iterator
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
from clearhead.models import EncoderDecoder, Model
from clearhead.models.encoder_decoder import source_mask
from clearhead.training.losses import IGNORED
from clearhead.training.report import AttentionPicture
from clearhead.training.tasks.corpus import Corpus
from clearhead.training.tasks.packing import Room, can_pack, pack, pair_states
from clearhead.training.tasks.task import Batch, Facts, Losses, Rows, Sample, Task, pad, piece_name, token_losses


class Translate(Task):
    """Each token of the target from the source and the tokens before it. One vocabulary serves both sides."""

    room: Room | None = None  # the shape of batches without padding

    def __init__(self, corpus: Corpus) -> None:
        super().__init__(corpus.recipe)
        d, t = self.recipe.data, self.recipe.train
        corpus.need("source", *([] if d.columns else ["target"]))
        columns = (d.columns[0], d.columns[1]) if len(d.columns) == 2 else ("source", "target")

        def read() -> Iterator[str]:
            for pair in read_pairs(d.source, d.target, columns=columns, policy=corpus.policy):
                yield from pair

        self.tokenizer = self.words = tokenizer = corpus.tokenizer(
            read, ("<pad>", "<s>", "</s>", "<unk>"), around=False
        )
        if tokenizer.eos is None or (start := tokenizer.pad if tokenizer.bos is None else tokenizer.bos) is None:
            raise ConfigError(
                "translating needs a tokenizer with an end and a start (</s>, <s> or <pad>); choose another"
            )
        self.start: int = start

        def prepare(name: str, source: tuple[str, ...], target: tuple[str, ...]) -> Store:
            return corpus.store(
                name,
                lambda folder: prepare_pairs(
                    folder,
                    source,
                    target,
                    tokenizer,
                    max_source_len=d.length,
                    max_len=d.length,
                    columns=columns,
                    lowercase=d.lowercase,
                    policy=corpus.policy,
                    progress=corpus.show.progress(f"tokenising {name}"),
                ),
                tokenizer.core.to_str(),
            )

        self.pairs = self.valid = prepare("pairs", d.source, d.target)
        self.chosen, self.valid_rows = np.arange(len(self.pairs)), np.arange(0)
        if d.valid_source:
            self.valid = prepare("valid", d.valid_source, d.valid_target)
            self.valid_rows = np.arange(len(self.valid))
        else:
            self.chosen, self.valid_rows = held_out(len(self.pairs), d.valid_share, t.seed)
        self.lengths = lengths = [self.pairs[name].lengths[self.chosen] for name in ("source", "target")]
        self.order = TokenOrder(lengths, t.batch_tokens, t.seed)
        self.held_lengths = [self.valid[name].lengths[self.valid_rows] for name in ("source", "target")]
        first = [self.order.rows(step) for step in range(20)]
        rows = round(float(np.mean([len(batch) for batch in first])))
        self.shape = (rows, t.batch_tokens // rows, t.batch_tokens // rows)
        self.facts = Facts(
            fields=dict(
                shape="encoder-decoder", vocab_size=tokenizer.vocab_size, max_len=d.length, max_source_len=d.length
            ),
            generation=Generation(bos=tokenizer.bos, eos=(tokenizer.eos,), pad=tokenizer.pad, decoder_start=start),
            table={
                "pairs": f"{len(self.chosen):,} to learn from, {len(self.valid_rows):,} held out",
                "tokens": f"{lengths[0].sum():,} source, {lengths[1].sum():,} target",
                "vocabulary": f"{tokenizer.vocab_size:,} tokens",
                "padding": f"{padding_waste(lengths, first):.1%} of a batch",
            },
            notes=corpus.notes,
        )

    def pack(self, model: Model) -> bool:
        t, longest = self.recipe.train, self.recipe.data.length
        room = Room.of(self.lengths, t.batch_tokens, longest)
        if not can_pack(model.config, longest) or sum(room.sizes) > 2 * t.batch_tokens:
            return False
        self.room, rows = room, room.texts - room.sizes[0] // longest
        self.order = PackedOrder(self.lengths, room.free, t.seed, rows)
        rows = round(t.batch_tokens * len(self.chosen) / max(int(column.sum()) for column in self.lengths))
        self.shape = (rows, room.sizes[1] // rows, room.sizes[0] // rows)
        self.facts.table["padding"] = "none: texts lie one after the other"
        return True

    def predictions(self, rows: Rows) -> int:
        return int(self.pairs["target"].lengths[self.chosen[rows]].sum())

    def tokens(self, rows: Rows) -> int:
        chosen = self.chosen[rows]
        return int(sum(self.pairs[name].lengths[chosen].sum() for name in ("source", "target")))

    def batch(self, rows: Rows, step: int) -> Batch:
        if self.room is None:
            return self._batch(self.pairs, self.chosen[rows])
        sources, targets = ([self.pairs[name][int(row)] for row in self.chosen[rows]] for name in ("source", "target"))
        (source, source_starts), (wanted, starts) = pack((sources, targets), (self.words.pad or 0, IGNORED), self.room)
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
        # The decoder reads what it has to write, one place later. What follows the end of a row is never looked at.
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
        room = min(model.config.max_len, 2 * max(len(source) for source in sources) + 20) if sources else 1
        beams = t.beams if final else 1
        outputs = [self.words.decode(ids) for ids in translate(model, sources, beams=beams, max_new_tokens=room)]
        wanted = [self.words.decode(self.valid["target"][row].tolist()) for row in rows]
        samples = [
            Sample(self.words.decode(source), output, right)
            for source, output, right in islice(zip(sources, outputs, wanted, strict=True), t.samples)
        ]
        return score(outputs, wanted) if t.score_rows else {}, samples

    def pictures(self, model: Model) -> list[AttentionPicture]:
        """Where the last layer looked in the source while it wrote."""
        assert isinstance(model, EncoderDecoder)
        row = int(self.valid_rows[0])
        return [draw_alignment(model, self.words, self.valid["source"][row].tolist(), self.start)]


def draw_alignment(model: EncoderDecoder, tokenizer: Tokenizer, source: list[int], start: int) -> AttentionPicture:
    """What the model writes for a source, and where the last layer looked for each token: the mean of its heads."""
    written = translate(model, [source], beams=1)[0]
    site = f"decoder.blocks.{len(model.decoder.blocks) - 1}.cross.weights"
    with probe(model, site) as seen, torch.no_grad():
        model(torch.tensor([source]), torch.tensor([[start, *written]]))
    weights = seen[site][0].mean(0)
    rows, columns = (
        [piece_name(tokenizer, id) for id in ids] for ids in ([*written, *model.generation.eos[:1]], source)
    )
    return AttentionPicture("Where it looked while it wrote", rows, columns, weights)


def score(outputs: list[str], wanted: list[str]) -> dict[str, float]:
    """The share written exactly, and BLEU and chrF (sacrebleu) where that is installed."""
    exact = sum(a == b for a, b in zip(outputs, wanted, strict=True)) / max(len(outputs), 1)
    try:
        import sacrebleu
    except ImportError:
        return {"exact": exact}
    bleu, chrf = sacrebleu.corpus_bleu(outputs, [wanted]), sacrebleu.corpus_chrf(outputs, [wanted])
    return {"exact": exact, "bleu": bleu.score, "chrf": chrf.score}
