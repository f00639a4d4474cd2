"""The laws of the house: what the core may hold, who may speak to hardware, how long a function and a reader's path may be."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import clearhead as ch
from clearhead.generation import Engine, Request
from clearhead.kernels import native

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "clearhead"
CORE = [*sorted((PACKAGE / "layers").glob("*")), *sorted((PACKAGE / "models").glob("*"))]

HARDWARE = re.compile(
    r"cuda|triton|onednn|mkldnn|fp8|float8|int8|int4|\bnative|ctypes|quanti[sz]|\bpage[ds]?\b|\bgpus?\b|\bavx|hopper|\bmps\b",
    re.I,
)
LONGEST = 60  # lines of a function
# A flat list of routes or of command-line options.
FLAT = {"cli/cost.py:run", "cli/generate.py:run", "cli/serve.py:run", "cli/train.py:run"}


def lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines()


def core_files() -> list[Path]:
    return [file for file in CORE if file.is_file() and file.suffix != ".pyc"]


def test_the_core_is_small() -> None:
    assert all(file.suffix == ".py" for file in core_files())
    assert sum(len(lines(file)) for file in core_files()) <= 2500


def test_the_core_names_no_hardware() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{n}: {line.strip()}"
        for file in core_files()
        for n, line in enumerate(lines(file), 1)
        if HARDWARE.search(line)
    ]
    assert found == []


@pytest.mark.parametrize(
    "line", ["if x.is_cuda:", "from clearhead import native", "# in pages of 2 MB", "int8 weights"]
)
def test_hardware_is_noticed(line: str) -> None:
    assert HARDWARE.search(line)


def test_the_core_calls_the_door_in_three_places() -> None:
    """One call in `linear`, two in attention: whole texts and sparse strips. Packed and block-sparse are files of their own."""
    doors = {"product", "text_attention", "packed_attention", "block_sparse_attention", "paged_attention", "store"}
    doors |= {"strip_attention"}
    found = [
        (file.stem, node.func.attr)
        for file in core_files()
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in doors
        if isinstance(node.func.value, ast.Name) and node.func.value.id == "kernels"
    ]
    assert sorted(found) == [
        ("attention", "strip_attention"),
        ("attention", "text_attention"),
        ("block_sparse", "block_sparse_attention"),
        ("linear", "product"),
        ("packing", "packed_attention"),
    ]


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif (
            isinstance(node, ast.Call)
            and node.args
            and isinstance(node.args[0], ast.Constant)
            and getattr(node.func, "attr", getattr(node.func, "id", "")) in ("import_module", "__import__")
        ):
            yield node.lineno, str(node.args[0].value)


PRIVATE = re.compile(r"^(triton|ctypes)\b|^torch(\.\w+)*\._(?!foreach)\w+")


def others() -> list[Path]:
    return [file for file in sorted(PACKAGE.rglob("*.py")) if "kernels" not in file.relative_to(PACKAGE).parts]


def test_only_kernels_speak_to_hardware() -> None:
    """Nobody else imports triton, ctypes or torch's private names."""
    found = [
        f"{file.relative_to(ROOT)}:{line}: {name}"
        for file in others()
        for line, name in imports(ast.parse(file.read_text()))
        if PRIVATE.search(name)
    ]
    assert found == []


@pytest.mark.parametrize("name", ["torch._C._functorch", "triton.language", "ctypes", "torch._dynamo.config"])
def test_private_names_are_noticed(name: str) -> None:
    assert PRIVATE.search(name)


def test_the_core_knows_only_the_door() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in core_files()
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("clearhead.kernels.")
    ]
    assert found == []


@pytest.mark.slow
def test_kernels_are_imported_at_the_top() -> None:
    """An import inside a function hides an arrow; only the door itself loads Triton's kernels late."""
    found = [
        f"{file.relative_to(ROOT)}:{line}: {name}"
        for file in others()
        if "cli" not in file.relative_to(PACKAGE).parts  # commands load torch late
        for function in ast.walk(ast.parse(file.read_text()))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for line, name in imports(function)
        if name.startswith("clearhead.kernels")
    ]
    assert found == []


def test_no_function_is_long() -> None:
    found = [
        f"{file.relative_to(ROOT)}: {node.name} has {size} lines"
        for file in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (size := (node.end_lineno or 0) - node.lineno + 1) > LONGEST
        if f"{file.relative_to(PACKAGE)}:{node.name}" not in FLAT
    ]
    assert found == []


