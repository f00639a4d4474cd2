"""What a few rows cost on the CPU: each kernel's reading speed beside torch's, and tokens a second of GPT-2 beside other programs.

    .venv-bench/bin/python benchmarks/cpu/decode.py                 kernels, then GPT-2 (124M, random weights)
    .venv-bench/bin/python benchmarks/cpu/decode.py --kernels       kernels alone
    .venv-bench/bin/python benchmarks/cpu/decode.py --batch 1 --rounds 9 --llama-bench llama.cpp/build/bin/llama-bench
    .venv-bench/bin/python benchmarks/cpu/decode.py --prompt 512 --llama-bench ...     how fast a prompt is read
    .venv-bench/bin/python benchmarks/cpu/decode.py --prompt 512 --model SmolLM2.gguf  the same, of a LLaMA in a file

Contenders run in turns; GB/s counts the bytes that the weights are stored in.
"""

from __future__ import annotations

import argparse
import functools
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import clearhead as ch
from benchmarks.common.timing import how_timed, interleave
from clearhead.exports import gguf_export
from clearhead.kernels import native
from clearhead.limits import QUANTIZATIONS
from clearhead.quantization.integer import Int4, Int8, quantize

SHAPES = [(2304, 768), (768, 768), (3072, 768), (768, 3072)]  # of GPT-2's blocks
LAYERS = 12


def kernels(rounds: int, shared: bool) -> None:
    weights = [torch.randn(n, d) for _ in range(LAYERS) for n, d in SHAPES]
    forms = {8: Int8, 4: Int4}
    packed = {
        kind: [forms[bits](weight, inputs=inputs) for weight in weights]
        for kind, (bits, inputs) in QUANTIZATIONS.items()
    }
    fbgemm = [torch.ao.nn.quantized.dynamic.Linear.from_float(_with_config(weight)) for weight in weights]
    sizes = {
        "ours fp32": sum(w.nbytes for w in weights),
        **{f"ours {kind}": sum(t.nbytes for p in held for t in p.buffers()) for kind, held in packed.items()},
        "torch fp32": sum(w.nbytes for w in weights),
        "torch int8 (fbgemm, dynamic)": sum(w.numel() for w in weights),
    }
    print(f"GPT-2's 48 matrices, {torch.get_num_threads()} threads; native: {native.why_not() or 'yes'}")
    for rows in (1, 2, 4, 8, 16, 32, 64, 128):
        inputs = [torch.randn(rows, d) for _ in range(LAYERS) for _, d in SHAPES]
        contenders = {
            "ours fp32": _each(lambda x, i: native.linear(x, weights[i], None), inputs),
            "torch fp32": _each(lambda x, i: F.linear(x, weights[i]), inputs),
            "ours int8": _each(lambda x, i: packed["int8"][i].product(x, None), inputs),
            "ours w8a8": _each(lambda x, i: packed["w8a8"][i].product(x, None), inputs),
            "torch int8 (fbgemm, dynamic)": _each(lambda x, i: fbgemm[i](x), inputs),
            "ours int4": _each(lambda x, i: packed["int4"][i].product(x, None), inputs),
            "ours w4a8": _each(lambda x, i: packed["w4a8"][i].product(x, None), inputs),
        }
        times = interleave(contenders, rounds=rounds, shared=shared)
        for name in contenders:
            middle, best = statistics.median(times[name]), min(times[name])
            print(
                f"{rows:4} rows  {name:30} {middle * 1e3:8.2f} ms (best {best * 1e3:7.2f})  "
                f"{sizes[name] / middle / 1e9:6.1f} GB/s (best {sizes[name] / best / 1e9:5.1f})"
            )


