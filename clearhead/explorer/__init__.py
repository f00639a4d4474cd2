"""The explorer: the page, and the answers to its requests. No HTTP here: `serving/explorer_routes.py` has the routes.

    Explorer(model, tokenizer, name="gpt2").answer("read", {"run": {"model": "gpt2", "text": "Hello"}})

page/                   the page itself: HTML, CSS, JavaScript
explorer.py             Explorer: from a request's name to its answer
fields.py               a request's fields, each checked when it is read
model_inputs.py         texts, pictures and sounds as a model's inputs; samples.py makes some to start with
forward_passes.py       forward passes with queries and keys kept, and the last few of them
stepwise.py             a forward pass block by block, so that the first layers are seen while the last are computed
output_panel.py         read: the tokens, and the model's output
heads_panel.py          grid, map, row
flow_panel.py           flow
follow_panel.py         follow
lens_panel.py           lens, cell
changes.py              heads, layers, neurons and steering vectors that a run changes
interventions_panel.py  sweep
neurons_panel.py        neurons
attribution_panel.py    attribution, patches
generation_panel.py     step, beam
positions_panel.py      positions
geometry_panel.py       geometry, neighbours, pca
cost_panel.py           cost, measure
wire_format.py          answers as bytes, and the keys of requests
standalone_page.py      the page's files as one HTML file with its answers
page_export.py          such a file for a model and a text
live_export.py          such a file that computes any text by itself; live_tokenizer.py tells it the tokenizer
notebook.py             such a file for what a probe saw: `Seen.show`

May import: errors, config, layers, models, quantization, families, checkpoint, costs, inside, sampling, engine, generation,
training, data.
"""

from clearhead.explorer.explorer import Explorer
from clearhead.explorer.live_export import export_live_page
from clearhead.explorer.model_inputs import tokenizer_of
from clearhead.explorer.notebook import show_seen
from clearhead.explorer.page_export import export_page

__all__ = ["Explorer", "export_live_page", "export_page", "show_seen", "tokenizer_of"]
