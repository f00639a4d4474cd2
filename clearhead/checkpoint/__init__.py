"""Weights in and out: safetensors, torch files, GGUF, llama2.c and Whisper's own in; safetensors out, in our layout or
Hugging Face's. May import: errors, config, layers, models, families.
"""

from clearhead.checkpoint.loading import load
from clearhead.checkpoint.saving import save

__all__ = ["load", "save"]
