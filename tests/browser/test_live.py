"""A page that computes by itself answers every request as the server does, for models of each kind."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

import clearhead as ch
from clearhead.data import Tokenizer
from clearhead.data.tokenizer_parts import byte_level_bpe
from clearhead.errors import InputError
from clearhead.explorer import Explorer, export_live_page, tokenizer_of
from clearhead.explorer.live_tokenizer import TEXTS as HARD_TEXTS
from clearhead.explorer.live_tokenizer import live_tokenizer
from clearhead.explorer.standalone_page import LIVE_FILES, write_page
from clearhead.explorer.wire_format import unpack
from tests.browser.conftest import Open
from tests.browser.models import TEXTS
from tests.browser.opened import Opened
from tests.shared_data import shared_data

# Both sum in 32 bits or more, in another order: a few units in the last place, through some layers. The issue asks for 1e-4.
CLOSE = 1e-4
TEXT, OTHER = "the cat sat, the cat", "a dog ran"
SIZES: dict[str, Any] = dict(n_layers=2, d_model=24, n_heads=4, d_ff=40, max_len=41)

KINDS: dict[str, dict[str, Any]] = {
    "gpt2": dict(preset="gpt2"),
    "llama": dict(preset="llama-7b", n_kv_heads=2),
    "turned": dict(
        preset="llama-7b",
        n_kv_heads=1,
        rotary_interleaved=True,
        qk_norm=True,
        window=5,
        rotary_scaling="llama3",
        rotary_factor=4.0,
    ),
    "alibi": dict(preset="gpt2", positions="alibi", feedforward="relu2", norm="none", attention_scale=0.3),
    "original": dict(preset="transformer-base"),
    "t5": dict(preset="t5-small", n_kv_heads=4, d_head=6),
    "dates": dict(
        preset="transformer-base",
        n_decoder_layers=1,
        positions="rotary",
        norm="rms",
        norm_first=True,
        qk_norm=True,
        bias=False,
        feedforward="gelu",
        gated=True,
        head_scale=True,
        sinusoid_halves=True,
    ),
    "masked": dict(preset="bert-base", head="tokens", head_transform=True),
    "classes": dict(
        preset="bert-base", head="classes", labels=("no", "yes"), pool="mean", pooler=True, positions="sinusoidal"
    ),
    "states": dict(preset="minilm-l6", window=3, positions="t5"),
}


def make_kind(name: str) -> tuple[Any, ch.Tokenizer]:
    special = ["<s>", "</s>", "<pad>", "<mask>", "<unk>"]
    options: dict[str, Any] = {} if name != "t5" else {"add_bos": False}
    tokenizer = ch.train_tokenizer(
        texts=TEXTS, kind="bpe", vocab_size=300, special=special, split_digits=True, **options
    )
    fields = dict(KINDS[name])
    assert tokenizer.eos is not None
    config = ch.preset(fields.pop("preset"), **{**SIZES, "vocab_size": tokenizer.vocab_size, **fields})
    model: Any = ch.build(config, seed=3)
    drawn = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for weight in model.parameters():  # biases and norms are moved, too, so that none can be forgotten
            weight.mul_(2 if weight.ndim > 1 else 1).add_(torch.randn(weight.shape, generator=drawn) * 0.05)
    model.generation = ch.Generation(
        bos=tokenizer.bos, eos=(tokenizer.eos,), decoder_start=tokenizer.bos, suppress=(tokenizer.id("<pad>"),)
    )
    return model.eval(), tokenizer


def open_live(open_page: Open, tmp_path: Path, model: Any, tokenizer: Any, text: str = TEXT, **state: Any) -> Opened:
    file = tmp_path / "live.html"
    file.write_text(export_live_page(model, tokenizer, text, name="live"), encoding="utf-8")
    return open_page(file.as_uri(), **state)


def ask(one: Opened, name: str, params: dict[str, Any]) -> dict[str, Any]:
    """The page's own answer, its arrays as lists."""
    return one.page.evaluate(
        """([name, params]) => {
          const answer = window.CLEARHEAD_LOCAL.answer(name, params);
          const lists = Object.entries(answer.arrays).map(([name, values]) => [name, [...values]]);
          return {...answer, arrays: Object.fromEntries(lists)};
        }""",
        [name, params],
    )


