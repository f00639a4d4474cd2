"""One kernel after another."""
# triton has no types, and kernels are a language of their own.
# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportIndexIssue=false

from __future__ import annotations

import functools
from typing import no_type_check

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
@no_type_check
def begin(EARLY: tl.constexpr):
    """Let the next kernel start, and wait until the one before has written all it writes.

    On Hopper and later a kernel may start while the one before ends, which saves about a microsecond each. Every kernel here
    waits before it reads anything but parameters, so all see what they would see one after another.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


@functools.cache
def early(device: torch.device) -> dict[str, bool]:
    hopper = device.type == "cuda" and torch.version.cuda and torch.cuda.get_device_capability(device) >= (9, 0)
    return dict(EARLY=True, launch_pdl=True) if hopper else dict(EARLY=False)
