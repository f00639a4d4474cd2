"""The tasks, one file each: rows of data to batches, batches to losses and metrics.

task.py                       the interface
corpus.py                     shared: the tokenizer, trained or loaded; tokenised data on disk
language_modeling.py          the next token, in windows of text (GPT)
masked_language_modeling.py   masked tokens, in windows of text (BERT)
translation.py                a target from a source
packed_pairs.py               pairs without padding
classification.py             a label for a text or a picture
"""

from __future__ import annotations

from pathlib import Path

from clearhead.training.callbacks import Callbacks
from clearhead.training.distributed import Processes
from clearhead.training.recipe import Recipe
from clearhead.training.tasks.classification import PictureClasses, TextClasses, are_pictures
from clearhead.training.tasks.corpus import Corpus
from clearhead.training.tasks.language_modeling import Language
from clearhead.training.tasks.masked_language_modeling import Masked
from clearhead.training.tasks.task import Task
from clearhead.training.tasks.translation import Translate


def make_task(recipe: Recipe, out: Path, processes: Processes, show: Callbacks) -> Task:
    """The recipe's task. The first process reads and tokenises its data; the others then load the result."""
    kinds = {"language": Language, "mask": Masked, "translate": Translate, "classify": TextClasses}
    if not processes.is_first:
        processes.barrier()
    corpus = Corpus(recipe, out, show)
    pictures = recipe.task == "classify" and are_pictures(corpus.recipe)
    task = PictureClasses(corpus) if pictures else kinds[recipe.task](corpus)
    if processes.is_first:
        processes.barrier()
    return task
