"""Translating on the CPU: a model of opus-mt's shape (6 + 6 layers, 512 wide, 58,101 words), beside CTranslate2 and transformers.

    .venv-bench/bin/python benchmarks/cpu/translate.py                    64 and 256 sentences, greedy and with 4 beams
    .venv-bench/bin/python benchmarks/cpu/translate.py --lines val.en.gz  as long as these lines, three tokens for two words
    .venv-bench/bin/python benchmarks/cpu/translate.py --shared           others use this computer too: one thread, CPU time

The weights are random, with a head of its own (a tied one would say the same word again and again). The end of a text is made as
likely as it takes for texts to be about as long as their sources, so that they end one by one, as real ones do. All contenders read
the same weights, and get ids: nobody's time has tokenising in it. Before anything is timed, all must write the same texts greedily
in float32, and ours and transformers' must be the same with beams. CTranslate2 ends a search earlier, it seems when its best text
is finished; how many of its texts are ours is shown.
"""

from __future__ import annotations

import argparse
import gzip
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import clearhead as ch
from benchmarks.common.results import Table, save
from benchmarks.common.timing import how_timed, interleave, ratio, spread
from clearhead.models import EncoderDecoder
from clearhead.quantization.integer import quantize

EOS, PAD, WORDS = 0, 58_100, 58_101
MOST = 64  # new tokens of a text
EARLY = (
    ", early_stopping"  # a search of as many finished texts as beams is over, which is nearer to what CTranslate2 does
)
Texts = list[list[int]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sentences", type=int, nargs="*", default=[64, 256], help="so many at once")
    parser.add_argument("--single", type=int, default=8, help="so many one by one; 0: none")
    parser.add_argument("--beams", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--lines", type=Path, help="a text file (.gz too), for the lengths of its lines")
    parser.add_argument(
        "--only", nargs="*", default=[""], help="contenders with such words in their names, beside ours in float32"
    )
    parser.add_argument("--shared", action="store_true", help="others use this computer too: one thread, CPU time")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    if args.shared:
        torch.set_num_threads(1)
    start = time.perf_counter()
    sources = make_sources(max(*args.sentences, args.single), args.lines)
    tables: list[Table] = []
    with tempfile.TemporaryDirectory() as name, torch.no_grad():
        contenders = {
            name: run
            for name, run in make(Path(name), sources).items()
            if name == "clearhead float32" or any(word in name for word in args.only)
        }
        for beams in args.beams:
            if args.single:
                tables.append(measure(contenders, sources[: args.single], beams, True, args.rounds, args.shared))
            for n in args.sentences:
                tables.append(measure(contenders, sources[:n], beams, False, args.rounds, args.shared))
            for table in tables[-1 - len(args.sentences) :]:
                table.show(Console())
    save("cpu_translate", tables, seconds=time.perf_counter() - start)


def make_sources(n: int, lines: Path | None) -> Texts:
    """Random ids, as many as a caption has tokens: 6 to 40, 15 in the middle."""
    draw = random.Random(0)
    if lines is None:
        lengths = [min(40, max(6, round(draw.gauss(15, 5)))) for _ in range(n)]
    else:
        opened = gzip.open if lines.suffix == ".gz" else open
        with opened(lines, "rt", encoding="utf-8") as text:
            lengths = [round(1.5 * len(line.split())) for line in text][:n]
    return [[*(draw.randint(2, PAD - 1) for _ in range(length)), EOS] for length in lengths]


Contender = Callable[[Texts, int, bool], Texts]  # sources, beams, one by one: texts


def make(folder: Path, sources: Texts) -> dict[str, Contender]:
    from transformers import GenerationConfig, MarianConfig, MarianMTModel

    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(d_model=512, encoder_layers=6, decoder_layers=6, max_position_embeddings=512)
    sizes |= dict(encoder_attention_heads=8, decoder_attention_heads=8, encoder_ffn_dim=2048, decoder_ffn_dim=2048)
    told = dict(eos_token_id=EOS, pad_token_id=PAD, decoder_start_token_id=PAD, forced_eos_token_id=None)
    config = MarianConfig(
        vocab_size=WORDS,
        activation_function="swish",
        scale_embedding=True,
        init_std=0.05,
        tie_word_embeddings=False,
        share_encoder_decoder_embeddings=False,
        **sizes,
        **told,
    )
    theirs = MarianMTModel(config).eval()
    for name, weight in theirs.named_parameters():
        if name.endswith(("out_proj.weight", "fc2.weight")):
            weight *= 0.3  # the last word and its place are still heard at the top
    theirs.generation_config = GenerationConfig(**told, bad_words_ids=[[PAD]])
    theirs.model.decoder.embed_tokens.weight[PAD] = 0  # where a text starts
    theirs.save_pretrained(folder / "hf")
    model = ch.load(folder / "hf")
    assert isinstance(model, EncoderDecoder)
    theirs.final_logits_bias[0] = likely_end(model, sources[:32])
    theirs.save_pretrained(folder / "hf")
    found: dict[str, Contender] = {}
    for kind in ("float32", "int8", "w8a8"):
        model = ch.load(folder / "hf")
        assert isinstance(model, EncoderDecoder)
        held = model if kind == "float32" else quantize(model, kind)
        found[f"clearhead {kind}"] = in_clearhead(held)
        found[f"clearhead {kind}{EARLY}"] = in_clearhead(held, early=True)
    for kind in ("float32", "int8"):
        found[f"CTranslate2 {kind}"] = in_ctranslate2(theirs, folder, kind)
    found["transformers float32"] = in_transformers(MarianMTModel.from_pretrained(folder / "hf").eval())
    return found


def likely_end(model: EncoderDecoder, sources: Texts) -> Tensor:
    """The bias on the end's logit, found by halving, with which texts are about as long as their sources."""
    bias, wanted, mean = model.get_buffer("head.bias"), statistics.mean(map(len, sources)), 0.0
    low, high = 0.0, 40.0
    for _ in range(12):
        bias[EOS] = (low + high) / 2
        mean = statistics.mean(map(len, ch.translate(model, sources, beams=1, max_new_tokens=MOST)))
        low, high = ((low + high) / 2, high) if mean > wanted else (low, (low + high) / 2)
    print(f"sources of {wanted:.1f} tokens on average, texts of {mean:.1f}")
    return bias


def in_clearhead(model: EncoderDecoder, early: bool = False) -> Contender:
    options: dict[str, Any] = dict(max_new_tokens=MOST, early_stopping=early)

    def run(sources: Texts, beams: int, single: bool) -> Texts:
        parts = [[source] for source in sources] if single else [sources]
        return [text for part in parts for text in ch.translate(model, part, beams=beams, **options)]

    return run


def in_transformers(model: Any, batch: int = 32) -> Contender:
    def run(sources: Texts, beams: int, single: bool) -> Texts:
        order = sorted(range(len(sources)), key=lambda i: -len(sources[i]))
        found: Texts = [[] for _ in sources]
        for first in range(0, len(order), 1 if single else batch):
            part = order[first : first + (1 if single else batch)]
            width = max(len(sources[i]) for i in part)
            ids = torch.tensor([sources[i] + [PAD] * (width - len(sources[i])) for i in part])
            real = torch.tensor([[at < len(sources[i]) for at in range(width)] for i in part]).long()
            texts = model.generate(ids, attention_mask=real, num_beams=beams, do_sample=False, max_new_tokens=MOST)
            for i, text in zip(part, texts[:, 1:].tolist(), strict=True):
                found[i] = text[: text.index(EOS)] if EOS in text else [id for id in text if id != PAD]
        return found

    return run


def in_ctranslate2(theirs: Any, folder: Path, kind: str) -> Contender:
    import ctranslate2
    from ctranslate2.converters.transformers import MarianMTLoader

    place = folder / f"ct2-{kind}"
    spec = MarianMTLoader().get_model_spec(theirs)
    words = ["</s>", "<unk>", *(f"t{id}" for id in range(2, PAD))]
    spec.register_source_vocabulary(words)
    spec.register_target_vocabulary(words)
    spec.config.eos_token = spec.config.decoder_start_token = "</s>"
    spec.config.unk_token = "<unk>"
    spec.validate()
    spec.optimize(quantization=None if kind == "float32" else kind)
    place.mkdir()
    spec.save(str(place))
    translator = ctranslate2.Translator(str(place), intra_threads=torch.get_num_threads(), compute_type=kind)
    ids = {word: id for id, word in enumerate(words)}
    # Batches by tokens, sources of like lengths together: the library's own advice for throughput.
    batches: dict[str, Any] = dict(max_batch_size=2048, batch_type="tokens")

    def run(sources: Texts, beams: int, single: bool) -> Texts:
        given = [[words[id] for id in source] for source in sources]
        texts: list[Any] = []
        for part in [[one] for one in given] if single else [given]:
            texts += translator.translate_batch(
                part, beam_size=beams, min_decoding_length=0, max_decoding_length=MOST, **batches
            )
        return [[ids[word] for word in text.hypotheses[0]] for text in texts]

    return run


def measure(
    contenders: dict[str, Contender], sources: Texts, beams: int, single: bool, rounds: int, shared: bool
) -> Table:
    if beams == 1:  # nothing to stop early
        contenders = {name: run for name, run in contenders.items() if not name.endswith(EARLY)}
    found = {name: run(sources, beams, single) for name, run in contenders.items()}
    ours = found["clearhead float32"]
    alike = {name: sum(a == b for a, b in zip(texts, ours, strict=True)) for name, texts in found.items()}
    for name in ("CTranslate2 float32", "transformers float32") if beams == 1 else ("transformers float32",):
        if alike.get(name, len(sources)) < len(sources):
            raise SystemExit(f"{name} writes {alike[name]} of {len(sources)} texts as clearhead does, beams={beams}")
    calls = {name: (lambda run=run: run(sources, beams, single)) for name, run in contenders.items()}
    times = interleave(calls, rounds=rounds, warmup=0, shared=shared)
    rows: list[list[str]] = []
    for name in contenders:
        middle, tokens = statistics.median(times[name]), sum(map(len, found[name]))
        rows.append(
            [
                name,
                f"{len(sources) / middle:,.1f}",
                f"{tokens / middle:,.0f}",
                f"{spread(times[name]):.0%}",
                f"{alike[name]}",
                "" if name == "clearhead float32" else f"{ratio(times, 'clearhead float32', name):.2f} x",
            ]
        )
    how = "one by one" if single else "at once"
    return Table(
        title=f"{len(sources)} sentences {how}, {'greedy' if beams == 1 else f'{beams} beams'}",
        columns=["", "sentences/s", "tokens/s", "spread", "texts as ours", "ours (float32) is"],
        rows=rows,
        note=f"{torch.get_num_threads()} threads; {how_timed(rounds, shared)}",
        raw={"times": times, "tokens": {name: sum(map(len, texts)) for name, texts in found.items()}},
    )


if __name__ == "__main__":
    main()
