"""Transcription on the CPU with word times: seconds for a sound file, beside openai-whisper and faster-whisper where there are any.

    python benchmarks/cpu/transcribe.py tiny.en.pt gpt2.tiktoken jfk.flac --repeat 11 --rounds 3
    python benchmarks/cpu/transcribe.py tiny.en.pt gpt2.tiktoken jfk.flac --faster-whisper converted/

The file is repeated (11 x 11 s are two minutes). All decode greedily, at temperature 0 only, and time words; their words and times
are compared with openai-whisper's. `--faster-whisper` is a folder that ct2-transformers-converter made of the same weights, with
its tokenizer.json. A package that is missing is named, and left out. `--shared`, for a machine with other work on it: one thread,
CPU time.
"""

from __future__ import annotations

import argparse
import difflib
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
    parser.add_argument("--shared", action="store_true", help="one thread, and CPU time instead of wall time")
    given = parser.parse_args()
    if given.shared:
        torch.set_num_threads(1)
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
    times = interleave(contenders, rounds=given.rounds, warmup=0, shared=given.shared)
    seconds = len(sound) / RATE
    clock = "CPU time on a shared machine" if given.shared else "wall time"
    print(f"{seconds:.0f} s of sound, {torch.get_num_threads()} threads, {clock}, float32, greedy, with word times")
    for who, taken in times.items():
        middle = statistics.median(taken)
        print(
            f"{who:16} {middle:7.2f} s  {seconds / middle:6.1f} x real time  spread {spread(taken):.1%}  {compare(found, who)}"
        )


def compare(found: dict[str, Words], who: str, base: str = "openai-whisper") -> str:
    if who == base or base not in found:
        return f"{len(found[who])} words"
    ours, theirs = found[who], found[base]
    names = [[word for word, _, _ in words] for words in (ours, theirs)]
    same = [
        block for block in difflib.SequenceMatcher(None, *names, autojunk=False).get_matching_blocks() if block.size
    ]
    pairs = [(ours[block.a + i], theirs[block.b + i]) for block in same for i in range(block.size)]
    apart = [max(abs(a[1] - b[1]), abs(a[2] - b[2])) for a, b in pairs]
    differ = max(len(ours), len(theirs)) - len(pairs)
    times = (
        f"times {1000 * statistics.median(apart):.0f} ms apart in the median, {1000 * max(apart):.0f} at most"
        if apart
        else ""
    )
    return f"{len(ours)} words, {differ} not those of {base}; {times}"


if __name__ == "__main__":
    main()
