"""Audio files to the features that Whisper's encoder reads, by transformers' own extractor."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from service.audio.resampling import resample
from service.audio.wav import read_wav
from workers.errors import ModelLoadError

_FILE = "preprocessor_config.json"
_EXTRACTOR = "WhisperFeatureExtractor"


@dataclass(frozen=True, slots=True)
class Heard:
    """features: float32 (num_bins, num_frames). duration_s: of the audio, without its padding."""

    features: npt.NDArray[np.float32]
    duration_s: float


class FeatureReader:
    """One model folder's extractor. Raises ModelLoadError where its file cannot be used."""

    def __init__(self, folder: Path) -> None:
        # Seconds of imports that other models do without.
        from transformers import WhisperFeatureExtractor

        try:
            self._extract = WhisperFeatureExtractor.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, TypeError) as error:
            raise ModelLoadError(f"{folder / _FILE} cannot be used: {error}") from error

    def read(self, data: bytes) -> Heard:
        """data: a WAV file. Raises AudioRefusedError."""
        extract = self._extract
        sound = read_wav(data, max_duration_s=extract.n_samples / extract.sampling_rate)
        heard = resample(sound, extract.sampling_rate)
        features = extract(
            heard.samples, sampling_rate=extract.sampling_rate, return_tensors="np"
        ).input_features[0]
        return Heard(np.asarray(features, dtype=np.float32), sound.duration_s)


def feature_reader_of(folder: Path) -> FeatureReader | None:
    """None for a folder whose model reads no audio."""
    path = folder / _FILE
    if not path.is_file():
        return None
    try:
        kind = json.loads(path.read_text(encoding="utf-8")).get("feature_extractor_type")
    except (json.JSONDecodeError, AttributeError) as error:
        raise ModelLoadError(f"{path} is not a JSON object") from error
    return FeatureReader(folder) if kind == _EXTRACTOR else None
