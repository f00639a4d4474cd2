"""Writing with a model, token by token.

strategies.py   what is done to logits before a token is chosen, and the choice: pure functions, and `Strategy`, all of them
vocabularies.py, schemas.py   what constraints need to know of a tokenizer, and check of a JSON schema
constraints.py  texts that match a regular expression, a JSON schema, or one of a list
requests.py     what is asked of a model, checked, and what came of it
blocks.py       who holds which block of memory
members.py      requests that were let in
reading.py      prompts and sources are read: padded, packed or replayed
recordings.py   work for a GPU that is recorded once and replayed
running.py      the model and its memory, run for the rows of a batch
choosing.py     tokens for the rows that do not search
beams.py        beam search: which texts go on
searching.py    the searches of an engine, and the blocks that their beams hold
engine.py       requests join and leave between steps, each written as if it were alone
driving.py      engines made large enough, kept where that pays
decoding.py     generate, stream, translate: lists of ids in, lists of new ids out
texts.py        texts in, texts out: prompts that fit, stops that are texts, requests in order
sound.py        Whisper's windows of sound as requests
traces.py       why each text of a beam search lived or died, as a document and as a picture

May import: errors, config, layers, models, families, checkpoint, costs, inside, data.
"""

from clearhead.engine.engine import Engine
from clearhead.engine.request import Hypothesis, Request, Ticket, Token
from clearhead.generation.decoding import generate, stream, translate
from clearhead.generation.texts import stream_text, write_texts
from clearhead.sampling.grammar import Grammar
from clearhead.sampling.strategy import Strategy

__all__ = [
    "Engine",
    "Grammar",
    "Hypothesis",
    "Request",
    "Strategy",
    "Ticket",
    "Token",
    "generate",
    "stream",
    "stream_text",
    "translate",
    "write_texts",
]
