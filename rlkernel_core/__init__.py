"""The contract: what each operator means, what a plugin may claim, how a decision is written down.

Plugin authors import this package and nothing else of rlkernel:

    from rlkernel_core import Backend, Impl, Requires

Importing it loads nothing but itself; each name is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

    from rlkernel_core.decision import Call, Decision, OpPolicy, Policy, Rejected
    from rlkernel_core.errors import RLKernelError
    from rlkernel_core.manifest import API_VERSION, Backend, Impl, Limits, Operator, Requires
    from rlkernel_core.reasons import Reason

__version__ = "0.1.0"

__all__ = [
    "API_VERSION",
    "Backend",
    "Call",
    "Decision",
    "Impl",
    "Limits",
    "OpPolicy",
    "Operator",
    "Policy",
    "RLKernelError",
    "Reason",
    "Rejected",
    "Requires",
    "__version__",
]

_HOMES = {
    "API_VERSION": "manifest",
    "Backend": "manifest",
    "Call": "decision",
    "Decision": "decision",
    "Impl": "manifest",
    "Limits": "manifest",
    "Operator": "manifest",
    "OpPolicy": "decision",
    "Policy": "decision",
    "RLKernelError": "errors",
    "Reason": "reasons",
    "Rejected": "decision",
    "Requires": "manifest",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rlkernel_core' has no attribute {name!r}")
    found = getattr(import_module(f"rlkernel_core.{_HOMES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
