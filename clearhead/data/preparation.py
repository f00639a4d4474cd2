"""What the preparations of texts and images share: a fingerprint to reuse a store, progress, labels, batches."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from clearhead.data.filters import Findings, Policy, TextFilter
from clearhead.data.token_store import VERSION, Store, StoreWriter
from clearhead.data.tokenizer import Tokenizer
from clearhead.errors import InputError, did_you_mean

Folder = str | os.PathLike[str]
Progress = Callable[[int, int], None]  # bytes done, total bytes
T = TypeVar("T")

BATCH = 2**20  # characters tokenised in parallel; `tokenizers` needs up to 280 bytes of memory for each


class Preparation:
    """One preparation of a store, identified by the fingerprint of its files, tokenizer and options."""

    def __init__(
        self,
        folder: Folder,
        paths: list[Path],
        policy: Policy | None,
        progress: Progress | None,
        options: list[Any],
        tokenizer: Tokenizer | None = None,
        findings: Findings | None = None,
    ) -> None:
        self.folder, self.paths, self.text_filter, self._progress = (
            Path(folder),
            paths,
            TextFilter(policy, findings),
            progress,
        )
        files = [(str(each.absolute()), each.stat()) for path in paths for each in _below(path)]
        self._total = sum(stat.st_size for _, stat in files)
        described = [
            VERSION,
            [str(path) for path in paths],
            [(name, stat.st_size, stat.st_mtime_ns) for name, stat in files],
            dataclasses.asdict(self.text_filter.policy),
            options,
            [] if tokenizer is None else [tokenizer.core.to_str(), tokenizer.target_core.to_str(), tokenizer.eos],
            {} if tokenizer is None else tokenizer.vocab,
        ]
        self._fingerprint = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()

    def is_done(self) -> bool:
        """Whether the folder already holds the store with this fingerprint. If so, every byte of it is checked, once for a run."""
        if not (self.folder / "store.json").exists():
            return False
        store = Store(self.folder)
        is_same = store.info.get("fingerprint") == self._fingerprint
        if is_same:
            store.check()
        return is_same

    def report_progress(self) -> None:
        if self._progress is not None:
            self._progress(min(self.text_filter.findings.done, self._total), self._total)

    def write_info(self, writer: StoreWriter, **info: Any) -> None:
        """Fill the store's `info`: counts, findings, the fingerprint, and `info`. A store without rows is an error."""
        findings, counts = self.text_filter.findings, writer.count()
        if not all(rows for rows, _ in counts.values()):
            why = "; ".join(findings.lines()) or "there was nothing in it"
            raise InputError(f"nothing is left of {', '.join(map(str, self.paths)):.200}: {why}; give other data")
        rows = next(iter(counts.values()))[0]
        writer.info = {
            "rows": rows,
            "values": {name: values for name, (_, values) in counts.items()},
            **info,
            "read": dict(findings.read),
            "findings": findings.lines(),
            "fingerprint": self._fingerprint,
        }


class Labels:
    """Labels by name, one for each row. Their numbers are known only at the end, unless the names were given."""

    def __init__(self, given: Sequence[str] | None) -> None:
        self._given = given
        self._numbers = {name: number for number, name in enumerate(given or ())}
        self._rows: list[int] = []  # each row's label, numbered in the order of appearance

    def add(self, name: str, place: str) -> None:
        if self._given is not None and name not in self._numbers:
            raise InputError(
                f"{place} has the label {name!r}, which is none of the {len(self._given)} known; "
                + did_you_mean(name, self._given)
            )
        self._rows.append(self._numbers.setdefault(name, len(self._numbers)))

    def number(self) -> tuple[list[str], np.ndarray]:
        """The names, sorted (whole numbers by value) unless they were given; and for each row the index of its name."""
        names = list(self._numbers)
        if self._given is None:
            numbers = all(name.isdecimal() for name in names)
            names.sort(key=lambda name: (int(name) if numbers else 0, name))
        if len(names) == 1:
            raise InputError(f"every label is {names[0]!r}; classes need at least 2, is it the right column?")
        indices = {name: index for index, name in enumerate(names)}
        renumbered = np.array([indices[name] for name in self._numbers], np.int32)
        return names, renumbered[np.array(self._rows, np.int64)]


def _below(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(each for each in path.rglob("*") if each.is_file())
    return [] if str(path).startswith("hf:") else [path]


def in_batches(items: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Lists of items that together have about `BATCH` characters."""
    batch: list[T] = []
    total = 0
    for item in items:
        batch.append(item)
        total += size(item)
        if total >= BATCH:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch
