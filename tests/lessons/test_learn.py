"""`clearhead learn` as students meet it: files as they write them, what is said of each, and code that does not end."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from clearhead.cli import app
from clearhead.lessons.catalogue import CATALOGUE, find_entry, load_exercise
from clearhead.lessons.progress import SOLVED, state_of
from clearhead.lessons.trial import grade_file
from clearhead.lessons.workbook import check, legend, start, starter

pytestmark = pytest.mark.usefixtures("unchecked")  # as a student runs it

NAMES = [entry.name for entry in CATALOGUE]


def learn(*words: object) -> Result:
    clean = {"FORCE_COLOR": None, "NO_COLOR": "1", "COLUMNS": "200"}
    return CliRunner(env=clean).invoke(app, ["learn", *map(str, words)], catch_exceptions=False)


def written(folder: Path, name: str, body: str) -> Path:
    """A student's file: the one that `start` writes, with this body."""
    file = start(load_exercise(name), find_entry(name), folder)
    text, mark, _ = file.read_text(encoding="utf-8").rpartition("    raise NotImplementedError")
    assert mark
    lines = body.strip("\n").splitlines()
    file.write_text(text + "\n".join(f"    {line}" for line in lines) + "\n", encoding="utf-8")
    return file


@pytest.mark.parametrize("name", NAMES)
def test_a_started_file_says_all_and_is_not_written_yet(name: str, tmp_path: Path) -> None:
    file = start(load_exercise(name), find_entry(name), tmp_path / "new" / "folder")
    text = file.read_text(encoding="utf-8")
    for word in (
        f"Exercise {NAMES.index(name) + 1} of {len(NAMES)}",
        f"clearhead learn check {name}",
        f"def {name}(",
        "law",
    ):
        assert word in text
    found = grade_file(name, file)
    assert not found["passed"]
    assert found["findings"][0]["detail"].startswith("not written yet; ")
    assert found["trace"] is None
    assert state_of(file.parent, name) == "begun"


def test_the_letters_of_shapes_are_those_of_the_library() -> None:
    assert legend()["S"] == "key length"
    text = starter(load_exercise("attention"), find_entry("attention"), Path("exercises"))
    assert "Shapes: B batch, T query length, S key length, H heads, E head width." in text


def test_a_started_file_says_how_to_check_it_where_it_lies(tmp_path: Path) -> None:
    assert learn("start", "softmax", "--out", tmp_path).exit_code == 0
    command = f"clearhead learn check softmax --in {tmp_path}"
    assert f"To check it:    {command}\n" in (tmp_path / "softmax.py").read_text(encoding="utf-8")
    assert learn(*command.split()[2:]).exit_code == 1


@pytest.mark.parametrize("name", NAMES)
def test_every_name_of_a_started_file_is_there(name: str, tmp_path: Path) -> None:
    """Annotations are not evaluated when the file is imported, so a missing import would not show."""
    file = start(load_exercise(name), find_entry(name), tmp_path)
    names: dict[str, object] = {}
    exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), names)
    for annotation in names[name].__annotations__.values():
        eval(annotation, names)


def test_a_file_of_yours_is_never_overwritten(tmp_path: Path) -> None:
    assert learn("start", "softmax", "--out", tmp_path).exit_code == 0
    (tmp_path / "softmax.py").write_text("my work")
    again = learn("start", "softmax", "--out", tmp_path)
    assert again.exit_code == 2
    assert "is there already and is left as it is" in again.stderr
    assert (tmp_path / "softmax.py").read_text() == "my work"


