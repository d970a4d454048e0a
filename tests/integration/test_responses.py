"""Stored responses of a service with two ingresses: what one keeps the other finds and stops."""

import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import ray

from service.deployments.control_plane import NAMESPACE, store_name
from tests.integration.services import running_service, wait_until

NAME = "responses"
ASKED = {"model": "builtin", "max_output_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def service(ray_session):
    engine = {"dtype": "float32", "check_integrity_when_idle": True}
    with running_service(NAME, 18560, engine=engine, num_ingresses=2) as running:
        yield running


def fresh(service):
    """A connection of its own: the kernel gives it to either ingress."""
    return httpx.Client(base_url=service.url, timeout=60)


def ask(service, method, path, **json):
    with fresh(service) as client:
        return client.request(method, path, json=json or None)


def create(service, **fields):
    answer = ask(service, "POST", "/v1/responses", **ASKED, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_conversation_goes_on_at_any_ingress(service):
    first = create(service, input="My name is Ada.")
    assert first["store"] is True
    for _ in range(12):
        assert ask(service, "GET", f"/v1/responses/{first['id']}").json() == first
    last = first
    for number in range(6):
        last = create(service, input=f"turn {number}", previous_response_id=last["id"])
    assert last["usage"]["input_tokens"] > first["usage"]["input_tokens"] + 6 * 8
    with ThreadPoolExecutor(8) as threads:
        told = list(
            threads.map(
                lambda _: create(service, input="x", previous_response_id=last["id"]), range(16)
            )
        )
    assert len({answer["usage"]["input_tokens"] for answer in told}) == 1


@pytest.mark.parametrize("attempt", range(4))
def test_a_stream_is_stopped_from_any_ingress(service, attempt):
    for _ in range(5):
        answer, events = _cancelled_stream(service)
        # On a busy machine the text may be at its length before the call.
        if answer.status_code != 409:
            break
    assert answer.status_code == 200, answer.text
    assert answer.json()["status"] == "cancelled"
    assert events[-1] == "response.incomplete"


def _cancelled_stream(service):
    """What cancelling it answered, and the stream's events."""
    asked = {"input": "x", "stream": True, "ignore_eos": True, "max_output_tokens": 1500}
    answers = []
    lines = []
    with (
        fresh(service) as client,
        client.stream("POST", "/v1/responses", json={"model": "builtin", **asked}) as stream,
    ):
        for line in stream.iter_lines():
            lines.append(line)
            if line == "event: response.output_text.delta" and not answers:
                response_id = _id_in(lines)
                answers.append(ask(service, "POST", f"/v1/responses/{response_id}/cancel"))
    events = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    return answers[0], events


def _id_in(lines):
    return next(line for line in lines if '"id":"resp_' in line).split('"id":"')[1].split('"')[0]


def test_a_lost_store_is_a_typed_error_and_comes_back_empty(service):
    first = create(service, input="x")
    ray.kill(ray.get_actor(store_name(NAME), namespace=NAMESPACE), no_restart=False)
    gone = threading.Event()

    def is_back():
        answer = ask(service, "GET", f"/v1/responses/{first['id']}")
        assert answer.status_code in (200, 404, 503), answer.text
        if answer.status_code == 404:
            assert answer.json()["error"]["code"] == "response_not_found"
            gone.set()
        return gone.is_set()

    wait_until(is_back, 60)
    kept = create(service, input="y")
    assert kept["store"] is True
    assert ask(service, "GET", f"/v1/responses/{kept['id']}").json() == kept
