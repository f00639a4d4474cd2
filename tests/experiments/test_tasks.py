"""The data of the experiments, against plain loops that read the answer off the tokens; and the shared training loop."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from clearhead.errors import InputError
from clearhead.experiments import facts, masks, tasks
from clearhead.experiments.fitting import IGNORED, PATIENCE, Batch, accuracy, fit, last


def drawn(batches: tasks.Batches) -> tuple[Tensor, Tensor]:
    (tokens,), targets = batches(torch.Generator().manual_seed(3))
    assert targets.shape == tokens.shape
    return tokens, targets


def asked(targets: Tensor) -> list[tuple[int, int]]:
    return [(int(row), int(at)) for row, at in (targets != IGNORED).nonzero()]


def test_looking_back() -> None:
    tokens, targets = drawn(tasks.looking_back(3, rows=5, length=11, vocab=7, first=5))
    assert asked(targets) == [(row, at) for row in range(5) for at in range(5, 11)]
    assert all(targets[row, at] == tokens[row, at - 3] for row, at in asked(targets))


def test_two_back() -> None:
    tokens, targets = drawn(tasks.two_back(1, 4, rows=5, length=11, vocab=7))
    assert asked(targets) == [(row, at) for row in range(5) for at in range(4, 11)]
    assert all(targets[row, at] == tokens[row, at - 1] * 7 + tokens[row, at - 4] for row, at in asked(targets))


def test_repetition_asks_what_the_tokens_before_tell() -> None:
    tokens, targets = drawn(tasks.repetition(rows=17, length=24, vocab=13))
    for row, at in asked(targets):
        before = tokens[row, : at + 1].tolist()
        earlier = before.index(before[-1])  # tokens of a period differ, so its first occurrence tells
        following = before[earlier + 1] if earlier < at else before[0]  # a new period begins with the first token
        assert targets[row, at] == following
    assert len(asked(targets)) >= 17 * 11


def test_brackets_close_what_is_open() -> None:
    tokens, targets = drawn(tasks.brackets(rows=13, length=29, kinds=3))
    partners = tasks.partners(tokens)
    for row in range(13):
        stack: list[int] = []
        for at, token in enumerate(tokens[row].tolist()):
            if token % 2:
                assert tokens[row, stack.pop()] == token - 1
            else:
                stack.append(at)
            assert partners[row, at] == (stack[-1] if stack else -1)
            if targets[row, at] != IGNORED:
                assert targets[row, at] == tokens[row, stack[-1]] + 1
    assert len(asked(targets)) > 13


def test_recall_has_one_answer() -> None:
    tokens, targets = drawn(tasks.recall(rows=19, length=31, vocab=5))
    assert asked(targets) == [(row, 30) for row in range(19)]
    for row in range(19):
        *text, question = tokens[row].tolist()
        assert text.count(question) == 1
        assert targets[row, -1] == text[text.index(question) + 1]
        assert sum(token > 0 for token in text) == 8


def test_copying() -> None:
    tokens, targets = drawn(tasks.copying(rows=7, length=23, vocab=5, n=3))
    assert torch.equal(targets[:, -3:], tokens[:, :3])
    assert (tokens[:, 3:-3] == 0).all()
    assert (tokens[:, -3:] == 6).all()
    assert asked(targets) == [(row, at) for row in range(7) for at in range(20, 23)]


def test_the_chain_has_the_entropy_that_is_said() -> None:
    chain = masks.make_chain(torch.Generator().manual_seed(1))
    assert ((chain > 0).sum(1) == masks.CHOICES).all()
    naive = -sum(p * math.log(p) for p in chain[5].tolist() if p)
    assert masks.entropy_rate(chain) == pytest.approx(naive, rel=1e-6)
    (tokens,), targets = masks.texts(chain, 64)(torch.Generator().manual_seed(2))
    assert (chain[tokens, targets] > 0).all()


def test_the_grammar_says_he_of_men_and_she_of_women() -> None:
    lines = " ".join(facts.sentences(400, torch.Generator().manual_seed(0))).split(" . ")
    men, women = ({pair[n] for pair in facts.ROLES} for n in (0, 1))
    assert any("the queen" in line for line in lines)
    for line in lines:
        if "friend" in line:
            person = line.split()[1]
            assert (person in men) == (" his " in line) == (" he " in line)
            assert (person in women) == (" her " in line)
    assert facts.analogies()[0] == ("king", "man", "woman", "queen")
    assert len(set(facts.analogies())) == 7 * 6 * 2


def test_words_are_numbered_by_how_often_they_come() -> None:
    vocab, ids = facts.number_words(facts.words_of("The cats saw the cat; names, THE name."), 3)
    assert vocab[:2] == ["<other>", "the"]
    assert [vocab[id] for id in ids.tolist()].count("the") == 3
    assert facts.plurals(["<other>", "name", "names", "cat", "cats"]) == [("name", "names")]  # cat is short
    assert len(facts.words_of(facts.real_text(None))) > 20_000


def test_a_file_that_is_no_text(tmp_path) -> None:
    (tmp_path / "picture.png").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(InputError, match=r"picture\.png can not be read as UTF-8 text.*give a plain text file"):
        facts.real_text(tmp_path / "picture.png")


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(5, 5))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.logits[tokens]


def successor(generator: torch.Generator) -> Batch:
    tokens = tasks.draw(generator, 0, 5, 7, 3)
    return (tokens,), torch.where(tokens == 4, IGNORED, (tokens + 1) % 5)


def test_fitting_learns_and_ends_when_it_is_enough() -> None:
    model = Table()
    assert accuracy(model, successor) == 0.0  # argmax of equal scores is 0, and no successor but that of 4 is
    losses = fit(model, successor, steps=500, lr=0.1, enough=0.5)
    assert len(losses) < 500
    assert sum(losses[-PATIENCE:]) / PATIENCE < 0.5
    assert accuracy(model, successor) == 1.0
    assert last([4.0, 2.0, 1.0, 3.0], 0.5) == 2.0


def test_a_training_that_breaks_counts_as_infinite() -> None:
    model = Table()
    with torch.no_grad():
        model.logits[0, 0] = math.nan
    assert fit(model, successor, steps=4)[1:] == [math.inf] * 3
