"""Whisper's rules for timestamps, against transformers' own, step by step on random logits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

import clearhead as ch
from clearhead.generation import Engine, Request
from clearhead.layers.masks import ABSENT
from clearhead.sampling.logits_processors import LogitsProcessor
from clearhead.sampling.strategy import Strategy
from clearhead.sampling.timestamps import Timestamps

N_TEXT, N_TIMES = 23, 31
END, PLAIN, FIRST = N_TEXT, N_TEXT + 1, N_TEXT + 2
RULES = Timestamps(FIRST, N_TIMES, END, max_initial=7)


def theirs(prompt: int) -> WhisperTimeStampLogitsProcessor:
    config: Any = SimpleNamespace(no_timestamps_token_id=PLAIN, eos_token_id=END, bos_token_id=END)
    config.max_initial_timestamp_index = 7
    return WhisperTimeStampLogitsProcessor(config, begin_index=prompt)


@pytest.mark.parametrize("seed", range(8))
def test_as_transformers(seed: int) -> None:
    """Texts sampled from what is allowed: each step forbids the same tokens, and leaves the same probabilities."""
    generator = torch.Generator().manual_seed(seed)
    prompt, texts, processor = 3, torch.randint(0, N_TEXT, (5, 3), generator=generator), theirs(3)
    for step in range(30):
        logits = torch.randn(5, FIRST + N_TIMES, generator=generator) * 3
        logits[:, FIRST:] -= 3  # else a time is nearly always likelier than any text
        padded = torch.cat([texts, texts.new_full((5, 2), ABSENT)], 1)  # rows of a batch may be longer
        facts = (torch.full((5,), prompt), torch.full((5,), step))
        found = RULES.apply(logits, padded, *facts)
        expected = processor(texts, logits).log_softmax(-1)
        assert torch.equal(found == -torch.inf, expected == -torch.inf)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)  # the same sums in float32
        texts = torch.cat([texts, found.exp().multinomial(1, generator=generator)], 1)


def test_a_window_has_fewer_times_than_the_vocabulary() -> None:
    rules = Timestamps(FIRST, 5, END, max_initial=50)
    found = rules.apply(torch.zeros(1, FIRST + N_TIMES), torch.zeros(1, 1, dtype=torch.long), *torch.tensor([[1], [0]]))
    assert (found > -torch.inf).nonzero()[:, 1].tolist() == [*range(FIRST, FIRST + 5)]


def whisper() -> ch.EncoderDecoder:
    sizes: dict[str, Any] = dict(n_layers=1, d_model=22, n_heads=2, d_ff=37, max_len=37, max_source_len=13, n_mels=5)
    model = ch.build(ch.preset("whisper-tiny", **sizes, vocab_size=FIRST + N_TIMES))
    assert isinstance(model, ch.EncoderDecoder)
    model.generation = ch.Generation(eos=(END,), decoder_start=PLAIN, forced_start=(PLAIN,))
    return model.eval()


@pytest.mark.parametrize("options", [dict(), dict(beams=3), dict(strategy=dict(temperature=0.7))], ids=str)
def test_in_the_engine(options: dict[str, Any]) -> None:
    """Every text obeys, with beams and samples too, and the checkpoint's forced <|notimestamps|> is not applied."""
    model = whisper()
    strategy = Strategy(timestamps=RULES, **options.pop("strategy", {}))
    engine = Engine(model, max_tokens=512)
    request = Request(source=torch.randn(5, 26), strategy=strategy, max_new_tokens=29, scored=True, **options)
    ticket = engine.submit(request)
    engine.run()
    tokens = ticket.hypotheses[0].tokens
    text, processor = [PLAIN], theirs(1)
    for token in tokens:
        allowed = processor(torch.tensor([text]), torch.zeros(1, FIRST + N_TIMES))[0] > -torch.inf
        # with equal logits times win wherever they may come; the rule that only logits decide is not tested here
        assert allowed[token] or token < FIRST
        text.append(token)
    times = [token for token in tokens if token >= FIRST]
    assert tokens[0] >= FIRST
    assert times == sorted(times)


def test_scores_are_after_the_rules() -> None:
    model = whisper()
    engine = Engine(model, max_tokens=512)
    source = torch.randn(5, 26)
    strategy = Strategy(timestamps=RULES)
    ticket = engine.submit(Request(source=source, strategy=strategy, max_new_tokens=1, scored=True))
    engine.run()
    with torch.no_grad():
        logits = model(source[None], torch.tensor([[PLAIN]]))[0, -1:]
    (token,) = ticket.hypotheses[0].tokens
    facts = (torch.tensor([[PLAIN]]), torch.tensor([1]), torch.tensor([0]))
    assert ticket.scores[0] == pytest.approx(float(RULES.apply(logits, *facts)[0, token]), abs=1e-5)
    assert LogitsProcessor(model, None, strategy).needs_history
