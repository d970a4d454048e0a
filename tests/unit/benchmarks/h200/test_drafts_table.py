"""The table of drafts beside peers: what of the logs comes into it, and who is ahead of whom."""

import json
from pathlib import Path

import pytest

from benchmarks.h200.drafts_table import main


def line(engine: str, drafts: str, streams: int, ms_a_token: float) -> str:
    is_plain = drafts == "plain"
    return json.dumps(
        {
            "engine": engine,
            "drafts": drafts,
            "verified": 1 if is_plain else 4,
            "acceptance": None if is_plain else 3.0,
            "streams": streams,
            "ms_a_token": ms_a_token,
            "all_ms": [ms_a_token],
            "tokens_a_step": None if is_plain else 2.98,
        }
    )


def test_our_fastest_drafts_stand_beside_plain_decoding_and_each_peers_fastest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, peers = tmp_path / "ours.log", tmp_path / "peers.log"
    ours.write_text(
        "\n".join(
            [
                '{"drafts": "plain", "start_s": 12.0}',
                line("tessera", "plain", 1, 4.0),
                line("tessera", "plain", 256, 10.0),
                "a warning",
                line("tessera", "chain of 3", 1, 1.6),
                line("tessera", "chain of 5", 1, 2.0),
                line("tessera", "chain of 3", 256, 12.5),
            ]
        )
    )
    peers.write_text(
        "\n".join(
            [
                '{"engine": "vllm", "drafts": "chain of 3", "start_s": 70.0}',
                "loading..." + line("vllm", "chain of 3", 1, 2.4) + " done",
                line("vllm", "chain of 3", 256, 20.0),
                line("vllm", "plain", 256, 11.25),
            ]
        )
    )
    assert main([str(ours), str(peers)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "| engine | drafts | acceptance | 1 | 256 |"
    assert "| tessera | plain |  | 4.000 | 10.000 |" in printed
    assert "| tessera | chain of 5 | 3 | 2.000 (2.98) |  |" in printed
    assert "| vllm | chain of 3 | 3 | 2.400 (2.98) | 20.000 (2.98) |" in printed
    assert printed[-2:] == [
        "1 streams at 3: chain of 3 1.600 ms, 2.50 of our plain decoding's speed (plain), "
        "1.50 of vllm's speed (chain of 3)",
        "256 streams at 3: chain of 3 12.500 ms, 0.80 of our plain decoding's speed (plain), "
        "0.90 of vllm's speed (plain)",
    ]


def test_logs_without_a_measurement_are_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.log").write_text('Traceback ...\n{"engine": "vllm", "start_s": 3.0}\n')
    assert main([str(tmp_path / "empty.log")]) == 1
    assert "no measurement" in capsys.readouterr().err
