"""Constrained output: the allowed tokens are those that a brute-force search finds, and every text matches."""

from __future__ import annotations

import itertools
import json
import random
import re
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import decoders, models

from clearhead.data import Tokenizer, load_tokenizer, train_tokenizer
from clearhead.data.isolated_process import IsolatedProcesses
from clearhead.data.sentencepiece import BYTE, CONTROL, UNKNOWN, Piece, build_core
from clearhead.data.tokenizer_parts import byte_alphabet
from clearhead.errors import InputError, MissingExtraError
from clearhead.sampling import vocabulary as vocabularies
from clearhead.sampling.grammar import Constraint, Grammar
from tests.checkpoint.test_real_weights import unpacked
from tests.shared_data import shared_data

CORPUS = (
    "The cat sat; naïve café, 12 + 345 = 357-0.?\n" * 3
    + 'Ünïcödé "quoted" {braces: [1, 2]} 中文 日本語 🙂 🙃 \\ true false null map\n'
)


def chars(letters: str) -> Tokenizer:
    return train_tokenizer(kind="chars", texts=[letters])


def pieces(*texts: str, decoder: Any = None) -> Tokenizer:
    """A vocabulary of exactly these tokens, whatever they are."""
    core = tokenizers.Tokenizer(models.WordLevel({text: id for id, text in enumerate(["</s>", *texts])}, "</s>"))
    core.decoder = decoder or decoders.Fuse()
    core.add_special_tokens(["</s>"])
    return Tokenizer(core, {"eos": 0})


def spaced(*texts: str, with_bytes: bool = False) -> Tokenizer:
    """SentencePiece's kind, which marks spaces and loses the first one."""
    made = [Piece("<unk>", 0, UNKNOWN), Piece("</s>", 0, CONTROL)]
    made += [Piece(f"<0x{byte:02X}>", 0, BYTE) for byte in range(256) if with_bytes]
    return Tokenizer(build_core(made + [Piece(text, -id) for id, text in enumerate(texts)]), {"unk": 0, "eos": 1})


def smollm2() -> Tokenizer:
    return load_tokenizer(unpacked("smollm2"))


# From the smallest vocabulary to published ones; a missing download or folder skips its cases and says so.
TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "bytes": lambda: train_tokenizer(kind="bytes"),
    "bpe": lambda: train_tokenizer(kind="bpe", texts=[CORPUS], vocab_size=400),
    "chars": lambda: chars(CORPUS),
    "llama": lambda: spaced("▁", "▁▁", "a", "▁a", "▁ca", "t", "é", "▁é", "12", '"', '▁"', "{", '{"', with_bytes=True),
    "llama2.c": lambda: load_tokenizer(shared_data("stories260K") / "tok512.bin"),
    "gpt2": lambda: load_tokenizer(shared_data("gpt2-tokenizer") / "encoder.json"),
    "smollm2": smollm2,
}
MADE: dict[str, Tokenizer] = {}


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param not in MADE:
        MADE[request.param] = TOKENIZERS[request.param]()
    return MADE[request.param]


def draw(grammar: Grammar, tokenizer: Tokenizer, seed: int, patience: int = 60) -> list[int]:
    """A text sampled uniformly from the allowed tokens; after some steps it ends as soon as it may."""
    rng, state, ids = random.Random(seed), grammar.start(), list[int]()
    closing = {tokenizer.encode(mark, special=False)[-1] for mark in '}]"'}
    while len(ids) < 3000:
        may = state.allowed()
        choices = may.nonzero().flatten().tolist()
        if may[grammar.ends].any() and (state.is_done or len(ids) > patience):
            return ids
        token = rng.choice([id for id in choices if len(ids) > patience and id in closing] or choices)
        state.push(token)
        if token in grammar.ends:
            return ids
        ids.append(token)
    raise AssertionError(f"no end after {len(ids)} tokens")


