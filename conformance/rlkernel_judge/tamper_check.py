"""Functions that a candidate must not replace, and which of them it did.

The judge does not depend on them: the worker bound its own before the candidate was loaded, and the clock and the
reference run in another process. A candidate that replaces one is refuted all the same, for it tries to be judged by
something other than its kernel.
"""

from __future__ import annotations

import builtins
import gc
import socket
import sys
import threading
import time
from typing import Any, Final

import torch

# module or class -> attributes whose identity is compared
_GUARDED: Final[tuple[tuple[Any, tuple[str, ...]], ...]] = (
    (time, ("perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "time", "time_ns", "process_time")),
    (builtins, ("isinstance", "type", "len", "getattr", "open", "__import__", "float", "sum", "abs", "min", "max")),
    (socket, ("socket", "socketpair")),
    (
        torch,
        ("empty", "empty_like", "zeros", "full", "rand", "randn", "randint", "equal", "allclose", "isclose", "matmul",
         "log_softmax", "logsumexp", "softmax", "get_rng_state", "no_grad", "compile"),
    ),
    (torch.testing, ("assert_close",)),
    (torch.autograd, ("grad", "backward")),
    (torch.nn.functional, ("log_softmax", "softmax", "linear", "cross_entropy")),
    (torch.cuda, ("synchronize", "Event", "Stream", "current_stream", "CUDAGraph")),
    (torch.cuda.Event, ("record", "elapsed_time", "synchronize", "wait")),
    (torch.cuda.Stream, ("synchronize", "wait_stream")),
    (
        torch.Tensor,
        ("__eq__", "__getitem__", "copy_", "clone", "cpu", "cuda", "to", "double", "float", "detach", "numpy", "view",
         "item", "tolist", "untyped_storage", "__torch_function__"),
    ),
)  # fmt: skip


_OURS: Final = (
    "worker",
    "wire",
    "tamper_check",
    "workloads",
    "sandbox",
    "arena",
    "guard",
)  # modules of the judge in this process


def snapshot() -> dict[str, Any]:
    """What each name stands for now."""
    found: dict[str, Any] = {}
    for home, names in _GUARDED:
        for name in names:
            found[f"{_name(home)}.{name}"] = _raw(home, name)
    for ours in _OURS:
        module = sys.modules.get(f"rlkernel_judge.{ours}")
        for name, value in vars(module).items() if module else ():
            if callable(value):
                found[f"judge.{ours}.{name}"] = value
    found["sys.settrace"] = sys.gettrace()
    found["sys.setprofile"] = sys.getprofile()
    found["threading.settrace"] = threading.gettrace()
    found["gc.callbacks"] = len(gc.callbacks)
    found["torch function mode"] = torch._C._len_torch_function_stack()  # noqa: SLF001 there is no public name
    found["torch dispatch mode"] = torch._C._len_torch_dispatch_stack()  # noqa: SLF001 the same
    return found


def changed(before: dict[str, Any]) -> list[str]:
    """Names of what is no longer what it was."""
    now = snapshot()
    return sorted(name for name, was in before.items() if now.get(name) is not was)


def _name(home: Any) -> str:
    return home.__name__ if isinstance(home, type(time)) else f"{home.__module__}.{home.__qualname__}"


def _raw(home: Any, name: str) -> Any:
    """The attribute as it is stored, so that two readings of a class method are one object."""
    return vars(home).get(name, getattr(home, name, None))
