"""Weights in and out of files. May import: errors, config, layers, models, quantization, families.

loading.py                load: a model from a folder or a file
saving.py                 save: a model to a folder, in our layout or Hugging Face's
checkpoint.py             Checkpoint: what each reader returns
weight_files.py           safetensors and torch files
checksums.py              of files, configs and headers
durable_files.py          new files, replaced texts, locks: whole after a kill
run_checkpoint.py         the newest checkpoint of a run that goes on or was stopped
gguf.py, gguf_file.py     llama.cpp's files
llama2c.py                llama2.c's files
openai_whisper.py         OpenAI's Whisper files
sentence_transformers.py  folders of sentence-transformers
hub.py                    downloads from the Hugging Face hub
tensor_names.py           which tensor of a file is which tensor of a model
assignment.py             the file's tensors into the model
"""

from clearhead.checkpoint.loading import load
from clearhead.checkpoint.saving import save

__all__ = ["load", "save"]
