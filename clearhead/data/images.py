"""Pictures for Vision Transformers, prepared as preprocessor_config.json beside the weights says: resized, cropped, scaled."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from clearhead.errors import CheckpointError, InputError, MissingExtraError


@dataclass(frozen=True, kw_only=True)
class ImagePreprocessing:
    """What is done to a picture before a model sees it."""

    size: tuple[int, int] | int | None  # height and width; one number: of the shorter side; None: as it is
    resample: int = 2  # Pillow's number for the way of resizing; 2: bilinear, 3: bicubic
    crop: tuple[int, int] | None = None  # height and width cut out of the middle
    scale: float = 1 / 255
    mean: tuple[float, ...] = (0.5,)  # one for all channels, or one each
    std: tuple[float, ...] = (0.5,)


def read_preprocessing(folder: Path, image_size: int) -> ImagePreprocessing:
    """What preprocessor_config.json says; without one, resized to `image_size` and scaled to -1 .. 1."""
    file = folder / "preprocessor_config.json"
    if not file.is_file():
        return ImagePreprocessing(size=(image_size, image_size))
    try:
        told: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        scale = told.get("rescale_factor", 1 / 255) if told.get("do_rescale", True) else 1.0
        normed = told.get("do_normalize", True)
        return ImagePreprocessing(
            size=_size(told.get("size", image_size)) if told.get("do_resize", True) else None,
            resample=int(told.get("resample", 2)),
            crop=_crop(told.get("crop_size", image_size)) if told.get("do_center_crop", False) else None,
            scale=float(scale),
            mean=tuple(map(float, told.get("image_mean", (0.5,)))) if normed else (0.0,),
            std=tuple(map(float, told.get("image_std", (0.5,)))) if normed else (1.0,),
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{file} does not say how to prepare a picture ({error!r:.100}); fetch it again"
        ) from None


def _size(told: Any) -> tuple[int, int] | int:
    if isinstance(told, dict) and "shortest_edge" in told:
        return int(told["shortest_edge"])
    return _crop(told)


def _crop(told: Any) -> tuple[int, int]:
    return (int(told["height"]), int(told["width"])) if isinstance(told, dict) else (int(told), int(told))


def load_image(
    source: str | Path | BytesIO, prepare: ImagePreprocessing, *, n_channels: int = 3
) -> Float[Tensor, "c h w"]:
    """A picture file as a tensor, ready for a model."""
    x = torch.from_numpy(read_image(source, prepare, n_channels=n_channels)).float() * prepare.scale
    mean, std = (torch.tensor(values)[:, None, None] for values in (prepare.mean, prepare.std))
    return (x - mean) / std


def read_image(
    source: str | Path | BytesIO, prepare: ImagePreprocessing, *, n_channels: int = 3
) -> UInt8[np.ndarray, "c h w"]:
    """A picture file resized and cropped as `prepare` says, but not yet scaled: numbers from 0 to 255."""
    try:
        from PIL import Image  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise MissingExtraError("pictures need Pillow, which is missing; pip install 'clearhead[pictures]'") from None
    name = source if isinstance(source, str | Path) else "the input"
    if isinstance(source, str | Path) and not Path(source).is_file():
        raise InputError(f"there is no picture {str(source)!r}; is the path right?")
    try:
        with warnings.catch_warnings(), Image.open(source) as opened:
            warnings.simplefilter(
                "error", Image.DecompressionBombWarning
            )  # a small file may ask for any amount of memory
            picture = opened.convert("L" if n_channels == 1 else "RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InputError(f"{name} is no picture that can be read ({error}); convert it to png or jpeg") from None
    if prepare.size is not None:
        width, height = picture.size
        size = prepare.size
        if isinstance(size, int):  # the shorter side; the other keeps its proportion
            short = min(width, height)
            size = size * height // short, size * width // short
        picture = picture.resize((size[1], size[0]), Image.Resampling(prepare.resample))
    if prepare.crop is not None:
        picture = _middle(picture, prepare.crop)
    x = np.array(picture, dtype=np.uint8)
    return x[None] if x.ndim == 2 else np.ascontiguousarray(np.moveaxis(x, -1, 0))


def _middle(picture: Any, size: tuple[int, int]) -> Any:
    top, left = (picture.height - size[0]) // 2, (picture.width - size[1]) // 2
    return picture.crop((left, top, left + size[1], top + size[0]))
