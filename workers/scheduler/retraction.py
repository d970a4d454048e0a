"""Takes running requests back to the queue when pages run out."""

from workers.errors import IntegrityError
from workers.scheduler.ledger import Counters
from workers.scheduler.output_forecast import OutputForecast
from workers.scheduler.request_memory import RequestMemory
from workers.scheduler.running_table import RunningTable
from workers.scheduler.waiting_queue import WaitingQueue


class Retractor:
    """The victim is the request of lowest priority that came last.

    The first request in that order is never retracted while another runs, so that it always comes
    to its end, and after it the next. Whoever needs the pages takes at least one before admission
    looks again, so that a victim does not come back in the same step.
    """

    def __init__(
        self,
        table: RunningTable,
        memory: RequestMemory,
        waiting: WaitingQueue,
        forecast: OutputForecast,
        counters: Counters,
    ) -> None:
        self._table = table
        self._memory = memory
        self._waiting = waiting
        self._forecast = forecast
        self._counters = counters

    def retract_one(self) -> None:
        """Only while no step is under way: the output that the host knows must be complete.

        Raises IntegrityError when a single request runs: it was accepted because it fits alone.
        """
        requests = self._table.requests()
        if len(requests) < 2:
            raise IntegrityError(
                f"{len(requests)} requests run and yet no page can be had; "
                f"{len(self._waiting)} are waiting"
            )
        victim = max(requests, key=lambda request: request.sort_key)
        self._memory.release(victim)
        victim.forget_progress()
        self._waiting.push(victim)
        self._forecast.on_retraction()
        self._counters.num_preemptions += 1
