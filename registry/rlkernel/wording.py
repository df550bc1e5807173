"""Decisions in words: the same lines in `explain`, in warnings and in errors.

Imports nothing but the core.
"""

from __future__ import annotations

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
    chosen = f"  {verdict}  {decision.backend or '':{width}}  {decision.target}  [{decision.version}]"
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
        lines.append(
            f"fallback {decision.fell_back_from} claims {decision.call.device} and cannot take this call{forbids}"
        )
    if decision.backend is None:
        lines.append("nothing in the order can take this call")
    else:
        lines.append(f"decision {decision.hash}")
    return "\n".join(lines)


def refusal(decision: Decision) -> str:
    """The message of a ResolutionError: what was asked, and why nobody may take it."""
    what = "nothing in the order can take the call"
    if decision.backend is not None:
        what = f'{decision.fell_back_from} cannot take the call, and fallback = "error" forbids {decision.backend}'
    return f"{what}\n{explanation(decision)}"


def summary(decision: Decision) -> str:
    """One line for a FallbackWarning."""
    why = next(r for r in decision.rejected if r.backend == decision.fell_back_from)
    fix = f" Fix: {why.reason.fix}." if why.reason.fix else ""
    return (
        f"{decision.call}: {decision.backend} runs instead of {decision.fell_back_from} "
        f"({why.reason.slug}: {why.reason.text}).{fix}"
    )


def remark(decision: Decision) -> str:
    """What a table says beside a decision: nobody, a tie, a fallback, or what one could install; mostly nothing."""
    if decision.backend is None:
        why = next((r for r in reversed(decision.rejected) if r.reason.stage != "policy"), None)
        return f"{why.backend}: {why.reason.slug}: {why.reason.text}" if why else "nothing in the order can take it"
    if decision.ambiguous:
        return f"a tie of {', '.join(decision.ambiguous)}"
    if decision.fell_back_from is not None:
        why = next(r for r in decision.rejected if r.backend == decision.fell_back_from)
        forbidden = ', and fallback = "error" forbids it' if decision.policy.fallback == "error" else ""
        return f"instead of {decision.fell_back_from} ({why.reason.slug}){forbidden}"
    absent = [r.backend for r in decision.rejected if r.reason.slug == "load/not-installed"]
    return f"not installed: {', '.join(absent)}" if absent else ""


def _no(rejected: Rejected, width: int) -> list[str]:
    reason = rejected.reason
    lines = [f"  no   {rejected.backend:{width}}  {reason.slug}: {reason.text}"]
    if reason.fix:
        lines.append(f"       {'':{width}}  fix: {reason.fix}")
    return lines