def gpt2(rounds: int, shared: bool, batch: int, llama_bench: str | None) -> None:
    """32 tokens read, 128 written a text; the same random weights everywhere."""
    from transformers import GPT2Config, GPT2LMHeadModel

    threads, new = torch.get_num_threads(), 128
    prompts = torch.randint(0, 50257, (batch, 32), generator=torch.Generator().manual_seed(0))
    theirs: Any = GPT2LMHeadModel(GPT2Config()).eval()
    theirs.generation_config.pad_token_id = theirs.generation_config.eos_token_id = None
    contenders: dict[str, Callable[[], object]] = {}
    speeds: dict[str, list[float]] = {}  # of programs that time themselves
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        for kind in ("fp32", *QUANTIZATIONS):
            model: Any = ch.load(folder)
            if kind != "fp32":
                quantize(model, kind)
            contenders[f"clearhead {kind}"] = functools.partial(
                ch.generate, model, prompts.tolist(), max_new_tokens=new, eos=()
            )
        if not shared and batch == 1 and llama_bench:
            for kind in ("F32", "Q8_0", "Q4_0"):
                file = write_gguf(theirs, f"{folder}/{kind}.gguf", kind)
                name = f"llama.cpp {kind}"
                speeds[name] = []
                contenders[name] = functools.partial(run_llama, llama_bench, file, threads, new, speeds[name])
        for kind in ("float32", "int8"):
            contenders[f"CTranslate2 {kind}"] = in_ctranslate2(
                theirs, f"{folder}/{kind}", kind, threads, prompts.tolist(), new
            )
        contenders["transformers fp32"] = lambda: theirs.generate(prompts, max_new_tokens=new, do_sample=False)
        times = interleave(contenders, rounds=rounds, shared=shared)
    print(f"GPT-2 124M, batch {batch}, 32 + {new} tokens, {threads} threads, {how_timed(rounds, shared)}")
    for name in contenders:
        found = speeds[name][1:] if name in speeds else [batch * new / each for each in times[name]]
        print(f"{name:20} {statistics.median(found):7.1f} tokens/s (best {max(found):6.1f})")


