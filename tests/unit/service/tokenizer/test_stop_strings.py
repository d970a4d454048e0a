"""Stop strings: found wherever the chunk borders lie, never shown in part."""

from hypothesis import given, settings
from hypothesis import strategies as st

from service.tokenizer.stop_strings import StopScanner, StopStrings

ALPHABET = "ab\n"


def _reference(text: str, stops: list[str], include_stop: bool) -> tuple[str, str | None]:
    """The stop that is complete first; the longest of those complete at the same character."""
    hits = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not hits:
        return text, None
    end, _, stop = min(hits)
    return text[: end if include_stop else end - len(stop)], stop


def _scan(chunks: list[str], stops: list[str], include_stop: bool) -> tuple[list[str], str | None]:
    scanner = StopScanner(StopStrings(tuple(stops)), include_stop=include_stop)
    shown = []
    for chunk in chunks:
        scan = scanner.push(chunk)
        shown.append(scan.text)
        if scan.stop is not None:
            return shown, scan.stop
    return [*shown, scanner.flush()], None


@given(
    chunks=st.lists(st.text(ALPHABET, max_size=6), max_size=12),
    stops=st.lists(st.text(ALPHABET, min_size=1, max_size=5), max_size=4),
    include_stop=st.booleans(),
)
@settings(max_examples=120, deadline=None)
def test_result_equals_a_search_in_the_whole_text(chunks, stops, include_stop):
    shown, stop = _scan(chunks, stops, include_stop)
    assert ("".join(shown), stop) == _reference("".join(chunks), stops, include_stop)


@given(
    text=st.text(ALPHABET, max_size=30),
    stop=st.text(ALPHABET, min_size=1, max_size=6),
)
@settings(max_examples=120, deadline=None)
def test_text_is_held_back_only_while_it_could_become_a_stop_string(text, stop):
    scanner = StopScanner(StopStrings((stop,)), include_stop=False)
    shown = ""
    for end in range(1, len(text) + 1):
        scan = scanner.push(text[end - 1])
        shown += scan.text
        if scan.stop:
            return
        held = text[len(shown) : end]
        longest = max(k for k in range(len(stop)) if text[:end].endswith(stop[:k]))
        assert len(held) == longest


def test_a_stop_string_over_three_chunks_is_never_shown():
    assert _scan(["hello E", "N", "D of it"], ["END"], False) == (["hello ", "", ""], "END")


def test_the_stop_string_is_shown_when_asked_for():
    assert _scan(["hello E", "N", "D of it"], ["END"], True) == (["hello ", "", "END"], "END")