EXHAUSTIVE: dict[str, tuple[Tokenizer, list[str]]] = {
    "characters": (chars("abc"), ["a", "(ab|c)", "a?b?", "[^a]c", "a.b", "", "(a|b)+x?", "ba{1,2}|x", "b*[abx]c?"]),
    "overlapping": (pieces("a", "b", "ab", "ba", "aab", "é"), ["ab", "(ab)*", "a+b", "aab|ba", "[^b]é?", "a{2}é|é"]),
    # no token for "a" alone
    "gaps": (pieces("ab", "b", "abb", "ca"), ["ab*", "[abc]{1,4}", "a.*b", "(ca)+b", "ab|a"]),
    "unicode": (pieces("é", "e", "中", "中文", "🙂", " "), ["é|e", "中.", "[^e]{1,2}", "(🙂 ?)*", r"\w+", "[а-я]|e"]),
    "spaced": (spaced("▁", "▁▁", "a", "▁a", "b"), ["a", " a", "a b", " ?a", " *", "  ", "(a| b)*", "[^a]", ""]),
    "metaspace": (pieces("▁", "▁a", "a", "b▁", decoder=decoders.Metaspace()), ["a", " a", "a b ?", " *", "(a| b)*"]),
    # é is C3 A9, è is C3 A8, which GPT-2's alphabet shows as Ã© and Ã¨
    "split bytes": (
        pieces(*byte_alphabet(), "Ã©", "¨a", decoder=decoders.ByteLevel()),
        ["é", "a?é+", "[éè]a", "è|aé|éa", "(éa?)*"],
    ),
}


@pytest.mark.parametrize("kind", EXHAUSTIVE)
def test_allowed_is_what_a_search_finds(kind: str) -> None:
    """After every few tokens: exactly those tokens after which some further tokens make the decoded text match."""
    tokenizer, patterns = EXHAUSTIVE[kind]
    end, V = tokenizer.eos, tokenizer.vocab_size + 3
    assert end is not None
    words = [id for id in range(tokenizer.vocab_size) if id not in tokenizer.special_ids]
    if kind == "split bytes":  # the other bytes are in none of the patterns
        words = [tokenizer.id(name) for name in ("a", "Ã", "©", "¨", "Ã©", "¨a")]
    texts = {ids: tokenizer.decode(ids) for n in range(6) for ids in itertools.product(words, repeat=n)}
    for pattern in patterns:
        matching = {ids for ids, text in texts.items() if "\ufffd" not in text and re.fullmatch(pattern, text)}
        viable = {ids[:n] for ids in matching for n in range(len(ids) + 1)}
        if not matching:
            with pytest.raises(InputError, match="matches no text that this vocabulary"):
                Grammar.regex(pattern, tokenizer)
            continue
        grammar = Grammar.regex(pattern, tokenizer, vocab_size=V)
        pairs: list[tuple[tuple[int, ...], Constraint]] = [((), grammar.start())]
        for ids, state in pairs:
            wanted = {id for id in words if (*ids, id) in viable} | ({end} if ids in matching else set())
            assert set(state.allowed().nonzero().flatten().tolist()) == wanted, (pattern, texts[ids])
            assert state.is_done == (wanted == {end})
            if len(ids) < 3:
                for id in wanted - {end}:
                    further = state.fork()
                    further.push(id)
                    pairs.append(((*ids, id), further))


REGEXES = [
    r"(17|20)\d\d-[01]\d",
    r"[a-c]{2,5}(, [a-z]{1,9}){1,3};?",
    r"T(?s:.){0,30}t",
    r"[^\n]{3,20}",
    r"(é|ï|中文|🙂)+",
    r"(?:=[a-t]{1,9}){1,3}\?[a-z]=\d",
]


@pytest.mark.slow
@pytest.mark.parametrize("pattern", REGEXES)
def test_random_texts_match(tokenizer: Tokenizer, pattern: str) -> None:
    grammar = Grammar.regex(pattern, tokenizer)
    written = {tokenizer.decode(draw(grammar, tokenizer, seed)) for seed in range(12)}
    assert len(written) > 3
    for text in written:
        assert re.fullmatch(pattern, text)


