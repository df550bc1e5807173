"""Planted bugs that any operator may have: they prove the clauses 91 to 98 of each.

Of 91 to 96 each bug refutes the one that it names and keeps the others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import MISSING, fields, replace
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_conformance.call_checks import leaves
from rlkernel_conformance.mutants import plant
from rlkernel_conformance.mutants.bug import Bug, Run
from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec import OPERATORS
from rlkernel_core.spec.capture import CaptureCall
from rlkernel_core.spec.rollout_buffer import RolloutBufferCall
from rlkernel_core.tree import flatten
from rlkernel_torch.rollout.batch import Batch, Staging
from rlkernel_torch.rollout_buffer import PagedRolloutBuffer, rollout_buffer

Change = Callable[[str, Tensor], Tensor]  # of a tensor of the result and its name


def results(right: Run, call: Any, change: Change) -> Any:
    """Plain torch with every tensor of its results replaced; of what lives on, the results that it gives later."""
    if isinstance(call, CaptureCall):
        captured = right(call)
        return lambda *args, **kwargs: replaced(captured(*args, **kwargs), change)
    return _buffer(call, change) if isinstance(call, RolloutBufferCall) else replaced(right(call), change)


def replaced(out: Any, change: Change) -> Any:
    """A nested result with every tensor replaced."""
    found, structure = flatten(out)
    pairs = zip(structure.names(), found, strict=True)
    return structure.build([change(name, x) if isinstance(x, Tensor) else x for name, x in pairs])


def _buffer(call: RolloutBufferCall, change: Change) -> Any:
    class ChangedBatch(Batch):
        def __getitem__(self, name: str) -> Tensor:
            return change(name, super().__getitem__(name))

    class ChangedStaging(Staging):
        batch = ChangedBatch

    class ChangedBuffer(PagedRolloutBuffer):
        staging = ChangedStaging

    return rollout_buffer(call, ChangedBuffer)


def accepts_what_it_cannot_do(right: Run, call: Any) -> Any:
    sizes = [x.shape[0] for x in leaves(call.as_dict()).values() if x.dim()] or [getattr(call, "max_seqs", 1)]
    if any(size % 11 == 0 for size in sizes if isinstance(size, int) and size > 0):
        raise RuntimeError("no tile of this size was compiled")
    return right(call)


def fits(_call: Any) -> None:
    """Everything does."""
    return


def answers_a_bad_argument(right: Run, call: Any) -> Any:
    try:
        return right(call)
    except ArgumentError as error:
        bad = error.argument.partition("[")[0].partition(".")[0]
        default = next((f.default for f in fields(call) if f.name == bad), MISSING)
        return getattr(call, bad, None) if default is MISSING else right(replace(call, **{bad: default}))


def adds_to_fresh_storage(right: Run, call: Any) -> Any:
    def change(_: str, x: Tensor) -> Tensor:
        if x.is_floating_point() and x.element_size() > 1:
            return x + 0 * torch.empty_like(x)
        return x ^ torch.empty(x.shape, device=x.device).isnan().to(x.dtype)  # 1 where fresh storage holds NaN

    return results(right, call, change)


class Lazy(Tensor):
    """Computes when it is looked at."""


def gives_lazy_results(right: Run, call: Any) -> Any:
    return results(right, call, lambda _, x: x.as_subclass(Lazy))


_ROOM: Final[dict[Any, Tensor]] = {}


def gives_the_same_storage_again(right: Run, call: Any) -> Any:
    def change(name: str, x: Tensor) -> Tensor:
        room = _ROOM.setdefault((type(call), name, x.shape, x.dtype), torch.empty_like(x))
        return x if x.requires_grad else room.copy_(x.detach())

    return results(right, call, change)


class _View(torch.autograd.Function):
    """The same numbers, as a view of what this node made."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        del ctx
        return x.clone().view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        del ctx
        return grads[0]


def gives_a_view(right: Run, call: Any) -> Any:
    return results(right, call, lambda _, x: _View.apply(x) if x.requires_grad else x)  # type: ignore[no-untyped-call]


