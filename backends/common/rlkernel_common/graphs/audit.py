"""Refuses, without a GPU, what a graph cannot record: host synchronization, value-dependent shapes, foreign generators.

Two modes watch one run: one sees operators below autograd, the other sees Python calls: the tensor methods that read
memory without an operator (`tolist`, `numpy`), and generators, which lose their identity below.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from typing import Any, Final, Self

import torch
from torch import Generator, Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from rlkernel_core.errors import CaptureError

_SYNC: Final = "reads a value to the host, which a graph cannot"
_SHAPE: Final = "has a result whose shape depends on values, which a graph cannot"
# aten operator -> why it cannot be recorded. Each of these synchronizes the stream on CUDA and HIP.
FORBIDDEN: Final[Mapping[str, str]] = {
    "_local_scalar_dense": _SYNC,
    "equal": _SYNC,
    "is_nonzero": _SYNC,
    "nonzero": _SHAPE,
    "masked_select": _SHAPE,
    "_unique": _SHAPE,
    "_unique2": _SHAPE,
    "unique_dim": _SHAPE,
    "unique_consecutive": _SHAPE,
    "bincount": _SHAPE,
    "argwhere": _SHAPE,
}
_BY_BOOL: Final = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})
_METHODS: Final = {Tensor.tolist: _SYNC, Tensor.numpy: _SYNC, Tensor.__array__: _SYNC}
_RECORDING: Final[ContextVar[bool]] = ContextVar("recording", default=False)
_COLLECTIVES: Final = frozenset({"c10d", "_c10d_functional", "c10d_functional"})


def recording() -> bool:
    """Whether this run is being recorded, so that no value may be looked at: is_current_stream_capturing of a CPU."""
    return _RECORDING.get()


class _Operators(TorchDispatchMode):
    def __init__(self, *, collectives: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._collectives = collectives

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        why = self._why_not(func, args, kwargs)
        if why:
            raise CaptureError(f"{func.namespace}::{func.overloadpacket.__name__} {why}.")
        return func(*args, **kwargs)

    def _why_not(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        name = func.overloadpacket.__name__
        if func.namespace in _COLLECTIVES and not self._collectives:
            return "is a collective; pass collectives=True if every rank captures in the same order"
        if func.namespace != "aten":
            return None
        if name in _BY_BOOL and _selects(*args[:3]):
            return f"with a bool index {_SHAPE}; use torch.where"
        if name == "repeat_interleave" and "output_size" not in kwargs and len(args) < 4:
            return f"without output_size {_SHAPE}"
        if name == "_to_copy" and torch.device(kwargs.get("device") or args[0].device).type != args[0].device.type:
            return "copies between devices, which synchronizes"
        return FORBIDDEN.get(name)


def _selects(_: Tensor, indices: Sequence[Tensor | None], value: Any = None) -> bool:
    """Whether a bool index selects rows. Writing one value through a mask is a masked_fill, which selects nothing."""
    by_bool = any(i is not None and i.dtype in {torch.bool, torch.uint8} for i in indices)
    fills = isinstance(value, Tensor) and value.numel() == 1
    return by_bool and not fills


class _Methods(TorchFunctionMode):
    def __init__(self, generators: Collection[Generator]) -> None:
        super().__init__()
        self._generators = {id(g) for g in generators}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _METHODS:
            raise CaptureError(f"Tensor.{func.__name__} {_METHODS[func]}.")
        kwargs = kwargs or {}
        for g in (*args, *kwargs.values()):
            if isinstance(g, Generator) and id(g) not in self._generators:
                raise CaptureError(
                    f"{func.__name__} draws from a generator that is not declared; pass generators=(g,)."
                )
        return func(*args, **kwargs)


class Audit(ExitStack):
    """Within it, work that a graph cannot record raises CaptureError."""

    def __init__(self, generators: Collection[Generator], *, collectives: bool) -> None:
        super().__init__()
        self._modes = (_Methods([*generators, torch.default_generator]), _Operators(collectives=collectives))

    def __enter__(self) -> Self:
        super().__enter__()
        self.callback(_RECORDING.reset, _RECORDING.set(True))
        for mode in self._modes:
            self.enter_context(mode)
        return self
