"""The rooms and their arrows: each room imports only rooms to its left. All imports are read, those inside functions too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "clearhead"

# From left to right. Rooms of one step do not know each other; `data` stands beside. Any room may import `version`, `viewers`
# and `display`.
STEPS = [
    {"errors", "limits"},
    {"sparsity"},
    {"config", "kernels"},
    {"layers"},
    {"models"},
    {"quantization"},
    {"families"},
    {"checkpoint"},
    {"costs", "inside"},
    {"sampling"},
    {"engine"},
    {"generation"},
    {"training"},
    {"laws"},
    {"exports"},
    {"lessons"},
    {"experiments"},
    {"explorer"},
    {"serving"},
    {"cli"},
    {"__main__"},
]
PLACE = {room: n for n, step in enumerate(STEPS) for room in step}
ANYONES = {"version", "viewers", "display"}


def is_allowed(room: str, other: str) -> bool:
    if room == other or other in ANYONES:
        return True
    if other == "data":  # imported from sampling on
        return PLACE.get(room, -1) >= PLACE["sampling"]
    if (room, other) == ("layers", "config"):  # layers take plain arguments
        return False
    if room == "data":
        return other == "errors"
    return PLACE.get(other, len(STEPS)) < PLACE.get(room, -1)


def wrong_arrows(package: Path) -> list[str]:
    """Each import of a room that may not be imported there, as `file:line: room -> room`."""
    found: list[str] = []
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package).with_suffix("").parts
        if parts == ("__init__",):
            continue  # the front door knows every room
        for line, module in imports(file, package):
            names = module.split(".")
            if names[0] != package.name:
                continue
            other = names[1] if len(names) > 1 else "the front door"
            if not is_allowed(parts[0], other):
                found.append(f"{'/'.join(parts)}.py:{line}: {parts[0]} -> {other}")
    return found


def imports(file: Path, package: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of every module that a file imports; `from clearhead import layers` is clearhead.layers."""
    inside = [package.name, *file.relative_to(package).with_suffix("").parts]
    here = inside[:-1]  # the package a relative import starts from, of `__init__` too
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = here[: len(here) - node.level + 1] if node.level else []
            module = ".".join([*start, *([node.module] if node.module else [])])
            if module == package.name:
                yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, module
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in ("import_module", "__import__"):
                yield node.lineno, str(node.args[0].value)


def test_every_arrow_points_to_the_left() -> None:
    assert wrong_arrows(PACKAGE) == []


def test_every_room_has_its_place() -> None:
    rooms = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert rooms <= {*PLACE, *ANYONES, "data", "__init__"}


def test_a_family_page_knows_no_room_to_its_right() -> None:
    left = {"errors", "config", "kernels", "layers", "models", "quantization", "families", "version"}
    for file in (PACKAGE / "families").glob("*.py"):
        others = {name.split(".")[1] for _, name in imports(file, PACKAGE) if name.startswith("clearhead.")}
        assert others <= left, file.name


# The checker itself: each of these is a tree of one file, and whether it is refused.
TREES = {
    "to the left": ("models/decoder.py", "from clearhead.layers.block import Block", True),
    "to itself": ("layers/block.py", "from clearhead.layers.masks import Mask", True),
    "to the right": ("layers/block.py", "from clearhead.models.decoder import Decoder", False),
    "import": ("layers/block.py", "import clearhead.models.decoder", False),
    "from the package": ("layers/block.py", "from clearhead import models", False),
    "one of several": ("models/stack.py", "from clearhead import layers, families", False),
    "through the front door": ("cli/demo.py", "from clearhead import build", False),
    "the front door": ("cli/demo.py", "import clearhead", False),
    "relative": ("layers/block.py", "from ..models import Decoder", False),
    "relative, of a package": ("layers/__init__.py", "from ..models import Decoder", False),
    "relative, fine": ("layers/block.py", "from .masks import Mask", True),
    "inside a function": ("layers/block.py", "def f():\n    from clearhead.config import Config", False),
    "for types only": ("costs/forecast.py", "if TYPE_CHECKING:\n    from clearhead.inside import probe", False),
    "by name": ("layers/block.py", "importlib.import_module('clearhead.config')", False),
    "layers to config": ("layers/block.py", "from clearhead.config import Config", False),
    "config to layers": ("config.py", "from clearhead.layers.masks import Mask", False),
    "costs to inside": ("costs/forecast.py", "from clearhead.inside import probe", False),
    "inside to costs": ("inside/maps.py", "from clearhead.costs.parameters import count_parameters", False),
    "families to checkpoint": ("families/gpt2.py", "from clearhead.checkpoint import names", False),
    "data to errors": ("data/corpora.py", "from clearhead.errors import InputError", True),
    "data to config": ("data/corpora.py", "from clearhead.config import Config", False),
    "checkpoint to data": ("checkpoint/loading.py", "from clearhead.data import tokenizers", False),
    "inside to data": ("inside/lens.py", "from clearhead.data import tokenizers", False),
    "layers to kernels": ("layers/linear.py", "from clearhead import kernels", True),
    "kernels to layers": ("kernels/native.py", "from clearhead.layers.masks import Mask", False),
    "layers to engine": ("layers/cache.py", "from clearhead.engine.kv_cache import Pool", False),
    "sampling to engine": ("sampling/beam_search.py", "from clearhead.engine.request import Request", False),
    "engine to sampling": ("engine/sampler.py", "from clearhead.sampling.strategy import Strategy", True),
    "sampling to data": ("sampling/grammar.py", "from clearhead.data import Tokenizer", True),
    "generation to data": ("generation/sample.py", "from clearhead.data import tokenizers", True),
    "cli to data": ("cli/embed.py", "from clearhead.data import tokenizers", True),
    "errors to anything": ("errors.py", "from clearhead.config import Config", False),
    "errors to version": ("errors.py", "from clearhead.version import __version__", True),
    "a room without a place": ("utils.py", "from clearhead.errors import InputError", False),
    "to a room without a place": ("cli/demo.py", "from clearhead.utils import help", False),
    "another library": ("errors.py", "import torch.nn", True),
    "a name that only begins alike": ("errors.py", "import clearheaded.models", True),
}


@pytest.mark.parametrize(("file", "code", "fine"), TREES.values(), ids=TREES.keys())
def test_the_checker_catches_a_wrong_arrow(tmp_path: Path, file: str, code: str, fine: bool) -> None:
    path = tmp_path / "clearhead" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'"""A page."""\n\n{code}\n')
    (tmp_path / "clearhead" / "__init__.py").write_text("from clearhead.cli import main\n")  # exempt
    assert (wrong_arrows(tmp_path / "clearhead") == []) is fine


def test_the_checker_says_where(tmp_path: Path) -> None:
    (tmp_path / "clearhead" / "layers").mkdir(parents=True)
    (tmp_path / "clearhead" / "layers" / "block.py").write_text("import math\n\nfrom clearhead.models import build\n")
    assert wrong_arrows(tmp_path / "clearhead") == ["layers/block.py:3: layers -> models"]
