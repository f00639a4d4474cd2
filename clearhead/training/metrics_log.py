"""The log of a run: metrics.jsonl, and TensorBoard if it is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import threading
from pathlib import Path
from typing import Any

from clearhead.checkpoint.durable_files import NOT_A_LINK, write_text

CLOCKED = ("tokens_per_second", "utilisation", "seconds")


def read_repeatable(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl without what a clock says: equal for two runs of one recipe, resumed or not."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    # Every process that trained has written a row of its own about its speed.
    return [{name: x for name, x in row.items() if name not in CLOCKED} for row in lines if row["kind"] != "speed"]


class MetricsLog:
    """Appends rows to metrics.jsonl. Only the first process writes; the others have `folder=None`."""

    def __init__(self, folder: Path | None, *, step: int, tensorboard: bool) -> None:
        self.file = None if folder is None else folder / "metrics.jsonl"
        self.tensorboard: Any = None
        if self.file is None or folder is None:
            return
        self._truncate(self.file, step)  # from here on there is a run to resume
        if tensorboard and importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            _silence_writer()
            self.tensorboard = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def _truncate(self, file: Path, step: int) -> None:
        """Drop what a resumed run writes again: lines after its first step, the result, a line that a kill cut off."""
        # A kill may have cut a character in two.
        text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
        kept = [line for line in text.split("\n") if _step(line) <= step]
        write_text(file, "".join(line + "\n" for line in kept))

    def write(self, row: dict[str, Any]) -> None:
        if self.file is None:
            return
        handle = os.open(self.file, os.O_CREAT | os.O_WRONLY | os.O_APPEND | NOT_A_LINK, 0o666)
        with os.fdopen(handle, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")
        if self.tensorboard is not None:
            for name, value in row.items():
                if isinstance(value, int | float) and name != "step":
                    self.tensorboard.add_scalar(f"{row['kind']}/{name}", value, row["step"])
            self.tensorboard.flush()

    def close(self) -> None:
        if self.tensorboard is not None:
            self.tensorboard.close()


def _silence_writer() -> None:
    """A full disk ends TensorBoard's own thread with a traceback. `flush` raises the same error in ours, which becomes one line."""
    before = threading.excepthook
    if getattr(before, "is_ours", False):
        return

    def hook(args: threading.ExceptHookArgs) -> None:
        if not (isinstance(args.exc_value, OSError) and type(args.thread).__name__ == "_AsyncWriterThread"):
            before(args)

    hook.is_ours = True  # type: ignore[attr-defined]
    threading.excepthook = hook


def _step(line: str) -> float:
    """The step of a line; infinity for the result and for what is no whole line."""
    try:
        row = json.loads(line)
        return float("inf") if row["kind"] == "result" else float(row["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
