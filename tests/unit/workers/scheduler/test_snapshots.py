"""Where steps save states, and for whom."""

from tests.unit.workers.scheduler.driver import Driver, make_config, make_request
from tests.unit.workers.scheduler.history_runner import run_alone
from workers.scheduler import prefills_under_way, snapshot_memory


def test_what_a_prompt_saves_for_itself_serves_one_that_parts_there(monkeypatch) -> None:
    """A chunk ends where its request rolls a snapshot on, and where another prompt leaves it."""
    monkeypatch.setattr(snapshot_memory, "BORDER_TOKENS", 4)
    monkeypatch.setattr(snapshot_memory, "PROMPT_ROLL_TOKENS", 16)
    monkeypatch.setattr(prefills_under_way, "MIN_SAVED_TOKENS", 8)
    driver = Driver(make_config(num_snapshots=8, max_step_tokens=16))
    stem = [2 + index % 25 for index in range(16)]
    requests = [
        make_request("long", [*stem, *range(2, 28)]),
        make_request("other", [*stem, 30, 31]),
    ]
    driver.submit(*requests)
    driver.finish()
    assert driver.plans[0].state_saves.positions.tolist() == [16]
    assert driver.outputs["other"][0].num_cached_tokens == 16
    for one in requests:
        assert driver.tokens(one.request_id) == run_alone(driver.config, one).token_ids
