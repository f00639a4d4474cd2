"""Images into a store: resized and cropped as for a loaded model; unreadable ones are reported."""

from __future__ import annotations

import json
import struct
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clearhead.data import Findings, Policy, Store, find_images, prepare_arrays, prepare_images
from clearhead.data.images import OTHER_STEPS, ImagePreprocessing, load_image, read_image, read_preprocessing
from clearhead.errors import CheckpointError, InputError

Image = pytest.importorskip("PIL.Image")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    for name, size in (
        ("dog/a.png", (23, 17)),
        ("dog/b.png", (11, 31)),
        ("cat/c.jpg", (13, 13)),
        ("cat/d.png", (7, 5)),
    ):
        file = tmp_path / "pictures" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (*size, 3), dtype=np.uint8)).save(file)
    return tmp_path / "pictures"


@pytest.mark.parametrize("n_channels", [1, 3])
def test_images(folder: Path, tmp_path: Path, n_channels: int) -> None:
    found = find_images(folder)
    progress: list[tuple[int, int]] = []
    store = prepare_images(tmp_path / "s", found, 11, n_channels, progress=lambda *numbers: progress.append(numbers))
    store.check()
    assert store["picture"].flat.shape == (4, n_channels, 11, 11)
    assert store.info["labels"] == ["cat", "dog"]
    assert store["label"].flat.tolist() == [0, 0, 1, 1]
    assert progress[-1][0] == progress[-1][1] > 0
    # Training and inference see the same numbers.
    prepare = ImagePreprocessing(size=11, crop=(11, 11), mean=(0.0,), std=(1.0,))
    for row, (path, _) in enumerate(found):
        shown = load_image(path, prepare, n_channels=n_channels)
        torch.testing.assert_close(torch.from_numpy(np.array(store["picture"][row])) / 255, shown, rtol=0, atol=1e-6)


def test_made_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_images(tmp_path / "s", find_images(folder), 11)
    monkeypatch.setattr("clearhead.data.image_preparation.read_image", lambda *_, **__: pytest.fail("read again"))
    assert isinstance(prepare_images(tmp_path / "s", find_images(folder), 11), Store)


