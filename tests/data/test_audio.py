"""Sound: resampling against scipy and exact signals, log-mel spectrograms against transformers', valid and broken files."""

from __future__ import annotations

import contextlib
import io
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.signal import resample_poly
from torch import Tensor

from clearhead.data import audio
from clearhead.data.audio import MAX_UPLOAD_SECONDS, RATE, load_audio, log_mel, mel_filters, resample
from clearhead.errors import InputError, MissingExtraError

soundfile = pytest.importorskip("soundfile")


def sweep(rate: int, seconds: float = 1.0, low: float = 50.0, high: float = 7000.0) -> Tensor:
    """A sine whose frequency rises linearly from `low` to `high` Hz, faded in and out."""
    t = torch.arange(round(rate * seconds), dtype=torch.float64) / rate
    phase = 2 * math.pi * (low * t + (high - low) * t**2 / (2 * seconds))
    return (torch.sin(phase) * torch.sin(math.pi * t / seconds) ** 2).float()


@pytest.mark.parametrize("rate", [44_100, 48_000, 22_050, 96_000, 16_001])
def test_resampling_a_sweep(rate: int) -> None:
    """Frequencies that both rates can represent are as if the signal had been sampled at the new rate."""
    ours = resample(sweep(rate), rate)
    # The filter's ripple is at most 0.01 dB, which is 1e-3; here it is much less.
    torch.testing.assert_close(ours, sweep(RATE), rtol=0, atol=1e-4)


def test_resampling_upwards() -> None:
    torch.testing.assert_close(resample(sweep(8000, high=3500.0), 8000), sweep(RATE, high=3500.0), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("rate", "up", "down"), [(44_100, 160, 441), (48_000, 1, 3), (8000, 2, 1)])
def test_resampling_against_scipy(rate: int, up: int, down: int) -> None:
    sound = sweep(rate, high=3500.0)
    theirs = resample_poly(sound.double().numpy(), up, down, window=("kaiser", 9.0))
    # scipy's filter is shorter, with a ripple of 0.1 dB near its edge; both pass 3,500 Hz unchanged
    np.testing.assert_allclose(resample(sound, rate).numpy(), theirs, rtol=0, atol=2e-3)


def test_frequencies_above_the_new_rate_are_removed() -> None:
    """A frequency above half of the new rate must not appear as another one: less than -80 dB."""
    t = torch.arange(44_100, dtype=torch.float64) / 44_100
    for tone in (8100.0, 9000.0, 15_000.0, 20_000.0):
        left = resample(torch.sin(2 * math.pi * tone * t).float(), 44_100)[2000:-2000]
        assert float(left.abs().max()) < 1e-4, tone


def test_resampling_keeps_lengths_and_constants() -> None:
    for n in (1, 2, 440, 441, 442, 1000):
        assert len(resample(torch.ones(n), 44_100)) == math.ceil(n * 160 / 441)
    middle = resample(torch.ones(44_100), 44_100)[200:-200]
    torch.testing.assert_close(middle, torch.ones_like(middle), rtol=0, atol=1e-6)  # float32 sums of 369 weights
    same = torch.randn(7)
    assert resample(same, RATE) is same
    with pytest.raises(InputError, match="got 0 and 16000"):
        resample(same, 0)


def plain_log_mel(sound: np.ndarray, filters: np.ndarray) -> np.ndarray:
    """The same by its definition, in float64: each frame is cut out, windowed, transformed and weighted by itself."""
    padded = np.pad(np.pad(sound, (0, 480_000))[:480_000].astype(np.float64), 200, mode="reflect")
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(400) / 400)
    power = [np.abs(np.fft.rfft(padded[at : at + 400] * window)) ** 2 for at in range(0, 480_000, 160)]
    logs = np.log10(np.maximum(filters @ np.stack(power, 1), 1e-10))
    return (np.maximum(logs, logs.max() - 8.0) + 4.0) / 4.0


@pytest.mark.parametrize("n_mels", [80, 128])
def test_log_mel_is_whispers(transformers: Any, n_mels: int) -> None:
    extractor = transformers.WhisperFeatureExtractor(feature_size=n_mels)
    for seconds in (1.7, 30.0, 31.0):
        sound = sweep(RATE, seconds) + 0.01 * torch.randn(round(RATE * seconds))
        ours = log_mel(sound, n_mels)
        assert ours.shape == (n_mels, 3000)
        # transformers also calls torch.stft, so its agreement checks the steps, not the numbers
        theirs = extractor(sound.numpy(), sampling_rate=RATE, return_tensors="np").input_features[0]
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=0, atol=1e-5)
        # float32 against float64: in an almost silent band the logarithm magnifies the rounding
        plain = plain_log_mel(sound.numpy(), extractor.mel_filters.T)
        np.testing.assert_allclose(ours.numpy(), plain, rtol=0, atol=1e-4)
        assert np.abs(ours.numpy() - plain).mean() < 1e-6


