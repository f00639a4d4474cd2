"""The list of commands. A command's module is imported when it is called; `clearhead --help` needs names and summaries only."""

from __future__ import annotations

import importlib
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from clearhead.cli.examples import help_of

# In the order of --help: each command, and the first line of its own help.
SUMMARIES = {
    "presets": "Show every named size: name, family, shape, layers, width, heads, parameters.",
    "demo": "Train a small model in about two minutes, on data that is always there, and look at what it learnt.",
    "train": "Train a model on your own texts, pairs, labels or pictures; resumable to the bit.",
    "generate": "Continue a prompt; the text is shown while it is generated.",
    "translate": "Translate each line, in order, to standard output; an empty line stays empty.",
    "evaluate": "Measure a model: perplexity and bits per byte of texts, BLEU and chrF of translations, accuracy of labels.",
    "embed": "Turn each line of a file into a vector, in order: a row of numbers for each text.",
    "classify": "Say which class each text (a line) or picture (a file) belongs to: class, probability, input, separated by tabs.",
    "transcribe": "Transcribe a sound file of any length, with times.",
    "contacts": "Predict the contacts of proteins from the attention of an ESM-2, by its contact head.",
    "variants": "Score variants by masked marginals: log p(mutant) - log p(wild) at masked positions, in nats; "
    "above 0 is likelier.",
    "cost": "Say what a model takes: parameters, operations, memory and time, part by part.",
    "draw": "Draw a model from its config: every part with its size, parameters and operations. Nothing is loaded or built.",
    "explore": "Look inside a model: opens a page in the browser, served from this machine to this machine only.",
    "serve": "Serve models over HTTP: /v1/completions, /v1/chat/completions, /v1/embeddings, /v1/translate, "
    "/v1/audio/transcriptions.",
    "check": "Prove on your own model that every way to compute it agrees; exits with 1 if a law is broken.",
    "export": "Write a model for transformers, ONNX Runtime, llama.cpp, CTranslate2 or ExecuTorch, and check it by "
    "running that program.",
    "doctor": "Say what this machine has: torch, GPU, kernels, extras, speeds; what is missing, and the command for it.",
    "learn": "Learn by writing a Transformer's parts yourself: exercises from softmax to a whole decoder, graded by laws.",
    "experiment": "Measure what the chapters of the book claim: one question each, in under a minute, with a table, a "
    "figure and a page.",
}


class CommandList(TyperGroup):
    """All commands, none of them imported."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, summary in SUMMARIES.items():
            self.add_command(LazyCommand(name, help=summary))


class LazyCommand(TyperCommand):
    """A command that is imported when it is called, completed, or asked for its own help."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return load_command(str(self.name)).make_context(info_name, args, parent, **extra)


def load_command(name: str) -> Any:
    """The command itself, with its options; for `learn` the group of its commands."""
    module = importlib.import_module(f"clearhead.cli.{name}")
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.callback()(lambda: None)
    if hasattr(module, "run"):
        app.command(name, help=help_of(name, module.run.__doc__))(module.run)
    else:
        app.add_typer(module.app, name=name, help=help_of(name, module.show.__doc__))
    group: Any = typer.main.get_command(app)
    return group.commands[name]
