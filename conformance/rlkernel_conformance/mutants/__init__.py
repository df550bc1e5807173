"""The zoo: backends with one planted bug each, which prove the suite. A clause that kills none of them proves nothing.

    @mutant("LP-08", origin="temperature applied twice")
    def temperature_twice(reference, logits, ids, **rest): ...

Every mutant must die on the clause it was planted for, the first one it names, and on no other than those it names,
while the reference passes everything.

An implementation is a function of a call's record; a bug is written as a function of the arguments, like the reference
that it is given, and `mutant` turns it into an implementation. No implementation sees arguments that the operator's
check refuses, so a bug in refusals is planted in the front door as well: see `unchecked`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

from rlkernel import decide, policy
from rlkernel_core.errors import RLKernelError, UnknownNameError
from rlkernel_core.manifest import API_VERSION, Backend, Impl
from rlkernel_core.spec import OPERATORS
from rlkernel_core.spec.form import OpSpec
from rlkernel_torch import backend as reference

# operator -> module of its mutants
MODULES: Final = {
    "advantage": "advantage",
    "affine_suffix_scan": "affine_suffix_scan",
    "group_filter": "group_filter",
    "shape_rewards": "shape_rewards",
    "whiten": "whiten",
    "logprob": "logprob",
    "linear_logprob": "linear_logprob",
    "policy_loss": "policy_loss",
    "linear_policy_loss": "linear_policy_loss",
    "sample": "sample",
    "lm_head_sample": "lm_head_sample",
    "verify": "verify",
    "quantize": "quantize",
    "dequantize": "dequantize",
    "prepack": "prepack",
    "qmatmul": "qmatmul",
    "capture": "capture",
    "rollout_buffer": "rollout_buffer",
}


@dataclass(frozen=True)
class Mutant:
    """A known-bad backend."""

    name: str
    op: str
    planted: str  # the clause it was planted for, which must refute it
    kills: frozenset[str]  # that one, and every other that may
    origin: str  # where the bug was seen
    manifest: Backend
    where: str  # the manifest as "module:attribute", for a worker


ZOO: Final[dict[str, Mutant]] = {}


def mutant(
    *kills: str, origin: str, claims: frozenset[str] = frozenset(), check: str | None = None, unchecked: bool = False
) -> Callable[[Callable[..., Any]], Any]:
    """Register a planted bug: a function of the reference's implementation and the operator's arguments.

    Args:
        *kills: ids of the clauses that must refute it, the one it was planted for first.
        origin: where the bug was seen, or why it is thinkable.
        claims: features it claims though the reference does not.
        check: its own word on what it can do, as "module:function".
        unchecked: once it has run, the front door lets calls through to it that the operator's check refuses.
    """
    spec = next(spec for spec in OPERATORS.values() if any(c.id == kills[0] for c in spec.clauses))
    op = spec.name
    (impl,) = (i for i in reference.impls if i.op == spec.id)
    module, _, function = impl.target.partition(":")

    def register(bug: Callable[..., Any]) -> Callable[..., Any]:
        def planted(call: Any) -> Any:
            if unchecked:
                _skip_the_check(spec, call)
            right = spec.taking_arguments(getattr(import_module(module), function))
            given = call.as_dict()
            positional = [given.pop(n) for n, p in spec.parameters.items() if p.kind is not p.KEYWORD_ONLY]
            return bug(right, *positional, **given)

        name = bug.__name__
        space = import_module(bug.__module__).__dict__
        target = f"{bug.__module__}:{name}_impl"
        claimed = Impl(op=impl.op, target=target, requires=impl.requires, supports=impl.supports | claims, check=check)
        impls = tuple(claimed if i is impl else i for i in reference.impls)  # right in everything else
        manifest = Backend(name=f"mutant-{name.replace('_', '-')}", api=API_VERSION, impls=impls)
        space[f"{name}_impl"], space[f"{name}_manifest"] = planted, manifest
        ZOO[f"{op}.{name}"] = Mutant(
            name, op, kills[0], frozenset(kills), origin, manifest, f"{bug.__module__}:{name}_manifest"
        )
        return bug

    return register


_CALL_OF: Final = decide.call_of


class _Unchecked:
    """`decide.call_of` where what was found out about a good call stands for refused ones too, under one policy."""

    def __init__(self, spec: OpSpec[Any, Any], good: Any) -> None:
        self.spec, self.scope, self.known = spec, policy.current(), _CALL_OF(spec, good)

    def __call__(self, spec: OpSpec[Any, Any], call: Any) -> Any:
        if policy.current() is not self.scope:  # the mutant's time is over
            decide.call_of = _CALL_OF
            return _CALL_OF(spec, call)
        try:
            return _CALL_OF(spec, call)
        except RLKernelError:
            if spec is not self.spec:
                raise
            return self.known


def _skip_the_check(spec: OpSpec[Any, Any], call: Any) -> None:
    """Let refused calls of an operator through from now on, as long as the policy in force is this one."""
    now: Any = decide.call_of
    if not isinstance(now, _Unchecked) or (now.spec, now.scope) != (spec, policy.current()):
        decide.call_of = _Unchecked(spec, call)


def mutants_of(op: str) -> tuple[Mutant, ...]:
    """The mutants of an operator.

    Raises:
        UnknownNameError: no such operator, or one without mutants.
    """
    if op not in MODULES:
        raise UnknownNameError("operator with mutants" if op in OPERATORS else "operator", op, MODULES)
    import_module(f"rlkernel_conformance.mutants.{MODULES[op]}")
    import_module("rlkernel_conformance.mutants.owed")
    import_module("rlkernel_conformance.mutants.qmatmul_experts")
    return tuple(m for m in ZOO.values() if m.op == op)
