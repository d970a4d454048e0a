"""A sound at another rate, by its spectrum: what scipy.signal.resample does, without its weight."""

import numpy as np

from service.audio.wav import Sound


def resample(sound: Sound, rate_hz: int) -> Sound:
    """Frequencies that the new rate cannot hold are left out; the others are kept exactly.

    The whole is one period, so that its end and its beginning touch: a few samples there may ring.
    """
    if sound.rate_hz == rate_hz:
        return sound
    num_before = len(sound.samples)
    num_after = max(1, round(num_before * rate_hz / sound.rate_hz))
    spectrum = np.fft.rfft(sound.samples)
    num_kept = min(num_before, num_after) // 2 + 1
    kept = np.zeros(num_after // 2 + 1, dtype=spectrum.dtype)
    kept[:num_kept] = spectrum[:num_kept]
    samples = np.fft.irfft(kept, num_after) * (num_after / num_before)
    return Sound(samples.astype(np.float32), rate_hz)
