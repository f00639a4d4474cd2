"""The inputs of a model: texts, pictures and sounds, as tensors and as named tokens, patches or frames for the page."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from clearhead.data import Tokenizer, load_tokenizer
from clearhead.data.audio import HOP, RATE, load_audio, log_mel
from clearhead.data.builtin_datasets import digits
from clearhead.data.images import ImagePreprocessing, read_image, read_preprocessing
from clearhead.engine.request import Request, start_token
from clearhead.errors import InputError, MissingExtraError
from clearhead.explorer.samples import SAMPLES, draw_shape, sample_sound
from clearhead.generation.scribe import Scribe, find_tokenizer
from clearhead.models import EncoderDecoder, Model
from clearhead.quantization.model_weights import example_weight

MAX_TOKENS = 2048  # in a run, even if the model could read more
MAX_UPLOADS = 16  # pictures or sounds in memory
PICTURE_BYTES = 8_000_000


def tokenizer_of(path: Path, model: Model) -> Tokenizer | None:
    """The tokenizer in a model's folder; None for a model of pictures."""
    if model.config.inputs == "patches":
        return None
    if model.config.inputs == "frames":
        return find_tokenizer(path, model.config.vocab_size)
    return load_tokenizer(path if path.is_dir() or path.suffix == ".gguf" else path.parent)


@dataclass(frozen=True)
class Strip:
    """The tokens, patches or frames of the source or the target, with the names that the page shows."""

    tokens: list[str]
    ids: list[int]
    kind: str = "tokens"
    special: tuple[int, ...] = ()
    grid: tuple[int, int] | None = None

    def to_json(self) -> dict[str, Any]:
        grid = {} if self.grid is None else {"grid": self.grid}
        return {"tokens": self.tokens, "ids": self.ids, "kind": self.kind, "special": self.special, **grid}


@dataclass(frozen=True)
class Source:
    """A model's input: the tensor, which of its tokens are real (None: all), and its strip."""

    tensor: Tensor
    strip: Strip
    real: Bool[Tensor, "1 T"] | None = None
    request: Request | None = None  # for sound: the request that transcribes it
    picture: UInt8[np.ndarray, "h w 3"] | None = None
    spectrogram: Float[np.ndarray, "m n"] | None = None


