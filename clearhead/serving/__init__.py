"""Models behind HTTP, as the `openai` client speaks it.

protocol.py    what a client may ask, field by field
hosts.py       a model, its tokenizer, and the thread that steps its engine for many clients
explain.py     what went on inside while a text was written
answers.py     texts on their way out: whole, or piece by piece
guards.py      who may ask, and how much: keys, hosts, sizes, streams
metrics.py     what is counted, for Prometheus
app.py         the routes
running.py     the server's life, and its end

May import: errors, config, layers, models, families, checkpoint, costs, inside, generation, training, data.
"""
