"""ONNX: one graph for a decoder or an encoder, two for an encoder-decoder; with a KV cache; verified by ONNX Runtime."""

from __future__ import annotations

import copy
import json
import logging
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.data import Tokenizer
from clearhead.exports.onnx_graphs import Graph, graphs_of
from clearhead.exports.verification import Verification, require, version_of
from clearhead.exports.verification import verify as compare
from clearhead.laws.subject import forced_kernel
from clearhead.models import Encoder, EncoderDecoder, Model
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


class OnnxRuntime:
    """The graphs of a folder."""

    def __init__(self, folder: Path, model: Model) -> None:
        import onnxruntime

        onnxruntime.set_default_logger_severity(3)
        self.model = model
        self.sessions = {
            file.stem: onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
            for file in folder.glob("*.onnx")
        }

    def run(self, name: str, feed: dict[str, Any]) -> list[Any]:
        """The outputs of a graph. An input that the graph does not read is not there."""
        session = self.sessions[name]
        known = {each.name for each in session.get_inputs()}
        return list(session.run(None, {key: np.asarray(value) for key, value in feed.items() if key in known}))

    def outputs(self, args: Sequence[Tensor]) -> Tensor:
        if isinstance(self.model, Encoder):
            feed = {"images": args[0]} if args[0].is_floating_point() else {"tokens": args[0], "mask": real(args[0])}
            return torch.from_numpy(self.run("model", feed)[0])
        return torch.from_numpy(self.step(args[-1], self.begin(args[:-1], len(args[-1])))[0])

    def begin(self, source: Sequence[Tensor], batch: int) -> dict[str, Any]:
        """Inputs before the first token: no past, and of an encoder-decoder what the encoder made of the source."""
        graph = self.sessions["decoder" if isinstance(self.model, EncoderDecoder) else "model"]
        shapes = {each.name: each.shape for each in graph.get_inputs()}
        past = [name for name in shapes if name.startswith("past.")]
        state: dict[str, Any] = {
            name: np.zeros((batch, shapes[name][1], 0, shapes[name][3]), np.float32) for name in past
        }
        if isinstance(self.model, EncoderDecoder):
            feed = (
                {"frames": source[0]}
                if source[0].is_floating_point()
                else {"tokens": source[0], "mask": real(source[0])}
            )
            names = [each.name for each in self.sessions["encoder"].get_outputs()]
            state |= dict(zip(names, self.run("encoder", feed), strict=True))
            state["mask"] = feed.get("mask")
        return state

    def step(self, tokens: Tensor, state: dict[str, Any]) -> list[Any]:
        """Logits after these tokens; the state then holds their keys and values."""
        decoder = isinstance(self.model, EncoderDecoder)
        past = state["past.0.k"].shape[2]
        mask = {} if decoder else {"mask": torch.ones(len(tokens), past + tokens.shape[1], dtype=torch.bool)}
        out = self.run("decoder" if decoder else "model", {**state, "tokens": tokens, **mask})
        state |= dict(zip([name for name in state if name.startswith("past.")], out[1:], strict=True))
        return out

    def write(self, source: Sequence[Tensor], prompt: list[int], n: int) -> list[int]:
        state, piece, written = self.begin(source, 1), prompt, list[int]()
        for _ in range(n):
            piece = [int(self.step(torch.tensor([piece]), state)[0][0, -1].argmax())]
            written += piece
        return written


def real(tokens: Tensor) -> Tensor:
    return torch.ones(tokens.shape, dtype=torch.bool)


def verify(model: Model, tokenizer: Tokenizer | None, folder: Path, kind: str) -> Verification:
    name = f"{version_of('onnxruntime')}, opset {OPSET}"
    least, why = (INT8, "inputs and weights of every product in 8 bits") if kind == "int8" else (0.0, "")
    return compare(model, OnnxRuntime(folder, model), name, at_least=least, why=why)
