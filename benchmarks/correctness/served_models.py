"""Real models through `clearhead serve`, with the openai client: one answer of each kind, printed.

    .venv/bin/python benchmarks/correctness/served_models.py --chat SmolLM2-135M-Instruct.gguf --embed MINILM --speech tiny.en.pt \\
        --sound speech.flac --dates RUN

Each path is optional. `--dates` is a folder that `clearhead demo` has trained.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import openai

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common.server import served

QUESTIONS = ["What is the capital of France?", "Write one sentence about the sea."]
TEXTS = ["A man is playing a guitar.", "Somebody makes music.", "The stock market fell today."]


def chat(client: openai.OpenAI) -> None:
    for question in QUESTIONS:
        began, first, text = time.perf_counter(), 0.0, ""
        messages: Any = [{"role": "user", "content": question}]
        n = 0
        for chunk in client.chat.completions.create(
            model="chat", messages=messages, temperature=0, max_tokens=40, stream=True
        ):
            text += chunk.choices[0].delta.content or ""
            first, n = first or time.perf_counter() - began, n + 1
        seconds = time.perf_counter() - began
        print(f"chat: {question} -> {text!r} (first token after {first:.2f} s, {n} events in {seconds:.1f} s)")


def embed(client: openai.OpenAI) -> None:
    vectors = [each.embedding for each in client.embeddings.create(model="embed", input=TEXTS).data]
    for other in (1, 2):
        cosine = sum(a * b for a, b in zip(vectors[0], vectors[other], strict=True))
        print(f"embeddings: {TEXTS[0]!r} and {TEXTS[other]!r}: {cosine:.3f} ({len(vectors[0])} numbers)")


def transcribe(client: openai.OpenAI, sound: Path) -> None:
    began = time.perf_counter()
    text = client.audio.transcriptions.create(model="speech", file=sound).text
    print(f"transcription of {sound.name}: {text!r} ({time.perf_counter() - began:.1f} s)")


def read_dates(url: str) -> None:
    body: dict[str, Any] = {
        "model": "dates",
        "input": ["14 July 1789", "3. Oktober 1990"],
        "alignment": True,
        "n_best": 2,
    }
    body["explain"] = {"attention": [{"site": "decoder.blocks.1.cross", "head": 0}]}
    asked = Request(f"{url}/v1/translate", json.dumps(body).encode(), {"content-type": "application/json"})
    with urlopen(asked) as answer:
        found = json.load(answer)["data"]
    for text, each in zip(body["input"], found, strict=True):
        best, second = each["translations"]
        print(f"translate: {text!r} -> {best['text']!r} ({best['score']:.4f}), then {second['text']!r}")
        source, target = best["alignment"]["source"], best["alignment"]["target"]
        for name, row in zip(target, best["alignment"]["weights"], strict=True):
            print(f"    {name!r} looks most at {source[row.index(max(row))]!r} ({max(row):.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("chat", "embed", "speech", "sound", "dates"):
        parser.add_argument(f"--{name}", type=Path)
    asked = parser.parse_args()
    models = {name: getattr(asked, name) for name in ("chat", "embed", "speech", "dates") if getattr(asked, name)}
    with served(models) as (url, _):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        print("served:", ", ".join(model.id for model in client.models.list()))
        if asked.chat:
            chat(client)
        if asked.embed:
            embed(client)
        if asked.speech and asked.sound:
            transcribe(client, asked.sound)
        if asked.dates:
            read_dates(url)


if __name__ == "__main__":
    main()
