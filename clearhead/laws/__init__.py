"""The laws that every model must obey, checked on a model of the user's: `clearhead check`.

check.py             check_model: all laws of one model, one Finding each
finding.py           Finding, and Comparison: the largest difference between two computations, in all and layer by layer
subject.py           Subject: the model, what it is called with, and how far rounding alone takes it
forward_laws.py      kernels, fused, batched, padded, cached, no future token, compiled
decoding_laws.py     the engine's decode steps, and greedy texts on every path
file_laws.py         saved = loaded, ours = transformers
perplexity_law.py    quantised weights against full ones, on a text
resume_law.py        check_resume: a run that was killed and resumed equals one left alone

May import: all rooms from errors to training, and data.
"""

from clearhead.laws.check import LAWS, check_model
from clearhead.laws.finding import Finding
from clearhead.laws.resume_law import check_resume

__all__ = ["LAWS", "Finding", "check_model", "check_resume"]
