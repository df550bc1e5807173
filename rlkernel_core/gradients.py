"""Forward and backward of an operator's calls, told apart: what an implementation gives for gradients.

Eager autograd and graphs of torch.compile run the same pair: forward once, and backward once from what forward saved.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from contextvars import copy_context
from dataclasses import replace
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from rlkernel_core.errors import RLKernelError
from rlkernel_core.spec import OPERATORS

__all__ = ["Pair", "Saved"]

C = TypeVar("C")
R = TypeVar("R")
Saved = tuple[Tensor | None, ...]  # what forward keeps for backward; None where a tensor is not needed


class Pair(ABC, Generic[C, R]):
    """Forward and backward of calls of one shape. A manifest names a subclass in `Impl.gradient`.

    A pair is made from the first call of a shape and keeps no tensor: two pairs of one shape may serve one call, one
    forward and the other backward. Calling it runs forward as one node of autograd.
    """

    op: ClassVar[str]  # name of the operator

    def __init__(self, call: C) -> None:
        """Prepare calls of this shape; `wanted` says which of `inputs` a gradient is wanted for.

        Later calls may come with detached tensors: this first one decides.
        """
        self.wanted = tuple([t is not None and t.requires_grad for t in self.inputs(call)])

    @classmethod
    def inputs(cls, call: C) -> Saved:
        """The tensors that a gradient may be asked for: the arguments that the spec names as differentiable.

        None stands for one that is not given, or is a number in this call.
        """
        given = [getattr(call, name) for name in OPERATORS[cls.op].differentiable]
        return tuple([x if isinstance(x, Tensor) else None for x in given])

    @abstractmethod
    def forward(self, call: C) -> tuple[R, Saved]:
        """The result, and the tensors that backward reads; no gradients are recorded here.

        What backward reads of the call or of the result is saved as it is, the very tensor, and costs nothing; the rest
        is new.
        """

    @abstractmethod
    def backward(self, saved: Saved, grads: Saved) -> Saved:
        """The gradients of `inputs`, in their order, of their sizes and dtypes; None where none is wanted.

        Args:
            saved: what forward saved.
            grads: of the fields of the result that carry gradients, in the order of the spec; one of them at least is
                no None.
        """

    @classmethod
    @abstractmethod
    def saved_like(cls, call: C, result: R, wanted: tuple[bool, ...]) -> Saved:
        """What forward saves of this call, for the tracing of graphs: sizes may be symbols, and nothing is launched.

        Args:
            call: the call, whose tensors may hold no values.
            result: its result, of empty tensors.
            wanted: which of `inputs` a gradient is wanted for.

        Returns:
            Tensors of the call and of the result as they are, and empty ones in place of the new.
        """

    def __call__(self, call: C) -> R:
        """Forward, with gradients by backward."""
        made: list[Any] = []
        carrying = _Node.apply(self, call, made, *self.inputs(call))  # type: ignore[no-untyped-call]
        (result,) = made
        changed = {
            name: tensor
            for name, tensor in zip(OPERATORS[self.op].carrying, carrying, strict=True)
            if tensor is not _field(result, name)
        }
        if changed:
            result = changed[""] if "" in changed else replace(result, **changed)
        found: R = result
        return found


class _Node(torch.autograd.Function):
    """A pair in eager autograd."""

    @staticmethod
    def forward(ctx: Any, pair: Pair[Any, Any], call: Any, made: list[Any], *inputs: Tensor | None) -> Saved:
        del inputs  # the call holds them; autograd has to see them
        result, saved = pair.forward(call)
        made.append(result)
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        ctx.pair, ctx.variables = pair, copy_context()
        return carried(pair.op, result)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        pair = ctx.pair
        refuse_second_derivative(pair.op)
        # As forward ran, in whatever thread: with its context variables. A context is entered once at a time.
        return None, None, None, *ctx.variables.copy().run(gradients, pair, ctx.saved_tensors, grads)


def carried(op: str, result: Any) -> Saved:
    """The tensors of a result that carry gradients, in the order of the operator's spec; None where one is absent."""
    return tuple([_field(result, name) for name in OPERATORS[op].carrying])


def _field(result: Any, name: str) -> Any:
    return getattr(result, name) if name else result


def gradients(pair: Pair[Any, Any], saved: Sequence[Tensor | None], grads: Sequence[Tensor | None]) -> Saved:
    """The gradients of a pair's inputs; no gradient arrives, none leaves."""
    if all(g is None for g in grads):
        return (None,) * len(pair.wanted)
    return pair.backward(tuple(saved), tuple(grads))


def gradient_wanted(op: str, call: Any) -> bool:
    """Whether a gradient is wanted of a call, as it is made."""
    wanted = any(getattr(getattr(call, n), "requires_grad", False) for n in OPERATORS[op].differentiable)
    return torch.is_grad_enabled() and wanted


def recording_gradients() -> ExitStack:
    """The scope in which autograd records, in a backward pass and inside a node of a compiled graph too.

    For a backward pass that differentiates a formula of torch: nodes run where the dispatcher has left autograd behind.
    """
    dispatch: Any = torch._C  # noqa: SLF001 as torch's own higher-order operators do
    excluded = dispatch._dispatch_tls_local_exclude_set()  # noqa: SLF001
    for key in (dispatch.DispatchKey.AutogradFunctionality, dispatch.DispatchKey.AutogradOther):
        excluded = excluded.remove(key)
    included = dispatch._dispatch_tls_local_include_set()  # noqa: SLF001
    stack = ExitStack()
    stack.enter_context(dispatch._ForceDispatchKeyGuard(included, excluded))  # noqa: SLF001
    stack.enter_context(torch.enable_grad())
    return stack


def refuse_second_derivative(op: str) -> None:
    """Called in a backward pass: its result would count as a constant, silently, if it were differentiated again."""
    if torch.is_grad_enabled():
        raise RLKernelError(
            f"{op} has no second derivative, and create_graph=True asks for one. Pass create_graph=False."
        )