def read_prompt(rounds: int, shared: bool, length: int, model: str | None, llama_bench: str | None) -> None:
    """The first token after a prompt of `length` tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    threads, new = torch.get_num_threads(), 1
    contenders: dict[str, Callable[[], object]] = {}
    speeds: dict[str, list[float]] = {}  # of programs that time themselves
    with tempfile.TemporaryDirectory() as folder:
        theirs: Any = None
        if model is None:
            theirs = GPT2LMHeadModel(GPT2Config()).eval()
            theirs.save_pretrained(folder)
        for kind in ("fp32", *QUANTIZATIONS):
            ours: Any = ch.load(model or folder, quantize=None if kind == "fp32" else kind)
            prompt = torch.randint(0, ours.config.vocab_size, (length,), generator=torch.Generator().manual_seed(0))
            contenders[f"clearhead {kind}"] = functools.partial(
                ch.generate, ours, [prompt.tolist()], max_new_tokens=new, eos=()
            )
        for kind in ("F32", "Q8_0", "Q4_0") if llama_bench else ():
            file = Path(folder) / f"{kind}.gguf"
            if model is None:
                write_gguf(theirs, str(file), kind)
            else:
                gguf_export.write(ch.load(model), ch.load_tokenizer(model), file, kind)
            name = f"llama.cpp {kind}"
            speeds[name] = []
            program = functools.partial(read_with_llama, str(llama_bench), str(file), threads, length)
            contenders[name] = functools.partial(
                lambda program, found: found.append(program(shared)), program, speeds[name]
            )
        times = interleave(contenders, rounds=rounds, shared=shared)
    what = Path(model).stem if model else "GPT-2 124M"
    print(f"{what}, a prompt of {length} tokens, {threads} threads, {how_timed(rounds, shared)}")
    for name in contenders:
        found = speeds[name][1:] if name in speeds else [length / each for each in times[name]]
        print(f"{name:20} {statistics.median(found):7.1f} tokens/s (best {max(found):6.1f})")


def read_with_llama(program: str, file: str, threads: int, length: int, shared: bool) -> float:
    """Tokens a second; where CPU time counts, the difference between three readings and one, so that loading is left out."""
    words = [program, "-m", file, "-t", str(threads), "-p", str(length), "-n", "0", "-o", "json", "-r"]

    def seconds(readings: int) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([*words, str(readings)], capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if shared:
            return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        (found,) = json.loads(done.stdout)
        return found["avg_ns"] / 1e9

    return length / ((seconds(3) - seconds(1)) / 2 if shared else seconds(1))


def in_ctranslate2(
    model: Any, folder: str, kind: str, threads: int, prompts: list[list[int]], new: int
) -> Callable[[], object]:
    """Its own reading of the model, without a tokenizer, and a call that writes."""
    import ctranslate2  # pyright: ignore[reportMissingImports]
    from ctranslate2.converters.transformers import GPT2Loader  # pyright: ignore[reportMissingImports]

    spec = GPT2Loader().get_model_spec(model)
    spec.register_vocabulary([f"t{id}" for id in range(model.config.vocab_size)])
    spec.config.bos_token = spec.config.eos_token = spec.config.unk_token = "t50256"
    spec.validate()
    spec.optimize(quantization=None if kind == "float32" else kind)
    Path(folder).mkdir()
    spec.save(folder)
    generator = ctranslate2.Generator(folder, intra_threads=threads, compute_type=kind)
    texts = [[f"t{id}" for id in prompt] for prompt in prompts]

    def write() -> None:
        found = generator.generate_batch(
            texts, max_length=new, min_length=new, include_prompt_in_result=False, sampling_topk=1, end_token=[]
        )
        assert all(len(each.sequences_ids[0]) == new for each in found)

    return write


def write_gguf(model: Any, file: str, kind: str) -> str:
    """GPT-2 as llama.cpp reads it, without words; the embedding, which is also the head, takes at least 8 bits, as ours."""
    import gguf

    config, kinds = model.config, gguf.GGMLQuantizationType
    writer = gguf.GGUFWriter(file, "gpt2")
    writer.add_context_length(config.n_positions)
    writer.add_embedding_length(config.n_embd)
    writer.add_feed_forward_length(4 * config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_head_count(config.n_head)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    names = {"ln_1": "attn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "ln_2": "ffn_norm"}
    names |= {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}
    for name, weight in model.transformer.state_dict().items():
        *place, last = name.split(".")
        outer = {"wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm"}.get(place[0])
        ours = f"{outer or f'blk.{place[1]}.{names[chr(46).join(place[2:])]}'}.{last}"
        numbers = (weight.T if weight.ndim == 2 and outer is None else weight).contiguous().numpy()
        stays = kind == "F32" or weight.ndim == 1 or ours.startswith("position")
        to = kinds.F32 if stays else kinds.Q8_0 if outer else kinds[kind]
        data = numbers if stays else gguf.quants.quantize(numbers, to)
        writer.add_tensor(ours, data, raw_dtype=to)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def run_llama(program: str, file: str, threads: int, new: int, speeds: list[float]) -> None:
    """It says itself how long prompt and text took, loading left out."""
    command = [
        program,
        "-m",
        file,
        "-t",
        str(threads),
        "-p",
        "0",
        "-n",
        "0",
        "-pg",
        f"32,{new}",
        "-r",
        "1",
        "-o",
        "json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (found,) = json.loads(done.stdout)
    speeds.append(new / (found["avg_ns"] / 1e9))


def _each(call: Callable[[Tensor, int], Tensor], inputs: list[Tensor]) -> Callable[[], object]:
    def run() -> None:
        for i, x in enumerate(inputs):
            call(x, i)

    return run


def _with_config(weight: Tensor) -> torch.nn.Linear:
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data = weight
    layer.qconfig = torch.ao.quantization.default_dynamic_qconfig  # type: ignore[assignment]
    return layer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--kernels", action="store_true", help="leave GPT-2 out")
    parser.add_argument("--batch", type=int, nargs="*", default=[], help="GPT-2 alone, with so many texts at once")
    parser.add_argument("--prompt", type=int, help="the first token after so many, alone")
    parser.add_argument("--model", help="with --prompt: a LLaMA in a file, instead of GPT-2's shape")
    parser.add_argument("--llama-bench", help="llama.cpp's program of that name, to be among the contenders")
    parser.add_argument("--shared", action="store_true", help="others use this computer too: one thread, CPU time")
    args = parser.parse_args()
    if args.shared:
        torch.set_num_threads(1)
    if args.model and not args.prompt:
        parser.error("--model is for --prompt; give both")
    with torch.inference_mode():
        if args.prompt:
            read_prompt(args.rounds, args.shared, args.prompt, args.model, args.llama_bench)
            return
        if not args.batch:
            kernels(args.rounds, args.shared)
        for batch in args.batch or ([] if args.kernels else [1, 8, 32]):
            gpt2(args.rounds, args.shared, batch, args.llama_bench)


if __name__ == "__main__":
    main()
