"""Every script in benchmarks/ that needs no GPU, short: it runs, and counts what it says it counts.

A figure in the documents is only as good as the script that gives it. Nothing here judges how fast
anything is: machines that run this are shared.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.contained import contained
from workers.builtin import builtin_model_path

ROOT = Path(__file__).parents[2]
# Modules of benchmarks/ that are no commands of their own.
PARTS = {
    "company",
    "copying_model",
    "fake_service",
    "host_facts",
    "mask_table",
    "mask_timeline",
    "model_folder",
    "overhead_cpu",
    "overhead_levels",
    "overhead_process",
    "pretended_steps",
    "routing_policies",
    "routing_simulation",
    "routing_traffic",
    "thread_clocks",
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def run(name: str, *arguments: str) -> str:
    """What `python -m benchmarks.NAME` prints. It must end with 0."""
    environment = {
        **os.environ,
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "COLUMNS": "200",
    }
    done = subprocess.run(
        contained(sys.executable, "-m", f"benchmarks.{name}", *arguments),
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def rows(printed: str, separator: str = "|") -> dict[str, list[str]]:
    """Cells of a printed table by its first one; of several tables the last row of a name."""
    cells = (
        [cell.strip() for cell in line.strip().strip(separator).split(separator)]
        for line in printed.splitlines()
        if line.strip().startswith(separator)
    )
    return {first: rest for first, *rest in cells}


def numbers(text: str) -> list[float]:
    return [float(found.replace(",", "")) for found in re.findall(r"-?\d[\d,]*\.?\d*", text)]


def test_schedule_cost_runs_the_whole_workload_under_every_policy():
    table = rows(run("schedule_cost"))
    policies = {name: numbers(" ".join(cells)) for name, cells in table.items() if name[0] != "-"}
    del policies["policy"]
    assert len(policies) > 4
    for predicted_s, num_steps, with_prompts, *_ in policies.values():
        # 512 prompts of 1,024 tokens take 11 s of prefill alone; 256 decode steps are the least.
        assert 11 < predicted_s < 40
        assert num_steps > 256
        assert with_prompts >= 64


def test_plan_cost_names_a_document_once_however_many_ask_about_it():
    arguments = ("--tokens", "4096", "--page-size", "1", "16", "--repeats", "1")
    few, many = (
        {name: numbers(" ".join(cells)) for name, cells in rows(run("plan_cost", *given)).items()}
        for given in (("--requests", "4", *arguments), ("--requests", "16", *arguments))
    )
    for page_size in (1, 16):
        name = f"greedy, page size {page_size}"
        assert (few[name][0], many[name][0]) == (4, 16)
        assert 4 * 4096 // page_size < few[name][1] < many[name][1] < few[name][1] + 12 * 1024
        assert many[f"repetition penalty, page size {page_size}"][1] > many[name][1]


def test_routing_counts_hits_where_there_is_something_to_hit():
    printed = run("routing", "--seeds", "1", "--duration-s", "2", "--jobs", "1")
    shared, multi_turn, uniform = (
        {name: numbers(cells[0])[0] for name, cells in rows(part).items() if "(" in cells[0]}
        for part in re.split(r"\n(?=multi-turn|uniform)", printed)
    )
    assert set(shared) == set(multi_turn) == set(uniform)
    assert min(*shared.values(), *multi_turn.values()) > 20
    assert set(uniform.values()) == {0.0}


def test_host_overhead_is_the_sum_of_its_parts():
    printed = run("host_overhead", "--steps", "30")
    lines = [numbers(line) for line in printed.splitlines() if re.match(r"\s+\d+\s+\d+ /", line)]
    assert [line[0] for line in lines] == [1, 64, 256]
    for _, schedule, _, launch, _, commit, _, output, _, total, *_ in lines:
        assert total == pytest.approx(schedule + launch + commit + output, rel=0.5, abs=20)


def test_drafts_wait_for_less_than_a_step_takes_the_host():
    printed = run("drafted_host_overhead", "--steps", "30")
    lines = [numbers(line) for line in printed.splitlines() if re.match(r"\s+\d+\s+\d+ /", line)]
    # Chains on one rank and on one of several, and trees.
    assert [line[0] for line in lines] == [1, 8, 64] * 3
    for _, to_launch, _, to_replay, _, behind, _, total, _ in lines:
        assert 0 < to_launch + to_replay < to_launch + to_replay + behind < total


def test_step_budget_keeps_a_target_that_steps_of_any_length_miss():
    arguments = ("--targets-ms", "50", "--loads", "32 streams")
    lines = run("step_budget", *arguments).splitlines()[2:]
    cells = [[cell.strip() for cell in line.split("|")] for line in lines]
    longest_ms = {row[2]: float(row[10]) for row in cells}
    assert longest_ms["50 ms"] < 60 < 100 < longest_ms["8192 tokens"]
    assert all(float(row[3]) > 1000 for row in cells)


def test_step_files_counts_every_file_that_a_decode_step_enters_once():
    head, *threads = run("step_files", "--steps", "32", "--requests", "2").split("\n\n")
    calls = [dict(reversed(line.split()) for line in part.splitlines()[1:]) for part in threads]
    engine, step = calls
    num_files, num_attention, num_workers = numbers(head)
    assert len({*engine, *step}) == num_files == num_attention + num_workers
    # Decision 0065: what a plain model's step does not need it does not enter.
    assert num_files < 44
    assert all((ROOT / file).is_file() for file in (*engine, *step))
    # One layer's attention in each of as many layers, and nothing of a request's beginning.
    config = json.loads((ROOT / "workers/builtin/target/config.json").read_text())
    assert float(step["attention/layer.py"]) == config["num_hidden_layers"]
    assert "workers/scheduler/submission.py" not in engine


def test_ingress_cost_tells_requests_from_tokens():
    arguments = ("--streams", "8", "--step-ms", "5", "--output-len", "32")
    token_us, request_us = numbers(run("ingress_cost", *arguments).splitlines()[0])
    assert 1 < token_us < request_us < 1e5


def test_access_log_measures_both_formats_and_both_requests():
    table = rows(run("access_log", "--requests", "60", "--rounds", "1"), "│")
    assert set(table) == {"text", "json"}
    for request, without_us, with_us, _ in table.values():
        assert request == "128 tokens streamed"
        assert min(float(without_us), float(with_us)) > 0


def test_tokenizer_lanes_keep_short_texts_from_waiting_for_long_ones():
    printed = run("tokenizer_lanes", "--seconds", "4")
    table = {name: cells for name, *cells in (line.split("|") for line in printed.splitlines())}
    one, two = (float(table[name][3]) for name in ("one lane", "two lanes"))
    assert two < 0.5 * one
    # Two lanes may answer as many as a quiet tokenizer does.
    num_quiet, num_two, num_one = (
        int(table[name][0]) for name in ("quiet", "two lanes", "one lane")
    )
    assert min(num_quiet, num_two) > num_one > 0


def test_weights_cache_reads_a_checkpoint_from_disk_once():
    printed = run("weights_cache", "--gigabytes", "0.05")
    measured = json.loads(printed.splitlines()[-1])
    assert set(measured) == {"model folder", "weights cache"}
    for replicas in measured.values():
        first, *others = (replica["disk_bytes"] for replica in replicas)
        assert first > 0.04e9
        assert sum(others) < 0.1 * first
    cached = measured["weights cache"]
    assert cached[0]["own_bytes"] < 0.5 * measured["model folder"][0]["own_bytes"]


def test_scale_from_zero_waits_for_a_start_once():
    table = rows(run("scale_from_zero", "--fake", "--cycles", "1"), "│")
    from_zero, warm = (table[name] for name in ("from zero", "with a replica"))
    assert (from_zero[3], warm[3]) == ("1", "1")
    assert float(from_zero[1]) > 10 * float(warm[1]) > 0


def test_serve_overhead_counts_every_token_of_a_paced_engine(tmp_path):
    log = tmp_path / "log"
    lengths = ("--requests-per-stream", "2", "--output-len", "32", "--input-len", "16")
    levels = ("--ways", "direct", "--streams", "8", *lengths)
    run("serve_overhead", "--fake-step-ms", "10", *levels, "--log", str(log))
    result = json.loads(log.read_text().splitlines()[-1])["result"]
    assert (result["num_ok"], result["num_output_tokens"]) == (16, 16 * 32)
    # The engine gives a token each 10 ms: whoever counts otherwise does not count tokens.
    assert result["inter_token_s"]["p50"] == pytest.approx(0.010, rel=0.3)


def test_end_to_end_sends_every_way_the_same_requests(tmp_path):
    file = tmp_path / "result"
    load = ("--num-requests", "8", "--concurrency", "4", "--output-len", "16")
    run("end_to_end", *load, "--json-file", str(file))
    reports = json.loads(file.read_text())["reports"]
    assert set(reports) == {"in process", "HTTP", "gRPC"}
    for way in reports.values():
        for report in way:
            result = report["result"]
            assert (result["num_ok"], result["num_output_tokens"]) == (8, 8 * 16)


def test_token_way_counts_tokens_of_every_way(tmp_path):
    file = tmp_path / "rows"
    run("token_way", "--streams", "64", "--seconds", "2", "--json", str(file))
    measured = json.loads(file.read_text())["rows"]
    ours, default, by_value = [row["tokens_per_s"] for row in measured[-3:]]
    assert ours > 10 * default
    assert ours > by_value
    paced = measured[0]
    assert paced["target_tokens_per_s"] == 64 / 0.02
    assert paced["tokens_per_s"] == pytest.approx(3200, rel=0.2)


def test_every_script_has_a_short_run_here():
    scripts = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - PARTS
    tried = set(re.findall(r"\brun\(\s*\"(\w+)\"", Path(__file__).read_text()))
    assert tried == scripts


def test_edit_drafts_counts_tokens_of_all_proposers():
    table = rows(run("edit_drafts", "--prompts", "2", "--max-draft-tokens", "4"))
    for method in ("ngram", "suffix", "draft:builtin-draft"):
        tokens_a_step, acceptance_length, wasted, *_ = numbers(" ".join(table[method]))
        assert 1 < tokens_a_step <= acceptance_length <= 5
        assert 0 <= wasted < 100


def test_draft_lengths_has_shares_of_every_number_of_rows():
    printed = run("draft_lengths", "--steps", "200").splitlines()
    lines = [line.split() for line in printed if line[0].isdigit()]
    # Looked up, a head's, made ahead, and a head's beside streams that end.
    assert [line[0] for line in lines] == ["1", "4", "16", "64", "128", "256"] * 4
    assert all(0 < float(line[1]) < 1.1 for line in lines)


def test_mask_overlap_counts_every_token_of_every_company():
    folder = str(builtin_model_path())
    printed = run("mask_overlap", folder, "--repeats", "1", "--device-us", "500")
    measured = [json.loads(line[line.index("{") :]) for line in printed.splitlines()]
    assert [one["constrained"] for one in measured] == ["none", "half", "all"] * 2
    assert {one["num_tokens"] for one in measured} == {64 * 256}
    assert ["late" in one for one in measured] == [False, True, True] * 2


def test_mask_threads_has_a_line_for_each_number_of_threads():
    lines = run("mask_threads", str(builtin_model_path()), "--rows", "4").splitlines()[1:]
    kinds = [
        re.match(r"\d+ (threads, (new|again|busy)|processes, new): mean", line) for line in lines
    ]
    assert lines
    assert all(kinds)
    assert {kind[1] for kind in kinds if kind} == {
        "processes, new",
        "threads, new",
        "threads, again",
        "threads, busy",
    }
    assert all(min(numbers(line)[1:]) > 0 for line in lines)


def test_mask_trace_accounts_for_every_mask_over_a_pretended_device():
    options = ("--pretend-us", "20000", "--temperature", "0", "--try", "patient")
    lines = run("h200.mask_trace", str(builtin_model_path()), *options).splitlines()
    measured = [json.loads(line) for line in lines if line.startswith("{")]
    assert [one["constrained"] for one in measured] == ["none", "half", "all"]
    assert [one.get("late") for one in measured] == [None, 0.0, 0.0]
    assert all(one["mask_cpu_us"] > 0 for one in measured[1:])
    assert sum("native, processor, busiest" in line for line in lines) == 2


def test_draft_trees_have_acceptance_lengths_within_their_depth():
    printed = run("draft_trees", "--prompts", "1", "--output-len", "12", "--temperature", "0")
    lengths = [float(line.split("|")[3]) for line in printed.splitlines()[2:]]
    assert len(lengths) == 5
    assert all(1 <= length <= 5 for length in lengths)


def test_long_copies_keep_every_draft():
    arguments = ("--context", "1024", "8192", "--methods", "draft", "eagle3")
    table = rows(run("long_copies", *arguments))
    assert {name: numbers(" ".join(table[name])) for name in ("draft", "eagle3")} == {
        "draft": [4.92, 4.92],
        "eagle3": [4.92, 4.92],
    }


def test_draft_acceptance_counts_tokens_of_each_proposer():
    arguments = ("--prompts", "2", "--max-draft-tokens", "2", "--methods", "none", "ngram")
    table = rows(run("draft_acceptance", *arguments))
    length, *_ = numbers(table["ngram"][0])
    assert 1.0 <= length <= 3.0
    assert table["none"][0] == ""