def differences(found: Any, wanted: Any, at: str = "") -> list[tuple[float, str]]:
    """How far numbers lie apart, relative to 1 where they are larger; and everything else that is not equal."""
    if isinstance(wanted, dict):
        assert set(found) >= set(wanted), (at, set(wanted) - set(found))
        return [each for key in wanted for each in differences(found[key], wanted[key], f"{at}.{key}")]
    if isinstance(wanted, list | tuple):
        assert len(found) == len(wanted), at
        return [
            each for i, pair in enumerate(zip(found, wanted, strict=True)) for each in differences(*pair, f"{at}[{i}]")
        ]
    if isinstance(wanted, float) and isinstance(found, int | float):
        return [(abs(found - wanted) / max(1.0, abs(wanted)), at)]
    assert found == wanted, at
    return []


def same(one: Opened, explorer: Explorer, name: str, params: dict[str, Any]) -> float:
    """The largest difference of the page's answer from the server's."""
    wanted, arrays = unpack(explorer.answer(name, params))
    shown = ask(one, name, params)
    far = differences(shown, wanted, name)
    for key, array in arrays.items():
        assert shown["shapes"][key] == list(array.shape)
        # A thumbnail's bytes may round to the other side.
        by = 255 if array.dtype == "uint8" else 1
        pairs = zip(shown["arrays"][key], array.ravel().tolist(), strict=True)
        far += [(max(0.0, abs(a - b) - (by > 1)) / by / max(1.0, abs(b) / by), f"{name}:{key}") for a, b in pairs]
    worst = max(far, default=(0.0, ""))
    assert worst[0] <= CLOSE, worst
    return worst[0]


def every_request(told: dict[str, Any], text: str) -> list[tuple[str, dict[str, Any]]]:
    """Requests of all panels: about a text, with heads changed in each way, for every attention."""
    run = {"model": "live", "text": text, "target": None, "second": None, "changes": []}
    sites = [site for attention in told["attentions"] for site in attention["sites"]]
    zero = {
        **run,
        "changes": [{"site": sites[0], "head": 1, "how": "zero"}, {"site": sites[-1], "head": 2, "how": "mean"}],
    }
    patched = {**run, "second": OTHER, "changes": [{"site": sites[-1], "head": 0, "how": "patch"}]}
    asked: list[tuple[str, dict[str, Any]]] = [("read", {"run": each}) for each in (run, zero, patched)]
    for attention in told["attentions"]:
        name = attention["name"]
        asked.append(("grid", {"run": run, "attention": name, "layer": len(attention["sites"]) - 1, "size": 32}))
        site = attention["sites"][-1]
        asked += [
            ("map", {"run": zero, "site": site, "head": 3, "box": box, "most": 8}) for box in (None, [1, 4, 0, 3])
        ]
        asked.append(("row", {"run": run, "site": site, "head": 1, "row": 2}))
        asked.append(("follow", {"run": zero, "site": site, "head": 1, "position": 2}))
        if name != "cross":
            asked.append(("flow", {"run": run, "attention": name}))
    if told["can"]["lens"]:
        asked.append(("sweep", {"run": run, "attention": told["attentions"][-1]["name"], "layer": 0}))
    if told["can"]["lens"]:
        asked += [
            ("lens", {"run": run, "first": 0, "n": 256}),
            ("cell", {"run": run, "layer": 1, "position": 0, "k": 5}),
        ]
    if told["can"]["generate"]:
        for options in (
            dict(temperature=1, seed=0),
            dict(temperature=0.7, top_k=30, top_p=0.9, min_p=0.01, repetition_penalty=1.3, seed=-7),
        ):
            asked.append(("step", {"run": run, "ids": [7, 9], **options}))
    asked.append(("neighbours", {"model": "live", "token": "the", "k": 5}))
    return asked


@pytest.mark.parametrize("name", KINDS)
def test_it_answers_as_the_server(open_page: Open, tmp_path: Path, name: str) -> None:
    model, tokenizer = make_kind(name)
    one = open_live(open_page, tmp_path, model, tokenizer)
    explorer = Explorer(model, tokenizer, name="live")
    worst = [same(one, explorer, *asked) for asked in every_request(explorer.description(), TEXT)]
    print(f"{name}: {max(worst):.1e}")
    assert len(worst) > 8
    assert one.errors == []
    assert {url.split(":")[0] for url in one.asked} <= {"file", "data"}


