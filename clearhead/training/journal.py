"""metrics.jsonl: one line for each logged step and each evaluation; TensorBoard beside it where that is installed."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any


class Journal:
    """Appends to a run's metrics. Only the first process writes; the others have `folder=None`."""

    def __init__(self, folder: Path | None, *, step: int, tensorboard: bool) -> None:
        self.file = None if folder is None else folder / "metrics.jsonl"
        self.board: Any = None
        if self.file is None or folder is None:
            return
        self._forget_after(step)
        self.file.touch()  # from here on there is a run to resume
        if tensorboard and importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def _forget_after(self, step: int) -> None:
        """Drop lines after the step a run resumes from, the result, and one that a kill left half: all will be written again."""
        assert self.file is not None
        if not self.file.exists():
            return
        text = self.file.read_text(encoding="utf-8", errors="replace")  # a kill may have cut a letter in two
        kept = [line for line in text.split("\n") if _step(line) <= step]
        work = self.file.with_suffix(".tmp")
        work.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        os.replace(work, self.file)

    def write(self, row: dict[str, Any]) -> None:
        if self.file is None:
            return
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")
        if self.board is not None:
            for name, value in row.items():
                if isinstance(value, int | float) and name != "step":
                    self.board.add_scalar(f"{row['kind']}/{name}", value, row["step"])
            self.board.flush()

    def close(self) -> None:
        if self.board is not None:
            self.board.close()


def _step(line: str) -> float:
    try:
        row = json.loads(line)
        return float("inf") if row["kind"] == "result" else float(row["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
