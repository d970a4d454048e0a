"""The one count of requests and queued tokens: wherever a request goes, it counts in one place."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from service.routing.token_ledger import TokenLedger

REPLICAS = "ab"


def test_a_request_is_queued_from_its_admission_to_its_answer():
    ledger = TokenLedger()
    ledger.open("r", 100)
    assert (ledger.num_requests, ledger.queued_tokens) == (1, 100)
    ledger.send("r", "a", 100, 40, sequence=1)
    assert ledger.queued_tokens == 100
    assert (ledger.at("a").uncached_tokens, ledger.at("a").unseen_tokens) == (40, 100)
    ledger.start("r")
    ledger.start("r")
    assert (ledger.num_requests, ledger.queued_tokens) == (1, 0)
    assert (ledger.at("a").uncached_tokens, ledger.at("a").num_unseen) == (0, 1)
    ledger.close("r")
    assert ledger.num_requests == ledger.at("a").num_unseen == ledger.at("a").unseen_tokens == 0


def test_it_is_unseen_until_the_report_that_includes_its_message_and_pending_on():
    ledger = TokenLedger()
    for name, sequence in (("r1", 1), ("r2", 1), ("r3", 2)):
        ledger.open(name, 10)
        ledger.send(name, "a", 10, 10, sequence)
    ledger.on_report("a", 0)
    assert (ledger.at("a").num_unseen, ledger.at("a").unseen_tokens) == (3, 30)
    ledger.on_report("a", 1)
    assert (ledger.at("a").num_unseen, ledger.at("a").unseen_tokens) == (1, 10)
    ledger.on_report("a", 2)
    assert (ledger.at("a").num_unseen, ledger.at("a").uncached_tokens) == (0, 30)


def test_what_is_sent_elsewhere_counts_there_only_and_with_its_output():
    ledger = TokenLedger()
    ledger.open("r", 100)
    ledger.send("r", "a", 100, 100, sequence=1)
    ledger.start("r")
    ledger.recall("r", 130)
    assert ledger.queued_tokens == 130
    ledger.send("r", "b", 130, 90, sequence=7)
    assert ledger.queued_tokens == 130
    assert ledger.at("a") == TokenLedger().at("a")
    assert (ledger.at("b").uncached_tokens, ledger.at("b").unseen_tokens) == (90, 130)
    ledger.close("r")
    assert ledger.queued_tokens == ledger.at("b").uncached_tokens == ledger.at("b").num_unseen == 0


def test_a_request_that_is_not_there_is_a_mistake():
    ledger = TokenLedger()
    for call in (ledger.start, ledger.close):
        with pytest.raises(KeyError):
            call("r")


class AnyLife(RuleBasedStateMachine):
    """Against what one would count by looking at every request."""

    def __init__(self):
        super().__init__()
        self.ledger = TokenLedger()
        self.expected = {}
        self.num_opened = 0
        self.sequence = 0

    @rule(num_tokens=st.integers(1, 50))
    def admit(self, num_tokens):
        self.num_opened += 1
        name = f"r{self.num_opened}"
        self.ledger.open(name, num_tokens)
        self.expected[name] = {"tokens": num_tokens, "at": "", "queued": True, "seen": True}

    @precondition(lambda self: self.expected)
    @rule(data=st.data(), replica=st.sampled_from(REPLICAS), share=st.floats(0, 1))
    def send(self, data, replica, share):
        name = data.draw(st.sampled_from(sorted(self.expected)))
        num_tokens = self.expected[name]["tokens"] + 3
        uncached = int(share * num_tokens)
        self.sequence += 1
        self.ledger.send(name, replica, num_tokens, uncached, self.sequence)
        self.expected[name] = {
            "tokens": num_tokens,
            "uncached": uncached,
            "at": replica,
            "queued": True,
            "seen": False,
        }

    @precondition(lambda self: self.expected)
    @rule(data=st.data(), is_end=st.booleans())
    def answer(self, data, is_end):
        name = data.draw(st.sampled_from(sorted(self.expected)))
        if is_end:
            self.ledger.close(name)
            del self.expected[name]
        else:
            self.ledger.start(name)
            self.expected[name]["queued"] = False

    @rule(replica=st.sampled_from(REPLICAS))
    def report(self, replica):
        self.ledger.on_report(replica, self.sequence)
        for one in self.expected.values():
            one["seen"] = one["seen"] or one["at"] == replica

    @invariant()
    def the_sums_are_right(self):
        queued = [one for one in self.expected.values() if one["queued"]]
        assert self.ledger.num_requests == len(self.expected)
        assert self.ledger.queued_tokens == sum(one["tokens"] for one in queued)
        for replica in REPLICAS:
            there = [one for one in self.expected.values() if one["at"] == replica]
            unseen = [one for one in there if not one["seen"]]
            queue = self.ledger.at(replica)
            assert queue.uncached_tokens == sum(one["uncached"] for one in there if one["queued"])
            assert queue.num_unseen == len(unseen)
            assert queue.unseen_tokens == sum(one["tokens"] for one in unseen)


TestAnyLife = AnyLife.TestCase
TestAnyLife.settings = settings(max_examples=60, deadline=None, derandomize=True)
