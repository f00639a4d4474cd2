"""Run a notebook in the current folder, with other parameters, and write it with its outputs:

    python tests/notebooks/execute.py docs/notebooks/induction_head.ipynb out.ipynb '{"steps": 10}'

The parameters are assigned at the end of the cell that is tagged "parameters". Without any, the notebook runs as a reader runs it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient


def execute(source: Path, out: Path, parameters: dict[str, object]) -> None:
    notebook = nbformat.read(source, as_version=4)
    (cell,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", []))
    unknown = [name for name in parameters if f"{name} =" not in cell.source and f"{name}," not in cell.source]
    assert not unknown, f"{source.name} has no parameter {unknown}"
    cell.source += "".join(f"\n{name} = {value!r}" for name, value in parameters.items())
    try:
        NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    finally:
        nbformat.write(notebook, out)


if __name__ == "__main__":
    execute(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]) if len(sys.argv) > 3 else {})
