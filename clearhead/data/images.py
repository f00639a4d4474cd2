"""Images for Vision Transformers: resized, cropped and scaled as preprocessor_config.json beside the weights says."""

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

MAX_PIXELS = 89_478_485  # of a file: Pillow's limit, 270 MB when decoded
MAX_RATIO = 100  # of its sides, where the shorter one is resized and the longer one follows
# Steps of other models' preprocessor_config.json. They change the picture, and are off where they are not named.
OTHER_STEPS = ("do_flip_channel_order", "do_pad", "do_thumbnail", "do_align_long_axis", "rescale_offset", "crop_pct")


@dataclass(frozen=True, kw_only=True)
class ImagePreprocessing:
    """What is done to an image before it enters a model."""

    size: tuple[int, int] | int | None  # height and width; one number: the shorter side; None: not resized
    resample: int = 2  # Pillow's number of the method; 2: bilinear, 3: bicubic
    crop: tuple[int, int] | None = None  # height and width cut out of the middle
    scale: float = 1 / 255
    mean: tuple[float, ...] = (0.5,)  # one for all channels, or one each
    std: tuple[float, ...] = (0.5,)


def read_preprocessing(folder: Path, image_size: int) -> ImagePreprocessing:
    """The content of preprocessor_config.json; without that file, images are resized to `image_size` and scaled to -1 .. 1."""
    file = folder / "preprocessor_config.json"
    if not file.is_file():
        return ImagePreprocessing(size=(image_size, image_size))
    try:
        fields: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        for name in OTHER_STEPS:
            if fields.get(name):
                raise CheckpointError(
                    f"{file.name}'s {name}={fields[name]!r:.60} is a step that is not supported; prepare the pictures by it, and "
                    f"delete the field"
                )
        scale = fields.get("rescale_factor", 1 / 255) if fields.get("do_rescale", True) else 1.0
        normalize = fields.get("do_normalize", True)
        return ImagePreprocessing(
            size=_size(fields.get("size", image_size)) if fields.get("do_resize", True) else None,
            resample=int(fields.get("resample", 2)),
            crop=_height_width(fields.get("crop_size", image_size)) if fields.get("do_center_crop", False) else None,
            scale=float(scale),
            mean=tuple(map(float, fields.get("image_mean", (0.5,)))) if normalize else (0.0,),
            std=tuple(map(float, fields.get("image_std", (0.5,)))) if normalize else (1.0,),
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{file} does not say how to prepare a picture ({error!r:.100}); fetch it again"
        ) from None


def _size(value: Any) -> tuple[int, int] | int:
    if isinstance(value, dict) and "shortest_edge" in value:
        return int(value["shortest_edge"])
    return _height_width(value)


def _height_width(value: Any) -> tuple[int, int]:
    return (int(value["height"]), int(value["width"])) if isinstance(value, dict) else (int(value), int(value))


def load_image(
    source: str | Path | BytesIO, preprocessing: ImagePreprocessing, *, n_channels: int = 3
) -> Float[Tensor, "c h w"]:
    """An image file as a tensor, ready for a model."""
    x = torch.from_numpy(read_image(source, preprocessing, n_channels=n_channels)).float() * preprocessing.scale
    mean, std = (torch.tensor(values)[:, None, None] for values in (preprocessing.mean, preprocessing.std))
    return (x - mean) / std


def read_image(
    source: str | Path | BytesIO, preprocessing: ImagePreprocessing, *, n_channels: int = 3
) -> UInt8[np.ndarray, "c h w"]:
    """An image file, resized and cropped but not yet scaled: numbers from 0 to 255."""
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise MissingExtraError("pictures need Pillow, which is missing; pip install 'clearhead[pictures]'") from None
    name = source if isinstance(source, str | Path) else "the input"
    if isinstance(source, str | Path) and not Path(source).is_file():
        raise InputError(f"there is no picture {str(source)!r}; is the path right?")
    try:
        with warnings.catch_warnings():
            # A small file may decompress to any amount of memory. `open` warns, from the header alone: the filter comes first.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(source) as opened:
                _resized(name, opened.size, preprocessing.size)  # refuses by the header, before anything is decoded
                # Phones store a photo as the sensor read it, and beside it how to turn it upright.
                upright = _in_8_bits(ImageOps.exif_transpose(opened), opened.format)
                image = upright.convert("L" if n_channels == 1 else "RGB")
                size = _resized(name, image.size, preprocessing.size)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        # Pillow's own words for it name a Python object.
        reason = "of no known kind" if isinstance(error, UnidentifiedImageError) else error
        raise InputError(f"{name} is no picture that can be read ({reason}); convert it to png or jpeg") from None
    if size is not None:
        image = image.resize((size[1], size[0]), Image.Resampling(preprocessing.resample))
    if preprocessing.crop is not None:
        image = _crop_middle(image, preprocessing.crop)
    x = np.array(image, dtype=np.uint8)
    return x[None] if x.ndim == 2 else np.ascontiguousarray(np.moveaxis(x, -1, 0))


def _in_8_bits(image: Any, form: str | None) -> Any:
    """Grey of 16 bits as 8 bits. Pillow's own conversion makes every shade above 255 of 65,535 white."""
    from PIL import Image  # pyright: ignore[reportMissingImports]

    if image.mode.startswith("I;16") or (image.mode == "I" and form == "PPM"):
        return Image.fromarray(((np.asarray(image).astype(np.uint32) + 128) // 257).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError("its pixels are 32-bit numbers, and nothing says which of them is white")
    return image


def _resized(name: object, size: tuple[int, int], wanted: tuple[int, int] | int | None) -> tuple[int, int] | None:
    """Height and width after resizing, from the file's header; InputError where a picture would grow beyond all use."""
    width, height = size
    if width * height > MAX_PIXELS:
        raise InputError(
            f"{name} is too large: {width:,} x {height:,} pixels, and {MAX_PIXELS:,} are the limit; make it smaller"
        )
    if not isinstance(wanted, int):
        return wanted
    short = min(width, height)  # the shorter side is given; the other keeps its proportion
    if short == 0 or max(width, height) > MAX_RATIO * short:
        raise InputError(
            f"{name} is too narrow: {width:,} x {height:,} pixels, and one side may be {MAX_RATIO} times the other; cut it"
        )
    return wanted * height // short, wanted * width // short


def _crop_middle(image: Any, size: tuple[int, int]) -> Any:
    top, left = (image.height - size[0]) // 2, (image.width - size[1]) // 2
    return image.crop((left, top, left + size[1], top + size[0]))
