"""Sends chats of hostile_constraints and judges how and how soon they are answered."""

import random
import time

import httpx

from tests.integration.fuzz.busy_machine import ANSWER as BUSY
from tests.integration.fuzz.busy_machine import is_of_a_busy_machine
from tests.integration.fuzz.hostile_constraints import MAKERS
from tests.integration.fuzz.tally import Tally

SOURCE = "hostile constraints"
CHATS_PER_BATCH = 4
_TIMEOUT_S = 60.0


class HostileChats:
    """One connection, one chat at a time."""

    def __init__(self, model: str, url: str, tally: Tally, seed: int) -> None:
        self._model = model
        self._client = httpx.Client(base_url=url, timeout=_TIMEOUT_S)
        self._tally = tally
        self._random = random.Random(seed)
        self.longest_s: dict[str, float] = {}

    def run_batch(self) -> None:
        for _ in range(CHATS_PER_BATCH):
            maker = self._random.choice(MAKERS)
            self._chat(maker.__name__, maker(self._random))

    def close(self) -> None:
        self._client.close()

    def report(self) -> str:
        times = sorted(self.longest_s.items(), key=lambda item: -item[1])
        shown = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in times)
        return f"longest until an answer to {SOURCE}: {shown}"

    def _chat(self, name: str, fields: dict[str, object]) -> None:
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": 4,
            "stream": self._random.random() < 0.3,
            **fields,
        }
        started_s = time.perf_counter()
        answer = self._client.post("/v1/chat/completions", json=body)
        seconds = time.perf_counter() - started_s
        self.longest_s[name] = max(self.longest_s.get(name, 0.0), seconds)
        if is_of_a_busy_machine(answer):
            self._tally.count(SOURCE, BUSY)
            return
        code = "" if answer.status_code == 200 else f" {answer.json()['error']['code']}"
        self._tally.count(SOURCE, f"{answer.status_code}{code}")
        if answer.status_code >= 500 or '"error"' in answer.text[-2000:] and not code:
            self._tally.fail(SOURCE, f"{name}: {answer.status_code} {answer.text[-500:]}")
