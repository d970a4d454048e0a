"""The run: load, kills, quiet, last round. Composes what the other files know."""

import asyncio
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from tests.integration.chaos.applications import (
    FAKE,
    NUM_PROMPTS,
    REAL,
    Answer,
    Answers,
    Application,
    draw_request,
    recorded_request,
)
from tests.integration.chaos.clients import Clients, End, Outcome, Protocol
from tests.integration.chaos.healing import Healing, read_metric
from tests.integration.chaos.judge import Judge
from tests.integration.chaos.kills import Kill, KillKind
from tests.integration.chaos.processes import ClusterProcesses
from tests.integration.chaos.spares import Spares

LEAVES_EARLY_SHARE = 0.05
_PAUSE_AFTER_FAILURE_S = 0.3
_LOOK_S = 0.5
_IDLE_METRICS = ("tessera_kv_pages_used", "tessera_running_requests", "tessera_waiting_requests")


@dataclass(frozen=True, slots=True)
class Settings:
    """How long, how many. kills_s: seconds after which nothing more is killed. keeps_spares:
    nothing is killed until it leaves a live engine of each application; no stream may be lost then.
    """

    kills_s: float
    num_streams: int
    num_real_streams: int
    seed: int
    quiet_s: float = 20.0
    deadline_s: float = 120.0
    heal_timeout_s: float = 150.0
    num_last_requests: int = 60
    keeps_spares: bool = True


@dataclass(slots=True)
class Result:
    """What happened. broken: one line for every promise that was not kept."""

    kills: list[Kill] = field(default_factory=list)
    ends: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    start_s: float = 0.0
    num_tokens: int = 0


