"""Sounds and the WAV files that hold them."""

import io
import struct
import wave

import numpy as np


def tones(duration_s: float, rate_hz: int, *frequencies_hz: float) -> np.ndarray:
    """float64 (n,), each tone as loud as the others, under 1 in all."""
    times = np.arange(round(duration_s * rate_hz)) / rate_hz
    waves = [np.sin(2 * np.pi * one * times) for one in frequencies_hz]
    return 0.9 * np.sum(waves, axis=0) / len(waves)


def wav(samples: np.ndarray, rate_hz: int, width: int = 2, channels: int = 1) -> bytes:
    """samples: (n,), the same on every channel. width: bytes a sample."""
    scaled = np.round(np.repeat(samples, channels) * (2.0 ** (8 * width - 1) - 1)).astype(np.int64)
    if width == 1:
        scaled += 128
    raw = scaled.astype("<i8").view(np.uint8).reshape(-1, 8)[:, :width].tobytes()
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(channels)
        out.setsampwidth(width)
        out.setframerate(rate_hz)
        out.writeframes(raw)
    return file.getvalue()


def riff(channels=1, rate_hz=16_000, width=2, told_bytes=None, num_bytes=1 << 20, extra=b""):
    """A WAV file whose header says what it likes."""
    told = num_bytes if told_bytes is None else told_bytes
    block = channels * width
    fmt = struct.pack(
        "<HHIIHH", 1, channels, rate_hz, (rate_hz * block) % 2**32, block % 2**16, 8 * width
    )
    chunks = b"fmt " + struct.pack("<I", 16) + fmt + extra + b"data" + struct.pack("<I", told)
    return b"RIFF" + struct.pack("<I", told % 2**31) + b"WAVE" + chunks + bytes(num_bytes)
