"""A text that slides past the model's length."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import clearhead as ch
from clearhead.config import Generation
from clearhead.generation import Grammar
from clearhead.generation.sliding import slide
from clearhead.generation.texts import StoppingStream
from clearhead.models import Decoder

TOKENIZER = ch.train_tokenizer(texts=["the cat sat on the mat"] * 9, kind="bpe", vocab_size=280)


def small() -> Decoder:
    sizes: dict[str, Any] = dict(n_layers=1, d_model=32, n_heads=4, d_ff=40, max_len=12)
    model = ch.build(ch.preset("gpt2", vocab_size=TOKENIZER.vocab_size, **sizes), seed=1).eval()
    assert isinstance(model, Decoder)
    with torch.no_grad():
        for each in model.parameters():  # so that the text depends on all that the model reads
            each.add_(torch.randn(each.shape, generator=torch.Generator().manual_seed(each.numel())) * 0.3)
    model.generation = Generation(bos=TOKENIZER.bos)
    return model


def write(model: Decoder, ids: list[int], **options: Any) -> tuple[list[int], list[int]]:
    """The tokens, and with how many each later window starts."""
    starts: list[int] = []
    stream = StoppingStream(TOKENIZER, after=ids)
    found = slide(model, TOKENIZER, ids, stream, max_new_tokens=20, at_slide=starts.append, **options)
    return [token.id for token, _ in found if token is not None], starts


def test_an_empty_prompt_is_the_bos_in_every_window() -> None:
    assert TOKENIZER.bos is not None
    model = small()
    assert write(model, []) == write(model, [TOKENIZER.bos])
    assert write(model, [])[1] == [6, 6]


def test_a_grammar_does_not_slide() -> None:
    only = Grammar.regex("[a-z ]{0,99}!", TOKENIZER, ends=())
    with pytest.raises(ch.InputError, match=r"can not slide: .*got regex '\[a-z \]\{0,99\}!'; leave it out"):
        write(small(), [5], grammar=only)
