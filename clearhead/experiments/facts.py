"""Text to learn from, on every machine: sentences made by a small grammar, of which we know what is related; and real English,
the help texts that come with Python itself."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from clearhead.errors import InputError

# Each role as a man and as a woman, and what is said of that role alone.
ROLES = {
    ("king", "queen"): ("rules the land", "wears a crown", "sits on the throne"),
    ("prince", "princess"): ("waits in the castle", "rides a white horse", "will rule one day"),
    ("man", "woman"): ("walks to work", "reads the paper", "lives in town"),
    ("boy", "girl"): ("plays with toys", "goes to school", "climbs trees"),
    ("father", "mother"): ("feeds the baby", "tells a story", "looks after the children"),
    ("actor", "actress"): ("stands on the stage", "learns the lines", "makes a film"),
    ("waiter", "waitress"): ("brings the menu", "sets the table", "pours the wine"),
}
PRONOUNS = (("he", "his"), ("she", "her"))
KINDS = {
    "animal": ("dog", "cat", "cow", "goat", "sheep", "wolf", "fox", "hen"),
    "fruit": ("apple", "pear", "plum", "cherry", "lemon", "fig", "peach", "melon"),
    "colour": ("red", "green", "blue", "yellow", "brown", "grey", "pink", "orange"),
    "number": ("two", "three", "four", "five", "six", "seven", "eight", "nine"),
}
TEMPLATES = (
    "the {animal} sleeps in the barn .",
    "the {colour} {animal} runs from the {animal} .",
    "i buy {number} {fruit} s at the market .",
    "a ripe {fruit} is {colour} .",
    "the farmer has {number} {animal} s .",
    "she paints the wall {colour} .",
    "he eats a {fruit} .",
    "{number} and {number} make a sum .",
)

Words = list[str]


def sentences(n: int, generator: torch.Generator) -> Words:
    """The words of n random sentences."""

    def pick(choices: tuple[str, ...]) -> str:
        return choices[int(torch.randint(len(choices), (1,), generator=generator))]

    words: Words = []
    roles = list(ROLES.items())
    for _ in range(n):
        if torch.rand(1, generator=generator) < 0.6:
            people, deeds = roles[int(torch.randint(len(roles), (1,), generator=generator))]
            gender = int(torch.randint(2, (1,), generator=generator))
            he, his = PRONOUNS[gender]
            first, second = pick(deeds), pick(deeds)
            line = f"the {people[gender]} {first} and {he} {second} with {his} friend ."
        else:
            line = re.sub(r"{(\w+)}", lambda kind: pick(KINDS[kind[1]]), pick(TEMPLATES))
        words += line.split()
    return words


def analogies() -> list[tuple[str, str, str, str]]:
    """(a, b, c, d): a - b + c should be d. Roles keep their role and change their gender: king - man + woman = queen."""
    pairs = list(ROLES)
    found = [(a[g], b[g], b[1 - g], a[1 - g]) for a in pairs for b in pairs if a != b for g in (0, 1)]
    return sorted(found, key=lambda each: each[:3] != ("king", "man", "woman"))


def real_text(file: Path | None) -> str:
    """The user's file; without one, the help texts of Python's language reference (150,000 words, on every machine with Python)."""
    if file is not None:
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{file} can not be read as UTF-8 text: {error}; give a plain text file") from None
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def words_of(text: str) -> Words:
    """Lower-case words of letters; all else is left out."""
    return re.findall(r"[a-z]+", text.lower())


def number_words(words: Words, most: int) -> tuple[Words, Tensor]:
    """The most frequent words, and the text as their numbers. Number 0 stands for all others."""
    vocab = ["<other>", *(word for word, _ in Counter(words).most_common(most))]
    number = {word: n for n, word in enumerate(vocab)}
    return vocab, torch.tensor([number.get(word, 0) for word in words])


def plurals(vocab: Words) -> list[tuple[str, str]]:
    """Words of four letters or more whose plural is in the vocabulary, too."""
    known = set(vocab)
    return [(word, word + "s") for word in vocab if len(word) > 3 and word + "s" in known]
