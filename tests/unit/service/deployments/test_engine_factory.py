"""The product's own factory of engines."""

import gc

from service.deployments.engine_factory import EngineHooks, create_engine
from workers.config import EngineConfig


def test_what_an_engine_is_made_of_is_no_work_of_the_garbage_collector():
    """A full collection would hold every stream of the engine."""
    stages = []
    hooks = EngineHooks(
        on_outputs=lambda outputs: None,
        on_failure=lambda error: None,
        on_progress=lambda stage, fraction: stages.append(stage),
        on_step=lambda *_: None,
    )
    gc.unfreeze()
    handle = create_engine(EngineConfig(model="builtin", num_pages=64), hooks)
    num_frozen, num_others = gc.get_freeze_count(), len(gc.get_objects())
    handle.start()
    handle.stop()
    assert stages[-1] == "ready"
    assert num_frozen > 50 * num_others
