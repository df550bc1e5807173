"""The nodes of an operator: `op` runs an implementation, `op_forward` also returns what `op_backward` reads.

Where the implementation brings a pair of forward and backward, a graph with gradients holds one of each. Where it
brings none, or a shape turns out to be another implementation's, backward recomputes: that implementation runs once
more, under autograd. `op_differentiable` ties the two nodes together; calls without gradients never meet autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

import rlkernel
from rlkernel.plans import Plan
from rlkernel.torchlib.call_codec import Outline, Wanted, arguments, autocast, leaf, marked, outline, read, same
from rlkernel.torchlib.fakes import FAKES
from rlkernel_core.errors import ResolutionError, RLKernelError
from rlkernel_core.gradients import Pair, carried, gradients, recording_gradients
from rlkernel_core.spec import OPERATORS

NAMESPACE: Final = "rlkernel"
_LIBRARY: Final = torch.library.Library(NAMESPACE, "FRAGMENT")
_LEAVES: Final = "Tensor[] tensors, SymInt[] integers, float[] floats, str implementation, str call"
# Integers that no result's size depends on: they may stay symbols, so that a decoding loop traces once.
_SIZELESS: Final = frozenset({"seed", "step", "stream"})
GRAD: Final = '{"g": '  # in the text of a call: a gradient is wanted

# Operator, implementation, text of the call, dtype and rank of every tensor.
Key = tuple[str, str, str, tuple[Any, ...]]


class Results(NamedTuple):
    """What a node returns: the form of the result, and which of its tensors carry gradients."""

    outline: Outline
    carrying: tuple[int | None, ...]  # place of each field that carries gradients; None where it is absent


class Place(NamedTuple):
    """Where backward finds a tensor that forward saved: among the call's, the results or the new ones, or nowhere."""

    among: str  # "call" | "results" | "new" | "nothing"
    at: int = 0


class Node(NamedTuple):
    """A call as a node of a graph holds it; while torch traces, integers may be symbols."""

    op: str
    tensors: Sequence[Tensor]
    integers: Sequence[int]
    floats: Sequence[float]
    implementation: str
    call: str  # text of the call, see call_codec

    @property
    def key(self) -> Key:
        """What the form of the result depends on."""
        return self.op, self.implementation, self.call, tuple((t.dtype, t.dim()) for t in self.tensors)

    @property
    def marked(self) -> list[Tensor]:
        """The tensors that a gradient is wanted for."""
        return [self.tensors[at] for at in marked(self.call)]

    def record(self, grad: Wanted) -> Any:
        """The record of the call; `grad` makes of a tensor one that a gradient is wanted for."""
        return OPERATORS[self.op].record(**arguments(self.call, self.tensors, self.integers, self.floats, grad))

    def counted(self, plan: Plan) -> None:
        """Show the call in the statistics of the front door."""
        plan.choice.calls += 1
        getattr(rlkernel, self.op).last = plan.choice


_DEFINED: Final[set[str]] = set()
# Implementation, as nodes name it -> the plan of a call, given its record with gradients wanted and as it is run.
CHOSEN: Final[dict[str, Callable[[Any, Any], Plan]]] = {}
# Implementation -> its pair of forward and backward; None where it has none.
PAIRS: Final[dict[str, type[Pair[Any, Any]] | None]] = {}
# Implementation -> the optional fields of the result that it does not claim: nodes leave them out.
UNCLAIMED: Final[dict[str, frozenset[str]]] = {}
PLACES: Final[dict[Key, tuple[Place, ...]]] = {}
REFUSED: Final[dict[str, Exception]] = {}  # the same for calls that nothing may take
RESULTS: Final[dict[Key, Results]] = {}


def define(op: str) -> None:
    """Define an operator's nodes, once."""
    if op in _DEFINED:
        return
    _DEFINED.add(op)
    library: Any = _LIBRARY
    tags = (torch.Tag.pt2_compliant_tag,)

    def of_node(run: Callable[[Node], Any]) -> Callable[..., Any]:
        return lambda *given: run(Node(op, *given))

    def of_gradients(run: Callable[..., Any]) -> Callable[..., Any]:
        return lambda grads, saved, *given: run(grads, saved, Node(op, *given))

    forward, shapes = of_node(_forward), of_node(_forward_shapes)
    before = "Tensor?[] grads, Tensor[] saved, "
    for name, grads, run, fake in (
        (op, "", forward, shapes),
        (f"{op}_forward", "", of_node(_saving), of_node(_saving_shapes)),
        (f"{op}_backward", before, of_gradients(_backward), of_gradients(_backward_shapes)),
        (f"{op}_differentiable", "", forward, shapes),
    ):
        library.define(f"{name}({grads}{_LEAVES}) -> Tensor[]", tags=tags)
        library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    library.impl(f"{op}_differentiable", partial(_differentiable, op), "Autograd")


