"""The driver's order: what an engine does while idle is no part of what is measured."""

import json

from benchmarks.h200.driver import Job, measure


def test_an_engine_settles_before_each_repeat(tmp_path, capsys):
    told = []

    def generate(prompts, max_tokens):
        told.append("asked")
        return list(max_tokens)

    job = Job(tmp_path / "config.json", "smoke", 2, 1, 1)
    measure("ours", job, generate, 0.0, lambda: told.append("settled"))
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    repeats = [row["repeat"] for row in rows[1:]]
    num_asked = [len(part) for part in "".join(one[0] for one in told).split("s")]
    assert told[0] == "settled"
    # At the start, before the warm-up, and before each repeat of as many requests.
    assert told.count("settled") == 3
    assert num_asked[2] == num_asked[3] > 0
    assert sorted(set(repeats)) == [0, 1]
