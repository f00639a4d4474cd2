"""What a model is given: texts, pictures and sounds, as tensors and as strips of tokens that a person reads."""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from clearhead.config import Config
from clearhead.data import Tokenizer, load_tokenizer
from clearhead.data.audio import HOP, RATE, load_audio, log_mel
from clearhead.data.builtin_datasets import digits
from clearhead.data.images import ImagePreprocessing, read_image, read_preprocessing
from clearhead.engine.request import Request, start_of
from clearhead.errors import InputError, MissingExtraError
from clearhead.generation.texts import piece_name
from clearhead.generation.transcription import Scribe, find_tokenizer
from clearhead.models import Encoder, EncoderDecoder, Model
from clearhead.training.report import read_metrics

LONGEST = 2048  # tokens in a run, whatever more the model could read
UPLOADS = 16  # pictures or sounds kept
PICTURE_BYTES = 8_000_000
SAMPLES = 10


def tokenizer_of(place: Path, model: Model) -> Tokenizer | None:
    """The tokenizer beside a model; a model of pictures has none."""
    if model.config.inputs == "patches":
        return None
    if model.config.inputs == "frames":
        return find_tokenizer(place, model.config.vocab_size)
    return load_tokenizer(place if place.is_dir() or place.suffix == ".gguf" else place.parent)


@dataclass(frozen=True)
class Strip:
    """One side's tokens, patches or frames as they are shown."""

    tokens: list[str]
    ids: list[int]
    kind: str = "tokens"
    special: tuple[int, ...] = ()
    grid: tuple[int, int] | None = None

    def told(self) -> dict[str, Any]:
        grid = {} if self.grid is None else {"grid": self.grid}
        return {"tokens": self.tokens, "ids": self.ids, "kind": self.kind, "special": self.special, **grid}


@dataclass(frozen=True)
class Source:
    """What a model reads: the tensor that enters, which of it is real, and its strip."""

    tensor: Tensor
    strip: Strip
    real: Bool[Tensor, "1 T"] | None = None
    ask: Request | None = None  # of sound: what a transcription is asked for with
    picture: UInt8[np.ndarray, "h w 3"] | None = None
    spectrogram: Float[np.ndarray, "m n"] | None = None


