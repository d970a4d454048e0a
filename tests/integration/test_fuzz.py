"""The real service under nonsense of every kind for a while: no 5xx, no INTERNAL, nothing left.

The same for as long as one likes: `python -m tests.integration.fuzz --minutes 10`.
"""

import json

import httpx
import hypothesis
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.random_requests import JSON_VALUES
from tests.integration.fuzz import grpc_calls, hostile_chats, http_schema, raw_sockets
from tests.integration.fuzz.busy_machine import ANSWER as BUSY
from tests.integration.fuzz.busy_machine import is_of_a_busy_machine
from tests.integration.fuzz.fuzzing import ENGINE, fuzz
from tests.integration.services import running_service

FUZZ = settings(max_examples=40, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
# Whatever else is said of one is said by mistake, such as of its media type. Without context left,
# prompts are refused before their grammars are made.
HOSTILE_ANSWERS = {
    "200",
    "400 context_length_exceeded",
    "400 invalid_json",
    "400 invalid_request",
    "400 limit_exceeded",
    "400 unsupported_parameter",
    "429 overloaded",
    BUSY,
}
VALID = {"model": "builtin", "prompt": "def ", "max_tokens": 2, "temperature": 0}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def service(ray_session):
    with running_service("fuzz", 18400, engine=ENGINE) as running:
        yield running


def missing(tally, min_served):
    """What has not been asked often enough to say anything."""
    sources = (http_schema.SOURCE, grpc_calls.SOURCE, raw_sockets.HTTP)
    few = [source for source in sources if sum(tally.counts(source).values()) <= 10]
    wanted = {
        (http_schema.SOURCE, "200"): min_served,
        (grpc_calls.SOURCE, "OK"): 1,
        (hostile_chats.SOURCE, "400 invalid_request"): 1,
    }
    few += [one for one, least in wanted.items() if tally.counts(one[0]).get(one[1], 0) < least]
    return few


# How many requests fit into the time is up to the machine: a busy one has more time.
@pytest.mark.parametrize(
    ("fuzz_s", "min_served"), [(8, 1), pytest.param(30, 8, marks=pytest.mark.nightly)]
)
def test_nonsense_of_every_kind_breaks_and_leaves_nothing(service, tmp_path, fuzz_s, min_served):
    for times_as_long in (1, 4, 16):
        tally = fuzz(service, times_as_long * fuzz_s, seed=1, folder=tmp_path)
        print(tally.report())
        assert tally.num_failures == 0, tally.report()
        assert set(tally.counts(hostile_chats.SOURCE)) <= HOSTILE_ANSWERS
        if not missing(tally, min_served):
            break
    assert not missing(tally, min_served), tally.report()


@given(changes=st.dictionaries(st.sampled_from([*VALID, "n", "stop", "seed"]), JSON_VALUES))
@FUZZ
def test_any_value_of_any_parameter_has_no_server_error(service, changes):
    with httpx.Client(base_url=service.url, timeout=60) as client:
        # json.dumps writes NaN and Infinity, which are not JSON and must be refused.
        body = json.dumps({**VALID, **changes})
        headers = {"content-type": "application/json"}
        response = client.post("/v1/completions", content=body, headers=headers)
        assert response.status_code < 500 or is_of_a_busy_machine(response), response.text
        after = client.post("/v1/completions", json=VALID)
        assert after.status_code == 200 or is_of_a_busy_machine(after), after.text