def test_the_tokenizers_own_spelling_is_allowed(tokenizer: Tokenizer) -> None:
    """Any text, as its own encoder cuts it, down to the bytes of a character split over tokens."""
    for text in ["The cat sat", "naïve café", "日本語 🙂🙃", 'a "b": [1, 2]']:
        ids = tokenizer.encode(text, special=False)
        if tokenizer.decode(ids) != text:
            continue  # characters that this vocabulary lacks
        for grammar in (Grammar.choice([text, "no"], tokenizer), Grammar.regex(".+", tokenizer)):
            state = grammar.start()
            for id in ids:
                assert not state.allowed()[grammar.ends].any() or "." in grammar.what
                state.push(id)
            assert state.allowed()[grammar.ends].all()
            assert state.is_done == ("." not in grammar.what)


PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "nam": {"type": "string", "minLength": 2, "maxLength": 12},
        "é": {"type": "integer", "minimum": -3, "maximum": 177},
        "a": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "minItems": 1, "maxItems": 3},
        "b": {"anyOf": [{"type": "null"}, {"type": "boolean"}, {"enum": ["cat", 12, [1]]}]},
        "c": {"type": "string", "pattern": "^[a-c]+ ?$"},
        "s": {"type": "object", "properties": {"s": {"$ref": "#/properties/s"}}, "additionalProperties": False},
    },
    "required": ["nam", "a", "b"],
    "additionalProperties": False,
    "$defs": {"tag": {"type": "number", "exclusiveMinimum": 1, "maximum": 3}},
}


def obeys(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    """JSON schema's meaning, for the keywords that are used here."""
    if "$ref" in schema:
        part = root
        for step in schema["$ref"].split("/")[1:]:
            part = part[step]
        return obeys(value, part, root)
    kinds = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None), "number": (int, float)}
    kind = schema.get("type")
    if kind == "integer" and (isinstance(value, bool) or not isinstance(value, int)):
        return False
    if kind in kinds and (not isinstance(value, kinds[kind]) or (kind == "number" and isinstance(value, bool))):
        return False
    checks = {
        "minLength": lambda least: len(value) >= least,
        "maxLength": lambda most: len(value) <= most,
        "pattern": lambda pattern: re.search(pattern, value),
        "minimum": lambda least: value >= least,
        "maximum": lambda most: value <= most,
        "exclusiveMinimum": lambda least: value > least,
        "minItems": lambda least: len(value) >= least,
        "maxItems": lambda most: len(value) <= most,
        "items": lambda inner: all(obeys(item, inner, root) for item in value),
        "required": lambda names: set(names) <= set(value),
        "properties": lambda inner: all(obeys(value[name], inner[name], root) for name in inner if name in value),
        "additionalProperties": lambda may: may or set(value) <= set(schema["properties"]),
        "anyOf": lambda some: any(obeys(value, one, root) for one in some),
        "enum": lambda values: value in values,
        "type": lambda _: True,
        "$defs": lambda _: True,
    }
    return all(checks[word](content) for word, content in schema.items())


@pytest.mark.slow
def test_json_obeys_its_schema(tokenizer: Tokenizer) -> None:
    given = Grammar.json_schema(PERSON, tokenizer), Grammar.json_schema(json.dumps(PERSON), tokenizer)
    for seed in range(12):
        text = tokenizer.decode(draw(given[seed % 2], tokenizer, seed))
        assert obeys(json.loads(text), PERSON, PERSON), text
        assert not re.search(r"\s{65}", text)


@pytest.mark.slow
@pytest.mark.parametrize("schema", [True, {}, "true", "{}"])
def test_any_json(tokenizer: Tokenizer, schema: Any) -> None:
    grammar = Grammar.json_schema(schema, tokenizer)
    for seed in range(6):
        json.loads(tokenizer.decode(draw(grammar, tokenizer, seed)))


def test_one_of_the_choices(tokenizer: Tokenizer) -> None:
    texts = ["cat", "café", "cat sat", " cat", "c.*", "a|b [1]\n", "Ünï", "cat"] + (
        ["🙂🙃"] if tokenizer.vocab_size > 60 else []
    )
    texts = [text for text in texts if not set(text) - set(CORPUS)]
    grammar = Grammar.choice(texts, tokenizer)
    written = {tokenizer.decode(draw(grammar, tokenizer, seed)) for seed in range(60)}
    assert written <= set(texts)
    assert len(written) > len(set(texts)) // 2


