"""`report.html`: a run on one page, with its drawings (report_figures.py) inside. It needs no script and no network.

It is made only from the files of the run folder, so it can be written again at any time, also for a run that was killed.
The page says what is missing, cut off or not finite. In metrics.jsonl `seconds` and `tokens` count from the run's start.
"""

from __future__ import annotations

import base64
import json
import math
import re
import shlex
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from clearhead.checkpoint.durable_files import write_text
from clearhead.config import Config
from clearhead.costs import draw
from clearhead.errors import ClearheadError, InputError
from clearhead.training.report_figures import (
    KINDS,
    AttentionPicture,
    Points,
    chart,
    draw_attention,
    escape,
    format_number,
)

Records = dict[str, list[dict[str, Any]]]  # by kind
Curves = dict[str, dict[str, Points]]  # by metric, by kind

FILES = ("metrics.jsonl", "recipe.toml", "config.json", "environment.json")
NOT_DRAWN = ("step", "kind", "seconds", "tokens", "epoch", "progress", "samples")
SAMPLES, SAMPLE_LETTERS, TEXT_LETTERS, PICTURE_BYTES = 20, 400, 10_000, 200_000  # keep the page under 300 kB

# The explorer's colours: blue and orange stay apart with any colour vision, and the validation line has dots. Inks for paper,
# and for a dark screen.
STYLE = """
:root{--paper:#fff;--ink:#191b20;--soft:#5c616b;--rule:#e3e0da;--train:#146a80;--valid:#b3470b;color-scheme:light dark}
@media screen and (prefers-color-scheme:dark){
:root{--paper:#181a1f;--ink:#eceae4;--soft:#a0a5af;--rule:#2d3139;--train:#6cc5b9;--valid:#f2a45c}}
body{margin:0 auto;max-width:44rem;padding:3rem 1rem;background:var(--paper);color:var(--ink);font:1rem/1.6 system-ui,sans-serif}
h1{margin:0;font:600 1.8rem/1.2 system-ui,sans-serif;overflow-wrap:anywhere}h2{margin:3rem 0 1rem;font-size:1.15rem}
header p,.soft,dt,figcaption,th{color:var(--soft);font-size:.9rem;font-weight:400}
.note{border-left:3px solid var(--valid);padding-left:1rem}dl{display:flex;flex-wrap:wrap;gap:1.2rem 2.5rem;margin:2rem 0}
dd{margin:0;font-size:.85rem;color:var(--soft)}dd b{font-size:1.7rem;font-weight:500;line-height:1.3;color:var(--ink)}
figure{margin:0 0 2rem}figure,svg,img{break-inside:avoid}
img{display:block;max-width:100%;height:auto}svg{display:block;width:100%;height:auto}
text{fill:var(--soft);font:12px system-ui,sans-serif}.name{fill:var(--ink)}.map text{font-family:ui-monospace,monospace}
.grid,.frame{fill:none;stroke:var(--rule)}.train,.valid{fill:none;stroke:var(--train);stroke-linecap:round;stroke-linejoin:round}
.valid{stroke:var(--valid);stroke-width:2}circle.valid{fill:var(--paper)}.cells{stroke:var(--train);shape-rendering:crispEdges}
.small{display:grid;grid-template-columns:repeat(auto-fill,minmax(12.5rem,1fr));gap:1rem}.small text{font-size:15px}
@media(max-width:36rem){.loss text{font-size:19px}}@media print{details::details-content{content-visibility:visible;display:block}}
table{width:100%;border-collapse:collapse;table-layout:fixed;font-size:.9rem}
td,th{padding:.4rem .8rem .4rem 0;text-align:start;vertical-align:top}td b{color:var(--valid)}
tr{border-bottom:1px solid var(--rule);break-inside:avoid}summary{margin:2rem 0;cursor:pointer}
td,pre{white-space:pre-wrap;overflow-wrap:anywhere}pre{font:.85rem/1.5 ui-monospace,monospace}
"""


def write_report(folder: Path, *, attention: Sequence[AttentionPicture] = ()) -> Path:
    """Write `report.html` into a run folder, from what the folder holds. Returns the page's path."""
    if not folder.is_dir():
        raise InputError(f"no run to report on: {str(folder)!r} is not a folder; give one that `clearhead train` wrote")
    write_text(folder / "report.html", _page(folder, attention))
    return folder / "report.html"


