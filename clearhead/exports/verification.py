"""How an exported model is compared with ours: the same inputs, the largest difference of the outputs, and greedy texts."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from clearhead.errors import CheckpointError, MissingExtraError
from clearhead.laws.decoding_laws import NEW, expected_logits, prompts_of
from clearhead.laws.finding import OUTPUT, Comparison
from clearhead.laws.subject import ROWS, Subject, make_subject, measure_rounding
from clearhead.models import Encoder, Model

LENGTH = 24  # tokens of an input


@runtime_checkable
class Runtime(Protocol):
    """A program that runs the exported model."""

    def outputs(self, args: Sequence[Tensor]) -> Tensor:
        """What `model(*args)` returns."""
        ...

    def write(self, source: Sequence[Tensor], prompt: list[int], n: int) -> list[int]:
        """The n likeliest next tokens, one after the other, with the runtime's own cache if it has one."""
        ...


@dataclass(frozen=True)
class Verification:
    """What the target's own runtime made of an export, and what was allowed."""

    runtime: str
    error: float  # the largest difference, relative to the largest number of our output
    allowed: float
    reason: str  # of the limit
    n_tokens: int  # written greedily
    n_equal: int  # that are ours
    path: str = ""
    nbytes: int = 0


def require(package: str, module: str, to: str, *, verify: bool = True, extra: str = "export") -> None:
    """Refuse to export without the program that is needed to write the format, or to verify what was written."""
    if importlib.util.find_spec(module) is None:
        way_out = "; --no-verify writes it unchecked" if verify else ""
        raise MissingExtraError(
            f"--to {to} needs {package}, which is not installed; pip install 'clearhead[{extra}]'{way_out}"
        )


def version_of(package: str) -> str:
    return f"{package} {importlib.metadata.version(package)}"


def verify(
    model: Model, runtime: Runtime, name: str, *, at_least: float = 0.0, why: str = "", never: Sequence[int] = ()
) -> Verification:
    """Compare a runtime with the model that it should compute. CheckpointError: they differ.

    The limit is what rounding does to this model, or `at_least`, for the reason `why`. `never`: tokens that the runtime does not
    write here.
    """
    subject, _ = measure_rounding(make_subject(model, length=LENGTH))
    allowed, reason = max(subject.allowed, at_least), subject.reason if subject.allowed > at_least else why
    comparison = Comparison()
    with torch.no_grad():
        comparison.add({OUTPUT: runtime.outputs(subject.args)}, {OUTPUT: subject.model(*subject.args)})
    error = comparison.errors[OUTPUT]
    if not error <= allowed:
        raise CheckpointError(
            f"{name} computes something else from this export: the largest difference is {error:.1e} of the largest output, "
            f"allowed {allowed:.1e} ({reason}); nothing was left behind; is this model one that the format can hold?"
        )
    if isinstance(model, Encoder):
        return Verification(name, error, allowed, reason, 0, 0)
    prompts = prompts_of(subject)
    sources = [[x[row : row + 1] for x in subject.source] for row in range(ROWS)]
    texts = [runtime.write(source, prompt, NEW) for source, prompt in zip(sources, prompts, strict=True)]
    equal = judge_texts(subject, prompts, texts, name, allowed, never=never)
    return Verification(name, error, allowed, reason, sum(map(len, texts)), equal)


def judge_texts(
    subject: Subject,
    prompts: list[list[int]],
    texts: list[list[int]],
    name: str,
    allowed: float,
    *,
    never: Sequence[int],
) -> int:
    """How many greedy tokens are ours. One may differ only where two are as close as `allowed`."""
    n_equal = 0
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        logits = expected_logits(subject, row, [*prompt, *text])[len(prompt) - 1 : -1]
        scale = logits.abs().max()
        logits[:, list(never)] = -torch.inf
        lost = (logits.amax(-1) - logits.gather(-1, torch.tensor(text)[:, None])[:, 0]) / scale
        if not float(lost.max()) <= 2 * allowed:
            at = int(lost.argmax())
            raise CheckpointError(
                f"{name} writes another text from this export: token {at} of text {row} is {text[at]}, which we score "
                f"{float(lost.max()):.1e} lower than the likeliest; nothing was left behind; report it"
            )
        n_equal += sum(ours == theirs for ours, theirs in zip(logits.argmax(-1).tolist(), text, strict=True))
    return n_equal


def size_of(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)
