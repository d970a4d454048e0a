"""Whether a CUDA graph can repeat what some code does on the device. Knows no model.

The code runs twice, eagerly, over inputs that differ in nothing but values. An operation whose
result the host reads, whose shape depends on values, or that copies between host and device stands
in the way: CUDA refuses to capture it. Between the two runs every operation has to be the same,
down to its Python numbers: what differs, a replay would repeat as it was at the capture.
"""

import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

NUM_TRIAL_TOKENS = 8

_aten = torch.ops.aten
_OF_VALUES = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape))
_PICKING = (_aten.index.Tensor, _aten._unsafe_index.Tensor)
_PUTTING = (_aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default)
_COPIES = (_aten._to_copy.default, _aten.copy_.default, _aten.copy.default)
# Python takes their values without an operation of the device that could be seen.
_READS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)
_MASKS = (torch.bool, torch.uint8)
# The same code has run without being watched.
_OF_BEING_WATCHED = (RuntimeError, TypeError, ValueError, AttributeError, LookupError)
_TORCH = Path(torch.__file__).parent

Signature = tuple[Any, ...]


class _NotCapturableError(Exception):
    """The message names the operation."""


def capture_obstacle(
    device: torch.device, run: Callable[[], object], run_of_other_values: Callable[[], object]
) -> str:
    """Why no graph can repeat run; "" where one can.

    Both launch on inputs of the same shapes, on the device. What their code makes once and keeps
    has to be there: it has run before. Waits for the device where it reads from it.
    """
    try:
        first, second = _signatures(device, run), _signatures(device, run_of_other_values)
    except _NotCapturableError as error:
        return f"{error}{_place_of(error)}"
    except _OF_BEING_WATCHED as error:
        return f"it cannot be watched: {error}"
    for one, other in zip_longest(first, second):
        if one != other:
            name = (one or other or ("",))[0]
            return f"{name} is not the same for other tokens at other positions"
    return ""


def _signatures(device: torch.device, run: Callable[[], object]) -> list[Signature]:
    operations = _Operations(device)
    with _waits_raise(device), _PythonReads(), operations:
        run()
    return operations.seen


class _PythonReads(TorchFunctionMode):
    """Raises where Python asks for a tensor's values."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in _READS:
            raise _NotCapturableError(f"Tensor.{func.__name__}")
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every operation; raises at the first that cannot be captured."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[Signature] = []
        self._device_type = device.type

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # Of a known number of classes it looks at values on CPU alone.
        is_one_hot = func is _aten.one_hot.default and _num_classes(*args, **kwargs) >= 0
        if not is_one_hot:
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        if not is_one_hot and _reads_values(func, args):
            raise _NotCapturableError(str(func))
        try:
            out = func(*args, **kwargs)
        except RuntimeError as error:
            if "synchronizing CUDA operation" in str(error):
                raise _NotCapturableError(str(func)) from error
            raise
        if self._comes_from_host(func, args, out):
            raise _NotCapturableError(f"{func} between host and device")
        self.seen.append((str(func), *map(_of, _flat((args, kwargs)))))
        return out

    def _comes_from_host(self, func: Any, args: Sequence[Any], out: Any) -> bool:
        """As does a tensor made from Python values, of which the copy itself is not seen."""
        if func is _aten.lift_fresh.default:
            return bool(out.device.type == self._device_type)
        if func not in _COPIES:
            return False
        sources = [one for one in args if isinstance(one, torch.Tensor)]
        return any(source.device.type != out.device.type for source in sources)


def _num_classes(tensor: torch.Tensor, num_classes: int = -1) -> int:
    return num_classes


def _reads_values(func: Any, args: Sequence[Any]) -> bool:
    if func in _PICKING or func in _PUTTING:
        by_mask = any(index is not None and index.dtype in _MASKS for index in args[1])
        # torch fills where a mask is true with one value, which needs no places.
        return by_mask and not (func in _PUTTING and args[2].numel() == 1)
    return bool(_OF_VALUES.intersection(func.tags))


def _flat(values: Any) -> Iterator[Any]:
    if isinstance(values, dict):
        values = tuple(values.items())
    if not isinstance(values, list | tuple):
        yield values
        return
    for value in values:
        yield from _flat(value)


def _of(value: Any) -> Any:
    """What a graph keeps of an argument. Of a group of ranks and of how it joins what they bring,
    which have no equality, what they are: a model has one of each."""
    if isinstance(value, torch.ScriptObject):
        return str(value._type())
    return (value.shape, value.dtype) if isinstance(value, torch.Tensor) else value


def _place_of(error: BaseException) -> str:
    """The last line outside of torch and of this file that led to it."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path != Path(__file__) and _TORCH not in path.parents:
            return f" ({path.name}:{frame.lineno}, {frame.name})"
    return ""


@contextmanager
def _waits_raise(device: torch.device) -> Iterator[None]:
    """What waits within an operation, as grouped products do of types that have no kernel."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    try:
        _set_sync_mode("error")
        yield
    finally:
        _set_sync_mode(before)


def _set_sync_mode(mode: int | str) -> None:
    """torch warns once that this is a prototype."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode")
        torch.cuda.set_sync_debug_mode(mode)
