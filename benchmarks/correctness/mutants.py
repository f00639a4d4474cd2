"""The mutants that mutation.py runs: mutmut's, without those that change only words for people, drawn with a seed."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("layers", "sampling", "engine", "checkpoint")
# Only a GPU runs these files and functions; their tests need one.
LEFT_OUT = ("engine/gpu_step.py", "engine/cuda_graphs.py", "engine/transfer.py")
ON_GPU = {"engine/prefill.py": ("_replay", "_run_packed"), "engine/runner.py": ("_replay", "_captured_step")}


@dataclass(frozen=True)
class Mutant:
    """One change of one file: `lines` stand in the place of its lines first to last (from 1)."""

    file: str  # as sampling/strategy.py
    number: int  # among all mutants of the file
    first: int
    last: int
    lines: list[str]

    @property
    def name(self) -> str:
        return f"{self.file} {self.number}"

    def text(self) -> str:
        lines = (ROOT / "clearhead" / self.file).read_text(encoding="utf-8").splitlines(keepends=True)
        return "".join([*lines[: self.first - 1], *self.lines, *lines[self.last :]])

    def show(self) -> str:
        lines = (ROOT / "clearhead" / self.file).read_text(encoding="utf-8").splitlines(keepends=True)
        before = [f"-{line}" for line in lines[self.first - 1 : self.last]]
        return "".join([f"{self.name}, line {self.first}\n", *before, *(f"+{line}" for line in self.lines)])


def draw(rooms: list[str], sample: int, seed: int) -> tuple[list[Mutant], int, int]:
    """The sample; of how many mutants it was drawn; how many more change only words, and were left out before drawing."""
    found: list[tuple[str, int, Any, Any, Any]] = []
    words = 0
    for room in rooms:
        for file in sorted((ROOT / "clearhead" / room).glob("*.py")):
            name = f"{room}/{file.name}"
            if file.name == "__init__.py":
                continue
            module, mutations, is_words, is_stated = parse(file)
            for number, mutation in enumerate(mutations):
                if is_words(mutation):
                    words += 1
                else:
                    found.append((name, number, module, mutation, is_stated))
    random.Random(seed).shuffle(found)
    chosen: list[Mutant] = []
    for each in found:
        if len(chosen) == sample:
            break
        mutant = make(*each)
        if mutant is not None:
            chosen.append(mutant)
    return chosen, len(found), words


def make(name: str, number: int, module: Any, mutation: Any, is_stated: Any) -> Mutant | None:
    """None: no test can notice it. Only a GPU runs it, or only white space changed, and Python reads the same program.

    Decided after the shuffle, so that a rule more does not draw another sample.
    """
    if name in LEFT_OUT or mutation.contained_by_top_level_function.name.value in ON_GPU.get(name, ()):
        return None
    if is_stated(mutation):
        return None
    text = module.deep_replace(mutation.original_node, mutation.mutated_node).code
    if ast.dump(ast.parse(text)) == ast.dump(ast.parse(module.code)):
        return None
    before, after = module.code.splitlines(keepends=True), text.splitlines(keepends=True)
    same = 0
    while before[same] == after[same]:
        same += 1
    end = 0
    while end < min(len(before), len(after)) - same and before[-1 - end] == after[-1 - end]:
        end += 1
    return Mutant(name, number, same + 1, len(before) - end, after[same : len(after) - end])


def parse(file: Path) -> tuple[Any, list[Any], Any, Any]:
    """The parsed file, mutmut's mutations of its functions, which of these change only words, and which only what is stated.

    Words are the strings in a `raise` or a call of `warn`, since no program depends on how a sentence reads. A message that is left
    out as a whole (None) is no such mutant. Stated are the type in a `cast`, which is for the type checker, and `strict` of `zip`,
    which says, like `assert`, what we hold to be so.
    """
    import libcst as cst
    from mutmut.mutation.file_mutation import create_mutations

    module, mutations, *_ = create_mutations(str(file), file.read_text(encoding="utf-8"))
    strings, stated = set[int](), set[int]()

    class Strings(cst.CSTVisitor):
        def visit_Raise(self, node: cst.Raise) -> None:  # noqa: N802
            strings.update(id(each) for each in below(node) if isinstance(each, cst.BaseString))

        def visit_Call(self, node: cst.Call) -> None:  # noqa: N802
            if called(node) == "cast":
                stated.update(map(id, below(node.args[0])))
            for arg in node.args if called(node) == "zip" else ():
                if arg.keyword is not None:
                    stated.update(map(id, below(arg)))
            if called(node) == "warn":
                strings.update(id(each) for each in below(node) if isinstance(each, cst.BaseString))

    def below(node: Any) -> Iterator[Any]:
        yield node
        for child in node.children:
            yield from below(child)

    def called(node: Any) -> str:
        return (
            node.func.value
            if isinstance(node.func, cst.Name)
            else getattr(getattr(node.func, "attr", None), "value", "")
        )

    def is_words(mutation: Any) -> bool:
        node, other = mutation.original_node, mutation.mutated_node
        if isinstance(node, cst.Call) and called(node) == "cast" and isinstance(other, cst.Call):
            return len(node.args) == len(other.args) and node.args[1].deep_equals(other.args[1])
        return id(node) in strings

    def is_stated(mutation: Any) -> bool:
        node, other = mutation.original_node, mutation.mutated_node
        if isinstance(node, cst.Call) and called(node) == "zip" and isinstance(other, cst.Call):
            return len(values(node)) == len(values(other)) and all(map(same, values(node), values(other)))
        return id(node) in stated

    def values(call: cst.Call) -> list[cst.BaseExpression]:
        return [arg.value for arg in call.args if arg.keyword is None]

    def same(one: cst.BaseExpression, other: cst.BaseExpression) -> bool:
        return one.deep_equals(other)

    module.visit(Strings())
    return (
        module,
        [each for each in mutations if isinstance(each.contained_by_top_level_function, cst.FunctionDef)],
        is_words,
        is_stated,
    )
