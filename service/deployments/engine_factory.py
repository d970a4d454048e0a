"""How a replica gets its engine: a factory that tests replace.

Knows no Ray Serve and no channel.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from workers.config import EngineConfig
from workers.engine.observer import OnStep
from workers.engine.protocol import EngineStats, GenerateRequest, ModelInfo, StepOutput
from workers.engine.rest import SleepOrder
from workers.errors import ConfigError, EngineFailedError
from workers.long_lived import settle


class EngineHandle(Protocol):
    """A running engine as its replica sees it; workers.engine.loop.EngineLoop is one.

    submit, abort, stats, drain and is_drained may be called from any thread.
    """

    @property
    def info(self) -> ModelInfo: ...

    @property
    def is_alive(self) -> bool: ...

    @property
    def last_beat_s(self) -> float:
        """time.monotonic() of the loop's last turn."""

    def start(self) -> None: ...

    def submit(self, requests: Sequence[GenerateRequest]) -> None: ...

    def abort(self, request_ids: Sequence[str]) -> None: ...

    def stats(self) -> EngineStats: ...

    def set_sleep(self, order: SleepOrder) -> None: ...

    def drain(self) -> None: ...

    def is_drained(self) -> bool: ...

    def stop(self, timeout_s: float = ...) -> None: ...


@dataclass(frozen=True, slots=True)
class EngineHooks:
    """What an engine reports to its replica.

    on_outputs: once per step, on the engine's thread; takes the outputs over. on_failure: at most
    once, when the engine cannot go on. on_progress: stage and fraction in [0, 1] while it starts.
    on_step: see workers.engine.observer.
    """

    on_outputs: Callable[[list[StepOutput]], None]
    on_failure: Callable[[BaseException], None]
    on_progress: Callable[[str, float], None]
    on_step: OnStep


class EngineFactory(Protocol):
    """Loads a model and returns its engine, not yet started.

    Raises ConfigError or ModelLoadError.
    """

    def __call__(self, config: EngineConfig, hooks: EngineHooks) -> EngineHandle: ...


def create_engine(config: EngineConfig, hooks: EngineHooks) -> EngineHandle:
    """The product's factory: in this process for one rank, with Ray actors beside it for more."""
    # Imported here because the ingress, which knows this module, must not load torch.
    from attention.capability import AttentionBackendError
    from workers.engine.loop import EngineLoop
    from workers.engine.single_rank import build_engine
    from workers.parallel.ray_followers import start_ray_followers
    from workers.parallel.tp_engine import build_tp_engine

    def on_bytes(bytes_done: int, bytes_total: int) -> None:
        hooks.on_progress("loading weights", bytes_done / max(bytes_total, 1))

    def on_rank_lost(rank: int) -> None:
        hooks.on_failure(EngineFailedError(f"tensor-parallel rank {rank} died"))

    hooks.on_progress("starting", 0.0)
    try:
        engine = (
            build_engine(config, hooks.on_step, on_bytes)
            if config.tp_size == 1
            else build_tp_engine(config, start_ray_followers, on_rank_lost, hooks.on_step, on_bytes)
        )
    except AttentionBackendError as error:
        raise ConfigError(str(error)) from error
    hooks.on_progress("warming up", 0.0)
    engine.warm_up()
    settle()
    hooks.on_progress("ready", 1.0)
    return EngineLoop(engine, hooks.on_outputs, hooks.on_failure)
