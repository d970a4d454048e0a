"""A FakeBackend's script that a real engine plays, one request after the other, as a frame brings
it: what a channel would carry is encoded and decoded.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from tests.fakes.text import Bench, make_bench
from workers.config import EngineConfig
from workers.engine.protocol import GenerateRequest, StepOutput
from workers.engine.single_rank import build_engine
from workers.errors import RequestRejectedError

_DECODER = msgspec.msgpack.Decoder(GenerateRequest)


class EngineScript:
    """close() it at the end."""

    def __init__(self, config: EngineConfig) -> None:
        self.engine = build_engine(config, lambda record: None, lambda done, total: None)

    def __call__(self, request: GenerateRequest) -> Sequence[StepOutput]:
        received = _DECODER.decode(msgspec.msgpack.encode(request))
        try:
            self.engine.submit(received)
        except RequestRejectedError as error:
            raise AssertionError(f"the service let through: {error.message}") from error
        outputs: list[StepOutput] = []
        while self.engine.has_work:
            outputs += self.engine.step()
        self.engine.check_integrity()
        return outputs

    def close(self) -> None:
        self.engine.close()


def engine_bench(folder: Path, script: EngineScript) -> Bench:
    """folder: for the tokenizer's files. The model has the byte-level tokenizer's vocabulary."""
    return make_bench(folder, script, info=script.engine.info)
