"""The Gluon products of MXFP4 experts without a GPU, as gluon_by_threads has attention's kernel.

What the tensor cores' operands are made of is found from words and scales here; layouts, registers
and fences are not modelled.
"""

from types import SimpleNamespace

import numpy as np

from tests.fakes import gluon_by_threads as threads
from tests.fakes.gluon_by_threads import Int
from workers.layers.quantised import (
    fp4_warpgroup_parts,
    fp4_warpgroup_stores,
    fp4_warpgroups,
)

MODULES = (fp4_warpgroup_parts, fp4_warpgroup_stores, fp4_warpgroups)
MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


class Values(threads.Values):
    def permute(self, order):
        return self.transpose(order)


class Shared(threads.Shared):
    """(rows, columns) at the end, rows one by one."""

    def index(self, i):
        part = super().index(i)
        return Shared(part.flat, part.shape, self.dtype)

    def _reinterpret(self, dtype, shape, layout):
        assert np.prod(shape) == np.prod(self.shape)
        return Shared(self.flat, shape, self.dtype)

    def permute(self, order):
        return SimpleNamespace(load=lambda layout=None: self.load().T)

    def load(self, layout=None):
        return self.flat.reshape(self.shape).copy().view(Values)

    def store(self, value):
        self.flat[:] = np.asarray(value).reshape(-1)


class Pointer(threads.Pointer):
    dtype = SimpleNamespace(element_ty=None)

    def __add__(self, more):
        return Pointer(self.array, self.at + more)


class Barriers(threads.Barriers):
    """One that has no index stands for itself."""

    def __getattr__(self, name):
        return getattr(self.each[0], name)


class Map:
    """A matrix as copies of a box read it: zeros beyond it."""

    layout = None

    def __init__(self, matrix, item_bytes):
        self.matrix, self.item_bytes = matrix, item_bytes
        self.dtype = matrix.dtype

    def box(self, row, column, shape):
        found = self.matrix[row : row + shape[0], column : column + shape[1]]
        missing = [(0, size - there) for size, there in zip(shape, found.shape, strict=True)]
        return np.pad(found, missing)


def allocate(dtype, shape, layout):
    if isinstance(layout, str):
        return Barriers(shape[0])
    fill = np.nan if np.issubdtype(dtype, np.floating) else -1
    return Shared(np.full(int(np.prod(shape)), fill, dtype), shape, dtype)


def copy(source, coordinates, barrier, place, pred=True):
    if not pred:
        return
    row, column = coordinates

    def arrive():
        place.store(source.box(row, column, place.shape))
        barrier.update(num_bytes=-int(np.prod(place.shape)) * source.item_bytes)

    threads.later(arrive)


def expect(barrier, num_bytes, pred=True):
    if pred:
        barrier.update(arrivals=1, num_bytes=num_bytes)


def arrive(barrier, count, pred=True):
    if pred:
        barrier.update(arrivals=count)


def pairs_of(words, scales, group):
    """By the meaning of an Fp4Stack's words and scales."""
    scale = np.exp2(((scales >> (8 * group)) & 255) - 253.0)[:, None]
    codes = [(words >> (4 * group + shift)) & 15 for shift in (0, 16)]
    return [
        (np.where(code & 8, -1.0, 1.0) * MAGNITUDES[code & 7] * scale).view(Values)
        for code in codes
    ]


def await_products(outstanding, deps):
    done, *others = threads.await_products(outstanding, deps[:1]), *deps[1:]
    return (done.view(Values), *others) if others else done.view(Values)


def finished(a, b, start, use_acc=True, is_async=False):
    """A product on top of one that is in the making begins when that has ended."""
    start = start.finish() if isinstance(start, threads.Product) else start
    return threads.multiply(a, b, start, use_acc, is_async)


def language(program):
    gl = threads.language((*program, 1))
    gl.full = lambda shape, value, dtype, layout: np.full(shape, value).view(Values)
    gl.join = lambda a, b: np.stack([a, b], axis=-1).view(Values)
    gl.split = lambda both: (both[..., 0], both[..., 1])
    gl.convert_layout = lambda values, layout, assert_trivial=False: values
    gl.allocate_shared_memory = allocate
    gl.program_id = lambda axis: Int(program[0])
    gl.num_programs = lambda axis: Int(program[1])
    gl.BlockedLayout = lambda *_: None
    return gl


def run(monkeypatch, arguments, num_programs):
    """The kernel by as many programs. arguments: as Fp4WarpgroupTiles passes them, Maps and
    Pointers for tensors."""
    replaced = {
        "mbarrier": SimpleNamespace(
            MBarrierLayout=threads.BARRIERS.MBarrierLayout,
            init=threads.BARRIERS.init,
            wait=threads.BARRIERS.wait,
            arrive=arrive,
            expect=expect,
        ),
        "tma": SimpleNamespace(async_copy_global_to_shared=copy),
        "fence_async_shared": lambda: None,
        "warpgroup_mma": finished,
        "warpgroup_mma_wait": await_products,
        "pairs_of": pairs_of,
        "sigmoid": lambda values, alpha: 1.0 / (1.0 + np.exp(-alpha * values)),
        "rounded": lambda values: values,
        "sum_layout": lambda tokens: None,
        "word_layout": lambda is_gated: None,
        "store_layout": lambda tokens, is_gated: None,
    }
    threads.replace(monkeypatch, MODULES, replaced)
    for program in range(num_programs):
        for module in MODULES:
            monkeypatch.setattr(module, "gl", language((program, num_programs)))
        fp4_warpgroups.multiply_experts_kernel(*arguments)
