"""WAV files become features: those of transformers, whatever their width, channels and rate."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import WhisperFeatureExtractor

from service.audio.features import FeatureReader, feature_reader_of
from service.audio.resampling import _quick_length, resample
from service.audio.wav import AudioRefusedError, Sound, read_wav
from tests.fakes.sounds import riff, tones, wav
from workers.errors import ModelLoadError

EXTRACTOR = {"feature_size": 8, "chunk_length": 1}
SOUND = tones(0.5, 16_000, 440.0, 1000.0)


@pytest.fixture
def folder(tmp_path):
    WhisperFeatureExtractor(**EXTRACTOR).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("width", "error"), [(1, 1e-2), (2, 1e-4), (3, 1e-6), (4, 1e-6)])
@pytest.mark.parametrize("channels", [1, 2, 8])
def test_samples_are_read(width, channels, error):
    sound = read_wav(wav(SOUND, 16_000, width, channels), 1.0)
    assert sound.rate_hz == 16_000
    assert sound.duration_s == 0.5
    np.testing.assert_allclose(sound.samples, SOUND, atol=error)


def test_channels_are_averaged():
    """Opposite ones cancel each other."""
    data = bytearray(wav(SOUND, 16_000, 2, 2))
    samples = np.frombuffer(data, dtype="<i2", offset=44).reshape(-1, 2)
    flipped = np.stack([samples[:, 0], -samples[:, 0]], axis=1).astype("<i2")
    sound = read_wav(bytes(data[:44]) + flipped.tobytes(), 1.0)
    assert np.abs(sound.samples).max() == 0.0


@pytest.mark.parametrize("rate_hz", [8_000, 22_050, 44_100, 48_000])
def test_a_tone_is_the_same_tone_at_another_rate(rate_hz):
    """Whole periods, so that end and beginning meet."""
    sound = Sound(tones(0.5, rate_hz, 440.0, 1000.0).astype(np.float32), rate_hz)
    other = resample(sound, 16_000)
    assert other.rate_hz == 16_000
    np.testing.assert_allclose(other.samples, SOUND, atol=2e-4)


def test_what_the_new_rate_cannot_hold_is_left_out():
    sound = Sound(tones(0.5, 48_000, 440.0, 20_000.0).astype(np.float32), 48_000)
    np.testing.assert_allclose(
        resample(sound, 16_000).samples, tones(0.5, 16_000, 440.0) / 2, atol=2e-4
    )


@pytest.mark.parametrize("num_samples", [11_003, 11_027])
def test_a_sound_of_an_odd_length_is_as_long_and_the_same(num_samples):
    """Both lengths are primes; silence behind the sound makes its last samples ring."""
    samples = tones(0.5, 22_050, 440.0, 1000.0)
    samples = np.concatenate([samples, samples])[:num_samples].astype(np.float32)
    other = resample(Sound(samples, 22_050), 16_000).samples
    assert len(other) == round(num_samples * 16_000 / 22_050)
    inner = slice(200, 7_700)
    np.testing.assert_allclose(other[inner], SOUND[inner], atol=1e-2)


def test_no_transform_is_of_a_length_that_takes_a_gigabyte():
    assert _quick_length(5_759_999) == 5_760_000
    rates_hz = (191_999, 96_001)
    for rate_hz in rates_hz:
        with pytest.raises(AudioRefusedError, match=f"{rate_hz} samples a second"):
            resample(Sound(np.zeros(9, dtype=np.float32), rate_hz), 16_000)
    for rate_hz in (88_200, 96_000, 176_400, 192_000):
        silence = Sound(np.zeros(rate_hz // 100, dtype=np.float32), rate_hz)
        assert len(resample(silence, 16_000).samples) == 160


def test_features_are_those_of_transformers(folder):
    heard = FeatureReader(folder).read(wav(SOUND, 16_000, 4))
    extract = WhisperFeatureExtractor(**EXTRACTOR)
    wanted = extract(SOUND.astype(np.float32), sampling_rate=16_000, return_tensors="np")
    assert heard.features.shape == (8, 100)
    np.testing.assert_allclose(heard.features, wanted.input_features[0], atol=1e-4)
    assert heard.duration_s == 0.5


REFUSED = {
    "nothing": (b"", "no WAV"),
    "text": (b"hello", "no WAV"),
    "no samples": (wav(SOUND[:0], 16_000), "has no samples"),
    "too long": (wav(np.zeros(16_001), 16_000), "longer than 1 s"),
    "nine channels": (wav(SOUND[:9], 16_000, 2, 9), "9 channels"),
    "too slow": (wav(SOUND[:9], 1_000), "1000 samples a second"),
    "a rate beyond": (riff(rate_hz=2**32 - 1), "4294967295 samples a second"),
    "no rate": (riff(rate_hz=0), "0 samples a second"),
    "channels without end": (riff(channels=65_535), "65535 channels"),
    "no channel": (riff(channels=0), "no WAV"),
    "a strange width": (riff(width=7), "samples of 56 bits"),
    "a length of gigabytes": (riff(told_bytes=2**32 - 1), "longer than 1 s"),
    "no length": (riff(told_bytes=0), "no WAV"),
    "chunks without end": (riff(extra=b"junk\0\0\0\0" * 20_000), "longer than 1 s"),
    "a chunk beyond the file": (riff(extra=b"junk\xff\xff\xff\x7f"), "no WAV"),
    "a rate of no simple ratio": (riff(rate_hz=191_999, num_bytes=9000), "191999 samples a second"),
    "floats": (wav(SOUND, 16_000)[:20] + b"\x03\0" + wav(SOUND, 16_000)[22:], "no WAV"),
}


@pytest.mark.parametrize(("data", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_heard_is_refused_by_name(folder, data, reason):
    with pytest.raises(AudioRefusedError, match=reason):
        FeatureReader(folder).read(data)


def test_as_much_as_the_model_hears_is_read(folder):
    assert FeatureReader(folder).read(wav(np.zeros(16_000), 16_000)).duration_s == 1.0


@given(st.binary(max_size=80), st.integers(0, 60))
def test_no_file_breaks_the_reader(noise, start):
    """Noise over a header that is right."""
    data = bytearray(wav(SOUND[:100], 16_000))
    data[start : start + len(noise)] = noise
    try:
        sound = read_wav(bytes(data), 1.0)
    except AudioRefusedError:
        return
    assert np.isfinite(sound.samples).all()
    assert 0 < sound.duration_s <= 1.0


def test_a_folder_without_an_extractor_reads_no_audio(tmp_path):
    assert feature_reader_of(tmp_path) is None
    file = tmp_path / "preprocessor_config.json"
    file.write_text('{"feature_extractor_type": "CLIPFeatureExtractor"}')
    assert feature_reader_of(tmp_path) is None
    file.write_text("[]")
    with pytest.raises(ModelLoadError, match="no|not a JSON"):
        feature_reader_of(tmp_path)