# As students write them; none of these is a variant of the exercises' own files.
SNIPPETS = {
    "the famous sinusoids": (
        "sinusoidal",
        """
table = torch.zeros(len(positions), d_model)
for row, pos in enumerate(positions.tolist()):
    for i in range(0, d_model, 2):
        table[row, i] = math.sin(pos / (10000 ** ((2 * i) / d_model)))
        table[row, i + 1] = math.cos(pos / (10000 ** ((2 * (i + 1)) / d_model)))
return table
""",
        r"the exponent is doubled: i already steps by 2.*turns by 0\.0720 a token, expected 0\.2683",
    ),
    "a mask after the softmax": (
        "attention",
        """
weights = torch.softmax(torch.einsum("bhte,bhse->bhts", q, k) / q.size(-1) ** 0.5, dim=-1)
if allowed is not None:
    weights = weights.masked_fill(allowed == 0, 0)
return torch.matmul(weights, v)
""",
        r"your mask is applied after the softmax.*the weights of row \d sum to 0\.\d\d",
    ),
    "minus infinity": (
        "attention",
        """
scores = q @ k.mT / math.sqrt(q.shape[-1])
if allowed is not None:
    scores = scores + torch.where(allowed, 0.0, -math.inf)
return scores.softmax(-1) @ v
""",
        r"may attend to nothing gives NaN",
    ),
    "a view instead of a transpose": (
        "multi_head",
        """
B, T, D = x.shape
E = D // n_heads
q = (x @ w_q.T).view(B, n_heads, T, E)
k = (x @ w_k.T).view(B, n_heads, T, E)
v = (x @ w_v.T).view(B, n_heads, T, E)
out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
return out.transpose(1, 2).reshape(B, T, D) @ w_o.T
""",
        r"you reshape \(B, T, D\) to \(B, H, T, E\) directly",
    ),
    "std of torch": (
        "layer_norm",
        "return weight * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + eps) + bias",
        r"both: eps is added to the standard deviation, and the variance is divided by D - 1",
    ),
    "torch's causal flag with a cache": (
        "kv_cache",
        """
if "k" in cache:
    k = torch.cat((cache["k"], k), dim=2)
    v = torch.cat((cache["v"], v), dim=2)
cache.update(k=k, v=v)
return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
""",
        r"the causal mask starts at the first key",
    ),
    "Adam with L2": (
        "adamw",
        """
gradient = gradient + weight_decay * weight
m = betas[0] * m + (1 - betas[0]) * gradient
v = betas[1] * v + (1 - betas[1]) * gradient ** 2
m_hat, v_hat = m / (1 - betas[0] ** step), v / (1 - betas[1] ** step)
return weight - lr * m_hat / (v_hat ** 0.5 + eps), m, v
""",
        r"weight decay is added to the gradient: that is Adam with L2",
    ),
    "padding in the mean": (
        "cross_entropy",
        'return (torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none") * real).mean()',
        r"losses of padding are set to 0 but still counted",
    ),
    "a tutorial's top-p": (
        "top_p",
        """
values, ids = torch.sort(logits, descending=True)
drop = torch.cumsum(torch.softmax(values, -1), -1) > p
out = logits.clone()
for row in range(len(out)):
    out[row, ids[row, drop[row]]] = -math.inf
return out
""",
        r"the token that reaches p is dropped, and a token above p alone leaves nothing",
    ),
    "the earlier token itself": (
        "induction_head",
        """
import clearhead as ch
with torch.no_grad(), ch.probe(model, "blocks.*.attention.weights") as seen:
    model(tokens)
best, place = -1.0, (0, 0)
half = tokens.shape[1] // 2
for layer in range(2):
    weights = seen[f"blocks.{layer}.attention.weights"]
    for head in range(weights.shape[1]):
        score = float(weights[:, head].diagonal(-half, 1, 2).mean())
        if score > best:
            best, place = score, (layer, head)
return place
""",
        r"you found the duplicate-token head",
    ),
}


@pytest.mark.parametrize(("name", "body", "words"), SNIPPETS.values(), ids=SNIPPETS.keys())
def test_what_students_write_is_diagnosed(name: str, body: str, words: str, tmp_path: Path) -> None:
    found = grade_file(name, written(tmp_path, name, body))
    assert not found["passed"]
    assert re.search(words, str(found["diagnosis"])), found


