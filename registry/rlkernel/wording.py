"""Decisions in words: the same lines in `explain`, `status` and `lock`, in warnings and in errors.

Imports the core, and what is known of our own backends without importing them.
"""

from __future__ import annotations

from collections.abc import Iterable

from rlkernel.discover import FIRST_PARTY
from rlkernel_core.decision import Decision, Rejected


def explanation(decision: Decision) -> str:
    """Every candidate with its verdict, in the order in which they were considered."""
    rules = decision.policy
    need = f" need={sorted(rules.need)}" if rules.need else ""
    need += f" {rules.watched}" if rules.watched else ""
    need += f" max_workspace_bytes={rules.max_workspace_bytes}" if rules.max_workspace_bytes is not None else ""
    lines = [
        str(decision.call),
        f"policy   order={list(rules.order)} fallback={rules.fallback}{need}  (from {decision.source})",
    ]
    width = max([len(r.backend) for r in decision.rejected] + [len(n or "") for n in (decision.backend,)] + [4])
    verdict = "TIE" if decision.ambiguous else "YES"
    chosen = f"  {verdict}  {decision.backend or '':{width}}  {implementation(decision)}  [{decision.version}]"
    after = [r for r in decision.rejected if r.reason.stage == "policy" and r.reason.code != "locked"]
    for r in decision.rejected:
        if r not in after:
            lines += _no(r, width)
    if decision.backend is not None:
        lines.append(chosen)
        if decision.room is not None and (takes := str(decision.room)):
            lines.append(f"       {'':{width}}  limits: {takes}")
    for name in decision.ambiguous[1:]:
        lines.append(f'  TIE  {name:{width}}  write order = ["{name}", "auto"] to settle it')
    for r in after:
        lines += _no(r, width)
    if decision.fell_back_from is not None and decision.backend is not None:
        forbids = f'; fallback = "error" forbids {decision.backend}' if rules.fallback == "error" else ""
        what = f"the order names {decision.fell_back_from}, which does not take this call"
        if by_plain_torch(decision):
            what = f"plain torch runs on {_hardware(decision)}, for which {decision.fell_back_from} has kernels"
        lines.append(f"fallback {what}{forbids}")
    if decision.backend is None:
        lines.append("nothing in the order can take this call")
    else:
        lines.append(f"decision {decision.hash}")
    return "\n".join(lines)


def refusal(decision: Decision) -> str:
    """The message of a ResolutionError: what was asked, and why nobody may take it."""
    what = "nothing in the order can take the call"
    if decision.backend is not None:
        what = f'fallback = "error" forbids that {_fallback(decision)}'
    return f"{what}\n{explanation(decision)}"


def summary(decision: Decision) -> str:
    """One line for a FallbackWarning: the call, what runs instead of what, why, and the line that changes it."""
    return f"{decision.call}: {_fallback(decision)}"


def fallbacks(decisions: Iterable[Decision]) -> list[str]:
    """What `summary` says of the fallbacks among decisions, once for all operators that have the same cause.

    Where kernels of several backends are not installed, the line is that of the first of them under `auto`, which
    brings those of the others.
    """
    found: dict[str, list[Decision]] = {}
    for decision in decisions:
        if decision.fell_back_from is not None and decision.backend is not None:
            found.setdefault(_cause(decision), []).append(decision)
    ranks = list(FIRST_PARTY)
    said = []
    for alike in found.values():
        first = min(alike, key=lambda d: ranks.index(d.fell_back_from) if d.fell_back_from in ranks else len(ranks))
        said.append(f"{', '.join(dict.fromkeys(d.call.op for d in alike))}: {_fallback(first)}")
    return said


def implementation(decision: Decision) -> str:
    """What runs, as tables say it: its function, and the order in which it adds where its manifest names one."""
    return (decision.target or "") + (f" sums={decision.sums}" if decision.sums else "")


def by_plain_torch(decision: Decision) -> bool:
    """Whether the fallback is that `auto` leaves an accelerator to plain torch: nothing that the order names lost."""
    passed_over = decision.fell_back_from in decision.policy.order
    return decision.fell_back_from is not None and not (passed_over and why(decision).reason.code != "outranked")


def without_kernels(decision: Decision) -> bool:
    """Whether plain torch runs on an accelerator because no backend with kernels of the operator is installed."""
    return by_plain_torch(decision) and why(decision).reason.slug == "load/not-installed"


def why(decision: Decision) -> Rejected:
    """Why the backend that a fallback passed over does not take the call."""
    return next(r for r in decision.rejected if r.backend == decision.fell_back_from)


def remedy(decision: Decision) -> str:
    """The line that ends a fallback, or nothing."""
    if why(decision).reason.code == "outranked":
        return f'order = ["{decision.fell_back_from}", "auto"]'
    return why(decision).reason.fix


def remark(decision: Decision) -> str:
    """What a table says beside a decision: nobody, a tie, a fallback, or what one could install; mostly nothing."""
    if decision.backend is None:
        last = next((r for r in reversed(decision.rejected) if r.reason.stage != "policy"), None)
        return f"{last.backend}: {last.reason.slug}: {last.reason.text}" if last else "nothing in the order can take it"
    if decision.ambiguous:
        return f"a tie of {', '.join(decision.ambiguous)}"
    absent = ", ".join(r.backend for r in decision.rejected if r.reason.slug == "load/not-installed")
    if decision.fell_back_from is not None:
        forbidden = ', and fallback = "error" forbids it' if decision.policy.fallback == "error" else ""
        if without_kernels(decision):
            return f"fallback: plain torch; not installed: {absent}{forbidden}"
        return f"fallback: instead of {decision.fell_back_from} ({why(decision).reason.slug}){forbidden}"
    return f"not installed: {absent}" if absent else ""


def _fallback(decision: Decision) -> str:
    """What runs instead of what, why, and the line that changes it; nothing that differs between calls of one kind."""
    fix = remedy(decision)
    return f"{_cause(decision)}." + (f" Fix: {fix}." if fix else "")


def _cause(decision: Decision) -> str:
    reason, torch = why(decision).reason, f"plain torch runs on {_hardware(decision)}"
    if without_kernels(decision):
        return f"{torch}, because the kernels for it are not installed"
    what = torch if by_plain_torch(decision) else f"{decision.backend} runs"
    return f"{what} instead of {decision.fell_back_from} ({reason.slug}: {reason.text})"


def _hardware(decision: Decision) -> str:
    return " ".join(filter(None, (decision.call.device, decision.call.arch)))


def _no(rejected: Rejected, width: int) -> list[str]:
    reason = rejected.reason
    lines = [f"  no   {rejected.backend:{width}}  {reason.slug}: {reason.text}"]
    if reason.fix:
        lines.append(f"       {'':{width}}  fix: {reason.fix}")
    return lines
