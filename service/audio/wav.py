"""WAV files of PCM samples to one channel of floats, by the standard library's reader."""

import io
import struct
import wave
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Samples = npt.NDArray[np.float32]

# What the reader raises where chunks are not what their headers say.
_BROKEN = (wave.Error, EOFError, RuntimeError, struct.error)
_MAX_CHANNELS = 8
_RATES_HZ = range(4_000, 192_001)


class AudioRefusedError(Exception):
    """A file that cannot be heard. The message may go to a client."""


@dataclass(frozen=True, slots=True)
class Sound:
    """samples: float32 (n,), in [-1, 1]."""

    samples: Samples
    rate_hz: int

    @property
    def duration_s(self) -> float:
        return len(self.samples) / self.rate_hz


def read_wav(data: bytes, max_duration_s: float) -> Sound:
    """Channels are averaged. Raises AudioRefusedError for what is no WAV of 8, 16, 24 or 32 bit
    integers, or longer than that; nothing is decoded before its length is known."""
    try:
        with wave.open(io.BytesIO(data)) as file:
            return _read(file, max_duration_s)
    except _BROKEN as error:
        reason = f" ({error})" if str(error) else ""
        raise AudioRefusedError(
            f"the file is no WAV of PCM samples{reason}; other formats are not read"
        ) from error


def _read(file: wave.Wave_read, max_duration_s: float) -> Sound:
    channels, width, rate_hz = file.getnchannels(), file.getsampwidth(), file.getframerate()
    if not 1 <= channels <= _MAX_CHANNELS:
        raise AudioRefusedError(f"the file has {channels} channels, {_MAX_CHANNELS} are allowed")
    if rate_hz not in _RATES_HZ:
        raise AudioRefusedError(f"{rate_hz} samples a second are not read")
    if width not in _DECODERS:
        raise AudioRefusedError(f"samples of {8 * width} bits are not read")
    # What the header says of the length may be wrong; what is there is not.
    raw = file.readframes(int(max_duration_s * rate_hz) + 1)
    samples = _DECODERS[width](raw[: len(raw) // (width * channels) * width * channels])
    mono = samples.reshape(-1, channels).mean(axis=1, dtype=np.float32)
    if len(mono) > max_duration_s * rate_hz:
        raise AudioRefusedError(f"the audio is longer than {max_duration_s:g} s")
    if not len(mono):
        raise AudioRefusedError("the file has no samples")
    return Sound(mono, rate_hz)


def _from_8_bits(raw: bytes) -> Samples:
    """The only unsigned ones."""
    return (np.frombuffer(raw, dtype=np.uint8).astype(np.float32) - 128.0) / 128.0


def _from_16_bits(raw: bytes) -> Samples:
    return np.frombuffer(raw, dtype="<i2").astype(np.float32) / 2.0**15


def _from_24_bits(raw: bytes) -> Samples:
    """As the upper bytes of 32 bits, so that the sign is where it belongs."""
    wide = np.zeros((len(raw) // 3, 4), dtype=np.uint8)
    wide[:, 1:] = np.frombuffer(raw, dtype=np.uint8).reshape(-1, 3)
    return _from_32_bits(wide.tobytes())


def _from_32_bits(raw: bytes) -> Samples:
    return (np.frombuffer(raw, dtype="<i4") / 2.0**31).astype(np.float32)


_DECODERS = {1: _from_8_bits, 2: _from_16_bits, 3: _from_24_bits, 4: _from_32_bits}
