"""The routing benchmark: every request is answered, figures repeat, and prefixes attract."""

import dataclasses

import pytest

from benchmarks.routing import NUM_REPLICAS, POLICIES, POOL_TOKENS, TRAFFICS, measure
from benchmarks.routing_simulation import Simulation
from benchmarks.routing_traffic import MultiTurn, SharedPrefix


def simulated(figures):
    """What does not depend on the machine."""
    values = dataclasses.asdict(figures)
    return {name: value for name, value in values.items() if not name.startswith("decision")}


def test_prefix_routing_has_more_hits_and_earlier_tokens_than_blind_routing():
    traffic = SharedPrefix(requests_per_s=110, num_prefixes=128)
    ours = measure(traffic, "Tessera", 3, 6.0)
    others = [measure(traffic, name, 3, 6.0) for name in ("round robin", "Serve power of two")]
    for other in others:
        assert ours.hit_rate > other.hit_rate + 0.05
        assert ours.ttft_p99_s < other.ttft_p99_s


@pytest.mark.nightly
def test_an_instruction_that_all_begin_with_does_not_draw_all_to_one_replica():
    traffic = MultiTurn(conversations_per_s=20, mean_think_s=1.0)
    figures = measure(traffic, "Tessera", 3, 4.0)
    assert figures.balance < NUM_REPLICAS / 2  # no replica computes half of everything


@pytest.mark.parametrize("policy", POLICIES)
def test_every_turn_of_every_conversation_is_answered_in_full(policy):
    conversations = list(MultiTurn(4, mean_think_s=0.5).conversations(1, 2.0))
    simulation = Simulation(POLICIES[policy], NUM_REPLICAS, POOL_TOKENS, 1)
    served = simulation.run(iter(conversations))
    assert len(served) == sum(len(one.turns) for one in conversations)
    for one in served:
        asked = one.conversation.turns[one.turn]
        assert len(one.output_token_ids) == asked.num_output_tokens
        assert one.ttft_s > 0
        assert one.request.prompt_token_ids[-len(asked.new_token_ids) :] == asked.new_token_ids


def test_the_same_seed_gives_the_same_figures():
    first, second = (measure(TRAFFICS["uniform"], "Tessera", 5, 2.0) for _ in range(2))
    assert simulated(first) == simulated(second)
    assert first.hit_rate == 0
