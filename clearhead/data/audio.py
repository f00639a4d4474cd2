"""Sound for Whisper: files read as mono at 16,000 samples a second, and log-mel spectrograms of 30 seconds."""

from __future__ import annotations

import math
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from clearhead.errors import InputError, MissingExtraError

RATE = 16_000
SECONDS = 30  # the length of Whisper's input
N_FFT, HOP = 400, 160  # 25 ms every 10 ms
BLOCK = 2**18  # samples read at once
FRAMES = 2**13  # of a spectrogram computed at once
WEIGHTS = 2**22  # of the resampling filter, computed at once
UNKNOWN = 2**60  # libsndfile's number of samples, 2**63 - 1, where a header does not say it
RATES = (4_000, 192_000)  # of a file: from telephones to studios
USUAL_RATE = 48_000  # a file of a higher rate may be shorter, so that it needs no more memory
MAX_SECONDS = 4 * 3600  # of a file
MAX_UPLOAD_SECONDS = 1800  # of a file that a stranger may send

# The resampling filter: a sinc with 64 zero crossings on either side, in a Kaiser window with beta 9. Frequencies below 91% of
# half the smaller rate pass within 0.01 dB; frequencies above half the smaller rate are reduced by more than 80 dB.
ZEROS, BETA, ROLLOFF = 64, 9.0, 0.96


