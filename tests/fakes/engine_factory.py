"""Engine factories for replicas under test: a fake engine behind the real loop."""

from dataclasses import dataclass

from tests.fakes.engine import FakeEngine
from workers.engine.loop import EngineLoop


@dataclass(frozen=True)
class FakeEngineFactory:
    """Picklable EngineFactory. vocab_size: that of the tokenizer in front of it."""

    step_s: float = 0.005
    vocab_size: int = 4096
    max_running: int = 256
    default_max_tokens: int = 16

    def __call__(self, config, hooks):
        hooks.on_progress("loading", 0.5)
        engine = FakeEngine(
            step_s=self.step_s,
            vocab_size=self.vocab_size,
            max_running=self.max_running,
            default_max_tokens=self.default_max_tokens,
            model_name=config.served_model_name or config.model,
        )
        return EngineLoop(engine, hooks.on_outputs, hooks.on_failure)
