"""Transcription on the CPU with word times: seconds for a sound file, beside openai-whisper and faster-whisper where there are any.

    python benchmarks/cpu/transcribe.py tiny.en.pt gpt2.tiktoken jfk.flac --repeat 11 --rounds 3
    python benchmarks/cpu/transcribe.py tiny.en.pt gpt2.tiktoken jfk.flac --faster-whisper converted/

The file is repeated (11 x 11 s are two minutes). All decode greedily, at temperature 0 only, and time words; their words and times
are compared with openai-whisper's. `--faster-whisper` is a folder that ct2-transformers-converter made of the same weights.
A package that is missing is named, and left out.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import clearhead as ch
from benchmarks.common.timing import interleave, spread
from clearhead.data.audio import RATE, load_audio
from clearhead.generation import Engine
from clearhead.generation.scribe import Scribe, find_tokenizer
from clearhead.generation.transcription import Options, run_local, transcribe

Words = list[tuple[str, float, float]]


def clearhead(weights: Path, tokenizer: Path, sound: torch.Tensor) -> Callable[[], Words]:
    model = ch.load(weights, dtype=torch.float32)
    assert isinstance(model, ch.EncoderDecoder)
    names, options = find_tokenizer(tokenizer, model.config.vocab_size), Options(words=True, temperatures=(0.0,))

    def run() -> Words:
        engine = Engine(model, max_tokens=8192, max_rows=1)
        found = run_local(engine, transcribe(Scribe(model, names, "en", "transcribe"), sound, options))
        return [(word.text, word.start, word.end) for segment in found.segments for word in segment.words]

    return run


def openai_whisper(weights: Path, sound: torch.Tensor, heads: tuple[tuple[int, int], ...]) -> Callable[[], Words]:
    import whisper  # pyright: ignore[reportMissingImports]

    model = whisper.load_model(str(weights), device="cpu").float()
    if heads:  # its own file names none when it is read from a path
        mask = torch.zeros(model.dims.n_text_layer, model.dims.n_text_head, dtype=torch.bool)
        mask[tuple(torch.tensor(heads).T)] = True
        model.register_buffer("alignment_heads", mask.to_sparse(), persistent=False)

    def run() -> Words:
        options = dict(word_timestamps=True, fp16=False, temperature=0.0, language="en")
        found = whisper.transcribe(model, sound.numpy(), **options)
        return [(word["word"], word["start"], word["end"]) for part in found["segments"] for word in part["words"]]

    return run


def faster_whisper(folder: str, sound: torch.Tensor) -> Callable[[], Words]:
    from faster_whisper import WhisperModel  # pyright: ignore[reportMissingImports]

    model = WhisperModel(folder, device="cpu", compute_type="float32", cpu_threads=torch.get_num_threads())

    def run() -> Words:
        options = dict(word_timestamps=True, beam_size=1, temperature=0.0, language="en", vad_filter=False)
        parts, _ = model.transcribe(sound.numpy(), **options)
        return [(word.word, word.start, word.end) for part in parts for word in part.words]

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description="Time a transcription with word times.")
    parser.add_argument("weights", type=Path, help="OpenAI's .pt")
    parser.add_argument("tokenizer", type=Path, help="gpt2.tiktoken or multilingual.tiktoken")
    parser.add_argument("audio", type=Path)
    parser.add_argument("--repeat", type=int, default=11)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--faster-whisper", metavar="FOLDER", help="the same weights, converted")
    given = parser.parse_args()
    sound = load_audio(given.audio).repeat(given.repeat)
    heads = ch.load(given.weights).generation.alignment_heads
    contenders = {"clearhead": clearhead(given.weights, given.tokenizer, sound)}
    try:
        contenders["openai-whisper"] = openai_whisper(given.weights, sound, heads)
    except ImportError as error:
        print(f"openai-whisper is left out: {error}")
    if given.faster_whisper:
        contenders["faster-whisper"] = faster_whisper(given.faster_whisper, sound)
    else:
        print("faster-whisper is left out: no --faster-whisper FOLDER")
    found = {who: run() for who, run in contenders.items()}
    times = interleave(contenders, rounds=given.rounds, warmup=0)
    seconds = len(sound) / RATE
    print(f"{seconds:.0f} s of sound, {torch.get_num_threads()} threads, float32, greedy, with word times")
    for who, taken in times.items():
        middle = statistics.median(taken)
        print(
            f"{who:16} {middle:7.2f} s  {seconds / middle:6.1f} x real time  spread {spread(taken):.1%}  {compare(found, who)}"
        )


def compare(found: dict[str, Words], who: str, base: str = "openai-whisper") -> str:
    if who == base or base not in found:
        return f"{len(found[who])} words"
    ours, theirs = found[who], found[base]
    if [word for word, _, _ in ours] != [word for word, _, _ in theirs]:
        return f"{len(ours)} words, not those of {base}"
    apart = max(max(abs(a[1] - b[1]), abs(a[2] - b[2])) for a, b in zip(ours, theirs, strict=True))
    return f"{len(ours)} words, those of {base}, at most {1000 * apart:.0f} ms apart"


if __name__ == "__main__":
    main()
