"""ONNX: one graph for a decoder or an encoder, two for an encoder-decoder; with a KV cache; verified by ONNX Runtime."""

from __future__ import annotations

import copy
import json
import logging
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead.data import Tokenizer
from clearhead.exports.graph_runner import Feed, GraphRunner
from clearhead.exports.onnx_graphs import Graph, graphs_of
from clearhead.exports.verification import Verification, require, version_of
from clearhead.exports.verification import verify as compare
from clearhead.laws.subject import forced_kernel
from clearhead.models import Model
from clearhead.version import __version__

OPSET = 18
TYPES = ("float32", "int8")
# Products of inputs and weights in 8 bits each, of every layer: as coarse as that.
INT8 = 0.15
LARGE = 3 * 2**29  # bytes above which the weights are in a file of their own: one file of this format holds 2 GB
MANIFEST = "graphs.json"


def refuse(model: Model, tokenizer: Tokenizer | None, kind: str, verifying: bool) -> None:
    require("onnxscript", "onnxscript", "onnx", verify=False)
    if verifying or kind == "int8":
        require("onnxruntime", "onnxruntime", "onnx", verify=kind != "int8")


def write(model: Model, tokenizer: Tokenizer | None, folder: Path, kind: str) -> None:
    """A file for each graph, and graphs.json: the names of inputs and outputs, the config, the tokens that start and end a text."""
    folder.mkdir()
    exact = copy.deepcopy(model).float().eval()
    large = sum(weight.nbytes for weight in exact.parameters()) > LARGE
    graphs = graphs_of(exact)
    for name, graph in graphs.items():
        file = folder / f"{name}.onnx"
        with forced_kernel(exact, "explicit"), quiet():
            write_graph(graph, file, external_data=large)
            if kind == "int8":
                quantize(file, external_data=large)
    described = {name: {"inputs": list(graph.inputs), "outputs": graph.outputs} for name, graph in graphs.items()}
    facts = {"clearhead": __version__, "opset": OPSET, "type": kind, "graphs": described}
    facts |= {"model": model.config.to_dict(), "generation": asdict(model.generation)}
    (folder / MANIFEST).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    if tokenizer is not None:
        tokenizer.save(folder)


def write_graph(graph: Graph, file: Path, *, external_data: bool) -> None:
    with torch.no_grad():
        program = torch.onnx.export(
            graph.module.eval(),
            graph.args,
            dynamo=True,
            opset_version=OPSET,
            input_names=list(graph.inputs),
            output_names=graph.outputs,
            dynamic_shapes=graph.dynamic_shapes,
            verbose=False,
        )
    assert program is not None
    program.save(str(file), external_data=external_data)


def quantize(file: Path, *, external_data: bool) -> None:
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    full = file.rename(file.with_name(f"full-{file.name}"))
    graph = onnx.load(str(full), load_external_data=False)
    del graph.graph.value_info[
        :
    ]  # shapes that the quantiser finds by itself, and that conflict with its own where it renames
    onnx.save(graph, str(full))
    # A scale for each column: with one for a whole weight the largest difference was twice as large.
    quantize_dynamic(full, file, weight_type=QuantType.QInt8, per_channel=True, use_external_data_format=external_data)
    for each in file.parent.glob(f"{full.name}*"):
        each.unlink()


@contextmanager
def quiet() -> Generator[None]:
    """The exporter's advice (torchvision is missing, names of axes are shared) is not for the user."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "")]
    levels = [logger.level for logger in loggers]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def runner(folder: Path, model: Model) -> GraphRunner:
    """ONNX Runtime over the graphs of a folder."""
    import onnxruntime

    onnxruntime.set_default_logger_severity(3)
    sessions = {
        file.stem: onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
        for file in folder.glob("*.onnx")
    }

    def run(name: str, feed: Feed) -> list[Tensor]:
        known = {
            each.name for each in sessions[name].get_inputs()
        }  # an input that the graph does not read is not there
        out: Any = sessions[name].run(None, {key: value.numpy() for key, value in feed.items() if key in known})
        return [torch.from_numpy(each) for each in out]

    return GraphRunner(model, run)


def verify(model: Model, tokenizer: Tokenizer | None, folder: Path, kind: str) -> Verification:
    name = f"{version_of('onnxruntime')}, opset {OPSET}"
    least, why = (INT8, "inputs and weights of every product in 8 bits") if kind == "int8" else (0.0, "")
    return compare(model, runner(folder, model), name, at_least=least, why=why)