def test_forks_go_their_own_ways(tokenizer: Tokenizer) -> None:
    grammar = Grammar.choice(["cat sat", "cat ran", "cab"], tokenizer)
    first = grammar.start()
    for id in tokenizer.encode("ca", special=False):
        first.push(id)
    before = first.allowed()
    second, third = first.fork(), first.fork()
    second.push(tokenizer.encode("1b", special=False)[-1])
    assert second.is_done
    second.push(grammar.ends[0])
    for same in (first, third, third.fork()):
        assert torch.equal(same.allowed(), before)
        assert not same.is_done
    first.allowed().fill_(True)  # a copy: nobody else sees it
    assert torch.equal(first.allowed(), before)


def test_special_and_padding_rows_are_never_text(tokenizer: Tokenizer) -> None:
    V = tokenizer.vocab_size + 5
    ends = [*sorted(tokenizer.special_ids)[:1], V - 2]  # one of them has no token at all
    grammar = Grammar.regex("(?s:.)*", tokenizer, vocab_size=V, ends=ends)
    state = grammar.start()
    for _ in range(3):
        may = state.allowed()
        assert may.shape == (V,)
        assert may[ends].all()
        assert not may[sorted(tokenizer.special_ids - set(ends))].any()
        assert may[tokenizer.vocab_size :].nonzero().flatten().tolist() == [3]
        state.push(tokenizer.encode("c", special=False)[-1])
    # One row fewer than the tokenizer has: its last token is out of reach.
    last = Grammar.regex("(?s:.)*", tokenizer, vocab_size=tokenizer.vocab_size - 1, ends=[0]).start()
    assert last.allowed().shape == (tokenizer.vocab_size - 1,)


def test_a_refused_token_changes_nothing() -> None:
    tokenizer = chars("abc")
    a, b, c = (tokenizer.id(letter) for letter in "abc")
    state = Grammar.regex("ab?", tokenizer).start()
    for token in (b, tokenizer.eos, -1, 99):
        with pytest.raises(InputError, match=f"token {token} may not come here under regex 'ab\\?'"):
            state.push(token)
    state.push(a)
    assert set(state.allowed().nonzero().flatten().tolist()) == {b, tokenizer.eos}
    state.push(tokenizer.eos)
    assert state.is_done
    with pytest.raises(InputError, match="may not come here"):
        state.push(c)


def test_without_an_end_it_is_done_all_the_same() -> None:
    state = Grammar.regex("a", chars("ab"), ends=[]).start()
    state.push(int(state.allowed().nonzero()))
    assert state.is_done
    assert not state.allowed().any()


BAD_REGEX = {
    "(": "unclosed group",
    "[a": "unclosed character class",
    "a{3,1}": "the start must be <= the end",
    "(?=a)b": "look-ahead",
    r"(a)\1": "backreferences are not supported",
    r"\ba": "lookarounds not supported",
    "\ud800": "not valid Unicode",
    "[^\\s\\S]": "matches no text",
    "x": "matches no text that this vocabulary of 7 tokens can write",
}


@pytest.mark.parametrize("pattern", BAD_REGEX)
def test_bad_regex(pattern: str) -> None:
    with pytest.raises(InputError, match=re.escape(BAD_REGEX[pattern])) as caught:
        Grammar.regex(pattern, chars("abc"))
    assert "\n" not in str(caught.value)
    assert "start:" not in str(caught.value)


