"""`clearhead generate`: a decoder continues a text, or answers in a chat, shown while it is generated."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from clearhead.cli.arguments import (
    Calibrate,
    Device,
    ModelName,
    Quantize,
    find_device,
    find_model,
    load_model,
    load_tokenizer_of,
    read_text,
)
from clearhead.cli.drafts import Draft, DraftQuantize, Lookup, check_drafts, load_draft
from clearhead.errors import InputError

if TYPE_CHECKING:
    from clearhead.data import Tokenizer
    from clearhead.generation import Engine, Grammar, Token
    from clearhead.models import Decoder

DEFAULT_LIMIT = 128  # new tokens


def run(
    model: ModelName,
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads standard input.")] = "-",
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="A conversation, with the model's own template: a line of yours, an answer, and so on."
        ),
    ] = False,
    system: Annotated[str | None, typer.Option(help="With --chat: the system message.")] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option("--max-new-tokens", "-n", min=1, help="The most tokens to write. Without: 128, or what fits."),
    ] = None,
    min_new_tokens: Annotated[int, typer.Option(help="The fewest tokens to write, if no --stop comes before.")] = 0,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token; 1 draws as the model says.")] = 0.8,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens that sum to this.")] = 0.95,
    top_k: Annotated[int, typer.Option(help="Draw from this many of the likeliest tokens; 0: from all.")] = 0,
    min_p: Annotated[float, typer.Option(help="Leave out tokens less likely than this share of the likeliest.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: tokens written before become less likely.")] = 1.0,
    presence_penalty: Annotated[
        float, typer.Option(help="Subtracted from the logit of every token written before.")
    ] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="The same, once for each time it was written.")] = 0.0,
    no_repeat_ngram: Annotated[
        int, typer.Option(help="No sequence of this many tokens occurs twice; 0: no limit.")
    ] = 0,
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
    slide: Annotated[
        bool,
        typer.Option(
            "--slide", help="Write past the model's length: when it is full, go on from the text's last half."
        ),
    ] = False,
    lookup: Lookup = False,
    draft: Draft = None,
    draft_quantize: DraftQuantize = None,
    scores: Annotated[
        bool, typer.Option("--scores", help="Print a line for each token instead, with its probability.")
    ] = False,
    alternatives: Annotated[
        int, typer.Option(min=0, max=100, help="The same, with this many of the likeliest tokens.")
    ] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: the new text, and with --scores its tokens.")
    ] = False,
    quantize: Quantize = None,
    calibrate: Calibrate = None,
    device: Device = "auto",
) -> None:
    """Continue a prompt; the text is shown while it is generated."""
    if chat and prompt != "-":
        raise InputError(f"--chat asks for your lines one by one; got the prompt {prompt!r:.40}; leave one of them out")
    if chat and as_json:
        raise InputError("--json prints one object, and --chat answers line by line; leave one of them out")
    if system is not None and not chat:
        raise InputError(f"--system {system!r:.40} is of a conversation, and this is none; add --chat, or leave it out")
    check_drafts(lookup, draft, draft_quantize)
    if slide:
        refuse_beside_slide(chat=chat, truncate=truncate, regex=regex, json_schema=json_schema, choice=choice)
    schema = None if json_schema is None else read_schema(json_schema)
    text = "" if chat else read_text(prompt)
    options: dict[str, Any] = dict(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    options |= dict(repetition_penalty=repetition_penalty, presence_penalty=presence_penalty)
    options |= dict(frequency_penalty=frequency_penalty, no_repeat_ngram=no_repeat_ngram, min_new_tokens=min_new_tokens)
    check_sampling(options, max_new_tokens)  # before a model is loaded
    options |= dict(max_new_tokens=max_new_tokens, seed=seed, truncate=truncate, lookup=lookup)
    options |= dict(scored=scores or alternatives > 0, alternatives=alternatives)
    constraints = dict(regex=regex, json_schema=schema, choices=choice)
    writer = make_writer(model, find_device(device), (quantize, calibrate), options, stop or [], constraints)
    writer.as_json = as_json
    if draft is not None:
        writer.options["draft"] = load_draft(draft, writer.tokenizer, find_device(device), draft_quantize)
    if chat:
        run_chat(writer, system)
    else:
        write = writer.write_sliding if slide else writer.write
        write(writer.tokenizer.encode(text), shown="" if writer.scored or as_json else text)


def refuse_beside_slide(**others: Any) -> None:
    """Refuse what does not go with a text of several windows."""
    for name, value in others.items():
        if value:
            raise InputError(
                f"--slide is for plain texts, in which each window forgets the one before; got --{name.replace('_', '-')}; leave "
                f"one of them out"
            )


def check_sampling(options: dict[str, Any], max_new_tokens: int | None) -> None:
    """Refuse wrong sampling options."""
    from clearhead.generation import Strategy

    if max_new_tokens is not None and options["min_new_tokens"] > max_new_tokens:
        raise InputError(
            f"--min-new-tokens {options['min_new_tokens']} is more than --max-new-tokens {max_new_tokens}; change one of them"
        )
    Strategy.of(options)


def make_writer(
    name: str,
    device: str,
    weights: tuple[str | None, str | None],
    options: dict[str, Any],
    stops: list[str],
    constraints: dict[str, Any],
) -> TextWriter:
    """Load the tokenizer and the decoder (`weights`: --quantize and --calibrate), and prepare what constrains the text."""
    from clearhead.generation.texts import check_stops, make_grammar
    from clearhead.models import Decoder

    path = find_model(name)
    tokenizer = load_tokenizer_of(path)
    stops = check_stops(stops, tokenizer)
    decoder = load_model(path, device, *weights)
    if not isinstance(decoder, Decoder):
        raise InputError(
            f"generate takes a decoder; {name!r} has shape={decoder.config.shape!r}; take a GPT or a LLaMA"
        )
    grammar = make_grammar(decoder, tokenizer, **constraints)
    return TextWriter(decoder, tokenizer, {**options, "stop": stops}, grammar)


def read_schema(given: str) -> str:
    """A JSON schema as text: the argument itself, or the content of the file with that name."""
    if given.lstrip().startswith("{") or given.strip() in ("true", "false"):
        return given
    if not Path(given).is_file():
        raise InputError(f"--json-schema {given!r:.60} is neither a JSON object nor a file; is the path right?")
    try:
        return json.dumps(json.loads(Path(given).read_bytes()))
    except ValueError as error:
        raise InputError(f"--json-schema {given!r} is not JSON ({error}); correct the file") from None


class TextWriter:
    """Generates texts with the same options, and prints each to standard output while it is generated; as JSON at its end."""

    as_json = False

    def __init__(self, model: Decoder, tokenizer: Tokenizer, options: dict[str, Any], grammar: Grammar | None) -> None:
        self.model, self.tokenizer, self.options, self.grammar = model, tokenizer, options, grammar
        self.scored: bool = options["scored"]
        self._engine: Engine | None = None

    def write(self, ids: list[int], shown: str = "", *, in_chat: bool = False) -> str:
        """Continue these ids. Returns the new text.

        `shown` is printed in front of it. `in_chat`: the ids are a conversation, and later calls continue the same one.
        """
        from clearhead.engine.speculation import DRAFT_ROWS
        from clearhead.generation import Engine
        from clearhead.generation.engines import make_engine
        from clearhead.generation.texts import StoppingStream, follow, make_request, stream_of

        asked = self.options["max_new_tokens"]
        limit = asked or self._default_limit(len(ids))
        options: dict[str, Any] = {**self.options, "max_new_tokens": limit}
        request = make_request(self.model, self.tokenizer, ids, grammar=self.grammar, **options)
        if self._engine is None:
            # In a chat the engine keeps the conversation so far, so that only the new part is computed.
            chat: dict[str, Any] = dict(
                max_tokens=self.model.config.max_len,
                max_rows=DRAFT_ROWS if request.lookup or request.draft is not None else 1,
            )
            self._engine = Engine(self.model, **chat) if in_chat else make_engine(self.model, [request])
        ticket = self._engine.submit(request)
        stops = self.options["stop"]
        # An answer is a text of its own; otherwise the text continues the prompt.
        stream = StoppingStream(self.tokenizer, stops) if in_chat else stream_of(request, self.tokenizer, stops)
        written: list[str] = []
        try:
            self._print(follow(self._engine, ticket, stream), shown, written)
        except KeyboardInterrupt:
            self._engine = None  # it may have been interrupted in the middle of a step
            if not (in_chat and sys.stdin.isatty()):
                raise
        if ticket.reason == "length" and stream.stop is None:
            self._explain_end(limit, asked=asked is not None)
        return "".join(written)

    def write_sliding(self, ids: list[int], shown: str) -> None:
        """Continue these ids, past the model's length if need be, and print the text."""
        from clearhead.generation.sliding import slide
        from clearhead.generation.texts import StoppingStream

        options: dict[str, Any] = {name: value for name, value in self.options.items() if name != "truncate"}
        options["max_new_tokens"] = options["max_new_tokens"] or DEFAULT_LIMIT
        stream, n_slides = StoppingStream(self.tokenizer, options["stop"], after=ids), 0

        def say(n_seen: int) -> None:
            nonlocal n_slides
            n_slides += 1
            if n_slides == 1:
                longest = self.model.config.max_len
                words = f"the text slides: the model reads {longest} tokens, and goes on from the last {n_seen} of them"
                typer.echo(f"\nclearhead: {words} each time they are full", err=True)

        self._print(slide(self.model, self.tokenizer, ids, stream, at_slide=say, **options), shown, [])

    def _print(self, pieces: Iterable[tuple[Token | None, str]], shown: str, written: list[str]) -> None:
        """Print a text piece by piece, or a line for each token; the pieces are appended to `written`."""
        tokens = list["Token"]()
        typer.echo(shown, nl=False)
        try:
            for token, piece in pieces:
                written.append(piece)
                if not self.scored:
                    typer.echo(piece if not self.as_json else "", nl=False)
                elif token is not None:
                    if not self.as_json:
                        self._print_token(token, is_first=not tokens)
                    tokens.append(token)
                sys.stdout.flush()
        finally:  # end the line, however the text ended
            if self.as_json:
                scored = {"tokens": [as_dict(token, self.tokenizer) for token in tokens]} if self.scored else {}
                typer.echo(json.dumps({"text": "".join(written), **scored}, indent=2))
            elif not self.scored:
                typer.echo()
            elif tokens:
                typer.echo(spell_total(tokens))
            sys.stdout.flush()

    def _default_limit(self, n_prompt: int) -> int:
        """How many tokens to write if the user did not say: what fits after the prompt, or after half of a prompt that is cut."""
        longest = min(self.model.config.max_len, self.model.generation.max_length or self.model.config.max_len)
        room = longest - max(1, n_prompt)  # an empty prompt becomes the model's bos
        if room < 1 and self.options["truncate"] is not None:
            room = longest // 2
        return max(1, min(DEFAULT_LIMIT, room))

    def _explain_end(self, limit: int, *, asked: bool) -> None:
        """Say on standard error that a text was cut, where the user did not ask for so few tokens."""
        if not asked and limit < DEFAULT_LIMIT:
            full = f"where the model's max_len={self.model.config.max_len} is full"
            typer.echo(
                f"clearhead: ended after {limit} tokens, {full}; a shorter prompt leaves more room, and --slide goes on",
                err=True,
            )
        elif self.grammar is not None:
            typer.echo(f"clearhead: cut after {limit} tokens, before the text was complete; raise -n", err=True)

    def _print_token(self, token: Token, *, is_first: bool) -> None:
        if is_first:
            last = "   instead" if self.options["alternatives"] > 0 else ""
            typer.echo(f"{'token':<20} {'probability':>11} {'log':>9}{last}")
        typer.echo(spell_token(token, self.tokenizer))