def load_audio(source: str | Path | BytesIO, *, max_seconds: int | None = None) -> Float[Tensor, " n"]:
    """A sound file (wav, flac, ogg, mp3) as numbers from -1 to 1: channels averaged, resampled to RATE.

    A file of another rate than RATES, or longer than `max_seconds`, is refused: a few bytes may claim, or hold, hours of silence.
    Without `max_seconds`, the limit is MAX_SECONDS, and MAX_UPLOAD_SECONDS for bytes in memory.
    """
    try:
        import soundfile
    except (ImportError, OSError):  # OSError: the package is installed, but libsndfile is not
        raise MissingExtraError(
            "sound files need soundfile, which is missing; pip install 'clearhead[audio]'"
        ) from None
    name = source if isinstance(source, str | Path) else "the input"
    if isinstance(source, str | Path) and not Path(source).is_file():
        raise InputError(f"there is no sound file {str(source)!r}; is the path right?")
    if max_seconds is None:
        max_seconds = MAX_SECONDS if isinstance(source, str | Path) else MAX_UPLOAD_SECONDS
    blocks, n_read = list[np.ndarray](), 0
    try:
        with soundfile.SoundFile(source) as file:
            source_rate = int(file.samplerate)
            _check_header(name, source_rate, file.frames, max_seconds)
            # Block by block: a damaged header may claim fewer or more samples than there are.
            for block in file.blocks(max(1, BLOCK // file.channels), dtype="float32", always_2d=True):
                blocks.append(block.mean(1))
                n_read += len(block)
                _check_header(name, source_rate, n_read, max_seconds)
    except (soundfile.SoundFileError, RuntimeError, ValueError, TypeError) as error:
        raise InputError(f"{name} is no sound file that can be read ({error}); convert it to wav or flac") from None
    sound = torch.from_numpy(np.concatenate([*blocks, np.zeros(0, np.float32)]))
    if len(sound) == 0:
        raise InputError(f"{name} holds no sound: 0 samples; record or convert it again")
    return resample(sound, source_rate, RATE)


def _check_header(name: object, rate: int, n_samples: int, max_seconds: int) -> None:
    if not RATES[0] <= rate <= RATES[1]:
        raise InputError(
            f"{name} has an unusual rate: {rate:,} samples a second; {RATES[0]:,} to {RATES[1]:,} can be read; resample it"
        )
    most = max_seconds * min(1, USUAL_RATE / rate)
    if most * rate < n_samples < UNKNOWN:
        raise InputError(
            f"{name} is too long: {n_samples / rate:,.0f} seconds, and {most:,.0f} are the limit at this rate; cut it into parts"
        )


def resample(sound: Float[Tensor, " n"], source: int, target: int = RATE) -> Float[Tensor, " m"]:
    """The same sound at another rate: ceil(n target / source) samples. Frequencies that the new rate can not represent are removed.

    Each new sample is a weighted sum of the old ones around it. The weights, a sinc in a Kaiser window, depend only on the new
    sample's position between two old ones. There are at most `target` such positions, so the weights are computed once for each
    (a polyphase filter).
    """
    if source < 1 or target < 1:
        raise InputError(f"rates are samples a second, above 0; got {source} and {target}; 16000 and 44100 are usual")
    divisor = math.gcd(source, target)
    down, up = source // divisor, target // divisor
    if down == up:
        return sound
    cutoff = ROLLOFF * min(1.0, up / down)  # in halves of the old rate
    reach = math.ceil(ZEROS / cutoff)
    count = -(-len(sound) * up // down)
    # New sample j has the old position j down / up; `reach` old samples before and after it contribute. Unusual rates have many
    # positions and far reaches: a short sound needs few of them, and no step holds more than a few megabytes.
    place = torch.arange(min(up, count), dtype=torch.float64) * down / up
    step = max(1, WEIGHTS // (2 * reach + 1))
    weights = torch.cat([_weights(each, cutoff, reach).to(sound.dtype) for each in (place - place.floor()).split(step)])
    around = F.pad(sound, (reach, reach + 1)).unfold(0, 2 * reach + 1, 1)
    parts = [torch.arange(first, min(first + step, count)) for first in range(0, count, step)]
    return torch.cat([torch.einsum("ij,ij->i", around[j * down // up], weights[j % up]) for j in parts])


def _weights(fraction: Float[Tensor, " n"], cutoff: float, reach: int) -> Float[Tensor, "n taps"]:
    """The filter for new samples that lie this far behind an old one."""
    offset = torch.arange(-reach, reach + 1) - fraction[:, None]
    window = torch.special.i0(BETA * (1 - (offset / (reach + 1)) ** 2).clamp(min=0).sqrt()) / torch.special.i0(
        torch.tensor(BETA, dtype=torch.float64)
    )
    weights = cutoff * torch.sinc(cutoff * offset) * window
    return weights / weights.sum(1, keepdim=True)  # a constant signal stays exactly constant


def log_mel(sound: Float[Tensor, " n"], n_mels: int = 80, seconds: float = SECONDS) -> Float[Tensor, "m frames"]:
    """Whisper's input: the logarithm of the energy of `n_mels` frequency bands every 10 ms, for exactly `seconds` of sound.

    Shorter sound is padded with silence, longer sound is cut. As in Radford et al. 2022 (section 2.2), values more than 8 powers of
    ten below the loudest are raised to that level, and the result is scaled to about -1 .. 1.
    """
    length = round(seconds * RATE)
    sound = F.pad(sound[:length].float(), (0, max(0, length - len(sound))))
    sound = F.pad(sound[None], (N_FFT // 2, N_FFT // 2), mode="reflect")[0]
    return _scale(_log_energies(sound, n_mels)[:, :-1])


def log_mel_of_all(sound: Float[Tensor, " n"], n_mels: int = 80) -> Float[Tensor, "m frames"]:
    """The same for a sound of any length: n // HOP frames, on one scale by the loudest of all. Silence follows its last sample."""
    n_frames = len(sound) // HOP
    start = sound[1 : N_FFT // 2 + 1].flip(0)  # mirrored, as in a window
    sound = torch.cat([F.pad(start, (N_FFT // 2 - len(start), 0)), sound, sound.new_zeros(N_FFT)]).float()
    parts = [
        _log_energies(sound[first * HOP : (min(first + FRAMES, n_frames) - 1) * HOP + N_FFT], n_mels)
        for first in range(0, n_frames, FRAMES)
    ]
    return _scale(torch.cat(parts, 1)) if parts else torch.zeros(n_mels, 0)


def _log_energies(sound: Float[Tensor, " n"], n_mels: int) -> Float[Tensor, "m frames"]:
    """The logarithm of the energy in each band, every HOP samples, of N_FFT samples each."""
    window = torch.hann_window(N_FFT, device=sound.device)
    spectrum = torch.stft(sound, N_FFT, HOP, window=window, center=False, return_complex=True).abs() ** 2
    return (mel_filters(n_mels).to(sound.device) @ spectrum).clamp(min=1e-10).log10()


def _scale(logs: Float[Tensor, "m frames"]) -> Float[Tensor, "m frames"]:
    return (torch.maximum(logs, logs.max() - 8.0) + 4.0) / 4.0


def mel_filters(n_mels: int) -> Float[Tensor, "m bins"]:
    """Triangular filters over the spectrum, evenly spaced on Slaney's mel scale, all of the same area.

    The scale is linear up to 1,000 Hz (15 mel) and logarithmic above: 27 mel are a factor of 6.4.
    """
    step = math.log(6.4) / 27
    top = 15 + math.log(RATE / 2 / 1000) / step
    mels = torch.linspace(0, top, n_mels + 2, dtype=torch.float64)
    edges = torch.where(mels < 15, mels * 200 / 3, 1000 * torch.exp(step * (mels - 15)))
    bins = torch.linspace(0, RATE / 2, N_FFT // 2 + 1, dtype=torch.float64)
    low, middle, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    rise, fall = (bins - low) / (middle - low), (high - bins) / (high - middle)
    return (torch.minimum(rise, fall).clamp(min=0) * 2 / (high - low)).float()
