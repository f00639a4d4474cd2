"""Draws the picture of docs/sound.md: when each word is said.

python docs/pictures/words.py tiny.en.pt gpt2.tiktoken jfk.flac
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import clearhead as ch
from clearhead.data.audio import load_audio, log_mel_of_all
from clearhead.generation import Engine
from clearhead.generation.scribe import Scribe, find_tokenizer
from clearhead.generation.transcription import Options, run_local, transcribe
from clearhead.inside.figure_grid import RISING, PlotFigure

HERE = Path(__file__).parent


def main(weights: str, tokenizer: str, audio: str) -> None:
    model = ch.load(weights, dtype=torch.float32)
    assert isinstance(model, ch.EncoderDecoder)
    scribe = Scribe(model, find_tokenizer(Path(tokenizer), model.config.vocab_size), None, "transcribe")
    sound = load_audio(audio)
    engine = Engine(model, max_tokens=16_384, max_rows=8)
    found = run_local(engine, transcribe(scribe, sound, Options(words=True)))
    words = [word for segment in found.segments for word in segment.words]
    figure = PlotFigure(11.0, 2.6)
    ax = figure.add_axes((0.045, 0.2, 0.945, 0.62))
    mel = log_mel_of_all(sound)
    ax.imshow(mel.numpy(), aspect="auto", origin="lower", cmap=RISING, extent=(0, found.duration, 0, len(mel)))
    for word in words:
        ax.axvline(word.start, color="white", linewidth=0.8)
        ax.text(word.start, len(mel) + 2, word.text.strip(), size=8, rotation=30, va="bottom")
    ax.axvline(words[-1].end, color="white", linewidth=0.8)
    ax.set_xlabel("seconds", size=8)
    ax.set_ylabel("mel band", size=8)
    ax.tick_params(labelsize=8)
    figure.savefig(HERE / "words.png", metadata={"Software": None})


if __name__ == "__main__":
    main(*sys.argv[1:])
