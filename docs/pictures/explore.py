"""Takes the pictures of the explorer: each panel, light and dark, wide and on a phone.

clearhead demo dates --out runs/dates
clearhead demo digits --out runs/digits
python docs/pictures/explore.py runs/dates path/to/decoder runs/digits

Writes docs/pictures/explorer/PANEL-THEME-WIDTH.png. Needs the dev extra and Chromium ($CHROMIUM, or `apt install chromium`).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlencode

from playwright.sync_api import Page, sync_playwright

OUT = Path(__file__).parent / "explorer"
WIDTHS = {"wide": (1440, 900), "phone": (390, 844)}
STORY = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, Lily"
DATE = "martes, 7 de marzo de 1989"
PAIR = "There was a little boy. One day,", "There was a little girl. One day,"
WITHOUT = ",".join(f"decoder.blocks.1.cross:{head}:zero" for head in range(4))

# Picture, model (by its place among the arguments), panel, and what else the address says.
VIEWS: list[tuple[str, int, str, dict[str, str]]] = [
    ("alignment", 0, "heads", {"text": DATE}),
    ("heads", 1, "heads", {"text": STORY}),
    ("digit", 2, "heads", {"text": "sample:3"}),
    (
        "follow",
        0,
        "follow",
        {
            "text": DATE,
            "attention": "cross",
            "site": "decoder.blocks.1.cross",
            "head": "1",
            "follow.at": "2",
            "follow.step": "7",
        },
    ),
    ("lens", 1, "lens", {"text": STORY}),
    ("flow", 0, "flow", {"text": DATE}),
    ("intervene", 0, "intervene", {"text": DATE, "changes": WITHOUT}),
    ("attribution", 1, "attribution", {"text": STORY}),
    ("patching", 1, "patching", {"text": PAIR[0], "second": PAIR[1], "token": " she", "against": " he"}),
    ("sampling", 1, "generate", {"text": STORY, "generate.top_k": "12", "generate.temperature": "0.8"}),
    ("beams", 0, "generate", {"text": DATE}),
    ("positions", 1, "positions", {}),
    ("sandbox", 1, "sandbox", {}),
    ("geometry", 1, "geometry", {}),
    ("cost", 1, "cost", {}),
]


@contextmanager
def served(places: list[Path]) -> Generator[str]:
    named = [f"{place.stem}={place}" for place in places]
    command = [sys.executable, "-m", "clearhead", "serve", *named, "--port", "0", "--device", "cpu"]
    log = Path(tempfile.mkdtemp()) / "log"
    with log.open("w") as out, subprocess.Popen(command, stderr=out, stdout=out) as process:
        try:
            while not (found := re.search(r"running on (http://\S+)", log.read_text())):
                if process.poll() is not None:
                    raise SystemExit(log.read_text())
                time.sleep(0.1)
            yield found[1]
        finally:
            process.terminate()


def prepare(page: Page, name: str) -> None:
    """What a reader would do before looking: choose a token, ask for the sweep, choose a branch."""
    settle(page)
    match name:
        case "alignment":
            page.locator("[aria-label='Target tokens'] [role=option]").nth(2).click()
        case "heads":
            page.locator("[role=option]").last.click()
        case "intervene":
            page.get_by_role("button", name="Try every head").click()
        case "cost":
            page.get_by_role("button", name="Measure here").click()
        case _:
            pass
    settle(page)
    page.mouse.move(1, 1)
    page.evaluate("document.activeElement?.blur(); window.scrollTo(0, 0)")
    page.wait_for_timeout(100)


def settle(page: Page) -> None:
    page.wait_for_load_state("networkidle")
    while page.locator("[aria-busy=true]").count():
        page.wait_for_timeout(50)


def reduce(file: Path) -> None:
    """A palette, for a third of the bytes: the colours of large areas, and the most distant ones, which thin lines have."""
    try:
        from PIL import Image
    except ImportError:
        return
    with Image.open(file) as opened:
        picture = opened.convert("RGB")
    palette = Image.new("P", (1, 1))
    common, distant = (
        picture.quantize(128, method=how).getpalette() or []
        for how in (Image.Quantize.MEDIANCUT, Image.Quantize.MAXCOVERAGE)
    )
    palette.putpalette(common[:384] + distant[:384])
    small = picture.quantize(palette=palette, dither=Image.Dither.NONE)
    small.save(file, optimize=True)


def main() -> None:
    places = [Path(place) for place in sys.argv[1:]]
    names = (os.environ.get("CHROMIUM") or "chromium", "chromium-browser", "google-chrome")
    chromium = next(filter(None, map(shutil.which, names)), None)
    if len(places) != 3 or chromium is None:
        raise SystemExit(__doc__)
    OUT.mkdir(exist_ok=True)
    with served(places) as address, sync_playwright() as playwright:
        root = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=chromium, args=root)
        for width, (across, down) in WIDTHS.items():
            for theme in ("light", "dark"):
                context = browser.new_context(
                    viewport={"width": across, "height": down}, color_scheme=theme, reduced_motion="reduce"
                )
                for name, model, panel, more in VIEWS:
                    page = context.new_page()
                    page.goto(f"{address}#{urlencode({'model': places[model].stem, 'panel': panel, **more})}")
                    page.wait_for_selector("[role=tab]")
                    prepare(page, name)
                    file = OUT / f"{name}-{theme}-{width}.png"
                    # A phone scrolls: its picture is the whole page, up to a few screens.
                    tall = page.evaluate("document.documentElement.scrollHeight")
                    page.set_viewport_size({"width": across, "height": min(max(tall, down), 2 * down)})
                    page.wait_for_timeout(200)
                    page.screenshot(path=file)
                    reduce(file)
                    page.close()
                context.close()
        browser.close()
    total = sum(file.stat().st_size for file in OUT.glob("*.png"))
    print(f"{OUT}: {len(list(OUT.glob('*.png')))} pictures, {total / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
