"""Dry runs of calls, so that what a bundle lacks is a Reason at selection and no error half-way.

Host code is run with a launcher that looks builds up and launches nothing: forward, and backward for the first
result and with the entropy, which is what losses use. A call like one that was tried is not tried again.
Imports torch inside functions only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from rlkernel_core.errors import RLKernelError
from rlkernel_core.quant.tensor import QuantTensor
from rlkernel_core.reasons import Reason
from rlkernel_triton.aot.bundle import BundleError, NoBuildError

if TYPE_CHECKING:
    from rlkernel_triton.launchers import Scope

MANY: Final = 4096  # calls that are remembered
_RANKS: Final = ("group", "process_group")
ENTROPY: Final = ".entropy"
WIDE: Final = 1 << 31  # from here on a number takes 64 bits
_NUMBERS: Final = frozenset({"seed", "step", "stream"})  # which differ from call to call and are numbers to kernels


class DryRuns:
    """Which calls a bundle can serve.

    Args:
        scope: of a `LookupLauncher` over the bundle, and of what calls are planned for.
    """

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._known: dict[Any, Reason | None] = {}

    def missing(self, op: str, call: Any) -> Reason | None:
        """Why a call cannot run from the bundle; None: it can, or running it will say what is wrong."""
        import torch

        args = call.as_dict()
        if any(not isinstance(args.get(n), int | torch.Tensor | None) for n in _RANKS):
            return None  # a dry run would speak to them
        key = (
            op,
            torch.is_grad_enabled(),
            *[(n, call_signature(None if n == "out" else v, n)) for n, v in args.items()],
        )
        if key not in self._known:
            if len(self._known) >= MANY:
                self._known.clear()
            self._known[key] = self._tried(op, call)
        return self._known[key]

    def _tried(self, op: str, call: Any) -> Reason | None:
        from rlkernel_triton.prepared import prepared

        if hasattr(call, "out"):  # which a dry run must not touch
            call = call.of(call, out=None)
        try:
            dry_run(prepared(op, self._scope), call)
        except NoBuildError as error:
            text, _, fix = str(error).partition(". Run")
            return Reason("shape", "unsupported", text, f"Run{fix}")
        except BundleError as error:  # of other kernels than these, or damaged
            text, _, fix = str(error).rpartition(": ")
            return Reason("shape", "unsupported", text, fix)
        except (RLKernelError, RuntimeError):
            return None
        return None


def dry_run(prepare: Callable[[Any], Callable[[Any], Any]], call: Any) -> Any:
    """Run host code on a record, forward and for the gradients that losses ask for; its result."""
    import torch

    out = prepare(call)(call)
    inputs = [x for _, x in named_tensors(call) if x.requires_grad]
    roots = [(n, x) for n, x in named_tensors(out) if x.requires_grad]
    if inputs and roots and torch.is_grad_enabled():
        entropy = [x for n, x in roots if n == ENTROPY]
        for roots_of_loss in dict.fromkeys([(roots[0][1],), (roots[0][1], *entropy)]):
            torch.autograd.grad(_zero_gradients()(*roots_of_loss), inputs, retain_graph=True, allow_unused=True)
    return out


@cache
def _zero_gradients() -> Callable[..., Any]:
    """One number of some results, whose gradient gives each of them zeros.

    Gradients given to autograd by hand make torch import sympy: half a second to two of the first call of a process.
    """
    import torch

    class ZeroGradients(torch.autograd.Function):
        """Zeros both ways."""

        @staticmethod
        def forward(ctx: Any, *results: Any) -> Any:
            ctx.save_for_backward(*results)
            return results[0].new_zeros(())

        @staticmethod
        def backward(ctx: Any, _: Any) -> Any:
            return tuple(torch.zeros_like(x) for x in ctx.saved_tensors)

    found: Callable[..., Any] = ZeroGradients.apply
    return found


def call_signature(x: Any, name: str = "") -> Any:
    """All of an argument that host code plans by, as something that can be looked up."""
    import torch

    if isinstance(x, torch.Tensor):
        sizes = (*map(_class, x.shape[:-1]), *x.shape[-1:], _class(x.numel()))
        strides = tuple((s % 16 == 0, min(s, 2), s >= WIDE) for s in x.stride())
        return x.dtype, sizes, strides, x.is_contiguous(), x.data_ptr() & 15, x.requires_grad, x.device
    if isinstance(x, QuantTensor):
        return x.spec, x.shape, x.dtype, x.layout, tuple(call_signature(part) for part in x.parts.values())
    if name in _NUMBERS and isinstance(x, int):
        return int, x % 16 == 0, x == 1, x.bit_length() // 32
    if isinstance(x, Mapping):
        return tuple((n, call_signature(v)) for n, v in x.items())
    if isinstance(x, tuple | list):
        return tuple(map(call_signature, x))
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return type(x), tuple(call_signature(getattr(x, part.name)) for part in dataclasses.fields(x))
    return type(x), x


def _class(size: int) -> tuple[int, int, bool]:
    """Sizes that host code and a compiler tell apart: by powers of two, and by what is a multiple of 16."""
    return size.bit_length(), max(0, size - 1).bit_length(), size % 16 == 0


def named_tensors(x: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every tensor within a value, by where it stands."""
    import torch

    if isinstance(x, torch.Tensor):
        yield path, x
    elif isinstance(x, Mapping):
        for name, value in x.items():
            yield from named_tensors(value, f"{path}.{name}")
    elif isinstance(x, tuple | list):
        for i, value in enumerate(x):
            yield from named_tensors(value, f"{path}.{i}")
    elif dataclasses.is_dataclass(x) and not isinstance(x, type):
        for part in dataclasses.fields(x):
            yield from named_tensors(getattr(x, part.name), f"{path}.{part.name}")
