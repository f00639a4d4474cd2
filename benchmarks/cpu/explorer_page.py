"""The explorer's page with 1,000 tokens and 12 layers of 12 heads, in headless Chromium: what one waits for, and what it takes.

    .venv/bin/python benchmarks/cpu/explorer_page.py                     a random model of GPT-2's shape (but for its vocabulary)
    .venv/bin/python benchmarks/cpu/explorer_page.py --model gpt2-folder
    .venv/bin/python benchmarks/cpu/explorer_page.py --model SmolLM2-135M-Instruct.Q4_1.gguf --tokens 300 --clicks 60
    .venv/bin/python benchmarks/cpu/explorer_page.py --live build/experiments/stories260K.html/stories260K.html

The last one measures a page that computes by itself (`clearhead explore MODEL --export FILE --live`), opened from the disk.
The pass is shown layer by layer: "first thumbnails" and "first map" come before it has ended, "the answer" when it has.

Needs the dev extra and Chromium ($CHROMIUM, or `apt install chromium`). Browser and server share the machine's cores, so each
is in the other's figures. Every round opens a new page on another text: neither side has anything of it yet.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

from playwright.sync_api import Browser, Page, sync_playwright
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import clearhead as ch
from benchmarks.common.results import Table, save
from benchmarks.common.server import served
from clearhead.explorer.standalone_page import PAGE_FILES, read_lean

WORDS = "the cat sat on the mat while a dog ran over the hill and said hello there how are you to them".split()  # noqa: SIM905

# When thumbnails are here, and which tasks held the page up; installed before the page's own script runs.
WATCH = """
window.seen = {tasks: [], first: null, map: null, answer: null, all: null};
new PerformanceObserver((list) => window.seen.tasks.push(...list.getEntries().map((task) => task.duration)))
  .observe({type: 'longtask', buffered: true});
new MutationObserver(() => {
  const drawn = document.querySelectorAll('.head.here').length;
  if (drawn && !window.seen.first) window.seen.first = performance.now();
  if (document.querySelector('.one .summary')?.textContent) window.seen.map ??= performance.now();
  if (document.querySelector('.answer .bars')) window.seen.answer ??= performance.now();
  if (drawn && drawn === document.querySelectorAll('.head').length) window.seen.all ??= performance.now();
}).observe(document, {subtree: true, childList: true, attributes: true, attributeFilter: ['class']});
"""
# From the click to the frame in which the new map is drawn.
CLICK = """async (number) => {
  const began = performance.now();
  document.querySelectorAll('.head')[number].click();
  const frame = () => new Promise(requestAnimationFrame);
  do await frame(); while (document.querySelector('.one[aria-busy]'));
  await frame();
  return performance.now() - began;
}"""
# The work of a move of the pointer: its handlers, and what they have drawn in the next frame.
HOVER = """async ([x, y]) => {
  const canvas = document.querySelector('.one figure canvas');
  const box = canvas.getBoundingClientRect();
  const at = {clientX: box.left + x * box.width, clientY: box.top + y * box.height, bubbles: true};
  let start = 0;
  requestAnimationFrame(() => (start = performance.now()));
  const began = performance.now();
  canvas.dispatchEvent(new PointerEvent('pointermove', at));
  const handled = performance.now() - began;
  return handled + (await new Promise((done) => requestAnimationFrame(() => done(performance.now() - start))));
}"""


# A live page's answers to new texts: 30 tokens of a decoder or encoder; a translator's own text with another number.
LIVE = """([words, turns]) => {
  const {text} = window.CLEARHEAD_START.state, isPair = window.CLEARHEAD_MODEL.config.shape === 'encoder-decoder';
  const ask = (text) => window.CLEARHEAD_LOCAL.answer('read', {run: {text, target: null, second: null, changes: []}});
  const size = (text) => ask(text).source.ids.length;
  let from = 0;
  while (!isPair && size(words.slice(0, from).join(' ')) < 29) from++;
  const found = [];
  for (let turn = 0; turn < turns; turn++) {
    const first = words.slice(0, from - 1).join(' ');
    const next = isPair ? text.replace(/\\d+$/, String(1900 + turn)) : `${words[turn % 19]} ${first} ${turn}`;
    const began = performance.now(), answer = ask(next);
    found.push([performance.now() - began, answer.source.ids.length, answer.target?.ids.length ?? 0]);
  }
  return found;
}"""


def make_model(folder: Path) -> Path:
    """Of GPT-2's shape, with the few tokens that the texts need."""
    tokenizer = ch.train_tokenizer(texts=[" ".join(WORDS)] * 9, kind="bpe", vocab_size=400)
    config = ch.preset("gpt2", vocab_size=tokenizer.vocab_size)
    place = ch.save(ch.build(config, seed=0), folder / "model")
    tokenizer.save(place)
    return place


