"""The Gluon product of one row and four-bit weights without a GPU, a program after the other.

Copies arrive when their group is waited for and no sooner; what tensor cores do is done from the
meaning of words. Layouts, registers and warps that meet are not modelled.
"""

from types import SimpleNamespace

import numpy as np

from tests.fakes.gluon_by_threads import Int, Shared, Values, as_values, replace
from workers.layers.quantised import int4_stream_kernel, int4_stream_parts

MODULES = (int4_stream_kernel, int4_stream_parts)
UNIT = 1 / 64
_BITS = {np.dtype(np.float16): 16, np.dtype(np.float32): 32, np.dtype(np.int32): 32}


class Stream:
    """What a program has asked for and may read."""

    def __init__(self):
        self.asked, self.groups = [], []
        self.launches, self.has_waited = 0, False

    def copy(self, place, source):
        assert place.shape == source.at.shape
        place.flat[:] = np.zeros_like(place.flat)
        self.asked.append((place, source))

    def commit(self):
        self.groups.append(self.asked)
        self.asked = []

    def wait(self, num_outstanding):
        while len(self.groups) > num_outstanding:
            for place, source in self.groups.pop(0):
                place.flat[:] = source.array[source.at].reshape(-1)

    def launch(self):
        self.launches += 1

    def await_predecessor(self):
        self.has_waited = True


class Plain(Shared):
    """Shared memory whose numbers lie one after the other, of whatever type they are."""

    def __init__(self, flat, shape):
        super().__init__(flat, shape, flat.dtype)

    def load(self, layout=None):
        return Tensor(self.flat.reshape(self.shape).copy())

    def store(self, value):
        self.flat[:] = np.asarray(value).reshape(-1)


class Tensor(Values):
    def __new__(cls, values):
        return np.asarray(values).view(cls)

    def to(self, dtype):
        return self if dtype is None else self.astype(np.float32)

    def broadcast_to(self, shape):
        return Tensor(np.broadcast_to(self, shape))

    def reshape(self, shape):
        return Tensor(np.asarray(self).reshape(shape))


class Pointer:
    def __init__(self, array, at=0):
        self.array, self.at = array, at
        item = SimpleNamespace(primitive_bitwidth=_BITS[array.dtype])
        self.dtype = SimpleNamespace(element_ty=item)

    def __add__(self, more):
        return Pointer(self.array, self.at + more)

    def to(self, kind, bitcast):
        return Pointer(self.array.view(np.int32), self.at)


def pairs_of(words):
    """int32 of two bfloat16 each -> both."""
    bits = np.asarray(words).astype(np.uint32)
    return (bits << 16).view(np.float32), (bits & 0xFFFF0000).view(np.float32)


def row_sum(words, x, zeros, first_quarter):
    """(threads,): a row's products of two quarters, of the four lanes that share it."""
    total = np.zeros(words.shape)
    for quarter in (first_quarter, first_quarter + 1):
        low = (words >> (4 * quarter)) & 15
        high = (words >> (4 * quarter + 16)) & 15
        one, two = pairs_of(x[quarter])
        total += (low - zeros[:, None]) * one + (high - zeros[:, None]) * two
    own = total.sum(1).reshape(-1, 4).sum(1)
    return np.repeat(own, 4) * UNIT


def turn_zeros(first, second, dtype, is_packed):
    return Tensor(np.stack([first & 0xFFFF, first >> 16, second & 0xFFFF, second >> 16], axis=1))


def turn_sums(words, x, zeros, sums, dtype, is_packed):
    out = []
    for half in range(2):
        rows = [
            row_sum(np.asarray(words[row]), x, zeros[:, 2 * row + half], 2 * half)
            for row in range(2)
        ]
        out.append(Tensor(sums[half] + np.stack([rows[0], rows[0], rows[1], rows[1]], axis=1)))
    return tuple(out)


def activate(gate, up, is_gelu, dtype):
    assert not is_gelu
    return gate / (1.0 + np.exp(-gate)) * up


def language(program, stream):
    def load(pointer):
        assert stream.has_waited
        return Tensor(pointer.array[pointer.at])

    def store(pointer, value):
        assert stream.has_waited
        pointer.array[pointer.at] = value

    return SimpleNamespace(
        arange=lambda start, end, layout=None: as_values(np.arange(start, end)),
        minimum=lambda a, b: Int(min(a, b)),
        maximum=lambda a, b: Int(max(a, b)),
        full=lambda shape, value, dtype, layout: Tensor(np.full(shape, value)),
        join=lambda a, b: Tensor(np.stack([a, b], axis=-1)),
        split=lambda both: (Tensor(both[..., 0]), Tensor(both[..., 1])),
        sum=lambda values, axis: Tensor(np.asarray(values).sum(axis)),
        expand_dims=lambda values, axis: Tensor(np.expand_dims(values, axis)),
        convert_layout=lambda values, layout, assert_trivial=False: values,
        load=load,
        store=store,
        static_range=range,
        tuple=tuple,
        allocate_shared_memory=lambda dtype, shape, layout: Plain(
            np.zeros(int(np.prod(shape)), np.int32 if dtype == "int32" else np.float32), shape
        ),
        pointer_type=lambda kind: None,
        program_id=lambda axis: Int(program[0]),
        num_programs=lambda axis: Int(program[1]),
        SliceLayout=lambda *_: None,
        BlockedLayout=lambda *_: None,
        int32="int32",
        int64=None,
        float32="float32",
    )


def run(monkeypatch, arguments, num_programs):
    """The kernel by as many programs. arguments: as int4_stream passes them, Pointers for tensors,
    x of bfloat16's bits."""
    for program in range(num_programs):
        stream = Stream()
        replaced = {
            "async_copy": SimpleNamespace(
                async_copy_global_to_shared=stream.copy,
                commit_group=stream.commit,
                wait_group=stream.wait,
            ),
            "turn_zeros": turn_zeros,
            "turn_sums": turn_sums,
            "row_sums": lambda sums: (Tensor(sums[:, 0]), Tensor(sums[:, 2])),
            "whole": lambda dtype: 1 / UNIT,
            "activate": activate,
            "launch_dependents": stream.launch,
            "await_predecessor": stream.await_predecessor,
            **dict.fromkeys(
                ("fragment_layout", "lane_layout", "input_layout", "plain_layout"),
                lambda *_: None,
            ),
            "brought_layout": lambda items, warps: None,
        }
        replace(monkeypatch, MODULES, replaced)
        for module in MODULES:
            monkeypatch.setattr(module, "gl", language((program, num_programs), stream))
        int4_stream_kernel.int4_stream_kernel(*arguments)
        assert stream.has_waited
        assert stream.launches == 1
