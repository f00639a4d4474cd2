"""What the explorer's page asks, answered from a model. No HTTP here: `serving/explorer.py` has the routes.

    Explorer(model, tokenizer, name="gpt2").answer("read", {"run": {"model": "gpt2", "text": "Hello"}})

asking.py      a request's fields, each checked as it is read
inputs.py      what a model is given: texts, pictures, sounds, as tensors and as strips that a person reads
runs.py        one run of a model with its queries and keys kept, and the last few of them
attention.py   grid, map, row, flow
readings.py    read, lens, cell, sweep
tables.py      positions, geometry, neighbours, pca
figures.py     cost, measure
writing.py     step, beam
explorer.py    Explorer, which is asked
exporting.py   one file that holds the page and the answers it needs

May import: errors, config, layers, models, families, checkpoint, costs, inside, generation, training, data.
"""

from clearhead.explorer.explorer import Explorer
from clearhead.explorer.exporting import export_page
from clearhead.explorer.inputs import tokenizer_of

__all__ = ["Explorer", "export_page", "tokenizer_of"]
