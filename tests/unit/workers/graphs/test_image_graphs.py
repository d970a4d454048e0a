"""Images beside decode graphs, on a CPU: steps that show one are no replays, the others are."""

import numpy as np

from tests.fakes.tiny_vision import image, prompt_of, save_vision_model
from tests.unit.workers.engine.test_images import request_of
from tests.unit.workers.graphs.test_decode_graphs import CPU, MAX_ROWS
from tests.unit.workers.graphs.test_state_graphs import StateGraphsRunner
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.parallel.group import SingleRank
from workers.runner.model_runner import ModelRunner

WIDE, TALL, DOT = image(1, 4, 10), image(2, 12, 6), image(3, 2, 2)
# The one without images goes on when the others have ended.
LENGTHS = {"two": 6, "text": 40, "wide": 12, "dots": 3}
PROMPTS = {
    "two": prompt_of(3, TALL, 4, WIDE, 2),
    "text": prompt_of(12),
    "wide": prompt_of(5, WIDE, 7),
    "dots": prompt_of(DOT, 9, DOT, seed=1),
}


def generate(config, runner):
    engine = Engine.of_runner(config, runner)
    for name, prompt in PROMPTS.items():
        engine.submit(request_of(prompt, name, max_tokens=LENGTHS[name]))
    told = {name: [] for name in PROMPTS}
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            told[output.request_id] += output.token_ids
        engine.check_integrity()
    (stage,) = runner._media
    kept = stage.num_bytes, stage.num_slots
    engine.close()
    return told, kept


def test_text_is_replayed_when_no_row_shows_an_image_and_drops_what_they_left(tmp_path) -> None:
    config = EngineConfig(
        model=str(save_vision_model(tmp_path)), page_size=16, max_running_requests=MAX_ROWS
    )
    wanted, kept = generate(config, ModelRunner(config, SingleRank(), CPU, print))
    assert kept == (0, 0)
    runner = StateGraphsRunner(config, SingleRank(), CPU, print)
    assert runner._model.capture_obstacle(512) == ""
    runner.use_graphs([1, 4, MAX_ROWS])
    for size in (1, 4, MAX_ROWS):
        runner.graphs.capture(size)
    replayed, run = [], runner.graphs.run

    def watching(plan, sampling):
        replayed.append(plan.slots.tolist())
        return run(plan, sampling)

    runner.graphs.run = watching
    told, kept = generate(config, runner)
    assert told == wanted
    assert kept == (0, 0)
    # All rows of text alone, and of nothing else.
    assert {len(slots) for slots in replayed} == {1}
    assert len(np.unique(replayed)) == 1
    assert LENGTHS["text"] - LENGTHS["wide"] - 3 < len(replayed) < LENGTHS["text"]
