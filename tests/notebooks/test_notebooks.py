"""The notebooks of docs/notebooks, run from the first cell to the last in a kernel of their own, with small parameters."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.packages import unpacked

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
names = [path.stem for path in NOTEBOOKS]

SMALL: dict[str, dict[str, Any]] = {
    "attention_on_dates": dict(
        steps=3, settings=["train.tensorboard=false", "train.score_rows=3", "train.evaluate_rows=9", "train.samples=1"]
    ),
    "induction_head": dict(steps=5),
    "ioi_patching": dict(steps=5, big=dict(n_layers=2, d_model=48, n_heads=4, d_ff=96, vocab_size=300), length=64),
    "logit_lens_smollm2": dict(every=15),
    "lora_on_cpu": dict(
        **dict(steps=3, lora_steps=3, n_files=12, length=64),
        sizes=["model.n_layers=1", "model.d_model=32", "model.n_heads=2", "data.vocab_size=320"],
    ),
}
# Words that the outputs must have: text, or the kind of a rich display.
SHOWN = {
    "attention_on_dates": [
        r"EncoderDecoder\(",
        r"Seen\(",
        "text/html",
        "image/png",
        "le 7 mars 1989",
        "the loss rises by",
    ],
    "induction_head": ["image/png", r"induction: \d\.\d\d, head \d of blocks\.\d", r"without all \d heads above"],
    "ioi_patching": ["28 effects are equal", r"clearhead +\d+\.\d\d s", r"transformers +\d+\.\d\d s", "image/png"],
    "logit_lens_smollm2": [
        "Paris",
        r"after 30 blocks: ' Paris' has +\d",
        r"\+?\d\.\d\d with France",
        "image/png",
        "rgba",
    ],
    "lora_on_cpu": ["adapted by LoRA", r"rank of the change: 8", r"6 of 12 tensors changed"],
}


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=names)
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    parameters = SMALL[path.stem] | (
        {"model_path": str(unpacked("smollm2"))} if path.stem == "logit_lens_smollm2" else {}
    )
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "notebooks" / "execute.py", path, "out.ipynb", json.dumps(parameters)],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    notebook = nbformat.read(tmp_path / "out.ipynb", as_version=4)
    outputs = json.dumps([cell.outputs for cell in notebook.cells if cell.cell_type == "code"], ensure_ascii=False)
    for words in SHOWN[path.stem]:
        assert re.search(words, outputs), words
    assert '"name": "stderr"' not in outputs  # a warning on a page of the book


@pytest.mark.parametrize("path", NOTEBOOKS, ids=names)
def test_a_notebook_is_stored_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
    assert notebook.cells[0].source.startswith("# ")
    assert sum("parameters" in cell.metadata.get("tags", []) for cell in notebook.cells) == 1
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None
        else:
            links = re.findall(r"\]\(([^)#\s]+)", cell.source)
            assert [link for link in links if "://" not in link and not (path.parent / link).exists()] == []


def test_the_page_lists_every_notebook() -> None:
    page = (ROOT / "docs" / "notebooks.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\(notebooks/(\w+)\.ipynb\)", page)) == set(names) == set(SMALL)
