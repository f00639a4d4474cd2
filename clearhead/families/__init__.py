"""One page per family: what makes it that family, and its published sizes.

A page has `BASE` (fields all its sizes share) and `SIZES` (fields of each). Adding a family means adding a page and naming it in
`PAGES`. May import: errors, config, layers, models.
"""

from __future__ import annotations

from typing import Any

from clearhead.config import Config
from clearhead.errors import ConfigError, did_you_mean
from clearhead.families import bert, esm, gpt2, llama, marian, original, t5, vit, whisper

PAGES = {
    "original": original,
    "gpt2": gpt2,
    "llama": llama,
    "bert": bert,
    "esm": esm,
    "vit": vit,
    "t5": t5,
    "marian": marian,
    "whisper": whisper,
}


def presets() -> list[str]:
    """Every named size, family by family."""
    return [name for page in PAGES.values() for name in page.SIZES]


def preset(name: str, **changes: Any) -> Config:
    """The config of a named size, with any field changed: `preset("gpt2", n_layers=4)`."""
    for family, page in PAGES.items():
        if name in page.SIZES:
            return Config.from_dict({"family": family, **page.BASE, **page.SIZES[name], **changes})
    raise ConfigError(f"there is no preset {name!r}; {did_you_mean(name, presets())}")
