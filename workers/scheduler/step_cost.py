"""How long a step will take: a linear model, fitted to the steps that have been measured.

Bayesian linear regression, one step after the other: Kalman's filter over weights that drift
(Kalman 1960). Errors are relative, so that a step of 8,192 tokens says no more than one of 1,024,
and forgetting is stabilised (Kulhavy and Zarrop 1993): what is not seen for long becomes as
uncertain as it was at first, and no more. Knows no device: the first measured step gives the scale,
the prior only how the parts of a step relate to each other.
"""

import math

import numpy as np

from workers.scheduler.step_work import Features, StepWork

# In prompt tokens, of a model of 8 billion parameters on an H200: a constant, a prompt token, a
# prompt token's key, a decode row, its key. The spreads, relative, leave room for other models.
_PRIOR = np.array((100.0, 1.0, 5e-5, 2.0, 2e-3))
_PRIOR_SPREAD = np.array((2.0, 0.5, 2.0, 2.0, 2.0))
_NOISE = 0.03
"""Standard deviation of a step's duration, relative to it."""
_FORGETTING = 0.005
_MAX_INNOVATION = 3.0
"""In standard deviations: what deviates by more counts as if it deviated by so much."""
_OUTLIER_RATIO = 2.0
_MAX_OUTLIERS = 2
_ERROR_WEIGHT = 0.02


class StepCostModel:
    """Predicts and learns durations of one kind of step, each in some tens of microseconds.

    A step of more than twice the predicted time is put down to a compilation or a busy machine and
    passed over, unless two came before it. One of less than half says that the scale was wrong.
    """

    def __init__(self) -> None:
        self._scale_s = 0.0
        self._weights = np.zeros_like(_PRIOR)
        self._covariance = np.zeros((len(_PRIOR), len(_PRIOR)))
        self._num_outliers = 0
        self._error_s = 0.0

    @property
    def is_fitted(self) -> bool:
        """Whether a step has been measured; before that nothing can be predicted."""
        return self._scale_s > 0.0

    @property
    def error_s(self) -> float:
        """Mean of |measured - predicted|, in seconds, over the last fifty steps or so."""
        return self._error_s

    @property
    def token_s(self) -> float:
        """Seconds of one more prompt token, its keys apart; above 0 once fitted."""
        return max(float(self._weights[1]), 0.1 * self._scale_s)

    @property
    def key_s(self) -> float:
        """Seconds of one more pair of a prompt token and a key."""
        return max(float(self._weights[2]), 0.0)

    def predict(self, work: StepWork) -> float:
        """Seconds."""
        return max(float(self._weights @ work.features), 0.0)

    def observe(self, work: StepWork, seconds: float) -> None:
        """Learn from a measured step."""
        features = work.features
        predicted_s = self.predict(work)
        if seconds * _OUTLIER_RATIO < predicted_s or not self.is_fitted:
            self._start(seconds / float(_PRIOR @ features))
            return
        if seconds > predicted_s * _OUTLIER_RATIO and self._num_outliers < _MAX_OUTLIERS:
            self._num_outliers += 1
            return
        self._num_outliers = 0
        self._error_s += _ERROR_WEIGHT * (abs(seconds - predicted_s) - self._error_s)
        self._update(features, seconds - predicted_s, _NOISE * seconds)

    def _start(self, scale_s: float) -> None:
        """scale_s: seconds of a prompt token, as far as one step can tell."""
        self._scale_s = scale_s
        self._weights = scale_s * _PRIOR
        self._covariance = self._prior_covariance()
        self._num_outliers = 0

    def _prior_covariance(self) -> Features:
        return np.diag((self._scale_s * _PRIOR * _PRIOR_SPREAD) ** 2)

    def _update(self, features: Features, innovation_s: float, noise_s: float) -> None:
        spread = self._covariance @ features
        variance = float(features @ spread) + noise_s**2
        most_s = _MAX_INNOVATION * math.sqrt(variance)
        self._weights += spread * (min(max(innovation_s, -most_s), most_s) / variance)
        self._covariance -= np.outer(spread, spread) / variance
        self._covariance += _FORGETTING * (self._prior_covariance() - self._covariance)
