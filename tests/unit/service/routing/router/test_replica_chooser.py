"""The chooser: what was sent counts as load until its first output, then as a prefix; sessions."""

import random

import msgspec
import pytest

from service.channel.load import LoadView
from service.channel.messages import ReplicaLoad
from service.routing.policy import SPILL_FACTOR, RouterSettings, RoutingReason
from service.routing.replica_chooser import ReplicaChooser
from service.routing.session import NO_SESSION, make_session_key
from service.routing.token_ledger import TokenLedger
from workers.engine.content import ContentSpan
from workers.engine.protocol import EngineStats, GenerateRequest
from workers.sampling.params import SamplingParams

SETTINGS = RouterSettings()


def request(name, prompt):
    return GenerateRequest(name, list(prompt), SamplingParams())


class Chooser(ReplicaChooser):
    """With a ledger of its own, told as the router tells it."""

    def __init__(self, settings, clock):
        self.ledger = TokenLedger()
        self.open_ids = set()
        super().__init__(settings, self.ledger, random.Random(0), clock)

    def on_first_output(self, request_id):
        if request_id in self.open_ids:
            self.ledger.start(request_id)

    def on_end(self, request_id, written_tokens):
        if request_id in self.open_ids:
            self.open_ids.remove(request_id)
            self.ledger.close(request_id)
        super().on_end(request_id, written_tokens)


def new_chooser(settings=SETTINGS, clock=lambda: 0.0):
    return Chooser(settings, clock)


def made(names="ab"):
    return new_chooser(), {name: LoadView(30.0) for name in names}


def session(number=0):
    return make_session_key("caller", "", f"session {number}")


def choose(chooser, loads, name, prompt, session_key=NO_SESSION):
    return chooser.choose(request(name, prompt), loads, session_key)


def send(chooser, loads, name, prompt, session_key=NO_SESSION):
    choice = choose(chooser, loads, name, prompt, session_key)
    num_tokens = len(list(prompt))
    if name not in chooser.open_ids:
        chooser.open_ids.add(name)
        chooser.ledger.open(name, num_tokens)
    replica_id = choice.decision.replica_id
    chooser.ledger.send(name, replica_id, num_tokens, choice.uncached_tokens, 1)
    chooser.ledger.on_report(replica_id, 1)
    chooser.on_sent(name, choice)
    return choice


def chosen_of_many(chooser, loads):
    """Where 20 requests that share nothing would go, each were it the only one."""
    return {
        choose(chooser, loads, f"x{n}", range(1000 + 300 * n, 1256 + 300 * n)).decision.replica_id
        for n in range(20)  # ties are broken at random
    }


def report(load, **stats):
    load.update(ReplicaLoad(EngineStats(**stats), 0, False))


def test_a_sent_request_counts_until_its_first_output_though_reports_say_nothing_of_it():
    chooser, loads = made()
    busy = send(chooser, loads, "r1", range(256)).decision.replica_id
    for load in loads.values():
        report(load)
    assert chosen_of_many(chooser, loads) == set("ab") - {busy}
    chooser.on_first_output("r1")
    assert chosen_of_many(chooser, loads) == {"a", "b"}


def test_a_request_that_ends_without_output_counts_no_longer():
    chooser, loads = made()
    send(chooser, loads, "r1", range(256))
    chooser.on_end("r1", 0)
    chooser.on_end("r1", 0)
    assert chosen_of_many(chooser, loads) == {"a", "b"}


def test_the_prefix_of_a_sent_request_brings_the_next_one_there_and_is_not_computed_again():
    chooser, loads = made()
    first = send(chooser, loads, "r1", range(256))
    second = send(chooser, loads, "r2", range(300))
    assert (first.uncached_tokens, second.uncached_tokens) == (256, 300 - 256)
    assert second.decision == (first.decision.replica_id, RoutingReason.PREFIX)


def test_unlike_content_behind_equal_tokens_is_computed_again():
    chooser, loads = made("a")
    send(chooser, loads, "r1", range(512))
    plain = request("r2", range(512))
    for start, num_uncached in ((0, 512), (300, 256)):
        spans = [ContentSpan(start, 9, b"c" * 16)]
        choice = chooser.choose(msgspec.structs.replace(plain, content_spans=spans), loads)
        assert choice.uncached_tokens == num_uncached


def test_where_replicas_have_no_prefix_cache_every_token_counts_and_prefixes_bring_nobody():
    chooser, loads = made()
    chooser.ignore_prefixes()
    first = send(chooser, loads, "r1", range(256))
    second = send(chooser, loads, "r2", range(300))
    assert (first.uncached_tokens, second.uncached_tokens) == (256, 300)
    assert second.decision.replica_id != first.decision.replica_id
    assert second.decision.reason is not RoutingReason.PREFIX


def test_a_prefix_is_there_until_the_replica_reports_that_it_evicted_what_was_used_as_late():
    chooser, loads = made()
    home = send(chooser, loads, "r1", range(256)).decision.replica_id
    report(loads[home], num_prompt_tokens=256)
    chooser.on_end("r1", loads[home].written_tokens)
    for evicted, expected in ((255, RoutingReason.PREFIX), (256, RoutingReason.LOAD)):
        report(loads[home], num_prompt_tokens=10**6, evicted_ordinary=evicted)
        assert choose(chooser, loads, "r2", range(300)).decision.reason is expected


def test_a_shared_prefix_is_there_until_the_replica_reports_that_it_evicted_shared_ones():
    chooser, loads = made()
    home = send(chooser, loads, "r1", range(256)).decision.replica_id
    assert send(chooser, loads, "r2", [*range(192), *range(500, 564)]).decision.replica_id == home
    for name in ("r1", "r2"):
        chooser.on_end(name, 256)
    for evicted, expected in ((255, RoutingReason.PREFIX), (256, RoutingReason.LOAD)):
        report(loads[home], evicted_ordinary=10**6, evicted_shared=evicted)
        assert choose(chooser, loads, "r3", range(256)).decision.reason is expected