@pytest.mark.parametrize(
    ("size", "words"),
    [
        ((1, 60_000), "too narrow: 1 x 60,000 pixels, and one side may be 100 times the other"),
        ((60_000, 7), "too narrow: 60,000 x 7"),
        ((10_000, 9_000), r"no picture that can be read \(Image size \(90000000 pixels\) exceeds limit"),
        ((40_000, 30_000), "no picture that can be read .* decompression bomb"),
    ],
)
def test_picture_bombs_are_refused_by_their_header(
    size: tuple[int, int], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """196 bytes of 1 x 60,000 pixels became 9 GB: the shorter side was resized to 224, and the longer one followed."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", *size, 8, 0, 0, 0, 0)
    file = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    monkeypatch.setattr(Image.Image, "convert", lambda *_: pytest.fail("decoded"))
    with pytest.raises(InputError, match=words):
        load_image(BytesIO(file), ImagePreprocessing(size=224, crop=(224, 224)))


def test_unreadable_images(folder: Path, tmp_path: Path) -> None:
    (folder / "dog" / "b.png").write_bytes(b"no picture")
    with pytest.raises(InputError, match=r"dog/b.png is no picture that can be read"):
        prepare_images(tmp_path / "s", find_images(folder), 11)
    with pytest.raises(InputError, match=r'convert it to png or jpeg, or choose bad_bytes="drop"$'):
        prepare_images(tmp_path / "s", find_images(folder), 11)
    assert not (tmp_path / "s").exists()
    (folder / "dog" / "notes.txt").write_text("not a picture")
    findings = Findings()
    pictures = find_images(folder, findings)
    store = prepare_images(tmp_path / "s", pictures, 11, policy=Policy(bad_bytes="drop"), findings=findings)
    assert store["label"].flat.tolist() == [0, 0, 1]
    assert store.info["findings"] == [
        "1 of 5 files left out: no picture by their name (dog/notes.txt)",
        "1 of 4 pictures dropped: can not be read (b.png)",
    ]


def test_labels_given(folder: Path, tmp_path: Path) -> None:
    store = prepare_images(tmp_path / "s", find_images(folder), 11, labels=["dog", "emu", "cat"])
    assert store["label"].flat.tolist() == [2, 2, 0, 0]
    with pytest.raises(InputError, match=r"cat/c.jpg has the label 'cat', which is none of the 2 known"):
        prepare_images(tmp_path / "x", find_images(folder), 11, labels=["dog", "emu"])


def test_arrays(tmp_path: Path) -> None:
    pictures = np.random.default_rng(0).integers(0, 256, (5, 1, 7, 3), dtype=np.uint8)
    store = prepare_arrays(tmp_path / "s", pictures, ["9", "10", "9", "0", "0"])
    assert np.array_equal(store["picture"].flat, pictures)
    assert store.info["labels"] == ["0", "9", "10"]
    assert store["label"].flat.tolist() == [1, 2, 1, 0, 0]
    assert store.info["rows"] == len(store) == 5
    again = prepare_arrays(tmp_path / "s", pictures, ["9", "10", "9", "0", "0"])
    assert again.info["fingerprint"] == store.info["fingerprint"]
    with pytest.raises(InputError, match="5 pictures have 2 labels"):
        prepare_arrays(tmp_path / "s", pictures, ["1", "2"])


@pytest.mark.parametrize("step", OTHER_STEPS)
def test_steps_of_other_models_are_refused(tmp_path: Path, step: str) -> None:
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps({"size": 7, "do_convert_rgb": None, step: None}))
    assert read_preprocessing(tmp_path, 11) == ImagePreprocessing(size=(7, 7))
    file.write_text(json.dumps({"size": 7, step: 0.9}))
    with pytest.raises(
        CheckpointError, match=rf"preprocessor_config.json's {step}=0.9 is a step that is not supported"
    ):
        read_preprocessing(tmp_path, 11)


@pytest.mark.parametrize("name", ["x.png", "x.tif", "x.pgm"])
@pytest.mark.parametrize("n_channels", [1, 3])
def test_grey_of_16_bits(tmp_path: Path, name: str, n_channels: int) -> None:
    """Pillow alone would make 255 of everything above it: a white picture."""
    grey = np.arange(256, dtype=np.uint8).reshape(8, 32)
    wide = grey.astype(np.uint16) * 257
    if name.endswith("pgm"):
        (tmp_path / name).write_bytes(b"P5 32 8 65535\n" + wide.astype(">u2").tobytes())
    else:
        Image.fromarray(wide).save(tmp_path / name)
    found = read_image(tmp_path / name, ImagePreprocessing(size=None), n_channels=n_channels)
    assert np.array_equal(found, np.broadcast_to(grey, (n_channels, 8, 32)))


@pytest.mark.parametrize("kind", [np.int32, np.float32])
def test_numbers_of_32_bits_are_refused(tmp_path: Path, kind: Any) -> None:
    """Their white may be 1, 255 or 65,535."""
    Image.fromarray(np.ones((8, 8), dtype=kind)).save(tmp_path / "x.tif")
    with pytest.raises(InputError, match=r"32-bit numbers, and nothing says which of them is white"):
        read_image(tmp_path / "x.tif", ImagePreprocessing(size=None))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_photos_are_turned_upright(tmp_path: Path, orientation: int) -> None:
    from PIL import ImageOps

    stored = Image.fromarray(np.random.default_rng(3).integers(0, 256, (7, 11, 3), dtype=np.uint8))
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored.save(tmp_path / "photo.png", exif=exif)
    with Image.open(tmp_path / "photo.png") as opened:
        upright = np.moveaxis(np.array(ImageOps.exif_transpose(opened)), -1, 0)
    assert upright.shape == ((3, 7, 11) if orientation < 5 else (3, 11, 7))
    found = read_image(tmp_path / "photo.png", ImagePreprocessing(size=None))
    assert np.array_equal(found, upright)
    assert np.array_equal(found, np.moveaxis(np.array(stored), -1, 0)) == (orientation == 1)