def _forward(node: Node) -> list[Tensor]:
    """The node at work: the raw implementation."""
    plan, record = _planned(node)
    node.counted(plan)
    with autocast(node.call), torch.no_grad():
        result = plan.run(record)
    return _own(_expected(node, _claimed(node, result)), node.tensors)


def _claimed(node: Node, result: Any) -> Any:
    """The result without what the implementation may give or not, so that every call returns the same fields."""
    unclaimed = UNCLAIMED.get(node.implementation)
    return replace(result, **dict.fromkeys(unclaimed)) if unclaimed else result


def _expected(node: Node, result: Any) -> list[Tensor]:
    """The tensors of a result, whose form must be the one that the graph was traced with."""
    found, results = outline(result)
    expected = RESULTS.get(node.key)
    if expected is not None and expected.outline != found:
        raise RLKernelError(f"{node.op}: {node.implementation} returned {found}, the contract says {expected.outline}")
    return results


def _saving(node: Node) -> list[Tensor]:
    """The results, and the new tensors that backward reads."""
    kind = PAIRS.get(node.implementation)
    if kind is None:
        return _forward(node)
    plan, record = _planned(node, grad=True)
    node.counted(plan)
    with autocast(node.call), torch.no_grad():
        if isinstance(plan.run, kind):
            result, saved = plan.run.forward(record)
        else:  # another implementation takes this shape, and its backward recomputes
            result = plan.run(record)
            saved = kind.saved_like(record, result, _wanted(kind, record, node))
    results = _expected(node, _claimed(node, result))
    places, new = _places(saved, node.tensors, results)
    # A graph from torch's cache has not been traced in this process.
    if places != (expected := PLACES.setdefault(node.key, places)):
        said = f"saved {_said(places)}, its saved_like said {_said(expected)}"
        raise RLKernelError(f"{node.op}: {node.implementation} {said}")
    return _own([*results, *new], node.tensors)


def _said(places: Sequence[Place]) -> str:
    return ", ".join(f"{among} {at}" if among != "nothing" else among for among, at in places)


def _places(
    saved: Sequence[Tensor | None], tensors: Sequence[Tensor], results: Sequence[Tensor]
) -> tuple[tuple[Place, ...], list[Tensor]]:
    """Where each saved tensor is found, and the new ones."""
    places: list[Place] = []
    new: list[Tensor] = []
    for tensor in saved:
        given = next((at for at, t in enumerate(tensors) if t is tensor), None)
        returned = next((at for at, t in enumerate(results) if t is tensor), None)
        if tensor is None:
            places.append(Place("nothing"))
        elif given is not None:
            places.append(Place("call", given))
        elif returned is not None:
            places.append(Place("results", returned))
        else:
            places.append(Place("new", len(new)))
            new.append(tensor)
    return tuple(places), new


def kept(node: Node, returned: Sequence[Tensor]) -> list[Tensor]:
    """What the backward node takes beside the call's own tensors, of what the forward node has returned."""
    count = _tensors_of(RESULTS[node.key].outline)
    places = PLACES.get(node.key, ())
    where = {"results": returned[:count], "new": returned[count:]}
    return [where[place.among][place.at] for place in places if place.among in where]


def _tensors_of(form: Any) -> int:
    """How many tensors an outline stands for."""
    if form[0] == "tensor":
        return 1
    parts = form[3] if form[0] == "new" else form[2] if form[0] == "dict" else form[1] if form[0] == "tuple" else ()
    return sum(_tensors_of(part) for part in parts)


def _wanted(kind: type[Pair[Any, Any]], record: Any, node: Node) -> tuple[bool, ...]:
    """Which inputs of a pair a gradient is wanted for."""
    leaves = node.marked
    return tuple(any(x is t for t in leaves) for x in kind.inputs(record))


def _planned(node: Node, given: Any = None, *, grad: bool = False) -> tuple[Plan, Any]:
    """The plan of a node's implementation, and the record that it is to run.

    Args:
        node: the call.
        given: its record, made already, gradients wanted; it decides and is run.
        grad: whether what runs is to bring gradients.
    """
    name = node.implementation
    if name in REFUSED:
        raise copy(REFUSED[name])
    if name not in CHOSEN:
        text = f"{node.op}: this graph was traced in another process, where {name!r} was chosen; trace it here"
        raise ResolutionError(text)
    with torch.set_grad_enabled(GRAD in node.call):
        if given is not None:
            return CHOSEN[name](given, given), given
        # Gradients wanted as when the graph was traced: they decide.
        run, wanted = node.record(same), node.record(leaf)
        return CHOSEN[name](wanted, wanted if grad else run), run


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


def _forward_shapes(node: Node) -> list[Tensor]:
    return _empty(_faked(node)[2])  # all implementations of an operator agree on them


def _saving_shapes(node: Node) -> list[Tensor]:
    record, result, made = _faked(node)
    kind = PAIRS.get(node.implementation)
    if kind is None:
        return _empty(made)
    places, new = _places(kind.saved_like(record, result, _wanted(kind, record, node)), node.tensors, made)
    PLACES[node.key] = places
    return _empty([*made, *new])


