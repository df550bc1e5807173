"""The attacks on the clauses of every operator: one module an operator, found by name."""

from __future__ import annotations

from importlib import import_module
from typing import Final

from rlkernel.policy import is_operator
from rlkernel_conformance.attack import ATTACKS, Attack
from rlkernel_core.errors import UnknownNameError
from rlkernel_core.spec import OPERATORS
from rlkernel_core.spec.brought import BROUGHT

__all__ = ["attacks_on"]

# Operators, each with a module of its name; one that is not here has no attacks yet, and a report says so.
MODULES: Final = (
    "advantage",
    "affine_suffix_scan",
    "group_filter",
    "shape_rewards",
    "whiten",
    "logprob",
    "linear_logprob",
    "sample",
    "lm_head_sample",
    "verify",
    "policy_loss",
    "linear_policy_loss",
    "quantize",
    "dequantize",
    "prepack",
    "fake_quantize",
    "qmatmul",
    "capture",
    "rollout_buffer",
    "linear",
    "grouped_linear",
    "route",
    "divergence",
    "linear_divergence",
    "rms_norm",
    "rope",
    "glu",
    "attention",
)


def module_of(op: str) -> str | None:
    """The module with the attacks on an operator, which a plugin names for its own; None where nothing attacks it."""
    if op in MODULES:
        return f"rlkernel_conformance.clauses.{op}"
    return BROUGHT[op].attacks if is_operator(op) and op in BROUGHT else None


def attacks_on(op: str) -> tuple[Attack, ...]:
    """The attacks on an operator, `op`, in the order of its clauses.

    Raises:
        UnknownNameError: no such operator, or one without attacks.
    """
    module = module_of(op)
    if module is None:
        raise UnknownNameError("operator with attacks" if op in OPERATORS else "operator", op, MODULES)
    import_module(module)
    for common in ("common_clauses", "options_together"):
        import_module(f"rlkernel_conformance.clauses.{common}").attack_operator(OPERATORS[op])
    order = [c.id for c in OPERATORS[op].clauses]
    return tuple(sorted((a for a in ATTACKS.values() if a.op == op), key=lambda a: order.index(a.clause.id)))
