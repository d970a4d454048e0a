"""A follower rank: a Ray actor that loads its shard, joins the group and runs plans until told.

Ray starts it and notices its death; plans and collectives go past Ray. Knows no scheduler.
"""

import logging
import os
import threading
import time
from pathlib import Path

from workers.config import EngineConfig
from workers.long_lived import settle
from workers.parallel.plan_channel import PlanReceiver, Preparation
from workers.parallel.rendezvous import connect_rank, plan_socket_path
from workers.runner.factory import make_model_runner
from workers.runner.sizing import resolve_device

logger = logging.getLogger(__name__)

FAILED_RANK_EXIT_CODE = 70
ORPHAN_END_S = 10.0


class RankProcess:
    """Rank `rank` of an engine: a Ray actor whose one call, run, lasts as long as it does."""

    def __init__(self, config: EngineConfig, rank: int, directory: str, auth_key: bytes) -> None:
        self._config = config
        self._rank = rank
        self._directory = Path(directory)
        self._auth_key = auth_key

    def run(self) -> None:
        """Load, join and run plans until rank 0 closes the plan channel; then end the process.

        A rank that cannot go on ends its process at once: the closed socket tells rank 0, and a
        half-alive rank would only block the others in their next collective.
        """
        try:
            self._run()
        except BaseException:
            logger.exception("rank %d failed", self._rank)
            os._exit(FAILED_RANK_EXIT_CODE)
        os._exit(0)

    def _log_progress(self, bytes_done: int, bytes_total: int) -> None:
        logger.debug("rank %d: %d of %d weight bytes", self._rank, bytes_done, bytes_total)

    def _run(self) -> None:
        device = resolve_device(self._config)
        receiver = PlanReceiver(plan_socket_path(self._directory), self._auth_key, self._rank)
        threading.Thread(target=_end_with_rank_0, args=(receiver,), daemon=True).start()
        tp = connect_rank(self._config, self._directory, self._rank, device)
        runner = make_model_runner(self._config, tp, device, self._log_progress)
        runner.take_masks_from(receiver)
        settle()
        while (received := receiver.receive()) is not None:
            if isinstance(received, Preparation):
                runner.prepare_while_idle()
            else:
                runner.run_follower(received)
        runner.close()
        tp.close()


def _end_with_rank_0(receiver: PlanReceiver) -> None:
    """End this process some time after rank 0 went away, whatever it waits for.

    A step under way that rank 0 did not live to take part in never ends on this rank's device.
    """
    receiver.wait_for_hang_up()
    time.sleep(ORPHAN_END_S)
    logger.error("rank 0 is gone and a step under way did not end")
    os._exit(FAILED_RANK_EXIT_CODE)
