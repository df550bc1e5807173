"""What Dynamo reads of an operator's call, and the decision that it finds there as a constant.

Functions marked as traced use only what Dynamo can follow; those marked as constant run as they are, while it traces.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from rlkernel import policy
from rlkernel.decide import Bound, Verdicts, call_of, choose, chosen, pair_of, place, planned, settle
from rlkernel.limits import question
from rlkernel.plans import Plan, Table, key_or_none
from rlkernel.resolve import claims
from rlkernel.torchlib import nodes
from rlkernel.torchlib.call_codec import (
    Leaves,
    Outline,
    arguments,
    constant,
    rebuild,
    same,
    surroundings,
    write,
)
from rlkernel_core.decision import AUTO, Decision
from rlkernel_core.errors import ArgumentError, RLKernelError, RLKernelWarning
from rlkernel_core.spec import OPERATORS
from rlkernel_core.spec.form import OpSpec

Facts = tuple[tuple[Any, ...], ...]  # per tensor: dtype, device, rank, whether it requires a gradient
_WRITTEN: Final = "out"  # the one argument that an operator may write to


def compiled(op: str, record: Any) -> Any:
    """An operator's call as one node; traced."""
    leaves, grad = Leaves(), torch.is_grad_enabled()
    parts = [f'"{name}": {write(getattr(record, name), leaves, grad=grad)}' for name in _names(op)]
    call = "{" + surroundings(leaves.tensors[0].device.type) + ", ".join(parts) + "}"
    facts = tuple([(t.dtype, t.device, t.dim(), t.requires_grad) for t in leaves.tensors])
    integers = tuple([1 if n > 0 else 0 for n in leaves.integers])  # no decision looks at more
    floats = tuple([_alike(x) for x in leaves.floats])
    _define(op)
    implementation = _choose(op, call, facts, integers, floats, grad, _rules(op))
    node = getattr(torch.ops.rlkernel, f"{op}_differentiable" if nodes.GRAD in call else op)
    tensors = node(leaves.tensors, leaves.integers, leaves.floats, implementation, call)
    return rebuild(_outline_of(op, implementation, call, facts), tensors)


def _alike(number: float) -> float:
    """A number that stands where `number` does against 0 and 1, which is all that a decision may look at; traced."""
    if number > 1:
        return 2.0
    if number == 1:
        return 1.0
    if number > 0:
        return 0.5
    return 0.0 if number == 0 else -1.0


def _rules(op: str) -> str:
    """The policy for an operator; Dynamo guards on what is read here; traced."""
    scope = policy.IN_FORCE.scope
    rules = policy.IN_FORCE.rules if scope is policy.IN_FORCE else scope.rules
    return f"{rules[op]} {policy.IN_FORCE.generation}"


@constant
def _names(op: str) -> tuple[str, ...]:
    """An operator's arguments in the order of its signature."""
    return tuple(OPERATORS[op].parameters)


@constant
def _define(op: str) -> None:
    """Make the operator's nodes known to torch, and the policy to `_rules`."""
    policy.base()
    nodes.define(op)


@constant
def _choose(
    op: str, call: str, facts: Facts, integers: tuple[int, ...], floats: tuple[float, ...], grad: bool, rules: str
) -> str:
    """Decide as the eager path does and name the outcome; a refusal is named too, and raised when the graph runs."""
    with _disable_current_modes(), torch.set_grad_enabled(grad):
        try:
            name, run, pair, unclaimed = _chosen(op, call, facts, integers, floats, rules)
        except (RLKernelError, RLKernelWarning) as error:
            name = f"refused {type(error).__name__} {_digest(error)}"
            nodes.REFUSED[name] = error
        else:
            nodes.CHOSEN[name], nodes.PAIRS[name], nodes.UNCLAIMED[name] = run, pair, unclaimed
    return name


