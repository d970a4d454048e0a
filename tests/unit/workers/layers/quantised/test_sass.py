"""What the reader of machine code takes for a wait."""

import pytest

from tests.fakes.sass import early_waits

LOAD = "LDG.E R4, desc[UR4][R8.64] ; "
PAIR = "LDG.E.64 R4, desc[UR4][R8.64] ; "
WAIT = "ACQBULK ; "


@pytest.mark.parametrize(
    "reads",
    [
        LOAD + "IMAD.MOV.U32 R6, RZ, RZ, R4 ; ",
        LOAD + "ISETP.GE.AND P0, PT, R4, RZ, PT ; ",
        LOAD + "@!P0 R2UR UR6, R4 ; ",
        LOAD + "STL [R1+0x4], R4 ; ",
        LOAD + "LDG.E R20, desc[UR4][R4.64] ; ",
        "LDG.E R5, desc[UR4][R8.64] ; LDG.E R20, desc[UR4][R4.64] ; ",
        PAIR + "MOV R7, R5 ; ",
        "LDG.E.EF.128 R4, desc[UR4][R8.64+0x200] ; MOV R12, R7 ; ",
        "LDG.E R5, desc[UR4][R8.64] ; DADD R12, R4, R14 ; ",
    ],
)
def test_a_read_of_what_is_loaded(reads) -> None:
    assert len(early_waits(reads + WAIT)) == 1


@pytest.mark.parametrize(
    "waits_not",
    [
        LOAD + "LDG.E R5, desc[UR4][R8.64] ; ",
        LOAD + "IADD3 R9, R8, R10, RZ ; ",
        LOAD + "MOV R4, R8 ; MOV R9, R4 ; ",
        PAIR + "IMAD.WIDE R4, R8, R9, R10 ; MOV R11, R5 ; ",
        "MOV R5, R4 ; " + LOAD,
    ],
)
def test_no_read_of_what_is_loaded(waits_not) -> None:
    assert early_waits(waits_not + WAIT + "MOV R6, R4 ; ") == []


def test_a_kernel_has_to_wait() -> None:
    with pytest.raises(AssertionError, match="no program waits"):
        early_waits(LOAD)
