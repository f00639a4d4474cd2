"""Exercise bpe: one step of training a byte-pair tokenizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise

from clearhead.data.tokenizer_training import train_tokenizer
from clearhead.lessons.exercise import Exercise, Function, Mistake

Words = dict[tuple[str, ...], int]
Pieces = tuple[str, ...]


def bpe(words: dict[tuple[str, ...], int]) -> tuple[tuple[str, str], dict[tuple[str, ...], int]]:
    """One step of training a BPE tokenizer (Sennrich et al. 2016).

    words    the pieces of each word so far, and how often it occurs: {("l", "o", "w"): 5, ("l", "o", "t"): 2}
    returns  the pair of neighbours that occurs most often, and the words with that pair joined: ("l", "o"),
             {("lo", "w"): 5, ("lo", "t"): 2}

    A word that occurs 5 times counts 5 times. Of pairs that occur equally often, take the smallest in Python's order.
    Join from left to right: of ("a", "a", "a") comes ("aa", "a").

    The law: repeated from single letters, these are the merges of the `tokenizers` library.
    """
    raise NotImplementedError("count the pairs of neighbours of each word first: zip(word, word[1:])")


def count_pairs(words: Words, *, weighted: bool = True) -> Counter[tuple[str, str]]:
    pairs = Counter[tuple[str, str]]()
    for word, count in words.items():
        for pair in pairwise(word):
            pairs[pair] += count if weighted else 1
    return pairs


def likeliest(pairs: Counter[tuple[str, str]]) -> tuple[str, str]:
    return min(pairs, key=lambda pair: (-pairs[pair], pair))


def join(word: Pieces, pair: tuple[str, str]) -> Pieces:
    joined: list[str] = []
    at = 0
    while at < len(word):
        size = 2 if word[at : at + 2] == pair else 1
        joined.append("".join(word[at : at + size]))
        at += size
    return tuple(joined)


def answer(words: Words) -> tuple[tuple[str, str], Words]:
    pair = likeliest(count_pairs(words))
    return pair, {join(word, pair): count for word, count in words.items()}


def reference(words: Words) -> tuple[tuple[str, str], Words]:
    """With texts: pieces set apart by a character that no piece has."""
    counts: dict[tuple[str, str], int] = {}
    for word in words:
        for at in range(1, len(word)):
            pair = word[at - 1], word[at]
            counts[pair] = counts.get(pair, 0) + words[word]
    most = max(counts.values())
    left, right = sorted(pair for pair, count in counts.items() if count == most)[0]
    found: Words = {}
    for word, count in words.items():
        pieces = list(word)
        for at in range(len(pieces) - 1):
            if at + 1 < len(pieces) and (pieces[at], pieces[at + 1]) == (left, right):
                pieces[at : at + 2] = [left + right]
        found[tuple(pieces)] = count
    return (left, right), found


# Mistakes.


def with_join(joined: Callable[[Pieces, tuple[str, str]], Pieces]) -> Function:
    def variant(words: Words) -> tuple[tuple[str, str], Words]:
        pair = likeliest(count_pairs(words))
        return pair, {joined(word, pair): count for word, count in words.items()}

    return variant


def join_once(word: Pieces, pair: tuple[str, str]) -> Pieces:
    for at in range(len(word) - 1):
        if word[at : at + 2] == pair:
            return (*word[:at], "".join(pair), *word[at + 2 :])
    return word


def join_as_text(word: Pieces, pair: tuple[str, str]) -> Pieces:
    return tuple(" ".join(word).replace(" ".join(pair), "".join(pair)).split(" "))


def join_backwards(word: Pieces, pair: tuple[str, str]) -> Pieces:
    return tuple(piece[::-1] for piece in join(tuple(p[::-1] for p in word[::-1]), (pair[1][::-1], pair[0][::-1])))[
        ::-1
    ]


def unweighted(words: Words) -> tuple[tuple[str, str], Words]:
    pair = likeliest(count_pairs(words, weighted=False))
    return pair, {join(word, pair): count for word, count in words.items()}


def first_of_equals(words: Words) -> tuple[tuple[str, str], Words]:
    pair = count_pairs(words).most_common(1)[0][0]
    return pair, {join(word, pair): count for word, count in words.items()}


# No two pairs are equally frequent in its first twelve steps: the library breaks ties by number, not by order.
CORPUS = dict(
    **dict(low=35, lower=52, newest=53, widest=23, banana=7, lowest=35, aaab=45, new=14, wide=14, win=52, id=12),
    **dict(est=12, er=55, band=58, tide=23),
)


def merges_are_the_librarys(function: Function) -> str | None:
    """Twelve steps on a text without ties, and the trainer of `tokenizers` on the same words."""
    words = {tuple(word): count for word, count in CORPUS.items()}
    texts = [word for word, count in CORPUS.items() for _ in range(count)]
    trained = train_tokenizer(texts=texts, vocab_size=256 + 12, special=())
    theirs = {piece for piece, id in trained.vocab.items() if id >= 256}
    ours: list[str] = []
    for _ in range(12):
        pair, words = function(words)
        ours.append("".join(pair))
    if set(ours) != theirs:
        return f"12 steps made {ours}; the library made {sorted(theirs, key=trained.vocab.__getitem__)}"
    return None


def cases() -> dict[str, tuple[Words]]:
    def words(text: str) -> tuple[Words]:
        return ({tuple(word): int(count) for word, _, count in (part.partition(":") for part in text.split())},)

    return {
        "a few words": words("low:5 lower:2 new:6"),
        "a frequent word against many rare ones": words("quiz:9 tin:1 tip:1 tie:1 tia:1 til:1"),
        "pairs that occur equally often": words("zy:3 ab:3 cd:2"),
        "a pair that occurs twice in a word": words("banana:4 nab:1"),
        "a pair that overlaps itself": words("aaa:4 aaaaa:2 ba:1"),
        "pieces that end in the same letter": ({("lo", "w"): 2, ("o", "w"): 5, ("lo", "ws"): 1, ("o", "ws"): 1},),
    }


EXERCISE = Exercise(
    stub=bpe,
    answer=answer,
    reference=reference,
    cases=cases,
    laws={"twelve steps are the merges of the tokenizers library": merges_are_the_librarys},
    mistakes=(
        Mistake("you count each word once; a word that occurs 9 times has each of its pairs 9 times", unweighted),
        Mistake("you join a pair only once in each word; join it wherever it stands", with_join(join_once)),
        Mistake("of pairs that occur equally often you take the first that was met, not the smallest", first_of_equals),
        Mistake(
            "you replace in a text: 'o w' is found in 'lo w', too, where the piece is 'lo'. Compare whole pieces",
            with_join(join_as_text),
        ),
        Mistake("you join from right to left; in ('a', 'a', 'a') the first two are joined", with_join(join_backwards)),
    ),
    hints=(
        "Count pairs in a collections.Counter: for each word, for each pair of zip(word, word[1:]), add the word's count.",
        "The most frequent pair, ties by order: min(pairs, key=lambda pair: (-pairs[pair], pair)).",
        "Build each new word in a while loop: at a match append the joined piece and go on by 2, else by 1.",
    ),
    proves="it chooses and joins pairs as a BPE trainer does, with frequencies, ties and overlaps",
    sources=(train_tokenizer,),
)