class Inputs:
    """Makes a model's sources from the texts and the names of samples and uploads that the page sends."""

    def __init__(self, model: Model, tokenizer: Tokenizer | None, path: Path | None) -> None:
        self.model, self.config, self.maybe_tokenizer = model, model.config, tokenizer
        self.path = path
        self.uploads: OrderedDict[str, Any] = OrderedDict()
        self._names: dict[int, str] = {}

    @property
    def tokenizer(self) -> Tokenizer:
        if self.maybe_tokenizer is None:
            raise InputError("this model has no tokenizer here, so that texts can not be read; give it one")
        return self.maybe_tokenizer

    @property
    def limit(self) -> int:
        """The most tokens that a text may have here."""
        most = self.config.max_source_len if isinstance(self.model, EncoderDecoder) else self.config.max_len
        return most if self.config.inputs != "tokens" else min(most, MAX_TOKENS)

    @property
    def target_limit(self) -> int:
        return min(self.config.max_len, MAX_TOKENS)

    @property
    def device(self) -> torch.device:
        return example_weight(self.model).device

    def name(self, id: int) -> str:
        """A token as the page shows it."""
        if id not in self._names:
            self._names[id] = self.tokenizer.name(id)
        return self._names[id]

    def strip(self, ids: list[int]) -> Strip:
        special = tuple(at for at, id in enumerate(ids) if id in self.tokenizer.special_ids)
        return Strip([self.name(id) for id in ids], ids, special=special)

    def read(self, text: str) -> Source:
        """The source for a run's text. For pictures and sounds the text is a name: "sample:3" or "upload:..."."""
        match self.config.inputs:
            case "patches":
                return self._picture(text)
            case "frames":
                return self._sound(text)
            case _:
                return self._text(text)

    def _text(self, text: str) -> Source:
        ids = self.tokenizer.encode(text)
        if isinstance(self.model, EncoderDecoder) and self.tokenizer.eos is not None:
            ids = ids if ids[-1:] == [self.tokenizer.eos] else [*ids, self.tokenizer.eos]
        start = self.model.generation.bos
        if not ids and start is not None:
            ids = [start]
        vocabulary = self.config.source_vocab_size or self.config.vocab_size
        check_length(ids, self.limit)
        if max(ids) >= vocabulary:
            raise InputError(
                f"the text has token {max(ids)}, the model's vocabulary {vocabulary}; is this tokenizer the model's own?"
            )
        tensor = torch.tensor([ids], device=self.device)
        pad = self.tokenizer.pad
        hides = pad in ids and pad not in (self.tokenizer.eos, self.tokenizer.bos) and any(id != pad for id in ids)
        return Source(tensor, self.strip(ids), tensor != pad if hides else None)

    def target(self, text: str) -> list[int]:
        """The ids of a target text, without start and end."""
        return self.tokenizer.encode(text, special=False, target=True)

    def prompt(self, source: Source) -> list[int]:
        """The tokens that a target of an encoder-decoder starts with."""
        assert isinstance(self.model, EncoderDecoder)
        return list(source.request.prompt) if source.request is not None else [start_token(self.model)]

    # Pictures.

    @cached_property
    def _preparation(self) -> ImagePreprocessing:
        if self.path is not None and self.path.is_dir():
            return read_preprocessing(self.path, self.config.image_size)
        return ImagePreprocessing(size=(self.config.image_size, self.config.image_size))

    def _picture(self, text: str) -> Source:
        pixels: UInt8[np.ndarray, "c h w"] = self._find(text, self.sample_picture)
        c, prepare = self.config, self._preparation
        x = torch.from_numpy(pixels).float() * prepare.scale
        mean, std = (torch.tensor(values)[:, None, None] for values in (prepare.mean, prepare.std))
        like = example_weight(self.model)
        tensor = ((x - mean) / std)[None].to(like)
        side = c.image_size // c.patch_size
        names = ["[CLS]", *(f"{row},{column}" for row in range(side) for column in range(side))]
        strip = Strip(names, list(range(len(names))), "patches", (0,), (side, side))
        shown = np.broadcast_to(np.moveaxis(pixels, 0, -1), (*pixels.shape[1:], 3)) if c.n_channels in (1, 3) else None
        return Source(tensor, strip, picture=None if shown is None else np.ascontiguousarray(shown))

    def sample_picture(self, number: int) -> UInt8[np.ndarray, "c h w"]:
        c = self.config
        if (c.image_size, c.n_channels) == (8, 1):
            try:
                pictures, labels = digits()
            except MissingExtraError:
                pass
            else:
                return pictures[int((labels == number % 10).nonzero()[number // 10])].numpy()
        return draw_shape(number, c.image_size, c.n_channels)

    def take_picture(self, data: bytes) -> str:
        """Store an uploaded picture; returns its name in a run."""
        if self.config.inputs != "patches":
            raise InputError(
                f"this model reads {self.config.inputs}, no pictures; got {len(data):,} bytes; give it a text"
            )
        if not 0 < len(data) <= PICTURE_BYTES:
            raise InputError(
                f"a picture is a file of up to {PICTURE_BYTES:,} bytes; got {len(data):,}; make it smaller"
            )
        pixels = read_image(BytesIO(data), self._preparation, n_channels=self.config.n_channels)
        size = self.config.image_size
        if pixels.shape[1:] != (size, size):
            raise InputError(f"this model takes pictures of {size} x {size}; got {pixels.shape[1:]}; resize it first")
        return self._keep(data, pixels)

    # Sound.

    def _sound(self, text: str) -> Source:
        assert isinstance(self.model, EncoderDecoder)
        c, sound = self.config, self._find(text, sample_sound)
        window = 2 * HOP * c.max_source_len
        sound = sound[:window]
        frames = log_mel(sound, c.n_mels, window / RATE)
        request = Scribe(self.model, self.tokenizer, None, "transcribe").ask(frames, 1)
        names = [f"{2 * HOP * at / RATE:.2f} s" for at in range(c.max_source_len)]
        strip = Strip(names, list(range(len(names))), "frames")
        like = example_weight(self.model)
        return Source(frames[None].to(like), strip, request=request, spectrogram=frames.numpy())

    def take_sound(self, data: bytes) -> str:
        """Store an uploaded sound; returns its name in a run."""
        if self.config.inputs != "frames":
            raise InputError(
                f"this model reads {self.config.inputs}, no sound; got {len(data):,} bytes; give it a text"
            )
        sound = load_audio(BytesIO(data))
        return self._keep(data, sound[: 2 * HOP * self.config.max_source_len])

    # Samples, uploads and files.

    def take_file(self, text: str) -> str:
        """The name in a run of a picture's or a sound's file on this machine; any other text as it is."""
        take = {"patches": self.take_picture, "frames": self.take_sound}.get(self.config.inputs)
        return text if take is None or not Path(text).is_file() else take(Path(text).read_bytes())

    def _find(self, text: str, sample: Callable[[int], Any]) -> Any:
        kind, _, which = text.partition(":")
        if kind == "sample" and which.isdecimal() and len(which) < 4 and int(which) < SAMPLES:
            return sample(int(which))
        if kind == "upload" and which in self.uploads:
            self.uploads.move_to_end(which)
            return self.uploads[which]
        raise InputError(
            f"there is no {text!r:.60} here; name a file, or one of sample:0 to sample:{SAMPLES - 1}, or upload a file (again)"
        )

    def _keep(self, data: bytes, made: Any) -> str:
        name = hashlib.sha256(data).hexdigest()[:32]
        self.uploads[name] = made
        while len(self.uploads) > MAX_UPLOADS:
            self.uploads.popitem(last=False)
        return f"upload:{name}"


def check_length(ids: list[int], most: int, what: str = "text") -> None:
    if not ids:
        raise InputError(
            f"the {what} has no token, and the model no token that begins one; got nothing; write something"
        )
    if len(ids) > most:
        raise InputError(f"the {what} has {len(ids):,} tokens; {most:,} are the most that are shown here; shorten it")
