"""What llguidance may spend on one grammar, alike where it is checked and where it is used."""

from llguidance import LLParserLimits

MAX_ITEMS_IN_ROW = 1000
MAX_ITEMS_IN_MASK = 20_000


def parser_limits() -> LLParserLimits:
    """Below the library's own: an ambiguous grammar of 40 bytes kept one mask busy for 7 s with
    those, and has an error after 0.4 s with these (docs/decisions/0069)."""
    return LLParserLimits(
        max_items_in_row=MAX_ITEMS_IN_ROW, step_max_items=MAX_ITEMS_IN_MASK, verbose_errors=False
    )
