"""Two ingresses' servers on the same ports; one leaves under load and no client notices."""

import asyncio
import itertools
import socket
from collections import Counter
from dataclasses import replace

import msgspec
import pytest

from service.api.auth import OpenAuthenticator
from service.api.grpc import GrpcOptions, build_grpc_server
from service.api.grpc_calls_under_way import CallsUnderWay
from service.api.http import build_http_app
from service.api.services import ApiServices
from service.deployments.departure import Departure
from service.deployments.listeners import HttpServer, bind_shared
from tests.fakes.backend import MODEL_INFO, make_outputs
from tests.fakes.text import make_bench
from tests.integration.chaos.applications import FAKE, Request
from tests.integration.chaos.clients import Clients, End, Protocol

NUM_CLIENTS = 24
NUM_DEPARTURES = 3
DRAIN_TIMEOUT_S = 20.0
PACE_S = 0.01
INFO = msgspec.structs.replace(MODEL_INFO, name="builtin")


class Ingress:
    """HTTP and gRPC servers before a paced backend. Counts as LiveRequests for its departure."""

    def __init__(self, folder, port):
        folder.mkdir()
        self.bench = make_bench(folder, lambda r: make_outputs(r, [10] * 100), info=INFO)
        self.bench.backend.gate = asyncio.Semaphore(0)
        self.port = port
        self.is_draining = False
        self.num_cut = 0

    @property
    def num_live_requests(self):
        return self.bench.backend.num_live

    def begin_drain(self):
        self.is_draining = True

    def end_requests(self):
        self.num_cut = self.num_live_requests
        return self.num_cut

    async def start(self):
        services = ApiServices(self.bench.models, OpenAuthenticator(), lambda: True, "0", 0)
        self.http = HttpServer(build_http_app(services), 60, DRAIN_TIMEOUT_S)
        await self.http.start(bind_shared("127.0.0.1", self.port))
        options = GrpcOptions(can_share_port=True)
        self.calls = CallsUnderWay()
        self.rpc = build_grpc_server(
            services, f"127.0.0.1:{self.port + 1}", options, calls=self.calls
        ).server
        await self.rpc.start()
        self.pace = asyncio.create_task(self.keep_pace())
        return self

    async def keep_pace(self):
        while True:
            await asyncio.sleep(PACE_S)
            for _ in range(self.num_live_requests):
                self.bench.backend.gate.release()

    async def leave(self):
        await Departure(
            self.http, self.rpc, self.calls, self, self.end_requests, DRAIN_TIMEOUT_S
        ).run()
        self.pace.cancel()


def free_port_pair():
    for port in range(21000, 22000, 2):
        with socket.socket() as first, socket.socket() as second:
            try:
                first.bind(("127.0.0.1", port))
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port
    raise RuntimeError("no ports")


async def keep_asking(clients, slot, is_over, ends):
    for number in itertools.count(slot):
        if is_over.is_set():
            return
        protocol = list(Protocol)[number % len(Protocol)]
        request = Request(0, [5], 5 + 7 * (number % 9))
        outcome = await clients.send(protocol, request, None)
        while outcome.has_crossed_a_goodbye:
            outcome = await clients.send(protocol, request, None)
        is_right = outcome.end is not End.WHOLE or len(outcome.token_ids) == request.max_tokens
        assert is_right, outcome
        ends[f"{protocol} {outcome.end} {outcome.code} {outcome.message}"] += 1


@pytest.mark.nightly
@pytest.mark.asyncio
async def test_no_request_fails_when_one_of_two_leaves(tmp_path):
    port = free_port_pair()
    staying = await Ingress(tmp_path / "staying", port).start()
    leaving = await Ingress(tmp_path / "0", port).start()
    ends, is_over = Counter(), asyncio.Event()
    async with Clients(replace(FAKE, base_port=port), deadline_s=30) as clients:
        load = [
            asyncio.create_task(keep_asking(clients, slot, is_over, ends))
            for slot in range(NUM_CLIENTS)
        ]
        for number in range(1, NUM_DEPARTURES + 1):
            async with asyncio.timeout(DRAIN_TIMEOUT_S):
                while not leaving.bench.backend.requests:
                    await asyncio.sleep(0.05)
            await asyncio.sleep(1.0)
            successor = await Ingress(tmp_path / str(number), port).start()
            await asyncio.wait_for(leaving.leave(), DRAIN_TIMEOUT_S / 2)
            assert leaving.num_cut == 0
            leaving = successor
        is_over.set()
        await asyncio.gather(*load)
    assert {end for end in ends if "whole" not in end} == set(), ends
    await asyncio.gather(staying.leave(), leaving.leave())
