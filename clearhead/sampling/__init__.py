"""Sampling: from logits to the next token. It knows no engine: tensors, ids and a tokenizer go in.

token_ids.py          lists of ids: checked against a vocabulary, and padded
strategy.py           `Strategy`: temperature, top-k, top-p, min-p, and the draw from a seed
logits_processors.py  penalties, biases, forbidden and forced tokens: `LogitsProcessor`, a strategy prepared for one model
beam_search.py        `Beams`: which beams continue, and which texts are finished
grammar.py            `Grammar`: output that matches a regular expression, a JSON schema, or one of several choices
vocabulary.py         a tokenizer's tokens as bytes, for grammars
json_schema.py        checks of a JSON schema before it becomes a grammar
grammar_trial.py      a stranger's schema compiled in a process apart

May import: errors, config, kernels, layers, models, quantization, data.
"""

from clearhead.sampling.beam_search import Hypothesis
from clearhead.sampling.grammar import Grammar
from clearhead.sampling.logits_processors import LogitsProcessor
from clearhead.sampling.strategy import Strategy

__all__ = ["Grammar", "Hypothesis", "LogitsProcessor", "Strategy"]
