"""`clearhead export`: a model in another program's format, checked by running that program."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from clearhead.cli.arguments import ModelName, find_model, load_tokenizer_of
from clearhead.errors import CheckpointError

if TYPE_CHECKING:
    from clearhead.config import Generation
    from clearhead.data import Tokenizer


def run(
    model: ModelName,
    to: Annotated[Literal["hf", "onnx", "gguf", "ctranslate2", "executorch"], typer.Option(help="The format.")],
    out: Annotated[
        Path | None, typer.Option(help="A new folder, or for gguf a file. Without: MODEL-FORMAT here, or MODEL.gguf.")
    ] = None,
    type_: Annotated[
        str | None,
        typer.Option(
            "--type",
            metavar="TYPE",
            help="How weights are held. gguf: F16, F32, Q8_0, Q4_0; onnx: float32, int8; ctranslate2: float32, float16, int8.",
        ),
    ] = None,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Write it even where its own program is not here to check it.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write a model for transformers, ONNX Runtime, llama.cpp, CTranslate2 or ExecuTorch, and check it by running that program.

    An export that its program computes differently is an error, and is not left behind.
    """
    from rich.console import Console

    from clearhead.checkpoint import load
    from clearhead.exports import export

    path = find_model(model)
    place = out or Path(f"{path.stem}.gguf" if to == "gguf" else f"{path.stem}-{to}")
    with Console(stderr=True).status(f"exporting to {to}"):
        loaded = load(path)
        found = export(loaded, place, to=to, tokenizer=find_tokenizer(path), type=type_, verify=not no_verify)
    if lost := lost_rules(loaded.generation, to):
        typer.echo(
            f"clearhead: {to} has no place for {', '.join(lost)}; give these rules to the program when you call it",
            err=True,
        )
    if found is None:
        typer.echo(f"clearhead: {place} is NOT verified: no program of {to} has run it", err=True)
        if as_json:
            typer.echo(json.dumps({"path": str(place), "verified": False}))
    elif as_json:
        typer.echo(json.dumps({"verified": True, **asdict(found)}))
    else:
        typer.echo(f"{found.path}  {found.nbytes / 1e6:,.1f} MB")
        tokens = f", {found.n_equal} of {found.n_tokens} greedy tokens equal" if found.n_tokens else ""
        typer.echo(
            f"verified by {found.runtime}: largest difference {found.error:.1e} of the largest output, allowed "
            f"{found.allowed:.1e} ({found.reason}){tokens}"
        )


def lost_rules(rules: Generation, to: str) -> list[str]:
    """What the config says of how texts are written, and the format can not hold."""
    if to not in ("gguf", "ctranslate2"):
        return []
    names = ("suppress", "begin_suppress", "forced_bos", "forced_start", "forced_eos")
    found = [f"{name}={getattr(rules, name)}" for name in names if getattr(rules, name) not in (None, ())]
    return [*found, f"eos={rules.eos} but the first"] if len(rules.eos) > 1 else found


def find_tokenizer(path: Path) -> Tokenizer | None:
    """The model's tokenizer; None where it came without one, as a model over pictures does."""
    try:
        return load_tokenizer_of(path)
    except CheckpointError:
        return None
