"""`clearhead translate`: each line of a text through an encoder-decoder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from clearhead.cli.arguments import (
    Beams,
    Device,
    LineFile,
    ModelName,
    Quantize,
    check_output,
    find_device,
    find_model,
    load_model,
    load_tokenizer_of,
    read_texts,
)
from clearhead.cli.console import track, wide_console
from clearhead.errors import InputError

if TYPE_CHECKING:
    from clearhead.data import Tokenizer
    from clearhead.generation import Hypothesis
    from clearhead.models import EncoderDecoder

BATCH_TOKENS = 65_536  # tokens of sources and beams that are held at once
SourceColumn = Annotated[
    str | None, typer.Option(help="The column of the sources, where FILE is a table. Without: source.", metavar="NAME")
]


def run(
    model: ModelName,
    file: LineFile = "-",
    beams: Beams = 4,
    n_best: Annotated[
        int | None,
        typer.Option(
            min=1, help="Print this many translations of each line: line number, score and text, separated by tabs."
        ),
    ] = None,
    length_penalty: Annotated[float, typer.Option(help="Above 0 favours long texts; 0 ignores the length.")] = 1.0,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="The longest output. Without it: 20 more than twice the source, or what the model allows."
        ),
    ] = None,
    truncate: Annotated[
        Literal["right"] | None, typer.Option(help="Cut a source that is too long at its end. Without: an error.")
    ] = None,
    column: SourceColumn = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json", help="Write why the search kept or dropped each text; show the first line's search."
        ),
    ] = None,
    quantize: Quantize = None,
    device: Device = "auto",
) -> None:
    """Translate each line, in order, to standard output; an empty line stays empty."""
    check_options(beams, n_best, trace)
    lines = read_texts(file, column, ("source", "target"))
    from clearhead.generation import Request
    from clearhead.generation.decoding import default_limit
    from clearhead.generation.engines import make_engine
    from clearhead.generation.texts import in_order

    path = find_model(model)
    translator = load_translator(model, path, find_device(device), quantize, max_new_tokens)
    tokenizer = load_tokenizer_of(path)
    options: dict[str, Any] = dict(beams=beams, length_penalty=length_penalty, n_best=n_best or 1)
    options |= dict(scored=n_best is not None, trace=trace is not None)
    sources = encode_all(tokenizer, lines, translator.config.max_source_len, cut=truncate is not None)
    requests = [
        Request(source=ids, max_new_tokens=max_new_tokens or default_limit(translator, len(ids)), **options)
        for ids in sources
    ]
    tickets = in_order(make_engine(translator, requests, BATCH_TOKENS), requests)
    traces: list[dict[str, Any]] = []
    for number, line in enumerate(track(lines, "translating", len(lines), printing=True), 1):
        ticket = next(tickets) if line.strip() else None
        typer.echo(spell(ticket.hypotheses if ticket else [], number, tokenizer, with_scores=n_best is not None))
        if trace is not None and ticket is not None:
            from clearhead.generation.traces import make_trace

            traces.append({"line": number, **make_trace(ticket, translator, tokenizer, text=line)})
    if trace is not None:
        write_traces(traces, trace, model)


def check_options(beams: int, n_best: int | None, trace: Path | None) -> None:
    """Refuse options that do not go together."""
    if trace is not None and beams == 1:
        raise InputError("--trace is of a search, and --beams 1 searches nothing; take 2 or more")
    if n_best is not None and n_best > beams:
        raise InputError(
            f"a search finds as many texts as it has beams; got --n-best {n_best}, --beams {beams}; change one"
        )
    check_output("--trace", trace)


def load_translator(
    name: str, path: Path, device: str, quantize: str | None, max_new_tokens: int | None
) -> EncoderDecoder:
    """The model, if it is an encoder-decoder over texts that can write `max_new_tokens`."""
    from clearhead.models import EncoderDecoder

    model = load_model(path, device, quantize)
    config = model.config
    if not isinstance(model, EncoderDecoder) or config.inputs != "tokens":
        raise InputError(
            f"translate takes an encoder-decoder over texts; {name!r} has shape={config.shape!r}, "
            f"inputs={config.inputs!r}; take a Marian, a T5 or a run of `clearhead train translate`"
        )
    if max_new_tokens is not None and max_new_tokens > config.max_len:
        raise InputError(
            f"--max-new-tokens {max_new_tokens} is more than the model's max_len={config.max_len}; lower it"
        )
    return model


def spell(hypotheses: Sequence[Hypothesis], number: int, tokenizer: Tokenizer, *, with_scores: bool) -> str:
    """The translation of line `number`; with scores, its n best translations, each with the line's number."""
    if not with_scores:
        return tokenizer.decode(hypotheses[0].tokens) if hypotheses else ""
    rows = [f"{number}\t{one.score:.4f}\t{tokenizer.decode(one.tokens)}" for one in hypotheses]
    return "\n".join(rows) or f"{number}\t\t"


def write_traces(traces: list[dict[str, Any]], file: Path, model: str) -> None:
    """The searches of all lines to a file; the first one is also drawn on stderr."""
    from clearhead.generation.traces import draw_trace

    file.write_text(json.dumps({"model": model, "searches": traces}, ensure_ascii=False, allow_nan=False))
    console, first = wide_console(stderr=True), traces[0]
    console.print(f"\nHow line {first['line']} was found", style="bold")
    console.print(draw_trace(first))
    console.print(f"{len(traces)} searches in {file}" if len(traces) > 1 else f"the search is in {file}", style="dim")


def encode_all(tokenizer: Tokenizer, lines: Sequence[str], max_len: int, *, cut: bool) -> list[list[int]]:
    """The ids of all lines that are not empty."""
    return [encode(tokenizer, line, number, max_len, cut=cut) for number, line in enumerate(lines, 1) if line.strip()]


def encode(tokenizer: Tokenizer, line: str, number: int, max_len: int, *, cut: bool) -> list[int]:
    """The ids of a source, always with an end-of-sequence token; too many of them are an error, or cut with `cut`."""
    ids = tokenizer.encode(line)
    if tokenizer.eos is not None and ids[-1:] != [tokenizer.eos]:
        ids = [*ids, tokenizer.eos]
    if len(ids) <= max_len:
        return ids
    if not cut:
        raise InputError(
            f"line {number} has {len(ids)} tokens, but the model reads at most {max_len}; shorten it, or give --truncate right"
        )
    return [*ids[: max_len - 1], ids[-1]]
