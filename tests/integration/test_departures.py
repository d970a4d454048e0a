"""A rolling upgrade and a scale-down in the middle of streams lose none, and wait for none.

    tests/integration/isolated.sh python -m tests.integration.chaos.departures --stream-s 60

is the same with long streams.
"""

import pytest

from tests.integration.chaos.departures import SCALED, UPGRADED, delete, scale_down, upgrade

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(240)]

# An upgrade's replicas take some seconds to start, more on a busy machine; streams are to run all
# the while. What a scale-down takes away is there before its streams begin.
UPGRADE_STREAM_S = 30.0
SCALE_DOWN_STREAM_S = 15.0


@pytest.mark.parametrize(
    ("application", "leave", "stream_s"),
    [
        pytest.param(UPGRADED, upgrade, UPGRADE_STREAM_S, id="rolling upgrade"),
        pytest.param(SCALED, scale_down, SCALE_DOWN_STREAM_S, id="scale-down"),
    ],
)
def test_replicas_leave_before_their_streams_would_have_ended(
    ray_session, application, leave, stream_s
):
    try:
        departed = leave(stream_s)
    finally:
        delete(application)
    print(departed.describe())
    assert departed.broken() == []
    assert departed.num_moves > 0
    assert departed.left_s > 0