SOLVED_BY_STUDENTS = {
    "softmax": """
top = scores.max(dim=-1, keepdim=True).values
return (scores - top - (scores - top).exp().sum(-1, keepdim=True).log()).exp()
""",
    "multi_head": """
from attention import attention
heads = [(x @ w.T).unflatten(-1, (n_heads, -1)).transpose(1, 2) for w in (w_q, w_k, w_v)]
return attention(*heads).transpose(1, 2).flatten(2) @ w_o.T
""",
    "warmup": "return min(step / n_warmup, (n_warmup / step) ** 0.5) / (d_model * n_warmup) ** 0.5",
}


@pytest.mark.parametrize("name", SOLVED_BY_STUDENTS)
def test_another_way_to_write_it_passes(name: str, tmp_path: Path) -> None:
    if name == "multi_head":  # it imports an exercise solved before
        right = "w = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)\nreturn w @ v"
        written(tmp_path, "attention", right)
    found = grade_file(name, written(tmp_path, name, SOLVED_BY_STUDENTS[name]))
    assert found["passed"], found


def test_an_imported_exercise_that_is_not_written_is_named(tmp_path: Path) -> None:
    start(load_exercise("attention"), find_entry("attention"), tmp_path)
    found = grade_file("multi_head", written(tmp_path, "multi_head", SOLVED_BY_STUDENTS["multi_head"]))
    assert "attention.py is not written yet" in found["findings"][0]["detail"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return scores.foo", r"AttributeError: 'Tensor' object has no attribute 'foo'"),
        ("raise SystemExit(7)", r"SystemExit: 7"),
        ("return (scores", r"line \d+: '\(' was never closed: return \(scores"),
        ("return scores.sum(", r"line \d+: '\(' was never closed"),
        ("return None", r"returns None; is there a `return`\?"),
        ("return scores[0]", r"the shape is \(3, 7, 5\), expected \(2, 3, 7, 5\)"),
    ],
)
def test_errors_are_told_in_the_students_own_lines(body: str, words: str, tmp_path: Path) -> None:
    file = written(tmp_path, "softmax", body)
    found = grade_file("softmax", file)
    assert re.search(words, found["findings"][0]["detail"]), found
    if found["findings"][0]["outcome"] == "error" and "never closed" not in found["findings"][0]["detail"]:
        line = file.read_text(encoding="utf-8").splitlines().index(f"    {body}") + 1
        assert found["trace"] == f"softmax.py, line {line}, in softmax: {body}"


def test_a_renamed_function_and_other_arguments_are_told(tmp_path: Path) -> None:
    file = written(tmp_path, "softmax", "return scores")
    text = file.read_text(encoding="utf-8")
    for old, new, words in [
        ("def softmax(", "def sofmax(", "has no function 'softmax'; did you mean 'sofmax'?"),
        ("def softmax(scores", "def softmax(x", "its arguments are (x), expected (scores)"),
        ("def softmax(scores:", "def softmax(scores, axis, more:", "it needs more arguments than (scores): axis, more"),
    ]:
        file.write_text(text.replace(old, new), encoding="utf-8")
        assert words in grade_file("softmax", file)["findings"][0]["detail"]
    file.write_text("", encoding="utf-8")
    assert "it has no function of its own" in grade_file("softmax", file)["findings"][0]["detail"]


# In a process apart.


def test_a_check_says_what_was_proven_and_what_is_next(tmp_path: Path) -> None:
    file = written(tmp_path, "softmax", SOLVED_BY_STUDENTS["softmax"])
    assert state_of(tmp_path, "softmax") == "begun"
    done = learn("check", "softmax", "--in", tmp_path)
    assert done.exit_code == 0, done.output
    assert "softmax: all 4 hold. Proven: weights of each row sum to 1" in done.stdout
    assert "next: clearhead learn start attention" in done.stdout
    assert state_of(tmp_path, "softmax") == "solved"
    listed = learn("--in", tmp_path)
    assert re.search(r"softmax +solved +attention", listed.stdout)
    assert f"1 of {len(NAMES)} solved; next: clearhead learn start bpe" in listed.stdout
    file.write_text(file.read_text(encoding="utf-8") + "# changed\n", encoding="utf-8")
    assert state_of(tmp_path, "softmax") == "begun"
    (tmp_path / SOLVED).write_text("{ broken")
    assert state_of(tmp_path, "softmax") == "begun"