# The reader's path: docs/learn/afternoon.md, and a request's way in docs/architecture.md.


def called(work: Callable[[], object]) -> set[Path]:
    """The files of the package whose functions `work` calls."""
    seen: set[str] = set()

    def profile(frame: object, event: str, _: object) -> None:
        if event == "call":
            seen.add(frame.f_code.co_filename)  # type: ignore[attr-defined]

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return {Path(name) for name in seen if name.startswith(str(PACKAGE))}


def tiny_decoder(name: str) -> ch.Decoder:
    sizes = dict(n_layers=2, d_model=64, n_heads=4, d_ff=128, vocab_size=101)
    model = ch.build(ch.preset(name, **sizes, **(dict(n_kv_heads=2) if name != "gpt2" else {})))
    assert isinstance(model, ch.Decoder)
    return model.eval()


def forward_files(name: str) -> set[Path]:
    model, tokens = tiny_decoder(name), torch.randint(0, 101, (2, 13))
    return {file for file in called(lambda: model(tokens)) if file.parent.name in ("layers", "models")}


def decode_files(name: str) -> set[Path]:
    """What one step of the engine runs between two tokens of a request: Python by tracing, C++ by its includes."""
    engine = Engine(tiny_decoder(name), max_tokens=256)
    engine.submit(Request(prompt=[5, 7, 11], max_new_tokens=9))
    for _ in range(3):  # prefill, and what is prepared once
        engine.step()
    cpp = PACKAGE / "kernels" / "cpp"
    found = [PACKAGE / "kernels" / "native.cpp", cpp / "decode_step.h"]
    for file in found:
        if file.suffix == ".h":
            found += [
                cpp / name for name in re.findall(r'#include "(\w+\.h)"', file.read_text()) if cpp / name not in found
            ]
    return {*called(engine.step), *found}


@pytest.mark.parametrize("name", ["gpt2", "llama-3-8b"])
def test_a_decoders_forward_is_read_in_an_afternoon(name: str) -> None:
    files = forward_files(name)
    assert len(files) <= 8, sorted(file.name for file in files)
    assert sum(len(lines(file)) for file in files) <= 1300


@pytest.mark.skipif(not native.is_there(), reason=str(native.why_not()))
def test_one_token_on_the_cpu_is_followed_in_an_afternoon() -> None:
    files = decode_files("llama-3-8b")
    assert PACKAGE / "kernels" / "decode_step.py" in files, "the native step did not run"
    assert len(files) <= 25, sorted(str(file.relative_to(PACKAGE)) for file in files)
    assert {str(file.relative_to(PACKAGE)) for file in files} <= set(dict(page_rows(ARCHITECTURE)))


AFTERNOON, ARCHITECTURE = ROOT / "docs" / "learn" / "afternoon.md", ROOT / "docs" / "architecture.md"


def page_rows(page: Path) -> list[tuple[str, str]]:
    """The rows that name a file, or link to it, and its lines."""
    return re.findall(r"^\| \[?`([\w/.]+)`\S* \| ([\d,]+) \|", page.read_text(encoding="utf-8"), re.M)


@pytest.mark.parametrize("page", [AFTERNOON, ARCHITECTURE], ids=["afternoon", "architecture"])
def test_the_pages_count_right(page: Path) -> None:
    rows = page_rows(page)
    assert len(rows) >= 15
    assert {name: len(lines(PACKAGE / name)) for name, _ in rows} == {
        name: int(count.replace(",", "")) for name, count in rows
    }


def test_the_afternoon_is_the_core() -> None:
    """Its tables name each file of the core but `__init__.py`, those of the forward pass first; the sum is right."""
    forward = forward_files("gpt2")
    names = [name for name, _ in page_rows(AFTERNOON)]
    assert {PACKAGE / name for name in names[: len(forward)]} == forward
    core = [str(file.relative_to(PACKAGE)) for file in core_files() if file.name != "__init__.py"]
    assert sorted(names) == sorted(core)
    total = sum(len(lines(file)) for file in forward)
    assert f"That is {total:,} lines." in AFTERNOON.read_text(encoding="utf-8")
    core = sum(len(lines(file)) for file in core_files())
    claim = f"decoder is 8 files and {total:,} lines, all layers and models together {core:,},"
    assert claim in (ROOT / "README.md").read_text(encoding="utf-8")
