"""ExecuTorch: the same graphs as ONNX, as .pte files for phones and boards; verified by ExecuTorch's own runtime.

A file's memory is planned when it is written, for the longest text it will ever see, and for one text at a time.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from clearhead.data import Tokenizer
from clearhead.errors import CheckpointError
from clearhead.exports.graph_runner import Feed, GraphRunner
from clearhead.exports.onnx_export import MANIFEST, quiet
from clearhead.exports.onnx_graphs import BATCH, LENGTH, PAST, SOURCE, WHOLE, Axes, Graph, graphs_of
from clearhead.exports.verification import Verification, require, version_of
from clearhead.exports.verification import verify as compare
from clearhead.laws.subject import forced_kernel
from clearhead.models import Encoder, Model
from clearhead.version import __version__

TYPES = ("float32",)
LONGEST = 2048  # tokens of a text: memory for them is taken when the file is loaded
PIECE = 128  # tokens that a decoder takes in one call; a longer prompt goes in pieces


def refuse(model: Model, tokenizer: Tokenizer | None, kind: str, verifying: bool) -> None:
    if any(pattern.n_random for pattern in model.config.patterns):
        raise CheckpointError(
            f"ExecuTorch lacks an operator that draws random blocks; got sparsity={model.config.sparsity!r}; export to onnx"
        )
    require("executorch", "executorch", "executorch", verify=False, extra="executorch")


def write(model: Model, tokenizer: Tokenizer | None, folder: Path, kind: str) -> None:
    """A .pte file for each graph, and graphs.json: the inputs in their order, the outputs, the longest text, the config."""
    folder.mkdir()
    exact = copy.deepcopy(model).float().eval()
    graphs, limits = graphs_of(exact), limits_of(exact)
    for name, graph in graphs.items():
        with forced_kernel(exact, "explicit"), quiet():
            (folder / f"{name}.pte").write_bytes(lower(graph, limits))
    described = {name: {"inputs": list(graph.inputs), "outputs": graph.outputs} for name, graph in graphs.items()}
    facts: dict[str, Any] = {"clearhead": __version__, "type": kind, "graphs": described, "longest": limits}
    facts |= {"model": model.config.to_dict(), "generation": asdict(model.generation)}
    (folder / MANIFEST).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    if tokenizer is not None:
        tokenizer.save(folder)


def limits_of(model: Model) -> dict[str, int]:
    """The longest that each axis may be."""
    whole, source = (min(length, LONGEST) for length in (model.config.max_len, model.config.max_source_len))
    piece = whole if isinstance(model, Encoder) else min(whole, PIECE)
    return {LENGTH: piece, PAST: whole - 1, WHOLE: whole, SOURCE: source}


def lower(graph: Graph, limits: dict[str, int]) -> bytes:
    """The program, with XNNPACK's kernels where it has some."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner  # pyright: ignore[reportMissingImports]
    from executorch.exir import to_edge_transform_and_lower  # pyright: ignore[reportMissingImports]

    def dimensions(axes: Axes | list[Axes]) -> Any:
        if isinstance(axes, list):
            return [dimensions(each) for each in axes]
        least = {PAST: 0}
        return {
            axis: torch.export.Dim.DYNAMIC(min=least.get(name, 1), max=limits[name])
            for axis, name in axes.items()
            if name != BATCH
        }

    def first_row(x: Tensor | list[Tensor]) -> Any:
        return [first_row(each) for each in x] if isinstance(x, list) else x[:1]

    shapes, args = tuple(map(dimensions, graph.dynamic_shapes)), tuple(map(first_row, graph.args))
    with torch.no_grad():
        program = torch.export.export(graph.module.eval(), args, dynamic_shapes=shapes)
    lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
    return cast("bytes", lowered.to_executorch().buffer)


def runner(folder: Path, model: Model) -> GraphRunner:
    """ExecuTorch's runtime over the files of a folder, one row after the other."""
    from executorch.runtime import Runtime  # pyright: ignore[reportMissingImports]

    programs = {file.stem: Runtime.get().load_program(file) for file in folder.glob("*.pte")}
    methods: dict[str, Callable[..., Any]] = {
        name: program.load_method("forward").execute for name, program in programs.items()
    }

    def run(name: str, feed: Feed) -> list[Tensor]:
        inputs = [feed[each] for each in found.graphs[name].inputs]
        rows = [methods[name]([each[row : row + 1] for each in inputs]) for row in range(len(inputs[0]))]
        return [torch.cat(parts) for parts in zip(*rows, strict=True)]

    found = GraphRunner(model, run)
    return found


def verify(model: Model, tokenizer: Tokenizer | None, folder: Path, kind: str) -> Verification:
    logging.getLogger("executorch").setLevel(logging.ERROR)
    return compare(model, runner(folder, model), version_of("executorch"))
