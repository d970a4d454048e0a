"""What the load patterns need of a way to a server. One class a protocol implements it."""

from dataclasses import dataclass
from typing import Protocol

from service.bench.trace import RequestTrace
from service.bench.workload import BenchRequest


class TargetError(Exception):
    """There is nothing to measure: no server, no model, or a target that cannot take the workload.

    The message says what to do about it.
    """


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """What the target says about itself. None: it does not say."""

    model: str
    vocab_size: int | None = None
    max_context_len: int | None = None


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """What every request has in common besides its prompt and length.

    ignore_eos: generate max_tokens whatever the model says, so that lengths are as asked.
    cache_salt: cached prefixes are shared only with requests of the same salt; "" sends none.
    """

    temperature: float = 0.0
    ignore_eos: bool = True
    cache_salt: str = ""


class Transport(Protocol):
    """connect() comes first and aclose() last."""

    async def connect(self) -> TargetInfo:
        """Reach the target. Raises TargetError."""
        ...

    async def send(self, request: BenchRequest, trace: RequestTrace) -> None:
        """Run one request and fill in its trace. Raises RequestFailedError."""
        ...

    async def aclose(self) -> None: ...
