"""When each word of a transcript is said, from cross-attention: the model reads the text that it wrote, and looks at the sound.

The weights of the alignment heads over the sound, normalised, smoothed and averaged, are a matrix of tokens by 20 ms. Dynamic
time warping finds the path through it along which text and time both move forward and the weight is largest; a word starts where
the path enters its first token (Radford et al. 2022; the rules for long words and punctuation are those of OpenAI's code).
"""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.data.tokenizer import Tokenizer
from clearhead.errors import InputError
from clearhead.inside.probe import probe
from clearhead.models import EncoderDecoder

SMOOTHING = 7  # steps of time in the median
TIMES_A_SECOND = 50
SPACELESS = ("zh", "ja", "th", "lo", "my", "yue")  # languages whose words are not set apart by spaces
SENTENCE_ENDS = ".。!！?？"
OPENING = "\"'“¿([{-"  # belong to the next word
CLOSING = "\"'.。,，!！?？:：”)]}、"  # belong to the word before
LONGEST_MEDIAN = 0.7  # seconds: the median length of a word is not taken for longer


@dataclass(frozen=True)
class Word:
    """A word with its space and punctuation, when it is said, in seconds, and the mean probability of its tokens."""

    text: str
    start: float
    end: float
    probability: float
    n_tokens: int = 0


