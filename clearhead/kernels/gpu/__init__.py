"""Triton kernels for a CUDA GPU.

A decode step reads every weight and every cached key once for a few rows: its time is that of reading memory, and these kernels
read at full speed. Sums are float32 for every type, and rounded once. Every function can be recorded in a CUDA graph: none waits
for the device, and the split of the work depends on shapes alone. Constants were tuned on an H200
(benchmarks/gpu/decode_kernels.py).

launch.py            programmatic dependent launch
activation.py        activations and their derivatives
linear.py            a few rows times a weight, plain or packed
paged_attention.py   one query a row over keys in blocks
kv_store.py          rotary positions, and keys and values into their blocks
elementwise.py       gates, and a sum with the norm after it
top_k.py             the most likely tokens
cross_entropy.py     loss and gradient of training, imported on its own
float8_cast.py       operands of 8-bit products in training, imported on its own

Import this only where tensors are on a CUDA GPU: it needs triton.
"""

from clearhead.kernels.gpu.activation import knows
from clearhead.kernels.gpu.elementwise import add_norm, gated
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
