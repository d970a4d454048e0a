"""cuBLASLt by ctypes: which algorithms it has for a product, and running one of them.

torch offers only cuBLAS's own choice of algorithm; this module offers all of them, so that one can
be chosen by measurement. It uses the library that torch has loaded. Knows no layer, no tokens and
makes no choice. Source of the interface: NVIDIA's cublasLt.h, versions 12 and 13.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

WORKSPACE_BYTES = 32 << 20
"""What NVIDIA recommends for Hopper."""
_LIBRARY_NAMES = ("libcublasLt.so.13", "libcublasLt.so.12")
_SUCCESS = 0
_DATA_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
_COMPUTE_FLOAT32 = 68
_DESC_TRANSPOSE_A = 3
_TRANSPOSED = 1
_LAYOUT_BATCH_COUNT = 5
_LAYOUT_BATCH_STRIDE = 6
_PREFERENCE_WORKSPACE_BYTES = 1
_PREFERENCE_REDUCTIONS = 3
_PREFERENCE_ALIGNMENTS = (5, 6, 7, 8)
_REDUCTION_IN_FLOAT32 = 2
"""Splits are summed up in one order and not rounded before, unlike by the other reductions."""
_ALIGNMENT_BYTES = 16
_OPAQUE_WORDS = 8

Pointer = ctypes.c_void_p
Size = ctypes.c_size_t


class CublasLtError(RuntimeError):
    """A call that cuBLASLt refused. status: the name of what it answered."""

    def __init__(self, call: str, status: str) -> None:
        super().__init__(f"{call}: {status}")
        self.status = status


class CublasLtUnavailableError(RuntimeError):
    """The library cannot be loaded."""


class _Opaque(ctypes.Structure):
    _fields_ = [("data", ctypes.c_uint64 * _OPAQUE_WORDS)]


class _HeuristicResult(ctypes.Structure):
    _fields_ = [
        ("algorithm", _Opaque),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("num_waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


@dataclass(frozen=True, slots=True)
class Product:
    """x (num_tokens, in_features) @ weight (out_features, in_features).T in num_splits parts.

    Each part sums in_features / num_splits of the terms and is a matrix of its own. All tensors are
    contiguous; in_dtype is float16 or bfloat16, out_dtype that or float32.
    """

    num_tokens: int
    out_features: int
    in_features: int
    num_splits: int
    in_dtype: torch.dtype
    out_dtype: torch.dtype


class Layouts:
    """A product's three matrices as cuBLASLt sees them: column-major, one matrix a split."""

    def __init__(self, library: "Library", product: Product) -> None:
        self.product = product
        splits = product.num_splits
        tokens, rows = product.num_tokens, product.out_features
        step, width = product.in_features // splits, product.in_features
        self.weight = library.layout(product.in_dtype, (step, rows, width), splits, step)
        self.x = library.layout(product.in_dtype, (step, tokens, width), splits, step)
        self.out = library.layout(product.out_dtype, (rows, tokens, rows), splits, tokens * rows)
        self.weight_at, self.x_at, self.out_at = map(
            ctypes.addressof, (self.weight, self.x, self.out)
        )

    @property
    def addresses(self) -> tuple[int, int, int, int]:
        """Of the operands and of the result, which is what is added to, too."""
        return self.weight_at, self.x_at, self.out_at, self.out_at


class Algorithm:
    """One of cuBLASLt's ways to compute a product, opaque; good for the version it comes from."""

    def __init__(self, encoded: bytes) -> None:
        self.opaque = _Opaque.from_buffer_copy(encoded)
        self.address = ctypes.addressof(self.opaque)

    @property
    def encoded(self) -> bytes:
        return bytes(self.opaque)


