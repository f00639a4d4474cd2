"""Text, sound and pictures into numbers, and corpora into batches. Imports `clearhead.errors` and third-party packages only.

Text in and out of ids:
tokenizers.py          Tokenizer: encode, decode, batch, stream, chat, save
chat.py                chat templates in a Jinja sandbox
tokenizer_training.py  train_tokenizer
tokenizer_formats.py   load_tokenizer, and the formats that are one short function each
sentencepiece.py       SentencePiece models, and Marian's pair of them
gguf_tokenizer.py      the tokenizer inside a .gguf file
tokenizer_parts.py     what those readers share

Sound and pictures:
audio.py               sound files, and Whisper's log-mel front end
pictures.py            pictures, prepared for Vision Transformers

From files to batches, in this order:
findings.py            Policy, Findings: what to do with what can not be used, and the record of it
formats.py             one file: lines of text, or the rows of a table
corpora.py             read_texts, read_pairs, read_labelled, find_pictures: streams over many files
store.py               Store: columns of numbers in memory-mapped files
preparing.py           prepare_texts, prepare_pairs, prepare_labelled: a corpus tokenised once into a store
preparing_pictures.py  prepare_pictures, prepare_arrays
work.py                what those share: fingerprints, progress, labels
order.py               RowOrder, TokenOrder, PackedOrder: the rows of a step, a pure function of (seed, step)
windows.py             Windows: a text store as one stream, for language models

Data that is always there:
dates.py               dates in 33 languages, the demo's
embedded.py            Python's own source, scikit-learn's digits
"""

from clearhead.data.corpora import expand_files, find_pictures, read_labelled, read_pairs, read_texts
from clearhead.data.findings import Findings, Policy
from clearhead.data.order import PackedOrder, RowOrder, TokenOrder, held_out, in_order, padding_waste
from clearhead.data.preparing import prepare_labelled, prepare_pairs, prepare_texts
from clearhead.data.preparing_pictures import prepare_arrays, prepare_pictures
from clearhead.data.sentencepiece import PairTokenizer
from clearhead.data.store import Column, Store, StoreWriter
from clearhead.data.tokenizer_formats import load_tokenizer
from clearhead.data.tokenizer_training import train_tokenizer
from clearhead.data.tokenizers import TextStream, Tokenizer
from clearhead.data.windows import Windows, split_stream

__all__ = [
    "Column",
    "Findings",
    "PackedOrder",
    "PairTokenizer",
    "Policy",
    "RowOrder",
    "Store",
    "StoreWriter",
    "TextStream",
    "TokenOrder",
    "Tokenizer",
    "Windows",
    "expand_files",
    "find_pictures",
    "held_out",
    "in_order",
    "load_tokenizer",
    "padding_waste",
    "prepare_arrays",
    "prepare_labelled",
    "prepare_pairs",
    "prepare_pictures",
    "prepare_texts",
    "read_labelled",
    "read_pairs",
    "read_texts",
    "split_stream",
    "train_tokenizer",
]
