"""What a manifest names, imported and held against its field: a function of one record, or a pair of an operator.

Torch is imported by a pair alone, which needs it anyhow.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from rlkernel.discover import guarded, load_target
from rlkernel_core.reasons import Reason
from rlkernel_core.spec.form import OpSpec

if TYPE_CHECKING:
    from rlkernel_core.gradients import Pair
    from rlkernel_core.manifest import Impl


def function(spec: OpSpec[Any, Any], target: str) -> Callable[..., Any] | Reason:
    """Import a function of one record; a Reason where there is none, or it takes or gives something else."""
    run = load_target(target)
    if isinstance(run, Reason):
        return run
    have, error = guarded(lambda: inspect.signature(run))
    if error is None and have is not None:
        _, error = guarded(lambda: have.bind(None))
    record = getattr(spec.record, "__name__", "its record")
    if error is not None:
        shown, _ = guarded(lambda: str(have) if have is not None else "")
        return _misfit(f"{target}{shown or ''} does not take one argument, the {record} of {spec.id}")
    late = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    if any(guarded(partial(kind, run))[0] for kind in late):
        return _misfit(f"{target} answers a call with a coroutine or generator, and not with the result of {spec.id}")
    return run


def pair(spec: OpSpec[Any, Any], target: str) -> type[Pair[Any, Any]] | Reason:
    """Import a pair of forward and backward; a Reason where there is none of this operator."""
    found: Any = load_target(target)
    if isinstance(found, Reason):
        return found
    from rlkernel_core.gradients import Pair  # imports torch, which the target above did already

    if isinstance(found, type) and issubclass(found, Pair) and getattr(found, "op", None) == spec.name:
        return found
    return _misfit(f"{target} is no rlkernel_core.gradients.Pair of {spec.name}")


def named(impl: Impl, spec: OpSpec[Any, Any]) -> Iterator[tuple[str, Callable[[], object]]]:
    """The functions that an implementation names, each with what imports it or gives the Reason why not."""
    for target in filter(None, (impl.target, impl.check, impl.workspace)):
        yield target, partial(function, spec, target)
    if impl.gradient is not None:
        yield impl.gradient, partial(pair, spec, impl.gradient)


def _misfit(text: str) -> Reason:
    """A target that loads and is not what its field of the manifest promises."""
    return Reason("load", "target-signature", text, "report it to the plugin's author")
