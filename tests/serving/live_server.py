"""A real server of tiny models, started as a user starts it."""

from __future__ import annotations

import os
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import uvicorn

import clearhead as ch
from clearhead.serving.app import make_app
from clearhead.serving.guards import Limits
from clearhead.serving.model_worker import ModelWorker
from clearhead.serving.server import Server

CLEARHEAD = (sys.executable, "-m", "clearhead")
TEXTS = ["the cat sat on the mat", "a dog ran over the hill", '{"yes": 0, "no": 1}', "hello there, how are you?"] * 9
TEMPLATE = "".join(
    [
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}",
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    ]
)


def make_models(folder: Path) -> dict[str, Path]:
    """A decoder with a chat template, a translator and an encoder, each with its tokenizer."""
    names = ["<|user|>", "<|assistant|>", "<|system|>"]
    tokenizer = ch.train_tokenizer(texts=TEXTS, kind="bpe", vocab_size=400, special=["<s>", "</s>", "<pad>", *names])
    tokenizer.chat_template = TEMPLATE
    sizes: dict[str, Any] = dict(n_layers=2, d_model=32, n_heads=4, vocab_size=tokenizer.vocab_size, max_len=512)
    configs = {
        "gpt": ch.preset("gpt2", **sizes),
        "translator": ch.preset("transformer-base", **sizes, d_ff=64),
        "encoder": ch.preset("minilm-l6", **sizes, d_ff=64),
    }
    places: dict[str, Path] = {}
    start, end = tokenizer.bos, tokenizer.eos
    assert end is not None
    for name, config in configs.items():
        model: Any = ch.build(config)
        with torch.no_grad():
            for (
                weight
            ) in model.parameters():  # larger weights than at initialisation, so that removing a head changes the text
                weight.mul_(8 if weight.ndim > 1 else 1)
        model.generation = ch.Generation(bos=start, eos=(end,), decoder_start=start)
        places[name] = ch.save(model, folder / name)
        tokenizer.save(places[name])
    return places


@contextmanager
def served(
    *args: str, env: dict[str, str] | None = None, command: Sequence[str] = CLEARHEAD
) -> Generator[tuple[str, subprocess.Popen[str]]]:
    """`clearhead serve ARGS` on a free port; yields its address."""
    command = [*command, "serve", *args, "--port", "0", "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            said: list[str] = []
            assert process.stderr is not None
            for line in process.stderr:
                said.append(line)
                if found := re.search(r"running on (http://\S+)", line):
                    # A full pipe would block the server.
                    threading.Thread(target=process.stderr.read, daemon=True).start()
                    yield found[1], process
                    break
            else:
                raise AssertionError("".join(said))
        finally:
            process.terminate()
            process.wait(timeout=30)


@contextmanager
def served_here(place: Path, limits: Limits | None = None, **engine: Any) -> Generator[str]:
    """The same server in a thread: it starts faster, since nothing is imported again, but gets no signals."""
    worker = ModelWorker("gpt", ch.load(place), ch.load_tokenizer(place), **engine)
    app, port = make_app({"gpt": worker}, limits), queue.SimpleQueue[int]()
    server = Server(app, uvicorn.Config(app, port=0, log_config=None), [worker], 0.0, port.put)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port.get(timeout=30)}"
    finally:
        server.should_exit = True
        thread.join(timeout=30)
