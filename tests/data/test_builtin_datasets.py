"""Datasets without a download: the standard library's source and scikit-learn's digits."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from clearhead.data.builtin_datasets import digits, held_out_fifth, standard_library
from clearhead.errors import InputError, MissingExtraError


def test_the_standard_library_is_only_source() -> None:
    files = standard_library()
    names = [path.relative_to(sysconfig.get_path("stdlib")).as_posix() for path in files]
    assert names == sorted(names) == sorted(set(names))
    assert {"argparse.py", "json/decoder.py", "asyncio/tasks.py"} <= set(names)
    assert not [name for name in names if {"test", "tests", "site-packages", "idlelib"} & set(name.split("/"))]
    assert all(path.suffix == ".py" for path in files)
    assert all(path.read_text(encoding="utf-8") is not None for path in files)
    assert sum(path.stat().st_size for path in files) > 5_000_000


def test_a_python_without_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(InputError, match=r"no source files in .*train on a folder of your own"):
        standard_library()


def test_digits_are_scikit_learns() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    pictures, labels = digits()
    theirs = datasets.load_digits()
    assert pictures.shape == (1797, 1, 8, 8)
    # 17 levels from 0 to 255, 15.94 apart: division restores each
    assert torch.equal(pictures[:, 0].double().mul(16 / 255).round(), torch.from_numpy(theirs.images))
    assert (int(pictures.min()), int(pictures.max())) == (0, 255)
    assert torch.equal(labels, torch.from_numpy(theirs.target))


def test_a_fifth_of_each_class_is_held_out() -> None:
    labels = torch.randint(0, 7, (503,))
    held_out = held_out_fifth(labels)
    for label in range(7):
        assert int(held_out[labels == label].sum()) == int((labels == label).sum()) // 5
    assert torch.equal(held_out, held_out_fifth(labels))
    # more images at the end do not change the split of the others
    assert torch.equal(held_out[:401], held_out_fifth(labels[:401]))


def test_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'clearhead\[demo\]'"):
        digits()
