"""The two applications that the run kills parts of, and what their requests must answer.

Knows configuration and token ids. Knows no process and no socket.
"""

import random
from dataclasses import dataclass, field
from typing import Any

from service.config import ServeConfig, parse_config

VOCAB_SIZE = 4096
NUM_PROMPTS = 12
HEARTBEAT_TIMEOUT_S = 5.0
STEP_TIMEOUT_S = 15.0
HEALTH_CHECK_TIMEOUT_S = 3.0
# A client may send one more request over a connection that it has: twice the longest answer.
DRAIN_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Application:
    """One deployed service. max_tokens: bounds of what a request asks for."""

    name: str
    base_port: int
    num_replicas: int
    num_ingresses: int
    tp_size: int
    cpus_per_rank: float
    is_fake: bool
    max_tokens: tuple[int, int]

    @property
    def config(self) -> ServeConfig:
        settings: dict[str, Any] = {
            "app_name": self.name,
            "num_replicas": self.num_replicas,
            "num_ingresses": self.num_ingresses,
            "drain_timeout_s": DRAIN_TIMEOUT_S,
            "http": {"port": self.base_port},
            "grpc": {"port": self.base_port + 1},
            "metrics": {
                "port": self.base_port + 2,
                "push_interval_s": 0.5,
                "expire_after_s": 3.0,
            },
            "replica": {
                "cpus_per_rank": self.cpus_per_rank,
                "step_timeout_s": STEP_TIMEOUT_S,
                "health_check_timeout_s": HEALTH_CHECK_TIMEOUT_S,
            },
            "channel": {"transport": "unix+tcp", "heartbeat_timeout_s": HEARTBEAT_TIMEOUT_S},
            "logging": {"is_access_log_enabled": False},
            "engine": {
                "tp_size": self.tp_size,
                "kv_cache_bytes": 64 << 20,
                "num_cpu_threads": 1,
                "check_integrity_when_idle": True,
            },
        }
        return parse_config(settings)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.base_port}"

    @property
    def grpc_address(self) -> str:
        return f"127.0.0.1:{self.base_port + 1}"

    @property
    def metrics_url(self) -> str:
        return f"http://127.0.0.1:{self.base_port + 2}/metrics"


FAKE = Application("chaos-fake", 18700, 3, 2, 1, 1.0, True, (20, 120))
REAL = Application("chaos-real", 18710, 2, 2, 2, 0.5, False, (20, 80))


@dataclass(frozen=True, slots=True)
class Request:
    """One request. index: which of NUM_PROMPTS prompts, for engines whose answers are recorded.
    sampling: parameters that HTTP and gRPC call alike."""

    index: int
    prompt: list[int]
    max_tokens: int
    sampling: dict[str, float] = field(default_factory=lambda: {"temperature": 0.0})


@dataclass(frozen=True, slots=True)
class Answer:
    """text: None where it is not known, for it follows from the tokens."""

    token_ids: list[int]
    text: str | None = None


def draw_request(application: Application, rng: random.Random) -> Request:
    """Requests to real engines repeat: their answers must be known. Those of fake ones need not."""
    if application.is_fake:
        max_tokens = rng.randint(*application.max_tokens)
        prompt = [rng.randrange(4, VOCAB_SIZE) for _ in range(rng.randint(1, 60))]
        return Request(0, prompt, max_tokens)
    return recorded_request(application, rng.randrange(NUM_PROMPTS))


def recorded_request(application: Application, index: int) -> Request:
    """Always the same for an index: greedy, seeded, and seeded with penalties, in turn."""
    rng = random.Random(index)
    prompt = rng.choices(range(4, VOCAB_SIZE), k=8 + 7 * index)
    return Request(index, prompt, rng.randint(*application.max_tokens), _SAMPLINGS[index % 3])


_SAMPLINGS: list[dict[str, float]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 17},
    {"temperature": 0.8, "seed": 18, "frequency_penalty": 0.8, "presence_penalty": 0.3},
]


class Answers:
    """What a request must get: both kinds of engine are deterministic, seeds being given."""

    def __init__(self) -> None:
        self._recorded: dict[int, Answer] = {}

    def record(self, index: int, answer: Answer) -> None:
        """What the healthy service answered to recorded_request(index)."""
        self._recorded[index] = answer

    def expected(self, application: Application, request: Request) -> Answer:
        if not application.is_fake:
            return self._recorded[request.index]
        first = request.prompt[-1] + 1
        return Answer([(first + i) % VOCAB_SIZE for i in range(request.max_tokens)])
