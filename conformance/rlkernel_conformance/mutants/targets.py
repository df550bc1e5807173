"""What the manifests of mutants name, made when it is asked for: op__bug, op__bug__manifest and op__bug__check."""

from __future__ import annotations

from functools import cache
from typing import Any

from rlkernel_conformance.mutants import mutants_of
from rlkernel_core.spec import OPERATORS


@cache
def __getattr__(name: str) -> Any:
    op, _, rest = name.partition("__")
    bug, _, what = rest.partition("__")
    found = [m for m in mutants_of(op) if m.name == bug] if op in OPERATORS else []
    if not found:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    (mutant,) = found
    if what == "check" and mutant.bug.check is not None:
        return mutant.bug.check(OPERATORS[op].check or (lambda _: None))
    return mutant.manifest if what == "manifest" else mutant.implementation()
