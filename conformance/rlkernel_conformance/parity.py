"""How far two backends are apart on the same calls, in the numbers that RL post-training watches.

For operators that give log-probabilities (logprob, linear_logprob, sample): the largest and the 99th percentile of
|delta log p|; `kl0`, the mean of k3 = r - 1 - log r with r = exp(delta log p), which is what a policy gradient step
sees as KL before anything was learned; `clipfrac0`, the share of tokens whose ratio r leaves [1 - clip, 1 + clip] at
the first step. For sample the draws are the same, and `same_tokens` says how often the tokens are. For every other
operator: the largest |delta| of each result. Integers and bools count as differing or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

import rlkernel
from rlkernel_conformance.call_checks import leaves
from rlkernel_conformance.example_calls import Call
from rlkernel_conformance.subject import Subject
from rlkernel_core.errors import ConfigError, UnknownNameError
from rlkernel_core.spec import OPERATORS

__all__ = ["parity"]

CLIP: Final = 0.2
LOG_PROBABILITIES: Final = ("logprob", "linear_logprob", "sample")
Row = dict[str, Any]


def parity(a: str, b: str, *, ops: Iterable[str] = (), device: str = "cpu", calls: int = 8, rows: int = 64) -> Row:
    """Compare two installed backends.

    Args:
        a: name of a backend; of sample's tokens and of the ratio's denominator it is the rollout side.
        b: name of the other, the trainer's side.
        ops: operators; empty for all that both implement.
        device: torch device.
        calls: calls of each operator, of different seeds.
        rows: rows of each call.

    Returns:
        Plain values: {"a", "b", "device", "calls", "rows", "operators": {operator: numbers}}.

    Raises:
        UnknownNameError: no such operator.
        ConfigError: one of them does not implement an operator that was asked for, or they have none in common.
    """
    wanted = tuple(ops)
    for op in wanted:
        if op not in OPERATORS:
            raise UnknownNameError("operator", op, OPERATORS)
    pairs = {op: (Subject(a, op, device), Subject(b, op, device)) for op in wanted or OPERATORS}
    missing = {op: [s.backend for s in pair if not s.impls] for op, pair in pairs.items()}
    if any(missing[op] for op in wanted) or all(missing.values()):
        text = "; ".join(f"{op}: {', '.join(names)}" for op, names in missing.items() if names)
        raise ConfigError(f"there is nothing to compare on {device}, for these implement no such operator: {text}")
    found = {op: _compared(pair, calls, rows) for op, pair in pairs.items() if not missing[op]}
    return {"a": a, "b": b, "device": device, "calls": calls, "rows": rows, "operators": found}


def _compared(pair: tuple[Subject, Subject], calls: int, rows: int) -> Row:
    common = [d for d in pair[0].dtypes if d in pair[1].dtypes]
    if not common:
        raise ConfigError(f"{pair[0].backend} and {pair[1].backend} claim no dtype of {pair[0].op} in common")
    results = []
    for seed in range(calls):
        case = Call(seed, rows)
        given = case.given(pair[0])  # one side's arguments are both sides' arguments
        results.append(tuple(_answered(s, case, given) for s in pair))
    if pair[0].op in LOG_PROBABILITIES:
        first, second = (torch.cat([found["logprob"] for found in side]) for side in zip(*results, strict=True))
        return drift(first, second, results)
    return _largest(results)


def _answered(subject: Subject, case: Call, given: Mapping[str, Any]) -> dict[str, Tensor]:
    with rlkernel.use(subject.backend, fallback="error"), torch.no_grad():
        return {n: x.detach().cpu() for n, x in leaves(case.run(subject, given)).items()}


def drift(a: Tensor, b: Tensor, results: Iterable[Any] = ()) -> Row:
    """Drift metrics of log-probabilities [N] of two sides, from tokens that both judged."""
    same = [(x["token"] == y["token"]) for x, y in results if "token" in x]
    told: Row = {}
    if same:  # where they drew other tokens there is nothing to compare
        kept = torch.cat(same)
        told["same_tokens"] = float(kept.double().mean())
        a, b = a[kept], b[kept]
    delta = (b.double() - a.double()).nan_to_num(nan=torch.inf)
    delta = torch.where(a == b, 0.0, delta)  # infinities that agree
    ratio = delta.exp()
    clipped = (ratio < 1 - CLIP) | (ratio > 1 + CLIP)
    count = max(1, delta.numel())
    return told | {
        "tokens": delta.numel(),
        "max_abs_delta": float(delta.abs().max()) if delta.numel() else 0.0,
        "p99_abs_delta": float(delta.abs().quantile(0.99)) if delta.numel() else 0.0,
        "kl0": float((torch.expm1(delta) - delta).sum() / count),
        "clipfrac0": float(clipped.double().sum() / count),
    }


def _largest(results: Iterable[Any]) -> Row:
    """The largest difference of each result over all calls."""
    worst: Row = {}
    for a, b in results:
        for name, x in a.items():
            worst[name] = max(worst.get(name, 0.0), _apart(x, b.get(name)))
    return {"max_abs_delta": worst}


def _apart(x: Tensor, y: Tensor | None) -> float:
    if y is None or x.shape != y.shape:
        return float("inf")
    if x.numel() == 0:
        return 0.0
    if not x.is_floating_point():
        return float((x != y).any())
    a, b = x.double(), y.double()
    same = (a == b) | (a.isnan() & b.isnan())
    return float(torch.where(same, 0.0, (a - b).abs().nan_to_num(nan=torch.inf)).max())


def markdown(found: Row) -> str:
    """The comparison for people."""
    lines = [
        f"# Parity of {found['a']} and {found['b']} on {found['device']}",
        "",
        f"{found['calls']} calls of {found['rows']} rows.",
        "",
        "| Operator | max abs delta | p99 | kl0 | clipfrac0 |",
        "|---|---|---|---|---|",
    ]
    for op, row in found["operators"].items():
        worst = row["max_abs_delta"]
        top = max(worst.values(), default=0.0) if isinstance(worst, dict) else worst
        rest = [f"{row[n]:.3g}" if n in row else "" for n in ("p99_abs_delta", "kl0", "clipfrac0")]
        lines.append(f"| `{op}` | {top:.3g} | {' | '.join(rest)} |")
    return "\n".join(lines) + "\n"
