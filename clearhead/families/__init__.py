"""One page per family: what makes it that family, its published sizes, and how its checkpoints are read and written.

A page has
    BASE, SIZES         the fields all its sizes share, and those of each
    HF                  the `model_type`s of Hugging Face configs that it reads
    read, write         their config.json -> our fields, and back; each refuses what the other side can not honour
    NAMES               the table of checkpoint names (checkpoint/names.py says how it is read), or the config's function that
                        makes it, where names depend on fields
    PREFIX, HEADS       what stands before names in a model with a head, and the names it does not stand before
    UNUSED, EXTRAS      patterns of keys that carry no weights, and of weights kept for saving but not computed with
    added               only where a layout holds tensors that no model of ours has: makes them from the config

Adding a family means adding a page and naming it in `PAGES`. May import: errors, config, layers, models.
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


def page_of(model_type: str) -> str | None:
    """The family that reads this `model_type`."""
    return next((family for family, page in PAGES.items() if model_type in page.HF), None)


def presets() -> list[str]:
    """Every named size, family by family."""
    return [name for page in PAGES.values() for name in page.SIZES]


def preset(name: str, **changes: Any) -> Config:
    """The config of a named size, with any field changed: `preset("gpt2", n_layers=4)`."""
    for family, page in PAGES.items():
        if name in page.SIZES:
            return Config.from_dict({"family": family, **page.BASE, **page.SIZES[name], **changes})
    raise ConfigError(f"there is no preset {name!r}; {did_you_mean(name, presets())}")