def test_a_prefix_in_use_is_not_evicted_whatever_was():
    chooser, loads = made()
    home = send(chooser, loads, "r1", range(256)).decision.replica_id
    report(loads[home], evicted_ordinary=10**9, evicted_shared=10**9)
    assert choose(chooser, loads, "r2", range(300)).decision.reason is RoutingReason.PREFIX


def test_a_reported_queue_sends_requests_away_whoever_filled_it():
    chooser, loads = made()
    report(loads["a"], queued_tokens=5000)
    assert send(chooser, loads, "r1", range(256)).decision == ("b", RoutingReason.LOAD)


def test_a_request_sent_again_counts_at_its_new_replica_only():
    chooser, loads = made()
    lost = send(chooser, loads, "r1", range(256)).decision.replica_id
    other = "ab".replace(lost, "")
    send(chooser, {other: loads[other]}, "r1", range(256))
    assert chosen_of_many(chooser, loads) == {lost}
    chooser.on_first_output("r1")
    assert chosen_of_many(chooser, loads) == {"a", "b"}


def test_a_forgotten_replica_has_no_prefixes_and_unknown_ids_are_ignored():
    chooser, loads = made()
    sent_to = send(chooser, loads, "r1", range(256)).decision.replica_id
    chooser.on_first_output("r1")
    chooser.on_first_output("r1")
    chooser.forget(sent_to)
    assert send(chooser, loads, "r2", range(256)).decision.reason is RoutingReason.LOAD


@pytest.mark.parametrize("number", range(10))
def test_choosers_that_know_nothing_of_a_session_agree_whatever_its_prompts(number):
    decisions = set()
    for index in range(5):
        chooser, loads = made("abcd")
        prompt = range(1000 * index, 1000 * index + 200)
        decisions.add(choose(chooser, loads, "r", prompt, session(number)).decision)
    assert len(decisions) == 1
    assert decisions.pop().reason is RoutingReason.SESSION


def test_a_session_stays_though_its_prompts_share_nothing_and_moves_when_its_replica_is_gone():
    chooser, loads = made("abcd")
    homes = [
        send(chooser, loads, f"r{n}", range(n * 300, n * 300 + 200), session()).decision
        for n in range(10)
    ]
    assert len(set(homes)) == 1
    del loads[homes[0].replica_id]
    chooser.forget(homes[0].replica_id)
    new = [send(chooser, loads, f"s{n}", range(100), session()).decision for n in range(5)]
    assert len({decision.replica_id for decision in new}) == 1
    assert new[0].replica_id != homes[0].replica_id


def test_a_session_that_had_to_move_does_not_return_when_its_first_replica_does():
    chooser, loads = made("abcd")
    first = send(chooser, loads, "r1", range(200), session()).decision.replica_id
    others = {name: load for name, load in loads.items() if name != first}
    second = send(chooser, others, "r2", range(200, 400), session()).decision.replica_id
    third = send(chooser, loads, "r3", range(400, 600), session()).decision
    assert third == (second, RoutingReason.SESSION)


def test_a_much_busier_replica_loses_its_session_and_a_little_busier_one_does_not():
    chooser, loads = made()
    home = send(chooser, loads, "r1", range(200), session()).decision.replica_id
    chooser.on_end("r1", 0)
    allowed = SPILL_FACTOR * 200 + SETTINGS.session_imbalance_tokens
    report(loads[home], queued_tokens=allowed)
    stays = choose(chooser, loads, "r2", range(500, 700), session())
    assert stays.decision == (home, RoutingReason.SESSION)
    report(loads[home], queued_tokens=allowed + 1)
    moves = send(chooser, loads, "r2", range(500, 700), session())
    assert moves.decision == ("ab".replace(home, ""), RoutingReason.LOAD)
    report(loads[home])
    chooser.on_end("r2", 0)
    assert choose(chooser, loads, "r3", range(900, 1100), session()).decision == (
        moves.decision.replica_id,
        RoutingReason.SESSION,
    )


def test_a_new_session_goes_where_its_prefix_is():
    for number in range(8):
        chooser, loads = made("abcd")
        holder = send(chooser, loads, "r1", range(256)).decision.replica_id
        decision = choose(chooser, loads, "r2", range(300), session(number)).decision
        assert decision == (holder, RoutingReason.PREFIX)


def test_a_silent_session_is_forgotten():
    now_s = 0.0
    chooser = new_chooser(RouterSettings(session_idle_s=5.0), lambda: now_s)
    loads = {name: LoadView(30.0) for name in "ab"}
    home = choose(chooser, loads, "r0", range(64), session()).decision.replica_id
    other = "ab".replace(home, "")
    send(chooser, {other: loads[other]}, "r1", range(64), session())
    chooser.on_end("r1", 0)
    now_s = 5.0
    assert choose(chooser, loads, "r2", range(500, 564), session()).decision.replica_id == other
    now_s = 5.1
    assert choose(chooser, loads, "r3", range(500, 564), session()).decision.replica_id == home


def test_a_known_session_stays_though_its_prefix_is_elsewhere():
    chooser, loads = made()
    home = send(chooser, loads, "first", range(256), session()).decision.replica_id
    (elsewhere,) = loads.keys() - {home}
    send(chooser, {elsewhere: loads[elsewhere]}, "other", range(1000, 1256))
    for name in ("first", "other"):
        chooser.on_first_output(name)
        chooser.on_end(name, 1)
    choice = choose(chooser, loads, "next", range(1000, 1256), session())
    assert choice.decision == (home, RoutingReason.SESSION)