@pytest.mark.parametrize("name", ["llama", "original"])
def test_parts_neurons_and_factors_are_changed_as_on_the_server(open_page: Open, tmp_path: Path, name: str) -> None:
    model, tokenizer = make_kind(name)
    one = open_live(open_page, tmp_path, model, tokenizer)
    explorer = Explorer(model, tokenizer, name="live")
    prefix = "decoder." if name == "original" else ""
    forward, attention = f"{prefix}blocks.1.feedforward", f"{prefix}blocks.0.attention"
    run = {"model": "live", "text": TEXT, "target": None, "second": None}
    for second, changes in (
        (
            None,
            [
                {"site": forward, "head": 7, "how": "zero"},
                {"site": attention, "head": None, "how": "scale", "by": -0.5},
            ],
        ),
        (
            None,
            [{"site": forward, "head": None, "how": "mean"}, {"site": attention, "head": 1, "how": "scale", "by": 2.0}],
        ),
        (
            OTHER,
            [{"site": forward, "head": None, "how": "patch"}, {"site": forward, "head": 3, "how": "scale", "by": 3.0}],
        ),
    ):
        changed = {**run, "second": second, "changes": changes}
        for asked in (
            ("read", {}),
            ("lens", {"first": 0, "n": 256}),
            ("follow", {"site": attention, "head": 1, "position": 1}),
        ):
            same(one, explorer, asked[0], {"run": changed, **asked[1]})
    same(
        one,
        explorer,
        "sweep",
        {"run": {**run, "changes": []}, "attention": told_last(explorer), "layer": 1, "token": "the"},
    )


def told_last(explorer: Explorer) -> str:
    return str(explorer.description()["attentions"][-1]["name"])


def test_stories260k(open_page: Open, tmp_path: Path) -> None:
    """A trained LLaMA: every map, the whole text that llama2.c writes, and the time that 30 tokens take."""
    path = shared_data("stories260K") / "stories260K.bin"
    model: Any = ch.load(path)
    tokenizer = tokenizer_of(path, model)
    assert tokenizer is not None
    text = "Once upon a time, there was a little girl named Lily. She loved to play outside"
    one = open_live(open_page, tmp_path, model, tokenizer, text)
    explorer = Explorer(model, tokenizer, name="live")
    worst = [same(one, explorer, *asked) for asked in every_request(explorer.description(), text)]
    print(f"stories260K: {max(worst):.1e}, {(tmp_path / 'live.html').stat().st_size:,} bytes")
    long = one.page.evaluate(
        "text => window.CLEARHEAD_LOCAL.answer('read', {run: {text, target: null, second: null, changes: []}})", text
    )
    assert long["source"]["ids"] == tokenizer.encode(text)
    took = one.page.evaluate(
        """async () => {
          const times = [];
          for (let i = 0; i < 5; i++) {
            const start = performance.now();
            const text = `${i} little girl named Lily. She loved to play outside in the park`;
            const run = {text, target: null, second: null, changes: []};
            const {source} = window.CLEARHEAD_LOCAL.answer('read', {run});
            times.push((performance.now() - start) * 30 / source.ids.length);
          }
          return times.sort((a, b) => a - b)[0];
        }"""
    )
    print(f"stories260K: {took:.0f} ms for 30 tokens")
    assert took < 500  # on a quiet machine below 100; another process may have the core


