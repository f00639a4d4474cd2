"""The tasks: each one small file, batch in, loss and metrics out.

task.py       what a task is
corpus.py     what they share: tokenizers trained or loaded, stores prepared, data split
language.py   the next token, over windows of text
mask.py       hidden tokens, over windows of text (BERT)
translate.py  a target from a source
packing.py    pairs without padding
classify.py   a label for a text or a picture
"""

from __future__ import annotations

from pathlib import Path

from clearhead.training.processes import Processes
from clearhead.training.recipe import Recipe
from clearhead.training.show import Show
from clearhead.training.tasks.classify import PictureClasses, TextClasses, are_pictures
from clearhead.training.tasks.corpus import Corpus
from clearhead.training.tasks.language import Language
from clearhead.training.tasks.mask import Masked
from clearhead.training.tasks.task import Task
from clearhead.training.tasks.translate import Translate


def make_task(recipe: Recipe, out: Path, processes: Processes, show: Show) -> Task:
    """The recipe's task, its data read and tokenised; the first process does that, the others then find it done."""
    kinds = {"language": Language, "mask": Masked, "translate": Translate, "classify": TextClasses}
    if not processes.is_first:
        processes.wait()
    corpus = Corpus(recipe, out, show)
    pictures = recipe.task == "classify" and are_pictures(corpus.recipe)
    task = PictureClasses(corpus) if pictures else kinds[recipe.task](corpus)
    if processes.is_first:
        processes.wait()
    return task
