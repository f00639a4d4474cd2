"""Texts as `clearhead explore --ablate` reads them: batches of what a model is given, and what it should say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead.cli.arguments import read_lines
from clearhead.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from clearhead.data import Tokenizer
    from clearhead.models import EncoderDecoder, Model

BATCH_TOKENS = 512  # of one sweep: what it keeps grows with them
MASKED = 16  # places of a text that an encoder has to guess


@dataclass(frozen=True)
class AblationBatch:
    """Rows of like length: what a model is called with, and what it should say."""

    inputs: tuple[Tensor, ...]
    targets: Tensor
    options: dict[str, Any]


@dataclass(frozen=True)
class AblationInput:
    """What `--ablate` was asked: a text or a file of texts, what a translator should write, and which heads."""

    text: str
    target: str | None = None
    heads: str = "*"
    bleu: bool = False

    @property
    def texts(self) -> list[str]:
        return self._lines(self.text) if self.text else []

    @property
    def targets(self) -> list[str] | None:
        return None if self.target is None else self._lines(self.target)

    @staticmethod
    def _lines(given: str) -> list[str]:
        """A file's lines, if it names one, else the text itself."""
        try:
            is_file = given == "-" or Path(given).is_file()
        except OSError:  # too long for a name
            is_file = False
        return [line for line in read_lines(given) if line.strip()] if is_file else [given]


def make_examples(model: Model, tokenizer: Tokenizer, asked: AblationInput) -> list[AblationBatch]:
    """What is read and what should be said: the next token; of an encoder the hidden ones, or the class it names itself."""
    from clearhead.models import Encoder, EncoderDecoder

    if isinstance(model, EncoderDecoder):
        return _pairs(model, tokenizer, asked)
    texts = [tokenizer.encode(text) for text in asked.texts]
    for number, ids in enumerate(texts, 1):
        room = model.config.max_len + (0 if isinstance(model, Encoder) else 1)
        if not 2 <= len(ids) <= room:
            raise InputError(
                f"text {number} has {len(ids)} tokens; --ablate takes 2 to {room} for this model; cut it into lines of a file"
            )
    if not isinstance(model, Encoder):
        return _batches(model, [((ids[:-1],), ids[1:]) for ids in texts])
    if model.config.head == "classes":
        return [_choose(model, some) for some in _batches(model, [((ids,), ids) for ids in texts])]
    if tokenizer.mask is None:
        raise InputError(
            "an encoder is asked for hidden tokens, and this tokenizer has no mask token; use inside.sweep"
        )
    return _batches(model, [row for ids in texts for row in _hidden(ids, tokenizer.mask, tokenizer.special_ids)])


Row = tuple[tuple[list[int], ...], list[int]]  # inputs, and a target for each token of the last of them


def _hidden(ids: list[int], mask: int, special: set[int]) -> list[Row]:
    """The text with one token hidden at a time, at some places evenly spread."""
    places = [at for at, id in enumerate(ids) if id not in special]
    chosen = places[:: -(-len(places) // MASKED) or 1]
    return [
        (
            ([mask if at == place else id for at, id in enumerate(ids)],),
            [id if at == place else -100 for at, id in enumerate(ids)],
        )
        for place in chosen
    ]


def _choose(model: Model, some: AblationBatch) -> AblationBatch:
    import torch

    with torch.no_grad():
        return AblationBatch(some.inputs, model(*some.inputs, **some.options).argmax(-1), some.options)


def encode_sources(model: Model, tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    from clearhead.cli.translate import encode

    limit = model.config.max_source_len
    return [encode(tokenizer, text, number, limit, cut=False) for number, text in enumerate(texts, 1)]


def _pairs(model: EncoderDecoder, tokenizer: Tokenizer, asked: AblationInput) -> list[AblationBatch]:
    """A source, and a target read one place late; where none is given, the one the model writes."""
    from clearhead.generation import translate

    told = model.generation
    start = told.bos if told.decoder_start is None else told.decoder_start
    end = tokenizer.eos if not told.eos else told.eos[0]
    if start is None or end is None:
        raise InputError(
            "the model does not say which token a target starts or ends with; complete its generation config"
        )
    sources = encode_sources(model, tokenizer, asked.texts)
    if asked.targets is None:
        targets = translate(model, sources, beams=1)
    else:
        targets = [tokenizer.encode(text, special=False, target=True) for text in asked.targets]
    rows: list[Row] = []
    for number, (source, target) in enumerate(zip(sources, targets, strict=True), 1):
        if len(target) >= model.config.max_len:
            raise InputError(
                f"target {number} has {len(target)} tokens, and the model writes at most {model.config.max_len}"
            )
        rows.append(((source, [start, *target]), [*target, end]))
    return _batches(model, rows)


def _batches(model: Model, rows: list[Row]) -> list[AblationBatch]:
    """Rows of like length together, filled up on the right. A mask is given where there is something to hide."""
    import torch

    rows = sorted(rows, key=lambda row: [len(part) for part in row[0]])
    groups: list[list[Row]] = []
    for row in rows:
        longest = max(map(len, row[0]))  # the last is the longest, or nearly
        if groups and (len(groups[-1]) + 1) * longest <= BATCH_TOKENS:
            groups[-1].append(row)
        else:
            groups.append([row])
    device = next(model.parameters()).device

    def fill(parts: Sequence[list[int]], value: int) -> Tensor:
        width = max(map(len, parts))
        return torch.tensor([[*part, *[value] * (width - len(part))] for part in parts], device=device)

    found: list[AblationBatch] = []
    for group in groups:
        inputs = tuple(fill(parts, 0) for parts in zip(*(row[0] for row in group), strict=True))
        real = fill([[1] * len(row[0][0]) for row in group], 0).bool()
        options = {} if bool(real.all()) else {"mask": real}
        found.append(AblationBatch(inputs, fill([row[1] for row in group], -100), options))
    return found
