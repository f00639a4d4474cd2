"""Where the compiled native.cpp comes from: inside the wheel, from the cache folder, or compiled now.

It is compiled for one of a few levels of processors and not for each model of processor: the same level gives the same bits,
whoever compiled it. The compiled file names no OpenMP library. Torch's own is put in reach before it is loaded, so that both
share their threads.

CLEARHEAD_NATIVE chooses a level by its name; 0 turns the library off. CLEARHEAD_CACHE is the cache folder; the default is
~/.cache/clearhead.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

log = logging.getLogger("clearhead.kernels")

SOURCE, HEADERS = Path(__file__).with_name("native.cpp"), Path(__file__).with_name("cpp")
PREBUILT = Path(__file__).with_name("prebuilt")
FLAGS = ("-O3", "-ffp-contract=off", "-std=c++17", "-fPIC")
# Apple's compiler takes OpenMP only in this form, and wants to be told that symbols are found when the library is loaded.
OPENMP = ("-Xpreprocessor", "-fopenmp") if sys.platform == "darwin" else ("-fopenmp",)
LINK = ("-shared", "-undefined", "dynamic_lookup") if sys.platform == "darwin" else ("-shared",)

OTHERS_WRITE = 0o022  # the mode's bits for group and all
X86 = ("x86_64", "AMD64")
# The level's flags for the compiler, and the words of /proc/cpuinfo that a processor of this level has. Best first.
LEVELS: dict[str, tuple[tuple[str, ...], frozenset[str]]] = {
    "x86-64-v4-vnni": (
        ("-march=x86-64-v4", "-mavx512vnni"),
        frozenset({"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni"}),
    ),
    "x86-64-v4": (
        ("-march=x86-64-v4",),
        frozenset({"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
    ),
    "x86-64-v3": (("-march=x86-64-v3",), frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe"})),
    "x86-64": (("-march=x86-64",), frozenset()),
    "aarch64": ((), frozenset()),
}


def locate() -> Path:
    """The compiled file for this processor. RuntimeError or OSError: why there is none."""
    level = choose_level()
    if (inside := PREBUILT / name_inside(level)).exists():
        return inside
    folder, name = cache_folder(), Path(name_inside(level)).stem
    if (cached := _cached(folder, name)) is not None:
        return cached
    compiler = find_compiler()
    log.warning("compiling the CPU kernels for this processor (%s), once: about 15 seconds", level)
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    # Compiled in a temporary folder, then moved: another process never finds half a file, and two may compile at the same time.
    with tempfile.TemporaryDirectory(dir=folder) as work:
        made = Path(work) / "native.so"
        compile_to(made, level, compiler)
        final = folder / f"{name}-{_content(made)}.so"
        os.replace(made, final)
    return final


def compile_to(path: Path, level: str, compiler: str) -> None:
    """Compile native.cpp for a level, in two commands: -fopenmp at the link would add the system's OpenMP library."""
    flags = (*FLAGS, *LEVELS[level][0])
    made = path.with_suffix(".o")
    steps = (
        # The folder's name must not reach the file: the same sources give the same bytes.
        [compiler, *flags, *OPENMP, f"-ffile-prefix-map={SOURCE.parent}=.", "-c", str(SOURCE), "-o", str(made)],
        [compiler, *flags, *LINK, "-s", str(made), "-o", str(path)],
    )
    for command in steps:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            error = done.stderr.replace(str(path.parent), ".").strip()[-500:]
            raise RuntimeError(f"{compiler} could not compile native.cpp for {level}: {error or 'it said nothing'}")
    made.unlink()
    path.chmod(path.stat().st_mode & ~OTHERS_WRITE)  # the umask decides on the rest


def find_compiler() -> str:
    names = (os.environ.get("CXX") or "g++", "clang++", "c++")
    if (found := next(filter(None, map(shutil.which, names)), None)) is None:
        raise RuntimeError("no C++ compiler was found; install g++, or name one in CXX")
    return found


