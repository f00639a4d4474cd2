"""Training: from a recipe to a run folder that `load`, `--resume`, `serve` and `explore` take.

recipe.py       the recipe: TOML, checked; recipes/ holds those that are shipped
loop.py         train: the loop, from top to bottom
tasks/          language, mask, translate, classify
losses.py       cross-entropy without all the logits
optimizers.py   AdamW, Muon
schedules.py    the learning rate
checkpoints.py  written whole or not at all, read at any number of processes
starting.py     the model at the start and at the end, LoRA
processes.py    one process or several
prefetch.py     batches ahead of time
evaluation.py   held-out data
summary.py      forecast and speed
journal.py, report.py, show.py, folder.py, embedded.py

May import: errors, config, layers, models, families, checkpoint, costs, inside, generation, data.
"""

from clearhead.training.folder import read_run
from clearhead.training.loop import Result, train
from clearhead.training.recipe import Recipe, find_recipe
from clearhead.training.show import Show

__all__ = ["Recipe", "Result", "Show", "find_recipe", "read_run", "train"]
