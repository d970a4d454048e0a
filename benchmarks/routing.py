"""How well requests are routed: our policy against three others, four replicas, three traffics.

    python -m benchmarks.routing [--seeds 5] [--first-seed 0] [--duration-s 20] [--jobs 2]

Simulated time (benchmarks.routing_simulation): only the decision times depend on this machine.
Prints one table per traffic: the median over the seeds and, in brackets, the least and the most.
"""

import argparse
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields

import numpy as np

from benchmarks.routing_policies import (
    Policy,
    PowerOfTwo,
    RayPrefix,
    RayPrefixBalanced,
    RoundRobin,
    Tessera,
)
from benchmarks.routing_simulation import Simulation
from benchmarks.routing_traffic import MultiTurn, SharedPrefix, Traffic, Uniform

NUM_REPLICAS = 4
POOL_TOKENS = 100_000
"""KV memory of a replica: less than what all conversations or instructions together need."""
WARM_UP_PART = 0.25
"""Requests that arrive in this part of the duration, while caches fill, are not counted."""

POLICIES: dict[str, Callable[[list[str], int, Callable[[], float]], Policy]] = {
    "Tessera": Tessera,
    "round robin": RoundRobin,
    "Serve power of two": PowerOfTwo,
    "Ray prefix": RayPrefix,
    "Ray prefix, threshold 10": RayPrefixBalanced,
}
TRAFFICS: dict[str, Traffic] = {
    "shared prefix": SharedPrefix(requests_per_s=150),
    "multi-turn": MultiTurn(conversations_per_s=28),
    "uniform": Uniform(requests_per_s=58),
}


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one run. hit_rate: cached prompt tokens of all prompt tokens. balance: tokens computed by
    the busiest replica over the mean. busy: share of the arrivals' time that replicas computed."""

    hit_rate: float
    ttft_p50_s: float
    ttft_p99_s: float
    balance: float
    busy: float
    decision_p50_us: float
    decision_p99_us: float


def measure(traffic: Traffic, policy: str, seed: int, duration_s: float) -> Figures:
    simulation = Simulation(POLICIES[policy], NUM_REPLICAS, POOL_TOKENS, seed)
    every = simulation.run(traffic.conversations(seed, duration_s))
    served = [one for one in every if one.arrival_s >= WARM_UP_PART * duration_s]
    prompt_tokens = sum(len(one.request.prompt_token_ids) for one in served)
    ttft_p50_s, ttft_p99_s = np.percentile([one.ttft_s for one in served], (50, 99))
    decision_us = np.percentile([one.decision_s * 1e6 for one in served], (50, 99))
    computed = [replica.num_tokens_computed for replica in simulation.replicas.values()]
    busy_s = sum(replica.busy_s for replica in simulation.replicas.values())
    last_s = max(one.arrival_s for one in every)
    return Figures(
        hit_rate=sum(one.num_cached_tokens for one in served) / prompt_tokens,
        ttft_p50_s=float(ttft_p50_s),
        ttft_p99_s=float(ttft_p99_s),
        balance=max(computed) / statistics.mean(computed),
        busy=busy_s / (NUM_REPLICAS * last_s),
        decision_p50_us=float(decision_us[0]),
        decision_p99_us=float(decision_us[1]),
    )


def _measure(task: tuple[str, str, int, float]) -> Figures:
    traffic, policy, seed, duration_s = task
    return measure(TRAFFICS[traffic], policy, seed, duration_s)


def _cell(values: list[float], pattern: str, factor: float = 1.0) -> str:
    middle, least, most = statistics.median(values), min(values), max(values)
    texts = [format(value * factor, pattern) for value in (middle, least, most)]
    return f"{texts[0]} ({texts[1]} to {texts[2]})"


def _row(policy: str, runs: list[Figures]) -> str:
    columns = {one.name: [getattr(run, one.name) for run in runs] for one in fields(Figures)}
    cells = [
        policy,
        _cell(columns["hit_rate"], ".1f", 100),
        _cell(columns["ttft_p50_s"], ".0f", 1e3),
        _cell(columns["ttft_p99_s"], ".0f", 1e3),
        _cell(columns["balance"], ".2f"),
        _cell(columns["busy"], ".0f", 100),
        f"{statistics.median(columns['decision_p50_us']):.0f} / "
        f"{statistics.median(columns['decision_p99_us']):.0f}",
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--duration-s", type=float, default=20.0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--traffic", choices=TRAFFICS, action="append")
    parser.add_argument("--policy", choices=POLICIES, action="append")
    arguments = parser.parse_args()
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    with ProcessPoolExecutor(arguments.jobs) as pool:
        for traffic in arguments.traffic or TRAFFICS:
            print(f"\n{traffic}\n")
            print("| policy | hit rate % | TTFT p50 ms | TTFT p99 ms | balance | busy % | us |")
            print("|---|---|---|---|---|---|---|", flush=True)
            for policy in arguments.policy or POLICIES:
                tasks = [(traffic, policy, seed, arguments.duration_s) for seed in seeds]
                print(_row(policy, list(pool.map(_measure, tasks))), flush=True)


if __name__ == "__main__":
    main()
