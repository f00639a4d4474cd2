"""`clearhead explore`: a web page that shows what a model computes for a text; or tables of it."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from clearhead.cli.ablation_batches import AblationInput
from clearhead.cli.arguments import (
    Device,
    ModelName,
    Port,
    check_output,
    check_port,
    find_device,
    find_model,
    load_model,
)
from clearhead.errors import InputError, MissingExtraError


def run(
    model: ModelName,
    text: Annotated[
        str,
        typer.Argument(
            help="The first input of the model (with --export, also a picture's or a sound's file); without it, an example."
        ),
    ] = "",
    target: Annotated[
        str | None, typer.Option(help="For a translator: the target text. Without: its own translation.")
    ] = None,
    export: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write one HTML file that needs neither server nor network.")
    ] = None,
    live: Annotated[
        bool,
        typer.Option(
            "--live", help="For --export: with the model inside (up to about 5 MB), so that the file computes any text."
        ),
    ] = False,
    port: Port = 0,
    no_open: Annotated[bool, typer.Option("--no-open", help="Print the address, and open no browser.")] = False,
    sites: Annotated[
        bool, typer.Option("--sites", help="List the places that can be probed; TEXT is then a pattern for them.")
    ] = False,
    ablate: Annotated[
        bool, typer.Option("--ablate", help="The loss of a text, or of a file with one text a line, without each head.")
    ] = False,
    heads: Annotated[
        str, typer.Option(metavar="PATTERN", help="For --ablate: these attentions, such as 'decoder.*.cross'.")
    ] = "*",
    bleu: Annotated[
        bool, typer.Option("--bleu", help="For --ablate: also translate without each head, and score by --target.")
    ] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="For --sites and --ablate: every row, as CSV.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For --sites and --ablate: every row, as JSON.")] = False,
    device: Device = "auto",
) -> None:
    """Look inside a model: opens a page in the browser, served from this machine to this machine only."""
    check_options(sites, ablate, export, heads, bleu, as_csv, as_json)
    if live and export is None:
        raise InputError("--live is for --export, which it makes a file that computes by itself; add --export FILE")
    path, device = find_model(model), find_device(device)
    name = path.stem if path.is_file() else path.resolve().name
    form = "csv" if as_csv else "json" if as_json else "table"
    if sites:
        from clearhead.cli.site_table import print_sites

        print_sites(load_model(path, device), text, form=form)
    elif ablate:
        from clearhead.cli.ablation_table import print_ablation

        print_ablation(load_model(path, device), path, AblationInput(text, target, heads, bleu), form=form)
    elif export is not None:
        write_page(path, name, text, target, device, export, live=live)
    else:
        serve_page(path, name, text, target, device, port, opens=not no_open)


def check_options(
    sites: bool, ablate: bool, export: Path | None, heads: str, bleu: bool, as_csv: bool, as_json: bool
) -> None:
    """Refuse options that would be ignored."""
    chosen = {"--sites": sites, "--ablate": ablate, "--export": export is not None}
    if len(given := [name for name, is_given in chosen.items() if is_given]) > 1:
        raise InputError(f"{' and '.join(given)} are different things to do; give one of them")
    if as_csv and as_json:
        raise InputError("--csv and --json are two forms of one table; give one of them")
    if (as_csv or as_json) and not (sites or ablate):
        raise InputError("--csv and --json are forms of a table; add --sites or --ablate")
    if (bleu or heads != "*") and not ablate:
        raise InputError("--heads and --bleu are for --ablate; add it, or leave them out")


def write_page(
    path: Path, name: str, text: str, target: str | None, device: str, file: Path, *, live: bool = False
) -> None:
    from clearhead.explorer import export_live_page, export_page, tokenizer_of

    check_output("--export", file)
    model = load_model(path, device)
    page = (export_live_page if live else export_page)(
        model, tokenizer_of(path, model), text, target, name=name, path=path
    )
    file.write_text(page, encoding="utf-8")
    typer.echo(f"{file}: {len(page.encode()) / 1e6:.1f} MB; opens in any browser, needs no network")


def serve_page(path: Path, name: str, text: str, target: str | None, device: str, port: int, *, opens: bool) -> None:
    try:
        from clearhead.serving.app import make_app
        from clearhead.serving.explorer_routes import address_of
        from clearhead.serving.model_worker import load_worker
        from clearhead.serving.server import run_app
    except ImportError as error:
        raise MissingExtraError(
            f"the page needs {error.name}, which is missing; pip install 'clearhead[serve]', or write it with --export"
        ) from None

    check_port("127.0.0.1", port)

    def ready(port: int) -> None:
        address = address_of(port, name, text, target)
        typer.echo(address)
        if opens:
            webbrowser.open(address)

    workers = {name: load_worker(path, name, device=device)}
    if workers[name].model.config.inputs != "tokens" and Path(text).is_file():
        raise InputError(
            f"in the browser a file is chosen on the page; got {text!r}; leave it out, or write one page of it: add --export FILE"
        )
    run_app(make_app(workers), workers.values(), 1.0, ready=ready, host="127.0.0.1", port=port)
