"""Reads the machine code of kernels, as Triton hands it out for sm90."""

import re

_INSTRUCTION = re.compile(r"((?:@!?U?P\d+ )?[A-Z][A-Z0-9_.]+)([^;\n]*);")
_REGISTER = re.compile(r"\bR(\d+)\b")
_LOADED_REGISTERS = {".64": 2, ".128": 4}


def early_waits(sass):
    """Instructions before the predecessor's end is waited for that read what a load before them
    brings: (instruction, place of the load). Whatever comes behind one stands as long as memory
    takes, so that loads behind it are not beside those before it."""
    before, waits, behind = sass.partition("ACQBULK")
    assert waits, "no program waits for its predecessor"
    loaded, found = {}, []
    for place, (name, operands) in enumerate(_INSTRUCTION.findall(before)):
        registers = [int(one) for one in _REGISTER.findall(operands)]
        is_load, is_store = "LDG" in name, "ST" in name
        sources = registers if is_store else registers[1:]
        found += [(name + operands, loaded[one]) for one in sources if one in loaded]
        if is_load and registers:
            width = next((n for size, n in _LOADED_REGISTERS.items() if size in name), 1)
            loaded |= {registers[0] + further: place for further in range(width)}
        elif registers and not is_store:
            loaded.pop(registers[0], None)
    return found
