"""Interpretability: record what a model computes, change it, and measure what depends on it.

sites.py           the places in a model that can be recorded and changed
evaluation_mode.py a model without dropout for a while, for several threads at once
probe.py           `probe`: record them while the model runs
patching.py        `patch_grid`: what brings over the answer of another text
interventions.py   `intervene`: zero, scale, mean, patch, add; site_selection.py: of which rows and tokens
logit_lens.py      what the model would predict after each layer
attribution.py     a logit as a sum over heads and layers; saliency of input tokens
head_scores.py     where each head attends: entropy, previous token, induction, alignment ...
rollout.py         attention rollout
contacts.py        contacts of a protein, from attention
neighbours.py      tokens with similar embeddings
ablation_sweep.py  the loss without each head, with target_loss.py
pruning.py         a smaller model without some heads
heatmap.py         attention in a terminal
plots.py           matplotlib figures, with position_plots.py and figure_grid.py

May import: errors, config, layers, models, quantization, families, checkpoint.
"""

from clearhead.inside.ablation_sweep import Effect, Sweep, sweep, sweep_by
from clearhead.inside.attribution import Attribution, logit_attribution, saliency
from clearhead.inside.head_scores import HeadScore, copied_tokens, entropy, head_scores, repeated_tokens
from clearhead.inside.interventions import Intervention, add, intervene, mean, patch, scale, zero
from clearhead.inside.logit_lens import logit_lens
from clearhead.inside.neighbours import neighbours
from clearhead.inside.patching import PatchGrid, patch_grid
from clearhead.inside.probe import Seen, probe
from clearhead.inside.pruning import Savings, head_seconds, prune, savings
from clearhead.inside.rollout import attention_rollout
from clearhead.inside.sites import sites

__all__ = [
    "Attribution",
    "Effect",
    "HeadScore",
    "Intervention",
    "PatchGrid",
    "Savings",
    "Seen",
    "Sweep",
    "add",
    "attention_rollout",
    "copied_tokens",
    "entropy",
    "head_scores",
    "head_seconds",
    "intervene",
    "logit_attribution",
    "logit_lens",
    "mean",
    "neighbours",
    "patch",
    "patch_grid",
    "probe",
    "prune",
    "repeated_tokens",
    "saliency",
    "savings",
    "scale",
    "sites",
    "sweep",
    "sweep_by",
    "zero",
]
