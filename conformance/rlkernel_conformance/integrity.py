"""Were the clocks and the suite's own functions left as they are? Looked at after every clause, and put back.

Tested code shares the process that judges it. This finds code that stops the clock or replaces a judgment; it is no
wall against code that sets out to hide.
"""

from __future__ import annotations

import sys
import time
from types import FunctionType, ModuleType
from typing import Any, Final

# Functions outside the suite that its judgments rest on.
_NAMED: Final = {
    "torch": ("equal", "allclose", "isclose", "isnan", "isfinite", "get_rng_state", "is_grad_enabled"),
    "torch.cuda": ("synchronize", "Event", "Stream", "memory_allocated", "max_memory_allocated"),
    "torch.testing": ("assert_close",),
    "numpy": ("abs", "isnan", "isfinite", "asarray", "where", "allclose"),
}
_TESTED: Final = ("rlkernel_conformance.mutants", "rlkernel_conformance.hostile")


class Integrity:
    """Functions as they were when this was made."""

    def __init__(self) -> None:
        self._kept: list[tuple[ModuleType, str, Any, Any]] = []
        for module, names in [(time, tuple(vars(time))), *_named(), *_suite()]:
            for name in names:
                value = vars(module)[name]
                if callable(value):
                    self._kept.append((module, name, value, getattr(value, "__code__", None)))

    def broken(self) -> list[str]:
        """Names of what was replaced since; they are put back."""
        found = []
        for module, name, value, code in self._kept:
            replaced = vars(module).get(name) is not value
            rewritten = isinstance(value, FunctionType) and value.__code__ is not code
            if replaced or rewritten:
                found.append(f"{module.__name__}.{name}")
                setattr(module, name, value)
            if rewritten:
                value.__code__ = code
        return found


def _named() -> list[tuple[ModuleType, tuple[str, ...]]]:
    loaded = {m: names for m, names in _NAMED.items() if m in sys.modules}
    return [(sys.modules[m], tuple(n for n in names if n in vars(sys.modules[m]))) for m, names in loaded.items()]


def _suite() -> list[tuple[ModuleType, tuple[str, ...]]]:
    own = [m for name, m in sorted(sys.modules.items()) if name.startswith("rlkernel_conformance.")]
    return [(m, tuple(vars(m))) for m in own if not m.__name__.startswith(_TESTED)]
