"""Operators of this package with a launcher of one's own: prepared with it, and run with it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

from rlkernel_triton.claims import CLAIMS
from rlkernel_triton.launchers.binding import Launcher
from rlkernel_triton.launchers.planning import current, using, within


def prepared_with(launcher: Launcher, op: str) -> Callable[[Any], Callable[[Any], Any]]:
    """A function that prepares calls of one shape with a launcher: in the scope that this is called in, but for that.

    Args:
        launcher: what launches.
        op: a key of `rlkernel_triton.claims.CLAIMS`.
    """
    claim, own = CLAIMS[op], named(CLAIMS[op].target)
    with using(launcher):
        scope = current()

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
