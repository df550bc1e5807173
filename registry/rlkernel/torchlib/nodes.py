"""The nodes of an operator: one that runs an implementation, and one that runs it again for its gradients.

Backward recomputes: the implementation runs once more, under autograd, so that every implementation that has gradients
in eager mode has the same ones here. A third node ties the two together where a gradient is wanted; calls without
gradients never meet autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

import rlkernel
from rlkernel.plans import Plan
from rlkernel.torchlib.call_codec import Outline, arguments, autocast, marked, outline, read, same
from rlkernel.torchlib.fakes import DIFFERENTIABLE, FAKES
from rlkernel.torchlib.modes import leaf, recording_gradients
from rlkernel_core.errors import ResolutionError, RLKernelError
from rlkernel_core.spec import OPERATORS

NAMESPACE: Final = "rlkernel"
_LIBRARY: Final = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
_LEAVES: Final = "Tensor[] tensors, SymInt[] integers, float[] floats, str implementation, str call"
# Integers that no result's size depends on: they may stay symbols, so that a decoding loop traces once.
_SIZELESS: Final = frozenset({"seed", "step", "stream"})
GRAD: Final = '{"g": '  # in the text of a call: a gradient is wanted

Key = tuple[str, str, tuple[Any, ...]]  # operator, text of the call, dtype and rank of every tensor


class Results(NamedTuple):
    """What a node returns: the form of the result, and which of its tensors carry gradients."""

    outline: Outline
    differentiable: tuple[bool, ...]


_DEFINED: Final[set[str]] = set()
# Implementation, as nodes name it -> the plan of a call, given its record with gradients wanted and as it is run.
CHOSEN: Final[dict[str, Callable[[Any, Any], Plan]]] = {}
REFUSED: Final[dict[str, Exception]] = {}  # the same for calls that nothing may take
RESULTS: Final[dict[Key, Results]] = {}


def define(op: str) -> None:
    """Define an operator's nodes, once."""
    if op in _DEFINED:
        return
    _DEFINED.add(op)
    library: Any = _LIBRARY
    tags = (torch.Tag.pt2_compliant_tag,)
    forward, shapes = partial(_forward, op), partial(_forward_shapes, op)
    for name, grads, run, fake in (
        (op, "", forward, shapes),
        (f"{op}_backward", "Tensor?[] grads, ", partial(_backward, op), _backward_shapes),
        (f"{op}_autograd", "", forward, shapes),
    ):
        library.define(f"{name}({grads}{_LEAVES}) -> Tensor[]", tags=tags)
        library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    library.impl(f"{op}_autograd", partial(_differentiable, op), "Autograd")


def _forward(
    op: str, tensors: list[Tensor], integers: list[int], floats: list[float], implementation: str, call: str
) -> list[Tensor]:
    """The node at work: the raw implementation."""
    asked, given = (arguments(call, tensors, integers, floats, grad) for grad in (leaf, same))
    plan, record = _planned(op, implementation, call, asked, given)
    plan.choice.calls += 1
    getattr(rlkernel, op).last = plan.choice
    with autocast(call), torch.no_grad():
        found, results = outline(plan.run(record))
    expected = RESULTS.get(_key(op, call, tensors))
    if expected is not None and expected.outline != found:
        raise RLKernelError(f"{op}: {implementation} returned {found}, the contract says {expected.outline}")
    return _own(results, tensors)


def _planned(op: str, name: str, call: str, asked: dict[str, Any], given: dict[str, Any]) -> tuple[Plan, Any]:
    """The plan of a node's implementation, and the record that it is to run.

    Args:
        op: operator.
        name: what the node calls the implementation.
        call: text of the call.
        asked: its arguments, gradients wanted as when the graph was traced: they decide.
        given: the same, as they are run.
    """
    if name in REFUSED:
        raise copy(REFUSED[name])
    if name not in CHOSEN:
        text = f"{op}: this graph was traced in another process, where {name!r} was chosen; trace it here"
        raise ResolutionError(text)
    record = OPERATORS[op].record
    with torch.set_grad_enabled(GRAD in call):
        run = record(**given)
        return CHOSEN[name](record(**asked), run), run


