"""The data of a recipe: the tokenizer, trained or loaded, and the tokenised data, kept on disk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path

from tokenizers import normalizers

from clearhead.data import Tokenizer, load_tokenizer, train_tokenizer
from clearhead.data.filters import Policy
from clearhead.data.token_store import Store
from clearhead.errors import InputError
from clearhead.training.callbacks import Callbacks
from clearhead.training.embedded_data import unpack
from clearhead.training.recipe import Recipe
from clearhead.training.recipe_checks import check_has_files

KINDS = ("bpe", "unigram", "wordpiece", "bytes", "chars")


class Corpus:
    """The recipe, with embedded data as files, and the folder for tokenised data. `notes`: lines dropped, cut or replaced."""

    def __init__(self, recipe: Recipe, out: Path, show: Callbacks) -> None:
        check_has_files(recipe)
        self.out, self.show = out, show
        self.cache = Path(recipe.data.cache) if recipe.data.cache else out.parent / "data"
        self.recipe = unpack(recipe, self.cache)
        d = self.recipe.data
        self.policy = Policy(bad_bytes=d.bad_bytes, empty=d.empty, too_long=d.too_long, unequal=d.unequal)
        self.notes: list[str] = []

    def tokenizer(self, texts: Callable[[], Iterable[str]], special: Sequence[str], *, around: bool) -> Tokenizer:
        """The checkpoint's tokenizer, one from a file, or one trained on `texts`; saved in the run's folder.

        `around`: a trained one adds a start and an end token to each text.
        """
        d = self.recipe.data
        if (self.out / "tokenizer_config.json").is_file():  # written last
            return load_tokenizer(self.out)
        if "from" in self.recipe.model:
            found = load_tokenizer(self.recipe.model["from"])
        elif d.tokenizer not in KINDS:
            found = load_tokenizer(d.tokenizer)
        else:
            self.show.note(f"training a {d.tokenizer} tokenizer")
            read = (text.lower() for text in texts()) if d.lowercase else texts()
            first = next((text for text in read if text.strip()), None)
            if first is None:
                named = ", ".join((*d.files, *d.source, *d.target))
                raise InputError(f"there is no text in {named:.200}; give files with something to learn from")
            read = chain([first], read)
            found = train_tokenizer(
                kind=d.tokenizer,  # type: ignore[arg-type]
                texts=read,
                vocab_size=None if d.tokenizer in ("bytes", "chars") else d.vocab_size,
                special=special,
                split_digits=d.split_digits,
                add_bos=around,
                add_eos=around,
            )
        if d.lowercase:  # the saved tokenizer lowercases by itself
            lower, own = normalizers.Lowercase(), found.core.normalizer
            found.core.normalizer = lower if own is None else normalizers.Sequence([lower, own])
        found.save(self.out)
        return found

    def store(self, name: str, make: Callable[[Path], Store], *key: object) -> Store:
        """Tokenised data, made by `make` or found on disk under a hash of the recipe's data and `key`. Its findings are noted."""
        text = json.dumps([*map(str, key), asdict(self.recipe.data), asdict(self.policy)], sort_keys=True)
        store = make(self.cache / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}")
        for line in store.info.get("findings", []):
            self.note(f"{name}: {line}")
        return store

    def note(self, text: str) -> None:
        """Show a finding about the data, and keep it for the report."""
        self.notes.append(text)
        self.show.note(text)
