"""Writing with a model, token by token.

strategies.py  what is done to logits before a token is chosen, and the choice: pure functions, and `Strategy`, all of them
batches.py     lists of ids checked, sorted by length and cut into padded batches; what a decoder hands back
decoding.py    generate, stream: a decoder goes on from prompts
beams.py       translate: beam search with an encoder-decoder

May import: errors, config, layers, models, families, checkpoint, costs, inside, data.
"""

from clearhead.generation.batches import Hypothesis
from clearhead.generation.beams import translate
from clearhead.generation.decoding import generate, stream
from clearhead.generation.strategies import Strategy

__all__ = ["Hypothesis", "Strategy", "generate", "stream", "translate"]
