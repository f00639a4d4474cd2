"""Datasets that need no download, for a first model: Python's own source, and scikit-learn's digits."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from jaxtyping import Bool, Int, UInt8
from torch import Tensor

from clearhead.errors import InputError, MissingExtraError

# Left out: tests, an editor, demos, tables of numbers, installed packages, and modules that some installations lack.
_NOT_LIBRARY = {
    "test", "tests", "idlelib", "turtledemo", "lib2to3", "pydoc_data", "encodings", "ensurepip", "site-packages",
    "dist-packages", "lib-dynload", "__pycache__", "__phello__", "tkinter", "distutils",
}  # fmt: skip


def standard_library() -> list[Path]:
    """The .py files of this Python's standard library, sorted. Each version of Python gives another corpus."""
    root = Path(sysconfig.get_path("stdlib"))
    names = (path.relative_to(root) for path in root.rglob("*.py"))
    # _sysconfigdata... describes the machine that Python was built on.
    kept = [name for name in names if not _NOT_LIBRARY & {*name.parts} and not name.match("_sysconfigdata*")]
    if not kept:
        raise InputError(
            f"this Python has no source files in {root}; take another, or train on a folder of your own code"
        )
    return [root / name for name in sorted(kept, key=Path.as_posix)]


def digits() -> tuple[UInt8[Tensor, "n 1 8 8"], Int[Tensor, " n"]]:
    """1,797 images of handwritten digits, 8 by 8, from 0 (paper) to 255 (ink), and the digit that each one shows."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise MissingExtraError(
            "the digits are scikit-learn's, which is missing; pip install 'clearhead[demo]'"
        ) from None
    counts, labels = load_digits(return_X_y=True)  # counts of ink, 0 to 16
    images = torch.from_numpy(counts).mul(255 / 16).round().to(torch.uint8)
    return images.view(-1, 1, 8, 8), torch.from_numpy(labels).long()


def held_out_fifth(labels: Int[Tensor, " n"]) -> Bool[Tensor, " n"]:
    """True for every fifth image of each class, in the order of the dataset: always the same, and evenly over the classes.

    The digits are ordered by writer, so nearly every writer has images on both sides: the held-out images are new, the
    writers are not.
    """
    held_out = torch.zeros_like(labels, dtype=torch.bool)
    for label in labels.unique():
        held_out[torch.nonzero(labels == label)[4::5, 0]] = True
    return held_out
