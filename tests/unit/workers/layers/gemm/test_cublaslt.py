"""cuBLASLt behind ctypes, against a library that only remembers what it was asked."""

import ctypes

import pytest
import torch

from workers.layers.gemm.build import LtGemm, lt_configs
from workers.layers.gemm.configs import LtConfig
from workers.layers.gemm.cublaslt import (
    WORKSPACE_BYTES,
    Algorithm,
    CublasLt,
    CublasLtError,
    Library,
    Product,
)

NOT_SUPPORTED = 15
ALGORITHM_BYTES = 64


class _Function:
    """A foreign function as ctypes has them, made of a Python one that returns a status."""

    def __init__(self, run) -> None:
        self._run = run
        self.errcheck = lambda result, function, arguments: None

    def __call__(self, *arguments):
        result = self._run(*arguments)
        self.errcheck(result, self, arguments)
        return result


class FakeLoaded:
    """Has the algorithms b"a...", b"b..."; the ones in refused fit no product.

    calls: name and arguments of everything that was called.
    """

    def __init__(self, algorithms=(b"a", b"b"), refused=(), workspace_bytes=0) -> None:
        self.calls = []
        self.layouts = {}
        self._algorithms = [name * ALGORITHM_BYTES for name in algorithms]
        self._refused = {name * ALGORITHM_BYTES for name in refused}
        self._workspace_bytes = workspace_bytes
        for name in (
            "cublasLtMatrixLayoutInit_internal",
            "cublasLtMatrixLayoutSetAttribute",
            "cublasLtMatmulDescSetAttribute",
            "cublasLtMatmulPreferenceSetAttribute",
            "cublasLtCreate",
            "cublasLtMatmulDescCreate",
            "cublasLtMatmulPreferenceCreate",
            "cublasLtMatmul",
        ):
            setattr(self, name, self._remembering(name))
        self.cublasLtGetVersion = _Function(lambda: 130100)
        self.cublasLtGetStatusName = _Function(lambda status: f"STATUS_{status}".encode())
        self.cublasLtMatmulAlgoGetHeuristic = _Function(self._heuristic)
        self.cublasLtMatmulAlgoCheck = _Function(self._check)

    def _remembering(self, name):
        def run(*arguments) -> int:
            self.calls.append((name, arguments))
            return 0

        return _Function(run)

    def _heuristic(self, *arguments) -> int:
        most, results_at, count_at = arguments[-3:]
        chosen = self._algorithms[:most]
        if not chosen:
            return NOT_SUPPORTED
        for index, encoded in enumerate(chosen):
            result = bytearray(96)
            result[:ALGORITHM_BYTES] = encoded
            ctypes.memmove(results_at + 96 * index, bytes(result), 96)
        ctypes.c_int.from_address(count_at).value = len(chosen)
        return 0

    def _check(self, *arguments) -> int:
        algorithm_at, result_at = arguments[-2:]
        if ctypes.string_at(algorithm_at, ALGORITHM_BYTES) in self._refused:
            return NOT_SUPPORTED
        ctypes.c_size_t.from_address(result_at + ALGORITHM_BYTES).value = self._workspace_bytes
        return 0

    def named(self, name):
        return [arguments for called, arguments in self.calls if called == name]


@pytest.fixture
def no_device(monkeypatch):
    """What CublasLt asks of torch.cuda, without a GPU."""

    class Stream:
        cuda_stream = 77

    class Nothing:
        def __init__(self, device) -> None:
            pass

        def __enter__(self) -> None:
            pass

        def __exit__(self, *_arguments) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "device", Nothing)


def on_cpu(loaded) -> CublasLt:
    return CublasLt(torch.device("cpu"), Library(loaded))


def used_algorithm(loaded) -> bytes:
    (*_, algorithm_at, _, _, _) = loaded.named("cublasLtMatmul")[-1]
    return ctypes.string_at(algorithm_at, ALGORITHM_BYTES)


X = torch.zeros(5, 64, dtype=torch.bfloat16)
WEIGHT = torch.zeros(24, 64, dtype=torch.bfloat16)


