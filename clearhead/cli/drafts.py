"""Options of `generate` and `serve` for drafts: by prompt lookup, or by a smaller model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from clearhead.cli.arguments import QuantizeKind, find_model, load_model, load_tokenizer_of
from clearhead.errors import InputError

if TYPE_CHECKING:
    from clearhead.data import Tokenizer
    from clearhead.models import Decoder

Lookup = Annotated[
    bool,
    typer.Option(
        "--lookup",
        help="Draft what the text repeats: the same text, sooner where it edits, quotes or sums up the prompt.",
    ),
]
Draft = Annotated[
    str | None,
    typer.Option(
        metavar="SMALL",
        help="A smaller model with the same tokenizer drafts: the same text, sooner if it is often right.",
    ),
]
DraftQuantize = Annotated[
    QuantizeKind | None, typer.Option(help="With --draft: hold the smaller model's weights in 8 or 4 bits.")
]


def check_drafts(lookup: bool, draft: str | None, quantize: str | None) -> None:
    """Refuse options that do not go together, before anything is loaded."""
    if lookup and draft is not None:
        raise InputError(f"--lookup and --draft both draft; got --draft {draft!r}; leave one of them out")
    if quantize is not None and draft is None:
        raise InputError(f"--draft-quantize {quantize} is for the model of --draft, and there is none; leave it out")


def load_draft(name: str, tokenizer: Tokenizer, device: str, quantize: str | None) -> Decoder:
    """The model that drafts; InputError if it is no decoder or its vocabulary is another one."""
    from clearhead.models import Decoder

    path = find_model(name)
    own = load_tokenizer_of(path)
    if own.vocab != tokenizer.vocab:
        raise InputError(
            f"--draft {name!r} has another vocabulary than the model: {len(own.vocab)} tokens, and the model has "
            f"{len(tokenizer.vocab)}, of which {len(own.vocab.items() & tokenizer.vocab.items())} are the same; take a model "
            f"with the same tokenizer"
        )
    model = load_model(path, device, quantize)
    if not isinstance(model, Decoder):
        raise InputError(f"--draft takes a decoder; {name!r} has shape={model.config.shape!r}; take a GPT or a LLaMA")
    return model.eval()