class ChaosRun:
    """One run on one cluster; run() once. plan: seconds to wait and what to kill then."""

    def __init__(
        self,
        settings: Settings,
        cluster: ClusterProcesses,
        plan: Iterable[tuple[float, KillKind]],
    ) -> None:
        self._settings = settings
        self._rng = random.Random(settings.seed)
        self._applications = cluster.applications
        self._cluster = cluster
        self._plan = plan
        self.result = Result()
        self._answers = Answers()
        self._judge = Judge(self._answers, self.result.kills, keeps_spares=settings.keeps_spares)
        self._healing = Healing(self._cluster, self.result.kills)
        self._spares = Spares(self._cluster, self._healing, self.result.kills)
        self._clients: dict[str, Clients] = {}
        self._is_loading = True
        self._is_storming = threading.Event()
        self._are_kills_over = threading.Event()
        self._begun_s = time.monotonic()

    def run(self) -> Result:
        try:
            self._cluster.start()
            self._run_beside()
        finally:
            self._cluster.shut_down()
            self.result.broken += [f"survived: {one}" for one in self._cluster.survivors()]
        return self.result

    def _run_beside(self) -> None:
        """Clients on a thread, kills on this one: Ray starts nodes on the main thread only."""
        with ThreadPoolExecutor(1) as executor:
            clients = executor.submit(asyncio.run, self._run())
            while not (self._is_storming.wait(_LOOK_S) or clients.done()):
                continue
            try:
                if not clients.done():
                    self._kill_and_watch()
            finally:
                self._are_kills_over.set()
            clients.result()

    async def _run(self) -> None:
        started_s = time.monotonic()
        if not await self._becomes_whole():
            raise TimeoutError(f"not whole at the start: {self._healing.missing}")
        self.result.start_s = time.monotonic() - started_s
        async with AsyncExitStack() as stack:
            for application in self._applications:
                clients = Clients(application, self._settings.deadline_s)
                self._clients[application.name] = await stack.enter_async_context(clients)
            await self._record_answers()
            await self._storm()
            await self._last_round()

    async def _record_answers(self) -> None:
        if REAL not in self._applications:
            return
        for index in range(NUM_PROMPTS):
            request = recorded_request(REAL, index)
            outcome = await self._clients[REAL.name].send(Protocol.HTTP_WHOLE, request, None)
            if outcome.end is not End.WHOLE:
                raise RuntimeError(f"the healthy service does not answer: {outcome}")
            self._answers.record(index, Answer(outcome.token_ids, outcome.text))

    async def _storm(self) -> None:
        settings = self._settings
        self._begun_s = time.monotonic()
        num_fake = settings.num_streams - settings.num_real_streams
        slots = [FAKE] * num_fake + [REAL] * settings.num_real_streams
        load = [asyncio.create_task(self._keep_one_going(one, i)) for i, one in enumerate(slots)]
        self._is_storming.set()
        while not self._are_kills_over.is_set():
            await asyncio.sleep(_LOOK_S)
        healed = asyncio.create_task(self._becomes_whole())
        await asyncio.sleep(settings.quiet_s)
        if not await healed:
            # No reason to stop: who is cut off by the end of this run has lost no connection.
            self._break(
                f"not whole {settings.heal_timeout_s:.0f} s after the last kill: "
                f"{self._healing.missing}"
            )
        self._is_loading = False
        await asyncio.gather(*load)

    async def _keep_one_going(self, application: Application, slot: int) -> None:
        rng = random.Random(f"{self._settings.seed}/{slot}")
        await asyncio.sleep(rng.uniform(0, 3))
        protocols = itertools.cycle(rng.sample(list(Protocol), len(Protocol)))
        while self._is_loading:
            protocol = next(protocols)
            request = draw_request(application, rng)
            leaves = protocol is not Protocol.HTTP_WHOLE and rng.random() < LEAVES_EARLY_SHARE
            leave_after = rng.randint(1, request.max_tokens - 1) if leaves else None
            outcome = await self._clients[application.name].send(protocol, request, leave_after)
            self._book(outcome)
            if outcome.end in (End.ERROR, End.CONNECTION, End.REFUSED):
                await asyncio.sleep(_PAUSE_AFTER_FAILURE_S)

    def _book(self, outcome: Outcome) -> None:
        name = outcome.application.name
        what = f"{outcome.end} {outcome.code}".strip()
        self.result.ends[name, outcome.protocol.value, what] += 1
        self.result.num_tokens += len(outcome.token_ids)
        broken = self._judge.broken_promise(outcome)
        if broken is not None:
            at_s = outcome.ended_s - self._begun_s
            self._break(
                f"{at_s:6.1f} s {name} {outcome.protocol.value}, {len(outcome.token_ids)} of "
                f"{outcome.request.max_tokens} tokens in {outcome.ended_s - outcome.started_s:.1f}"
                f" s: {broken}"
            )

    def _break(self, promise: str) -> None:
        self.result.broken.append(promise)
        print(f"  BROKEN {promise}", flush=True)

    def _kill_and_watch(self) -> None:
        for wait_s, kind in self._plan:
            self._watch_until(time.monotonic() + wait_s)
            while self._settings.keeps_spares and not self._spares.allow(kind):
                if time.monotonic() - self._begun_s > self._settings.kills_s:
                    return
                self._watch_until(time.monotonic() + _LOOK_S)
            if time.monotonic() - self._begun_s > self._settings.kills_s:
                return
            self._kill(kind)

    def _kill(self, kind: KillKind) -> None:
        # Recorded before it happens: the first client may feel it before kill() returns.
        kill = self._cluster.kill(kind, self._rng, self.result.kills.append)
        at_s = time.monotonic() - self._begun_s
        told = "nothing of that kind is there" if kill is None else kill.victim[:60]
        print(f"{at_s:6.1f} s  {kind.value}: {told}", flush=True)

    def _watch_until(self, end_s: float) -> None:
        while time.monotonic() < end_s:
            self._healing.look()
            time.sleep(min(_LOOK_S, max(0.0, end_s - time.monotonic())))

    async def _becomes_whole(self) -> bool:
        """False if something is missing still after the time to heal."""
        end_s = time.monotonic() + self._settings.heal_timeout_s
        while not await asyncio.to_thread(self._healing.look):
            if time.monotonic() > end_s:
                return False
            await asyncio.sleep(_LOOK_S)
        return True

    async def _last_round(self) -> None:
        """Nothing is killed any more: everything must be whole, and nothing left over."""
        rng = random.Random(self._settings.seed)
        sent = []
        for index in range(self._settings.num_last_requests):
            application = self._applications[index % len(self._applications)]
            protocol = list(Protocol)[index % len(Protocol)]
            request = draw_request(application, rng)
            sent.append(self._clients[application.name].send(protocol, request, None))
        for outcome in await asyncio.gather(*sent):
            self._book(outcome)
            if outcome.end is not End.WHOLE:
                self.result.broken.append(f"last round: {outcome.end} {outcome.code}")
        await asyncio.sleep(2.0)
        for application in self._applications:
            for name in (*_IDLE_METRICS, "tessera_live_requests"):
                values = read_metric(application, name)
                if not values or any(values):
                    self.result.broken.append(f"{application.name} {name} at the end: {values}")
        self.result.broken += [f"orphan: {one}" for one in self._cluster.orphans()]
        self.result.broken += [f"unwatched: {one}" for one in self._cluster.unwatched()]
