"""`clearhead translate`: each line of a text through an encoder-decoder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from clearhead.cli.inputs import Device, ModelName, find_device, find_model, follow, read_lines
from clearhead.errors import InputError

AT_ONCE = 256  # lines handed to the search at once: enough to sort by length, few enough to see progress


def run(
    model: ModelName,
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="A file with one text a line; - reads standard input.")
    ] = "-",
    beams: Annotated[int, typer.Option(min=1, help="Texts kept at each step; 1 is greedy.")] = 4,
    length_penalty: Annotated[
        float, typer.Option(help="Above 0 favours long texts; 0 does not look at the length.")
    ] = 1.0,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="The longest output. Without it: 20 more than twice the source.")
    ] = None,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Cut a source that is too long at its end. Without it, that is an error.")
    ] = False,
    device: Device = "auto",
) -> None:
    """Translate each line, in order, to standard output; an empty line stays empty."""
    lines = read_lines(file)
    from clearhead.checkpoint import load
    from clearhead.data import load_tokenizer
    from clearhead.generation import translate
    from clearhead.models import EncoderDecoder

    place = find_model(model)
    translator = load(place, device=find_device(device))
    if not isinstance(translator, EncoderDecoder) or translator.config.inputs != "tokens":
        raise InputError(
            f"translate takes an encoder-decoder over texts; {model!r} has shape={translator.config.shape!r}, "
            f"inputs={translator.config.inputs!r}; take a Marian, a T5 or a run of `clearhead train translate`"
        )
    tokenizer = load_tokenizer(place if place.is_dir() else Path(place).parent)
    sources = [
        encode(tokenizer, line, number, translator.config.max_source_len, cut=truncate)
        for number, line in enumerate(lines, 1)
    ]
    groups = [range(at, min(at + AT_ONCE, len(lines))) for at in range(0, len(lines), AT_ONCE)]
    for group in follow(groups, "translating", len(groups), printing=True):
        full = [place for place in group if lines[place].strip()]
        options = dict(beams=beams, length_penalty=length_penalty, max_new_tokens=max_new_tokens)
        written = dict(zip(full, translate(translator, [sources[place] for place in full], **options), strict=True))  # type: ignore[arg-type]
        for place in group:
            typer.echo(tokenizer.decode(written[place]) if place in written else "")


def encode(tokenizer: object, line: str, number: int, max_len: int, *, cut: bool) -> list[int]:
    """A source's ids as the model expects them: with its end, whether the tokenizer adds that or not."""
    from clearhead.data import Tokenizer

    assert isinstance(tokenizer, Tokenizer)
    ids = tokenizer.encode(line)
    if tokenizer.eos is not None and ids[-1:] != [tokenizer.eos]:
        ids = [*ids, tokenizer.eos]
    if len(ids) <= max_len:
        return ids
    if not cut:
        raise InputError(
            f"line {number} has {len(ids)} tokens, but the model reads at most {max_len}; shorten it, or give --truncate"
        )
    return [*ids[: max_len - 1], ids[-1]]
