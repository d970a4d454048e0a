"""What each end of a request needs to be allowed: which kills, how long before it.

Pure: outcomes and kills in, a broken promise as text or None out.
"""

from collections.abc import Sequence

from tests.integration.chaos.applications import (
    HEARTBEAT_TIMEOUT_S,
    STEP_TIMEOUT_S,
    Answer,
    Answers,
    Application,
)
from tests.integration.chaos.clients import End, Outcome
from tests.integration.chaos.kills import Kill, KillKind

# From the harm until every client has been told. Half a second of it is the measuring itself.
NOTICE_S = {
    KillKind.STOP: HEARTBEAT_TIMEOUT_S + 5.0,
    KillKind.STOP_START: HEARTBEAT_TIMEOUT_S + 5.0,
    KillKind.STOP_RANK: STEP_TIMEOUT_S + 8.0,
}
KILL_NOTICE_S = 8.0
# A connection to a process that is gone breaks at once; one that was waiting to be accepted, too.
CONNECTION_NOTICE_S = 3.0
# Within this time after a loss, replicas may still be missing.
HEAL_S = 120.0


class Judge:
    """Over all kills of a run. keeps_spares: every kill left a live engine of each application, so
    that no stream may be lost."""

    def __init__(self, answers: Answers, kills: Sequence[Kill], *, keeps_spares: bool) -> None:
        self._answers = answers
        self._kills = kills
        self._keeps_spares = keeps_spares

    def broken_promise(self, outcome: Outcome) -> str | None:
        """None if the request ended as it may."""
        expected = self._answers.expected(outcome.application, outcome.request)
        if outcome.token_ids != expected.token_ids[: len(outcome.token_ids)]:
            return "wrong tokens"
        match outcome.end:
            case End.WHOLE:
                return _judge_whole(outcome, expected)
            case End.LEFT:
                return None
            case End.ERROR:
                return self._judge_error(outcome)
            case End.CONNECTION:
                return self._judge_connection(outcome)
            case End.REFUSED:
                return self._judge_refusal(outcome)
            case _:
                return str(outcome.end)

    def _judge_error(self, outcome: Outcome) -> str | None:
        if outcome.code in ("replica_lost", "unavailable"):
            if self._keeps_spares:
                return f"{outcome.code} while another replica lives"
            lost = self._engines_lost(outcome.application, outcome.started_s - HEAL_S, outcome)
            if lost >= outcome.application.num_replicas:
                return None
            return f"{outcome.code} after only {lost} engines were lost"
        return f"error {outcome.code}: {outcome.message}"

    def _engines_lost(self, application: Application, since_s: float, outcome: Outcome) -> int:
        """Engines whose loss a request may have felt between since_s and its end."""
        return sum(
            kill.num_engines.get(application.name, 0)
            for kill in self._kills
            if kill.at_s <= outcome.ended_s
            and kill.at_s + NOTICE_S.get(kill.kind, KILL_NOTICE_S) >= since_s
        )

    def _judge_connection(self, outcome: Outcome) -> str | None:
        name = outcome.application.name
        if any(
            kill.num_ingresses.get(name)
            for kill in self._kills
            if kill.at_s <= outcome.ended_s <= kill.at_s + CONNECTION_NOTICE_S
        ):
            return None
        return f"connection lost without a killed ingress: {outcome.code} {outcome.message}"

    def _judge_refusal(self, outcome: Outcome) -> str | None:
        """Refused connections mean that nobody listens."""
        name = outcome.application.name
        lost = sum(
            kill.num_ingresses.get(name, 0)
            for kill in self._kills
            if outcome.ended_s - HEAL_S <= kill.at_s <= outcome.ended_s
        )
        if lost >= outcome.application.num_ingresses:
            return None
        return f"refused after only {lost} ingresses were killed"


def _judge_whole(outcome: Outcome, expected: Answer) -> str | None:
    if outcome.token_ids != expected.token_ids:
        return "too few tokens"
    if expected.text is not None and outcome.text != expected.text:
        return "wrong text"
    return None
