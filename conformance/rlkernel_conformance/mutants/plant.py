"""The usual ways to plant a bug: in the record that goes in, in the result that comes out, or around the call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from rlkernel_conformance.mutants.bug import Bug, Check, How, Run
from rlkernel_core.errors import ArgumentError

Change = Callable[[Any], Any]  # of a record, to another record


def as_it_is(right: Run, call: Any) -> Any:
    """Plain torch."""
    return right(call)


def given(**changes: Any) -> How:
    """Arguments replaced: each by a value, or by a function of the record."""

    def how(right: Run, call: Any) -> Any:
        return right(replace(call, **{n: x(call) if callable(x) else x for n, x in changes.items()}))

    return how


def mapped(call: Any, maps: Mapping[str, Any]) -> Any:
    """A record with arguments replaced, where they are given: by functions of themselves, or by tables of values."""
    given = {n: x for n in maps if (x := getattr(call, n)) is not None}
    return replace(
        call, **{n: maps[n].get(x, x) if isinstance(maps[n], dict) else maps[n](x) for n, x in given.items()}
    )


def maps(**changes: Callable[[Any], Any] | dict[Any, Any]) -> How:
    """Arguments replaced, where they are given: by functions of themselves, or by tables of values."""
    return lambda right, call: right(mapped(call, changes))


def ignores(*names: str) -> How:
    """Arguments that are accepted and have no effect."""

    def how(right: Run, call: Any) -> Any:
        defaults = {f.name: f.default for f in fields(call) if f.default is not MISSING}
        return right(replace(call, **{name: defaults[name] for name in names}))

    return how


def returns(**changes: Callable[[Any, Any], Any]) -> How:
    """Fields of the result replaced by functions of the record and the result; one that is None stays None."""

    def how(right: Run, call: Any) -> Any:
        out = right(call)
        return replace(out, **{n: f(call, out) for n, f in changes.items() if getattr(out, n) is not None})

    return how


def lenient(clause: str, wrong: str, change: Change | None = None, **maps: Callable[[Any], Any]) -> Bug:
    """Bad calls are changed into good ones before they are checked, by the record or argument by argument."""
    good = change or (lambda call: mapped(call, maps))
    return Bug(clause, wrong, lambda right, call: right(good(call)), lambda check: lambda call: check(good(call)))


def anonymous_errors(clause: str) -> Bug:
    """Bad calls are refused, and not by the name of what is bad."""

    def renaming(check: Check) -> Check:
        def renamed(call: Any) -> None:
            try:
                check(call)
            except ArgumentError as error:
                raise ArgumentError("input", error.got, "is wrong", "") from error

        return renamed

    return Bug(clause, "an error without a name", as_it_is, renaming)


def where(wanted: Callable[[Any], Any], how: How) -> How:
    """The bug in some calls only."""
    return lambda right, call: how(right, call) if wanted(call) else right(call)


def alternates(how: How) -> How:
    """The bug at every second call only."""
    calls = count()
    return lambda right, call: how(right, call) if next(calls) % 2 == 0 else right(call)


def nondeterministic(clause: str, field: str, wrong: str = "floating atomics, declared deterministic (RL.cu)") -> Bug:
    """A field of the result that is lower at every second call."""
    return Bug(clause, wrong, alternates(returns(**{field: lambda _, out: lower(getattr(out, field))})))


def batch_dependent(clause: str, field: str, wrong: str, large: Callable[[Any], Any]) -> Bug:
    """A field of the result that is lower in large batches."""
    return Bug(clause, wrong, returns(**{field: lambda call, out: lower(getattr(out, field), large(call))}))


def fails_if(empty: Callable[[Any], bool]) -> How:
    """A launch of zero blocks, for calls that have nothing to do."""

    def how(right: Run, call: Any) -> Any:
        if empty(call):
            raise RuntimeError("CUDA error: invalid configuration argument")
        return right(call)

    return how


def writes(write: Callable[[Any], object]) -> How:
    """A call that leaves its arguments changed."""

    def how(right: Run, call: Any) -> Any:
        out = right(call)
        with torch.no_grad():
            write(call)
        return out

    return how


def writes_first(write: Callable[[Any], object]) -> How:
    """A call that changes its arguments and then reads them."""

    def how(right: Run, call: Any) -> Any:
        with torch.no_grad():
            write(call)
        return right(call)

    return how


def reads_back(value: Callable[[Any, Any], Tensor | None]) -> How:
    """A call that reads back a tensor of one number, chosen by record and result."""

    def how(right: Run, call: Any) -> Any:
        out = right(call)
        read = value(call, out)
        if read is not None:
            read.item()
        return out

    return how


def reads_a_value(clause: str, of: Callable[[Any], Tensor]) -> Bug:
    """The first value of an argument is read back."""
    return Bug(clause, "the host looks at a value", reads_back(lambda call, _: of(call).reshape(-1)[0]))


def ignores_strides(name: str) -> How:
    """A matrix without gradient that is read as if it were contiguous."""

    def flat(call: Any) -> Tensor:
        x: Tensor = getattr(call, name)
        free = x.dim() == 2 and not x.is_contiguous() and not x.requires_grad
        return x.as_strided(x.shape, (x.shape[1], 1)) if free else x

    return given(**{name: flat})


def draws_from_the_global_generator(right: Run, call: Any) -> Any:
    """A call that moves the generator of the process."""
    torch.rand(1)
    return right(call)


def lower(x: Tensor, where: Any = True) -> Tensor:
    """One step of the dtype towards minus infinity, where x is a finite number but 0; the gradient stays."""
    values = x.detach()
    step = torch.nextafter(values, torch.full_like(values, -torch.inf)) - values
    return x + torch.where(torch.as_tensor(where, device=x.device) & values.isfinite() & (values != 0), step, 0.0)


def with_gradient_times(x: Tensor, factor: float | Tensor) -> Tensor:
    """The same numbers, whose gradient is multiplied by a factor."""
    return x.detach() + factor * (x - x.detach()).nan_to_num()


def with_upstream(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """The same numbers, whose upstream gradient is changed before it goes on."""
    out: Tensor = _Upstream.apply(x, change)  # type: ignore[no-untyped-call]
    return out


class _Upstream(torch.autograd.Function):
    """The same value; its gradient is a function of the one from above."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Any) -> Tensor:
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        return ctx.change(upstream[0]), None
