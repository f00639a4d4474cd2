"""Published weights: the same numbers and texts as other programs.

They come out of packages on the index, downloaded once (about 250 MB) and unpacked without running any of their code, and from
the folder of shared data beside the repository. Where one is missing, its test is skipped and says so.
"""

from __future__ import annotations

import base64
import json
import math
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import BertForMaskedLM
from typer.testing import CliRunner

from clearhead.checkpoint import load
from clearhead.cli import app
from clearhead.data import load_tokenizer
from clearhead.data.audio import load_audio
from clearhead.data.tokenizer_parts import byte_alphabet
from clearhead.generation import Engine
from clearhead.generation.scribe import Scribe, find_tokenizer
from clearhead.generation.transcription import Options, run_local, transcribe
from clearhead.models import EncoderDecoder
from tests.packages import unpacked
from tests.shared_data import shared_data

# The perplexity of the same file and text in other programs, in windows of 512 tokens: transformers 5.22 on the dequantised
# weights, and llama.cpp (xllamacpp 2026.10.11549), which also rounds the activations to 8 bits. transformers ends in
# the same kernels of torch as we do; llama.cpp shares nothing with us.
PERPLEXITY = {"transformers": 41.80825, "llama.cpp": 41.82513}


def call(*args: str | Path) -> str:
    done = CliRunner().invoke(app, [str(arg) for arg in args])
    assert done.exit_code == 0, done.exception
    return done.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
@torch.no_grad()
def test_minilm(tmp_path: Path) -> None:
    """The cosines between sentences are those of transformers."""
    folder = unpacked("minilm")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers: Any = pytest.importorskip("transformers")
    sentences = (
        "A man is playing a guitar.\nSomeone plays an instrument.\nThe stock market fell sharply today.\nHello!\n"
        "Shares lost a fifth of their value within hours, and nobody at the exchange could say why it had happened.\n"
    )
    (tmp_path / "sentences.txt").write_text(sentences)
    call("embed", folder, tmp_path / "sentences.txt", "--out", tmp_path / "out.npy", "--tokens", "16")
    ours = np.load(tmp_path / "out.npy")

    # In float64 and step by step: in float32 both would use the same kernels of torch and be equal bit for bit.
    model = transformers.BertModel.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(sentences.splitlines(), padding=True, return_tensors="pt")
    states, real = model(**batch).last_hidden_state, batch["attention_mask"][..., None]
    theirs = F.normalize((states * real).sum(1) / real.sum(1), dim=-1).numpy()
    np.testing.assert_allclose(ours @ ours.T, theirs @ theirs.T, rtol=0, atol=1e-5)  # six layers of our float32
    assert ours[0] @ ours[1] > 0.5 > ours[0] @ ours[2]


@pytest.mark.slow
def test_stories260k() -> None:
    """The first 200 greedy tokens are the text that llama2.c prints."""
    folder = shared_data("stories260K")
    model, tokenizer = load(folder / "stories260K.bin"), load_tokenizer(folder / "tok512.bin")
    cache = model.new_cache(batch=1, max_len=200)
    written = [model.generation.bos]
    while len(written) < 201:
        written.append(int(model(torch.tensor([written[-1:]]), cache=cache)[0, -1].argmax()))
    assert tokenizer.decode(written).strip() == (folder / "expected.txt").read_text().strip()


@pytest.mark.slow
def test_smollm2_knows_paris() -> None:
    path = unpacked("smollm2")
    model, tokenizer = load(path), load_tokenizer(path)
    tokens = torch.tensor([tokenizer.encode("The capital of France is")])
    assert tokenizer.decode([int(model(tokens)[0, -1].argmax())]) == " Paris"
    assert (model.generation.bos, model.generation.eos, model.generation.pad) == (1, (2,), 2)