def _faked(node: Node) -> tuple[Any, Any, list[Tensor]]:
    """The record of a call, its result of empty tensors, and those tensors."""
    sizeless = {at["i"] for name, at in read(node.call).items() if name in _SIZELESS and "i" in at}
    known = [0 if at in sizeless else int(n) for at, n in enumerate(node.integers)]
    record = node._replace(integers=known, floats=[float(x) for x in node.floats]).record(same)
    check = OPERATORS[node.op].check
    if check is not None:
        check(record)
    result = _claimed(node, FAKES[node.op](record))
    form, made = outline(result)
    fields = carried(node.op, result) if GRAD in node.call else ()
    carrying = tuple(next((at for at, t in enumerate(made) if t is x), None) for x in fields)
    RESULTS[node.key] = Results(form, carrying)
    return record, result, made


def _empty(made: Sequence[Tensor]) -> list[Tensor]:
    """Results are tensors of their own, whatever an operator hands on."""
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in made]


class _Differentiable(torch.autograd.Function):
    """The forward node forward, the backward node backward: a traced graph holds these two alone."""

    @staticmethod
    def forward(ctx: Any, op: str, constants: tuple[Any, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.op, ctx.constants, ctx.given = op, constants, len(tensors)
        ctx.set_materialize_grads(False)
        returned = getattr(torch.ops.rlkernel, f"{op}_forward")(list(tensors), *constants)
        node = Node(op, tensors, *constants)
        ctx.save_for_backward(*tensors, *kept(node, returned))
        known = RESULTS[node.key]
        results = tuple(returned[: _tensors_of(known.outline)])
        ctx.mark_non_differentiable(*(t for at, t in enumerate(results) if at not in known.carrying))
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        tensors, saved = ctx.saved_tensors[: ctx.given], ctx.saved_tensors[ctx.given :]
        node = getattr(torch.ops.rlkernel, f"{ctx.op}_backward")
        found = dict(zip(marked(ctx.constants[-1]), node(grads, saved, tensors, *ctx.constants), strict=True))
        return None, None, *(found.get(at) for at in range(len(tensors)))


def _differentiable(op: str, tensors: list[Tensor], *constants: Any) -> list[Tensor]:
    results: tuple[Tensor, ...] = _Differentiable.apply(op, constants, *tensors)  # type: ignore[no-untyped-call]
    return list(results)


def _backward(grads: list[Tensor | None], saved: list[Tensor], node: Node) -> list[Tensor]:
    """The gradients of the marked tensors, by the implementation's pair; without one it runs once more."""
    kind, at_hand = PAIRS.get(node.implementation), [*saved, *node.tensors, *(g for g in grads if g is not None)]
    if kind is not None:
        plan, record = _planned(node, grad=True)
        if isinstance(plan.run, kind):
            rest = iter(saved)
            again = [
                None if among == "nothing" else node.tensors[at] if among == "call" else next(rest)
                for among, at in PLACES[node.key]
            ]
            upstream = [None if at is None else grads[at] for at in RESULTS[node.key].carrying]
            with torch.no_grad():
                found = gradients(plan.run, again, upstream)
            return _own(_by_leaf(kind.inputs(record), found, node.marked), at_hand)
    return _own(_recomputed(grads, node), at_hand)


def _by_leaf(inputs: Sequence[Tensor | None], found: Sequence[Tensor | None], leaves: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of a pair's inputs as those of the marked tensors, 0 where none arrives."""
    by_leaf: dict[int, Tensor] = {}
    for x, g in zip(inputs, found, strict=True):
        at = next((at for at, t in enumerate(leaves) if t is x), None)
        if at is not None and g is not None:
            by_leaf[at] = by_leaf[at] + g if at in by_leaf else g  # one tensor may be two arguments
    return [by_leaf[at] if at in by_leaf else torch.zeros_like(x) for at, x in enumerate(leaves)]


def _recomputed(grads: list[Tensor | None], node: Node) -> list[Tensor]:
    """The gradients of the marked tensors: the implementation once more, under autograd."""
    leaves: list[Tensor] = []

    def wanted(tensor: Tensor) -> Tensor:
        leaves.append(leaf(tensor))
        return leaves[-1]

    record = node.record(wanted)
    with recording_gradients():
        plan, _ = _planned(node, record)
        with autocast(node.call):
            _, results = outline(_claimed(node, plan.run(record)))
        pairs = [(r, g) for r, g in zip(results, grads, strict=True) if g is not None and r.requires_grad]
        found: Sequence[Tensor | None] = [None] * len(leaves)
        if pairs:
            outputs, upstream = zip(*pairs, strict=True)
            found = torch.autograd.grad(outputs, leaves, upstream, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]


def _backward_shapes(_grads: list[Tensor | None], _saved: list[Tensor], node: Node) -> list[Tensor]:
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in node.marked]
