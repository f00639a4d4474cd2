"""Looking inside a model while it runs, and changing what goes on there.

May import: errors, config, layers, models, families, checkpoint.
"""

from clearhead.inside.heads import HeadScore, attention_rollout, copied_tokens, entropy, head_scores, repeated_tokens
from clearhead.inside.interventions import Intervention, add, intervene, mean, patch, scale, zero
from clearhead.inside.probe import Seen, probe, sites
from clearhead.inside.pruning import Savings, head_seconds, prune, savings
from clearhead.inside.readings import Attribution, logit_attribution, logit_lens, neighbours, saliency
from clearhead.inside.sweeps import Effect, Sweep, sweep, sweep_by

__all__ = [
    "Attribution",
    "Effect",
    "HeadScore",
    "Intervention",
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
