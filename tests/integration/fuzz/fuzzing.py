"""All fuzzers at once against one service, each in a thread, and what has to hold at the end."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx

from tests.integration.fuzz import http_schema
from tests.integration.fuzz.busy_machine import ANSWER as BUSY
from tests.integration.fuzz.busy_machine import is_busy_call, is_of_a_busy_machine
from tests.integration.fuzz.grpc_calls import GrpcFuzzer
from tests.integration.fuzz.hostile_chats import HostileChats
from tests.integration.fuzz.raw_sockets import RawFuzzer
from tests.integration.fuzz.tally import Tally
from tests.integration.fuzz.watching import Watch
from tests.integration.services import (
    RunningService,
    grpc_text,
    replica_processes,
    wait_until,
)

MODEL = "builtin"
# Small, so that prompts meet the ends of context and memory.
ENGINE = {"max_context_len": 256, "num_pages": 400, "check_integrity_when_idle": True}
# Most of a raw exchange is waiting for an answer that may never come.
NUM_RAW_FUZZERS = 4
ALIVE = "valid requests in between"
_VALID = {"model": MODEL, "prompt": "def ", "max_tokens": 2, "temperature": 0}
# Serving noise takes memory for a while: caches of grammars and prefixes, what allocators keep.
MAX_GROWTH_MIB = 400
_EMPTY = ("tessera_kv_pages_used", "tessera_live_requests", "tessera_waiting_requests")


def fuzz(service: RunningService, seconds: float, seed: int, folder: Path) -> Tally:
    """Everything for about `seconds`. folder: for files of the schemathesis command."""
    tally = Tally()
    identities = identities_of(service)
    config = service.config
    grpc_fuzzer = GrpcFuzzer(service.grpc_address, tally)
    raw_fuzzers = [
        RawFuzzer(MODEL, config.http.port, config.grpc.port, tally, seed + number)
        for number in range(NUM_RAW_FUZZERS)
    ]
    hostile_chats = HostileChats(MODEL, service.url, tally, seed)
    watch = Watch(service)
    stopped = threading.Event()
    fuzzers = (grpc_fuzzer, hostile_chats, *raw_fuzzers)
    with ThreadPoolExecutor(len(fuzzers) + 2) as threads:
        by_schema = threads.submit(http_schema.run, service.url, MODEL, seconds, tally, folder)
        batches = [
            threads.submit(repeat, fuzzer.run_batch, service, tally, stopped) for fuzzer in fuzzers
        ]
        batches.append(threads.submit(watch.run, stopped))
        try:
            by_schema.result()
        finally:
            stopped.set()
        for error in filter(None, (batch.exception() for batch in batches)):
            # Such as a connection refused: the run goes on to its report.
            tally.fail("a fuzzer ended", repr(error))
    grpc_fuzzer.close()
    hostile_chats.close()
    tally.note(hostile_chats.report())
    tally.note(watch.report())
    for name, mib in watch.grown_mib.items():
        if mib > MAX_GROWTH_MIB:
            tally.fail("memory", f"{name} has grown by {mib:.0f} MiB")
    check_end(service, identities, tally)
    return tally


def repeat(
    run_batch: Callable[[], None], service: RunningService, tally: Tally, stopped: threading.Event
) -> None:
    """Batches until stopped, a valid request by each protocol after each of them."""
    while not stopped.is_set():
        run_batch()
        answer = httpx.post(f"{service.url}/v1/completions", json=_VALID, timeout=60)
        if is_of_a_busy_machine(answer):
            tally.count(ALIVE, BUSY)
            continue
        tally.count(ALIVE, str(answer.status_code))
        if answer.status_code != 200 or not is_alive_by_grpc(service):
            tally.fail(ALIVE, f"{answer.status_code} {answer.text[:300]}")


def is_alive_by_grpc(service: RunningService) -> bool:
    try:
        return bool(grpc_text(service, "def ", 2))
    except grpc.RpcError as error:
        if is_busy_call(error):
            return True
        raise


def identities_of(service: RunningService) -> tuple[object, ...]:
    """Of every process and engine of the service: another one has others."""
    processes = replica_processes(service.config.app_name)
    pids = sorted((process.pid, process.create_time()) for process in processes)
    return (*pids, service.metric("tessera_engine_start_time_seconds"))


def check_end(service: RunningService, identities: tuple[object, ...], tally: Tally) -> None:
    """Nothing is left of any request, and nothing was restarted."""
    for name in _EMPTY:
        try:
            wait_until(lambda name=name: service.metric(name) == 0, 60)
        except AssertionError:
            tally.fail("end", f"{name} is {service.metric(name)} with no request left")
    if identities_of(service) != identities:
        tally.fail("end", f"processes changed: {identities} became {identities_of(service)}")
