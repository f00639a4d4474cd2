"""The logit lens against the logits, and against transformers' hidden states."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from models.tiny import inputs, tiny

import clearhead as ch
from clearhead.inside import (
    logit_attribution,
    logit_lens,
    saliency,
)
from tests.inside.models import FP32, SCORED, TOKENS, gpt2s, of_transformers


@pytest.mark.slow
@pytest.mark.parametrize("name", SCORED)
def test_the_lens_ends_in_the_logits(name: str) -> None:
    model = tiny(name)
    args = inputs(model.config)
    lens = logit_lens(model, *args)
    with torch.no_grad():
        assert torch.equal(lens[-1], model(*args))
    assert len(lens) == (model.config.n_decoder_layers or model.config.n_layers) + 1


def test_the_lens_of_a_padded_batch_ends_in_the_logits() -> None:
    model = tiny("bert-classes", pool="mean")
    args, real = inputs(model.config), torch.arange(11) >= torch.tensor([[3], [0], [9]])
    with torch.no_grad():
        assert torch.equal(logit_lens(model, *args, mask=real)[-1], model(*args, mask=real))


def test_the_lens_as_transformers_would_see_it(tmp_path: Path) -> None:
    theirs, ours = gpt2s(tmp_path)
    with torch.no_grad():
        states = theirs(TOKENS, output_hidden_states=True).hidden_states
        # their last state is already normed
        expected = [theirs.lm_head(theirs.transformer.ln_f(x)) for x in states[:-1]] + [theirs.lm_head(states[-1])]
    torch.testing.assert_close(logit_lens(ours, TOKENS), torch.stack(expected), rtol=0, atol=FP32)


def test_the_lens_of_a_post_norm_model_as_transformers_would_see_it(tmp_path: Path) -> None:
    sizes = dict(vocab_size=53, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=37)
    theirs, ours = of_transformers(
        transformers.BertForMaskedLM, transformers.BertConfig(**sizes, max_position_embeddings=19), tmp_path
    )
    with torch.no_grad():
        states = theirs(TOKENS, output_hidden_states=True).hidden_states
        expected = torch.stack([theirs.cls(x) for x in states])
    torch.testing.assert_close(logit_lens(ours, TOKENS), expected, rtol=0, atol=FP32)


def test_the_lens_of_an_encoder_decoder_as_transformers_would_see_it(tmp_path: Path) -> None:
    sizes = dict(vocab_size=53, d_model=24, d_kv=7, d_ff=37, num_layers=2, num_heads=3, decoder_start_token_id=0)
    theirs, ours = of_transformers(transformers.T5ForConditionalGeneration, transformers.T5Config(**sizes), tmp_path)
    with torch.no_grad():
        states = theirs(TOKENS, decoder_input_ids=TOKENS[:, :7], output_hidden_states=True).decoder_hidden_states
        normed = [theirs.decoder.final_layer_norm(x) for x in states[:-1]] + [states[-1]]
        # their tied head divides by the root of the width
        expected = torch.stack([theirs.lm_head(x * 24**-0.5) for x in normed])
    torch.testing.assert_close(logit_lens(ours, TOKENS, TOKENS[:, :7]), expected, rtol=0, atol=FP32)


def test_a_model_without_a_head_has_no_lens() -> None:
    model = tiny("bert", head="none")
    for reading in (logit_lens, logit_attribution, saliency):
        with pytest.raises(ch.InputError, match=r"head='none'.*head='tokens' or 'classes'"):
            reading(model, *inputs(model.config))
