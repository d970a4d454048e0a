"""The Gluon kernels of FP8 experts without a GPU, as gluon_by_threads.py has the extend kernel.

Nothing is rounded to FP8 here: what is compared is which rows, blocks and scales meet, and where
results come to lie.
"""

import threading
import time
from types import SimpleNamespace

import numpy as np

from tests.fakes import gluon_by_threads
from tests.fakes.gluon_by_threads import Barriers, Values, language, replace
from workers.layers.quantised import fp8_warpgroup_parts, fp8_warpgroups

MODULES = (fp8_warpgroups, fp8_warpgroup_parts)


class Shared(gluon_by_threads.Shared):
    """Rows of 128 one by one."""

    dtype = layout = None

    def __init__(self, values):
        self.values, self.shape = values, values.shape

    def index(self, i):
        assert 0 <= i < self.shape[0]
        return Shared(self.values[i])

    def _reinterpret(self, dtype, shape, layout):
        return Shared(self.values.reshape(shape))

    def permute(self, order):
        return SimpleNamespace(load=lambda layout=None: self.values.T.copy())

    def load(self, layout=None):
        return self.values.copy().view(Values)

    def store(self, value):
        self.values[:] = value


class Map:
    """A descriptor of a matrix, read 128 x 128 at a time."""

    dtype = layout = None

    def __init__(self, matrix):
        self.matrix = matrix

    def box(self, row, column):
        """Zeros where there is nothing."""
        found = self.matrix[row : row + 128, column : column + 128]
        return np.pad(found, [(0, 128 - size) for size in found.shape])


def allocate(dtype, shape, layout):
    if isinstance(layout, str):
        return Barriers(shape[0])
    return Shared(np.full(shape, np.nan))


def copy(matrix, corner, barrier, place):
    def arrive():
        time.sleep(0.0005 * np.random.default_rng().random())
        place.store(matrix.box(*corner))
        barrier.update(num_bytes=-place.values.size)

    threading.Thread(target=arrive, daemon=True).start()


def run(monkeypatch, name, arguments, num_programs):
    """The kernel of that name in fp8_warpgroups.py. arguments: as Fp8WarpgroupTiles passes them,
    arrays for tensors."""
    replaced = {
        "tma": SimpleNamespace(async_copy_global_to_shared=copy),
        "product_layout": lambda: None,
        "stored_layout": lambda items: None,
        "begin_dependent": lambda: None,
        "reciprocal": lambda value: 1.0 / value,
        "GROUP_ROWS": 64,
        "BLOCK": 128,
        "_FP8_MAX": 448.0,
        "_LEAST": 1e-12,
        "_LOG2_E": float(np.log2(np.e)),
        "_ACTIVATE_REGISTERS": (0, 0),
        "_PROJECT_REGISTERS": (0, 0),
    }
    replace(monkeypatch, MODULES, replaced)
    for program in range(num_programs):
        words = language((program, 0, num_programs, 1))
        words.abs, words.NVMMASharedLayout = np.abs, lambda *_: None
        words.allocate_shared_memory = allocate
        for module in MODULES:
            monkeypatch.setattr(module, "gl", words)
        getattr(fp8_warpgroups, name)(*arguments)
