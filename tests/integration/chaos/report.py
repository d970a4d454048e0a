"""The tables of a run, as text."""

from collections import Counter
from statistics import median

from tests.integration.chaos.kills import KillKind
from tests.integration.chaos.run import Result


def describe(result: Result) -> str:
    """Kills by kind with the time to heal, ends by application and protocol, broken promises."""
    parts = [f"ready after {result.start_s:.1f} s", "", *_kills(result), "", *_ends(result), ""]
    num_requests = sum(result.ends.values())
    parts.append(f"{num_requests} requests, {result.num_tokens} tokens")
    parts.append(f"{len(result.broken)} broken promises")
    parts += [f"  {line}" for line in result.broken]
    return "\n".join(parts)


def _kills(result: Result) -> list[str]:
    lines = [f"{'killed':28} {'times':>5} {'whole again after, s: median':>30} {'longest':>8}"]
    for kind in KillKind:
        kills = [kill for kill in result.kills if kill.kind is kind]
        healed = [kill.healed_s - kill.at_s for kill in kills if kill.healed_s is not None]
        times = f"{median(healed):30.1f} {max(healed):8.1f}" if healed else f"{'-':>30} {'-':>8}"
        lines.append(f"{kind.value:28} {len(kills):5} {times}")
    lines.append(f"{'all':28} {len(result.kills):5}")
    return lines


def _ends(result: Result) -> list[str]:
    totals: Counter[str] = Counter()
    lines = [f"{'application':12} {'protocol':12} {'end':44} {'requests':>8}"]
    for (application, protocol, end), count in sorted(result.ends.items()):
        totals[end] += count
        lines.append(f"{application:12} {protocol:12} {end:44} {count:8}")
    lines += [f"{'all':25} {end:44} {count:8}" for end, count in totals.most_common()]
    return lines
