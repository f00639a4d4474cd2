"""Triton on a CPU: its interpreter, which conftest.py asks for before triton is imported, mended where version 3.6 is wrong."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import numpy as np
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EIGHT = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}


def need_triton() -> None:
    """Skip the file without triton."""
    pytest.importorskip("triton", reason="needs triton: a CUDA GPU to be fast, or its interpreter to be right")
    if DEVICE == "cpu":
        mend()


@functools.cache
def mend() -> None:
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    patch_tensor, convert = interpreter._patch_lang_tensor, interpreter._convert_float

    def patch_bounds(tensor: Any, scope: Any) -> None:
        """It makes loop bounds by int(array of one number), which numpy 2.4 refuses."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def round_right(x: Any, source: Any, target: Any, mode: Any) -> Any:
        """It loses the carry where rounding to 8 bits reaches the next power of two."""
        if str(target) not in EIGHT:
            return convert(x, source, target, mode)
        wide = torch.from_numpy(np.frombuffer(x.tobytes(), np.float32).reshape(x.shape).copy())
        return wide.to(EIGHT[str(target)]).view(torch.uint8).numpy()

    interpreter._patch_lang_tensor, interpreter._convert_float = patch_bounds, round_right
