"""SST-2: a classifier from scratch, and one that has read first. Test accuracy of run folders, and text to read first.

    python benchmarks/sst2.py prose enwik8.gz train.tsv prose.txt     # sentences of Wikipedia and the task's own, without labels
    python benchmarks/sst2.py score runs/x test.tsv                   # accuracy of a run's model on the test split

The recipes are recipes/sst2.toml (from scratch), recipes/prose.toml (masked language model) and recipes/sst2-tuned.toml (started
from the latter with --from).
"""

from __future__ import annotations

import gzip
import random
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

MARKUP = [
    (re.compile(r"&(lt|gt|amp|quot|nbsp);"), " "),
    (re.compile(r"\{\{[^}]*\}\}|<[^>]*>|\[https?:[^\]]*\]"), " "),
    (re.compile(r"\[\[(?:[^|\]]*\|)?([^\]]*)\]\]"), r"\1"),
    (re.compile(r"'{2,}|={2,}"), " "),
]
SENTENCE = re.compile(r"(?<=[.!?]) (?=[A-Z])")


def prose(wiki: Path, table: Path, out: Path, megabytes: int = 30) -> None:
    """One sentence a line, lower-cased and cut at punctuation as SST-2 is, in random order."""
    lines = [line.split("\t")[0] for line in table.read_text(encoding="utf-8").splitlines()] * 5
    size = 0
    with gzip.open(wiki, "rt", encoding="utf-8", errors="replace") as stream:
        for line in stream:
            if len(line) < 120 or line.lstrip()[:1] in "<{|*#:[!&;":
                continue
            for pattern, instead in MARKUP:
                line = pattern.sub(instead, line)
            for sentence in SENTENCE.split(line.strip()):
                if 40 < len(sentence) < 400 and not re.search(r"[\[\]{}|<>=]|http", sentence):
                    words = re.sub(r"([,.!?;:()\"])", r" \1 ", sentence.lower())
                    lines.append(" ".join(re.sub(r"(n't|'\w+)\b", r" \1", words).split()))
                    size += len(lines[-1])
            if size > megabytes * 1e6:
                break
    random.Random(0).shuffle(lines)
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines):,} sentences, {size / 1e6:.1f} MB")


def score(folder: Path, table: Path) -> float:
    import torch

    from clearhead.checkpoint import load
    from clearhead.data import load_tokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = load(folder, device=device).eval(), load_tokenizer(folder)
    rows = [line.split("\t") for line in table.read_text(encoding="utf-8").splitlines()]
    correct = 0
    for at in range(0, len(rows), 64):
        part = rows[at : at + 64]
        tokens, real = tokenizer.batch([text for text, _ in part], max_len=model.config.max_len, truncate="right")
        with torch.no_grad():
            guesses = model(tokens.to(device), real.to(device)).argmax(-1).tolist()
        correct += sum(model.config.labels[guess] == label for guess, (_, label) in zip(guesses, part, strict=True))
    print(f"{folder}: {correct / len(rows):.2%} of {len(rows):,}")
    return correct / len(rows)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["prose", wiki, table, out]:
            prose(Path(wiki), Path(table), Path(out))
        case ["score", *folders, table]:
            for folder in folders:
                score(Path(folder), Path(table))
        case _:
            sys.exit(__doc__)
