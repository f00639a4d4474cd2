"""`clearhead generate`: a decoder goes on with a text, or answers in a conversation, word by word."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from clearhead.cli.arguments import Device, ModelName, Quantize, find_device, find_model, load_model, read_text
from clearhead.errors import InputError

if TYPE_CHECKING:
    from clearhead.data import Tokenizer
    from clearhead.generation import Engine, Grammar, Token
    from clearhead.models import Decoder


def run(
    model: ModelName,
    prompt: Annotated[str, typer.Argument(help="The text to go on with; - reads standard input.")] = "-",
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="A conversation, with the model's own template: a line of yours, an answer, and so on."
        ),
    ] = False,
    system: Annotated[str | None, typer.Option(help="With --chat: what the model is told first.")] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=1, help="The most tokens to write.")
    ] = 128,
    min_new_tokens: Annotated[int, typer.Option(help="The fewest tokens to write.")] = 0,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token; 1 draws as the model says.")] = 0.8,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens that sum to this.")] = 0.95,
    top_k: Annotated[int, typer.Option(help="Draw from so many likeliest tokens; 0: from all.")] = 0,
    min_p: Annotated[float, typer.Option(help="Leave out tokens less likely than this share of the likeliest.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: say less again.")] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="Off the logit of every token written before.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="The same, for each time that it was written.")] = 0.0,
    no_repeat_ngram: Annotated[int, typer.Option(help="Never so many tokens in a row twice; 0: allowed.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")] = None,
    regex: Annotated[str | None, typer.Option(help="The text matches this regular expression.")] = None,
    json_schema: Annotated[
        str | None, typer.Option(metavar="JSON|FILE", help="The text is JSON that this schema accepts; {}: any JSON.")
    ] = None,
    choice: Annotated[
        list[str] | None, typer.Option(help="The text is this one, or another --choice given with it.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same text.")] = 0,
    truncate: Annotated[
        Literal["left"] | None, typer.Option(help="Cut a prompt that is too long at its start. Without: an error.")
    ] = None,
    scores: Annotated[
        bool, typer.Option("--scores", help="A line for each token instead: how likely the model found it.")
    ] = False,
    alternatives: Annotated[
        int, typer.Option(min=0, max=100, help="The same, and what else was among so many likeliest.")
    ] = 0,
    quantize: Quantize = None,
    device: Device = "auto",
) -> None:
    """Write on from a prompt, shown as it is written."""
    if chat and prompt != "-":
        raise InputError(f"--chat asks for your lines one by one; got the prompt {prompt!r:.40}; leave one of them out")
    schema = None if json_schema is None else read_schema(json_schema)
    text = "" if chat else read_text(prompt)
    from clearhead.data import load_tokenizer
    from clearhead.generation import Strategy
    from clearhead.generation.texts import check_stops, make_grammar
    from clearhead.models import Decoder

    options: dict[str, Any] = dict(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    options |= dict(repetition_penalty=repetition_penalty, presence_penalty=presence_penalty)
    options |= dict(frequency_penalty=frequency_penalty, no_repeat_ngram=no_repeat_ngram, min_new_tokens=min_new_tokens)
    Strategy.of(options)  # said before a model is read
    place = find_model(model)
    tokenizer = load_tokenizer(place if place.is_dir() or place.suffix == ".gguf" else place.parent)
    stops = check_stops(stop or [], tokenizer)
    decoder = load_model(place, find_device(device), quantize)
    if not isinstance(decoder, Decoder):
        raise InputError(
            f"generate takes a decoder; {model!r} has shape={decoder.config.shape!r}; take a GPT or a LLaMA"
        )
    grammar = make_grammar(decoder, tokenizer, regex=regex, json_schema=schema, choices=choice)
    options |= dict(max_new_tokens=max_new_tokens, seed=seed, stop=stops, truncate=truncate)
    options |= dict(scored=scores or alternatives > 0, alternatives=alternatives)
    writer = TextWriter(decoder, tokenizer, options, grammar)
    if chat:
        run_chat(writer, system)
    else:
        writer.write(tokenizer.encode(text), shown="" if writer.scored else text)


def read_schema(given: str) -> str:
    """A JSON schema's text: what was given, or the file of that name."""
    if given.lstrip().startswith("{") or given.strip() in ("true", "false"):
        return given
    if not Path(given).is_file():
        raise InputError(f"--json-schema {given!r:.60} is neither a JSON object nor a file; is the path right?")
    try:
        return json.dumps(json.loads(Path(given).read_bytes()))
    except ValueError as error:
        raise InputError(f"--json-schema {given!r} is not JSON ({error}); correct the file") from None


