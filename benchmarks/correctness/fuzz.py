"""Coverage-guided fuzzing of what reads foreign bytes: checkpoints, GGUF, tokenizers, the bodies of requests.

    pip install -c constraints.txt -e ".[fuzz,dev]"
    python benchmarks/correctness/fuzz.py                       every reader, two minutes each
    python benchmarks/correctness/fuzz.py gguf --seconds 600    one of them
    python benchmarks/correctness/fuzz.py gguf --input FILE     a finding again, with its traceback

atheris (libFuzzer) changes valid files, keeps what reaches new lines of ours, and goes on from there. A reader may refuse an input
with one of our errors, or read it; anything else (another exception, ten seconds, two gigabytes) is a finding, and its input is
kept under --findings. Exits with 1 if there is one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

Target = Callable[[bytes], None]
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
SEPARATOR = b"\n---8<---\n"  # between the files of one input


def checkpoint(folder: Path) -> tuple[Target, list[bytes]]:
    """A folder in Hugging Face's layout: config.json and the weights, both from the input."""
    import clearhead as ch
    from clearhead.errors import ClearheadError

    sizes = dict(n_layers=1, d_model=4, n_heads=2, d_ff=5, vocab_size=7, max_len=5)
    seeds: list[bytes] = []
    for name in ("gpt2", "llama-7b", "bert-base"):
        ch.save(ch.build(ch.preset(name, **sizes), seed=0), folder / name, format="hf")
        seeds.append(
            SEPARATOR.join((folder / name / each).read_bytes() for each in ("config.json", "model.safetensors"))
        )
    victim = folder / "victim"
    victim.mkdir()

    def load(data: bytes) -> None:
        config, _, weights = data.partition(SEPARATOR)
        (victim / "config.json").write_bytes(config)
        (victim / "model.safetensors").write_bytes(weights)
        try:
            ch.load(victim)
        except ClearheadError:
            return

    return load, seeds


def gguf(folder: Path) -> tuple[Target, list[bytes]]:
    """A .gguf file: the model, and the tokenizer inside."""
    import clearhead as ch
    from clearhead.errors import ClearheadError
    from clearhead.exports import export

    sizes = dict(n_layers=1, d_model=32, n_heads=2, d_ff=32, vocab_size=264, max_len=9)
    words = ch.train_tokenizer(texts=["a b"], vocab_size=264)
    model = ch.build(ch.preset("llama-7b", **sizes), seed=0)
    file = folder / "model.gguf"
    for kind in ("F16", "Q4_0"):
        export(model, folder / f"{kind}.gguf", to="gguf", tokenizer=words, type=kind, verify=False)

    def load(data: bytes) -> None:
        file.write_bytes(data)
        for read in (ch.load, ch.load_tokenizer):
            try:
                read(file)
            except ClearheadError:
                continue

    return load, [(folder / f"{kind}.gguf").read_bytes() for kind in ("F16", "Q4_0")]