class Library:
    """The functions that are used, each of which raises CublasLtError if it does not succeed."""

    def __init__(self, loaded: ctypes.CDLL) -> None:
        self._loaded = loaded
        loaded.cublasLtGetVersion.restype = Size
        loaded.cublasLtGetVersion.argtypes = []
        loaded.cublasLtGetStatusName.restype = ctypes.c_char_p
        loaded.cublasLtGetStatusName.argtypes = [ctypes.c_int]
        self._layout_init = self._function(
            "cublasLtMatrixLayoutInit_internal",
            [Pointer, Size, ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64],
        )
        set_attribute = [Pointer, ctypes.c_int, Pointer, Size]
        self._layout_set = self._function("cublasLtMatrixLayoutSetAttribute", set_attribute)
        self._desc_set = self._function("cublasLtMatmulDescSetAttribute", set_attribute)
        self._preference_set = self._function("cublasLtMatmulPreferenceSetAttribute", set_attribute)
        self._create = self._function("cublasLtCreate", [Pointer])
        self._desc_create = self._function(
            "cublasLtMatmulDescCreate", [Pointer, ctypes.c_int, ctypes.c_int]
        )
        self._preference_create = self._function("cublasLtMatmulPreferenceCreate", [Pointer])
        self.get_heuristic = self._function(
            "cublasLtMatmulAlgoGetHeuristic",
            [*[Pointer] * 7, ctypes.c_int, Pointer, Pointer],
        )
        self.check = self._function("cublasLtMatmulAlgoCheck", [Pointer] * 8)
        self.matmul = self._function("cublasLtMatmul", [*[Pointer] * 14, Size, Pointer])

    def _function(self, name: str, argument_types: Sequence[type]) -> Any:
        function = getattr(self._loaded, name)
        function.argtypes = argument_types
        function.restype = ctypes.c_int

        def check(status: int, _function: object, _arguments: object) -> None:
            if status != _SUCCESS:
                raise CublasLtError(name, self._loaded.cublasLtGetStatusName(status).decode())

        function.errcheck = check
        return function

    @property
    def version(self) -> int:
        return int(self._loaded.cublasLtGetVersion())

    def layout(
        self, dtype: torch.dtype, shape: tuple[int, int, int], num_matrices: int, stride: int
    ) -> _Opaque:
        """Matrices of (rows, columns, elements between columns), stride elements apart."""
        layout = _Opaque()
        at = ctypes.addressof(layout)
        self._layout_init(at, ctypes.sizeof(layout), _DATA_TYPES[dtype], *shape)
        self._set(self._layout_set, at, _LAYOUT_BATCH_COUNT, ctypes.c_int32(num_matrices))
        self._set(self._layout_set, at, _LAYOUT_BATCH_STRIDE, ctypes.c_int64(stride))
        return layout

    def handle(self) -> Pointer:
        handle = Pointer()
        self._create(ctypes.byref(handle))
        return handle

    def transposing_matmul(self) -> Pointer:
        """weight.T @ x of column-major matrices, summed up in float32."""
        desc = Pointer()
        self._desc_create(ctypes.byref(desc), _COMPUTE_FLOAT32, _DATA_TYPES[torch.float32])
        self._set(self._desc_set, desc, _DESC_TRANSPOSE_A, ctypes.c_int32(_TRANSPOSED))
        return desc

    def preference(self) -> Pointer:
        preference = Pointer()
        self._preference_create(ctypes.byref(preference))
        put, workspace_bytes = self._preference_set, ctypes.c_uint64(WORKSPACE_BYTES)
        self._set(put, preference, _PREFERENCE_WORKSPACE_BYTES, workspace_bytes)
        reductions = ctypes.c_uint32(_REDUCTION_IN_FLOAT32)
        self._set(put, preference, _PREFERENCE_REDUCTIONS, reductions)
        for attribute in _PREFERENCE_ALIGNMENTS:
            self._set(put, preference, attribute, ctypes.c_uint32(_ALIGNMENT_BYTES))
        return preference

    @staticmethod
    def _set(put: Any, owner: Pointer | int, attribute: int, value: Any) -> None:
        put(owner, attribute, ctypes.byref(value), ctypes.sizeof(value))


def load_library() -> Library:
    """The one that torch has loaded, or that is where the loader looks for it."""
    errors = []
    for name in _LIBRARY_NAMES:
        try:
            return Library(ctypes.CDLL(name))
        except OSError as error:
            errors.append(str(error))
    raise CublasLtUnavailableError("; ".join(errors))


class CublasLt:
    """cuBLASLt on one device. What it creates lives as long as the process.

    All products share one workspace: they must follow one another in time. Eager steps and replayed
    graphs run on one stream and captures wait for it; what a graph has on a side stream
    (side_stream.py) is multiplied by others.
    """

    def __init__(self, device: torch.device, library: Library) -> None:
        self.device = device
        self.version = library.version
        self._library = library
        with torch.cuda.device(device):
            self._handle = library.handle()
        self._desc = library.transposing_matmul()
        self._preference = library.preference()
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        self._one_at, self._zero_at = map(ctypes.addressof, (self._one, self._zero))
        self._workspace_at = self._workspace.data_ptr()

    def layouts(self, product: Product) -> Layouts:
        return Layouts(self._library, product)

    def algorithms(self, layouts: Layouts, max_algorithms: int) -> list[Algorithm]:
        """Those that its heuristic holds for the fastest, best first.

        Raises CublasLtError where there is none.
        """
        results = (_HeuristicResult * max_algorithms)()
        num_results = ctypes.c_int()
        self._library.get_heuristic(
            self._handle,
            self._desc,
            *layouts.addresses,
            self._preference,
            max_algorithms,
            ctypes.addressof(results),
            ctypes.addressof(num_results),
        )
        return [
            Algorithm(bytes(result.algorithm))
            for result in results[: num_results.value]
            if result.state == _SUCCESS
        ]

    def supports(self, layouts: Layouts, algorithm: Algorithm) -> bool:
        """Whether the algorithm can compute this product here, within the workspace."""
        result = _HeuristicResult()
        try:
            self._library.check(
                self._handle,
                self._desc,
                *layouts.addresses,
                algorithm.address,
                ctypes.addressof(result),
            )
        except CublasLtError:
            return False
        return int(result.workspace_bytes) <= WORKSPACE_BYTES

    def multiply(
        self,
        layouts: Layouts,
        algorithm: Algorithm,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> None:
        """out = x @ weight.T on the current stream. tensors: x, weight, out, as layouts say."""
        x, weight, out = tensors
        weight_layout, x_layout, _, out_layout = layouts.addresses
        out_at = out.data_ptr()
        self._library.matmul(
            self._handle,
            self._desc,
            self._one_at,
            weight.data_ptr(),
            weight_layout,
            x.data_ptr(),
            x_layout,
            self._zero_at,
            out_at,
            out_layout,
            out_at,
            out_layout,
            algorithm.address,
            self._workspace_at,
            WORKSPACE_BYTES,
            torch.cuda.current_stream(self.device).cuda_stream,
        )
