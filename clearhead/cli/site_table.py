"""`clearhead explore --sites`: the places in a model that can be probed, with their shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from clearhead.cli.console import Form, plain_table, wide_console, write_rows
from clearhead.config import Config

if TYPE_CHECKING:
    from clearhead.models import Model


def print_sites(model: Model, pattern: str = "", *, form: Form = "table") -> None:
    """All sites, or those that match a pattern. Without a pattern, layers with the same shapes share a row of the table."""
    from clearhead.inside import sites
    from clearhead.inside.sites import find_sites

    known = sites(model)
    sizes = {site: spell_sizes(site, known[site], model.config) for site in find_sites(pattern or "*", list(known))}
    if form != "table":
        write_rows([{"site": site, "shape": known[site], "here": size} for site, size in sizes.items()], form)
        return
    rows = {site: (known[site], size) for site, size in sizes.items()} if pattern else group_layers(known, sizes)
    console, table = wide_console(), plain_table("site", "shape", "in this model", n_left=3)
    for site, (shape, size) in rows.items():
        table.add_row(site, shape, size)
    console.print(table)
    legend = "B batch, T queries, S keys, H heads, K key heads, E width of a head, F feed-forward width, D width"
    console.print(f"\n{len(sizes)} sites. {legend}.")


def group_layers(known: Mapping[str, str], sizes: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """One row, with "*" for the layer's number, where all layers have the same sizes; pruned layers may differ."""
    groups: dict[str, list[str]] = {}
    for site in sizes:
        groups.setdefault(".".join("*" if part.isdigit() else part for part in site.split(".")), []).append(site)
    rows: dict[str, tuple[str, str]] = {}
    for pattern, members in groups.items():
        if len({sizes[site] for site in members}) == 1:
            rows[pattern] = known[members[0]], sizes[members[0]]
        else:
            rows |= {site: (known[site], sizes[site]) for site in members}
    return rows


def spell_sizes(site: str, shape: str, config: Config) -> str:
    """A shape such as "(B, T, D)" with this model's numbers: "(B, T, 768)"."""
    attention = site.rpartition(".")[0]
    heads = len(config.kept_heads(attention))
    sizes = {"H": heads, "K": heads * config.n_kv_heads // config.n_heads, "E": config.d_head}
    sizes |= {"F": config.d_ff, "D": config.d_model}
    return "(" + ", ".join(str(sizes.get(axis, axis)) for axis in shape.strip("()").split(", ")) + ")"
