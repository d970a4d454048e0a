"""The host benchmark measures what it says: real steps over a device that is only a clock."""

from benchmarks.host_overhead import PARTS, measure, table_of


def test_every_part_of_every_step_is_measured() -> None:
    rows = [measure(num, num_steps=6, device_s=0.0) for num in (1, 5)]
    for row in rows:
        assert {part: len(row.parts[part]) for part in PARTS} == dict.fromkeys(PARTS, 6)
        assert 0.0 < row.percentile_us("schedule", 50) <= row.percentile_us("schedule", 99)
        assert row.host_us(50) >= row.percentile_us("launch", 50)
    lines = table_of(rows).splitlines()
    assert [line.split()[0] for line in lines] == ["requests", "1", "5"]


def test_a_slower_device_hides_the_host() -> None:
    """Once of five: where a busy machine holds a step up, the next one looks shorter."""
    rows = (measure(2, num_steps=8, device_s=0.02) for _ in range(5))
    assert any(19_000 < row.step_us < 30_000 and row.host_us(50) < 20_000 for row in rows)