def _chosen(
    op: str, call: str, facts: Facts, integers: tuple[int, ...], floats: tuple[float, ...], rules: str
) -> tuple[str, Callable[[Any, Any], Plan], Any, frozenset[str]]:
    """What nodes call an implementation, the plans of its calls, its pair or None, and what it may not return."""
    # Stand-ins have the rank of the arguments and no size: the reference checks sizes when it gives the node's shapes.
    spec = replace(OPERATORS[op], check=None)
    with FakeTensorMode():  # left before anything is decided: choosing imports plugins and may run their self-tests
        tensors = [torch.empty([1] * rank, dtype=t, device=d, requires_grad=g) for t, d, rank, g in facts]
    given = spec.record(**arguments(call, tensors, integers, floats, same))
    if getattr(given, _WRITTEN, None) is not None:
        raise ArgumentError(
            _WRITTEN, "a value", "cannot be written to from a compiled graph", "Call it outside torch.compile."
        )
    if _looks_at_sizes(op, str(place(spec, given)[0])):
        name = f"{spec.id} by shape {_digest('compiled', call, facts, integers, floats, rules)}"
        pair, unclaimed = _likely(spec, given)
        return name, _ByShape(op), pair, unclaimed
    bound = Bound(OPERATORS[op], choose(spec, given))
    decision = bound.choice.decision
    name = (
        f"{decision.backend} {decision.target} [{decision.version}] {decision.hash} {decision.policy.watched}".rstrip()
    )
    return name, lambda _, run: bound.lookup(run), bound.choice.pair, _unclaimed(spec, decision)


def _unclaimed(spec: OpSpec[Any, Any], decision: Decision) -> frozenset[str]:
    """The optional fields of the result that what was chosen does not claim."""
    impl = chosen(decision)
    return frozenset[str]() if impl is None else frozenset(spec.optional) - impl.supports


def _likely(spec: OpSpec[Any, Any], given: Any) -> tuple[Any, frozenset[str]]:
    """The pair, or None, and the unclaimed results of the implementation that takes the smallest calls of this kind.

    A size that another implementation takes is served too: its backward recomputes.
    """
    asked = call_of(spec, given)
    with policy.PROCESS.lock:
        decision, run = settle(spec, asked, str(place(spec, given)[0]), Verdicts(given).of)
    return pair_of(spec, decision) if run is not None else None, _unclaimed(spec, decision)


class _ByShape:
    """Chooses for every shape, where a candidate's own check looks at sizes."""

    def __init__(self, op: str) -> None:
        self.spec, self.table = OPERATORS[op], Table()

    def __call__(self, asked: Any, given: Any) -> Plan:
        """The plan of a call that is decided as `asked` says and run as `given` says."""
        key = (key_or_none(self.spec.name, asked), key_or_none(self.spec.name, given))
        plan = self.table.get(key)
        if plan is None:
            plan = planned(choose(self.spec, asked), self.spec, given)
            if None not in key:
                self.table.keep(key, plan)
        return plan


def _digest(*what: object) -> str:
    return sha256(" ".join(str(x) for x in what).encode()).hexdigest()[:12]


def _looks_at_sizes(op: str, device: str) -> bool:
    """Whether an implementation that the policy permits on this device has limits or a check of its own."""
    spec, kind = OPERATORS[op], device.partition(":")[0]
    order, installed = policy.policy_for(policy.current(), spec)[0].order, policy.installed()
    for name in installed:
        if name in order or (AUTO in order and installed.listed(name).tier is not None):
            manifest = installed[name].manifest
            impls = manifest.of(spec.id) if manifest else ()
            if any(question(impl) and claims(impl.requires.device, kind) for impl in impls):
                return True
    return False


@constant
def _outline_of(op: str, implementation: str, call: str, facts: Facts) -> Outline:
    """What the operator's node returns; its shape function has just run."""
    return nodes.RESULTS[op, implementation, call, tuple((t, rank) for t, _, rank, _ in facts)].outline