def _page(folder: Path, attention: Sequence[AttentionPicture]) -> str:
    files = {name: (folder / name).read_text("utf-8", "replace") for name in FILES if (folder / name).is_file()}
    records, notes = read_metrics(files.get("metrics.jsonl", ""))
    if missing := [name for name in FILES if name not in files]:
        notes.insert(0, f"Missing from the run folder: {', '.join(missing)}. The run may have been stopped early.")
    title, recipe, config = escape(folder.resolve().name), files.get("recipe.toml", ""), files.get("config.json", "")
    task = re.search(r"""^\s*task\s*=\s*["'](.*?)["']""", recipe, re.MULTILINE)
    written = (folder / "metrics.jsonl" if "metrics.jsonl" in files else folder).stat().st_mtime
    date = datetime.fromtimestamp(written, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    parts = [
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"/><title>{title}</title>',
        f'<meta name="viewport" content="width=device-width"/><style>{STYLE}</style></head><body>',
        f"<header><h1>{title}</h1><p>{f'Task: {escape(task[1])}. ' if task else ''}Last logged {date}.</p>"
        f"<p>To look inside: <code>clearhead explore {escape(shlex.quote(str(folder)))}</code></p></header>",
        _overview(records),
        *(f'<p class="note">{escape(note)}</p>' for note in notes),
        _charts(curves(records, "train", "valid")),
        _samples(records["valid"] + records["result"], one_is_right=not task or task[1] != "language"),
        _pictures(attention),
        _model(config),
        f"<details><summary>Recipe</summary><pre>{clip(recipe, TEXT_LETTERS)}</pre></details>" if recipe else "",
        _environment(files.get("environment.json", "{}")),
        f"<details><summary>config.json</summary><pre>{clip(config, TEXT_LETTERS)}</pre></details>" if config else "",
        "</body></html>\n",
    ]
    return "\n".join(part for part in parts if part)


def clip(text: object, letters: int) -> str:
    more = len(str(text)) - letters
    return escape(str(text)[:letters]) + (f" <i>… {more:,} letters more</i>" if more > 0 else "")


def read_metrics(text: str) -> tuple[Records, list[str]]:
    """The records of each kind in order, and notes for the reader. Steps logged again after a resume count once."""
    found: dict[str, dict[int, dict[str, Any]]] = {kind: {} for kind in KINDS}
    broken: list[str] = []
    for number, line in enumerate(text.split("\n"), 1):
        try:
            if line:
                record = json.loads(line)
                if record["kind"] == "speed":  # of a whole run, no point of a curve
                    continue
                found[record["kind"]][int(record["step"])] = {**record, "step": int(record["step"])}
        except (ValueError, TypeError, KeyError, OverflowError):
            broken.append(str(number))
    records = {kind: [steps[step] for step in sorted(steps)] for kind, steps in found.items()}
    notes = [f"Not readable, perhaps cut off: line {', '.join(broken[:9])} of metrics.jsonl."] if broken else []
    for name, lines in curves(records, *KINDS).items():
        for kind, points in lines.items():
            if gaps := [step for step, value in points if not math.isfinite(value)]:
                count = f"values not finite: {len(gaps)}, the first at step {gaps[0]:,.0f}"
                notes.append(f"{name} ({KINDS[kind]}), {count}. Its line has gaps there.")
    return records, notes


def curves(records: Records, *kinds: str) -> Curves:
    """The points of every metric, metrics of evaluations first. A null is a NaN, as strict JSON writes it."""
    found: Curves = {}
    for kind in kinds:
        for record in records[kind]:
            for name, value in record.items():
                if name not in NOT_DRAWN and (value is None or type(value) in (int, float)):
                    point = (float(record["step"]), math.nan if value is None else float(value))
                    found.setdefault(name, {}).setdefault(kind, []).append(point)
    return {name: found[name] for name in sorted(found, key=lambda name: "valid" not in found[name])}


def _overview(records: Records) -> str:
    """One line about the run, and its last metrics (the result's, if there is one) beside those at the lowest loss."""
    every = [record for kind in KINDS for record in records[kind]]
    if not every:
        return "<p>No step was logged.</p>"
    steps, seconds, tokens = (max(record.get(name) or 0 for record in every) for name in ("step", "seconds", "tokens"))
    hours, minutes = seconds // 3600, seconds % 3600 // 60
    time = f"{hours:.0f} h {minutes:.0f} min" if hours else f"{minutes:.0f} min {seconds % 60:.0f} s"
    found, kind = curves(records, *KINDS), "valid" if records["valid"] else "train"
    losses = [(value, step) for step, value in found.get("loss", {}).get(kind, []) if math.isfinite(value)]
    loss, best = min(losses, default=(math.nan, math.nan))
    lowest = (
        f"lowest {KINDS[kind]} loss {format_number(loss)} at step {best:,.0f}" if losses else f"no {KINDS[kind]} loss"
    )
    shown, tiles = next(shown for shown in ("result", "valid", "train") if records[shown]), ""
    for name, lines in ((name, lines) for name, lines in found.items() if shown in lines):
        then = dict(lines.get(kind, []))
        tiles += f"<div><dt>{escape(name)} ({KINDS[shown]})</dt><dd><b>{format_number(lines[shown][-1][1])}</b></dd>"
        tiles += f"<dd>at step {best:,.0f}: {format_number(then[best])}</dd></div>" if best in then else "</div>"
    return f"<p>{steps:,} steps · {time} · {format_number(float(tokens))} tokens · {lowest}</p><dl>{tiles}</dl>"


def _charts(found: Curves) -> str:
    loss = chart("loss", found.get("loss", {}), width=640, height=300, limit=600)
    small = [chart(name, found[name], width=300, height=180, limit=150) for name in found if name != "loss"]
    return (
        f'<h2>Curves</h2><figure class="loss">{loss}</figure><div class="small">{"".join(small)}</div>' if found else ""
    )


def _samples(evaluations: list[dict[str, Any]], *, one_is_right: bool) -> str:
    """Samples of the last evaluation. An output that differs from the wanted one is marked, where only that is right.

    A language model continues a text in its own way, and hardly ever as the text itself went on.
    """
    samples: list[dict[str, Any]] = next((record["samples"] for record in evaluations[::-1] if "samples" in record), [])
    columns = [name for name in ("input", "output", "wanted") if any(name in sample for sample in samples)]
    names = {} if one_is_right else {"wanted": "how the text goes on"}
    body = "".join(f"<th>{names.get(name, name)}</th>" for name in columns)
    for sample in samples[:SAMPLES]:
        cells = [clip(sample.get(name, ""), SAMPLE_LETTERS) for name in columns]
        if one_is_right and "wanted" in sample and str(sample["wanted"]).strip() != str(sample.get("output")).strip():
            cells[-1] += "<br/><b>✗ differs</b>"
        body += "</tr>\n<tr>" + "".join(f'<td dir="auto">{cell}</td>' for cell in cells)
    more = f'<p class="soft">The first {SAMPLES} of {len(samples)}.</p>' if len(samples) > SAMPLES else ""
    return f"<h2>Samples</h2><table><tr>{body}</tr></table>{more}" if samples else ""


def _pictures(attention: Sequence[AttentionPicture]) -> str:
    """As many pictures as the page's size allows; the titles of the others."""
    drawn, left_out = "", list[str]()
    for picture in attention:
        figure = draw_attention(picture)
        if len(drawn) + len(figure) <= PICTURE_BYTES:
            drawn += figure
        else:
            left_out.append(escape(picture.title))
    more = f'<p class="soft">Left out to keep the page small: {", ".join(left_out)}.</p>' if left_out else ""
    text = (
        "Each row is a token that attends, each column a token it attends to. The stronger the colour, the larger the weight, "
        "relative to the largest of its row. Layers are counted from 0. A picture shows where a head attends, not why the model "
        "answers as it does: it is not an explanation."
    )
    return f'<h2>Attention</h2><p class="soft">{text}</p>{drawn}{more}' if attention else ""


def _model(config: str) -> str:
    """The model, drawn from config.json. As a picture of its own, so that it and the page do not share styles."""
    try:
        svg = draw(Config.from_dict(json.loads(config)["model"])).svg if config else ""
    except (ValueError, TypeError, LookupError, AttributeError, ClearheadError):
        return '<p class="note">config.json can not be read, so the model is not drawn.</p>'
    source = base64.b64encode(svg.encode()).decode()
    words = "The model, from its input below to its output above"
    return f'<h2>Model</h2><img alt="{words}" src="data:image/svg+xml;base64,{source}"/>' if svg else ""


def _environment(text: str) -> str:
    try:
        values = json.loads(text).items()
    except (ValueError, AttributeError):
        return '<p class="note">environment.json can not be read.</p>'
    rows = "".join(f"<tr><td>{escape(name)}</td><td>{clip(value, SAMPLE_LETTERS)}</td></tr>" for name, value in values)
    return f"<h2>Environment</h2><table>{rows}</table>" if rows else ""
