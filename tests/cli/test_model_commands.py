"""The commands embed, classify and transcribe, on tiny random models made by transformers."""

from __future__ import annotations

import base64
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families.compare import tiny
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
    WhisperConfig,
    WhisperForConditionalGeneration,
)
from typer.testing import CliRunner, Result

import clearhead as ch
from clearhead.cli import app
from clearhead.data import load_tokenizer
from clearhead.data.audio import RATE, log_mel_of_all
from clearhead.data.tokenizer_formats import read_tiktoken
from clearhead.generation import scribe as scribes

pytestmark = pytest.mark.usefixtures("unchecked")  # typer passes values that the options' annotations do not allow

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "cat", "dog", "sat", "on", "the", "mat", "ran", "away", "."]
LINES = ["the cat sat on the mat .", "a dog", "the dog ran away .", "", "a cat sat on a dog . the dog ran .", "mat"]
SIZES: dict[str, Any] = dict(vocab_size=len(WORDS), num_hidden_layers=2, num_attention_heads=2, hidden_size=24)
SIZES |= dict(intermediate_size=37, max_position_embeddings=13)


def call(*args: str | Path, given: str | bytes | None = None) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args], input=given)


def lines_of(*args: str | Path, given: str | bytes | None = None) -> list[str]:
    result = call(*args, given=given)
    assert result.exit_code == 0, result.exception
    return result.stdout.splitlines()


def refusal(*args: str | Path, given: str | bytes | None = None) -> str:
    """The error message, one line: an error of ours, not a crash."""
    error = call(*args, given=given).exception
    assert type(error).__module__ == "clearhead.errors", repr(error)
    return str(error)


