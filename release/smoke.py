"""Try a built wheel as its first user would: a new environment, no compiler, no node, no browser, an empty home folder.

    python release/smoke.py dist/clearhead-0.1.0-py3-none-manylinux_2_28_x86_64.whl

It installs the wheel alone, trains 20 steps, writes a text, exports the explorer's page and makes a forecast; then, with the
extra `serve`, it serves the model and asks it a question. Prints each command with its seconds; exits with 1 if one fails.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from clearhead.kernels import native_library

ROOT = Path(__file__).resolve().parents[1]
SMALL = ["model.n_layers=2", "model.d_model=64", "model.n_heads=4", "train.steps=20", "train.batch_tokens=2048"]
NEEDS_NATIVE = (
    "from clearhead.kernels import native, native_library\n"
    "assert native.is_there(), native.why_not()\n"
    "assert native_library.locate().parent == native_library.PREBUILT\n"
    "print(native_library.locate().name)"
)

# Decodes with float32, int8 and int4 weights; prints where the kernels are, and a hash of the tokens and their logits.
BITS = """
import hashlib
import torch
import clearhead as ch
from clearhead.kernels import native, native_library
from clearhead.quantization.integer import quantize
assert native.is_there(), native.why_not()
print(native_library.locate())
for kind in (None, "int8", "int4"):
    model = ch.load("runs/x")
    if kind is not None:
        model = quantize(model, kind)
    tokens = torch.arange(2, 9)[None]
    content = hashlib.sha256()
    with torch.no_grad():
        for _ in range(20):
            logits = model(tokens)[:, -1]
            tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], 1)
            content.update(logits.numpy().tobytes())
        # The decode step itself: the score adds the log-probabilities of all its tokens.
        found = ch.generate(model, [[2, 3, 4], [5, 6]], max_new_tokens=20, return_scores=True)
    content.update(repr(found).encode())
    print(f"{kind or 'float32'}={content.hexdigest()[:16]}")
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("wheel", type=Path, help="the built wheel")
    parser.add_argument("--python", default=sys.executable, help="the interpreter to make the environment with")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            Trial(args.python, Path(folder)).run(args.wheel.resolve())
        except subprocess.CalledProcessError as error:
            print(f"error: {error}\n{error.stdout or ''}{error.stderr or ''}", file=sys.stderr)
            return 1
    return 0


class Trial:
    """A new environment and an empty folder to work in. The path holds the environment's programs and a shell, nothing else."""

    def __init__(self, python: str, folder: Path) -> None:
        self.folder, self.bin = folder, folder / "env" / "bin"
        (folder / "tools").mkdir()
        (folder / "tools" / "sh").symlink_to(shutil.which("sh") or "/bin/sh")
        self.env = {"HOME": str(folder), "PATH": f"{self.bin}:{folder / 'tools'}", "LANG": "C.UTF-8"}
        self.env |= {
            name: value
            for name, value in os.environ.items()
            if name.lower().startswith(("pip_", "http", "ssl", "no_p"))
        }
        subprocess.run([python, "-m", "venv", folder / "env"], check=True)

    def run(self, wheel: Path) -> None:
        self.install(str(wheel))
        self.step("python", "-c", NEEDS_NATIVE)
        lines = [
            f"the {size} {who} sees the bird and says hello {i}."
            for i in range(999)
            for size in ("red", "big")
            for who in ("cat", "dog")
        ]
        (self.folder / "text.txt").write_text("\n".join(lines))
        started = time.perf_counter()
        self.step("clearhead", "presets")
        self.step("clearhead", "cost", "gpt2")
        self.step(
            "clearhead",
            "train",
            "language",
            "text.txt",
            "--out",
            "runs/x",
            *(word for each in SMALL for word in ("--set", each)),
        )
        self.step("clearhead", "generate", "runs/x", "the cat", "--max-new-tokens", "9")
        print(
            f"from an installed wheel to the first generated text, training included: {time.perf_counter() - started:.1f} s"
        )
        self.compare_with_source()
        self.step("clearhead", "explore", "runs/x", "the red cat", "--export", "page.html")
        assert (self.folder / "runs" / "x" / "report.html").is_file(), "training wrote no report"
        refused = subprocess.run(
            [self.bin / "clearhead", "serve", "runs/x"], cwd=self.folder, env=self.env, capture_output=True, text=True
        )
        assert refused.returncode == 1, refused.stdout
        assert "clearhead[serve]" in refused.stderr, refused.stderr
        print(f"without the extra: {refused.stderr.strip()}")
        self.install(f"{wheel}[serve]")
        self.serve()

    def compare_with_source(self) -> None:
        """The wheel's kernels and those compiled from its sources give the same bits: tokens and logits, in three types."""
        compiler = native_library.find_compiler()
        inside = self.folder / "env" / "lib"
        (package,) = inside.glob("python3*/site-packages/clearhead")
        copy = self.folder / "source" / "clearhead"
        shutil.copytree(package, copy, ignore=shutil.ignore_patterns("prebuilt", "__pycache__"))
        source = {**self.env, "PYTHONPATH": str(copy.parent), "CXX": compiler, "PATH": os.environ["PATH"]}
        said = [
            subprocess.run(
                [self.bin / "python", "-c", BITS], cwd=self.folder, env=env, capture_output=True, text=True, check=True
            ).stdout.split()
            for env in (self.env, source)
        ]
        (wheel, *bits), (compiled, *others) = said
        assert Path(wheel).parent.name == "prebuilt", wheel
        assert Path(compiled).parent.name != "prebuilt", compiled
        assert bits == others, f"the wheel's kernels and those compiled here differ: {bits} and {others}"
        print(f"the wheel and its source compiled here give the same bits: {', '.join(bits)}")

    def install(self, what: str) -> None:
        self.step(
            "python",
            "-m",
            "pip",
            "install",
            "-qq",
            "--disable-pip-version-check",
            "-c",
            str(ROOT / "constraints.txt"),
            what,
        )

    def step(self, program: str, *args: str) -> None:
        started = time.perf_counter()
        done = subprocess.run(
            [self.bin / program, *args], cwd=self.folder, env=self.env, capture_output=True, text=True, check=True
        )
        print(f"{time.perf_counter() - started:6.1f} s  {program} {' '.join(args)}".replace("\n", " ")[:150])
        for line in done.stdout.strip().splitlines()[-2:]:
            print(f"          {line[:120]}")

    def serve(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [self.bin / "clearhead", "serve", "runs/x", "--port", str(port)]
        server = subprocess.Popen(
            command, cwd=self.folder, env=self.env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        try:
            for _ in range(600):
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5) as answer:
                        assert answer.status == 200
                    break
                except OSError:
                    assert server.poll() is None, server.stderr and server.stderr.read()
                    time.sleep(0.2)
            body = json.dumps({"model": "x", "prompt": "the cat", "max_tokens": 9}).encode()
            question = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(question, timeout=60) as answer:
                print(f"served: {json.load(answer)['choices'][0]['text']!r}")
        finally:
            server.terminate()
            server.communicate(timeout=60)


if __name__ == "__main__":
    raise SystemExit(main())
