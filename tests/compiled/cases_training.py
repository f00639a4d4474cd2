"""compiled = eager for the loss in chunks and for a whole objective, in one graph, forward and backward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models.tiny import assert_same
from torch import Tensor
from torch._dynamo.utils import counters
from training.tiny_runs import make_recipe
from training.tiny_tasks import MODEL, make, model_for, recipe_of, words, write

from clearhead.kernels.cross_entropy import IGNORED, cross_entropy
from clearhead.training import train
from clearhead.training.tasks.task import Batch, Objective, Task

# torch's own, where it traces an autograd function
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

# float32; the compiler fuses and reorders sums, 2^-24 each, a hundred of them
FLOAT32 = 1e-5


@pytest.fixture(autouse=True)
def forget() -> None:
    """Each test compiles anew: torch remembers sizes and makes changing ones symbolic."""
    torch._dynamo.reset()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_in_chunks(smoothing: float) -> None:
    x, weight, bias = (torch.randn(*shape, requires_grad=True) for shape in ((29, 5), (53, 5), (53,)))
    targets = torch.randint(0, 53, (29,))
    targets[::7] = IGNORED

    def loss(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return cross_entropy(x, weight, targets, bias=bias, smoothing=smoothing, chunk=11)

    answers = loss(x, weight, bias), torch.compile(loss, fullgraph=True)(x, weight, bias)  # a break would be an error
    for theirs, ours in zip(*answers, strict=True):
        assert_same(ours, theirs, within=FLOAT32)
    grads = [torch.autograd.grad(answer[1], (x, weight, bias)) for answer in answers]
    for theirs, ours in zip(*grads, strict=True):
        assert_same(ours, theirs, within=FLOAT32)


def made(folder: Path, name: str) -> tuple[Task, Batch]:
    data: dict[str, Any] = dict(length=31)
    if name.startswith("translate"):
        lines = "\n".join(words(1 + i % 5, seed=i) for i in range(41))
        data |= dict(source=[write(folder / "a", lines)], target=[write(folder / "b", lines)])
    elif name == "classify":
        rows = "".join(f"{words(1 + i % 5, seed=i)},{'yn'[i % 2]}\n" for i in range(41))
        data |= dict(files=[write(folder / "t.csv", "text,label\n" + rows)])
    else:
        lines = "\n".join(words(1 + i % 11, seed=i) for i in range(101))
        data |= dict(files=[write(folder / "a.txt", lines)], documents="file" if name == "language" else "line")
    tokens = 217
    if name == "translate-packed":
        data["length"], tokens = 67, 384
    task: Task = make(
        recipe_of(
            name.split("-")[0], model=MODEL | dict(n_layers=1), data=data, batch_tokens=tokens, label_smoothing=0.1
        ),
        folder,
    )
    assert task.pack(model_for(task)) == (name == "translate-packed")
    return task, task.batch(np.asarray(task.rows(0)), 0)


@pytest.mark.parametrize(
    "name", ["language", "language-documents", "mask", "translate", "translate-packed", "classify"]
)
def test_a_whole_objective(tmp_path: Path, name: str) -> None:
    """What the loop compiles, as one graph without breaks.

    For most tasks the graph is what is tested, not the code made of it: aot_eager is enough, and quick.
    """
    task, batch = made(tmp_path, name)
    assert ("documents" in batch) == (name in ("language-documents", "mask"))
    backend = "inductor" if name == "language" else "aot_eager"
    eager, compiled = (Objective(model_for(task, dtype=torch.float32).train(), task) for _ in range(2))
    answers = eager(batch), torch.compile(compiled, fullgraph=True, backend=backend)(batch)
    for theirs, ours in zip(*answers, strict=True):
        assert_same(ours, theirs, within=FLOAT32)
    for answer in answers:
        answer[0].backward()
    for (site, theirs), ours in zip(eager.named_parameters(), compiled.parameters(), strict=True):
        assert theirs.grad is not None, site
        assert ours.grad is not None, site
        assert_same(ours.grad, theirs.grad, within=FLOAT32)


def test_a_run_keeps_what_it_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two runs finds all compiled code in the cache, gradients too."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "kept"))
    found: list[dict[str, int]] = []
    for name in "ab":
        torch._dynamo.reset()
        counters.clear()
        train(make_recipe("language", tmp_path, compile=True, steps=2, precision="float32"), tmp_path / name)
        found.append(dict(counters["aot_autograd"]))
    assert found[0]["autograd_cache_saved"] == found[1]["autograd_cache_hit"] > 0
    assert not any("autograd_cache_bypass" in each for each in found)
