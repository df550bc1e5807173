"""A decision said aloud: errors, warnings, observers.

What is said once is said once per process. Warnings point to the line that called the operator.
docs/choose.md says what a fallback is.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rlkernel import hooks, policy
from rlkernel.discover import FIRST_PARTY, Candidate
from rlkernel.wording import by_plain_torch, refusal, summary, without_kernels
from rlkernel_core.decision import Decision, Rejected
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
    """A fallback is said once per operator, or raised.

    Where no kernels for the hardware are installed it is said once per process: one line installs those of all
    operators. Each backend that the order names has a warning of its own.
    """
    if decision.policy.fallback == "error":
        raise FallbackError(refusal(decision), decision)
    more = ""
    if without_kernels(decision):
        kind: tuple[str, ...] = ("fallback", "not installed")
        more = " Said once for all operators; `rlkernel status` lists them."
    elif by_plain_torch(decision):
        kind = ("fallback", decision.call.op)
    else:
        kind = ("fallback", decision.call.op, str(decision.fell_back_from), str(decision.backend))
    if kind not in policy.PROCESS.warned:
        warnings.warn(summary(decision) + more, FallbackWarning, stacklevel=_users_line())
        policy.PROCESS.warned.add(kind)


def decided(decision: Decision) -> None:
    """Observers hear every decision."""
    if decision.fell_back_from is not None:
        hooks.emit("rlkernel_fell_back", {"decision": decision})
    hooks.emit("rlkernel_decided", {"decision": decision})


def broken(installed: Mapping[str, Candidate], decision: Decision) -> None:
    """Say once which plugins in the order could not be loaded, and which of our own cannot run here."""
    for rejected in decision.rejected:
        if not (_unloaded(rejected) or _unusable(decision, rejected)):
            continue
        kind = ("plugin", rejected.backend, rejected.reason.slug)
        if kind in policy.PROCESS.warned:
            continue
        warnings.warn(f"backend {rejected.backend!r}: {rejected.reason}", PluginWarning, stacklevel=_users_line())
        policy.PROCESS.warned.add(kind)
        candidate = installed[rejected.backend]
        facts = {"name": candidate.name, "dist": candidate.dist, "error": str(rejected.reason)}
        hooks.emit("rlkernel_plugin_failed", facts)


def _unloaded(rejected: Rejected) -> bool:
    return rejected.reason.stage in {"load", "api"} and rejected.reason.code != "not-installed"


def _unusable(decision: Decision, rejected: Rejected) -> bool:
    """Whether a backend of ours that would have been the choice under `auto` is installed and cannot run here.

    What takes the call in its place may be another kernel, which is no fallback; so nothing else would tell.
    """
    name, call = rejected.backend, decision.call
    if name in {*decision.policy.order, decision.fell_back_from, decision.backend} or name not in FIRST_PARTY:
        return False
    ranks = list(FIRST_PARTY)
    before = decision.backend in ranks and ranks.index(name) < ranks.index(decision.backend)
    wrong = rejected.reason.stage in {"environment", "probe"} or rejected.reason.slug == "operator/other-version"
    return wrong and before and FIRST_PARTY[name].has_kernels(call.op, call.device, call.arch)


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
