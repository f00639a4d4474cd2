"""`clearhead explore --sites` and `--ablate`, against models with weights set to zero."""

from __future__ import annotations

import copy
import csv
import json
from pathlib import Path
from typing import Any

import pytest
import sacrebleu
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

import clearhead as ch
from clearhead.cli import app
from clearhead.cli.ablation_batches import AblationInput
from clearhead.cli.ablation_table import print_ablation
from clearhead.cli.site_table import print_sites
from clearhead.errors import InputError
from clearhead.generation import translate
from clearhead.inside import prune
from clearhead.models import Decoder, EncoderDecoder, Model

TEXTS = ["the cat sat on the mat", "one two three dogs ran and ran", "four five six"]
TARGETS = ["the mat", "dogs ran", "one two three"]
SMALL: dict[str, Any] = dict(
    n_layers=2, d_model=24, n_heads=3, d_head=8, d_ff=40, max_len=61, vocab_size=280, init_std=0.3, dropout=0.0
)


def make(folder: Path, preset: str, **fields: Any) -> tuple[Model, ch.Tokenizer]:
    tokenizer = ch.train_tokenizer(texts=TEXTS * 3, kind="bpe", vocab_size=280, add_bos=False, special=SPECIAL)
    model = ch.build(ch.preset(preset, **SMALL | fields), seed=3).eval()
    assert tokenizer.eos is not None
    model.generation = ch.Generation(bos=tokenizer.bos, eos=(tokenizer.eos,), decoder_start=tokenizer.bos)
    ch.save(model, folder)
    tokenizer.save(folder)
    return model, tokenizer


SPECIAL = ("<pad>", "<s>", "</s>", "<unk>", "<mask>")


def ablate(model: Model, folder: Path, text: str, capsys: pytest.CaptureFixture[str], **options: Any) -> dict[str, Any]:
    print_ablation(model, folder, AblationInput(text, **options), form="json")
    return json.loads(capsys.readouterr().out)


def without(model: Model, place: str, head: int) -> Any:
    """A copy with zeros in the head's columns of the output projection."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        columns = slice(head * model.config.d_head, (head + 1) * model.config.d_head)
        model.get_submodule(f"{place}.o_proj").get_parameter("weight")[:, columns] = 0
    return model


@pytest.mark.slow
@torch.no_grad()
def test_each_head_of_a_decoder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Texts of different lengths from a file: the loss is the mean over all their tokens."""
    model, tokenizer = make(tmp_path / "m", "gpt2")
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS) + "\n")
    found = ablate(model, tmp_path / "m", str(tmp_path / "texts.txt"), capsys)
    rows = [torch.tensor([tokenizer.encode(text)]) for text in TEXTS]

    def metrics(model: Any) -> tuple[float, float]:
        logits = torch.cat([model(ids[:, :-1])[0] for ids in rows])
        right = torch.cat([ids[0, 1:] for ids in rows])
        return float(F.cross_entropy(logits, right)), float(logits.gather(1, right[:, None]).mean())

    loss, logit = metrics(model)
    assert found["base"] == pytest.approx({"loss": loss, "logit": logit}, abs=1e-5)  # float32
    assert len(found["heads"]) == 6
    for head in found["heads"]:
        a, b = metrics(without(model, head["place"], head["head"]))
        assert (head["loss"], head["logit"]) == pytest.approx((a - loss, b - logit), abs=2e-5)
        smaller = prune(model, {head["place"]: [head["head"]]})
        gone = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in smaller.parameters())
        assert head["parameters"] == gone
    losses = [head["loss"] for head in found["heads"]]
    assert losses == sorted(losses, reverse=True)


