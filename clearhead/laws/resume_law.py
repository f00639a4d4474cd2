"""check_resume: a run that is killed and resumed ends as one that is left alone, to the last bit, on the user's own recipe."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from clearhead.errors import InputError
from clearhead.laws.finding import Finding
from clearhead.training import Recipe
from clearhead.training.metrics_log import read_repeatable

PAUSE = 0.002  # seconds between two looks for the checkpoint


def check_resume(recipe: Recipe, steps: int, folder: Path | None = None) -> Finding:
    """Train 2 N steps in one process; and again in another that is killed (SIGKILL) after step N is saved, then resumed."""
    if steps < 1:
        raise InputError(f"steps={steps} is no number of steps before the kill; give 1 or more")
    recipe = recipe.with_set([f"train.steps={2 * steps}", f"train.checkpoint_every={steps}", "train.tensorboard=false"])
    with tempfile.TemporaryDirectory(prefix="clearhead-check-", dir=folder) as name:
        place = Path(name)
        file = place / "recipe.toml"
        file.write_text(recipe.to_toml(), encoding="utf-8")
        alone, killed = place / "alone", place / "killed"
        wait(start(str(file), "--out", str(alone)), "the run that is left alone")
        kill_after(start(str(file), "--out", str(killed)), killed / "checkpoints" / f"step-{steps:08}", steps)
        saved = max(path.name for path in (killed / "checkpoints").glob("step-*"))
        wait(start("--resume", str(killed)), "the run that was killed and resumed")
        return compare_runs(alone, killed, f"{2 * steps} steps, killed by SIGKILL with {saved} saved")


def start(*arguments: str) -> subprocess.Popen[str]:
    """`clearhead train` in a process of its own."""
    command = [sys.executable, "-m", "clearhead", "train", *arguments]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=dict(os.environ))


def wait(process: subprocess.Popen[str], what: str) -> None:
    _, said = process.communicate()
    if process.returncode:
        line = said.strip().split("\n")[-1].removeprefix("clearhead: ")
        raise InputError(f"{what} ended with {process.returncode}: {line:.300}; try it alone: clearhead train")


def kill_after(process: subprocess.Popen[str], checkpoint: Path, steps: int) -> None:
    """SIGKILL as soon as the checkpoint is there; a checkpoint appears whole, by a rename."""
    try:
        while not checkpoint.is_dir() and process.poll() is None:
            time.sleep(PAUSE)
    finally:
        if process.poll() is None:
            process.kill()
    if process.wait() == -signal.SIGKILL:
        process.communicate()
        return
    wait(process, "the run that was to be killed")
    raise InputError(f"the run ended before it could be killed after step {steps}; got --steps {steps}; give more")


def compare_runs(alone: Path, resumed: Path, what: str) -> Finding:
    law = "resumed = left alone"
    wanted, found = outcome(alone), outcome(resumed)
    wrong = [f"{name}: {found[name]}, left alone {wanted[name]}" for name in wanted if wanted[name] != found[name]]
    if wrong:
        return Finding("fail", f"{what}; sha256 differ: {'; '.join(wrong)}", law=law)
    hashes = ", ".join(f"{name} {each}" for name, each in wanted.items())
    return Finding("pass", f"{what}; sha256 {hashes}", 0.0, 0.0, law=law)


def outcome(folder: Path) -> dict[str, str]:
    """The hashes of what a run leaves: its weights, and its metrics without what a clock says."""
    metrics = json.dumps(read_repeatable(folder)).encode()
    parts = {"weights": (folder / "model.safetensors").read_bytes(), "metrics": metrics}
    return {name: hashlib.sha256(content).hexdigest()[:16] for name, content in parts.items()}
