"""From pictures to a store: each is read and resized once."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from clearhead.data.findings import Findings, Policy
from clearhead.data.pictures import Preparation, read_picture
from clearhead.data.store import Store, StoreWriter
from clearhead.data.work import AT_ONCE, Labels, Place, Progress, Work, in_batches
from clearhead.errors import InputError


def prepare_pictures(
    folder: Place,
    pictures: Sequence[tuple[Path, str]],
    image_size: int,
    n_channels: int = 3,
    *,
    labels: Sequence[str] | None = None,
    policy: Policy | None = None,
    findings: Findings | None = None,
    progress: Progress | None = None,
) -> Store:
    """Pictures with one label each (see `find_pictures`): columns "picture", uint8 of (C, H, W), and "label".

    Each is resized until its shorter side is `image_size`, and the middle is cut out. `findings` are those of the search, to
    be told with the store's own.
    """
    options = ["pictures", image_size, n_channels, labels, [label for _, label in pictures]]
    work = Work(folder, [path for path, _ in pictures], policy, progress, options, findings=findings)
    if work.is_done():
        return Store(folder)
    prepare = Preparation(size=image_size, crop=(image_size, image_size))
    findings, names = work.judge.findings, Labels(labels)

    def read(path: Path) -> UInt8[np.ndarray, "c h w"] | None:
        try:
            return read_picture(path, prepare, n_channels=n_channels)
        except InputError:
            if work.judge.policy.bad_bytes != "drop":
                raise
            return None

    shape = (n_channels, image_size, image_size)
    with StoreWriter(folder, {"picture": np.uint8, "label": np.int32}, {"picture": shape, "label": ()}) as writer:
        with ThreadPoolExecutor() as pool:  # Pillow lets other threads run while it decodes
            for batch in in_batches(pictures, lambda _: AT_ONCE // 64):
                for (path, label), picture in zip(batch, pool.map(read, [path for path, _ in batch]), strict=True):
                    findings.read["pictures"] += 1
                    findings.done += path.stat().st_size
                    if picture is None:
                        findings.note("pictures", "dropped: can not be read", path.name)
                        continue
                    names.add(label, str(path))
                    writer.add(picture=picture)
                work.tell()
        found, places = names.settle()
        writer.add_part("label", places, ends=True)
        work.describe(writer, labels=found)
    return Store(folder)


def prepare_arrays(
    folder: Place,
    pictures: UInt8[np.ndarray, "n c h w"],
    picture_labels: Sequence[str],
    labels: Sequence[str] | None = None,
) -> Store:
    """The store that `prepare_pictures` makes, of pictures that are in memory already."""
    if len(pictures) != len(picture_labels):
        raise InputError(f"{len(pictures)} pictures have {len(picture_labels)} labels; give one label for each")
    content = hashlib.sha256(pictures.tobytes()).hexdigest()
    work = Work(folder, [], None, None, ["arrays", pictures.shape, content, list(picture_labels), labels])
    if work.is_done():
        return Store(folder)
    names = Labels(labels)
    for number, label in enumerate(picture_labels):
        names.add(label, f"picture {number}")
    found, places = names.settle()
    shapes = {"picture": pictures.shape[1:], "label": ()}
    with StoreWriter(folder, {"picture": np.uint8, "label": np.int32}, shapes) as writer:
        writer.add(picture=pictures, label=places)
        work.describe(writer, labels=found)
    return Store(folder)
