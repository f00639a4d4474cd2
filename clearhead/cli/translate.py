"""`clearhead translate`: each line of a text through an encoder-decoder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from clearhead.cli.arguments import Device, ModelName, Quantize, find_device, find_model, follow, load_model, read_lines
from clearhead.errors import InputError

if TYPE_CHECKING:
    from clearhead.data import Tokenizer
    from clearhead.generation import Hypothesis


def run(
    model: ModelName,
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="A file with one text a line; - reads standard input.")
    ] = "-",
    beams: Annotated[int, typer.Option(min=1, help="Texts kept at each step; 1 is greedy.")] = 4,
    n_best: Annotated[
        int | None,
        typer.Option(min=1, help="So many translations of each line: its number, a score and the text, with tabs."),
    ] = None,
    length_penalty: Annotated[
        float, typer.Option(help="Above 0 favours long texts; 0 does not look at the length.")
    ] = 1.0,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="The longest output. Without it: 20 more than twice the source.")
    ] = None,
    truncate: Annotated[
        Literal["right"] | None, typer.Option(help="Cut a source that is too long at its end. Without: an error.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json", help="Write why each text of the search lived or died; show the first line's."
        ),
    ] = None,
    quantize: Quantize = None,
    device: Device = "auto",
) -> None:
    """Translate each line, in order, to standard output; an empty line stays empty."""
    if trace is not None and beams == 1:
        raise InputError("--trace is of a search, and --beams 1 searches nothing; take 2 or more")
    if n_best is not None and n_best > beams:
        raise InputError(
            f"a search finds as many texts as it has beams; got --n-best {n_best}, --beams {beams}; change one"
        )
    if trace is not None and not trace.absolute().parent.is_dir():
        raise InputError(f"--trace {str(trace)!r} is in a folder that is not there; make it first")
    lines = read_lines(file)
    from clearhead.data import load_tokenizer
    from clearhead.generation import Request
    from clearhead.generation.engines import make_engine
    from clearhead.generation.texts import in_order
    from clearhead.models import EncoderDecoder

    place = find_model(model)
    translator = load_model(place, find_device(device), quantize)
    if not isinstance(translator, EncoderDecoder) or translator.config.inputs != "tokens":
        raise InputError(
            f"translate takes an encoder-decoder over texts; {model!r} has shape={translator.config.shape!r}, "
            f"inputs={translator.config.inputs!r}; take a Marian, a T5 or a run of `clearhead train translate`"
        )
    config, tokenizer = translator.config, load_tokenizer(place if place.is_dir() else place.parent)
    if max_new_tokens is not None and max_new_tokens > config.max_len:
        raise InputError(
            f"--max-new-tokens {max_new_tokens} is more than the model's max_len={config.max_len}; lower it"
        )
    common: dict[str, Any] = dict(beams=beams, length_penalty=length_penalty, n_best=n_best or 1)
    common |= dict(scored=n_best is not None, trace=trace is not None)
    sources = [
        encode(tokenizer, line, number, config.max_source_len, cut=truncate is not None)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    requests = [
        Request(source=ids, max_new_tokens=max_new_tokens or min(2 * len(ids) + 20, config.max_len), **common)
        for ids in sources
    ]
    tickets = in_order(make_engine(translator, requests, BATCH_TOKENS), requests)
    traces: list[dict[str, Any]] = []
    for number, line in enumerate(follow(lines, "translating", len(lines), printing=True), 1):
        ticket = next(tickets) if line.strip() else None
        typer.echo(show(ticket.hypotheses if ticket else [], number, tokenizer, with_scores=n_best is not None))
        if trace is not None and ticket is not None:
            from clearhead.generation.traces import make_trace

            traces.append({"line": number, **make_trace(ticket, translator, tokenizer, text=line)})
    if trace is not None:
        keep(traces, trace, model)


BATCH_TOKENS = 65_536  # sources and beams held at once


def show(found: Sequence[Hypothesis], number: int, tokenizer: Tokenizer, *, with_scores: bool) -> str:
    """A line's translation; with scores, its n best, each with the line's number."""
    if not with_scores:
        return tokenizer.decode(found[0].tokens) if found else ""
    return "\n".join(f"{number}\t{one.score:.4f}\t{tokenizer.decode(one.tokens)}" for one in found) or f"{number}\t\t"


def keep(traces: list[dict[str, Any]], file: Path, model: str) -> None:
    """The searches of all lines into a file, and the first of them onto the terminal, beside the translations."""
    from rich.console import Console

    from clearhead.generation.traces import draw_trace

    file.write_text(json.dumps({"model": model, "searches": traces}, ensure_ascii=False, allow_nan=False))
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        console = Console(stderr=True, highlight=False, width=120)
    first = traces[0]
    console.print(f"\nHow line {first['line']} was found", style="bold", highlight=False)
    console.print(draw_trace(first))
    console.print(f"{len(traces)} searches in {file}" if len(traces) > 1 else f"the search is in {file}", style="dim")


def encode(tokenizer: Tokenizer, line: str, number: int, max_len: int, *, cut: bool) -> list[int]:
    """A source's ids as the model expects them: with its end, whether the tokenizer adds that or not."""
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
