"""The engine: requests in, tokens out, many at once.

engine.py       `Engine`: submit, step, cancel; the loop over the parts below
request.py      `Request`, `Ticket`, `Token`; what is checked when a request is submitted
sequence.py     a request that was admitted
scheduler.py    the queues: waiting, prefilling, running; admission
fair_queue.py   a queue in which clients take turns
allocator.py    blocks of memory: reservations, reference counts, prefix cache
kv_cache.py     the paged KV cache: keys and values in blocks
kept_blocks.py  the blocks of it that a sparse pattern keeps for a step
prefill.py      prompts and sources through the model
runner.py       the model runner: the rows of the batch, and the decode step by the fastest way
native_step.py, native_support.py   a whole decode step in one native call, on a CPU; which models it computes
gpu_step.py     a decode step by fused kernels, on a GPU
cuda_graphs.py  work for a GPU, recorded once and replayed; used by training too
sampler.py      next tokens of rows without beam search
speculation.py  drafted tokens verified in one step
prompt_lookup.py, draft_model.py   drafts: what the text repeats, and what a smaller model writes
beams.py        beam searches, and the blocks that beams share
processor_cache.py   logits processors, which equal requests share
outputs.py      tokens appended to tickets; what ends a text
transfer.py     copies between host and device

May import: errors, config, kernels, layers, models, quantization, costs, inside, sampling, data.
"""

from clearhead.engine.engine import Engine
from clearhead.engine.request import Request, Ticket, Token

__all__ = ["Engine", "Request", "Ticket", "Token"]