def choose_level() -> str:
    """The best level of this processor, or the one that CLEARHEAD_NATIVE names."""
    if sys.platform == "win32":
        raise RuntimeError("they are not built on Windows")
    machine = platform.machine()
    levels = [name for name in LEVELS if name.startswith("x86") == (machine in X86)]
    if machine not in (*X86, "aarch64", "arm64"):
        raise RuntimeError(f"the kernels are written for x86-64 and ARM processors of 64 bits, and this is {machine}")
    wanted = os.environ.get("CLEARHEAD_NATIVE") or "auto"
    has = processor_words()
    if wanted in levels:
        if missing := LEVELS[wanted][1] - has:
            raise RuntimeError(
                f"CLEARHEAD_NATIVE={wanted}: this processor has no {', '.join(sorted(missing))}; leave it out"
            )
        return wanted
    if wanted not in ("auto", "1"):
        raise RuntimeError(f"CLEARHEAD_NATIVE={wanted} is not one of 0, 1, {', '.join(levels)}")
    return next(name for name in levels if LEVELS[name][1] <= has)


def processor_words() -> frozenset[str]:
    """What the processor can do, in the words of Linux; elsewhere what torch says, which knows less."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = (line.partition(":") for line in info.read_text().splitlines())
        return frozenset(next((words.split() for name, _, words in lines if name.strip() == "flags"), []))
    level = {"AVX2": "x86-64-v3", "AVX512": "x86-64-v4"}.get(torch.backends.cpu.get_cpu_capability())
    return LEVELS[level][1] if level is not None else frozenset()


def cache_folder() -> Path:
    """The folder for files that are made once for this machine."""
    return Path(os.environ.get("CLEARHEAD_CACHE") or Path.home() / ".cache" / "clearhead")


def say_once(why: str) -> None:
    """One line that there are no kernels; a machine hears each reason once."""
    mark = cache_folder() / f"said-{hashlib.sha256(why.encode()).hexdigest()[:16]}"
    if mark.exists():
        return
    log.warning("no CPU kernels of our own: %s; everything runs on torch's operators, and decoding is slower", why)
    try:
        mark.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        mark.touch()
    except OSError:
        pass  # then the next process says it again


def share_openmp() -> None:
    """Make the functions of torch's OpenMP library, which is loaded in this process, visible to the next library."""
    ctypes.CDLL(str(_openmp()), mode=ctypes.RTLD_GLOBAL)


def name_inside(level: str) -> str:
    """The file's name inside the wheel: kernels of other sources have another."""
    sources = [file.read_text() for file in (SOURCE, *sorted(HEADERS.glob("*.h")))]
    return f"native-{level}-{hashlib.sha256(repr((sources, FLAGS, LEVELS[level][0])).encode()).hexdigest()[:16]}.so"


def _content(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _cached(folder: Path, name: str) -> Path | None:
    """The file in the cache folder, if it is whole and nobody else could have put it there."""
    if folder.is_dir() and not _is_ours(folder):
        raise RuntimeError(
            f"the cache folder {folder} belongs to another user, or others may write to it, so a library in it may be "
            f"anyone's; chmod go-w it, or set CLEARHEAD_CACHE to a folder of your own"
        )
    for path in sorted(folder.glob(f"{name}-*.so")):
        if _is_ours(path) and path.stem == f"{name}-{_content(path)}":
            return path
    return None


def _is_ours(path: Path) -> bool:
    """Whether only this user and root can have written it. True where there are no such owners (Windows)."""
    if not hasattr(os, "getuid"):
        return True
    status = path.stat()
    return status.st_uid in (0, os.getuid()) and not status.st_mode & OTHERS_WRITE


def _openmp() -> Path:
    names = ("libgomp", "libomp", "libiomp5")
    maps = Path("/proc/self/maps")
    loaded = {Path(line.split()[-1]) for line in maps.read_text().splitlines()} if maps.exists() else set[Path]()
    beside = set((Path(torch.__file__).parent / "lib").glob("lib*"))
    # Other packages bring copies of their own, which may be loaded as well: torch's is the one beside it.
    for path in sorted(beside) + sorted(loaded):
        if path.name.startswith(names):
            return path
    raise RuntimeError("torch's OpenMP library was not found")
