"""Runs a block of the PTX that packs two 16-bit floats into a register, as the instruction set has
it: prmt, shifts, lop3, and, sub, mul and fma of halves, mov into two, mma.m16n8k16. Registers
are int64 tensors below 2**32, one number a lane; those of an accumulator are float64."""

import re

import torch

_LOP3 = (0xF0, 0xCC, 0xAA)


_KINDS = {"bf16x2": torch.bfloat16, "f16x2": torch.float16}


def _halves(register, kind):
    bits = torch.stack([register & 0xFFFF, register >> 16])
    signed = torch.where(bits >= 1 << 15, bits - (1 << 16), bits)
    return signed.to(torch.int16).view(_KINDS[kind]).double()


def _joined(values, kind):
    bits = values.to(_KINDS[kind]).view(torch.int16).long() & 0xFFFF
    return bits[0] | bits[1] << 16


def _prmt(a, b, selector):
    given = [value >> (8 * byte) & 0xFF for value in (a, b) for byte in range(4)]
    chosen = [given[int(selector) >> (4 * place) & 0x7] for place in range(4)]
    return sum(byte << (8 * place) for place, byte in enumerate(chosen))


def _lop3(a, b, c, table):
    out = torch.zeros_like(a)
    for row in range(8):
        if int(table) >> row & 1:
            term = torch.full_like(out, 0xFFFFFFFF)
            for value, column in zip((a, b, c), _LOP3, strict=True):
                term &= value if column >> row & 1 else ~value & 0xFFFFFFFF
            out |= term
    return out


def _signed(value, bits):
    return value - (value >> (bits - 1) << bits)


def _fma(kind):
    def run(a, b, c):
        return _joined(_halves(a, kind) * _halves(b, kind) + _halves(c, kind), kind)

    return run


def _matrix(registers, kind, rows):
    """(rows, 16) of a warp's operand, whose registers have pairs of columns: of rows and of rows
    eight further on by turns, where there are so many; then of the columns from the eighth on."""
    out = torch.empty(rows, 16, dtype=torch.float64)
    row, place = torch.arange(32) // 4, 2 * (torch.arange(32) % 4)
    for number, register in enumerate(registers):
        down, right = number % (rows // 8), number // (rows // 8)
        for half, values in enumerate(_halves(register, kind)):
            out[row + 8 * down, place + 8 * right + half] = values
    return out


def _mma(a, b, c, kind):
    """Accumulators of 32 lanes, which have two columns of each of two rows."""
    product = _matrix(a, kind, 16) @ _matrix(b, kind, 8).t()
    row, place = torch.arange(32) // 4, 2 * (torch.arange(32) % 4)
    return [c[n] + product[row + n // 2 * 8, place + n % 2] for n in range(4)]


_INSTRUCTIONS = {
    "mov.b32": lambda value: value,
    "prmt.b32": _prmt,
    "lop3.b32": _lop3,
    "and.b32": lambda a, b: a & b,
    "shl.b32": lambda a, bits: a << bits & 0xFFFFFFFF,
    "shr.u32": lambda a, bits: a >> bits,
    **{
        f"sub.rn.{kind}": lambda a, b, kind=kind: _joined(_halves(a, kind) - _halves(b, kind), kind)
        for kind in _KINDS
    },
    **{f"fma.rn.{kind}": _fma(kind) for kind in _KINDS},
    **{
        f"mul.rn.{kind}": lambda a, b, kind=kind: _joined(_halves(a, kind) * _halves(b, kind), kind)
        for kind in _KINDS
    },
}


def run_ptx(text, inputs, num_outputs, kind):
    """inputs: registers $num_outputs and on, int64 (n,). The values of $0 and on, each half a
    register, of kind as float64 (n,)."""
    registers = _run(text, inputs, num_outputs)
    return [_halves(registers[f"${place}"], kind)[0] for place in range(num_outputs)]


def run_integer_ptx(text, inputs, num_outputs):
    """The same of outputs that are integers of 32 bits: int64 (n,)."""
    registers = _run(text, inputs, num_outputs)
    return [_signed(registers[f"${place}"], 32) for place in range(num_outputs)]


def run_product_ptx(text, inputs, num_outputs):
    """The same of accumulators, float64 (32,)."""
    registers = _run(text, inputs, num_outputs)
    return [registers[f"${place}"] for place in range(num_outputs)]


def _run(text, inputs, num_outputs):
    registers = {f"${num_outputs + place}": value for place, value in enumerate(inputs)}

    def read(name):
        if name in registers:
            return registers[name]
        return torch.tensor(int(name, 0)).expand_as(inputs[0])

    for line in text.strip()[1:-1].split(";"):
        name, _, operands = line.strip().partition(" ")
        if not name or name == ".reg":
            continue
        if name == "mov.b32" and "{" in operands:
            low, high, source = re.split(r",\s*", operands)
            value = read(source)
            registers[low.strip("{ ")], registers[high.strip("} ")] = value & 0xFFFF, value >> 16
            continue
        if name.startswith("mma."):
            groups = [one.split(", ") for one in re.findall(r"{([^}]*)}", operands)]
            given = [[read(one) for one in group] for group in groups[1:]]
            kind = "bf16x2" if "bf16" in name else "f16x2"
            registers.update(zip(groups[0], _mma(*given, kind), strict=True))
            continue
        target, *sources = re.split(r",\s*", operands)
        values = [read(source) for source in sources]
        if name in ("prmt.b32", "lop3.b32"):
            values[-1] = int(sources[-1], 0)
        registers[target] = _INSTRUCTIONS[name](*values)
    return registers
