"""One module per family: its fields, its published sizes, and the translation of its checkpoints.

A family module has
    BASE, SIZES         the fields that all its sizes share, and the fields of each size
    HF                  the `model_type`s of the Hugging Face configs that it reads
    read, write         their config.json -> our fields, and back; each refuses what the other side can not express
    NAMES               the table of tensor names (checkpoint/tensor_names.py describes it), or a function of the config that
                        makes the table, where names depend on fields
    PREFIX, HEADS       the prefix of tensor names in a model with a head, and the names that do not have it
    UNUSED, EXTRAS      patterns of keys that hold no weights, and of weights that are kept for saving but not computed with
    added               optional: tensors that the layout needs and our model does not have, made from the config

To add a family, add a module and name it in `FAMILIES`. May import: errors, config, layers, models.
"""

from __future__ import annotations

from typing import Any

from clearhead.config import Config
from clearhead.errors import ConfigError, did_you_mean
from clearhead.families import bert, esm, gpt2, llama, marian, original, qwen3, t5, vit, whisper

FAMILIES = {
    "original": original,
    "gpt2": gpt2,
    "llama": llama,
    "qwen3": qwen3,
    "bert": bert,
    "esm": esm,
    "vit": vit,
    "t5": t5,
    "marian": marian,
    "whisper": whisper,
}

# Well-known families that are not here, though the name of one that is may be near.
OTHERS = (
    *("albert", "bart", "bloom", "camembert", "codegen", "deberta", "deepseek", "distil", "electra", "falcon", "gemma"),
    *("gpt-j", "gptj", "gpt-neo", "gptneo", "longformer", "mbart", "mixtral", "mpt", "mt5", "nllb", "opt-", "pegasus"),
    *("phi-", "phi2", "phi3", "pythia", "roberta", "swin", "xlm", "xlnet"),
)


def family_of(model_type: str) -> str | None:
    """The name of the family that reads this `model_type`, if there is one."""
    return next((name for name, family in FAMILIES.items() if model_type in family.HF), None)


def presets() -> list[str]:
    """The names of all sizes, family by family."""
    return [name for family in FAMILIES.values() for name in family.SIZES]


def preset(name: str, **changes: Any) -> Config:
    """The config of a named size, with any field changed: `preset("gpt2", n_layers=4)`."""
    for family, module in FAMILIES.items():
        if name in module.SIZES:
            return Config.from_dict({"family": family, **module.BASE, **module.SIZES[name], **changes})
    if name.lower().startswith(OTHERS):  # no slip of the hand: BART is no BERT
        raise ConfigError(
            f"there is no preset {name!r}: its family is none of {', '.join(FAMILIES)}; `clearhead presets` lists all sizes"
        )
    raise ConfigError(f"there is no preset {name!r}; {did_you_mean(name, presets())}")
