"""lm-evaluation-harness over HTTP against our own log-probabilities: a small local task, and both must give the same scores.

    python -m venv lm && lm/bin/pip install "lm-eval[api]" transformers
    .venv/bin/python benchmarks/correctness/lm_eval_task.py MODEL --lm-eval lm/bin/lm-eval

MODEL is a folder with tokenizer.json (what lm-eval needs of a tokenizer it reads there itself). Without one, a tiny decoder is
trained on the task's own sentences first. The harness asks /v1/completions for each choice's log-probability (echo, logprobs);
here the same numbers come from the model, called directly on the same ids: the harness puts no bos in front. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import clearhead as ch
from benchmarks.common.server import served

PLACES = ["on the mat", "over the hill", "under the bed", "in the garden", "by the river"]
BEASTS = ["cat", "dog", "fox", "hen", "bear", "mouse", "crow", "goat"]
TASK = """\
task: beasts
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: " "
metric_list:
  - metric: acc
  - metric: acc_norm
"""


def make_questions() -> list[dict[str, Any]]:
    """Where each beast sleeps; three places each, of which one is right."""
    made: list[dict[str, Any]] = []
    for at, beast in enumerate(BEASTS * 3):
        right = PLACES[BEASTS.index(beast) % len(PLACES)]
        others = [place for place in PLACES if place != right]
        choices = [right, others[at % 4], others[(at + 1) % 4]]
        turn = at % 3
        choices = choices[turn:] + choices[:turn]
        verb = ("sleeps", "sat", "ran")[at // len(BEASTS)]
        made.append({"question": f"the {beast} {verb}", "choices": choices, "answer": choices.index(right)})
    return made


def make_model(folder: Path, questions: list[dict[str, Any]]) -> Path:
    """A decoder that has read half of the answers."""
    texts = [f"{each['question']} {each['choices'][each['answer']]}" for each in questions]
    tokenizer = ch.train_tokenizer(texts=texts * 4, kind="bpe", vocab_size=320)
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(n_layers=2, d_model=64, n_heads=4, max_len=128, vocab_size=tokenizer.vocab_size)
    model: Any = ch.build(ch.preset("gpt2", **sizes, dropout=0.0))
    assert tokenizer.eos is not None
    model.generation = ch.Generation(bos=tokenizer.bos, eos=(tokenizer.eos,))
    rows = [torch.tensor([tokenizer.encode(text)]) for text in texts[::2]]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(12):
        for row in rows:
            loss = torch.nn.functional.cross_entropy(model(row[:, :-1])[0], row[0, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    place = ch.save(model.eval(), folder / "beasts")
    tokenizer.save(place)
    return place


@torch.no_grad()
def score(place: Path, questions: list[dict[str, Any]]) -> tuple[dict[str, float], list[list[float]]]:
    """The same figures, computed directly: log P(choice | question), the likeliest choice, with and without its length."""
    model: Any = ch.load(place).eval()
    tokenizer = ch.load_tokenizer(place)
    right, right_norm, told = 0, 0, list[list[float]]()
    for each in questions:
        context = tokenizer.encode(each["question"], special=False)
        scores: list[float] = []
        for choice in each["choices"]:
            ids = tokenizer.encode(f"{each['question']} {choice}", special=False)
            chances = model(torch.tensor([ids]))[0].log_softmax(-1)
            picked = [float(chances[at - 1, ids[at]]) for at in range(len(context), len(ids))]
            scores.append(sum(picked))
        told.append(scores)
        by_length = [one / len(choice) for one, choice in zip(scores, each["choices"], strict=True)]
        right += scores.index(max(scores)) == each["answer"]
        right_norm += by_length.index(max(by_length)) == each["answer"]
    return {"acc": right / len(questions), "acc_norm": right_norm / len(questions)}, told


def evaluate(tool: str, url: str, tokens: Path, folder: Path) -> tuple[dict[str, float], list[list[float]]]:
    """What lm-eval finds through HTTP."""
    facts = f"model=model,base_url={url}/v1/completions,tokenizer={tokens},num_concurrent=4,max_length=128"
    command = [tool, "--model", "local-completions", "--model_args", facts, "--tasks", "beasts", "--log_samples"]
    command += ["--include_path", str(folder), "--output_path", str(folder / "out"), "--batch_size", "4"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
    ran = subprocess.run(command, env={**os.environ, **offline}, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise SystemExit(ran.stdout[-2000:] + ran.stderr[-4000:])
    (results,) = (folder / "out").rglob("results_*.json")
    (samples,) = (folder / "out").rglob("samples_*.jsonl")
    found = json.loads(results.read_text())["results"]["beasts"]
    rows = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda row: row["doc_id"])
    told = [[float(choice[0][0]) for choice in row["resps"]] for row in rows]
    return {name: found[f"{name},none"] for name in ("acc", "acc_norm")}, told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="a folder; without: a tiny one is made")
    parser.add_argument("--lm-eval", default="lm-eval", help="the program")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, questions = Path(name), make_questions()
        data = folder / "beasts.jsonl"
        data.write_text("".join(json.dumps(each) + "\n" for each in questions))
        (folder / "beasts.yaml").write_text(TASK.format(data=data))
        place = asked.model or make_model(folder, questions)
        direct, ours = score(place, questions)
        with served({"model": place}) as (url, _):
            through, theirs = evaluate(asked.lm_eval, url, place, folder)
    furthest = max(abs(a - b) for one, other in zip(ours, theirs, strict=True) for a, b in zip(one, other, strict=True))
    print(f"{len(questions)} questions; lm-eval through HTTP: {through}; directly: {direct}")
    print(f"log-probabilities of {sum(map(len, ours))} choices differ by {furthest:.1e} at most")
    # float32 sums in another order, and JSON's digits
    if through != direct or furthest > 1e-3:
        raise SystemExit("the scores differ")


if __name__ == "__main__":
    main()
