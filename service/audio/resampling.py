"""A sound at another rate, by its spectrum: what scipy.signal.resample does, without its weight."""

from fractions import Fraction

import numpy as np

from service.audio.wav import AudioRefusedError, Sound

_ANY_RATE_UP_TO_HZ = 48_000
_QUICK_FACTORS = (2, 3, 5, 7, 11, 13)


def resample(sound: Sound, rate_hz: int) -> Sound:
    """Frequencies that the new rate cannot hold are left out; the others are kept exactly.

    The whole is one period, with silence behind it where its length would make a slow transform: a
    few samples at its ends may ring. Raises AudioRefusedError for high rates that have no simple
    ratio to the new one, whose transforms would take a gigabyte.
    """
    if sound.rate_hz == rate_hz:
        return sound
    ratio = Fraction(rate_hz, sound.rate_hz)
    if sound.rate_hz > _ANY_RATE_UP_TO_HZ and not _is_quick(ratio.denominator):
        raise AudioRefusedError(f"{sound.rate_hz} samples a second are not read")
    num_samples = len(sound.samples)
    num_units = _quick_length(-(-num_samples // ratio.denominator))
    num_before, num_after = num_units * ratio.denominator, num_units * ratio.numerator
    spectrum = np.fft.rfft(sound.samples, num_before)
    num_kept = min(num_before, num_after) // 2 + 1
    kept = np.zeros(num_after // 2 + 1, dtype=spectrum.dtype)
    kept[:num_kept] = spectrum[:num_kept]
    samples = np.fft.irfft(kept, num_after) * (num_after / num_before)
    num_heard = max(1, round(num_samples * ratio))
    return Sound(samples[:num_heard].astype(np.float32), rate_hz)


def _quick_length(num_samples: int) -> int:
    """The next length that a transform divides into small parts, a few hundredths away at most."""
    length = num_samples
    while not _is_quick(length):
        length += 1
    return length


def _is_quick(length: int) -> bool:
    for factor in _QUICK_FACTORS:
        while length % factor == 0:
            length //= factor
    return length == 1