@pytest.mark.parametrize("n_mels", [80, 128, 7])
def test_mel_filters(transformers: Any, n_mels: int) -> None:
    theirs = transformers.audio_utils.mel_filter_bank(201, n_mels, 0.0, 8000.0, RATE, norm="slaney", mel_scale="slaney")
    # rounded to float32, once; the largest weight is about 0.04
    np.testing.assert_allclose(mel_filters(n_mels).numpy(), theirs.T, rtol=0, atol=1e-8)


def test_log_mel_of_silence_and_short_sound() -> None:
    assert torch.equal(log_mel(torch.zeros(5)), torch.full((80, 3000), -1.5))  # log10 of the floor, 1e-10
    assert log_mel(sweep(RATE), 7, seconds=0.26).shape == (7, 26)


@pytest.mark.parametrize("name", ["x.wav", "x.flac"])
def test_files(tmp_path: Path, name: str) -> None:
    left, right = sweep(44_100), sweep(44_100, high=300.0)
    soundfile.write(tmp_path / name, torch.stack([left, right], 1).numpy(), 44_100)
    expected = resample((left + right) / 2, 44_100)
    for source in (tmp_path / name, str(tmp_path / name), io.BytesIO((tmp_path / name).read_bytes())):
        # 16 bits a sample: half a step of 1 / 32768, on each channel
        torch.testing.assert_close(load_audio(source), expected, rtol=0, atol=1e-4)


def test_bad_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"there is no sound file .*gone\.wav"):
        load_audio(tmp_path / "gone.wav")
    noise = tmp_path / "noise.flac"
    noise.write_bytes(b"no sound at all")
    with pytest.raises(InputError, match="is no sound file that can be read"):
        load_audio(noise)
    soundfile.write(tmp_path / "empty.wav", np.zeros(0), RATE)
    with pytest.raises(InputError, match="holds no sound"):
        load_audio(tmp_path / "empty.wav")
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'clearhead\[audio\]'"):
        load_audio(tmp_path / "empty.wav")


def test_unusual_rates_and_long_files_are_refused_by_their_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kilobytes became gigabytes and minutes: at 4,000,037 Hz, at 1 Hz, or as an hour of silence."""
    for name, samples, rate, words in (
        ("fast.wav", 50, 4_000_037, "an unusual rate: 4,000,037 samples a second; 4,000 to 192,000 can be read"),
        ("slow.wav", 3000, 1, "an unusual rate: 1 samples a second"),
        ("silence.flac", 3601 * 4000, 4000, "too long: 3,601 seconds, and 1,800 are the limit at this rate; cut it"),
    ):
        soundfile.write(tmp_path / name, np.zeros(samples, np.int16), rate)
        with monkeypatch.context() as patch:
            patch.setattr(soundfile.SoundFile, "blocks", lambda *_, **__: pytest.fail("decoded"))
            with pytest.raises(InputError, match=words):
                load_audio(io.BytesIO((tmp_path / name).read_bytes()), max_seconds=MAX_UPLOAD_SECONDS)
    soundfile.write(tmp_path / "high.wav", np.zeros(192_000), 192_000)
    with pytest.raises(
        InputError, match="too long: 1 seconds, and 0 are the limit"
    ):  # as many samples as 2 s at 48,000
        load_audio(tmp_path / "high.wav", max_seconds=1)
    assert len(load_audio(tmp_path / "high.wav", max_seconds=4)) == RATE


@pytest.mark.slow
def test_an_unusual_rate_takes_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """191,999 has no common divisor with 16,000: the whole filter has 16,000 rows of 1,603 weights."""
    sizes: list[int] = []
    plain = audio._weights  # pyright: ignore[reportPrivateUsage]

    def spied(fraction: Tensor, cutoff: float, reach: int) -> Tensor:
        sizes.append(len(fraction) * (2 * reach + 1))
        return plain(fraction, cutoff, reach)

    monkeypatch.setattr(audio, "_weights", spied)
    found = resample(sweep(191_999, seconds=0.5), 191_999)
    torch.testing.assert_close(found[:8000], sweep(RATE, seconds=0.5), rtol=0, atol=1e-4)
    assert max(sizes) <= audio.WEIGHTS
    sizes.clear()
    assert len(resample(torch.ones(50), 191_999)) == 5
    assert sum(sizes) < 5 * 2000  # only the rows that five samples need


def test_a_header_with_too_many_samples(tmp_path: Path) -> None:
    """A flac file of one second that claims 2^36 samples is read to its end or refused; memory does not grow."""
    path = tmp_path / "x.flac"
    soundfile.write(path, sweep(RATE).numpy(), RATE)
    data = bytearray(path.read_bytes())
    assert (
        data[4] & 0x7F == 0
    )  # the stream info block comes first: it has the length in 36 bits from the middle of byte 21
    data[21] |= 0x0F
    data[22:26] = b"\xff\xff\xff\xf0"
    path.write_bytes(data)
    with contextlib.suppress(InputError):
        assert len(load_audio(path)) <= 2 * RATE
