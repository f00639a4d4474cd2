"""An HTTP server for models, compatible with the `openai` client.

app.py                   make_app: routes, middleware and error handlers
server.py                the process: start, signals, end
service.py               what the routes share
protocol.py              the bodies of requests, field by field
*_routes.py              completion, chat, embedding, translation, transcription, explorer, health
text_responses.py        generated texts, streamed or whole
special_tokens.py        special tokens in what users wrote
text_length.py           a limit on characters, checked before a text is tokenised
text_deltas.py           tokens to text, delta by delta
openai_format.py         log-probabilities and events in OpenAI's form
explanation.py           attention, lens and ablation returned with a text
model_worker.py          a model, and the thread that steps its engine
guards.py, metrics.py    middleware: keys, host names, sizes; counts and times
bounded_json.py          a limit on the values in a body, checked before it is parsed
connections.py           limits on connections: number, time for headers and bodies, pieces
log_limits.py            a repeated line of the log is counted
http_errors.py           exceptions to HTTP answers
cancellation.py          work that ends with its client

May import: all rooms but cli.
"""
