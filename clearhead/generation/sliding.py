"""A text longer than the model: when its length is full, the text goes on from its own last half, which is computed anew.

This works with positions of every kind: each window is a prompt of its own, whose first token is at position 0. The model then sees
nothing of what is before the window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from clearhead.data.tokenizer import Tokenizer
from clearhead.engine.request import Token
from clearhead.errors import InputError
from clearhead.generation.engines import make_engine
from clearhead.generation.texts import StoppingStream, fit, follow, make_request
from clearhead.models import Decoder


def slide(
    model: Decoder,
    tokenizer: Tokenizer,
    ids: Sequence[int],
    stream: StoppingStream,
    *,
    max_new_tokens: int,
    seed: int = 0,
    min_new_tokens: int = 0,
    at_slide: Callable[[int], object] = lambda n_seen: None,
    **options: Any,
) -> Iterator[tuple[Token | None, str]]:
    """Each new token with the text that is then certain, as `follow`, window after window, until there are `max_new_tokens`.

    `at_slide` is called before each window that does not hold the whole text, with the number of tokens that it starts with.
    Penalties and n-grams that may not repeat count within a window. Window i is sampled with seed + i. A grammar is refused: each
    window would start it anew.
    """
    if options.get("grammar") is not None:
        raise InputError(
            f"a text with a grammar can not slide: each window would start the grammar anew; got {options['grammar'].what}; "
            f"leave it out, or use a model with more room than max_len={model.config.max_len}"
        )
    bos, max_len = model.generation.bos, model.config.max_len
    text = list(ids) or ([] if bos is None else [bos])  # as a request has it; later windows keep it, too
    n_written, number = 0, 0
    while True:
        window = text if len(text) < max_len else fit(text, model, max_len // 2, "left")
        if len(window) < len(text):
            at_slide(len(window))
        request = make_request(
            *(model, tokenizer, window),
            max_new_tokens=min(max_new_tokens - n_written, max_len - max(len(window), 1)),
            min_new_tokens=max(min_new_tokens - n_written, 0),
            seed=seed + number,
            **options,
        )
        engine = make_engine(model, [request])
        ticket = engine.submit(request)
        yield from follow(engine, ticket, stream, ends=False)
        text += ticket.ids
        n_written, number = n_written + len(ticket.ids), number + 1
        if ticket.reason != "length" or stream.stop is not None or n_written >= max_new_tokens:
            break
    yield None, stream.finish()