def _own(results: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Results as a node must return them: contiguous, sharing storage with no argument and with no other result."""
    taken = {_storage(t) for t in inputs}
    own = []
    for result in results:
        mine = result.contiguous()
        if _storage(mine) in taken:
            mine = mine.clone(memory_format=torch.contiguous_format)
        taken.add(_storage(mine))
        own.append(mine)
    return own


def _storage(tensor: Tensor) -> int:
    identity: int = tensor.untyped_storage()._cdata  # noqa: SLF001 equal for views of one storage, empty ones included
    return identity


def _forward_shapes(
    op: str, tensors: list[Tensor], integers: list[Any], floats: list[Any], implementation: str, call: str
) -> list[Tensor]:
    del implementation  # all implementations of an operator agree on them
    sizeless = {node["i"] for name, node in read(call).items() if name in _SIZELESS and "i" in node}
    known = [0 if at in sizeless else int(n) for at, n in enumerate(integers)]
    spec = OPERATORS[op]
    record = spec.record(**arguments(call, tensors, known, [float(x) for x in floats], same))
    if spec.check is not None:
        spec.check(record)
    result = FAKES[op](record)
    form, made = outline(result)
    carrying = [result if name == "" else getattr(result, name) for name in DIFFERENTIABLE.get(op, ()) if GRAD in call]
    RESULTS[_key(op, call, tensors)] = Results(form, tuple(any(t is c for c in carrying) for t in made))
    # Results are tensors of their own, whatever an operator hands on.
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in made]


def _key(op: str, call: str, tensors: Sequence[Tensor]) -> Key:
    return op, call, tuple((t.dtype, t.dim()) for t in tensors)


class _Differentiable(torch.autograd.Function):
    """The plain node forward, the backward node backward: a traced graph holds these two alone."""

    @staticmethod
    def forward(ctx: Any, op: str, constants: tuple[Any, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.op, ctx.constants = op, constants
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        results = tuple(getattr(torch.ops.rlkernel, op)(list(tensors), *constants))
        carry = RESULTS[_key(op, constants[-1], tensors)].differentiable
        ctx.mark_non_differentiable(*(t for t, carries in zip(results, carry, strict=True) if not carries))
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors
        node = getattr(torch.ops.rlkernel, f"{ctx.op}_backward")
        found = dict(zip(marked(ctx.constants[-1]), node(grads, tensors, *ctx.constants), strict=True))
        return None, None, *(found.get(at) for at in range(len(tensors)))


def _differentiable(op: str, tensors: list[Tensor], *constants: Any) -> list[Tensor]:
    results: tuple[Tensor, ...] = _Differentiable.apply(op, constants, *tensors)  # type: ignore[no-untyped-call]
    return list(results)


def _backward(
    op: str,
    grads: list[Tensor | None],
    tensors: list[Tensor],
    integers: list[int],
    floats: list[float],
    implementation: str,
    call: str,
) -> list[Tensor]:
    """The gradients of the marked tensors: the implementation once more, under autograd."""
    leaves: list[Tensor] = []

    def wanted(tensor: Tensor) -> Tensor:
        leaves.append(leaf(tensor))
        return leaves[-1]

    given = arguments(call, tensors, integers, floats, wanted)
    with recording_gradients():
        plan, record = _planned(op, implementation, call, given, given)
        with autocast(call):
            _, results = outline(plan.run(record))
        pairs = [(r, g) for r, g in zip(results, grads, strict=True) if g is not None and r.requires_grad]
        found: Sequence[Tensor | None] = [None] * len(leaves)
        if pairs:
            outputs, upstream = zip(*pairs, strict=True)
            found = torch.autograd.grad(outputs, leaves, upstream, allow_unused=True)
    filled = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]
    return _own(filled, [*tensors, *(g for g in grads if g is not None)])


def _backward_shapes(
    grads: list[Tensor | None],
    tensors: list[Tensor],
    integers: list[Any],
    floats: list[Any],
    implementation: str,
    call: str,
) -> list[Tensor]:
    del grads, integers, floats, implementation
    return [torch.empty(tensors[at].shape, dtype=tensors[at].dtype, device=tensors[at].device) for at in marked(call)]