def saved(theirs: Any, folder: Path) -> Path:
    theirs.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    return folder


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(LINES) + "\n")
    return file


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sentence embedder: the mean of the states, scaled to length 1, for texts of up to 11 tokens."""
    folder = saved(tiny(BertModel, BertConfig(**SIZES)), tmp_path_factory.mktemp("embedder"))
    kinds = ("Transformer", "Pooling", "Normalize")
    paths = ("", "1_Pooling", "2_Normalize")
    modules = [dict(idx=i, name=str(i), path=p, type=f"sentence_transformers.models.{k}") for i, (p, k) in
               enumerate(zip(paths, kinds, strict=True))]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = dict(word_embedding_dimension=24, pooling_mode_cls_token=False, pooling_mode_mean_tokens=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "sentence_bert_config.json").write_text(json.dumps(dict(max_seq_length=11)))
    return folder


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    labels = {0: "calm", 1: "angry", 2: "sad"}
    theirs = tiny(BertForSequenceClassification, BertConfig(**SIZES, id2label=labels, num_labels=3))
    return saved(theirs, tmp_path_factory.mktemp("classifier"))


@torch.no_grad()
def one_by_one(folder: Path, kind: str) -> np.ndarray:
    theirs, tokenizer = BertModel.from_pretrained(folder), load_tokenizer(folder)
    states = [theirs(torch.tensor([tokenizer.encode(line)])).last_hidden_state[0] for line in LINES]
    pooled = torch.stack([x.mean(0) if kind == "mean" else x[0] for x in states])
    return torch.nn.functional.normalize(pooled, dim=-1).numpy()


def test_embed(embedder: Path, texts: Path, tmp_path: Path) -> None:
    """In batches sorted by length, to a file or as text, each text gets the same vector as alone, in the order of the lines."""
    expected = one_by_one(embedder, "mean")
    out = tmp_path / "out.npy"
    assert lines_of("embed", embedder, texts, "--out", out, "--tokens", "16", "--truncate") == []
    np.testing.assert_allclose(np.load(out)[:4], expected[:4], rtol=0, atol=1e-5)  # fp32, other shapes
    np.testing.assert_allclose(np.load(out)[5], expected[5], rtol=0, atol=1e-5)
    short = "\n".join([LINES[0], LINES[5]])
    shown = lines_of("embed", embedder, given=short)
    np.testing.assert_allclose(np.loadtxt(shown), expected[[0, 5]], rtol=0, atol=1e-5)
    assert lines_of("embed", embedder, "-", given=short) == shown
    assert lines_of("embed", embedder, "-", "-o", tmp_path / "out.txt", given=short) == []
    assert (tmp_path / "out.txt").read_text().splitlines() == shown


def test_embed_pool(embedder: Path, tmp_path: Path) -> None:
    given = "\n".join(LINES[:3])
    for kind in ("mean", "first"):
        shown = np.loadtxt(lines_of("embed", embedder, "--pool", kind, given=given))
        np.testing.assert_allclose(shown, one_by_one(embedder, kind)[:3], rtol=0, atol=1e-5)


def test_embed_refusals(embedder: Path, texts: Path, tmp_path: Path) -> None:
    assert "'gone.txt' can not be read (No such file or directory)" in refusal("embed", embedder, "gone.txt")
    assert "standard input holds no text" in refusal("embed", embedder, "-", given="\n\n")
    (tmp_path / "latin.txt").write_bytes("schön".encode("latin-1"))
    assert "no text in UTF-8" in refusal("embed", embedder, tmp_path / "latin.txt")
    assert "line 5 has 13 tokens, and the model takes 11" in refusal("embed", embedder, texts)
    assert "there is no folder" in refusal("embed", embedder, texts, "--out", tmp_path / "no" / "x.npy")
    assert "--device 'toaster'" in refusal("embed", embedder, texts, "--device", "toaster")
    assert "there is nothing at 'no model'" in refusal("embed", "no model", texts)
    llama = LlamaConfig(vocab_size=len(WORDS), num_hidden_layers=1, num_attention_heads=2, hidden_size=8)
    decoder = saved(tiny(LlamaForCausalLM, llama), tmp_path / "decoder")
    assert "takes an encoder of texts" in refusal("embed", decoder, texts)
    assert "takes a model that ends in classes" in refusal("classify", embedder, texts)
    assert call("embed", embedder, texts, "--pool", "max").exit_code == 2
    assert call("embed").exit_code == 2


@torch.no_grad()
def test_classify_texts(classifier: Path, texts: Path) -> None:
    theirs, tokenizer = BertForSequenceClassification.from_pretrained(classifier), load_tokenizer(classifier)
    expected = [theirs(torch.tensor([tokenizer.encode(line)])).logits[0].softmax(0) for line in LINES]
    shown = lines_of("classify", classifier, texts, "--batch", "4", "--top", "2")
    assert len(shown) == len(LINES)
    for line, text, chances in zip(shown, LINES, expected, strict=True):
        first, chance, second, _, name = line.split("\t")
        order = [("calm", "angry", "sad")[i] for i in chances.argsort(descending=True)]
        assert ([first, second], name) == (order[:2], text)
        assert float(chance) == pytest.approx(float(chances.max()), abs=1e-4)  # four digits are printed
    assert lines_of("classify", classifier, "-", given="a cat\n")[0].endswith("\ta cat")


@torch.no_grad()
def test_classify_as_json(classifier: Path, texts: Path) -> None:
    plain = lines_of("classify", classifier, texts, "--top", "2")
    rows = [json.loads(line) for line in lines_of("classify", classifier, texts, "--top", "2", "--json")]
    shown = [[*(f"{each['class']}\t{each['value']:.4f}" for each in row["classes"]), row["input"]] for row in rows]
    assert ["\t".join(row) for row in shown] == plain


def test_classify_follows_the_problem_type(classifier: Path, texts: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(classifier, tmp_path / "model"))
    fields = json.loads((folder / "config.json").read_text())
    theirs, ids = BertForSequenceClassification.from_pretrained(classifier), load_tokenizer(classifier).encode("a cat")
    logits = theirs(torch.tensor([ids])).logits[0]

    def shown(kind: str | None) -> list[float]:
        (folder / "config.json").write_text(json.dumps({**fields, "problem_type": kind}))
        line = lines_of("classify", folder, "-", "--top", "3", given="a cat\n")[0]
        return [float(value) for value in line.split("\t")[1:-1:2]]

    for kind, values in {
        None: logits.softmax(0),
        "single_label_classification": logits.softmax(0),
        "multi_label_classification": logits.sigmoid(),
        "regression": logits,
    }.items():
        assert shown(kind) == pytest.approx(sorted(values.tolist(), reverse=True), abs=1e-4)  # four digits are printed
    (folder / "config.json").write_text(json.dumps({**fields, "problem_type": "multi_label"}))
    assert "problem_type='multi_label' is not known" in refusal("classify", folder, texts)


@pytest.mark.parametrize("kind", ["single_label_classification", "multi_label_classification", "regression"])
def test_the_problem_type_stays(classifier: Path, tmp_path: Path, kind: str) -> None:
    folder = Path(shutil.copytree(classifier, tmp_path / "model"))
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "problem_type": kind}))
    model = ch.load(folder)
    ch.save(model, tmp_path / "hf", format="hf")
    assert BertForSequenceClassification.from_pretrained(tmp_path / "hf").config.problem_type == kind
    ch.save(model, tmp_path / "ours")
    assert ch.load(tmp_path / "hf").config.problem == ch.load(tmp_path / "ours").config.problem == model.config.problem


def test_classify_and_embed_read_the_texts_of_a_table(
    classifier: Path, embedder: Path, texts: Path, tmp_path: Path
) -> None:
    """As `evaluate` reads it: a label is not fed to the model."""
    plain, vectors = lines_of("classify", classifier, texts), lines_of("embed", embedder, texts, "--truncate")
    rows = [(line, "calm" if i % 2 else "sad") for i, line in enumerate(LINES)]
    tables = {
        "a.tsv": "".join(f"{text}\t{label}\n" for text, label in rows),
        "b.csv": "label,text\n" + "".join(f'{label},"{text}"\n' for text, label in rows),
        "c.csv": "id;text\n" + "".join(f"7;{text}\n" for text, _ in rows),
        "d.jsonl": "".join(json.dumps({"text": text}) + "\n" for text, _ in rows),
        "e.tsv": "".join(f"{text}\n" for text, _ in rows),
    }
    for name, content in tables.items():
        (tmp_path / name).write_text(content)
        assert lines_of("classify", classifier, tmp_path / name) == plain, name
        assert lines_of("embed", embedder, tmp_path / name, "--truncate") == vectors, name
    (tmp_path / "f.csv").write_text("review,sentiment\n" + "".join(f'"{text}",{label}\n' for text, label in rows))
    assert lines_of("classify", classifier, tmp_path / "f.csv", "--column", "review") == plain
    assert "f.csv:1 seems to be a header" in (said := refusal("classify", classifier, tmp_path / "f.csv"))
    assert said.endswith("name the column of the texts with --column")
    assert "has no column 'reviw'" in refusal("classify", classifier, tmp_path / "f.csv", "--column", "reviw")


def test_classify_images(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="pictures need Pillow, which is not installed")
    config = ViTConfig(**{**SIZES, "image_size": 12, "patch_size": 4}, id2label={0: "cat", 1: "dog"}, num_labels=2)
    theirs = tiny(ViTForImageClassification, config)
    theirs.save_pretrained(tmp_path / "vit")
    prepare = dict(size=dict(height=12, width=12), image_mean=[0.4, 0.5, 0.6], image_std=[0.2, 0.3, 0.4], resample=3)
    (tmp_path / "vit" / "preprocessor_config.json").write_text(json.dumps(prepare))
    draw, files, inputs = np.random.default_rng(0), [], []
    for i, size in enumerate([(12, 12, 3), (17, 31, 3), (29, 12)]):
        picture = image.fromarray(draw.integers(0, 256, size, np.uint8))
        files.append(tmp_path / f"{i}.png")
        picture.save(files[-1])
        x = np.array(picture.convert("RGB").resize((12, 12), 3)) / 255.0
        inputs.append(torch.from_numpy((x - prepare["image_mean"]) / prepare["image_std"]).movedim(-1, 0).float())
    with torch.no_grad():
        expected = theirs(torch.stack(inputs)).logits.softmax(-1)
    shown = [line.split("\t") for line in lines_of("classify", tmp_path / "vit", *files, "--batch", "2")]
    assert [(label, name) for label, _, name in shown] == [
        (("cat", "dog")[int(chances.argmax())], str(file)) for chances, file in zip(expected, files, strict=True)
    ]
    assert "there is no picture" in refusal("classify", tmp_path / "vit", tmp_path / "gone.png")
    (tmp_path / "bad.png").write_bytes(b"no picture")
    assert "is no picture that can be read" in refusal("classify", tmp_path / "vit", tmp_path / "bad.png")


def test_images_without_pillow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ViTConfig(**{**SIZES, "image_size": 12, "patch_size": 4}, num_labels=2)
    tiny(ViTForImageClassification, config).save_pretrained(tmp_path)
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert "clearhead[pictures]" in refusal("classify", tmp_path, "x.png")


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the 256 bytes and Whisper's 1,608 special tokens, and a window of 0.26 seconds."""
    folder = tmp_path_factory.mktemp("whisper")
    ranks = [base64.b64encode(bytes([byte])) + b" " + str(byte).encode() for byte in range(256)]
    (folder / "gpt2.tiktoken").write_bytes(b"\n".join(ranks))
    for languages, name in ((99, "english"), (100, "all")):
        sizes: dict[str, Any] = dict(d_model=24, encoder_layers=2, decoder_layers=2, max_source_positions=13)
        sizes |= dict(encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=96, decoder_ffn_dim=96)
        sizes |= dict(vocab_size=256 + 1509 + languages, num_mel_bins=7, max_target_positions=40)
        sizes |= dict(pad_token_id=256, bos_token_id=256, eos_token_id=256, decoder_start_token_id=257)
        theirs = tiny(WhisperForConditionalGeneration, WhisperConfig(**sizes))
        theirs.generation_config.suppress_tokens = [5, 7, 100]
        theirs.generation_config.begin_suppress_tokens = [32, 256]
        theirs.save_pretrained(folder / name)
    return folder


