"""The input of `clearhead explore --ablate`: texts as batches of model inputs and targets."""

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

BATCH_TOKENS = 512  # of one sweep, whose memory grows with them
MASKED = 16  # tokens of a text that are masked for an encoder, one at a time


@dataclass(frozen=True)
class AblationBatch:
    """Rows of similar length: the arguments of the model's call, and the target of each token (or each row's class)."""

    inputs: tuple[Tensor, ...]
    targets: Tensor
    options: dict[str, Any]


@dataclass(frozen=True)
class AblationInput:
    """The user's options: a text or a file of texts, the targets of a translator, which heads, and whether to score BLEU."""

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
    def _lines(text: str) -> list[str]:
        """The lines of a file, if `text` is the name of one, else the text itself."""
        try:
            is_file = text == "-" or Path(text).is_file()
        except OSError:  # too long for a name
            is_file = False
        return [line for line in read_lines(text) if line.strip()] if is_file else [text]


def make_batches(model: Model, tokenizer: Tokenizer, given: AblationInput) -> list[AblationBatch]:
    """Inputs and targets. The target is the next token; for an encoder a masked token, or the class that it predicts itself."""
    from clearhead.models import Encoder, EncoderDecoder

    if isinstance(model, EncoderDecoder):
        return _pairs(model, tokenizer, given)
    texts = [tokenizer.encode(text) for text in given.texts]
    for number, ids in enumerate(texts, 1):
        room = model.config.max_len + (0 if isinstance(model, Encoder) else 1)
        if not 2 <= len(ids) <= room:
            raise InputError(
                f"text {number} has {len(ids)} tokens; --ablate takes 2 to {room} for this model; cut it into lines of a file"
            )
    if not isinstance(model, Encoder):
        return _batches(model, [((ids[:-1],), ids[1:]) for ids in texts])
    if model.config.head == "classes":
        return [_predict_classes(model, batch) for batch in _batches(model, [((ids,), ids) for ids in texts])]
    if tokenizer.mask is None:
        raise InputError("an encoder predicts masked tokens, and this tokenizer has no mask token; use inside.sweep")
    return _batches(model, [row for ids in texts for row in _mask_each(ids, tokenizer.mask, tokenizer.special_ids)])


Example = tuple[tuple[list[int], ...], list[int]]  # the inputs, and a target for each token of the last input


def _mask_each(ids: list[int], mask: int, special: set[int]) -> list[Example]:
    """The text with one token masked at a time, at places that are evenly spread over it."""
    places = [at for at, id in enumerate(ids) if id not in special]
    chosen = places[:: -(-len(places) // MASKED) or 1]
    return [
        (
            ([mask if at == place else id for at, id in enumerate(ids)],),
            [id if at == place else -100 for at, id in enumerate(ids)],
        )
        for place in chosen
    ]


def _predict_classes(model: Model, batch: AblationBatch) -> AblationBatch:
    """The batch with the model's own classes as targets."""
    import torch

    with torch.no_grad():
        return AblationBatch(batch.inputs, model(*batch.inputs, **batch.options).argmax(-1), batch.options)


def encode_sources(model: Model, tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    from clearhead.cli.translate import encode

    limit = model.config.max_source_len
    return [encode(tokenizer, text, number, limit, cut=False) for number, text in enumerate(texts, 1)]


def _pairs(model: EncoderDecoder, tokenizer: Tokenizer, given: AblationInput) -> list[AblationBatch]:
    """Source and shifted target as inputs, the target as target; without a target, the model's own greedy translation."""
    from clearhead.generation import translate

    generation = model.generation
    start = generation.bos if generation.decoder_start is None else generation.decoder_start
    end = tokenizer.eos if not generation.eos else generation.eos[0]
    if start is None or end is None:
        raise InputError(
            "the model does not say which token a target starts or ends with; complete its generation config"
        )
    sources = encode_sources(model, tokenizer, given.texts)
    if given.targets is None:
        targets = translate(model, sources, beams=1)
    else:
        targets = [tokenizer.encode(text, special=False, target=True) for text in given.targets]
    rows: list[Example] = []
    for number, (source, target) in enumerate(zip(sources, targets, strict=True), 1):
        if len(target) >= model.config.max_len:
            raise InputError(
                f"target {number} has {len(target)} tokens, and the model writes at most {model.config.max_len}"
            )
        rows.append(((source, [start, *target]), [*target, end]))
    return _batches(model, rows)


def _batches(model: Model, rows: list[Example]) -> list[AblationBatch]:
    """Examples of similar length together, padded on the right. There is a mask only where there is padding."""
    import torch

    from clearhead.quantization.model_weights import example_weight

    rows = sorted(rows, key=lambda row: [len(part) for part in row[0]])
    groups: list[list[Example]] = []
    for row in rows:
        longest = max(map(len, row[0]))  # the last is the longest, or nearly
        if groups and (len(groups[-1]) + 1) * longest <= BATCH_TOKENS:
            groups[-1].append(row)
        else:
            groups.append([row])
    device = example_weight(model).device

    def pad(parts: Sequence[list[int]], value: int) -> Tensor:
        width = max(map(len, parts))
        return torch.tensor([[*part, *[value] * (width - len(part))] for part in parts], device=device)

    batches: list[AblationBatch] = []
    for group in groups:
        inputs = tuple(pad(parts, 0) for parts in zip(*(row[0] for row in group), strict=True))
        real = pad([[1] * len(row[0][0]) for row in group], 0).bool()
        options = {} if bool(real.all()) else {"mask": real}
        batches.append(AblationBatch(inputs, pad([row[1] for row in group], -100), options))
    return batches
