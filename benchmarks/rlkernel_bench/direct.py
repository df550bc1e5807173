"""Implementations of a backend as functions of their operator's arguments: no policy chooses among them.

    from rlkernel_bench.direct import of_cuda

    of_cuda.sample(logits, seed=seed, step=0)

A call is checked and prepared once a shape, as the front door does it, so that times are those of the implementation.
Loads a backend when its first operator is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

from rlkernel.plans import key_or_none
from rlkernel_core.manifest import Backend, Impl
from rlkernel_core.spec import OPERATORS


class Direct:
    """One implementation, by arguments."""

    def __init__(self, impl: Impl) -> None:
        module, _, name = impl.target.partition(":")
        self._spec: Any = OPERATORS[impl.op.partition("@")[0]]
        self._function: Callable[[Any], Any] = getattr(import_module(module), name)
        self._prepared = impl.prepared
        self._runs: dict[Any, Callable[[Any], Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Check the call and prepare it where its shape is new, and run it."""
        call = self._spec.call(*args, **kwargs)
        key = key_or_none(self._spec.name, call)
        run = self._runs.get(key)
        if run is None:
            if self._spec.check is not None:
                self._spec.check(call)
            run = self._function(call) if self._prepared else self._function
            if key is not None:
                self._runs[key] = run
        return run(call)

    def forget(self) -> None:
        """Prepare every shape anew, since what was prepared by has changed."""
        self._runs.clear()


class Implementations:
    """The implementations that a manifest, `module:name`, claims first for each operator."""

    def __init__(self, manifest: str) -> None:
        self._manifest = manifest
        self._made: dict[str, Direct] = {}

    def __getattr__(self, op: str) -> Direct:
        if op not in OPERATORS:
            raise AttributeError(op)
        if op not in self._made:
            module, _, name = self._manifest.partition(":")
            backend: Backend = getattr(import_module(module), name)
            self._made[op] = Direct(backend.of(OPERATORS[op].id)[0])
        return self._made[op]


of_triton: Final = Implementations("rlkernel_triton:backend")
of_cuda: Final = Implementations("rlkernel_cuda:backend")
