"""Reads the machine code of kernels, as Triton hands it out for sm90."""

import re

_INSTRUCTION = re.compile(r"(?:@!?U?P\d+ )?([A-Z][A-Z0-9_.]+)([^;\n]*);")
_REGISTERS = re.compile(r"\bR(\d+)(\.64)?\b")
_FIRST_IS_REGISTER = re.compile(r"\s*R\d+\b")
_WIDTHS = {".64": 2, ".128": 4}
_WIDE_RESULTS = ("IMAD.WIDE", "DADD", "DMUL", "DFMA", "I2F.F64", "F2F.F64", "HMMA", "IMMA")
_WIDE_OPERANDS = ("DADD", "DMUL", "DFMA", "DSETP", "HMMA", "IMMA")


def early_waits(sass):
    """Instructions before the predecessor's end is waited for that read what a load before them
    brings: (instruction, place of the load). Whatever comes behind one stands as long as memory
    takes, so that loads behind it are not beside those before it. Operands of several registers,
    but for addresses, are taken for four, which may find too many."""
    before, waits, _ = sass.partition("ACQBULK")
    assert waits, "no program waits for its predecessor"
    loaded, found = {}, []
    for place, (name, operands) in enumerate(_INSTRUCTION.findall(before)):
        is_load = name.startswith(("LDG", "LDS", "LDL"))
        has_result = is_load or (
            not name.startswith("ST") and bool(_FIRST_IS_REGISTER.match(operands))
        )
        registers = [(int(one), bool(is_wide)) for one, is_wide in _REGISTERS.findall(operands)]
        width = 4 if name.startswith(_WIDE_OPERANDS) else 1
        sources = {
            first + further
            for first, is_wide in registers[1 if has_result else 0 :]
            for further in range(2 if is_wide else width)
        }
        found += [(f"{name}{operands}", loaded[one]) for one in sorted(sources) if one in loaded]
        if has_result and registers:
            result = registers[0][0]
            for further in range(_result_width(name)):
                loaded.pop(result + further, None)
                if name.startswith("LDG"):
                    loaded[result + further] = place
    return found


def _result_width(name):
    if name.startswith(_WIDE_RESULTS):
        return 2
    return next((width for size, width in _WIDTHS.items() if name.endswith(size)), 1)
