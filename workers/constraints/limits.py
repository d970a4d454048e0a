"""What llguidance may spend on one grammar, alike where it is checked and where it is used."""

from llguidance import LLParserLimits

MAX_ITEMS_IN_ROW = 500
MAX_ITEMS_IN_MASK = 20_000


def parser_limits() -> LLParserLimits:
    """Below the library's own: with those, one mask of an ambiguous grammar of 40 bytes took 7 s
    and one token of it 2.5 s; with these 33 and 16 ms, then it has an error (decision 0069)."""
    return LLParserLimits(
        max_items_in_row=MAX_ITEMS_IN_ROW, step_max_items=MAX_ITEMS_IN_MASK, verbose_errors=False
    )
