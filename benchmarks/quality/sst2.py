"""SST-2: a classifier from scratch, and one that has read first. Test accuracy of run folders, and text to read first.

    python benchmarks/quality/sst2.py reviews aclImdb_v1.tar.gz train.tsv reviews.txt   unlabelled text
    python benchmarks/quality/sst2.py score runs/x test.tsv                             test accuracy of a run

The recipes are recipes/sst2.toml (from scratch), recipes/reviews.toml (masked language model) and recipes/sst2-tuned.toml (started
from the latter). The reviews are the unlabelled ones of the Large Movie Review Dataset (Maas et al. 2011).
"""

from __future__ import annotations

import random
import re
import sys
import tarfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

SENTENCE = re.compile(r"(?<=[.!?]) (?=[A-Z])")
WORDS = 90  # a line's at most: as many as fit the model's length


def reviews(archive: Path, table: Path, out: Path) -> None:
    """The unlabelled reviews of the archive in lines of whole sentences, written as SST-2 is, among the task's own sentences."""
    lines = [line.split("\t")[0] for line in table.read_text(encoding="utf-8").splitlines()] * 5
    with tarfile.open(archive) as members:
        for member in members:
            if "/unsup/" in member.name and (file := members.extractfile(member)) is not None:
                lines += cut(file.read().decode("utf-8", "replace").replace("<br />", " "))
    random.Random(0).shuffle(lines)
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines):,} lines")


def cut(text: str) -> list[str]:
    lines: list[list[str]] = [[]]
    for sentence in SENTENCE.split(" ".join(text.split())):
        apart = re.sub(r"([,.!?;:()\"])", r" \1 ", sentence.lower())
        words = re.sub(r"(n't|'\w+)\b", r" \1", apart).split()
        if lines[-1] and len(lines[-1]) + len(words) > WORDS:
            lines.append([])
        lines[-1] += words
    return [" ".join(line) for line in lines if line]


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
        case ["reviews", archive, table, out]:
            reviews(Path(archive), Path(table), Path(out))
        case ["score", *folders, table]:
            for folder in folders:
                score(Path(folder), Path(table))
        case _:
            sys.exit(__doc__)
