"""How one kernel starts after another: programmatic dependent launch (PDL), on Hopper and later."""
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
def start_kernel(PDL: tl.constexpr):
    """Allow the next kernel to launch, and wait until the previous one has written its results.

    With PDL a kernel launches while the previous one ends, which saves about a microsecond each. Every kernel here calls this
    before it reads anything but parameters, so the order of reads and writes is that of a plain stream.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@functools.cache
def pdl_options(device: torch.device) -> dict[str, bool]:
    """The keyword arguments of a launch: with PDL if the device has it."""
    hopper = device.type == "cuda" and torch.version.cuda and torch.cuda.get_device_capability(device) >= (9, 0)
    return dict(PDL=True, launch_pdl=True) if hopper else dict(PDL=False)
