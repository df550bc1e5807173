"""Attacks on clauses that most operators have, made from the spec and from calls of the operator.

    derive("whiten", arguments, inputs_untouched=cases, determinism=cases, capture=plain_cases)

The spec says which clause is meant, by its title or feature, which arguments may want gradients and which results carry
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from rlkernel_conformance.attack import attack
from rlkernel_conformance.call_checks import leaves, same_results, untouched
from rlkernel_conformance.compare import require
from rlkernel_conformance.graphs import replays
from rlkernel_conformance.subject import Subject
from rlkernel_core.spec import OPERATORS
from rlkernel_core.tree import flatten

Arguments = Callable[[Subject, Any], dict[str, Any]]  # the arguments of a case by name, made anew each time
Cases = Callable[[Subject], st.SearchStrategy[Any]]


def storage(x: Tensor) -> int:
    """Address of a tensor's memory."""
    return x.untyped_storage().data_ptr()


def has_gradients(subject: Subject) -> bool:
    """Whether results carry gradients, by the spec and by what the subject claims."""
    return "grad" in subject.claims and bool(subject.spec.carrying)


def with_gradients(subject: Subject, given: Mapping[str, Any]) -> dict[str, Tensor]:
    """Results of a call and gradients of all that may want one, by name.

    The upstream gradient is 1 for every element of every result that carries gradients.
    """
    spec = subject.spec
    if not has_gradients(subject):
        return leaves(subject(**given))
    values, structure = flatten(dict(given))
    wanted = {
        name: x.detach().requires_grad_()
        for name, x in zip(structure.names(), values, strict=True)
        if name.partition(".")[0] in spec.differentiable and isinstance(x, Tensor) and x.is_floating_point()
    }
    out = subject(**structure.build([wanted.get(n, x) for n, x in zip(structure.names(), values, strict=True)]))
    results = [getattr(out, name) if name else out for name in spec.carrying]
    total = [x.sum() for x in results if x is not None and x.requires_grad]
    found = torch.autograd.grad(total, list(wanted.values()), allow_unused=True)
    grads = {f"d_{name}": g for name, g in zip(wanted, found, strict=True) if g is not None}
    return {name: x.detach() for name, x in leaves(out).items()} | grads


def leaves_inputs_untouched(subject: Subject, given: Mapping[str, Any]) -> None:
    """No argument is written to, by the call or by its backward pass, and no result is an argument's memory."""
    theirs = {storage(x): name for name, x in leaves(dict(given)).items() if x.numel()}
    for name, x in leaves(untouched(given, lambda: subject(**given))).items():
        owner = theirs.get(storage(x)) if x.numel() else None
        require(owner is None, f"{name} is memory of the argument {owner}")
    if has_gradients(subject):
        untouched(given, lambda: with_gradients(subject, given))


def derive(
    op: str,
    arguments: Arguments,
    *,
    inputs_untouched: Cases | None = None,
    determinism: Cases | None = None,
    capture: Cases | None = None,
    another: Callable[[Any], Any] = lambda case: replace(case, seed=case.seed + 77),
    scale: float = 1.0,
) -> None:
    """Register attacks on the clauses of these titles.

    Args:
        op: the operator.
        arguments: of a case.
        inputs_untouched: cases for the clause "inputs untouched".
        determinism: cases for the clause of the feature "deterministic".
        capture: cases for the clause of the feature "capturable".
        another: a case of the same shapes with other values, for the replay of a graph.
        scale: examples of a profile times this.
    """
    ids = {c.title: c.id for c in OPERATORS[op].clauses} | {c.feature: c.id for c in OPERATORS[op].clauses}

    def stay_as_they_were(subject: Subject, case: Any) -> None:
        """Every argument, the generator, the defaults."""
        leaves_inputs_untouched(subject, arguments(subject, case))

    def the_same_call_gives_the_same_bits(subject: Subject, case: Any) -> None:
        """Twice, on storage made anew, gradients included."""
        first, second = (with_gradients(subject, arguments(subject, case)) for _ in range(2))
        same_results(second, first, "when called again")

    def the_call_replays_in_a_graph(subject: Subject, case: Any) -> None:
        """Recorded with some tensors, replayed with others of the same shapes."""
        (first, structure), (second, _) = (flatten(arguments(subject, c)) for c in (case, another(case)))
        names = structure.names()
        tensors = (
            {n: x for n, x in zip(names, values, strict=True) if isinstance(x, Tensor)} for values in (first, second)
        )

        def call(**given: Tensor) -> Any:
            return subject(**structure.build([given.get(n, x) for n, x in zip(names, first, strict=True)]))

        replays(subject, *tensors, call)

    if inputs_untouched is not None:
        attack(ids["inputs untouched"], inputs_untouched, scale=scale)(stay_as_they_were)
    if determinism is not None:
        attack(ids["deterministic"], determinism, scale=scale)(the_same_call_gives_the_same_bits)
    if capture is not None:
        attack(ids["capturable"], capture, scale=0.2 * scale)(the_call_replays_in_a_graph)