def sound_file(folder: Path, seconds: float = 0.6) -> tuple[Path, torch.Tensor]:
    soundfile = pytest.importorskip("soundfile")
    sound = torch.randn(round(RATE * seconds)).clamp(-3, 3) / 4
    soundfile.write(folder / "x.wav", sound.numpy(), RATE, subtype="FLOAT")
    return folder / "x.wav", sound


@pytest.mark.slow  # every temperature is tried
def test_transcribe(whisper: Path, tmp_path: Path) -> None:
    """Every format has the same text, and times that never run backwards."""
    file, _ = sound_file(tmp_path, 0.1)
    given = ("transcribe", whisper / "english", "--tokenizer", whisper / "gpt2.tiktoken")
    text = call(*given, file).stdout
    assert call(*given, "-", given=file.read_bytes()).stdout == text
    found = json.loads(call(*given, file, "--format", "json", "--words").stdout)
    assert found.keys() == {"language", "duration", "text", "segments", "words"}
    assert (found["language"], found["duration"]) == ("en", 0.1)
    assert [segment["id"] for segment in found["segments"]] == [*range(len(found["segments"]))]
    starts = [segment["start"] for segment in json.loads(call(*given, file, "--format", "json").stdout)["segments"]]
    assert starts == sorted(starts)
    assert call(*given, file, "--format", "srt").stdout.startswith("1\n00:00:00,")
    call(*given, file, "--format", "vtt", "--out", tmp_path / "x.vtt")
    assert (tmp_path / "x.vtt").read_text().startswith("WEBVTT\n\n00:00:00.")
    assert "txt has no times; got --format txt" in refusal(*given, file, "--words")