def test_rounded_to_8_bits(open_page: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A larger model is rounded, the page says so, and it computes exactly what the rounded model does."""
    model, tokenizer = make_kind("llama")
    monkeypatch.setattr("clearhead.explorer.live_export.PLAIN_BYTES", 1000)
    one = open_live(open_page, tmp_path, model, tokenizer)
    assert "rounded to 8 bits" in one.page.locator("footer").inner_text()
    with torch.no_grad():
        for weight in (each for each in model.parameters() if each.ndim == 2):
            scale = weight.abs().amax(1, keepdim=True) / 127
            weight.copy_((weight / scale).round() * scale)
    explorer = Explorer(model, tokenizer, name="live")
    run = {"model": "live", "text": TEXT, "target": None, "second": None, "changes": []}
    same(one, explorer, "lens", {"run": run, "first": 0, "n": 256})


def cut_as(words: str) -> ch.Tokenizer:
    """A small BPE over bytes that cuts words by another family's pattern."""
    model = json.loads(make_kind("gpt2")[1].core.to_str())["model"]
    return Tokenizer(byte_level_bpe(model["vocab"], [tuple(pair) for pair in model["merges"]], words), {})


def word_tokenizer() -> ch.Tokenizer:
    """A token for each word."""
    vocab = {word: id for id, word in enumerate(["<unk>", "the", "cat", "sat", "on"])}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return Tokenizer(core, {"unk": 0})


def lower_tokenizer() -> ch.Tokenizer:
    """BPE over bytes that writes all letters small."""
    tokenizer = make_kind("gpt2")[1]
    tokenizer.core.normalizer = tokenizers.normalizers.Lowercase()
    return tokenizer


TOKENIZERS: dict[str, Callable[[], ch.Tokenizer]] = {
    "bpe": lambda: make_kind("gpt2")[1],
    "bytes": lambda: ch.train_tokenizer(kind="bytes", vocab_size=300, add_eos=True),
    "chars": lambda: ch.train_tokenizer(texts=TEXTS, kind="chars", vocab_size=300),
    "llama 3's words": lambda: cut_as("llama-bpe"),
    "qwen2's words": lambda: cut_as("qwen2"),
    "words": lambda: word_tokenizer(),
    "small letters": lambda: lower_tokenizer(),
    "gpt-2's own": lambda: ch.load_tokenizer(shared_data("gpt2-tokenizer")),
    "llama2.c": lambda: ch.load_tokenizer(shared_data("stories260K")),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) if kind == "gpt-2's own" else kind for kind in TOKENIZERS]
)
def test_tokenizers(open_page: Open, kind: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    one = open_page("about:blank")
    source = (LIVE_FILES / "tokenizer.js").read_text(encoding="utf-8").replace("export function", "function")
    one.page.evaluate(f"told => {{ {source}; window.tokenizer = makeTokenizer(told) }}", live_tokenizer(tokenizer))
    texts = [
        *HARD_TEXTS,
        "<s>a</s> b<unk>",
        "  ",
        " x",
        "y ",
        "１２³ ½ \u00a0\u3000z\u0085",
        "İstanbul ẞ é e\u0301",
        "a" * 300,
        "the constructor sat on toString and __proto__",  # names that every object of JavaScript has
        "a\ufffdb",
        "\u039f\u0394\u039f\u03a3 \u039f\u0394\u039f\u03a3",  # the last sigma of a word has a small letter of its own
    ]
    texts.append((LIVE_FILES / "forward.js").read_text(encoding="utf-8")[:4000])
    # And ids that no text makes: broken characters, single bytes.
    known = sorted(tokenizer.vocab.values())[:2000]
    runs = [known[start : start + 7] for start in range(0, len(known), 7)] + [tokenizer.encode(text) for text in texts]
    made = one.page.evaluate("texts => texts.map(text => tokenizer.encode(text))", texts)
    for text, ids in zip(texts, made, strict=True):
        assert ids == tokenizer.encode(text), text
    for ids, text in zip(runs, one.page.evaluate("runs => runs.map(ids => tokenizer.decode(ids))", runs), strict=True):
        assert text == tokenizer.decode(ids), ids


def test_it_is_used_like_the_page(open_page: Open, tmp_path: Path) -> None:
    """New text, a head switched off, sampling; what it can not do is switched off and says why; it stays after a reload."""
    model, tokenizer = make_kind("gpt2")
    one = open_live(open_page, tmp_path, model, tokenizer, panel="heads")
    one.page.get_by_label("Text", exact=True).fill("a dog ran")
    one.page.wait_for_timeout(400)  # typing is told after a pause
    one.settle()
    assert one.tokens() == [tokenizer.name(id).replace(" ", "·") for id in tokenizer.encode("a dog ran")]
    before = one.page.locator(".answer").inner_text()
    one.tab("intervene").locator("[role=gridcell].here").nth(5).click()
    one.settle()
    assert one.errors == []
    assert "1 head changed" in one.page.locator("#changed").inner_text()
    assert one.page.locator(".answer").inner_text() != before
    one.panel.get_by_role("button", name="Feed-forward 0", exact=True).click()
    one.settle()
    assert "2 parts changed" in one.page.locator("#changed").inner_text()
    one.panel.get_by_role("button", name="Feed-forward 0", exact=True).click()
    one.settle()
    assert one.errors == []
    assert one.panel.locator("details.more:visible").count() == 0, "neurons and steering are the server's"
    one.panel.get_by_role("button", name="Try every head").click()
    one.page.wait_for_selector("text=Removing")
    one.tab("generate")
    assert "clearhead explore" in one.panel.inner_text()
    assert one.panel.get_by_role("radio", name="Beam search").count() == 0
    for _ in range(3):
        one.panel.get_by_role("button", name="Take the drawn token").click()
        one.settle()
    assert len(one.state()["generate.written"].split(",")) == 3
    one.tab("cost")
    assert one.panel.get_by_role("button", name=re.compile("Measure")).is_disabled()
    assert "clearhead explore" in (one.panel.locator("[title]").first.get_attribute("title") or "")
    one.page.reload()
    one.page.wait_for_selector("[role=tab]")
    one.settle()
    assert one.errors == []


@pytest.mark.parametrize(
    ("name", "title", "words", "door"),
    [
        ("gpt2", "Divided by √d", "divided by √6", ""),
        ("alibi", "Multiplied by 0.3", "bias for the distance", "adds a bias"),
        ("t5", "Multiplied by 1", "bias for the distance", "adds a bias"),
        ("turned", "Divided by √d", "divided by √6", ""),
    ],
)
def test_follow_tells_the_scale_of_this_model(
    open_page: Open, tmp_path: Path, name: str, title: str, words: str, door: str
) -> None:
    """T5 does not divide by √d, ALiBi adds a bias, and the Sandbox knows neither."""
    model, tokenizer = make_kind(name)
    state: dict[str, Any] = {"attention": "encoder", "follow.at": 1} if name == "t5" else {"follow.at": 1}
    one = open_live(open_page, tmp_path, model, tokenizer, panel="follow", **state)
    one.panel.locator(".stops").get_by_role("button", name="Scale").click()
    assert title in one.panel.locator("#follow-title").inner_text()
    assert words in one.panel.locator(".step").inner_text()
    one.panel.locator(".stops").get_by_role("button", name="Q, K, V").click()
    assert one.panel.get_by_role("button", name="Open this head in the Sandbox").count() == (not door)
    assert door in one.panel.locator(".step").inner_text()


def test_a_head_without_a_scale_in_the_sandbox(open_page: Open, tmp_path: Path) -> None:
    tokenizer = make_kind("gpt2")[1]
    config = ch.preset("gpt2", **{**SIZES, "vocab_size": tokenizer.vocab_size}, attention_scale=1.0)
    one = open_live(open_page, tmp_path, ch.build(config, seed=3).eval(), tokenizer, "the cat", panel="follow")
    one.panel.locator(".stops").get_by_role("button", name="Q, K, V").click()
    one.panel.get_by_role("button", name="Open this head in the Sandbox").click()
    assert not one.panel.get_by_label("Divide by √d").is_checked()


def test_a_text_of_very_many_letters_is_refused_at_once(open_page: Open, tmp_path: Path) -> None:
    """One of 100,000, cut into tokens first, held the page up for minutes."""
    one = open_live(open_page, tmp_path, *make_kind("gpt2"))
    one.page.get_by_label("Text", exact=True).fill("ab" * 10_000)
    one.page.locator(".error").first.wait_for()
    assert "20,000 letters" in one.errors[0]
    assert one.panel.is_hidden()


def test_another_number_is_noticed(open_page: Open, tmp_path: Path) -> None:
    """A browser that computes something else than Python shows nothing, and says what differs."""
    model, tokenizer = make_kind("llama")
    page = export_live_page(model, tokenizer, TEXT, name="live")
    for pattern, changed, words in (
        (r'("logits":\[)', r"\g<1>9.5,", "a logit differs"),
        (r'("texts":\[\["the cat sat on the mat",\[)', r"\g<1>0,", "the tokenizer here"),
    ):
        wrong, many = re.subn(pattern, changed, page, count=1)
        assert many == 1
        file = tmp_path / "wrong.html"
        file.write_text(wrong, encoding="utf-8")
        one = open_page(file.as_uri())
        assert any(words in error for error in one.errors), one.errors
        assert one.panel.is_hidden()


def test_only_a_live_page_carries_the_computation() -> None:
    plain, live = (write_page({}, {}, model) for model in (None, {"name": "none"}))
    for file in LIVE_FILES.glob("*.js"):
        assert (f'"clearhead/{file.name}"' in plain, f'"clearhead/{file.name}"' in live) == (False, True)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(sparsity="block=4, window=1, n_global=1, n_random=0"), "sparsity='block=4"),
        (dict(d_model=2400, d_ff=4 * 2400, n_heads=24), "MB of weights"),
    ],
)
def test_what_it_can_not_compute_is_refused(fields: dict[str, Any], words: str) -> None:
    _, tokenizer = make_kind("gpt2")
    model = ch.build(ch.preset("gpt2", **{**SIZES, "vocab_size": tokenizer.vocab_size, **fields}))
    with pytest.raises(InputError, match=f"{words}.*leave out --live"):
        export_live_page(model, tokenizer, TEXT, name="live")


def test_rules_and_tokenizers_that_are_refused() -> None:
    model, tokenizer = make_kind("original")
    model.generation = ch.Generation(bos=0, forced_bos=3)
    with pytest.raises(InputError, match=r"generation\.forced_bos"):
        export_live_page(model, tokenizer, TEXT, name="live")
    other = ch.train_tokenizer(texts=TEXTS, kind="wordpiece", vocab_size=300)
    with pytest.raises(InputError, match=r"normalizer BertNormalizer.*leave out --live"):
        export_live_page(make_kind("gpt2")[0], other, TEXT, name="live")
