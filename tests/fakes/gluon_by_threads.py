"""Gluon kernels without a GPU: their own functions over numpy, a thread for each partition.

Barriers block and count as mbarriers do; copies arrive after a while; products are done when they
are waited for, of what is in shared memory by then. Layouts, registers and fences are not modelled.
"""

import threading
import time
from types import SimpleNamespace

import numpy as np

from attention.kernels import gluon_extend, gluon_extend_parts

TIMEOUT_S = 20.0
MODULES = (gluon_extend, gluon_extend_parts)


class Barrier:
    """One mbarrier: phases that end when all have arrived and all bytes have come."""

    def __init__(self):
        self.changed = threading.Condition()
        self.count = self.pending = self.bytes = self.phase = 0

    def start(self, count):
        self.count = self.pending = count

    def wait(self, parity):
        with self.changed:
            met = self.changed.wait_for(lambda: self.phase & 1 != parity, TIMEOUT_S)
        assert met, "a wait that never ends"

    def update(self, arrivals=0, num_bytes=0):
        with self.changed:
            self.pending -= arrivals
            self.bytes += num_bytes
            assert self.pending >= 0, "one arrival too many"
            if self.pending == 0 and self.bytes == 0:
                self.phase += 1
                self.pending = self.count
                self.changed.notify_all()


class Shared:
    """A view of shared memory: (rows, columns) at the end, halves of 64 columns one by one."""

    def __init__(self, flat, shape, dtype=np.float32):
        self.flat, self.shape, self.dtype, self.layout = flat, tuple(shape), dtype, None

    def index(self, i):
        assert 0 <= i < self.shape[0]
        size = int(np.prod(self.shape[1:]))
        return type(self)(self.flat[i * size : (i + 1) * size], self.shape[1:])

    def _reinterpret(self, dtype, shape, layout):
        assert np.prod(shape) == np.prod(self.shape)
        return type(self)(self.flat, shape)

    def permute(self, order):
        return SimpleNamespace(load=lambda layout=None: self.load().T)

    def load(self, layout=None):
        rows, columns = self.shape
        halves = self.flat.reshape(columns // 64, rows, 64)
        return halves.transpose(1, 0, 2).reshape(rows, columns).copy()

    def store(self, value):
        rows, columns = self.shape
        halves = np.asarray(value).reshape(rows, columns // 64, 64)
        self.flat[:] = halves.transpose(1, 0, 2).reshape(-1)


class Barriers:
    def __init__(self, size):
        self.each = [Barrier() for _ in range(size)]

    def index(self, i):
        return self.each[i]


class Values(np.ndarray):
    """A tensor of the kernel's."""

    def to(self, dtype):
        return self

    type = SimpleNamespace(layout=None)


class Pointer:
    """Into an array that a kernel reads and writes by element."""

    dtype = SimpleNamespace(element_ty=None)

    def __init__(self, array, at=0):
        self.array, self.at = array, at

    def __add__(self, more):
        return Pointer(self.array, self.at + more)

    def __getitem__(self, places):
        return Pointer(self.array, np.asarray(self.at)[places])


class Product:
    def __init__(self, a, b, start):
        self.parts = a, b, start

    def finish(self):
        a, b, start = self.parts
        a = a.load() if isinstance(a, Shared) else a
        return ((0.0 if start is None else start) + a @ b.load()).view(Values)


class Descriptor:
    dtype = layout = None

    def __init__(self, tokens):
        self.tokens = tokens


def as_values(array):
    return np.asarray(array).view(Values)


def load(pointer, mask=None, other=0.0):
    at = np.asarray(pointer.at)
    if mask is None:
        found = pointer.array[at]
        is_integer = np.issubdtype(found.dtype, np.integer)
        return Int(found) if at.ndim == 0 and is_integer else found
    return as_values(np.where(mask, pointer.array[np.where(mask, at, 0)], other))


class Int(int):
    """A scalar of the kernel's."""

    def to(self, dtype):
        return self

    def __mul__(self, other):
        product = super().__mul__(other)
        return Int(product) if isinstance(product, int) else product

    def __sub__(self, other):
        difference = super().__sub__(other)
        return Int(difference) if isinstance(difference, int) else difference


def store(pointer, value, mask):
    pointer.array[pointer.at[mask]] = np.asarray(value)[mask]


def allocate(dtype, shape, layout):
    if isinstance(layout, str):
        return Barriers(shape[0])
    return Shared(np.full(int(np.prod(shape)), np.nan, np.float32), shape)


def specialise(functions, warps, registers):
    failures = []

    def run(function, arguments):
        try:
            function(*arguments)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=run, args=one, daemon=True) for one in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT_S)
    assert not failures, failures
    assert not any(thread.is_alive() for thread in threads)


