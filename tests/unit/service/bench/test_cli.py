"""The command: flags, table, JSON and exit codes, against a server in another thread."""

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from service.bench.cli import bench
from tests.unit.service.bench.http_server import OVERLOADED, FakeOpenAi, serving

app = typer.Typer()
app.command("bench")(bench)


@pytest.fixture(scope="module")
def server() -> FakeOpenAi:
    return FakeOpenAi()


@pytest.fixture(scope="module")
def url(server: FakeOpenAi) -> Iterator[str]:
    addresses: list[str] = []
    is_up = threading.Event()
    stop = asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with serving(server) as address:
            addresses.append(address)
            is_up.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert is_up.wait(10)
    yield addresses[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()


def run(*arguments: str):
    return CliRunner().invoke(app, arguments)


SMALL = ("--num-requests", "6", "--input-len", "uniform:4:8", "--output-len", "5")


def test_the_table_shows_latencies_and_throughput(url: str) -> None:
    result = run("--url", url, *SMALL, "--concurrency", "2")
    assert result.exit_code == 0, result.output
    for title in ("TTFT", "Inter-token", "End to end", "p99"):
        assert title in result.stdout
    assert "6 of 6" in result.stdout
    assert "closed loop, 2 at a time" in result.stdout


def test_json_goes_to_standard_output_and_to_a_file(url: str, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    result = run(
        *("--url", url, *SMALL, "--rate", "500", "--arrivals", "fixed"),
        *("--output", "json", "--json-file", str(file)),
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report == json.loads(file.read_text())
    assert report["model"] == "fake"
    assert report["load"] == "open loop, fixed at 500 requests/s"
    assert report["workload"]["input_len"] == "uniform:4:8"
    assert report["result"]["num_output_tokens"] == 30
    assert report["result"]["ttft_s"]["num_samples"] == 6
    lag = report["result"]["client_lag_s"]
    assert lag["num_samples"] == 6
    assert 0 < lag["p50"] <= lag["p99"] < report["result"]["elapsed_s"]


def test_a_closed_loop_has_no_schedule_to_lag_behind(url: str) -> None:
    result = run("--url", url, *SMALL, "--concurrency", "2", "--output", "json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["result"]["client_lag_s"] is None


def test_failed_requests_are_listed_by_code_and_none_succeeding_is_a_failure(url: str) -> None:
    result = run(
        *("--url", url, "--num-requests", "3", "--warmup", "0", "--input-len", "4"),
        *("--output-len", str(OVERLOADED)),
    )
    assert result.exit_code == 1
    assert "3 requests ended with overloaded" in result.stdout
    assert "try later" in result.stdout


@pytest.mark.parametrize(
    "target",
    [
        ("--url", "http://127.0.0.1:1"),
        ("--transport", "grpc", "--url", "127.0.0.1:1"),
        ("--transport", "in-process", "--model", "/no/such/folder"),
    ],
)
def test_a_target_that_is_not_there_is_one_readable_line(target: tuple[str, ...]) -> None:
    result = run(*target, *SMALL)
    assert result.exit_code == 1
    assert "tessera bench: " in result.stderr
    assert "Traceback" not in result.output
    assert isinstance(result.exception, SystemExit)


def test_an_unknown_model_is_a_readable_error(url: str) -> None:
    result = run("--url", url, "--model", "other", *SMALL)
    assert result.exit_code == 1
    assert "it serves fake" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("--rate", "1", "--concurrency", "2"),
        ("--rate", "0"),
        ("--rate", "inf", "--duration", "1"),
        ("--input-len", "zipf:3"),
        ("--prefix-share", "1.5"),
        ("--transport", "grpc", "--chat"),
        ("--engine", "page_size=16"),
        ("--transport", "in-process", "--engine", "page_size=none"),
        ("--transport", "in-process", "--engine", "no_such_key=1"),
        ("--api-key-file", "/no/such/file"),
    ],
)
def test_flags_that_make_no_sense_are_usage_errors(arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2, result.output


def test_a_json_file_that_cannot_be_written_does_not_lose_the_table(
    url: str, tmp_path: Path
) -> None:
    result = run("--url", url, *SMALL, "--json-file", str(tmp_path / "no" / "result.json"))
    assert result.exit_code == 1
    assert "6 of 6" in result.stdout
    assert "could not be written" in result.stderr


def test_a_run_profits_from_earlier_ones_only_when_told_to(server: FakeOpenAi, url: str) -> None:
    server.bodies.clear()
    run("--url", url, *SMALL)
    run("--url", url, *SMALL)
    salts = [body["cache_salt"] for body in server.bodies]
    assert len(set(salts)) == 2
    assert server.bodies[0]["prompt"] == server.bodies[len(salts) // 2]["prompt"]
    server.bodies.clear()
    run("--url", url, *SMALL, "--reuse-cache")
    assert not any("cache_salt" in body for body in server.bodies)
