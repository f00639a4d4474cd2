"""A folder in Hugging Face's layout, with the tokenizer; verified by transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead.checkpoint import save
from clearhead.checkpoint.hugging_face import write_hugging_face
from clearhead.data import Tokenizer
from clearhead.errors import CheckpointError
from clearhead.exports.verification import Verification, require, version_of
from clearhead.exports.verification import verify as compare
from clearhead.laws.file_laws import call_theirs, load_theirs, output_of, quiet_transformers
from clearhead.models import Model


class Transformers:
    """A model of transformers."""

    def __init__(self, theirs: Any, model: Model) -> None:
        self.theirs, self.config = theirs, model.config

    @torch.no_grad()
    def outputs(self, args: Sequence[Tensor]) -> Tensor:
        return output_of(call_theirs(self.theirs, self.config, args), self.config)

    def write(self, source: Sequence[Tensor], prompt: list[int], n: int) -> list[int]:
        ids = list(prompt)
        for _ in range(n):
            ids.append(int(self.outputs([*source, torch.tensor([ids])])[0, -1].argmax()))
        return ids[len(prompt) :]


def refuse(model: Model, tokenizer: Tokenizer | None, kind: str, verifying: bool) -> None:
    layout_of(model)
    if verifying:
        require("transformers", "transformers", "hf")


def layout_of(model: Model) -> str:
    """The model_type under which transformers holds this model; CheckpointError: under none."""
    try:
        files, _ = write_hugging_face(model)
    except CheckpointError as error:  # its advice is for `save`
        raise CheckpointError(f"{str(error).rpartition('; ')[0]}; export to onnx") from None
    return files["config.json"]["model_type"]


def write(model: Model, tokenizer: Tokenizer | None, folder: Path, kind: str) -> None:
    save(model, folder, format="hf")
    if tokenizer is not None:
        tokenizer.save(folder)


def verify(model: Model, tokenizer: Tokenizer | None, folder: Path, kind: str) -> Verification:
    with quiet_transformers():
        theirs, wrong = load_theirs(folder, model)
        if wrong:
            raise CheckpointError(
                f"transformers does not load this export: {wrong}; nothing was left behind; report it"
            )
        if tokenizer is not None:
            check_tokenizer(tokenizer, folder)
        return compare(model, Transformers(theirs, model), version_of("transformers"))


SAMPLES = ("Hello world", "The year 1998, 12,345 apples.", "Grüße, café naïve", "  two  spaces\nand a line")


def check_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """transformers makes the same ids of a few texts."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    for text in SAMPLES:
        ours, found = tokenizer.encode(text), theirs(text)["input_ids"]
        if ours != found:
            at = next(at for at, pair in enumerate(zip([*ours, -1], [*found, -1], strict=False)) if pair[0] != pair[1])
            raise CheckpointError(
                f"transformers cuts {text!r} into other tokens: {found[at : at + 8]} at place {at}, ours {ours[at : at + 8]}; "
                f"for some kinds of models it knows only that kind's own rules; nothing was left behind; export to onnx"
            )
