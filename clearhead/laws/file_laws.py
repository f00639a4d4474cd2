"""Laws of files: a model that was saved and loaded is the same model, and transformers computes the same from it."""

from __future__ import annotations

import importlib.util
import json
import tempfile
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead.checkpoint import load, save
from clearhead.config import Config
from clearhead.errors import CheckpointError, ConfigError
from clearhead.laws.finding import OUTPUT, Comparison, Finding, Skip, same_bits
from clearhead.laws.subject import Subject, Trace, trace
from clearhead.models import Model

# The class of transformers that holds a model, by its shape and what enters and leaves it.
CLASSES = {
    ("decoder", "tokens", "tokens"): "AutoModelForCausalLM",
    ("encoder", "tokens", "none"): "AutoModel",
    ("encoder", "tokens", "tokens"): "AutoModelForMaskedLM",
    ("encoder", "tokens", "classes"): "AutoModelForSequenceClassification",
    ("encoder", "patches", "none"): "AutoModel",
    ("encoder", "patches", "classes"): "AutoModelForImageClassification",
    ("encoder-decoder", "tokens", "tokens"): "AutoModelForSeq2SeqLM",
    ("encoder-decoder", "frames", "tokens"): "AutoModelForSpeechSeq2Seq",
}


def check_saved(subject: Subject) -> Finding:
    """In our layout config and weights come back bit for bit. Hugging Face's may lack a field: then the output must be the same."""
    ours = "config and weights bit for bit in our layout"
    with tempfile.TemporaryDirectory(prefix="clearhead-check-") as folder:
        save(subject.model, Path(folder) / "clearhead")
        if (changed := find_change(load(Path(folder) / "clearhead"), subject.model)) is not None:
            return Finding("fail", changed)
        try:
            save(subject.model, Path(folder) / "hf", format="hf")
        except (CheckpointError, ConfigError):  # a model that this layout can not hold: "ours = transformers" says why
            return Finding("pass", ours, 0.0, 0.0)
        back = load(Path(folder) / "hf")
    if back.config == subject.model.config:
        changed = find_change(back, subject.model)
        return (
            Finding("pass", f"{ours} and in Hugging Face's", 0.0, 0.0)
            if changed is None
            else Finding("fail", f"Hugging Face: {changed}")
        )
    fields = changed_fields(back, subject.model)
    comparison = Comparison()
    comparison.add({OUTPUT: trace(back, *subject.args)[OUTPUT]}, trace(subject.model, *subject.args))
    reason = f"{ours}; Hugging Face's has no place for {', '.join(fields)}, and computes the same: {subject.reason}"
    return comparison.judge(subject.allowed, reason)


def find_change(back: Model, model: Model) -> str | None:
    """What is not as it was; None: nothing."""
    if back.config != model.config:
        return f"fields changed: {', '.join(changed_fields(back, model))}"
    ours, theirs = back.state_dict(), model.state_dict()
    if ours.keys() != theirs.keys():
        return f"tensors are missing or new: {', '.join(sorted(ours.keys() ^ theirs.keys())[:3])}"
    changed = [name for name, tensor in ours.items() if not same_bits(tensor, theirs[name])]
    return f"weights changed: {', '.join(changed[:3])}" if changed else None


def changed_fields(back: Model, model: Model) -> list[str]:
    before, after = model.config.to_dict(), back.config.to_dict()
    return [name for name in before if before[name] != after[name]]


def check_transformers(subject: Subject) -> Finding:
    if importlib.util.find_spec("transformers") is None:
        raise Skip("transformers is not installed")
    with tempfile.TemporaryDirectory(prefix="clearhead-check-") as temporary:
        folder = find_hf_folder(subject.path)
        if folder is None:
            folder = Path(temporary)
            try:
                save(subject.model, folder, format="hf")
            except (CheckpointError, ConfigError) as error:
                raise Skip(f"transformers can not hold this model: {error}") from None
        with quiet_transformers():
            theirs, missing = load_theirs(folder, subject.model)
            if missing:
                return Finding("fail", f"transformers reports {missing}")
            expected = trace_theirs(theirs, subject)
    comparison = Comparison()
    comparison.add(trace(subject.model, *subject.args), expected)
    return comparison.judge(subject.allowed, subject.reason)


def find_hf_folder(path: Path | None) -> Path | None:
    """The folder itself, if it is one of Hugging Face's: then transformers reads the user's own files."""
    file = None if path is None else path / "config.json"
    if path is None or file is None or not file.is_file():
        return None
    return path if "model_type" in json.loads(file.read_text(encoding="utf-8")) else None


@contextmanager
def quiet_transformers() -> Generator[None]:
    """No progress bars and no advice on stderr."""
    import transformers

    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(before)


def load_theirs(folder: Path, model: Model) -> tuple[Any, str]:
    """The model of a folder in transformers, in float32, and what its loading report complains about."""
    import transformers

    config = model.config
    kind = getattr(transformers, CLASSES[config.shape, config.inputs, config.head])
    options: dict[str, Any] = dict(dtype=torch.float32, local_files_only=True, output_loading_info=True)
    theirs, report = kind.from_pretrained(folder, **options)
    # A file may hold tensors of another head; one that is missing was drawn at random.
    missing = sorted(report.get("missing_keys", [])) if config.head != "none" else []
    wrong = [*missing, *report.get("mismatched_keys", [])]
    return theirs.eval(), f"tensors missing or of another shape: {wrong[:3]}" if wrong else ""


@torch.no_grad()
def trace_theirs(theirs: Any, subject: Subject) -> Trace:
    """What transformers computes for the same arguments, under our names."""
    config = subject.model.config
    result = call_theirs(theirs, config, subject.args, output_hidden_states=True)
    output = output_of(result, config)
    if config.positions == "sinusoidal" and not config.sinusoid_halves:
        return {OUTPUT: output}  # saved with the stream's coordinates in another order (families/original.py)
    return {OUTPUT: output, **layers_of(result, encoder_decoder=config.shape == "encoder-decoder")}


def call_theirs(theirs: Any, config: Config, args: Sequence[Tensor], **options: Any) -> Any:
    """A model of transformers, called with the arguments of ours."""
    if config.inputs == "patches":
        return theirs(pixel_values=args[0], **options)
    if config.inputs == "frames":
        return theirs(input_features=args[0], decoder_input_ids=args[1], **options)
    target = {"decoder_input_ids": args[1]} if config.shape == "encoder-decoder" else {}
    return theirs(input_ids=args[0], attention_mask=torch.ones_like(args[0]), **target, **options)


def output_of(result: Any, config: Config) -> Tensor:
    return result.last_hidden_state if config.head == "none" else result.logits


def layers_of(result: Any, *, encoder_decoder: bool) -> Trace:
    """The stream after each block but the last of a stack, which transformers returns with the norm after it."""
    stacks = {"": "hidden_states"}
    if encoder_decoder:
        stacks = {"encoder.": "encoder_hidden_states", "decoder.": "decoder_hidden_states"}
    return {
        f"{stack}blocks.{i}": state
        for stack, name in stacks.items()
        for i, state in enumerate((getattr(result, name, None) or ())[1:-1])
    }
