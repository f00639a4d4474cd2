"""Generation for users: lists of ids or texts in, new ids or texts out.

decoding.py       generate, stream, translate: lists of ids in, lists of new ids out
texts.py          texts in, texts out: prompts that fit, stop texts, grammars, many requests in order
written_texts.py  what write_texts returns with scores; a notebook displays it
transcription.py  Whisper: windows of a sound to segments with times. scribe.py: its special tokens and languages;
                  word_times.py: when each word is said; transcript_formats.py: text, subtitles, JSON
proteins.py       masked residues of a protein, and the effects of variants
embeddings.py     one vector for each text
traces.py         a beam search as a document and as a picture: why each text was kept or dropped
engines.py        engines for these calls: large enough, and reused where that pays

`Engine`, `Request` and what they use are in engine/ and sampling/; users import them from here.
May import: errors, config, kernels, layers, models, quantization, families, checkpoint, costs, inside, sampling, engine, data.
"""

from clearhead.engine.engine import Engine
from clearhead.engine.request import Request, Ticket, Token
from clearhead.generation.decoding import generate, stream, translate
from clearhead.generation.texts import stream_text, write_texts
from clearhead.sampling.beam_search import Hypothesis
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
