"""Planted bugs that any operator may have, in every operator: they prove the clauses 91 to 96 and "may run in a graph".

Of these clauses each dies on just the one it was planted for. The operator's own clauses it may refute as well.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_common.graphs.engine import Graphed
from rlkernel_conformance.call_checks import leaves
from rlkernel_conformance.clauses.common_clauses import GRAPHS
from rlkernel_conformance.mutants import mutant
from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec import OPERATORS
from rlkernel_core.spec.form import OpSpec, common_clauses, prefix_of
from rlkernel_core.tree import flatten

Bug = Callable[..., Any]  # takes the reference's implementation, the spec, and the arguments by name
HERE: Final = __name__


def rows_of(given: dict[str, Any]) -> int:
    """A size that a kernel may not be made for."""
    sizes = [x.shape[0] for x in leaves(given).values() if x.dim()]
    wanted = sizes[0] if sizes else given.get("max_seqs", 1)
    return wanted if isinstance(wanted, int) and wanted > 0 else 1


def changed(out: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The result with every floating tensor replaced; an object with a life gives changed results."""
    if isinstance(out, Graphed):
        replaying = out._replaying

        def changing(*given: Any) -> Callable[[Any], Any]:
            run = replaying(*given)
            return lambda leaves: changed(run(leaves), change)

        out._replaying = changing  # type: ignore[method-assign]
        return out
    if hasattr(out, "reserve"):
        fill = out._staging.fill

        def filled(*args: Any) -> Any:
            batch = fill(*args)
            batch._fields = changed(batch._fields, change)
            return batch

        out._staging.fill = filled
        return out
    found, structure = flatten(out)
    return structure.build([change(x) if isinstance(x, Tensor) else x for x in found])


def accepts_what_it_cannot_do(reference: Any, spec: OpSpec[Any, Any], **given: Any) -> Any:
    if rows_of(given) % 11 == 0:
        raise RuntimeError("no tile of this size was compiled")
    return reference(**given)


def fits(_call: Any) -> None:
    """Everything does."""
    return


def answers_a_bad_argument(reference: Any, spec: OpSpec[Any, Any], **given: Any) -> Any:
    try:
        return reference(**given)
    except ArgumentError as error:
        bad = error.argument.partition("[")[0].partition(".")[0]
        default = spec.parameters[bad].default if bad in spec.parameters else inspect.Parameter.empty
        if default is inspect.Parameter.empty:
            return given.get(bad)
        return reference(**{**given, bad: default})


def adds_to_fresh_storage(reference: Any, spec: OpSpec[Any, Any], **given: Any) -> Any:
    def change(x: Tensor) -> Tensor:
        return x + 0 * torch.empty_like(x) if x.is_floating_point() and x.element_size() > 1 else x ^ _spill(x)

    return changed(reference(**given), change)


def _spill(x: Tensor) -> Tensor:
    """0, or 1 where fresh storage holds the largest number; for integers, bools and 8-bit floats."""
    fresh = torch.empty(x.shape, device=x.device)
    return fresh.isnan().to(x.dtype)


class Lazy(Tensor):
    """Computes when it is looked at."""


def gives_lazy_results(reference: Any, spec: OpSpec[Any, Any], **given: Any) -> Any:
    return changed(reference(**given), lambda x: x.as_subclass(Lazy))


_ROOM: Final[dict[Any, Tensor]] = {}


def gives_the_same_storage_again(reference: Any, spec: OpSpec[Any, Any], **given: Any) -> Any:
    count = iter(range(1 << 20))

    def change(x: Tensor) -> Tensor:
        room = _ROOM.setdefault((spec.name, next(count) % 16, x.shape, x.dtype), torch.empty_like(x))
        return room.copy_(x.detach()) if not x.requires_grad else x

    return changed(reference(**given), change)


def sets_the_default_dtype(reference: Any, spec: OpSpec[Any, Any], **given: Any) -> Any:
    out = reference(**given)
    torch.set_default_dtype(torch.float32)
    return out


def sets_the_number_of_threads(reference: Any, spec: OpSpec[Any, Any], **given: Any) -> Any:
    torch.set_num_threads(1)
    return reference(**given)


def leaves_gradients_on(reference: Any, spec: OpSpec[Any, Any], **given: Any) -> Any:
    out = reference(**given)
    torch.set_grad_enabled(True)
    return out


def draws_from_the_global_generator(reference: Any, spec: OpSpec[Any, Any], **given: Any) -> Any:
    torch.rand(1)
    return reference(**given)


def stops_the_clock(reference: Any, spec: OpSpec[Any, Any], **given: Any) -> Any:
    time.perf_counter = lambda: 0.0
    torch.cuda.Event.elapsed_time = lambda *_: 1e-3
    return reference(**given)


def works_on_in_a_thread(reference: Any, spec: OpSpec[Any, Any], **given: Any) -> Any:
    out = reference(**given)
    threading.Thread(target=threading.Event().wait, args=(1.0,), daemon=True).start()
    return out


_KEPT: Final[list[Tensor]] = []


def keeps_what_it_made(reference: Any, spec: OpSpec[Any, Any], **given: Any) -> Any:
    _KEPT.append(torch.empty(64))
    return reference(**given)


def asks_the_host(reference: Any, spec: OpSpec[Any, Any], **given: Any) -> Any:
    for x in leaves(given).values():
        float(x.reshape(-1)[0])
    return reference(**given)


# Bugs by the clause that each is planted for.
PLANTED: Final[dict[int, tuple[tuple[Bug, str], ...]]] = {
    91: ((accepts_what_it_cannot_do, "a check that lets through what no kernel was made for"),),
    92: ((answers_a_bad_argument, "bad arguments replaced by defaults"),),
    93: ((adds_to_fresh_storage, "beta = 0 times storage that was never written"),),
    94: (
        (gives_lazy_results, "lazy tensors (KernelBench)"),
        (gives_the_same_storage_again, "static outputs that the next call overwrites"),
    ),
    95: (
        (sets_the_default_dtype, "a default put back to what it mostly is"),
        (sets_the_number_of_threads, "threads limited for a measurement"),
        (leaves_gradients_on, "grad mode put back to what it mostly is"),
        (draws_from_the_global_generator, "draws from the global generator"),
        (stops_the_clock, "a monkey-patched timer (KernelBench)"),
        (works_on_in_a_thread, "results that another thread finishes"),
    ),
    96: ((keeps_what_it_made, "leaks allocations"),),
}


def _plant(op: str, clause: str, bug: Bug, origin: str, **more: Any) -> None:
    spec = OPERATORS[op]
    own = [c.id for c in spec.clauses if c not in common_clauses(prefix_of(spec))]

    def planted(reference: Any, *args: Any, **rest: Any) -> Any:
        return bug(reference, spec, **dict(zip(spec.parameters, args, strict=False)), **rest)

    planted.__name__, planted.__module__ = f"{bug.__name__}_in_{op}", HERE
    mutant(clause, *own, origin=origin, **more)(planted)


for _op in OPERATORS:
    for _number, _bugs in PLANTED.items():
        for _bug, _origin in _bugs:
            _more: dict[str, Any] = {"check": f"{HERE}:fits"} if _number == 91 else {"unchecked": _number == 92}
            _plant(_op, f"{prefix_of(OPERATORS[_op])}-{_number}", _bug, _origin, **_more)
for _id in GRAPHS:
    _op = next(op for op, spec in OPERATORS.items() if any(c.id == _id for c in spec.clauses))
    _plant(_op, _id, asks_the_host, "the host looks at a value")
