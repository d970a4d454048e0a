"""Tells the registry which requests of an ingress wait for a first replica of one model.

At once when the first of them arrives, then again and again. Runs on the ingress's event loop.
Knows no Ray: a send that fails is whoever's who gave it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from service.autoscaling.load import DemandReport
from workers.engine.protocol import ModelInfo

REPORT_INTERVAL_S = 1.0


class Demand(Protocol):
    """What waits; service.routing.router.Router is one."""

    demand_changed: asyncio.Event

    @property
    def known_model(self) -> ModelInfo | None: ...

    @property
    def num_waiting_requests(self) -> int: ...

    @property
    def num_waiting_tokens(self) -> int: ...


async def report_demand(
    key: str, ingress_id: str, demand: Demand, send: Callable[[DemandReport], Awaitable[None]]
) -> None:
    """For ever, until cancelled. send must not raise on what a next attempt may mend."""
    while True:
        demand.demand_changed.clear()
        report = DemandReport(
            key,
            ingress_id,
            demand.num_waiting_requests,
            demand.num_waiting_tokens,
            demand.known_model,
        )
        await send(report)
        try:
            await asyncio.wait_for(demand.demand_changed.wait(), REPORT_INTERVAL_S)
        except TimeoutError:
            continue
