"""Text, sound and images into numbers, and corpora into batches. Imports `clearhead.errors` and third-party packages only.

Text to ids and back:
tokenizer.py           Tokenizer: encode, decode, batch, stream, chat, save
chat.py                chat templates; chat_template.py renders one, in a Jinja sandbox
isolated_process.py    processes apart, with limits, for the code of strangers
tokenizer_training.py  train_tokenizer
interruptible.py       Ctrl-C while a tokenizer is trained
tokenizer_formats.py   load_tokenizer, and the formats that need only one short function
sentencepiece.py       SentencePiece models, and Marian's pair of them
gguf_tokenizer.py      the tokenizer inside a .gguf file
tokenizer_parts.py     functions that these readers share

Sound, proteins and images:
audio.py               sound files, and Whisper's log-mel spectrogram
fasta.py               proteins in FASTA files
images.py              image files, preprocessed for Vision Transformers

From files to batches, in this order:
filters.py             Policy, TextFilter, Findings: what to do with unusable data, and a record of what was done
corpus_files.py        one file: lines of text, or the rows of a table
corpora.py             read_texts, read_pairs, read_labelled, find_images: streams over many files
token_store.py         Store: columns of numbers in memory-mapped files
preparation.py         what the next two files share: fingerprint, progress, labels
text_preparation.py    prepare_texts, prepare_pairs, prepare_labelled: a corpus, tokenised once, into a store
image_preparation.py   prepare_images, prepare_arrays
batch_order.py         RowOrder, TokenOrder, PackedOrder: the rows of a step, a pure function of (seed, step)
windows.py             Windows: a text store as one stream, for language models

Datasets that need no download:
dates.py               dates in 33 languages, for the demo
builtin_datasets.py    Python's own source, scikit-learn's digits
"""

from clearhead.data.batch_order import PackedOrder, RowOrder, TokenOrder, held_out, in_order, padding_waste
from clearhead.data.corpora import expand_files, find_images, read_labelled, read_pairs, read_texts
from clearhead.data.filters import Findings, Policy
from clearhead.data.image_preparation import prepare_arrays, prepare_images
from clearhead.data.sentencepiece import PairTokenizer
from clearhead.data.text_preparation import prepare_labelled, prepare_pairs, prepare_texts
from clearhead.data.token_store import Column, Store, StoreWriter
from clearhead.data.tokenizer import TextStream, Tokenizer
from clearhead.data.tokenizer_formats import load_tokenizer
from clearhead.data.tokenizer_training import train_tokenizer
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
    "find_images",
    "held_out",
    "in_order",
    "load_tokenizer",
    "padding_waste",
    "prepare_arrays",
    "prepare_images",
    "prepare_labelled",
    "prepare_pairs",
    "prepare_texts",
    "read_labelled",
    "read_pairs",
    "read_texts",
    "split_stream",
    "train_tokenizer",
]
