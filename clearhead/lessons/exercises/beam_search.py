"""Exercise beam_search: the likeliest texts, not the likeliest next token."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch

from clearhead.families import preset
from clearhead.lessons.exercise import Exercise, Function, Mistake, drawn
from clearhead.models import Decoder, build
from clearhead.sampling.beam_search import Beams, BeamSearchParams
from clearhead.sampling.logits_processors import LogitsProcessor
from clearhead.sampling.strategy import Strategy

Scores = Callable[[list[int]], list[float]]
Text = tuple[list[int], float]


def beam_search(
    next_scores: Callable[[list[int]], list[float]], beams: int, eos: int, max_len: int
) -> list[tuple[list[int], float]]:
    """The `beams` best finished texts and their scores, best first.

    next_scores(tokens)  the log-probability of each token of the vocabulary after these tokens; [] is the start
    A text's score is the sum of the log-probabilities of its tokens, that of `eos` included. `eos` is not part of the text.

    At each step, extend every running text by every token and sort all of them together by score. Of the first `beams`, those
    that end (in eos, or because they have max_len tokens) are finished. The first `beams` of all that do not end run on.
    Keep the best `beams` finished texts. Stop after max_len steps, or when there are so many and no running text has a higher
    score than the worst of them.

    The law: these texts; one beam is greedy search; as many beams as there are tokens find the best text of two tokens.
    """
    raise NotImplementedError("keep two lists of (tokens, score): running, which starts as [([], 0.0)], and finished")


def answer(next_scores: Scores, beams: int, eos: int, max_len: int) -> list[Text]:
    V = len(next_scores([]))
    model = build(preset("gpt2", n_layers=1, d_model=2, n_heads=1, vocab_size=V, max_len=1), device="meta")
    assert isinstance(model, Decoder)
    params = BeamSearchParams(beams, 0.0, False, LogitsProcessor(model, eos, Strategy()))
    search = Beams(params, [[]], [max_len], torch.float64, [None])
    while search.is_open[0]:
        written = search.tokens[0, :, : search.steps[0]].tolist()
        log_probs = torch.tensor([next_scores(tokens) for tokens in written], dtype=torch.float64)
        search.extend(*search.candidates(log_probs))
    return [(found.tokens, found.score) for found in search.finished[0]]


def reference(next_scores: Scores, beams: int, eos: int, max_len: int) -> list[Text]:
    return search(next_scores, beams, eos, max_len)


def search(
    next_scores: Scores,
    beams: int,
    eos: int,
    max_len: int,
    *,
    extend: Callable[[list[Text], Scores], list[Text]] | None = None,
    stop_early: bool = False,
    with_end: bool = True,
    keep_finished: bool = True,
    ends_take_places: bool = False,
) -> list[Text]:
    """The search, and what the mistakes change of it."""
    running: list[Text] = [([], 0.0)]
    finished: list[Text] = []
    for length in range(1, max_len + 1):
        candidates = (extend or extend_all)(running, next_scores)
        candidates.sort(key=lambda text: -text[1])
        for tokens, score in candidates[:beams]:
            if tokens[-1] == eos:
                before = next_scores(tokens[:-1])[eos]
                finished.append((tokens[:-1], score if with_end else score - before))
            elif length == max_len:
                finished.append((tokens, score))
        going = candidates[:beams] if ends_take_places else candidates
        running = [text for text in going if text[0][-1] != eos][:beams]
        finished = sorted(finished, key=lambda text: -text[1])[:beams] if keep_finished else finished[:beams]
        if stop_early and finished:
            break
        if not running or (len(finished) == beams and running[0][1] <= finished[-1][1]):
            break
    return sorted(finished, key=lambda text: -text[1])[:beams]


def extend_all(running: list[Text], next_scores: Scores) -> list[Text]:
    return [([*tokens, token], score + s) for tokens, score in running for token, s in enumerate(next_scores(tokens))]


def extend_by_last(running: list[Text], next_scores: Scores) -> list[Text]:
    return [([*tokens, token], s) for tokens, _ in running for token, s in enumerate(next_scores(tokens))]


def extend_by_best(running: list[Text], next_scores: Scores) -> list[Text]:
    """Each running text by its best token only; the first step has all of them."""
    if running == [([], 0.0)]:
        return extend_all(running, next_scores)
    found: list[Text] = []
    for tokens, score in running:
        scores = next_scores(tokens)
        best = max(range(len(scores)), key=scores.__getitem__)
        found.append(([*tokens, best], score + scores[best]))
    return found


def variant(**changes: object) -> Function:
    def function(next_scores: Scores, beams: int, eos: int, max_len: int) -> list[Text]:
        return search(next_scores, beams, eos, max_len, **changes)  # type: ignore[arg-type]

    return function


def with_eos(next_scores: Scores, beams: int, eos: int, max_len: int) -> list[Text]:
    found = search(next_scores, beams, eos, max_len)
    return [(tokens if len(tokens) == max_len else [*tokens, eos], score) for tokens, score in found]


def of_mean_scores(next_scores: Scores, beams: int, eos: int, max_len: int) -> list[Text]:
    found = search(next_scores, beams, eos, max_len)
    return sorted(((tokens, score / max(len(tokens), 1)) for tokens, score in found), key=lambda text: -text[1])


def chain(vocab_size: int, seed: int, end: float = 0.0) -> Scores:
    """A language in which a token's probability depends on the two before it; `end` makes token 0, the end, likelier."""
    table = 1.5 * drawn(vocab_size + 1, vocab_size + 1, vocab_size, seed=seed)
    table[..., 0] += end
    log_probs = table.double().log_softmax(-1).tolist()

    def next_scores(tokens: list[int]) -> list[float]:
        before = [vocab_size, vocab_size, *tokens]
        return log_probs[before[-2]][before[-1]]

    return next_scores