@pytest.mark.slow
@torch.no_grad()
def test_each_head_of_a_translator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = make(tmp_path / "m", "transformer-base")
    assert isinstance(model, EncoderDecoder)
    assert tokenizer.eos is not None
    assert tokenizer.bos is not None
    for name, lines in (("source", TEXTS), ("target", TARGETS)):
        (tmp_path / name).write_text("\n".join(lines))
    found = ablate(model, tmp_path / "m", str(tmp_path / "source"), capsys, target=str(tmp_path / "target"), bleu=True)
    sources = [[*tokenizer.encode(text), tokenizer.eos] for text in TEXTS]
    targets = [[tokenizer.bos, *tokenizer.encode(text), tokenizer.eos] for text in TARGETS]

    def metrics(model: Any) -> dict[str, float]:
        pairs = zip(sources, targets, strict=True)
        logits = torch.cat([model(torch.tensor([source]), torch.tensor([target[:-1]]))[0] for source, target in pairs])
        right = torch.tensor([id for target in targets for id in target[1:]])
        written = [tokenizer.decode(ids) for ids in translate(model, sources, beams=1)]
        bleu, chrf = sacrebleu.corpus_bleu(written, [TARGETS]), sacrebleu.corpus_chrf(written, [TARGETS])
        chosen = float(logits.gather(1, right[:, None]).mean())
        return {
            "loss": float(F.cross_entropy(logits, right)),
            "logit": chosen,
            "bleu": bleu.score,
            "chrf": chrf.score,
        }

    base = metrics(model)
    assert found["base"] == pytest.approx(base, abs=1e-4)
    kinds = {head["place"].rpartition(".")[2] for head in found["heads"]}
    assert kinds == {"attention", "cross"}
    assert len(found["heads"]) == 3 * (2 + 2 + 2)
    for head in found["heads"][::4]:
        changed = metrics(without(model, head["place"], head["head"]))
        wanted = {name: changed[name] - base[name] for name in base}
        assert {name: head[name] for name in base} == pytest.approx(wanted, abs=1e-4)


@pytest.mark.slow
@torch.no_grad()
def test_without_targets_a_translator_uses_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = make(tmp_path / "m", "transformer-base")
    assert isinstance(model, EncoderDecoder)
    source, (end,) = [*tokenizer.encode(TEXTS[0]), *model.generation.eos], model.generation.eos
    own = translate(model, [source], beams=1)[0]
    logits = model(torch.tensor([source]), torch.tensor([[model.generation.bos, *own]]))
    found = ablate(model, tmp_path / "m", TEXTS[0], capsys, heads="decoder.*.cross")
    assert {head["place"] for head in found["heads"]} == {"decoder.blocks.0.cross", "decoder.blocks.1.cross"}
    loss = F.cross_entropy(logits[0], torch.tensor([*own, end]))
    assert found["base"]["loss"] == pytest.approx(float(loss), abs=1e-5)


@torch.no_grad()
def test_an_encoder_predicts_masked_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = make(tmp_path / "m", "bert-base", head="tokens", max_len=61)
    assert tokenizer.mask is not None
    ids = tokenizer.encode(TEXTS[2])
    places = [at for at, id in enumerate(ids) if id not in tokenizer.special_ids]
    assert 1 < len(places) <= 16

    def loss(model: Any) -> float:
        losses: list[float] = []
        for place in places:
            hidden = torch.tensor([[tokenizer.mask if at == place else id for at, id in enumerate(ids)]])
            losses.append(-float(model(hidden)[0, place].log_softmax(-1)[ids[place]]))
        return sum(losses) / len(losses)

    found = ablate(model, tmp_path / "m", TEXTS[2], capsys)
    assert found["base"]["loss"] == pytest.approx(loss(model), abs=1e-5)
    head = found["heads"][0]
    changed = loss(without(model, head["place"], head["head"]))
    assert head["loss"] == pytest.approx(changed - loss(model), abs=2e-5)


@torch.no_grad()
def test_a_classifiers_target_is_its_own_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = make(tmp_path / "m", "bert-base", head="classes", n_classes=5, vocab_size=280)
    ids = torch.tensor([tokenizer.encode(TEXTS[0])])
    found = ablate(model, tmp_path / "m", TEXTS[0], capsys)
    assert found["base"]["loss"] == pytest.approx(-float(model(ids).log_softmax(-1).max()), abs=1e-5)


@pytest.mark.slow
def test_as_a_table_and_as_csv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = make(tmp_path / "m", "smollm2-135m", n_heads=4, n_kv_heads=2, n_layers=16)
    print_ablation(model, tmp_path / "m", AblationInput(TEXTS[0]))
    shown = capsys.readouterr().out
    assert "Δ loss" in shown
    assert "The whole model: loss" in shown
    assert "half of the heads of a kind pruned" in shown
    assert "pruned by 2" in shown
    assert "14 of 64 heads are left out here" in shown
    print_ablation(model, tmp_path / "m", AblationInput(TEXTS[0]), form="csv")
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert len(rows) == 64
    assert list(rows[0]) == ["place", "head", "loss", "logit", "parameters", "seconds"]


