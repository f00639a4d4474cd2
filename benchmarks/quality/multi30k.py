"""BLEU of a run's translator on a test set, counted in two ways.

    python benchmarks/quality/multi30k.py runs/x test.en.gz test.de.gz [--beams 5] [--length-penalty 1.4]

"tokenised, lower-cased": both sides through Moses' tokenizer (sacremoses) and lower case, then BLEU over those tokens, as
fairseq's example counts it. "sacreBLEU": the text as it is; its signature says how.
"""

from __future__ import annotations

import argparse
import gzip
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def read(file: Path) -> list[str]:
    with gzip.open(file, "rt", encoding="utf-8") as stream:
        return [line.rstrip("\n") for line in stream]


def main() -> None:
    import sacrebleu
    import torch
    from sacremoses import MosesTokenizer

    from clearhead.checkpoint import load
    from clearhead.data import load_tokenizer
    from clearhead.generation import translate
    from clearhead.training import read_run

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--beams", type=int, default=5)
    parser.add_argument("--length-penalty", type=float, default=1.0)
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = load(given.folder, device=device).eval(), load_tokenizer(given.folder)
    lower = read_run(given.folder).data.lowercase
    texts = [text.lower() if lower else text for text in read(given.source)]
    start = time.time()
    sources = [[*tokenizer.encode(text, special=False), tokenizer.eos] for text in texts]
    ids = translate(model, sources, beams=given.beams, length_penalty=given.length_penalty)  # type: ignore[arg-type]
    outputs, wanted = [tokenizer.decode(each) for each in ids], read(given.target)
    moses = MosesTokenizer("de")

    def cut(lines: list[str]) -> list[str]:
        return [moses.tokenize(line.lower(), return_str=True, escape=False) for line in lines]

    tokenised = sacrebleu.corpus_bleu(cut(outputs), [cut(wanted)], tokenize="none", force=True)
    plain = sacrebleu.BLEU(lowercase=lower)
    raw = plain.corpus_score(outputs, [wanted])
    print(f"{given.folder}, {given.source.name}, beam {given.beams}: tokenised, lower-cased {tokenised.score:.2f}; "
          f"sacreBLEU {raw.score:.2f} ({plain.get_signature()}); {len(texts) / (time.time() - start):.0f} sentences/s")  # fmt: skip


if __name__ == "__main__":
    main()
