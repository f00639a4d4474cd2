"""Training: from a recipe to a run folder that `load`, `--resume`, `serve` and `explore` take.

loop.py            train: the loop, from top to bottom
trainer.py         a run's model, loss, optimizers and step
train_step.py      the two halves of a step, forward and backward pass and update, as CUDA graphs on a GPU
recipe.py          the recipe: TOML, its fields (recipe_fields.py), checked (recipe_checks.py); recipes/ holds the shipped ones
tasks/             language modelling, masked language modelling, translation, classification
initialization.py  the model at the start, built or loaded
memory_check.py    a run that does not fit into memory is refused
lora.py            LoRA, and the whole model at the end
optimizers.py      AdamW, Muon
schedules.py       the learning rate
precision.py       bfloat16 and fp8
distributed.py     one process or several: DDP, FSDP2
prefetch.py        batches made ahead
checkpoints.py     written completely or not at all, read by any number of processes
evaluation.py      held-out data
meter.py           tokens, losses and seconds of logged steps, and of the run; metrics_log.py: metrics.jsonl, TensorBoard
auto_settings.py   what auto means: compiled or not, the stream's type
run_folder.py      the folder of a run
run_summary.py     forecast before the first step
report.py          report.html, with report_figures.py
callbacks.py       what a run reports; display.py: in a terminal or a notebook; interrupts.py: Ctrl-C
sizing.py          sizes and steps that end in minutes on this machine
threads.py         fewer threads on a busy machine
embedded_data.py   data sets that need no file

May import: errors, config, kernels, layers, models, quantization, families, checkpoint, costs, inside, engine, generation, data.
"""

from clearhead.training.callbacks import Callbacks
from clearhead.training.loop import Result, train
from clearhead.training.recipe import Recipe, find_recipe
from clearhead.training.run_folder import read_run

__all__ = ["Callbacks", "Recipe", "Result", "find_recipe", "read_run", "train"]