class TextWriter:
    """Writes one text after another to standard output, and keeps to the same options."""

    def __init__(self, model: Decoder, tokenizer: Tokenizer, options: dict[str, Any], grammar: Grammar | None) -> None:
        self.model, self.tokenizer, self.options, self.grammar = model, tokenizer, options, grammar
        self.scored: bool = options["scored"]
        self._engine: Engine | None = None

    def write(self, ids: list[int], shown: str = "", *, going_on: bool = False) -> str:
        """Go on from these ids; returns what was written. `going_on`: others will follow that begin like this one."""
        from clearhead.generation import Engine
        from clearhead.generation.engines import make_engine
        from clearhead.generation.texts import StoppingStream, follow, make_request, stream_of

        request = make_request(self.model, self.tokenizer, ids, grammar=self.grammar, **self.options)
        if self._engine is None:
            # A conversation's beginning is kept, so that only what is new is read.
            self._engine = Engine(self.model, max_rows=1) if going_on else make_engine(self.model, [request])
        ticket = self._engine.submit(request)
        written, tokens = "", list["Token"]()
        stops = self.options["stop"]
        # An answer is a text of its own.
        stream = StoppingStream(self.tokenizer, stops) if going_on else stream_of(request, self.tokenizer, stops)
        typer.echo(shown, nl=False)
        try:
            for token, piece in follow(self._engine, ticket, stream):
                written += piece
                if self.scored and token is not None:
                    if not tokens:
                        typer.echo(
                            f"{'token':<20} {'probability':>11} {'log':>9}"
                            + "   instead" * (self.options["alternatives"] > 0)
                        )
                    tokens.append(token)
                    typer.echo(spell(token, self.tokenizer))
                elif not self.scored:
                    typer.echo(piece, nl=False)
                sys.stdout.flush()
        except KeyboardInterrupt:
            self._engine = None  # it may have been stopped anywhere
            if not (going_on and sys.stdin.isatty()):
                raise
        finally:  # the line ends, whatever ends the text
            if self.scored and tokens:
                typer.echo(sum_up(tokens))
            elif not self.scored:
                typer.echo()
        sys.stdout.flush()
        if self.grammar is not None and ticket.reason == "length":
            n = self.options["max_new_tokens"]
            typer.echo(f"clearhead: cut after {n} tokens, before the text was complete; raise -n", err=True)
        return written


def spell(token: Token, tokenizer: Tokenizer) -> str:
    """A token, how likely it was, and what else was."""
    from clearhead.generation.texts import piece_name

    line = f"{piece_name(tokenizer, token.id)!r:<20} {math.exp(token.score):>11.2%} {token.score:>9.4f}"
    others = (
        f"{piece_name(tokenizer, id)!r} {math.exp(score):.1%}" for id, score in token.alternatives if id != token.id
    )
    return "   ".join([line, *others])


def sum_up(tokens: list[Token]) -> str:
    total = sum(token.score for token in tokens)
    return f"{len(tokens)} tokens: log-probability {total:.4f}, perplexity {math.exp(-total / len(tokens)):.4f}"


def run_chat(writer: TextWriter, system: str | None) -> None:
    """Lines in, answers out, until the input ends. Ctrl-C ends an answer, and between answers the conversation."""
    messages: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]
    asks = sys.stdin.isatty()
    while True:
        try:
            line = input("> " if asks else "")
        except (EOFError, KeyboardInterrupt):
            if asks:
                typer.echo()
            return
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line})
        ids = writer.tokenizer.encode(writer.tokenizer.chat(messages), special=False)
        answer = writer.write(ids, going_on=True)
        messages.append({"role": "assistant", "content": answer.strip()})
