"""The explorer: the page, and the answers to its requests. No HTTP here: `serving/explorer_routes.py` has the routes.

    Explorer(model, tokenizer, name="gpt2").answer("read", {"run": {"model": "gpt2", "text": "Hello"}})

page/                   the page itself: HTML, CSS, JavaScript
explorer.py             Explorer: from a request's name to its answer
fields.py               a request's fields, each checked when it is read
model_inputs.py         texts, pictures and sounds as a model's inputs; samples.py makes some to start with
forward_passes.py       forward passes with queries and keys kept, and the last few of them
diagram.py              the model drawn from its config, for the page and for `clearhead draw`
output_panel.py         read: the tokens, and the model's output
heads_panel.py          grid, map, row
flow_panel.py           flow
lens_panel.py           lens, cell
interventions_panel.py  sweep
generation_panel.py     step, beam
positions_panel.py      positions
geometry_panel.py       geometry, neighbours, pca
cost_panel.py           cost, measure
wire_format.py          answers as bytes, and the keys of requests
standalone_page.py      the page's files as one HTML file with its answers
page_export.py          such a file for a model and a text
notebook.py             such a file for what a probe saw: `Seen.show`

May import: errors, config, layers, models, quantization, families, checkpoint, costs, inside, sampling, engine, generation,
training, data.
"""

from clearhead.explorer.explorer import Explorer
from clearhead.explorer.model_inputs import tokenizer_of
from clearhead.explorer.notebook import show_seen
from clearhead.explorer.page_export import export_page

__all__ = ["Explorer", "export_page", "show_seen", "tokenizer_of"]
