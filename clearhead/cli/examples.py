"""The examples under each command's --help."""

from __future__ import annotations

import inspect

EXAMPLES = {
    "presets": ("clearhead presets", "clearhead presets --json"),
    "demo": ("clearhead demo", "clearhead demo --out runs/first"),
    "train": (
        "clearhead train language data/*.txt",
        "clearhead train translate --source a.en --target a.de",
        "clearhead train classify reviews.csv",
        "clearhead train classify images/",
        "clearhead train --resume runs/translate-1",
    ),
    "generate": (
        "clearhead generate MODEL 'Once upon a time' --max-new-tokens 100",
        "clearhead generate MODEL 'Once upon a time' --temperature 0.8 --seed 1",
    ),
    "translate": ("clearhead translate MODEL lines.txt", "clearhead translate MODEL lines.txt --beams 5 --n-best 3"),
    "evaluate": (
        "clearhead evaluate MODEL held-out.txt",
        "clearhead evaluate MODEL --source a.en --target a.de --json",
    ),
    "embed": ("clearhead embed MODEL sentences.txt --out vectors.npy",),
    "classify": ("clearhead classify MODEL reviews.txt --top 3", "clearhead classify MODEL reviews.txt --json"),
    "transcribe": (
        "clearhead transcribe MODEL speech.flac --language de",
        "clearhead transcribe MODEL speech.flac --format json --words",
    ),
    "contacts": ("clearhead contacts MODEL proteins.fasta -o map.png -o map.csv",),
    "variants": ("clearhead variants MODEL proteins.fasta", "clearhead variants MODEL protein.fasta -m A23V"),
    "cost": (
        "clearhead cost gpt3-175b --length 2048",
        "clearhead cost gpt2 --measure --json",
    ),
    "draw": ("clearhead draw gpt2 --out gpt2.svg", "clearhead draw gpt2 --set n_kv_heads=4 --set norm=rms --json"),
    "explore": (
        "clearhead explore MODEL 'The cat sat'",
        "clearhead explore MODEL 'The cat sat' --export page.html",
    ),
    "serve": ("clearhead serve MODEL --port 8000",),
    "check": ("clearhead check MODEL --text held-out.txt", "clearhead check --resume my.toml --steps 50"),
    "export": ("clearhead export MODEL --to onnx", "clearhead export MODEL --to gguf --type Q8_0 --out model.gguf"),
    "learn": ("clearhead learn", "clearhead learn start attention", "clearhead learn check attention"),
    "experiment": (
        "clearhead experiment",
        "clearhead experiment long-range",
        "clearhead experiment embeddings --text book.txt --seeds 3",
    ),
    "doctor": ("clearhead doctor", "clearhead doctor --json"),
}


def help_of(command: str, text: str | None) -> str:
    """A command's description, and its examples below; the \\b keeps their lines apart."""
    return "\n".join(
        (inspect.cleandoc(text or ""), "", "\b", "Examples:", *(f"  {line}" for line in EXAMPLES[command]))
    )