def later(happen):
    def wait():
        time.sleep(0.0005 * np.random.default_rng().random())
        happen()

    threading.Thread(target=wait, daemon=True).start()


def copy(pages, coordinates, barrier, place):
    def arrive():
        row, column = coordinates
        keys, dims = place.shape
        place.store(pages.tokens[row : row + keys, column : column + dims])
        barrier.update(num_bytes=-keys * dims * 2)

    later(arrive)


def language(program):
    return SimpleNamespace(
        arange=lambda start, end, layout=None: as_values(np.arange(start, end)),
        minimum=lambda a, b: np.minimum(a, b) if np.ndim(a) or np.ndim(b) else Int(min(a, b)),
        maximum=lambda a, b: np.maximum(a, b) if np.ndim(a) or np.ndim(b) else Int(max(a, b)),
        where=lambda which, a, b: (
            as_values(np.where(which, a, b)) if np.ndim(which) else Int(a if which else b)
        ),
        full=lambda shape, value, dtype, layout: as_values(np.full(shape, value, np.float32)),
        zeros_like=np.zeros_like,
        exp2=np.exp2,
        max=lambda values, axis: values.max(axis),
        sum=lambda values, axis: values.sum(axis),
        cdiv=lambda a, b: Int(-(-a // b)),
        load=load,
        store=store,
        convert_layout=lambda values, layout: values,
        thread_barrier=lambda: None,
        static_range=range,
        tuple=tuple,
        constexpr=lambda value: value,
        allocate_shared_memory=allocate,
        warp_specialize=specialise,
        program_id=lambda axis: Int(program[axis]),
        num_programs=lambda axis: Int(program[2 + axis]),
        SliceLayout=lambda *_: None,
        DotOperandLayout=lambda *_: None,
        int64=None,
        float32=None,
    )


BARRIERS = SimpleNamespace(
    MBarrierLayout=lambda: "barriers",
    init=lambda barrier, count: barrier.start(count),
    wait=lambda barrier, phase: barrier.wait(int(phase)),
    arrive=lambda barrier, count: barrier.update(arrivals=count),
    expect=lambda barrier, num_bytes: barrier.update(arrivals=1, num_bytes=num_bytes),
)


def multiply(a, b, start, use_acc=True, is_async=False):
    return Product(a, b, start if use_acc else None)


def await_products(outstanding, deps):
    (one,) = deps
    return one.finish()


def replace(monkeypatch, modules, replaced):
    """What the modules' functions have from Gluon, and these functions themselves. replaced: by
    name, what a kernel has of its own."""
    common = {
        "mbarrier": BARRIERS,
        "fence_async_shared": lambda: None,
        "warpgroup_mma": multiply,
        "warpgroup_mma_wait": await_products,
    }
    replaced = common | replaced
    for module in modules:
        for name, value in list(vars(module).items()):
            if name in replaced:
                monkeypatch.setattr(module, name, replaced[name])
            elif hasattr(value, "fn") and hasattr(value, "arg_names"):
                monkeypatch.setattr(module, name, value.fn)
            elif type(value).__name__ == "constexpr":
                monkeypatch.setattr(module, name, value.value)


def run(monkeypatch, arguments, grid):
    """The kernel over a grid. arguments: as WarpgroupExtend passes them, arrays for tensors."""
    replaced = {
        "tma": SimpleNamespace(async_copy_global_to_shared=copy),
        "score_layout": lambda keys: None,
        "row_layout": lambda dim: None,
        "GROUP_ROWS": 64,
        "HALF_DIMS": 64,
        "_TILE_ROWS": 128,
        "_CONSUMER_REGISTERS": 0,
        "_PRODUCER_REGISTERS": 0,
        "LOG2_E": float(np.log2(np.e)),
    }
    replace(monkeypatch, MODULES, replaced)
    for head in range(grid[0]):
        for tile in range(grid[1]):
            for module in MODULES:
                monkeypatch.setattr(module, "gl", language((head, tile, *grid)))
            gluon_extend.attend_gluon_kernel(*arguments)