ENDLESS = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}
BAD_SCHEMA: dict[str, tuple[Any, str]] = {
    "range": ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum (5) is greater than maximum (3)"),
    "inside": ({"type": "object", "properties": {"a": {"enum": []}}, "required": ["a"]}, "required property 'a'"),
    "contradiction": ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "incompatible types"),
    "length": ({"type": "string", "pattern": "^a$", "minLength": 3}, "Unsatisfiable"),
    "keyword": ({"not": {"type": "string"}}, 'Unimplemented keys: ["not"]'),
    "keywords": ({"if": {}, "then": {}}, '["if", "then"]'),
    "type": ({"type": "frog"}, "Invalid type: frog"),
    "pattern": ({"type": "string", "pattern": "["}, "unclosed character class"),
    "reference": ({"$ref": "#/$defs/nothing"}, "nothing"),
    "nothing": (False, "false accepts nothing"),
    "list": ("[1]", "a schema is an object or true"),
    "text": ("not json", "is not JSON: Expecting value"),
    "half": ('{"type": ', "is not JSON"),
    "python": ({"enum": {1, 2}}, "is not JSON: Object of type set"),
    "nan": ({"minimum": float("nan")}, "is not JSON"),
    "endless": (ENDLESS, "values without end"),
    "endless list": ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "values without end"),
    "itself": ({"$ref": "#"}, "values without end"),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("case", BAD_SCHEMA)
def test_bad_schema(case: str) -> None:
    schema, words = BAD_SCHEMA[case]
    with pytest.raises(InputError, match=re.escape(words)) as caught:
        Grammar.json_schema(schema, train_tokenizer(kind="bytes"))
    assert "\n" not in str(caught.value)
    assert "JSON schema " in str(caught.value)


def test_recursion_that_can_end() -> None:
    tokenizer = train_tokenizer(kind="bytes")
    optional = {"type": "object", "properties": {"next": {"$ref": "#"}}}
    either = {**ENDLESS, "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}}
    for schema in (optional, either, {"type": "array", "items": {"$ref": "#"}}):
        Grammar.json_schema(schema, tokenizer)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ([], "at least one"),
        ("yes", "a list of texts"),
        (["a", ""], "a choice is an empty text, in ['a', '']"),
        (["a", 3], "a choice must be a str, not int"),
        (["ab", "né"], "asks for 'né', but no token of this vocabulary of 7 has 'n'"),
    ],
)
def test_bad_choices(texts: Any, words: str) -> None:
    with pytest.raises(InputError, match=re.escape(words)):
        Grammar.choice(texts, chars("abc"))


def test_bad_ends() -> None:
    with pytest.raises(InputError, match=r"ends=\[7\] .* vocabulary of 7"):
        Grammar.regex("a", chars("abc"), ends=[7])


@pytest.mark.parametrize(
    "schema", [{"const": "né"}, {"type": "object", "properties": {"é": {}}}, {"items": {"enum": [1, "é"]}}]
)
def test_a_schema_beyond_the_vocabulary(schema: dict[str, Any]) -> None:
    with pytest.raises(
        InputError, match=r"JSON schema .* asks for 'n?é', but no token of this vocabulary of .* has 'é'"
    ):
        Grammar.json_schema(schema, chars('{[n":,1]}'))


def test_a_dead_end_is_an_error_not_an_empty_choice() -> None:
    """The lists can begin, but the items of the inner one need braces."""
    tokenizer = chars("[]")
    inner = {"type": "array", "items": {"type": "object"}, "minItems": 1}
    with pytest.raises(InputError, match="matches no text that this vocabulary of 6 tokens can write"):
        Grammar.json_schema(inner, tokenizer)
    state = Grammar.json_schema({"type": "array", "items": inner, "minItems": 1}, tokenizer).start()
    state.push(tokenizer.id("["))
    state.push(tokenizer.id("["))
    with pytest.raises(InputError, match=r"cannot go on under JSON schema .*no token for what must come next"):
        state.allowed()


def test_json_without_braces_is_refused_at_once() -> None:
    """As T5's vocabulary is; the space that a text may begin with is no way out."""
    with pytest.raises(InputError, match="matches no text that this vocabulary"):
        Grammar.json_schema({"type": "object"}, spaced("▁", "a", '"', "1"))


def test_wordpieces_are_refused() -> None:
    with pytest.raises(InputError, match=r"depend on their neighbours.*WordPiece"):
        Grammar.regex("a", train_tokenizer(kind="wordpiece", texts=[CORPUS], vocab_size=100))


