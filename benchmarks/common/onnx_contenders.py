"""A transformers model in ONNX Runtime: as exported, and after ONNX Runtime's own fusions for Transformers."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

Call = Callable[..., np.ndarray]


class Bare(nn.Module):
    """Tensors in, one tensor out: what an exporter can follow."""

    def __init__(self, model: nn.Module, names: list[str], result: str) -> None:
        super().__init__()
        self.model, self.names, self.result = model, names, result

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return getattr(self.model(**dict(zip(self.names, inputs, strict=True))), self.result)


def onnx_runtime(
    model: Any, examples: dict[str, torch.Tensor], result: str, folder: Path, threads: int, kind: str
) -> dict[str, Call]:
    """The model as exported and as fused, each called with arrays in the order of `examples`."""
    import onnxruntime
    from onnxruntime.transformers.optimizer import optimize_model

    names, pages = list(examples), {"ONNX Runtime": folder / "plain.onnx", "ONNX Runtime, fused": folder / "fused.onnx"}
    with contextlib.redirect_stdout(io.StringIO()):
        # The exporter by tracing: in graphs of the newer one the fusions find no attention.
        torch.onnx.export(
            Bare(model, names, result).eval(),
            tuple(examples.values()),
            str(pages["ONNX Runtime"]),
            dynamo=False,
            input_names=names,
            output_names=[result],
            dynamic_axes={name: _free(x) for name, x in examples.items()},
        )
        heads, width = model.config.num_attention_heads, model.config.hidden_size
        fused = optimize_model(str(pages["ONNX Runtime"]), kind, num_heads=heads, hidden_size=width, opt_level=1)
        fused.save_model_to_file(str(pages["ONNX Runtime, fused"]))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    # Its threads wait awake for the next call, which takes a core from whoever comes next: some 40 ms of a picture's 200.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return {name: _call(onnxruntime.InferenceSession(str(page), options), names) for name, page in pages.items()}


def be_quiet() -> None:
    """No reports and bars of other libraries between our tables."""
    from transformers.utils import logging as theirs

    logging.disable(logging.WARNING)
    theirs.disable_progress_bar()


def _free(x: torch.Tensor) -> dict[int, str]:
    """Which axes may change: the batch, and the length of tokens."""
    return {0: "batch"} | ({1: "length"} if x.ndim == 2 else {})


def _call(session: Any, names: list[str]) -> Call:
    return lambda *arrays: session.run(None, dict(zip(names, arrays, strict=True)))[0]