def make_text(place: Path, n_tokens: int, turn: int) -> str:
    """A text of about so many tokens, another one each turn."""
    tokenizer = ch.load_tokenizer(place)
    words = [WORDS[(7 * i + i * i // 3 + turn) % len(WORDS)] for i in range(n_tokens)]
    while len(tokenizer.encode(" ".join(words))) > n_tokens:
        words = words[: -max(1, len(words) // 200)]
    return " ".join(words)


def memory(pid: int, kind: str) -> float:
    """Of a process, in MB: "VmRSS" now, "VmHWM" at its highest."""
    found = re.search(rf"{kind}:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1e3 if found else float("nan")


def visit(browser: Browser, address: str, text: str, n_clicks: int) -> dict[str, Any]:
    """Open the page on a text; wait for all heads, click on some, move over the map, zoom, and look at other panels."""
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    context.add_init_script(WATCH)
    page = context.new_page()
    page.set_default_timeout(120_000)
    page.goto(f"{address}#model=model&panel=heads&text={quote(text)}")
    while not page.evaluate("window.seen.all"):
        page.wait_for_timeout(100)
    page.wait_for_timeout(500)
    heads = page.locator(".head").count()
    clicks = [page.evaluate(CLICK, (31 * i + 17) % heads) for i in range(n_clicks)]
    hovers = [page.evaluate(HOVER, [0.2 + 0.7 * i / 50, 0.1 + 0.8 * (i * 7 % 50) / 50]) for i in range(50)]
    look_around(page)
    told: dict[str, Any] = page.evaluate("window.seen")
    context.close()
    return {**told, "clicks": clicks, "hovers": hovers}


def measure_live(browser: Browser, file: Path) -> list[Any]:
    """A row: how long a live page takes for a new text, the median of 20."""
    page = browser.new_page()
    page.goto(file.resolve().as_uri())
    page.wait_for_selector("[role=tab]")
    took, read, written = zip(*page.evaluate(LIVE, [WORDS * 9, 23])[3:], strict=True)  # the first ones compile
    page.close()
    tokens = f"{statistics.median(read):.0f} tokens read" + (f", {max(written)} written" if max(written) else "")
    size = f"{file.stat().st_size / 1e6:.2f} MB"
    return [file.name, size, tokens, f"{statistics.median(took):.1f} ms", f"{max(took):.1f} ms"]


def look_around(page: Page) -> None:
    for _ in range(4):
        page.get_by_label("Zoom in").click()
    for panel in ("lens", "flow", "intervene", "heads"):
        page.click(f"#tab-{panel}")
        page.wait_for_timeout(1000)
    page.locator("[role=option]").last.hover()
    page.locator("#theme").click()
    page.wait_for_timeout(1000)


def p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20, method="inclusive")[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a folder or a GGUF file with a decoder and its tokenizer")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clicks", type=int, default=30)
    parser.add_argument(
        "--live", type=Path, nargs="+", help="files that compute by themselves; only these are measured"
    )
    args = parser.parse_args()
    names = (os.environ.get("CHROMIUM") or "chromium", "chromium-browser", "google-chrome")
    chromium = next(filter(None, map(shutil.which, names)), None)
    if chromium is None:
        raise SystemExit("no Chromium found; on Debian or Ubuntu: apt install chromium")
    began = time.monotonic()
    root = ["--no-sandbox"] if os.geteuid() == 0 else []
    if args.live:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=root)
            rows = [measure_live(browser, file) for file in args.live]
            browser.close()
        note = f"Load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores. The aim: 100 ms for 30 tokens."
        table = Table("Pages that compute", ["file", "size", "text", "median of 20", "slowest"], rows, note, {})
        table.show(Console())
        save("explorer_live", [table], seconds=time.monotonic() - began)
        return
    place = args.model or make_model(Path(tempfile.mkdtemp()))
    texts = [make_text(place, args.tokens, turn) for turn in range(args.rounds + 1)]
    with served({"model": place}) as (address, pid), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=root)
        visit(browser, address, " ".join(texts[0].split()[:20]), 3)  # both sides compile and allocate once
        before = memory(pid, "VmRSS")
        rounds = [visit(browser, address, text, args.clicks) for text in texts[1:]]
        after, most = memory(pid, "VmRSS"), memory(pid, "VmHWM")
        browser.close()
    config = ch.load(place).config
    kept = args.rounds * 2 * config.n_layers * args.tokens * config.d_model * 4 / 1e6
    square = args.rounds * config.n_layers * config.n_heads * args.tokens**2 * 4 / 1e6
    clicks, hovers, tasks = ([x for each in rounds for x in each[kind]] for kind in ("clicks", "hovers", "tasks"))
    size = sum(len(read_lean(file)) for file in PAGE_FILES.iterdir() if file.suffix in (".js", ".css"))
    rows = [
        ["first thumbnails, from opening the page", f"{max(each['first'] for each in rounds) / 1e3:.2f} s", "1 s"],
        ["first map", f"{max(each['map'] for each in rounds) / 1e3:.2f} s", "2 s"],
        ["the answer", f"{max(each['answer'] for each in rounds) / 1e3:.2f} s", "-"],
        ["all thumbnails", f"{max(each['all'] for each in rounds) / 1e3:.2f} s", "10 s"],
        [f"click to map, p95 of {len(clicks)}", f"{p95(clicks):.0f} ms", "200 ms"],
        [f"hover, p95 of {len(hovers)}", f"{p95(hovers):.1f} ms", "16 ms"],
        ["longest task of the page's thread", f"{max(tasks, default=0):.0f} ms", "50 ms"],
        ["tasks over 50 ms, a round", f"{len(tasks) / len(rounds):.1f}", "0"],
        [
            "server's memory, more than before",
            f"{after - before:.0f} MB (peak {most - before:.0f})",
            f"{kept:.0f} MB kept",
        ],
        ["script and style", f"{size / 1e3:.1f} kB", "200 kB"],
    ]
    note = (
        f"{args.rounds} rounds, the slowest of them where it is one time a round; load {os.getloadavg()[0]:.1f} on "
        f"{os.cpu_count()} cores. Every head's weights would be {square:,.0f} MB."
    )
    title = f"The explorer, {args.tokens:,} tokens, {config.n_layers} x {config.n_heads} heads, width {config.d_model}"
    table = Table(title, ["figure", "here", "aim"], rows, note, {"rounds": rounds, "memory": [before, after, most]})
    table.show(Console())
    save("explorer_page", [table], seconds=time.monotonic() - began)


if __name__ == "__main__":
    main()