def spell_token(token: Token, tokenizer: Tokenizer) -> str:
    """A line: a token, its probability, and its alternatives with theirs."""
    line = f"{tokenizer.name(token.id)!r:<20} {math.exp(token.score):>11.2%} {token.score:>9.4f}"
    others = (f"{tokenizer.name(id)!r} {math.exp(score):.1%}" for id, score in token.alternatives if id != token.id)
    return "   ".join([line, *others])


def as_dict(token: Token, tokenizer: Tokenizer) -> dict[str, Any]:
    """What `spell_token` shows, for JSON."""
    others = [{"token": tokenizer.name(id), "id": id, "log": score} for id, score in token.alternatives]
    return {"token": tokenizer.name(token.id), "id": token.id, "log": token.score, "alternatives": others}


def spell_total(tokens: list[Token]) -> str:
    """A line: the log-probability and the perplexity of all tokens together."""
    total = sum(token.score for token in tokens)
    return f"{len(tokens)} tokens: log-probability {total:.4f}, perplexity {math.exp(-total / len(tokens)):.4f}"


def run_chat(writer: TextWriter, system: str | None) -> None:
    """Read a line, print an answer, until the input ends. Ctrl-C stops an answer; between answers it ends the chat."""
    messages: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]
    is_terminal = sys.stdin.isatty()
    while True:
        try:
            line = input("> " if is_terminal else "")
        except (EOFError, KeyboardInterrupt):
            if is_terminal:
                typer.echo()
            return
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line})
        ids = writer.tokenizer.encode(writer.tokenizer.chat(messages), special=False)
        answer = writer.write(ids, in_chat=True)
        messages.append({"role": "assistant", "content": answer.strip()})
