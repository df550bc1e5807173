"""Shapes of an operator's results, from the reference run on tensors without values.

The reference is the meaning of the operator, sizes included, but it may loop over rows or compare sizes, which would
tie a graph to the sizes it was traced with. So it never sees a symbolic size: it runs on the sizes of the example, and
again with some of them moved, and each size of a result is what explains all runs: a constant, factor * size + offset,
or a product. Sizes that must move together (ids [N] with logits [N, V], offsets [N + 1]) show in what the reference
refuses. A symbol that never moves, or a result that nothing explains, makes the size static: another one traces again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import combinations, product
from math import prod
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from rlkernel import policy
from rlkernel.discover import load_target
from rlkernel.torchlib.leaves import Outline, autocast, outline, reader
from rlkernel.torchlib.modes import leaf, recording_gradients
from rlkernel_core.errors import ResolutionError, RLKernelError
from rlkernel_core.quant.codec import codec_of
from rlkernel_core.quant.tensor import CANONICAL, QuantTensor
from rlkernel_core.spec import OPERATORS

# What the reference is told about tensors without values: there is nothing to look at, and nothing is to be written to.
_WITHOUT_VALUES: Final[dict[str, Any]] = {"validate": False, "out": None}
# How sizes move: all by one; all to twice themselves, bounds of ragged rows [N + 1] to twice less one.
_STEPS: Final[tuple[tuple[Callable[[int], int], ...], ...]] = (
    (lambda n: n + 1,),
    (lambda n: 2 * n, lambda n: 2 * n - 1),
)
_FEW_SYMBOLS: Final = 4  # up to here every way to move every subset of them is tried
_MOST_MOVES: Final = 500  # most are refused by the reference's first check
_UNKNOWN: Final = 8  # stands for a size that depends on data
_REMEMBERED: Final = 1024

Form = tuple[torch.dtype, torch.device, tuple[int | str, ...]]  # of an argument; a text names a symbol


class Size(NamedTuple):
    """factor * product of symbols + offset."""

    factor: int
    symbols: tuple[int, ...] = ()
    offset: int = 0


class Result(NamedTuple):
    """One tensor of a result."""

    sizes: tuple[Size, ...]
    dtype: torch.dtype
    device: torch.device
    differentiable: bool


class Results(NamedTuple):
    """What a call returns."""

    outline: Outline
    tensors: tuple[Result, ...]
    fixed: tuple[int, ...] = ()  # symbols whose part in it could not be told: they have to be numbers


class _Run(NamedTuple):
    outline: Outline
    tensors: list[Tensor]


def infer(
    op: str, tensors: Sequence[Tensor], integers: Sequence[int], floats: Sequence[float], call: str
) -> tuple[Results, list[Tensor]]:
    """What a call returns, and empty tensors of its shapes."""
    symbols: dict[str, torch.SymInt] = {}
    forms = tuple(_form(t, symbols) for t in tensors)
    sizes = list(symbols.values())
    hints = tuple(_hint(s) for s in sizes)
    results = _infer(op, call, tuple(integers), tuple(floats), forms, hints)
    for at in results.fixed:
        int(sizes[at])  # a guard: another size traces again
    made = [
        torch.empty([_at(size, sizes) for size in r.sizes], dtype=r.dtype, device=r.device) for r in results.tensors
    ]
    return results, made


def _form(tensor: Tensor, symbols: dict[str, torch.SymInt]) -> Form:
    shape: list[int | str] = []
    for size in tensor.shape:
        if isinstance(size, torch.SymInt):
            name = str(size.node.expr)
            symbols.setdefault(name, size)
            shape.append(f"s{list(symbols).index(name)}")
        else:
            shape.append(size)
    return tensor.dtype, tensor.device, tuple(shape)


def _hint(size: torch.SymInt) -> int:
    return int(size.node.hint) if size.node.has_hint() else _UNKNOWN


def _at(size: Size, symbols: Sequence[Any]) -> Any:
    return size.factor * prod(symbols[s] for s in size.symbols) + size.offset if size.symbols else size.offset


@lru_cache(_REMEMBERED)
def _infer(
    op: str,
    call: str,
    integers: tuple[int, ...],
    floats: tuple[float, ...],
    forms: tuple[Form, ...],
    hints: tuple[int, ...],
) -> Results:
    def run(sizes: Sequence[int]) -> _Run:
        shapes = [[sizes[int(n[1:])] if isinstance(n, str) else n for n in shape] for _, _, shape in forms]
        made = [torch.empty(s, dtype=t, device=d) for (t, d, _), s in zip(forms, shapes, strict=True)]
        with recording_gradients(), autocast(call):
            arguments = reader(call)(made, integers, floats, leaf)
            arguments |= {name: None for name, value in arguments.items() if _is_group(value)}
            arguments |= {name: _plain(value) for name, value in arguments.items() if isinstance(value, QuantTensor)}
            arguments |= {name: value for name, value in _WITHOUT_VALUES.items() if name in arguments}
            return _Run(*outline(reference(op)(**arguments)))

    first = run(hints)
    runs = [(hints, first), *_moves(run, hints)]
    fixed = {s for s, n in enumerate(hints) if all(sizes[s] == n for sizes, _ in runs)}
    tensors = []
    for at, tensor in enumerate(first.tensors):
        shape = []
        for dim, n in enumerate(tensor.shape):
            seen = [(sizes, moved.tensors[at].shape[dim]) for sizes, moved in runs]
            size = _fit(seen)
            if size is None:
                fixed |= {s for sizes, m in seen if m != n for s, was in enumerate(hints) if sizes[s] != was}
            shape.append(size or Size(0, (), n))
        tensors.append(Result(tuple(shape), tensor.dtype, tensor.device, tensor.requires_grad))
    return Results(first.outline, tuple(tensors), tuple(sorted(fixed)))


def _fit(seen: Sequence[tuple[tuple[int, ...], int]]) -> Size | None:
    """The size of a result that explains all runs, each given as (symbols, size); None where there is none."""
    (was, n), *others = seen
    if all(m == n for _, m in others):
        return Size(0, (), n)
    for s in range(len(was)):
        to, m = next(((sizes[s], m) for sizes, m in others if sizes[s] != was[s]), (was[s] + 1, n))
        factor, rest = divmod(m - n, to - was[s])
        size = Size(factor, (s,), n - factor * was[s])
        if factor and not rest and all(_at(size, sizes) == m for sizes, m in others):
            return size
    for pair in combinations(range(len(was)), 2):
        factor, rest = divmod(n, prod(was[s] for s in pair))
        size = Size(factor, pair)
        if factor and not rest and all(_at(size, sizes) == m for sizes, m in others):
            return size
    return None


def _moves(run: Callable[[Sequence[int]], _Run], hints: tuple[int, ...]) -> list[tuple[tuple[int, ...], _Run]]:
    """Other sizes that the reference accepts, and what came of them; as few symbols at a time as can move alone."""
    found: list[tuple[tuple[int, ...], _Run]] = []
    movable: list[frozenset[int]] = []
    tried = 0
    for group in _subsets(len(hints)):
        if any(smaller <= group for smaller in movable):
            continue
        for steps in _STEPS if len(hints) <= _FEW_SYMBOLS else [way[:1] for way in _STEPS]:
            for chosen in product(steps, repeat=len(group)):
                tried += 1
                if tried > _MOST_MOVES:
                    return found
                step = dict(zip(sorted(group), chosen, strict=True))
                sizes = tuple(step[s](n) if s in step else n for s, n in enumerate(hints))
                moved = _accepted(run, sizes)
                if moved is not None:
                    found.append((sizes, moved))
                    movable.append(group)
                    break
    return found


def _subsets(count: int) -> Iterator[frozenset[int]]:
    """Small ones first."""
    for size in range(1, count + 1):
        yield from map(frozenset, combinations(range(count), size))


def _accepted(run: Callable[[Sequence[int]], _Run], sizes: Sequence[int]) -> _Run | None:
    try:
        return run(sizes)
    except (RLKernelError, RuntimeError):  # these sizes do not belong together
        return None


def _is_group(value: object) -> bool:
    return torch.distributed.is_available() and isinstance(value, torch.distributed.ProcessGroup)


def _plain(w: QuantTensor) -> QuantTensor:
    """A weight as the format stores it: the reference does not read what a backend packed, and sizes are the same."""
    if w.layout == CANONICAL:
        return w
    sizes = codec_of(w.spec).storage(w.spec, w.shape)
    parts = {name: torch.empty(size, dtype=dtype, device=w.device) for name, (size, dtype) in sizes.items()}
    return replace(w, parts=parts, layout=CANONICAL)


@lru_cache
def reference(op: str) -> Callable[..., Any]:
    """The reference implementation of an operator."""
    manifest = policy.installed()["reference"].manifest
    impls = manifest.of(OPERATORS[op].id) if manifest else ()
    run = load_target(impls[0].target) if impls else "it does not implement the operator"
    if not callable(run):
        raise ResolutionError(f"{op}: the shapes in a compiled graph come from the reference: {run}")
    return OPERATORS[op].taking_arguments(run)
