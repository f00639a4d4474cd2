"""Decoding on a CUDA GPU: Triton kernels for the steps where a few rows meet many weights or many kept keys.

A decoding step reads every weight and every key once for a handful of rows, so each kernel here is written to read memory
at full speed; the arithmetic is free. Sums are float32 whatever the type, and rounded once. Every function can be captured
in a CUDA graph: nothing waits for the device, and the shapes alone choose how the work is split. Constants were tuned on an
H200 (benchmarks/gpu/decode_kernels.py).

launching.py    one kernel after another
products.py     a few rows times a weight, plain or packed
attention.py    one query a row over keys in blocks
keeping.py      queries and keys turned, keys and values put in their blocks
between.py      gates, and sums with the norm after them
choosing.py     the most likely tokens

Only code that holds CUDA tensors may import this: it needs triton.
"""

from clearhead.kernels.gpu.elementwise import add_norm, gated, knows
from clearhead.kernels.gpu.kv_store import rotate, rotate_store, store
from clearhead.kernels.gpu.linear import linear, linear_int4, linear_int8, linear_plan
from clearhead.kernels.gpu.paged_attention import attention_plan, paged_attention
from clearhead.kernels.gpu.top_k import top_log_probs

__all__ = [
    "add_norm",
    "attention_plan",
    "gated",
    "knows",
    "linear",
    "linear_int4",
    "linear_int8",
    "linear_plan",
    "paged_attention",
    "rotate",
    "rotate_store",
    "store",
    "top_log_probs",
]