def alignment_heads(model: EncoderDecoder) -> dict[int, list[int]]:
    """By layer, the heads that show when a word is said: the checkpoint's own, else all of the later half of the layers."""
    config, named = model.config, model.generation.alignment_heads
    if any(not (0 <= layer < config.n_decoder_layers and 0 <= head < config.n_heads) for layer, head in named):
        raise InputError(
            f"the checkpoint's alignment_heads are not heads of this model; got {named}; it has {config.n_decoder_layers} layers "
            f"of {config.n_heads} heads; correct generation_config.json"
        )
    heads = named or [
        (layer, head)
        for layer in range(config.n_decoder_layers // 2, config.n_decoder_layers)
        for head in range(config.n_heads)
    ]
    return {layer: [head for each, head in heads if each == layer] for layer, _ in heads}


def median_filter(x: Float[Tensor, "... S"]) -> Float[Tensor, "... S"]:
    """The median of each number and its neighbours; the ends are mirrored."""
    reach = SMOOTHING // 2
    if x.shape[-1] <= reach:
        return x
    return F.pad(x, (reach, reach), mode="reflect").unfold(-1, SMOOTHING, 1).median(-1).values


def time_warp(costs: Float[np.ndarray, "N S"]) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
    """The cheapest path from the first cell to the last that goes down, right, or both at each step: its rows and columns.

    Each cell's cost is known from the three before it, so a diagonal of cells is computed at once.
    """
    N, S = costs.shape
    total = np.full((N + 1, S + 1), np.inf, np.float32)
    total[0, 0] = 0
    steps = np.zeros((N + 1, S + 1), np.int8)  # 0: both, 1: down, 2: right
    steps[0, :], steps[:, 0] = 2, 1
    for diagonal in range(2, N + S + 1):
        i = np.arange(max(1, diagonal - S), min(N, diagonal - 1) + 1)
        j = diagonal - i
        both, down, right = total[i - 1, j - 1], total[i - 1, j], total[i, j - 1]
        step = np.where((both < down) & (both < right), 0, np.where((down < both) & (down < right), 1, 2))
        total[i, j] = costs[i - 1, j - 1] + np.choose(step, (both, down, right))
        steps[i, j] = step
    rows, columns = list[int](), list[int]()
    i, j = N, S
    while i > 0 or j > 0:
        rows.append(i - 1)
        columns.append(j - 1)
        step = steps[i, j]
        i, j = i - (step != 2), j - (step != 1)
    return np.array(rows[::-1]), np.array(columns[::-1])


def split_words(tokenizer: Tokenizer, ids: Sequence[int], language: str) -> list[tuple[str, int]]:
    """The words of these ids, each with its number of ids. A sign of punctuation alone is a word of its own."""
    pieces: list[tuple[str, int]] = []  # the fewest ids that are whole characters
    whole, held, done = tokenizer.decode(ids), list[int](), ""
    for id in ids:
        held.append(id)
        text = tokenizer.decode(held)
        # A replacement character is half a character, unless the text itself has one there.
        at = text.find("\ufffd")
        if at < 0 or whole[len(done) + at : len(done) + at + 1] == "\ufffd":
            pieces.append((text, len(held)))
            done += text
            held = []
    if held:
        pieces.append((tokenizer.decode(held), len(held)))
    if language in SPACELESS:
        return pieces
    words: list[tuple[str, int]] = []
    for text, n in pieces:
        if not words or text.startswith(" ") or text.strip() in string.punctuation:
            words.append((text, n))
        else:
            words[-1] = (words[-1][0] + text, words[-1][1] + n)
    return words


@torch.no_grad()
def align(
    model: EncoderDecoder,
    tokenizer: Tokenizer,
    memory: Float[Tensor, "S D"],
    start: Sequence[int],
    text: Sequence[int],
    *,
    n_times: int,
    end: int,
    language: str,
) -> list[Word]:
    """The words of a text, with times from the start of the sound that `memory` holds; `n_times` steps of it are real.

    `start` are the tokens before the text, the last of them <|notimestamps|>; `end` is the one after it.
    """
    words = split_words(tokenizer, text, language)
    if not words or n_times < 1:
        return []
    heads = alignment_heads(model)
    sites = {layer: f"decoder.blocks.{layer}.cross.scores" for layer in heads}
    tokens = torch.tensor([[*start, *text, end]], device=memory.device)
    with probe(model, *sites.values()) as seen:
        states = model.states(tokens, memory[None])
    scores = torch.cat([seen.rows(sites[layer], head=heads[layer])[0, :, :, :n_times] for layer in heads]).float()
    deviation, mean = torch.std_mean(weights := scores.softmax(-1), dim=-2, unbiased=False, keepdim=True)
    matrix = median_filter((weights - mean) / deviation).mean(0)[len(start) - 1 : -1]
    rows, columns = time_warp(-matrix.cpu().double().numpy())
    enters = columns[np.diff(rows, prepend=-1) > 0]  # the time at which the path enters each token, and last the end
    times: list[float] = (enters / TIMES_A_SECOND).tolist()
    logits = model.project(states[:, len(start) - 1 : -2])[0, :, :end].float()
    probs = logits.softmax(-1).gather(1, tokens[0, len(start) : -1, None])[:, 0].tolist()
    found: list[Word] = []
    at = 0
    for written, n in words:
        found.append(Word(written, times[at], times[at + n], float(np.mean(probs[at : at + n])), n))
        at += n
    return found


def tidy(words: list[Word]) -> tuple[list[Word], float]:
    """Words that last too long at the end or start of a sentence, cut; punctuation joined to its words; the median length."""
    lengths = [word.end - word.start for word in words if word.end > word.start]
    median = min(LONGEST_MEDIAN, float(np.median(lengths)) if lengths else 0.0)
    if lengths:
        for i in range(1, len(words)):
            word = words[i]
            if word.end - word.start > 2 * median:
                if word.text in SENTENCE_ENDS:
                    words[i] = replace(word, end=word.start + 2 * median)
                elif words[i - 1].text in SENTENCE_ENDS:
                    words[i] = replace(word, start=word.end - 2 * median)
    return _join_closing(_join_opening(words)), median


def _join_opening(words: list[Word]) -> list[Word]:
    """Opening punctuation, after a space, joined to the word after it, whose times stay."""
    joined: list[Word] = []
    for word in reversed(words):
        if joined and word.text.startswith(" ") and word.text.strip() in OPENING:
            after = joined[-1]
            joined[-1] = replace(after, text=word.text + after.text, n_tokens=word.n_tokens + after.n_tokens)
        else:
            joined.append(word)
    return joined[::-1]


def _join_closing(words: list[Word]) -> list[Word]:
    joined: list[Word] = []
    for word in words:
        if joined and not joined[-1].text.endswith(" ") and word.text in CLOSING:
            before = joined[-1]
            joined[-1] = replace(before, text=before.text + word.text, n_tokens=before.n_tokens + word.n_tokens)
        else:
            joined.append(word)
    return joined


def place(
    words: list[Word], start: float, end: float, last_speech: float, median: float
) -> tuple[list[Word], float, float]:
    """A segment's words, and its start and end, made to agree. `last_speech`: when the last word before it ended.

    A first word after a pause is not taken to last through the pause, and where a first or last word lasts too long, the segment's
    own time is believed.
    """
    if not words:
        return words, start, end
    words, most = list(words), 2 * median
    first = words[0]
    is_long = first.end - first.start > most or (len(words) > 1 and words[1].end - first.start > 2 * most)
    if first.end - last_speech > 4 * median and is_long:
        if len(words) > 1 and words[1].end - words[1].start > most:
            border = max(words[1].end / 2, words[1].end - most)
            first, words[1] = replace(first, end=border), replace(words[1], start=border)
        first = replace(first, start=max(0.0, first.end - most))
    if start < first.end and start - 0.5 > first.start:
        first = replace(first, start=max(0.0, min(first.end - median, start)))
    else:
        start = first.start
    words[0] = first
    last = words[-1]
    if end > last.start and end + 0.5 < last.end:
        words[-1] = replace(last, end=max(last.start + median, end))
    else:
        end = last.end
    assert math.isfinite(start + end)
    return words, start, end
