"""Models in other programs' formats, each checked by running that program: `clearhead export`.

exporting.py            export: refuse, write, verify, move into place
verification.py         Verification, and how a runtime's outputs and greedy texts are compared with ours
hugging_face.py         a folder that transformers loads
onnx_graphs.py          the modules that become ONNX graphs
onnx_export.py          ONNX files with a KV cache, run by ONNX Runtime
gguf_export.py          llama.cpp's file, with the tokenizer inside
gguf_vocabulary.py      a tokenizer as llama.cpp's metadata
ctranslate2_export.py   CTranslate2's folder

May import: all rooms from errors to laws, and data.
"""

from clearhead.exports.exporting import TARGETS, export
from clearhead.exports.verification import Verification

__all__ = ["TARGETS", "Verification", "export"]