def test_transcribe_finds_the_language(whisper: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scribes, "ENGLISH_ONLY", 1863)  # the size of the small vocabulary with 99 languages, less one
    file, sound = sound_file(tmp_path, 0.2)
    tokenizer = read_tiktoken(whisper / "gpt2.tiktoken", 100)
    theirs: Any = WhisperForConditionalGeneration.from_pretrained(whisper / "all")
    start = tokenizer.id("<|startoftranscript|>")
    frames = torch.nn.functional.pad(log_mel_of_all(sound, 7), (0, 6))[None]
    with torch.no_grad():
        logits = theirs(frames, decoder_input_ids=torch.tensor([[start]])).logits[0, -1]
    spoken = start + 1 + int(logits[start + 1 : start + 101].argmax())
    given = ("transcribe", whisper / "all", "--tokenizer", whisper, file, "--format", "json")
    for options, language in (((), tokenizer.token(spoken).strip("<|>")), (("--language", "de"), "de")):
        assert json.loads(call(*given, *options).stdout)["language"] == language
    assert "language 'xx' is not one of the model's" in refusal(*given, "--language", "xx")


def test_transcribe_refusals(whisper: Path, embedder: Path, tmp_path: Path) -> None:
    file, _ = sound_file(tmp_path, 0.1)
    english, options = whisper / "english", ("--tokenizer", whisper)
    assert "there is no sound file" in refusal("transcribe", english, tmp_path / "gone.wav")
    assert "takes a model of sound" in refusal("transcribe", embedder, file)
    assert "no tokenizer of Whisper's" in refusal("transcribe", english, file)
    assert "no tokenizer of Whisper's" in refusal("transcribe", english, file, "--tokenizer", embedder)
    assert "is for 1864 tokens, the model for 1865" in refusal("transcribe", whisper / "all", file, *options)
    assert "knows only English" in refusal("transcribe", english, file, *options, "--language", "de")
    assert "knows only English" in refusal("transcribe", english, file, *options, "--task", "translate")
    assert "the input is no sound file" in refusal("transcribe", english, "-", *options, given=b"noise")


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_errors_are_one_line(tmp_path: Path) -> None:
    done = run("-m", "clearhead", "embed", "no model", str(tmp_path / "gone.txt"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("clearhead: ")
    assert done.stderr.count("\n") == 1


def test_help_does_not_import_torch() -> None:
    program = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from clearhead.cli import app\n"
        "for command in ('embed', 'classify', 'transcribe'):\n"
        "    shown = CliRunner().invoke(app, [command, '--help'])\n"
        "    assert shown.exit_code == 0 and 'MODEL' in shown.output, shown.output\n"
        "print([name for name in ('torch', 'numpy', 'tokenizers') if name in sys.modules])\n"
    )
    assert run("-c", program).stdout == "[]\n"


def test_a_progress_bar_does_not_mix_with_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stderr on a terminal, the loop still prints to stdout."""
    from clearhead.cli.console import track

    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then treats stderr as a terminal
    monkeypatch.setenv("TERM", "xterm")  # which is not dumb
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    for item in track(["a", "b"], "working", 2, printing=True):
        print(item)
    assert out.getvalue() == "a\nb\n"
    assert "working" in err.getvalue()
