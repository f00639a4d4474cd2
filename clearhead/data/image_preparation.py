"""From image files to a store: each is read and resized once."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from clearhead.data.filters import Findings, Policy
from clearhead.data.images import ImagePreprocessing, read_image
from clearhead.data.preparation import BATCH, Folder, Labels, Preparation, Progress, in_batches
from clearhead.data.token_store import Store, StoreWriter
from clearhead.errors import InputError


def prepare_images(
    folder: Folder,
    pictures: Sequence[tuple[Path, str]],
    image_size: int,
    n_channels: int = 3,
    *,
    labels: Sequence[str] | None = None,
    policy: Policy | None = None,
    findings: Findings | None = None,
    progress: Progress | None = None,
) -> Store:
    """Images with one label each (see `find_images`): columns "picture", uint8 of (C, H, W), and "label".

    Each is resized so that its shorter side is `image_size`, and cropped to the middle. `findings` are those of `find_images`;
    the store's own are added to them.
    """
    options = ["pictures", image_size, n_channels, labels, [label for _, label in pictures]]
    preparation = Preparation(folder, [path for path, _ in pictures], policy, progress, options, findings=findings)
    if preparation.is_done():
        return Store(folder)
    preprocessing = ImagePreprocessing(size=image_size, crop=(image_size, image_size))
    findings, names = preparation.text_filter.findings, Labels(labels)

    def read(path: Path) -> UInt8[np.ndarray, "c h w"] | None:
        try:
            return read_image(path, preprocessing, n_channels=n_channels)
        except InputError as error:
            if preparation.text_filter.policy.bad_bytes != "drop":
                raise InputError(f'{error}, or choose bad_bytes="drop"') from None
            return None

    shape = (n_channels, image_size, image_size)
    with StoreWriter(folder, {"picture": np.uint8, "label": np.int32}, {"picture": shape, "label": ()}) as writer:
        with ThreadPoolExecutor() as pool:  # Pillow lets other threads run while it decodes
            for batch in in_batches(pictures, lambda _: BATCH // 64):
                for (path, label), picture in zip(batch, pool.map(read, [path for path, _ in batch]), strict=True):
                    findings.read["pictures"] += 1
                    findings.done += path.stat().st_size
                    if picture is None:
                        findings.note("pictures", "dropped: can not be read", path.name)
                        continue
                    names.add(label, str(path))
                    writer.add(picture=picture)
                preparation.report_progress()
        found, indices = names.number()
        writer.add_part("label", indices, ends=True)
        preparation.write_info(writer, labels=found)
    return Store(folder)


def prepare_arrays(
    folder: Folder,
    pictures: UInt8[np.ndarray, "n c h w"],
    labels: Sequence[str],
) -> Store:
    """The store that `prepare_images` makes, from images in memory."""
    if len(pictures) != len(labels):
        raise InputError(f"{len(pictures)} pictures have {len(labels)} labels; give one label for each")
    content = hashlib.sha256(pictures.tobytes()).hexdigest()
    preparation = Preparation(folder, [], None, None, ["arrays", pictures.shape, content, list(labels)])
    if preparation.is_done():
        return Store(folder)
    names = Labels(None)
    for number, label in enumerate(labels):
        names.add(label, f"picture {number}")
    found, indices = names.number()
    shapes = {"picture": pictures.shape[1:], "label": ()}
    with StoreWriter(folder, {"picture": np.uint8, "label": np.int32}, shapes) as writer:
        writer.add(picture=pictures, label=indices)
        preparation.write_info(writer, labels=found)
    return Store(folder)
