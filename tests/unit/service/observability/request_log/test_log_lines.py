"""Log lines of requests: JSON, fields, ids, and nothing of what a request says."""

import asyncio
import dataclasses
import io
import json
import logging
import time

import httpx
import pytest

from service.api.auth import make_authenticator
from service.api.http import build_http_app
from service.api.services import ApiServices
from service.observability.request_log.formatting import (
    JsonFormatter,
    TextFormatter,
    configure_logging,
    name_in_log_lines,
)
from service.observability.request_log.observer import NoTracing, RequestObserver, choose_request_id
from service.observability.request_log.record import RequestRecord
from service.observability.request_log.settings import LoggingSettings
from service.security.api_keys import ApiKey
from service.security.callers import make_callers
from service.security.quota import KeyLimits
from tests.fakes.text import make_bench

SECRET_PROMPT = "zanzibar xylophone"
KEY = "very-secret-key"


@pytest.fixture
def lines():
    """What the service's loggers write, from now on."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("service")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield stream
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.fixture
def services(tmp_path):
    return ApiServices(
        models=make_bench(tmp_path).models,
        authenticator=make_authenticator(
            make_callers(
                [ApiKey(KEY, "team-a", KeyLimits())], time.monotonic, salt_prefix_cache=False
            )
        ),
        is_ready=lambda: True,
        version="0.1.0",
        started_s=0,
        observer=RequestObserver(NoTracing(), is_access_log_enabled=True),
    )


async def _post(services, body, request_id="req-1", key=KEY):
    transport = httpx.ASGITransport(app=build_http_app(services))
    headers = {"x-request-id": request_id, "authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://tessera") as client:
        body = {"model": "tiny", **body}
        response = await client.post("/v1/completions", json=body, headers=headers)
    services.observer.flush()
    return response


def _parsed(lines):
    return [json.loads(line) for line in lines.getvalue().splitlines()]


@pytest.mark.asyncio
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_request_ends_with_one_line_that_has_its_figures(services, lines, is_stream):
    body = {"prompt": SECRET_PROMPT, "max_tokens": 50, "stream": is_stream}
    response = await _post(services, body)
    assert response.headers["x-request-id"] == "req-1"
    (line,) = _parsed(lines)
    assert line["request_id"] == "req-1"
    assert (line["method"], line["route"], line["status"]) == ("POST", "/v1/completions", "200")
    assert line["finish_reason"] == "stop"
    assert line["num_output_tokens"] > 0
    assert line["num_prompt_tokens"] > 0
    assert line["queue_s"] == 0.001
    assert 0 < line["ttft_s"] <= line["duration_s"]
    assert line["key_name"] == "team-a"


@pytest.mark.asyncio
async def test_neither_the_prompt_nor_the_answer_nor_the_key_is_logged(services, lines):
    for body in ({"prompt": SECRET_PROMPT, "max_tokens": 5}, {"prompt": SECRET_PROMPT, "n": -1}):
        await _post(services, body)
    await _post(services, {"prompt": SECRET_PROMPT}, key=KEY + "-wrong")
    assert len(_parsed(lines)) == 3
    told = lines.getvalue()
    assert "zanzibar" not in told
    assert "hello" not in told
    assert KEY not in told


@pytest.mark.asyncio
async def test_a_refusal_has_its_status_and_code(services, lines):
    await _post(services, {"prompt": "x", "max_tokens": -1})
    await _post(services, {"prompt": "x"}, key="wrong")
    refused, unknown = _parsed(lines)
    assert refused["status"] == "400"
    assert refused["error_code"]
    assert (unknown["status"], unknown["error_code"]) == ("401", "invalid_api_key")
    assert unknown["key_name"] == "anonymous"


@pytest.mark.asyncio
async def test_requests_at_once_have_their_own_ids(services, lines):
    await asyncio.gather(
        *(_post(services, {"prompt": "x", "max_tokens": 5}, f"r{i}") for i in range(8))
    )
    assert sorted(line["request_id"] for line in _parsed(lines)) == [f"r{i}" for i in range(8)]


@pytest.mark.asyncio
async def test_the_access_log_can_be_off_and_health_is_never_in_it(services, lines):
    transport = httpx.ASGITransport(app=build_http_app(services))
    async with httpx.AsyncClient(transport=transport, base_url="http://tessera") as client:
        assert (await client.get("/health/live")).status_code == 200
    silent = RequestObserver(NoTracing(), is_access_log_enabled=False)
    await _post(dataclasses.replace(services, observer=silent), {"prompt": "x", "max_tokens": 5})
    assert _parsed(lines) == []


def _format(formatter, message, *args):
    return formatter.format(logging.LogRecord("service.x", 30, "", 0, message, args, None))


@pytest.mark.asyncio
async def test_any_line_of_a_call_names_its_request():
    assert "request_id" not in json.loads(_format(JsonFormatter(), "hello"))
    name_in_log_lines(RequestRecord("req-9"))
    line = json.loads(_format(JsonFormatter(), 'a "%s"\nb', "c"))
    assert (line["request_id"], line["message"]) == ("req-9", 'a "c"\nb')
    assert (line["level"], line["logger"]) == ("warning", "service.x")
    assert _format(TextFormatter(), "hello").endswith("hello request_id=req-9")


def test_configuring_again_replaces_the_format_and_adds_no_second_handler():
    loggers = [logging.getLogger(name) for name in ("service", "workers", "attention")]
    before = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    try:
        configure_logging(LoggingSettings())
        configure_logging(LoggingSettings(format="json"))
        for logger in loggers:
            (handler,) = logger.handlers
            assert isinstance(handler.formatter, JsonFormatter)
    finally:
        for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
            logger.handlers[:] = handlers
            logger.setLevel(level)
            logger.propagate = propagate


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "a\nb", "é"])
def test_a_malformed_request_id_is_replaced(given):
    assert choose_request_id(given) not in ("", given)
    assert choose_request_id("abc-1.2:3") == "abc-1.2:3"