def finds_the_best(function: Function) -> str | None:
    for seed in range(20, 25):
        next_scores = chain(7, seed)

        def score(text: tuple[int, ...], next_scores: Scores = next_scores) -> float:
            return sum(next_scores(list(text[:i]))[text[i]] for i in range(len(text)))

        every = [text for n in (1, 2) for text in product(range(7), repeat=n)]
        ended = [text for text in every if 0 not in text[:-1] and (text[-1] == 0 or len(text) == 2)]
        best = max(ended, key=score)
        found = function(next_scores, 6, 0, 2)[0]
        if tuple(found[0]) != tuple(token for token in best if token != 0):
            return f"the best of {len(ended)} texts is {best} with {score(best):.3f}; yours is {found[0]} with {found[1]:.3f}"
    return None


def one_beam_is_greedy(function: Function) -> str | None:
    next_scores = chain(7, 30)
    tokens: list[int] = []
    while len(tokens) < 5 and (best := max(range(7), key=next_scores(tokens).__getitem__)) != 0:
        tokens.append(best)
    found = function(next_scores, 1, 0, 5)
    if len(found) != 1 or found[0][0] != tokens:
        return f"greedy search writes {tokens}; yours with one beam: {found}"
    return None


def cases() -> dict[str, tuple[Scores, int, int, int]]:
    return {
        "three beams": (chain(7, 1), 3, 0, 6),
        "two beams": (chain(11, 2), 2, 0, 5),
        "better texts that end later": (chain(7, 26), 2, 0, 8),
        "texts that end early": (chain(7, 3, end=1.5), 3, 0, 8),
        "texts that seldom end": (chain(7, 4, end=-2.0), 4, 0, 4),
        "another end": (chain(7, 5), 3, 5, 6),
    }


EXERCISE = Exercise(
    stub=beam_search,
    answer=answer,
    reference=reference,
    cases=cases,
    laws={
        "one beam is greedy search": one_beam_is_greedy,
        "as many beams as tokens find the best text of two tokens": finds_the_best,
    },
    mistakes=(
        Mistake(
            "texts are ranked by the score of their last token alone: add the score of what came before",
            variant(extend=extend_by_last),
        ),
        Mistake(
            "each running text goes on with its best token only: sort the extensions of all running texts together",
            variant(extend=extend_by_best),
        ),
        Mistake("you stop at the first finished text; a running one may still become better", variant(stop_early=True)),
        Mistake("eos stands in the texts that you return; leave it out of them, and its score in", with_eos),
        Mistake("the scores are divided by the length; here a score is the sum", of_mean_scores),
        Mistake("the log-probability of eos is left out of a finished text's score", variant(with_end=False)),
        Mistake(
            "the first finished texts stay, though better ones come later: keep the best `beams`",
            variant(keep_finished=False),
        ),
        Mistake(
            "a finished text takes a place of the running ones: the first `beams` that do not end run on",
            variant(ends_take_places=True),
        ),
    ),
    hints=(
        "candidates = [([*tokens, token], score + s) for tokens, score in running for token, s in enumerate(next_scores(tokens))]",
        "Sort candidates by score, from the highest. Only the first `beams` of them may finish; the rest are there to run on.",
        "running = [text for text in candidates if text[0][-1] != eos][:beams]; the last step finishes the first `beams`.",
        "After each step: finished = the best `beams` of finished; stop if there are so many and running[0] is not above the last.",
    ),
    proves="the search that translates, with the same texts as our engine and as transformers",
    sources=(Beams,),
)
