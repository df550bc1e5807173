"""The attacks on the clauses of every operator: one module an operator, found by name."""

from __future__ import annotations

from importlib import import_module
from typing import Final

from rlkernel_conformance.attack import ATTACKS, Attack
from rlkernel_core.errors import UnknownNameError
from rlkernel_core.spec import OPERATORS

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
    "qmatmul",
    "capture",
    "rollout_buffer",
    "linear",
    "grouped_linear",
    "route",
    "rms_norm",
    "rope",
    "glu",
    "attention",
)


def attacks_on(op: str) -> tuple[Attack, ...]:
    """The attacks on an operator, `op`, in the order of its clauses.

    Raises:
        UnknownNameError: no such operator, or one without attacks.
    """
    if op not in MODULES:
        raise UnknownNameError("operator with attacks" if op in OPERATORS else "operator", op, MODULES)
    import_module(f"rlkernel_conformance.clauses.{op}")
    for common in ("common_clauses", "options_together"):
        import_module(f"rlkernel_conformance.clauses.{common}")
    order = [c.id for c in OPERATORS[op].clauses]
    return tuple(sorted((a for a in ATTACKS.values() if a.op == op), key=lambda a: order.index(a.clause.id)))
