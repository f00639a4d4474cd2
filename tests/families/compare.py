"""A family's checkpoints against Hugging Face transformers, both ways: tiny random models, saved to disk, offline.

theirs = tiny(BertModel, BertConfig(...))
there_and_back(theirs, lambda m: m(tokens).last_hidden_state, lambda m: m(tokens))
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

import clearhead as ch
from clearhead.checkpoint import load, save
from clearhead.models import Model

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

# Only the order of summation differs: a few layers of sums over at most a hundred terms of order 1, each rounded at 6e-8.
FP32 = 1e-5
FP64 = 1e-10  # the same at 1e-16


def tiny(
    kind: type[PreTrainedModel], config: PreTrainedConfig, *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Any:
    """A model of transformers in eval mode, in which every number affects the output."""
    torch.manual_seed(seed)  # for the buffers, which `spread` does not change
    model = kind(config).to(dtype).eval()
    spread(model, seed)
    return model


@torch.no_grad()
def spread(model: PreTrainedModel, seed: int = 0) -> None:
    """Weights as after training: biases are not zero, norms not trivial, attention not uniform, and outputs of order 1.

    Fresh weights would hide mistakes: with a std of 0.02 every row of attention is nearly the mean.
    """
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        for name, x in module.named_parameters(recurse=False):
            noise = torch.randn(x.shape, generator=generator, dtype=torch.float64)
            if x.ndim == 1:
                x.copy_((1.0 if name == "weight" else 0.0) + 0.3 * noise)
            elif isinstance(module, torch.nn.Embedding) or name != "weight":
                x.copy_(0.5 * noise)
            else:
                x.copy_(noise / math.sqrt(x[0].numel()))


def sides(batch: int, length: int) -> dict[str, Tensor]:
    """Masks of real tokens: rows of different lengths, padded on the right and on the left."""
    lengths, at = length - 3 * torch.arange(batch)[:, None], torch.arange(length)
    return {"right": at < lengths, "left": at >= length - lengths}


def positions_of(real: Tensor) -> Tensor:
    """`position_ids` that count real tokens, as ours do; theirs also count padding by default."""
    return (real.cumsum(1) - 1).clamp(min=0)


def assert_near(ours: Tensor, theirs: Tensor, within: float = FP32) -> float:
    """The outputs agree to `within`, and are of order 1, so that this is meaningful. Returns the largest difference."""
    assert ours.dtype == theirs.dtype
    assert 0.1 < float(theirs.abs().max()) < 30, "these outputs are not of order 1: change the weights"
    difference = float((ours - theirs).abs().max())
    assert difference <= within, f"largest difference {difference}, allowed {within}"
    return difference


@torch.no_grad()
def there_and_back(
    theirs: Any,
    run_theirs: Callable[[Any], Tensor],
    run_ours: Callable[[Any], Tensor],
    *,
    within: float = FP32,
    **options: Any,
) -> Model:
    """Saved by transformers, loaded by us, saved by us in both layouts, loaded by transformers and by us: equal outputs.

    Further options go to `from_pretrained`. Returns our model.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        theirs.save_pretrained(folder / "theirs")
        ours = load(folder / "theirs")
        answer, expected = run_ours(ours), run_theirs(theirs)
        assert_near(answer, expected, within)

        save(ours, folder / "hf", format="hf")
        back, report = type(theirs).from_pretrained(folder / "hf", output_loading_info=True, **options)
        assert not any(report.values()), report  # nothing missing, unexpected, mismatched
        assert_same_weights(back, theirs)
        assert_near(run_theirs(back.eval()), expected, within)  # the same sums, except for the alignment of memory

        save(ours, folder / "ours")
        for written in ("ours", "hf"):
            again = load(folder / written)
            assert again.config == ours.config
            assert again.generation == ours.generation
            assert_same_weights(again, ours)
            assert_near(run_ours(again), answer, within)
    return ours


def assert_same_weights(one: torch.nn.Module, other: torch.nn.Module) -> None:
    """Bit for bit, under the same names."""
    theirs = other.state_dict()
    assert one.state_dict().keys() == theirs.keys()
    for name, tensor in one.state_dict().items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name


def saved(theirs: Any, folder: Path, **changes: Any) -> Path:
    """The folder of a model of theirs, with changed fields in its config.json; None removes one."""
    theirs.save_pretrained(folder)
    file = folder / "config.json"
    fields = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))
    return folder


def refusal(folder: Path) -> str:
    """The error message of loading this folder."""
    with pytest.raises(ch.CheckpointError) as error:
        load(folder)
    return str(error.value)


def tokens(vocab_size: int = 53, *, batch: int = 3, length: int = 11, low: int = 0, seed: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, vocab_size, (batch, length), generator=generator)