@pytest.mark.slow
@torch.no_grad()
def test_smollm2_perplexity() -> None:
    """The first 20 kB of Shakespeare have the perplexity that transformers and llama.cpp measure."""
    path, text = unpacked("smollm2"), shared_data("tinyshakespeare.txt").read_bytes()[:20_000].decode()
    model = load(path)
    surprise, count = 0.0, 0
    for window in torch.tensor(load_tokenizer(path).encode(text)).split(512):
        logits = model(window[None])[0, :-1]
        surprise += float(F.cross_entropy(logits, window[1:], reduction="sum"))
        count += len(window) - 1
    ours = math.exp(surprise / count)
    assert ours == pytest.approx(PERPLEXITY["transformers"], rel=1e-4)  # the same float32 sums in another order
    assert ours == pytest.approx(PERPLEXITY["llama.cpp"], rel=5e-3)


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
@torch.no_grad()
def test_antiberty_scores_variants(tmp_path: Path) -> None:
    """An antibody's variants, as transformers scores them, one masked forward each."""
    folder = unpacked("antiberty") / "AntiBERTy_md_smooth"
    shutil.copy(folder.parent / "vocab.txt", folder)
    ids = {token: id for id, token in enumerate((folder / "vocab.txt").read_text().split())}
    residues = "EVQLVESGGGLVQPGGSLRLSCAASGFTFSSYAMSWVRQAPGKGLEWVSAISGSGGSTYYADSVKGRFTISRDNSKNTLYLQMNSLRAEDTAVYYCAK"
    (tmp_path / "heavy.fasta").write_text(f">heavy\n{residues}\n")
    found = call("variants", folder, tmp_path / "heavy.fasta", "-m", "W36A", "-m", "A23V:K98R").splitlines()[1:]
    theirs = BertForMaskedLM.from_pretrained(folder).eval()
    for line, changes in zip(found, ([(36, "W", "A")], [(23, "A", "V"), (98, "K", "R")]), strict=True):
        tokens = torch.tensor([[ids["[CLS]"], *(ids[letter] for letter in residues), ids["[SEP]"]]])
        tokens[0, [at for at, _, _ in changes]] = ids["[MASK]"]
        scores = theirs(tokens).logits[0].log_softmax(-1)
        expected = sum(float(scores[at, ids[new]] - scores[at, ids[old]]) for at, old, new in changes)
        # float32, eight layers of sums of 512 numbers
        assert float(line.rpartition(",")[2]) == pytest.approx(expected, abs=1e-3)
        assert expected < -5  # a tryptophan of the core; two substitutions


def write_ranks(folder: Path) -> None:
    # OpenAI's gpt2.tiktoken is GPT-2's vocabulary: the bytes of each token, in the order of the ids.
    vocab: dict[str, int] = json.loads((shared_data("gpt2-tokenizer") / "encoder.json").read_text())
    letters = {letter: byte for byte, letter in enumerate(byte_alphabet())}
    tokens = sorted(vocab, key=vocab.__getitem__)[:50_256]
    ranks = [base64.b64encode(bytes(letters[letter] for letter in token)).decode() for token in tokens]
    (folder / "gpt2.tiktoken").write_text("\n".join(f"{token} {rank}" for rank, token in enumerate(ranks)))


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
def test_whisper_transcribes_kennedy(tmp_path: Path) -> None:
    path, audio = unpacked("whisper"), shared_data("jfk.flac")
    write_ranks(tmp_path)
    text = call("transcribe", path, audio, "--tokenizer", tmp_path)
    words = "".join(letter for letter in text.lower() if letter.isalpha() or letter.isspace()).split()
    said = "and so my fellow americans ask not what your country can do for you ask what you can do for your country"
    assert words == said.split()


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("which", "times"), [("jfk", 1), ("two_minutes", 11)])
def test_words_in_time(which: str, times: int, tmp_path: Path) -> None:
    """The words and segments of openai-whisper 20250625 (tests/generation/openai_whisper.json), at most 50 ms apart.

    XX
        samples would differ.
    """
    path, audio = unpacked("whisper"), shared_data("jfk.flac")
    write_ranks(tmp_path)
    model = load(path, dtype=torch.float32)
    assert isinstance(model, EncoderDecoder)
    tokenizer, sound = find_tokenizer(tmp_path, model.config.vocab_size), load_audio(audio).repeat(times)
    theirs = json.loads((Path(__file__).parents[1] / "generation" / "openai_whisper.json").read_text())[which]
    for words in (True, False):
        engine = Engine(model, max_tokens=8192, max_rows=1)
        scribe, options = Scribe(model, tokenizer, None, "transcribe"), Options(words=words, temperatures=(0.0,))
        found = run_local(engine, transcribe(scribe, sound, options)).segments
        if words:
            ours = [(word.text, word.start, word.end) for segment in found for word in segment.words]
            expected = theirs["words"]
        else:
            ours = [(segment.text, segment.start, segment.end) for segment in found]
            expected = theirs["segments"]
        assert [text for text, _, _ in ours] == [text for text, _, _ in expected]
        for one, other in zip(ours, expected, strict=True):
            assert one[1:] == pytest.approx(other[1:], abs=0.05)