class Inputs:
    """Makes a model's sources from what the page names."""

    def __init__(self, model: Model, tokenizer: Tokenizer | None, place: Path | None) -> None:
        self.model, self.config, self.maybe_tokenizer = model, model.config, tokenizer
        self.place = place
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
        return most if self.config.inputs != "tokens" else min(most, LONGEST)

    @property
    def target_limit(self) -> int:
        return min(self.config.max_len, LONGEST)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def name(self, id: int) -> str:
        """A token as a person reads it."""
        if id not in self._names:
            self._names[id] = piece_name(self.tokenizer, id)
        return self._names[id]

    def strip(self, ids: list[int]) -> Strip:
        special = tuple(at for at, id in enumerate(ids) if id in self.tokenizer.special_ids)
        return Strip([self.name(id) for id in ids], ids, special=special)

    def read(self, text: str) -> Source:
        """The source that a run names by its text."""
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
        """What a target's text is to the decoder, without its start and its end."""
        return self.tokenizer.encode(text, special=False, target=True)

    def prompt(self, source: Source) -> list[int]:
        """What an encoder-decoder's text starts from."""
        assert isinstance(self.model, EncoderDecoder)
        return list(source.ask.prompt) if source.ask is not None else [start_of(self.model)]

    # Pictures.

    @cached_property
    def _preparation(self) -> ImagePreprocessing:
        if self.place is not None and self.place.is_dir():
            return read_preprocessing(self.place, self.config.image_size)
        return ImagePreprocessing(size=(self.config.image_size, self.config.image_size))

    def _picture(self, text: str) -> Source:
        drawn: UInt8[np.ndarray, "c h w"] = self._find(text, self.sample_picture)
        c, prepare = self.config, self._preparation
        x = torch.from_numpy(drawn).float() * prepare.scale
        mean, std = (torch.tensor(values)[:, None, None] for values in (prepare.mean, prepare.std))
        like = next(self.model.parameters())
        tensor = ((x - mean) / std)[None].to(like)
        side = c.image_size // c.patch_size
        names = ["[CLS]", *(f"{row},{column}" for row in range(side) for column in range(side))]
        strip = Strip(names, list(range(len(names))), "patches", (0,), (side, side))
        shown = np.broadcast_to(np.moveaxis(drawn, 0, -1), (*drawn.shape[1:], 3)) if c.n_channels in (1, 3) else None
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
        """Keep an uploaded picture; the text that names it in a run."""
        if self.config.inputs != "patches":
            raise InputError(
                f"this model reads {self.config.inputs}, no pictures; got {len(data):,} bytes; give it a text"
            )
        if not 0 < len(data) <= PICTURE_BYTES:
            raise InputError(
                f"a picture is a file of up to {PICTURE_BYTES:,} bytes; got {len(data):,}; make it smaller"
            )
        drawn = read_image(BytesIO(data), self._preparation, n_channels=self.config.n_channels)
        size = self.config.image_size
        if drawn.shape[1:] != (size, size):
            raise InputError(f"this model takes pictures of {size} x {size}; got {drawn.shape[1:]}; resize it first")
        return self._keep(data, drawn)

    # Sound.

    def _sound(self, text: str) -> Source:
        assert isinstance(self.model, EncoderDecoder)
        c, sound = self.config, self._find(text, sample_sound)
        window = 2 * HOP * c.max_source_len
        sound = sound[:window]
        frames = log_mel(sound, c.n_mels, window / RATE)
        ask = Scribe(self.model, self.tokenizer, None, "transcribe").ask(frames, 1)
        names = [f"{2 * HOP * at / RATE:.2f} s" for at in range(c.max_source_len)]
        strip = Strip(names, list(range(len(names))), "frames")
        like = next(self.model.parameters())
        return Source(frames[None].to(like), strip, ask=ask, spectrogram=frames.numpy())

    def take_sound(self, data: bytes) -> str:
        """Keep an uploaded sound; the text that names it in a run."""
        if self.config.inputs != "frames":
            raise InputError(
                f"this model reads {self.config.inputs}, no sound; got {len(data):,} bytes; give it a text"
            )
        sound = load_audio(BytesIO(data))
        return self._keep(data, sound[: 2 * HOP * self.config.max_source_len])

    # What both share.

    def _find(self, text: str, sample: Callable[[int], Any]) -> Any:
        kind, _, which = text.partition(":")
        if kind == "sample" and which.isdecimal() and len(which) < 4 and int(which) < SAMPLES:
            return sample(int(which))
        if kind == "upload" and which in self.uploads:
            self.uploads.move_to_end(which)
            return self.uploads[which]
        raise InputError(
            f"there is no {text!r:.60} here; name one of sample:0 to sample:{SAMPLES - 1}, or upload a file (again)"
        )

    def _keep(self, data: bytes, made: Any) -> str:
        name = hashlib.sha256(data).hexdigest()[:32]
        self.uploads[name] = made
        while len(self.uploads) > UPLOADS:
            self.uploads.popitem(last=False)
        return f"upload:{name}"


def check_length(ids: list[int], most: int, what: str = "text") -> None:
    if not ids:
        raise InputError(
            f"the {what} has no token, and the model no token that begins one; got nothing; write something"
        )
    if len(ids) > most:
        raise InputError(f"the {what} has {len(ids):,} tokens; {most:,} are the most that are shown here; shorten it")


def draw_shape(number: int, size: int, n_channels: int) -> UInt8[np.ndarray, "c h w"]:
    """A disc, a square, a triangle, stripes or a chequerboard, in two colourings: something to look at without a download."""
    y, x = np.mgrid[0:size, 0:size] / max(size - 1, 1) * 2 - 1
    shapes = [
        x**2 + y**2 < 0.4,
        np.maximum(abs(x), abs(y)) < 0.55,
        (y > -0.6) & (y < 0.6) & (abs(x) < (y + 0.6) / 1.6),
        np.sin(3 * math.pi * x) > 0,
        (np.sin(2 * math.pi * x) > 0) ^ (np.sin(2 * math.pi * y) > 0),
    ]
    inside = shapes[number % len(shapes)]
    front, back = ((222, 120, 31), (24, 44, 88)) if number < len(shapes) else ((40, 150, 110), (244, 240, 230))
    colours = np.where(inside[None], np.array(front)[:, None, None], np.array(back)[:, None, None])
    if n_channels == 3:
        return colours.astype(np.uint8)
    return np.repeat(colours.mean(0, keepdims=True), n_channels, 0).astype(np.uint8)


