"""The experiments of the book: each asks one question, measures it here and now, and derives its sentences from the numbers.

catalogue.py   all of them: name, chapter, question; no torch
result.py      tables, charts and findings, and how two measurements are compared
running.py     run one, and write its page, figure and numbers
page.py        a result as Markdown
figure.py      its charts, by matplotlib (the extra `plot`)
fitting.py     one short training loop for all
tasks.py       data that is made, never downloaded
facts.py       a small grammar of facts, and real text that every Python brings
embeddings.py, positions.py, ...   one file an experiment: `measure` gives numbers, `conclude` says what they mean

May import every room up to lessons.
"""
