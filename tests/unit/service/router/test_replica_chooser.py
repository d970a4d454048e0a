"""The chooser: what was sent counts as load until its first output, and as a prefix afterwards."""

import random

from service.channel.load import LoadView
from service.channel.messages import ReplicaLoad
from service.replica_chooser import ReplicaChooser
from service.routing_policy import RouterSettings, RoutingReason
from workers.protocol import EngineStats, GenerateRequest
from workers.sampling.params import SamplingParams


def request(name, prompt):
    return GenerateRequest(name, list(prompt), SamplingParams())


def made():
    return ReplicaChooser(RouterSettings(), random.Random(0)), {n: LoadView(30.0) for n in "ab"}


def send(chooser, loads, name, prompt):
    choice = chooser.choose(request(name, prompt), loads)
    chooser.on_sent(name, choice)
    return choice


def test_a_sent_request_counts_until_its_first_output_though_reports_say_nothing_of_it():
    chooser, loads = made()
    busy = send(chooser, loads, "r1", range(256)).decision.replica_id
    for load in loads.values():
        load.update(ReplicaLoad(EngineStats(), 1, False))
    for number in range(20):  # ties would be broken at random
        choice = chooser.choose(request(f"x{number}", range(1000, 1256)), loads)
        assert choice.decision.replica_id != busy
    chooser.on_first_output("r1")
    assert chooser.num_pending == 0
    chosen = {
        chooser.choose(request(f"y{number}", range(1000, 1256)), loads).decision.replica_id
        for number in range(20)
    }
    assert chosen == {"a", "b"}


def test_the_prefix_of_a_sent_request_brings_the_next_one_there_and_is_not_computed_again():
    chooser, loads = made()
    first = send(chooser, loads, "r1", range(256))
    second = send(chooser, loads, "r2", range(300))
    assert (first.uncached_tokens, second.uncached_tokens) == (256, 300 - 256)
    assert second.decision == (first.decision.replica_id, RoutingReason.PREFIX)


def test_a_reported_queue_sends_requests_away_whoever_filled_it():
    chooser, loads = made()
    loads["a"].update(ReplicaLoad(EngineStats(queued_tokens=5000), 0, False))
    assert send(chooser, loads, "r1", range(256)).decision == ("b", RoutingReason.LOAD)


def test_a_request_sent_again_counts_at_its_new_replica_only():
    chooser, loads = made()
    lost = send(chooser, loads, "r1", range(256)).decision.replica_id
    other = "ab".replace(lost, "")
    send(chooser, {other: loads[other]}, "r1", range(256))
    assert chooser.num_pending == 1
    chosen = chooser.choose(request("r2", range(1000, 1256)), loads)
    assert chosen.decision.replica_id == lost


def test_a_forgotten_replica_has_no_prefixes_and_unknown_ids_are_ignored():
    chooser, loads = made()
    sent_to = send(chooser, loads, "r1", range(256)).decision.replica_id
    chooser.on_first_output("r1")
    chooser.on_first_output("r1")
    chooser.forget(sent_to)
    assert send(chooser, loads, "r2", range(256)).decision.reason is RoutingReason.LOAD
