"""`clearhead doctor`: what this machine has, how fast it is, and what is missing with the command that brings it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from clearhead.cli.console import wide_console
from clearhead.version import __version__

# What each extra of the package is for.
EXTRAS = {
    "serve": "clearhead serve, and the explorer in a browser",
    "plot": "figures: cost --plot, plots of attention",
    "eval": "BLEU: evaluate on translations",
    "hub": "models by hf:owner/name",
    "audio": "transcribe, and sound in general",
    "pictures": "pictures: classify, train on folders of them",
    "demo": "clearhead demo",
    "parquet": ".parquet tables",
    "datasets": "data sets of Hugging Face",
    "tensorboard": "train.tensorboard",
    "constrain": "--regex, --json-schema, --choice",
    "export": "export to onnx and ctranslate2, and the check of what was written",
    "llamacpp": "the check of what is exported to gguf",
    "executorch": "export to executorch, and the check of what was written",
    "sentencepiece": "tokenizers in SentencePiece's own format",
}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `remedy` is what to do where it is missing; None: all is well."""

    name: str
    found: str
    remedy: str | None = None


def run(
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Say what this machine has: torch, GPU, kernels, extras, speeds; what is missing, and the command for it."""
    from rich.console import Console

    with Console(stderr=True).status("measuring this machine"):
        findings = {
            "machine": machine(),
            "speed": [*busy(), *speeds()],
            "kernels": [cpu_kernels(), gpu_kernels(), compiler()],
            "extras": extras(),
        }
    if as_json:
        typer.echo(json.dumps({title: [asdict(each) for each in part] for title, part in findings.items()}, indent=2))
        return
    console = wide_console()
    for number, (title, part) in enumerate(findings.items()):
        console.print(f"{chr(10) if number else ''}{title}", style="bold")
        for each in part:
            line = f"  {each.name:<14} {each.found}"
            # soft_wrap: a path that is cut can not be copied.
            console.print(
                line + (f"\n{'':17}-> {each.remedy}" if each.remedy else ""),
                style="yellow" if each.remedy else None,
                soft_wrap=True,
                markup=False,
            )


def machine() -> list[Finding]:
    import torch

    from clearhead.kernels.memory import available_memory
    from clearhead.kernels.native_library import cache_folder

    cache = cache_folder()
    nearest = next(folder for folder in (cache, *cache.parents) if folder.exists())
    writable = os.access(nearest, os.W_OK)
    return [
        Finding("clearhead", f"{__version__}, in {Path(__file__).parents[1]}"),
        Finding("python", f"{platform.python_version()}, {sys.executable}"),
        Finding("system", f"{platform.system()} {platform.release()}, {platform.machine()}"),
        Finding("torch", f"{torch.__version__}, {torch.get_num_threads()} threads of {os.cpu_count()} cores"),
        Finding("gpu", spell_gpus()),
        Finding("memory", f"{available_memory() / 1e9:.1f} GB free"),
        Finding(
            "cache",
            f"{cache}, {shutil.disk_usage(nearest).free / 1e9:.1f} GB free",
            None if writable else "it can not be written to: set CLEARHEAD_CACHE to a folder of your own",
        ),
    ]


def spell_gpus() -> str:
    import torch

    if torch.cuda.is_available():
        cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        return ", ".join(f"{card.name}, {card.total_memory / 1e9:.0f} GB" for card in cards)
    return "Apple's (mps)" if torch.backends.mps.is_available() else "none that torch can use"


def busy() -> list[Finding]:
    """Whether other programs take the cores: the speeds below it are then not the machine's."""
    if not hasattr(os, "getloadavg"):  # Windows
        return []
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load < cores / 2:
        return []
    remedy = "the speeds below are lower than this machine's; run clearhead doctor again when it is idle"
    return [Finding("load", f"{load:.1f} on {cores} cores: other programs are running", remedy)]


def speeds() -> list[Finding]:
    """The machine's ceilings, and what share of the memory's speed our decoding product reaches."""
    import torch

    from clearhead import kernels
    from clearhead.costs.hardware import measure_peak

    floats = torch.ones(2**25)  # 128 MB, more than caches hold
    weight, row = floats.view(-1, 4096), torch.ones(1, 4096)
    read = floats.nbytes / median_seconds(floats.sum)
    found = [
        Finding("products", f"{measure_peak('cpu') / 1e9:,.0f} GFLOP/s: large matrices in float32, on the CPU"),
        Finding("memory", f"{read / 1e9:.1f} GB/s: reading"),
    ]
    with torch.no_grad():
        ours = kernels.product(row, weight)
        if ours is not None:
            speed = weight.nbytes / median_seconds(lambda: kernels.product(row, weight))
            share = f"weights read by a product with one row, {speed / read:.0%} of the memory's speed"
            found.append(Finding("decoding", f"{speed / 1e9:.1f} GB/s: {share}"))
    if torch.cuda.is_available():
        peak = measure_peak("cuda", torch.bfloat16)
        found.append(Finding("gpu", f"{peak / 1e12:,.0f} TFLOP/s: large matrices in bfloat16"))
    return found


def median_seconds(work: Callable[[], object]) -> float:
    seconds: list[float] = []
    for _ in range(7):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[2:])  # the first ones warm up


def cpu_kernels() -> Finding:
    from clearhead.kernels import native, native_library

    if (why := native.why_not()) is not None:
        is_meant = os.environ.get("CLEARHEAD_NATIVE") == "0" or sys.platform == "win32"
        remedy = None if is_meant else f"{install_hint('g++')}, or install a wheel"
        return Finding("cpu", f"torch's operators: {why}", remedy)
    path = native_library.locate()
    origin = "from the wheel" if path.parent == native_library.PREBUILT else f"compiled here, {path}"
    return Finding("cpu", f"{native_library.choose_level()}, {origin}")


def gpu_kernels() -> Finding:
    import torch

    from clearhead.kernels import has_triton

    if not torch.cuda.is_available():
        return Finding("gpu", "not needed: no CUDA GPU")
    there = has_triton()
    return Finding("gpu", "triton" if there else "no triton", None if there else "pip install triton")


def compiler() -> Finding:
    """What torch.compile needs on the CPU."""
    from clearhead.kernels.compiler import missing_for_compile

    if missing := missing_for_compile():
        return Finding(
            "torch.compile", f"not on the CPU: no {' and no '.join(missing)}", install_hint("g++ python3-dev")
        )
    return Finding("torch.compile", f"{shutil.which(os.environ.get('CXX') or 'g++')}")


def install_hint(packages: str) -> str:
    """How compilers are installed on this system."""
    if sys.platform == "win32":
        return "install the C++ build tools of Visual Studio"
    return "xcode-select --install" if sys.platform == "darwin" else f"apt install {packages}"


def extras() -> list[Finding]:
    """Each extra, with the packages that it would bring and that are not here."""
    wanted: dict[str, list[str]] = {name: [] for name in EXTRAS}
    for line in importlib.metadata.requires("clearhead") or []:
        match = re.fullmatch(r"([\w.-]+)[^;]*; *extra *== *[\"'](\w+)[\"']", line)
        if match and match[2] in wanted:
            wanted[match[2]].append(match[1])
    findings: list[Finding] = []
    for name, purpose in EXTRAS.items():
        missing = [package for package in wanted[name] if not is_installed(package)]
        there = f"missing ({', '.join(missing)})" if missing else "here"
        findings.append(Finding(name, f"{there}: {purpose}", f"pip install 'clearhead[{name}]'" if missing else None))
    return findings


def is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
