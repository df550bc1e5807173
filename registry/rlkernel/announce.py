"""A decision said aloud: errors, warnings, observers.

What is said once is said once per process. Warnings point to the line that called the operator.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rlkernel import hooks, policy
from rlkernel.discover import Candidate
from rlkernel.wording import refusal, summary
from rlkernel_core.decision import Decision
from rlkernel_core.errors import (
    AmbiguousBackendError,
    AuditWarning,
    FallbackError,
    FallbackWarning,
    LockError,
    PluginWarning,
    ResolutionError,
)

if TYPE_CHECKING:
    from rlkernel.audit import Report

_OURS: Final = (f"{Path(__file__).parent}{os.sep}", "<rlkernel.")


def refused(decision: Decision) -> ResolutionError:
    """The error of a call that nobody takes, or two do."""
    if decision.ambiguous:
        names = ", ".join(decision.ambiguous)
        lines = " or ".join(f'order = ["{name}", "auto"]' for name in decision.ambiguous)
        text = f"{decision.call}: {names} are of one tier and all qualify; write {lines}"
        return AmbiguousBackendError(text, decision)
    locked = any(r.reason.slug == "policy/locked" for r in decision.rejected)
    return (LockError if locked else ResolutionError)(refusal(decision), decision)


def fallback(decision: Decision) -> None:
    """A fallback is said once per kind, or raised."""
    if decision.policy.fallback == "error":
        raise FallbackError(refusal(decision), decision)
    why = next(r.reason for r in decision.rejected if r.backend == decision.fell_back_from)
    words = "" if why.stage in {"shape", "memory"} else why.text  # which hold the sizes of this call
    kind = (decision.call.op, str(decision.fell_back_from), str(decision.backend), why.slug, words)
    if kind not in policy.PROCESS.warned:
        warnings.warn(summary(decision), FallbackWarning, stacklevel=_users_line())
        policy.PROCESS.warned.add(kind)


def decided(decision: Decision) -> None:
    """Observers hear every decision."""
    if decision.fell_back_from is not None:
        hooks.emit("rlkernel_fell_back", {"decision": decision})
    hooks.emit("rlkernel_decided", {"decision": decision})


def broken(installed: Mapping[str, Candidate], decision: Decision) -> None:
    """Say once which plugins in the order could not be loaded."""
    for rejected in decision.rejected:
        if rejected.reason.stage not in {"load", "api"} or rejected.reason.code == "not-installed":
            continue
        kind = ("plugin", rejected.backend, rejected.reason.slug)
        if kind in policy.PROCESS.warned:
            continue
        warnings.warn(f"backend {rejected.backend!r}: {rejected.reason}", PluginWarning, stacklevel=_users_line())
        policy.PROCESS.warned.add(kind)
        candidate = installed[rejected.backend]
        facts = {"name": candidate.name, "dist": candidate.dist, "error": str(rejected.reason)}
        hooks.emit("rlkernel_plugin_failed", facts)


def audited(decision: Decision, report: Report) -> None:
    """What an audit found: each output of an implementation is said once, observers hear of every call."""
    op = decision.call.op.partition("@")[0]
    found = [(d.output, f"differs from the reference in {d.output}: {d.text}") for d in report.differences]
    if report.error:
        found.append(("", f"cannot be compared with the reference: {report.error}"))
    for output, text in found:
        kind = ("audit", decision.call.op, str(decision.target), output)
        if kind not in policy.PROCESS.warned:
            judge = f"`rlkernel conformance run {decision.backend} --op {op}` judges it"
            said = f"{decision.call}: {decision.backend} ({decision.target}) {text}; {judge}"
            warnings.warn(said, AuditWarning, stacklevel=_users_line())
            policy.PROCESS.warned.add(kind)
    hooks.emit("rlkernel_audit", {"decision": decision, "report": report})


def _users_line() -> int:
    """The stacklevel at which a warning points to the first line outside this package."""
    level, frame = 1, sys._getframe(1)  # noqa: SLF001 the documented way to look at one's callers
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        level, frame = level + 1, frame.f_back
    return level
