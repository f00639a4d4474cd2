"""Text in and out of ids. Knows nothing of models: imports `clearhead.errors` and third-party packages only.

tokenizers.py          Tokenizer: encode, decode, batch, stream, chat, save
chat.py                chat templates in a Jinja sandbox
tokenizer_training.py  train_tokenizer
tokenizer_formats.py   load_tokenizer, and the formats that are one short function each
sentencepiece.py       SentencePiece models, and Marian's pair of them
gguf_tokenizer.py      the tokenizer inside a .gguf file
tokenizer_parts.py     what those readers share
audio.py               sound files, and Whisper's log-mel front end
pictures.py            pictures, prepared for Vision Transformers
"""

from clearhead.data.sentencepiece import PairTokenizer
from clearhead.data.tokenizer_formats import load_tokenizer
from clearhead.data.tokenizer_training import train_tokenizer
from clearhead.data.tokenizers import TextStream, Tokenizer

__all__ = ["PairTokenizer", "TextStream", "Tokenizer", "load_tokenizer", "train_tokenizer"]
