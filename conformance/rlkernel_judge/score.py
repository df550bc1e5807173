"""The score: a table of weights, and the measures over several candidates.

    score = compiled                                      it parsed, imported and ran once
          + partial * pass_rate                           share of attacked clauses that hold
          + correct                                       all of them hold, and nothing is faked
          + speed * clip(s - 1, 0, max_gain)              where correct; s is the speedup's lower bound, or its median

A file that does not compile, is refused, hangs or cheats scores 0. Speed counts for correct candidates alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rlkernel_core.errors import UnknownNameError
from rlkernel_judge.verdict import Summary, Verdict

FAST_P: Final = (0.0, 0.5, 0.8, 1.0, 1.5, 2.0)
ZERO_SCORE: Final = frozenset({"rejected", "syntax_error", "cheating", "tampering", "too_fast", "timeout"})


@dataclass(frozen=True)
class Weights:
    """One row of the score table."""

    compiled: float
    partial: float
    correct: float
    speed: float
    max_gain: float  # speedup beyond 1 that still counts
    use_lower_bound: bool  # the lower bound of the speedup counts, so that noise earns nothing


SCORES: Final = {
    "rlkernel": Weights(0.1, 0.1, 0.3, 1.0, 2.0, use_lower_bound=True),
    # TritonForge: 0.1 for compiling, 0.3 for correct, min(max(speedup - 1, 0), 2)
    "tritonforge": Weights(0.1, 0.0, 0.3, 1.0, 2.0, use_lower_bound=False),
    "correctness": Weights(0.0, 0.0, 1.0, 0.0, 0.0, use_lower_bound=True),
}


def weights(name: str) -> Weights:
    """A row of the table.

    Raises:
        UnknownNameError: there is none of this name.
    """
    if name not in SCORES:
        raise UnknownNameError("score", name, SCORES)
    return SCORES[name]


def terms(
    row: Weights,
    *,
    compiled: bool,
    correct: bool,
    pass_rate: float,
    fault: str | None,
    speedup: float | None,
    low: float | None,
) -> dict[str, float]:
    """The summands of the score."""
    if not compiled or fault in ZERO_SCORE:
        return {"compiled": 0.0, "partial": 0.0, "correct": 0.0, "speed": 0.0}
    s = (low if row.use_lower_bound else speedup) if correct else None
    return {
        "compiled": row.compiled,
        "partial": row.partial * pass_rate,
        "correct": row.correct * correct,
        "speed": row.speed * min(max((s or 1.0) - 1.0, 0.0), row.max_gain),
    }


def fast_p_of(*, correct: bool, speedup: float | None) -> dict[str, float]:
    """fast_p of one candidate; fast_0 asks for correctness alone."""
    return {f"{p:g}": float(correct and (p == 0 or (speedup is not None and speedup > p))) for p in FAST_P}


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Probability that one of k candidates drawn without replacement from n is correct: 1 - C(n-c, k) / C(n, k)."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def geometric_mean(values: Sequence[float]) -> float | None:
    """None of nothing."""
    return math.exp(math.fsum(math.log(v) for v in values) / len(values)) if values else None


def summary(verdicts: Sequence[Verdict]) -> Summary:
    """The measures over several candidates of one task."""
    n, good = len(verdicts), [v for v in verdicts if v.correct]
    speedups = [v.speedup for v in good if v.speedup is not None]
    counts = sorted({1, n, *(2**i for i in range(1, n.bit_length()) if 2**i <= n)})
    best = max(verdicts, key=lambda v: v.score)
    return Summary(
        op=verdicts[0].op,
        n=n,
        compiled=sum(v.compiled for v in verdicts),
        correct=len(good),
        pass_at_k={str(k): pass_at_k(n, len(good), k) for k in counts},
        fast_p={p: math.fsum(v.fast_p.get(p, 0.0) for v in verdicts) / n for p in (f"{p:g}" for p in FAST_P)},
        geometric_mean={
            "correct": geometric_mean(speedups),
            "faster": geometric_mean([s for s in speedups if s > 1]),
            "all": geometric_mean([v.speedup if v.correct and v.speedup is not None else 1.0 for v in verdicts]),
        },
        best=best.file if best.score > 0 else None,
        candidates=tuple(verdicts),
    )
