"""The model of a run that still goes on or was stopped: its newest whole checkpoint, `checkpoints/step-00000400`.

The training room writes these folders (training/checkpoints.py): tensors, and a state.json with checksums and the config.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead.checkpoint.checksums import check_seal, file_checksum
from clearhead.checkpoint.weight_files import MemoryWeights, SafeTensors
from clearhead.config import Config, Generation
from clearhead.errors import CheckpointError, ConfigError
from clearhead.models import Model, build

FIELDS = {"state", "processes", "crc32", "model", "generation"}  # of state.json


def describe(model: Model) -> dict[str, Any]:
    """What a checkpoint must tell beside its tensors, so that a model can be built of it."""
    return {"model": model.config.to_dict(), "generation": asdict(model.generation)}


def steps_of(run: Path) -> list[Path]:
    """Every complete checkpoint of a run's folder, the oldest first."""
    return sorted(path for path in (run / "checkpoints").glob("step-*") if (path / "state.json").is_file())


def read_state(step: Path) -> dict[str, Any]:
    """The content of a checkpoint's state.json. OSError, ValueError, KeyError or TypeError if a file is not as it was written."""
    stored: dict[str, Any] = json.loads((step / "state.json").read_text(encoding="utf-8"))
    check_seal(stored, FIELDS)
    for name, wanted in stored["crc32"].items():
        if file_checksum(step / name) != wanted:
            raise ValueError(f"{name} does not match its checksum")
    return stored


def newest_step(run: Path) -> Path | None:
    """The checkpoint that stands for a run without a result; None where the folder has a result or is no run."""
    if (run / "config.json").is_file() or not (run / "recipe.toml").is_file():
        return None
    for step in reversed(steps_of(run)):
        try:
            read_state(step)
        except (OSError, ValueError, KeyError, TypeError):
            continue
        return step
    raise CheckpointError(
        f"{run} is a run that has no result and no whole checkpoint yet; wait for its first, or go on with it: "
        f"clearhead train --resume {run}"
    )


def unfinished(run: Path) -> str:
    """A line for the user where a run's newest checkpoint stands for its result; else nothing."""
    step = newest_step(run)
    return "" if step is None else f"{run} is not finished: this is its model after step {int(step.name[5:]):,}"


def open_step(step: Path) -> tuple[Config, Generation, MemoryWeights]:
    """The model of one checkpoint: its config, and its weights by the names of our own layout."""
    run = step.parent.parent
    try:
        stored = read_state(step)
        config = Config.from_dict(stored["model"])
        fields: dict[str, Any] = {
            name: tuple(v) if isinstance(v, list) else v for name, v in stored["generation"].items()
        }
        generation = Generation(**fields)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
        raise CheckpointError(
            f"{step} can not be read as a model ({error}); go on with the run: clearhead train --resume {run}"
        ) from None
    keys = SafeTensors(sorted(step.glob("*.safetensors"))).shapes.keys()
    if any(".lora_" in key for key in keys):
        raise CheckpointError(
            f"{step} holds LoRA's additions without the frozen weights, so no whole model; go on to the run's end, which merges "
            f"them: clearhead train --resume {run}"
        )
    model = build(config)  # weights that do not learn, such as a pooling layer that nothing reads, are not in the file
    tensors = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    try:
        read_tensors(step, {name: tensor for name, tensor in tensors.items() if name in keys})
    except Exception as error:  # a damaged file may raise any of torch's and safetensors' errors
        raise CheckpointError(f"{step} does not fit its config ({error}); take an older one, or resume") from None
    absent = [name for name in tensors if name not in keys and not name.startswith("model.pool.")]
    if absent:
        raise CheckpointError(
            f"{step} has no {', '.join(absent[:3])}; go on with the run: clearhead train --resume {run}"
        )
    return config, generation, MemoryWeights(dict(model.state_dict()))


@torch.no_grad()
def read_tensors(step: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill the tensors from a checkpoint, which any number of processes may have written."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load

    with plain_errors():
        load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(step)))


@contextmanager
def plain_errors() -> Generator[None]:
    """Raise the first error itself, which torch wraps in a BaseException; silence its warning that there is one process."""
    from torch.distributed.checkpoint import CheckpointException

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from None