@pytest.mark.slow
def test_a_wrong_file_exits_with_1_and_prints_what_the_code_printed(tmp_path: Path) -> None:
    written(
        tmp_path, "softmax", 'print("here", scores.shape)\nreturn scores.exp() / scores.exp().sum(-1, keepdim=True)'
    )
    done = learn("check", tmp_path / "softmax.py")
    assert done.exit_code == 1
    assert "your code printed:\nhere torch.Size([2, 3, 7, 5])\n" in done.stdout
    assert "fails  scores of 1,000: 210 of 210 numbers are NaN, the first at [0, 0, 0, 0]" in done.stdout
    assert "Likely mistake: exp overflows: subtract the largest score of each row" in done.stdout
    assert "softmax: 2 of 4 hold; for a hint: clearhead learn hint softmax" in done.stdout
    (told,) = json.loads(learn("check", "--in", tmp_path, "--json").stdout)
    assert (told["name"], told["passed"]) == ("softmax", False)
    assert [finding["outcome"] for finding in told["findings"]] == ["pass", "fail", "fail", "pass"]
    assert state_of(tmp_path, "softmax") == "begun"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            "while True:\n    pass",
            r"^it took more than 1 seconds; it was in line \d+, in softmax; is there a loop without an end, or ",
        ),
        ("while True:\n    print(7)", r"^it took more than 1 seconds"),
        ("import os\nos._exit(3)", r"it crashed, or took more than \d+ MB of memory \(status 3\)"),
    ],
)
def test_code_that_does_not_end_is_told_in_one_line(body: str, words: str, tmp_path: Path) -> None:
    file = written(tmp_path, "softmax", body)
    found = check(replace(find_entry("softmax"), seconds=1.0), file)
    assert not found.passed
    (finding,) = found.findings
    assert re.search(words, finding["detail"]), finding
    assert len(found.printed) < 21_000
    assert ("... and more" in found.printed) == ("print" in body)


# Wrong usage: nothing was graded, exit 2.


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["start", "attentoin"], "there is no exercise 'attentoin'; did you mean 'attention'?"),
        (["check", "rotary"], "there is no file exercises/rotary.py; begin with: clearhead learn start rotary"),
        (["check", "--in", "other", "rotary"], "begin with: clearhead learn start rotary --out other"),
        (["check", "mine/rotary.py"], "begin with: clearhead learn start rotary --out mine"),
        (["check"], "there is no exercise in exercises; begin with: clearhead learn start bpe"),
        (["hint", "softmax", "9"], "softmax has 3 hints; got 9; the rest: clearhead learn solution softmax"),
        (["solution", "sofmax"], "did you mean 'softmax'?"),
        (["--json", "check", "softmax"], "put --in and --json after"),
        (["chekc"], "No such command 'chekc'"),
    ],
)
def test_wrong_usage_exits_with_2(words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = learn(*words)
    assert done.exit_code == 2
    assert said in done.stderr
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = learn("start", "softmax", "--out", tmp_path / "file" / "folder")
    assert done.exit_code == 2
    assert "can not be written" in done.stderr


def test_hints_lead_from_one_to_the_next() -> None:
    first, last = learn("hint", "softmax"), learn("hint", "softmax", 3)
    assert first.stdout.startswith("hint 1 of 3: ")
    assert "for more: clearhead learn hint softmax 2" in first.stdout
    assert "for more: clearhead learn solution softmax" in last.stdout


def test_a_solution_shows_our_own_lines() -> None:
    shown = learn("solution", "grouped_query").stdout
    assert "# attend, clearhead/layers/attention.py, lines " in shown
    assert "# attention_scores, clearhead/layers/attention.py, lines " in shown
    assert "Queries that share a key head are laid one under the other" in shown


def test_the_list_as_json(tmp_path: Path) -> None:
    rows = json.loads(learn("--json", "--in", tmp_path).stdout)
    assert [row["name"] for row in rows] == NAMES
    assert {row["state"] for row in rows} == {"not begun"}
    assert rows[0].keys() == {"name", "chapter", "teaches", "seconds", "state"}
