"""What Windows, macOS and other systems lack is not needed: the modules, functions and files are hidden, and everything still runs.

This is as far as one Linux machine can go; the workflows in .github run the tests on the real systems.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from clearhead import kernels
from clearhead.cli.arguments import find_device
from clearhead.training.precision import uses_bfloat16
from clearhead.training.recipe import Train

ROOT = Path(__file__).resolve().parents[1]

HIDE = """
import builtins, os, pathlib, signal, sys
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
import torch, torch.distributed.checkpoint  # torch itself is built for its system; what follows is ours
for name in ("getuid", "geteuid", "sysconf", "fork", "sync", "sched_getaffinity", "sched_setaffinity", "getloadavg",
             "O_NOFOLLOW", "O_DIRECTORY", "fchmod", "chown", "posix_fadvise", "register_at_fork", "killpg", "setsid", "mkfifo"):
    if hasattr(os, name):
        delattr(os, name)
for name in ("SIGHUP", "SIGKILL", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGQUIT", "setitimer", "alarm"):
    if hasattr(signal, name):
        delattr(signal, name)
def hidden(path):
    return str(path).startswith(("/proc", "/sys"))
for name in ("exists", "is_file", "is_dir"):
    was = getattr(pathlib.Path, name)
    setattr(pathlib.Path, name, lambda self, *a, was=was, **k: not hidden(self) and was(self, *a, **k))
was_open = builtins.open
def no_proc(file, *args, **kwargs):
    if isinstance(file, (str, os.PathLike)) and hidden(os.fspath(file)):
        raise FileNotFoundError(2, "hidden", str(file))
    return was_open(file, *args, **kwargs)
builtins.open = no_proc
import io
io.open = no_proc
import ctypes
class Kernel32:
    def GlobalMemoryStatusEx(self, status):
        status._obj.available = 8 << 30
        return 1
class Windll:
    kernel32 = Kernel32()
ctypes.windll = Windll()
"""

USE = """
import importlib, pkgutil
import clearhead as ch
for module in pkgutil.walk_packages(ch.__path__, "clearhead."):
    if not module.name.startswith(("clearhead.kernels.gpu", "clearhead.__main__")):
        importlib.import_module(module.name)
from pathlib import Path
from clearhead.cli import app
from typer.testing import CliRunner

def clearhead(*words):
    done = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output

Path("text.txt").write_text("\\n".join(f"the cat sees bird number {i * i}." for i in range(2000)))
small = [w for s in ("model.n_layers=1", "model.d_model=32", "model.n_heads=2", "data.length=32", "train.steps=4",
                     "train.batch_tokens=256", "train.checkpoint_every=2") for w in ("--set", s)]
clearhead("train", "language", "text.txt", "--out", "run", *small)
clearhead("train", "--resume", "run")
assert clearhead("generate", "run", "the cat", "--max-new-tokens", "5").startswith("the cat")
clearhead("explore", "run", "the cat", "--export", "page.html")
assert "8.6 GB free" in clearhead("doctor")
model = ch.load("run")
ch.save(model, "copy")
ch.load("copy")
print("all ran")
"""


APPLE = """
import sys
import torch
import clearhead as ch
from tests.fake_mps import NAME, fake_mps
from clearhead.kernels import checks
from clearhead.cli import app
from pathlib import Path
from typer.testing import CliRunner

def clearhead(*words):
    done = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output

Path("text.txt").write_text("\\n".join(f"the cat sees bird number {i * i}." for i in range(2000)))
small = [w for s in ("model.n_layers=1", "model.d_model=32", "model.n_heads=2", "data.length=32", "train.steps=4",
                     "train.batch_tokens=256", "train.checkpoint_every=2", "train.average=2", f"train.device={NAME}")
         for w in ("--set", s)]
with fake_mps():
    try:
        torch.ones(2, device=NAME).double()
    except TypeError:
        pass
    else:
        raise SystemExit("the stand-in has float64")
    clearhead("train", "language", "text.txt", "--out", "run", *small)
    for more in ([], ["--temperature", "0.7", "--top-p", "0.9"]):
        there, cpu = (clearhead("generate", "run", "the cat", "--max-new-tokens", "9", "--device", device, *more)
                      for device in (NAME, "cpu"))
        assert there == cpu, (there, cpu)
    clearhead("explore", "run", "the cat", "--export", "page.html", "--device", NAME)
    model = ch.load("run", device=NAME)
    assert model(torch.ones(1, 3, dtype=torch.long, device=NAME)).device.type == NAME
print("all ran")
"""


def test_auto_takes_the_gpu_of_apple(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert kernels.best_device() == find_device("auto") == "mps"
    assert not uses_bfloat16(Train(), torch.device("mps")), "bfloat16 by itself is for GPUs that compute it faster"
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert kernels.best_device() == find_device("auto") == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert kernels.best_device() == find_device("auto") == "cuda"


@pytest.mark.slow
def test_training_and_generating_without_float64(tmp_path: Path) -> None:
    run(APPLE, tmp_path, CLEARHEAD_NATIVE="0")


@pytest.mark.slow
def test_nothing_of_one_system_is_needed(tmp_path: Path) -> None:
    run(HIDE + USE, tmp_path)


def run(script: str, tmp_path: Path, **more: str) -> None:
    env = {
        **os.environ,
        **more,
        "PYTHONPATH": str(ROOT),
        "CLEARHEAD_CACHE": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("all ran\n")
