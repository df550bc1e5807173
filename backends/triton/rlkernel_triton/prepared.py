"""Operators of this package prepared in a scope and run in it: with a launcher of one's own, say."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

from rlkernel_triton.claims import CLAIMS
from rlkernel_triton.launchers.planning import Scope, within


def prepared(op: str, scope: Scope) -> Callable[[Any], Callable[[Any], Any]]:
    """A function that prepares calls of one shape in a scope, whatever the scope that it is called in.

    Args:
        op: a key of `rlkernel_triton.claims.CLAIMS`.
        scope: what launches, and what it plans for.
    """
    claim, own, scope = CLAIMS[op], named(CLAIMS[op].target), scope._replace(op=op)

    @wraps(own)
    def prepare(call: Any) -> Callable[[Any], Any]:
        with within(scope):
            run = own(call) if claim.prepared else own

        def run_within(call: Any) -> Any:
            with within(scope):
                return run(call)

        return run_within

    return prepare


def named(target: str) -> Any:
    """What a claim names: "package.module:function"."""
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)
