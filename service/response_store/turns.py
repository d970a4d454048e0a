"""Turn: what one response adds to a conversation, after the turns before it.

Turns are shared by the responses that go on from them, so that a conversation of any length is kept
once, and lasts as long as any response of it.
"""

from dataclasses import dataclass

TURN_BYTES = 256
"""What a turn costs besides its items, roughly."""


@dataclass(slots=True, eq=False)
class Turn:
    """num_users: responses that are this turn, and turns that follow it."""

    previous: "Turn | None"
    input: bytes
    output: bytes
    num_users: int = 1

    @property
    def num_bytes(self) -> int:
        return TURN_BYTES + len(self.input) + len(self.output)


def add_turn(previous: Turn | None, input_items: bytes, output_items: bytes) -> Turn:
    if previous is not None:
        previous.num_users += 1
    return Turn(previous, input_items, output_items)


def release(turn: Turn) -> int:
    """A user of the turn is gone: bytes of what nobody uses any more."""
    num_bytes = 0
    unused: Turn | None = turn
    while unused is not None:
        unused.num_users -= 1
        if unused.num_users:
            break
        num_bytes += unused.num_bytes
        unused = unused.previous
    return num_bytes


def conversation(turn: Turn, max_bytes: int) -> list[bytes] | None:
    """JSON arrays of items in order, from the conversation's beginning on; None if they are more
    than max_bytes."""
    parts: list[bytes] = []
    num_bytes = 0
    one: Turn | None = turn
    while one is not None:
        parts += [one.output, one.input]
        num_bytes += one.num_bytes
        if num_bytes > max_bytes:
            return None
        one = one.previous
    parts.reverse()
    return parts
