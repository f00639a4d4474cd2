"""`clearhead serve`: models behind an HTTP API that the openai client can call."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from clearhead.cli.arguments import (
    Calibrate,
    Device,
    Port,
    Quantize,
    check_calibrate,
    check_port,
    find_device,
    find_model,
    load_tokenizer_of,
    read_calibration,
)
from clearhead.cli.drafts import Draft, DraftQuantize, Lookup, check_drafts, load_draft
from clearhead.errors import InputError, MissingExtraError


def run(
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL...", help="Folders or files, or hf:OWNER/NAME; NAME=PATH gives it a name."),
    ],
    host: Annotated[str, typer.Option(help="Where to listen. 0.0.0.0 is every address: set keys first.")] = "127.0.0.1",
    port: Port = 8000,
    keys: Annotated[
        Path | None,
        typer.Option(help="A file with one API key a line. Or set CLEARHEAD_API_KEYS, with commas between."),
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="A host name that requests may use, besides localhost.")
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=16, help="The most tokens held in memory at once. Without it: what half of the free memory holds."
        ),
    ] = None,
    max_texts: Annotated[int, typer.Option(min=1, help="The most texts written at once.")] = 256,
    streams: Annotated[
        int, typer.Option(min=1, help="The most requests at once of one key; without keys, of one address.")
    ] = 512,
    connections: Annotated[
        int, typer.Option(min=16, help="The most open connections; half of them from one address.")
    ] = 2048,
    seconds: Annotated[float, typer.Option(min=0.1, help="The longest that a request may take.")] = 600.0,
    grace: Annotated[
        float, typer.Option(min=0, help="Seconds that running requests have to finish after SIGTERM.")
    ] = 30.0,
    measure: Annotated[
        bool | None,
        typer.Option(help="Whether the page may measure speed. Without it: on this machine alone, and without keys."),
    ] = None,
    quantize: Quantize = None,
    calibrate: Calibrate = None,
    lookup: Lookup = False,
    draft: Draft = None,
    draft_quantize: DraftQuantize = None,
    front_ends: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=64,
            help="Processes that speak HTTP, apart from the model's; 0: none. Without it: by device and cores.",
        ),
    ] = None,
    device: Device = "auto",
) -> None:
    """Serve models over HTTP: /v1/completions, /v1/chat/completions, /v1/embeddings, /v1/translate, /v1/audio/transcriptions."""
    try:
        from clearhead.serving.front_ends import check_front_ends, default_front_ends
        from clearhead.serving.guards import LOCAL, Limits
    except ImportError as error:
        raise MissingExtraError(
            f"serving needs {error.name}, which is missing; pip install 'clearhead[serve]'"
        ) from None
    api_keys, is_local = read_keys(keys), host in LOCAL
    check_access(host, is_local, api_keys)
    check_port(host, port)
    check_front_ends(front_ends)
    check_calibrate(quantize, calibrate)
    check_drafts(lookup, draft, draft_quantize)
    if max_texts == 1 and (lookup or draft is not None):
        raise InputError("drafts need rows of their own; got --max-texts 1; give 8 or more, or leave the drafts out")
    on = find_device(device)
    options: dict[str, Any] = dict(device=on, quantize=quantize, max_tokens=max_tokens, max_rows=max_texts)
    workers = load_workers(models, calibrate, lookup, (draft, draft_quantize), warms_up=True, **options)
    host_names = (*(allow_host or []), *(() if is_local or host in ("0.0.0.0", "::") else (host,)))
    measures = is_local and not api_keys if measure is None else measure
    each_client: dict[str, Any] = dict(streams=streams, seconds=seconds, connections=connections, measures=measures)
    limits = Limits(**each_client, hosts=host_names, keys=api_keys)
    n = default_front_ends(str(on)) if front_ends is None else front_ends
    serve(workers, limits, grace, n, is_asked=bool(front_ends), host=host, port=port)


def serve(workers: dict[str, Any], limits: Any, grace: float, front_ends: int, *, is_asked: bool, **place: Any) -> None:
    """By front ends, or in one process. Nothing but decoders gains from front ends: others have them only if they are asked for."""
    from clearhead.serving.app import make_app
    from clearhead.serving.front_ends import run_front_ends
    from clearhead.serving.server import run_app

    if front_ends and (is_asked or any(worker.kind == "decoder" for worker in workers.values())):
        run_front_ends(workers, limits, grace, front_ends, **place)
    else:
        run_app(make_app(workers, limits), workers.values(), grace, **place)


def check_access(host: str, is_local: bool, keys: tuple[str, ...]) -> None:
    if not is_local and not keys:
        raise InputError(
            f"--host {host} lets others in, and there are no keys; got neither --keys nor CLEARHEAD_API_KEYS; set one, "
            f"or listen on 127.0.0.1"
        )


def load_workers(
    models: list[str],
    calibrate: str | None = None,
    lookup: bool = False,
    draft: tuple[str | None, str | None] = (None, None),
    **options: Any,
) -> dict[str, Any]:
    """A worker for each model, by its name, and a line about each. `draft`: --draft and --draft-quantize."""
    from clearhead.quantization.model_weights import count_weights
    from clearhead.serving.model_worker import load_worker

    named = {name: find_model(path) for name, path in read_names(models).items()}
    small = None
    if draft[0] is not None:
        if len(named) > 1:
            raise InputError(
                f"--draft {draft[0]!r} drafts for one model; got {', '.join(named)}; serve one of them alone"
            )
        (path,) = named.values()
        small = load_draft(draft[0], load_tokenizer_of(path), options["device"], draft[1])
        small = small.float() if options["device"] == "cpu" else small  # as the model itself (load_worker)
    options |= dict(lookup=lookup, draft=small)
    workers = {
        name: load_worker(path, name, calibrate=read_calibration(calibrate, path), **options)
        for name, path in named.items()
    }
    if (lookup or small) and not any(each.kind == "decoder" for each in workers.values()):
        raise InputError(f"--{'lookup' if lookup else 'draft'} is for decoders; got {', '.join(named)}; leave it out")
    for each in workers.values():
        typer.echo(f"{each.name}: {each.kind}, {count_weights(each.model):,} parameters", err=True)
    return workers


def read_names(models: list[str]) -> dict[str, str]:
    """Each NAME=PATH, or PATH, by its name; without one, a model is called as its folder or file."""
    named: dict[str, str] = {}
    for model in models:
        name, _, path = model.rpartition("=")
        name = name or Path(path).stem
        if name in named:
            raise InputError(f"two models have the name {name!r}; give one another: NAME={path}")
        named[name] = path
    return named


def read_keys(file: Path | None) -> tuple[str, ...]:
    """API keys from a file and from the environment."""
    lines = os.environ.get("CLEARHEAD_API_KEYS", "").split(",")
    if file is not None:
        try:
            lines += file.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise InputError(f"--keys {str(file)!r} can not be read ({error.strerror}); is the path right?") from None
    return tuple(line.strip() for line in lines if line.strip())
