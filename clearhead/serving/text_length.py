"""A limit on characters, checked before a text is tokenised: tokenising takes time and memory, and can not be cancelled."""

from __future__ import annotations

from clearhead.errors import InputError
from clearhead.serving.worker import Worker

MIN_LONGEST = (
    16  # characters of a token; tokenizers that drop spaces or accents read more than their tokens' names show
)


def max_characters(worker: Worker) -> int:
    """The characters that fit at most into the model's length, if every token were the longest of the vocabulary."""
    assert worker.tokenizer is not None
    config = worker.model.config
    longest = max(MIN_LONGEST, max(map(len, worker.tokenizer.vocab), default=0))
    return max(config.max_len, config.max_source_len) * longest


def check_characters(worker: Worker, n: int, what: str) -> None:
    """InputError for a text of n characters that can not fit into the model's length."""
    config = worker.model.config
    if n <= max(config.max_len, config.max_source_len):  # the usual case, without a look at the vocabulary
        return
    most = max_characters(worker)
    if n > most:
        raise InputError(
            f"{what} is too long for a model of {max(config.max_len, config.max_source_len)} tokens: {n:,} characters, and no "
            f"more than {most:,} can fit; shorten it"
        )
