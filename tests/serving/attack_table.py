"""Each attack of attacks.py on a real server, while a bystander sends small requests.

.venv/bin/python -m tests.serving.attack_table --seconds 15 --only audio

Two keys: the attacker's and the bystander's. The table shows how long the bystander waited, and the server's memory before, at its
peak and after. The run fails if a request of the bystander failed, a health check did, an attack was answered otherwise than it
should be, or the bystander's p99 is above the limit.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import clearhead as ch
from tests.serving.attacks import ATTACKS
from tests.serving.live_server import make_models, served

KEYS = {"CLEARHEAD_API_KEYS": "attacker,bystander"}


def make_scribe(folder: Path) -> Path:
    """A tiny Whisper for English: its text is bytes."""
    sizes: dict[str, Any] = dict(n_layers=2, d_model=32, n_heads=4, d_ff=64, max_len=64)
    model = ch.build(ch.preset("whisper-tiny", **sizes, vocab_size=256 + 2 + 99 + 6 + 1501))
    model.generation = ch.Generation(eos=(256,), decoder_start=257)
    place = ch.save(model, folder / "scribe")
    ranks = [base64.b64encode(bytes([byte])) + b" " + str(byte).encode() for byte in range(256)]
    (place / "gpt2.tiktoken").write_bytes(b"\n".join(ranks))
    return place


@dataclass
class Bystander:
    """Small requests on new connections, one after the other."""

    url: str
    seconds: list[float] = field(default_factory=list[float])
    failed: list[str] = field(default_factory=list[str])

    def ask(self) -> None:
        body = json.dumps({"model": "gpt", "prompt": "the cat", "max_tokens": 4, "temperature": 0}).encode()
        headers = {"authorization": "Bearer bystander", "content-type": "application/json"}
        for method, path, content in (("POST", "/v1/completions", body), ("GET", "/healthz", None)):
            began = time.monotonic()
            place = urlsplit(self.url)
            # Another address than the attacker's, where the machine has several of its own.
            source = ("127.0.0.2", 0) if sys.platform == "linux" else None
            line = http.client.HTTPConnection(place.hostname or "", place.port, timeout=120, source_address=source)
            try:
                line.request(method, path, content, headers)
                answer = line.getresponse()
                answer.read()
                if answer.status != 200:
                    self.failed.append(f"{path} {answer.status}")
            except OSError as error:
                self.failed.append(f"{path} {type(error).__name__}")
            finally:
                line.close()
            self.seconds.append(time.monotonic() - began)

    def at(self, share: float) -> float:
        return sorted(self.seconds)[min(len(self.seconds) - 1, int(share * len(self.seconds)))]


def memory(pid: int, name: str) -> float:
    """VmRSS or VmHWM, in MB."""
    found = re.search(rf"{name}:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1e3 if found else 0.0


def attack(name: str, url: str, pid: int, seconds: float, limit: float) -> list[str]:
    """One row of the table, printed; what went wrong."""
    before = memory(pid, "VmRSS")
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak counts from here
    bystander = Bystander(url)
    command = [sys.executable, "-m", "tests.serving.attacks", name, url, "attacker", str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            bystander.ask()
            time.sleep(0.05)
        assert process.stdout is not None
        statuses = {int(status): n for status, n in json.loads(process.stdout.read()).items()}
    peak = memory(pid, "VmHWM")
    time.sleep(2)
    answers = ", ".join(f"{n} x {status or 'closed'}" for status, n in sorted(statuses.items()))
    p50, p99, longest = bystander.at(0.5), bystander.at(0.99), max(bystander.seconds)
    memories = f"{before:,.0f}, {peak:,.0f}, {memory(pid, 'VmRSS'):,.0f}"
    n = len(bystander.seconds)
    print(
        f"| {ATTACKS[name].words} | {answers} | {n} | {p50:.2f} | {p99:.2f} | {longest:.2f} | {memories} |", flush=True
    )
    wrong = [f"{name}: the bystander got {n} x {what}" for what, n in Counter(bystander.failed).items()]
    wrong += [f"{name}: answered with {status}" for status in set(statuses) - set(ATTACKS[name].statuses)]
    return [*wrong, *([f"{name}: p99 is {p99:.2f} s, and {limit} is the limit"] if p99 > limit else [])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--limit", type=float, default=2.0, help="the bystander's longest p99, in seconds")
    parser.add_argument("--only", nargs="*", choices=list(ATTACKS), default=list(ATTACKS))
    asked = parser.parse_args()
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        places = [make_models(Path(folder))["gpt"], make_scribe(Path(folder))]
        with served(*map(str, places), "--measure", env=KEYS) as (url, process):
            for _ in range(5):
                Bystander(url).ask()
            print(
                f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; seconds of the bystander, MB of the server\n"
            )
            print("| attack | answers | requests of the bystander | p50 | p99 | max | memory before, peak, after |")
            print("|---|---|---|---|---|---|---|")
            for name in asked.only:
                wrong += attack(name, url, process.pid, asked.seconds, asked.limit)
            assert process.poll() is None, "the server has ended"
    print("\n".join(wrong) or "\nall held")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