class _SameGradient(torch.autograd.Function):
    """The same numbers; the gradient lies where that of the last backward pass lay."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.room = torch.empty_like(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        room: Tensor = ctx.room.copy_(grads[0])
        return room


def gives_the_same_gradient_again(right: Run, call: Any) -> Any:
    given = ((f.name, getattr(call, f.name)) for f in fields(call))
    needy = {n: x for n, x in given if isinstance(x, Tensor) and x.requires_grad}
    return right(replace(call, **{n: _SameGradient.apply(x) for n, x in needy.items()}))  # type: ignore[no-untyped-call]


def sets_the_default_dtype(right: Run, call: Any) -> Any:
    out = right(call)
    torch.set_default_dtype(torch.float32)
    return out


def sets_the_number_of_threads(right: Run, call: Any) -> Any:
    torch.set_num_threads(1)
    return right(call)


def leaves_gradients_on(right: Run, call: Any) -> Any:
    out = right(call)
    torch.set_grad_enabled(True)
    return out


def stops_the_clock(right: Run, call: Any) -> Any:
    time.perf_counter = lambda: 0.0
    torch.cuda.Event.elapsed_time = lambda *_: 1e-3  # type: ignore[method-assign]
    return right(call)


def works_on_in_a_thread(right: Run, call: Any) -> Any:
    out = right(call)
    threading.Thread(target=threading.Event().wait, args=(1.0,), daemon=True).start()
    return out


_KEPT: Final[list[Tensor]] = []


def keeps_what_it_made(right: Run, call: Any) -> Any:
    _KEPT.append(torch.empty(64))
    return right(call)


def is_wrong_under_autocast(right: Run, call: Any) -> Any:
    if not torch.is_autocast_enabled("cpu"):
        return right(call)
    return results(right, call, lambda _, x: x + 1 if x.dtype is not torch.bool else ~x)


LARGE: Final = 1 << 16  # elements


def is_wrong_at_real_sizes(right: Run, call: Any) -> Any:
    elements = max((x.numel() for x in leaves(call.as_dict()).values()), default=getattr(call, "max_tokens", 0))
    if elements < LARGE:
        return right(call)
    return results(right, call, lambda _, x: x + 1 if x.dtype is not torch.bool else ~x)


def bugs_of(op: str, prefix: str) -> dict[str, Bug]:
    """The bugs by name, for an operator whose clauses start with a prefix."""
    rows: tuple[tuple[int, Callable[[Run, Any], Any], str], ...] = (
        (91, accepts_what_it_cannot_do, "a check that lets through what no kernel was made for"),
        (92, answers_a_bad_argument, "bad arguments replaced by defaults"),
        (93, adds_to_fresh_storage, "beta = 0 times storage that was never written"),
        (94, gives_lazy_results, "lazy tensors (KernelBench)"),
        (94, gives_the_same_storage_again, "static outputs that the next call overwrites"),
        *(
            (
                (94, gives_a_view, "y = out.reshape(shape) in an autograd function: y += 1 is refused"),
                (94, gives_the_same_gradient_again, "a static gradient that the next backward pass overwrites"),
            )
            if OPERATORS[op].carrying
            else ()
        ),
        (95, sets_the_default_dtype, "a default put back to what it mostly is"),
        (95, sets_the_number_of_threads, "threads limited for a measurement"),
        (95, leaves_gradients_on, "grad mode put back to what it mostly is"),
        (95, plant.draws_from_the_global_generator, "draws from the global generator"),
        (95, stops_the_clock, "a monkey-patched timer (KernelBench)"),
        (95, works_on_in_a_thread, "results that another thread finishes"),
        (96, keeps_what_it_made, "leaks allocations"),
        (97, is_wrong_under_autocast, "computes in bfloat16 under autocast"),
        (98, is_wrong_at_real_sizes, "an index of 16 bits"),
    )
    bugs = {f"{how.__name__}_in_{op}": Bug(f"{prefix}-{number}", wrong, how) for number, how, wrong in rows}
    unfit, unchecked = f"accepts_what_it_cannot_do_in_{op}", f"answers_a_bad_argument_in_{op}"
    return {
        **bugs,
        unfit: replace(bugs[unfit], fits=f"{__name__}:fits"),
        unchecked: replace(bugs[unchecked], check=lambda _: fits),
    }