def tokenizer(folder: Path) -> tuple[Target, list[bytes]]:
    """tokenizer.json with tokenizer_config.json; and the same bytes as the other formats."""
    import clearhead as ch
    from clearhead.errors import ClearheadError

    ch.train_tokenizer(texts=["a b"], vocab_size=264).save(folder / "saved")
    config = json.loads((folder / "saved" / "tokenizer_config.json").read_text())
    del config["checksums"]  # else nothing behind it is reached
    whole = (folder / "saved" / "tokenizer.json").read_bytes()
    small = {"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}, "added_tokens": []}
    seeds = [SEPARATOR.join([each, json.dumps(config).encode()]) for each in (whole, json.dumps(small).encode())]
    seeds += [
        b"[UNK]\n[CLS]\n[SEP]\na\n",
        b"\x0a\x0b\x0a\x05<unk>\x15\0\0\0\0\x18\x02\x0a\x08\x0a\x01a\x15\0\0\x80\xbf",
    ]
    names = ("tokenizer.json", "vocab.txt", "tokenizer.model", "x.tiktoken")

    def load(data: bytes) -> None:
        first, _, second = data.partition(SEPARATOR)
        for name in names:
            place = folder / name.replace(".", "-")
            place.mkdir(exist_ok=True)
            (place / name).write_bytes(first)
            (place / "tokenizer_config.json").write_bytes(second or b"{}")
            try:
                ch.load_tokenizer(place).encode("a b")
            except ClearheadError:
                continue

    return load, seeds


def request(folder: Path) -> tuple[Target, list[bytes]]:
    """The body of a request, as each route reads it."""
    from pydantic import ValidationError
    from starlette.exceptions import HTTPException

    from clearhead.serving import protocol
    from clearhead.serving.bounded_json import check_values

    kinds = [protocol.Completion, protocol.Chat, protocol.Embedding, protocol.Translation]

    def read(data: bytes) -> None:
        try:
            check_values(data)
            body = json.loads(data)
        except (HTTPException, ValueError, RecursionError):  # answered 413 or 422 before a field is read
            return
        for kind in kinds:
            try:
                kind.model_validate(body)
            except ValidationError as error:
                error.errors()

    seeds = [
        {"model": "m", "prompt": ["a"], "stop": ["b"], "logit_bias": {"1": 2.5}, "temperature": 0.5, "n": 2, "seed": 1},
        {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "stream": True},
        {
            "model": "m",
            "messages": [],
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}},
        },
        {"model": "m", "input": [[1, 2]], "encoding_format": "base64"},
        {"model": "m", "prompt": "a", "explain": {"attention": [{"site": "s", "head": 1}], "top": 3}},
    ]
    return read, [json.dumps(each).encode() for each in seeds]


TARGETS = {"checkpoint": checkpoint, "gguf": gguf, "tokenizer": tokenizer, "request": request}


def fuzz(name: str, seconds: int, findings: Path) -> None:
    """In this process, which libFuzzer ends."""
    import atheris

    with atheris.instrument_imports(include=["clearhead"]):
        import clearhead.checkpoint
        import clearhead.serving.protocol  # noqa: F401
    work = Path(tempfile.mkdtemp(prefix="fuzz-"))
    target, seeds = TARGETS[name](work)
    (work / "corpus").mkdir()
    for number, seed in enumerate(seeds):
        target(seed)
        (work / "corpus" / str(number)).write_bytes(seed)
    longest = max(map(len, seeds)) + 200
    options = [f"-max_total_time={seconds}", "-timeout=10", "-rss_limit_mb=6000", "-malloc_limit_mb=2000"]
    options += [f"-artifact_prefix={findings}/{name}-", f"-max_len={longest}", "-print_final_stats=1", "-verbosity=1"]
    atheris.Setup([sys.argv[0], *options, str(work / "corpus")], target, enable_python_coverage=True)
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", choices=[[], *TARGETS], default=[])
    parser.add_argument("--seconds", type=int, default=120)
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"))
    parser.add_argument("--input", type=Path, help="run one input, as a finding left it")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    chosen = args.targets or list(TARGETS)
    args.findings.mkdir(parents=True, exist_ok=True)
    if args.input:
        with tempfile.TemporaryDirectory() as work:
            TARGETS[chosen[0]](Path(work))[0](args.input.read_bytes())
        return 0
    if args.inside:
        fuzz(chosen[0], args.seconds, args.findings.absolute())
    failed = 0
    for name in chosen:
        command = [sys.executable, __file__, name, "--inside", "--seconds", str(args.seconds)]
        ran = subprocess.run([*command, "--findings", str(args.findings)], capture_output=True, text=True, check=False)
        lines = ran.stderr.splitlines()
        stats = [line.removeprefix("stat::") for line in lines if line.startswith("stat::number_of_executed")]
        cover = next((line for line in reversed(lines) if "cov:" in line), "")
        failed += ran.returncode != 0
        print(
            f"{name}: {'a finding' if ran.returncode else 'no finding'} in {args.seconds} s; {' '.join(stats)}; {cover}",
            flush=True,
        )
        if ran.returncode:
            print("\n".join(lines[-30:]), flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