def test_a_refused_call_is_an_error_with_the_name_of_its_status() -> None:
    loaded = FakeLoaded()
    loaded.cublasLtCreate = _Function(lambda handle: 1)
    with pytest.raises(CublasLtError, match="cublasLtCreate: STATUS_1") as caught:
        Library(loaded).handle()
    assert caught.value.status == "STATUS_1"


def test_splits_are_matrices_side_by_side_in_the_operands_and_apart_in_the_result(
    no_device,
) -> None:
    loaded = FakeLoaded()
    product = Product(5, 24, 64, 2, torch.bfloat16, torch.float32)
    on_cpu(loaded).layouts(product)
    shapes = [call[2:] for call in loaded.named("cublasLtMatrixLayoutInit_internal")]
    assert shapes == [(14, 32, 24, 64), (14, 32, 5, 64), (0, 24, 5, 24)]
    values = [call[2]._obj.value for call in loaded.named("cublasLtMatrixLayoutSetAttribute")]
    assert values == [2, 32, 2, 32, 2, 120]


def test_algorithms_come_in_the_librarys_order_and_survive_as_text(no_device) -> None:
    configs = lt_configs(on_cpu(FakeLoaded()), X, WEIGHT, 1, 9)
    assert [bytes.fromhex(config.algorithm) for config in configs] == [b"a" * 64, b"b" * 64]
    assert {config.version for config in configs} == {130100}


def test_no_algorithm_at_all_is_an_error(no_device) -> None:
    with pytest.raises(CublasLtError, match="Heuristic: STATUS_15"):
        lt_configs(on_cpu(FakeLoaded(algorithms=())), X, WEIGHT, 1, 9)


@pytest.mark.parametrize(("num_splits", "dtype"), [(1, torch.bfloat16), (4, torch.float32)])
def test_a_gemm_runs_its_algorithm_on_the_current_stream(no_device, num_splits, dtype) -> None:
    loaded = FakeLoaded()
    config = LtConfig(130100, num_splits, (b"b" * 64).hex())
    # Kept: the call's arguments point into it.
    gemm = LtGemm(on_cpu(loaded), config, WEIGHT)
    out = gemm(X, WEIGHT)
    assert out.shape == (num_splits, 5, 24)
    assert out.dtype == dtype
    arguments = loaded.named("cublasLtMatmul")[-1]
    assert used_algorithm(loaded) == b"b" * 64
    assert (arguments[3], arguments[5]) == (WEIGHT.data_ptr(), X.data_ptr())
    assert (arguments[8], arguments[10]) == (out.data_ptr(), out.data_ptr())
    assert arguments[-2:] == (WORKSPACE_BYTES, 77)


@pytest.mark.parametrize("num_calls", [1, 3])
def test_descriptors_are_made_once_for_a_number_of_tokens(no_device, num_calls) -> None:
    loaded = FakeLoaded()
    gemm = LtGemm(on_cpu(loaded), LtConfig(130100, 1, (b"a" * 64).hex()), WEIGHT)
    for _ in range(num_calls):
        gemm(X, WEIGHT)
    assert len(loaded.named("cublasLtMatrixLayoutInit_internal")) == 3
    gemm(X[:2], WEIGHT)
    assert len(loaded.named("cublasLtMatrixLayoutInit_internal")) == 6


@pytest.mark.parametrize(
    "loaded", [FakeLoaded(refused=(b"b",)), FakeLoaded(workspace_bytes=WORKSPACE_BYTES + 1)]
)
def test_an_algorithm_that_does_not_suit_gives_way_to_the_librarys_first(
    no_device, loaded, caplog
) -> None:
    caplog.set_level("INFO")
    gemm = LtGemm(on_cpu(loaded), LtConfig(130100, 1, (b"b" * 64).hex()), WEIGHT)
    gemm(X, WEIGHT)
    assert used_algorithm(loaded) == b"a" * 64
    assert "does not serve" in caplog.text


def test_an_algorithm_is_its_bytes() -> None:
    encoded = bytes(range(ALGORITHM_BYTES))
    assert Algorithm(encoded).encoded == encoded