def sample_sound(number: int, seconds: float = 6.0) -> Float[Tensor, " n"]:
    """Notes that rise and fall, half a second each with its overtones; each number starts at another pitch."""
    n, each = int(seconds * RATE), RATE // 2
    at = torch.arange(n)
    scale = torch.tensor([0, 2, 4, 5, 7, 9, 11, 12, 11, 9, 7, 4])
    pitch = 180 * 2 ** ((scale[at // each % len(scale)] + number % SAMPLES) / 12)
    turns = torch.cumsum(2 * math.pi * pitch.double() / RATE, 0)
    waves = sum(torch.sin(turns * k) / k for k in range(1, 9))
    return (0.3 * waves * torch.sin(math.pi * (at % each) / each)).float()


SENTENCES: tuple[str, ...] = (
    "The cat sat on the mat because it was tired.",
    "le 3 mars 1987",
    "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQ",
)


def examples(model: Model, tokenizer: Tokenizer | None, place: Path | None = None) -> str:
    """Something to begin with: what the model's own run showed last, else what its vocabulary spells."""
    if model.config.inputs != "tokens":
        return "sample:0"
    if tokenizer is None:
        return SENTENCES[0]
    return _shown(place, tokenizer) or _spelled(model, tokenizer)


def _shown(place: Path | None, tokenizer: Tokenizer) -> str | None:
    """A held-out example that the run's evaluation wrote out, without the tokens that a tokenizer adds."""
    journal = None if place is None else (place if place.is_dir() else place.parent) / "metrics.jsonl"
    if journal is None or not journal.is_file():
        return None
    records, _ = read_metrics(journal.read_text(encoding="utf-8", errors="replace"))
    found = [record["samples"] for record in [*records["valid"], *records["result"]] if record.get("samples")]
    texts = [str(sample.get("input", "")) for sample in found[-1]] if found else []
    added = [tokenizer.token(id) for id in tokenizer.special_ids if id != tokenizer.mask]
    for text in texts:
        for token in added:
            text = text.replace(token, "")
        if text.strip():
            return text.strip()
    return None


def _spelled(model: Model, tokenizer: Tokenizer) -> str:
    mask = None if tokenizer.mask is None else tokenizer.token(tokenizer.mask)
    sentences = list(SENTENCES)
    if isinstance(model, EncoderDecoder):
        if model.config.vocab_size < 1000:  # a small vocabulary is one of letters
            sentences.insert(0, "le 3 mars 1987")
    elif isinstance(model, Encoder):
        if model.config.vocab_size < 64:  # of amino acids
            sentences.insert(0, f"MKTAYIAKQRQISFVKSHFSRQ{mask or 'L'}EERLGLIEVQ")
        elif mask and model.config.head == "tokens":
            sentences.insert(0, f"The capital of France is {mask}.")
    else:
        sentences.insert(0, "The cat sat on the mat. The dog lay on the rug. The cat")

    def is_known(text: str) -> bool:
        ids = tokenizer.encode(text, special=False)
        return bool(ids) and (tokenizer.unk is None or tokenizer.unk not in ids)

    ids = (id for id in sorted(tokenizer.vocab.values()) if id not in tokenizer.special_ids)
    words = (word for id in ids if is_known(word := tokenizer.decode([id]).strip()))
    return next(filter(is_known, sentences), None) or " ".join(islice(words, 8))


def shape_name(config: Config) -> str:
    return config.shape.replace("-", "_")


def stack_of(model: Model) -> str:
    """How the names of the sites of the stack that answers begin."""
    return "decoder." if isinstance(model, EncoderDecoder) else ""