def test_one_vocabulary_for_many_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    spelled: list[Tokenizer] = []
    real = vocabularies.spell
    monkeypatch.setattr(vocabularies, "spell", lambda tokenizer: spelled.append(tokenizer) or real(tokenizer))
    one, other = chars("ab"), chars("ab")
    for tokenizer in (one, one, other):
        Grammar.regex("a", tokenizer)
        Grammar.choice(["b"], tokenizer)
    assert spelled == [one, other]


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'clearhead\[constrain\]'"):
        Grammar.regex("a", chars("ab"))


def chain(n: int, inner: Any, link: Callable[[Any], Any] = lambda reference: reference) -> dict[str, Any]:
    """A schema in which n references follow each other."""
    parts = {f"d{at}": link({"$ref": f"#/$defs/d{at + 1}"}) for at in range(n)}
    return {"$ref": "#/$defs/d0", "$defs": {**parts, f"d{n}": inner}}


def in_lists(reference: Any) -> Any:
    return {"type": "array", "items": reference}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (chain(2500, {"type": "integer"}), "too deep: with its 2501 references, more than 600 levels"),
        (chain(500, {"type": "integer"}, in_lists), "too deep"),
        ({"anyOf": [{"$ref": f"#a{at}"} for at in range(400)]}, "too deep"),
        ({"enum": list(range(20_000))}, "too large: more than 10,000 values"),
        ({"enum": ["a" * 300_000]}, "too large"),
        ({"type": "string", "pattern": "a" * 20_000}, "a regular expression of 20,000 characters"),
    ],
)
def test_schemas_that_are_too_large_are_refused_before_they_are_compiled(
    schema: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chain of 2,500 references overflowed the stack of llguidance: no exception, the process was gone."""
    tokenizer = train_tokenizer(kind="bytes")
    monkeypatch.setattr("clearhead.sampling.grammar.library", lambda: pytest.fail("compiled"))
    with pytest.raises(InputError, match=words):
        Grammar.json_schema(schema, tokenizer)


def test_schemas_within_the_bounds_are_compiled() -> None:
    """The largest that are allowed, on half of a usual stack."""
    tokenizer, failed = train_tokenizer(kind="bytes"), list[BaseException]()

    def compile_all() -> None:
        try:
            for schema in (chain(290, {"type": "integer"}), chain(190, {"type": "integer"}, in_lists)):
                Grammar.json_schema(schema, tokenizer)
        except BaseException as error:
            failed.append(error)

    usual = threading.stack_size(4 << 20)
    try:
        thread = threading.Thread(target=compile_all)
        thread.start()
    finally:
        threading.stack_size(usual)
    thread.join()
    assert failed == []


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 999_983},
        {"allOf": [{"type": "string", "pattern": f"a.*{chr(97 + at % 26)}{{{at + 1}}}"} for at in range(60)]},
    ],
)
def test_a_strangers_schema_that_takes_minutes_is_stopped(schema: Any) -> None:
    tokenizer = train_tokenizer(kind="bytes")
    with pytest.raises(
        InputError, match=r"JSON schema .* is too costly: to compile it .*took more than .*; simplify it"
    ):
        Grammar.json_schema(schema, tokenizer, is_trusted=False)
    Grammar.json_schema({"type": "integer"}, tokenizer, is_trusted=False)


def test_a_schema_that_passed_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = train_tokenizer(kind="bytes")
    Grammar.json_schema({"type": "integer"}, tokenizer, is_trusted=False)
    monkeypatch.setattr(IsolatedProcesses, "call", lambda self, request: pytest.fail("tried"))
    Grammar.json_schema({"type": "integer"}, tokenizer, is_trusted=False)
    Grammar.json_schema({"type": "number"}, tokenizer)  # the user's own


def test_a_crash_of_the_compiler_ends_only_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clearhead.sampling.grammar.check_bounds", lambda schema, what: None)
    with pytest.raises(InputError, match=r"to compile it crashed, or took .* \(status -\d+\); simplify it"):
        Grammar.json_schema(chain(2500, {"type": "integer"}), train_tokenizer(kind="bytes"), is_trusted=False)


def test_a_regex_has_a_limit() -> None:
    with pytest.raises(
        InputError, match="too long: a regular expression of 20,000 characters, and 10,000 are the limit"
    ):
        Grammar.regex("a" * 20_000, train_tokenizer(kind="bytes"))