def test_from_the_command_line(tmp_path: Path) -> None:
    make(tmp_path / "m", "gpt2")
    found = CliRunner().invoke(app, ["explore", str(tmp_path / "m"), TEXTS[0], "--ablate", "--device", "cpu"])
    assert found.exit_code == 0, found.output
    assert "blocks.1.attention" in found.output
    found = CliRunner().invoke(app, ["explore", str(tmp_path / "m"), "--sites", "--device", "cpu"])
    assert "blocks.*.attention.weights" in found.output


@pytest.mark.parametrize(
    ("preset", "text", "options", "words"),
    [
        ("gpt2", "", {}, r"--ablate needs a text: write one"),
        ("gpt2", "cat", {"target": "dog"}, r"--target is for encoder-decoders; this model is of shape 'decoder'"),
        ("gpt2", "the cat " * 60, {}, r"text 1 has \d+ tokens; --ablate takes 2 to 62"),
        ("gpt2", "the cat sat", {"bleu": True}, r"--bleu compares translations with --target"),
        ("gpt2", "the cat sat", {"heads": "block.*"}, r"no attention matches 'block\.\*'; choose one of: blocks\.0"),
        ("transformer-base", "the cat sat", {"bleu": True}, r"--bleu compares translations with --target"),
        (
            "transformer-base",
            "the cat sat",
            {"target": "cat " * 90},
            r"target 1 has \d+ tokens, and the model writes at",
        ),
    ],
)
def test_refused_input(preset: str, text: str, options: dict[str, Any], words: str, tmp_path: Path) -> None:
    model, _ = make(tmp_path, preset)
    with pytest.raises(InputError, match=words):
        print_ablation(model, tmp_path, AblationInput(text, **options))


def test_as_many_targets_as_texts(tmp_path: Path) -> None:
    model, _ = make(tmp_path, "transformer-base")
    (tmp_path / "texts").write_text("\n".join(TEXTS))
    with pytest.raises(InputError, match=r"there are 3 texts but 1 targets; give one for each"):
        print_ablation(model, tmp_path, AblationInput(str(tmp_path / "texts"), target="cat"))


def test_images_are_refused(tmp_path: Path) -> None:
    model = ch.build(ch.preset("vit-b-16", n_layers=1, d_model=24, n_heads=3, d_head=8, d_ff=40, image_size=32))
    with pytest.raises(InputError, match=r"--ablate takes texts, and this model reads patches"):
        print_ablation(model, tmp_path, AblationInput("a cat"))


# Sites.


def sites_of(model: Model, capsys: pytest.CaptureFixture[str], *pattern: str, **options: Any) -> str:
    print_sites(model, *pattern, **options)
    return capsys.readouterr().out


@torch.no_grad()
@pytest.mark.parametrize("gone", [{}, {0: [1, 0]}])
def test_sites_have_the_shapes_of_a_probe(gone: dict[int | str, list[int]], capsys: pytest.CaptureFixture[str]) -> None:
    config = ch.preset(
        "smollm2-135m", n_layers=2, d_model=24, n_heads=4, n_kv_heads=2, d_head=8, d_ff=40, vocab_size=53
    )
    model = prune(ch.build(config).eval(), gone)
    assert isinstance(model, Decoder)
    listed = json.loads(sites_of(model, capsys, form="json"))
    with ch.probe(model) as seen:
        model(torch.zeros(5, 7, dtype=torch.int64))
    assert [row["site"] for row in listed] == list(seen)
    for row in listed:
        here = row["here"].replace("B", "5").replace("T", "7").replace("S", "7")
        assert here == str(tuple(seen[row["site"]].shape)), row


def spaced(text: str) -> str:
    return " ".join(text.split())


def test_equal_layers_share_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    model = ch.build(ch.preset("gpt2", **SMALL))
    whole = sites_of(model, capsys)
    assert "blocks.*.attention.weights (B, H, T, S) (B, 3, T, S)" in spaced(whole)
    assert "17 sites." in whole
    assert "blocks.0.attention.q" not in whole
    pruned = sites_of(prune(model, {1: [0]}), capsys)
    assert "blocks.1.attention.q (B, H, T, E) (B, 2, T, 8)" in spaced(pruned)
    assert "blocks.*.residual" in pruned
    some = sites_of(model, capsys, "blocks.1.*.[qk]")
    assert [line.split()[0] for line in some.splitlines()[1:3]] == ["blocks.1.attention.q", "blocks.1.attention.k"]
    with pytest.raises(InputError, match=r"no site matches 'blocks\.1\.attention\.weight'; did you mean"):
        print_sites(model, "blocks.1.attention.weight")
