"""Calls on which a mutant and the original are compared: examples, with options and tensors changed, and large ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel.discover import guarded
from rlkernel_conformance.example_calls import Call, D, T, V, claimed_choices
from rlkernel_conformance.subject import Subject
from rlkernel_core.errors import RLKernelError

Arguments = dict[str, Any]
_SCALES: Final = (-1.0, 0.1, 8.0, 100.0, 0.0)
_INTS: Final = (0, 1, 2, 3, 7)
_FLOATS: Final = (0.0, 0.1, 0.5, 1.0, 1.5, 3.0, -0.5)
_SIZES: Final = (6, 1, 2, 3, 5, 8, 17, 33)


def plain_call(subject: Subject, seed: int) -> Arguments:
    """The example call of an operator, of several sizes."""
    return Call(seed, _SIZES[seed % len(_SIZES)]).given(subject)


def varied_call(subject: Subject, seed: int) -> Arguments:
    """The example call with some options and tensors changed."""
    draw = torch.Generator().manual_seed(seed)
    return varied(subject, plain_call(subject, int(torch.randint(1 << 20, (), generator=draw))), draw)


def varied(subject: Subject, given: Arguments, draw: torch.Generator) -> Arguments:
    """A call with up to three options and some tensors changed, as the operator's check lets through."""

    def one(of: Sequence[Any]) -> Any:
        return of[int(torch.randint(len(of), (), generator=draw))]

    spec = subject.spec
    words = [f.name.partition(":")[2] for f in spec.features if ":" in f.name]
    pools = {"bool": (True, False), "str": words, "int": _INTS, "float": _FLOATS, "None": (None,)}
    free = {
        name: values
        for name, p in spec.parameters.items()
        if (values := [v for kind, pool in pools.items() if kind in str(p.annotation).split(" | ") for v in pool])
    }
    for name in [one(list(free)) for _ in range(one((0, 1, 2, 3)))] if free else []:
        changed = claimed_choices(subject, {**given, name: one(free[name])})
        if _accepted(subject, changed):
            given = changed
    for name, x in list(given.items()):
        if isinstance(x, Tensor) and x.numel() and x.dim() and one((True, False)):
            changed = {**given, name: one(_others(x, torch.rand(x.shape, generator=draw)))}
            if _accepted(subject, changed):
                given = changed
    return given


def _others(x: Tensor, chance: Tensor) -> list[Tensor]:
    """Tensors in the place of one: strided, of other values here and there (by a `chance` from 0 to 1 for each)."""
    x = x.detach()
    some, zero = chance < 0.3, torch.zeros((), dtype=x.dtype)
    strided, first = torch.stack([x, x], dim=-1)[..., 0], x[..., :1].expand_as(x)
    if not x.is_floating_point():
        return [strided, first, torch.where(some, zero, x)]
    values = [*(x * s for s in _SCALES), x.round(), *(torch.where(some, v, x) for v in (0.0, 1.0, -1e4, torch.nan))]
    return [strided, first, x.double(), x.bfloat16(), *(v.to(x.dtype) for v in values), torch.where(some, first, x)]


def _accepted(subject: Subject, given: Arguments) -> bool:
    def check() -> None:
        call = subject.spec.call(**given)
        if subject.spec.check is not None:
            subject.spec.check(call)
        if not subject.spec.needs(call) <= subject.claims:
            raise RLKernelError("needs what is not claimed")

    return guarded(check)[1] is None


def large_call(subject: Subject, seed: int) -> Arguments:
    """The example call with more rows, tokens, entries of the vocabulary and inputs, up to tens of thousands of one."""
    draw = torch.Generator().manual_seed(seed)

    def one(of: tuple[int, ...]) -> int:
        return of[int(torch.randint(len(of), (), generator=draw))]

    sizes, rows = {}, one((6, 6, 12, 72, 600))
    for size, more in ((V, (V, 1000, 4097, 33_000)), (T, (T, 17, 130, 2049)), (D, (D, 96, 1000))):
        sizes[size] = one(more if rows < 600 else more[:2])  # keep memory small
    given = Call(seed, rows).given(subject)
    changed = {name: _resized(x, sizes, draw) if isinstance(x, Tensor) else x for name, x in given.items()}
    return changed if _accepted(subject, changed) else given


def _resized(x: Tensor, sizes: Mapping[int, int], draw: torch.Generator) -> Tensor:
    """A tensor whose dimensions of some sizes have others: what is there, drawn again, with noise on numbers."""
    for dim, size in enumerate(x.shape):
        if size in sizes and sizes[size] != size:
            order = torch.randint(size, (sizes[size],), generator=draw)
            x = x.index_select(dim, order)
            if x.is_floating_point():
                x = x * (1 + 0.2 * torch.randn(x.shape, generator=draw, dtype=torch.float32)).to(x.dtype)
    return x


# Where calls come from, and what share of the calls: a subject and a seed -> arguments, made anew.
SOURCES: Final[Mapping[Callable[[Subject, int], Arguments], float]] = {
    plain_call: 0.2,
    varied_call: 1.0,
    large_call: 0.1,
}
