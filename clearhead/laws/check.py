"""check_model: every law, one after the other, on one model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from clearhead.errors import InputError, did_you_mean
from clearhead.laws import decoding_laws, file_laws, forward_laws, perplexity_law
from clearhead.laws.finding import Finding, Skip
from clearhead.laws.subject import Subject, make_subject, measure_rounding
from clearhead.models import Model

# A short name for --skip, the law in words, and what checks it. Cheap ones first.
LAWS: dict[str, tuple[str, Callable[[Subject], Finding]]] = {
    "weights": ("weights are numbers", forward_laws.check_weights),
    "kernels": ("kernels = torch's operators", forward_laws.check_kernels),
    "fused": ("fused = explicit", forward_laws.check_fused),
    "batched": ("batched = alone", forward_laws.check_batched),
    "padded": ("padded = unpadded", forward_laws.check_padded),
    "cached": ("cached = whole", forward_laws.check_cached),
    "future": ("no future token changes a past logit", forward_laws.check_future),
    "paged": ("engine's steps = plain forward", decoding_laws.check_paged_steps),
    "native": ("native steps = plain forward", decoding_laws.check_native_steps),
    "gpu": ("GPU steps = plain forward", decoding_laws.check_gpu_steps),
    "greedy": ("greedy text is equal on every path", decoding_laws.check_greedy),
    "saved": ("saved = loaded", file_laws.check_saved),
    "transformers": ("ours = transformers", file_laws.check_transformers),
    **{
        kind: (f"{kind} against full weights", partial(perplexity_law.check_quantized, kind=kind))
        for kind in perplexity_law.LIMITS
    },
    "compiled": ("compiled = eager", forward_laws.check_compiled),
}


def check_model(
    model: Model,
    *,
    path: Path | None = None,
    text: Sequence[int] = (),
    length: int = 48,
    skip: Collection[str] = (),
) -> Iterator[Finding]:
    """One finding for each law, as soon as it is known. The model is not changed; a float32 copy is checked, on the CPU.

    `path` is where it was loaded from: a folder of Hugging Face's is read by transformers as it is. `text` are the ids of a text
    to take inputs from and to measure perplexity on; without it inputs are random. `skip` names laws (keys of `LAWS`).
    """
    for name in skip:
        if name not in LAWS:
            raise InputError(f"there is no law {name!r} to skip; {did_you_mean(name, LAWS)}")
    if length < 1:
        raise InputError(f"length={length} is no number of tokens; give 8 or more")
    subject = make_subject(model, length=length, path=path, text=text)
    weights = run_law(*LAWS["weights"], subject)
    yield weights
    if weights.outcome == "fail":  # NaN differs from itself: nothing else could be compared
        return
    subject, rounding = measure_rounding(subject)
    yield rounding
    for name, (law, check) in LAWS.items():
        if name != "weights":
            yield Finding("skipped", f"--skip {name}", law=law) if name in skip else run_law(law, check, subject)


def run_law(law: str, check: Callable[[Subject], Finding], subject: Subject) -> Finding:
    """The finding of one law. A path that can not run the model at all breaks its law."""
    try:
        return replace(check(subject), law=law)
    except Skip as skip:
        return Finding("skipped", str(skip), law=law)
    except Exception as error:
        words = str(error).strip().split("\n")[0][:200]
        return Finding("fail", f"{type(error).__name__}: {words}", law=law)
