"""What the attacks on sample@1 draw: batches of rows that ask for different things."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from hypothesis import strategies as st

from rlkernel_conformance.call_checks import leaves, same_results
from rlkernel_conformance.compare import plain
from rlkernel_conformance.sampling_batches import KINDS, Batch, random_batch
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions.sampling import Drawn, sample_row
from rlkernel_core.spec.sampling import SampleResult

SIZES: Final = (33, 100, 1, 2, 31, 32)  # the first is what a search begins with
KIND_SETS: Final = {
    "plain": ("normal", "ties", "holes", "equal"),
    "tied": ("ties", "equal"),
    "normal": ("normal",),
    "any": KINDS,
}
# A case is a batch of rows with parameters of their own, so few cases cover much.
SCALE: Final = 0.1


@dataclass(frozen=True)
class Draws:
    """A batch for sample: logits [N, V] and what each row asks for, both from the seed."""

    seed: int
    V: int = 33
    N: int = 8
    dtype: str = "float32"
    kinds: str = "plain"
    edits: bool = False
    filter_order: str = "topk_topp"
    tie: str = "lowest_id"

    def batch(self, subject: Subject, **only: Any) -> Batch:
        """The batch, fitted to the claims; `only` sets fields of every row."""
        made = random_batch(
            self.seed,
            self.V,
            self.N,
            getattr(torch, self.dtype),
            KIND_SETS[self.kinds],
            self.edits,
            self.filter_order,
            self.tie,
        )
        for row in made.rows:
            for name, value in only.items():
                setattr(row, name, value)
        return made.fit(subject.claims)


def draws(subject: Subject, **fixed: Any) -> st.SearchStrategy[Draws]:
    """Batches of every claimed dtype, with and without edits."""
    drawn: dict[str, Any] = {
        "seed": st.integers(0, 255),
        "V": st.sampled_from(SIZES),
        "dtype": st.sampled_from(subject.dtypes),
        "kinds": st.sampled_from(("any", "plain")),
        "edits": st.sampled_from((True, False)),
    }
    return st.builds(Draws, **drawn | {n: st.just(v) for n, v in fixed.items()})


def plain_draws(subject: Subject, **fixed: Any) -> st.SearchStrategy[Draws]:
    """Batches without degenerate rows or edits."""
    return draws(subject, **{"kinds": "plain", "edits": False} | fixed)


def call(subject: Subject, batch: Batch, **more: Any) -> SampleResult:
    """The subject's answer."""
    given = batch.arguments(subject.claims, subject.device) | more
    if "bias" in given and subject.op != "sample":
        given["logit_bias"] = given.pop("bias")
    out: SampleResult = subject(batch.logits.to(subject.device), **given)
    return out


def everything(subject: Subject, V: int) -> dict[str, Any]:
    """Arguments that ask for every claimed result."""
    asked: dict[str, dict[str, Any]] = {
        "kept_ids": {"kept_capacity": V},
        "raw_logprob": {"raw_logprob": True},
        "entropy": {"entropy": True},
    }
    asked |= {"top_n:raw": {"top_n": min(3, V), "rank": True}}
    return {n: v for feature, given in asked.items() if feature in subject.claims for n, v in given.items()}


def definitions(batch: Batch) -> list[Drawn]:
    """The definition's answer for every row."""
    work = torch.float64 if batch.logits.dtype == torch.float64 else torch.float32
    numbers = np.float64 if work == torch.float64 else np.float32
    with np.errstate(all="ignore"):
        return [sample_row(x.to(work).numpy(), row, numbers) for x, row in zip(batch.logits, batch.rows, strict=True)]


def sure(subject: Subject, row: Drawn) -> bool:
    """No rounding that the spec allows changes what is kept."""
    nats, relative = subject.tolerance("min_p", "float32")
    return row.sure(subject.tolerance("top_p", "float32")[0], nats + relative * 30)


def alive(subject: Subject, batch: Batch) -> Iterator[tuple[int, Drawn]]:
    """The rows from which a token can be drawn and whose kept set is beyond rounding."""
    for i, row in enumerate(definitions(batch)):
        if row.log_p is not None and sure(subject, row):
            yield i, row


# Results that do not depend on which token was drawn.
OF_THE_LAW: Final = ("log_kept_mass", "kept_count", "threshold", "threshold_id", "entropy", "kept_ids", "top_ids")


def same_draws(subject: Subject, found: SampleResult, expected: SampleResult, when: str) -> None:
    """Two results are equal bit by bit; where noise is not the contract's, what the tokens have no part in."""
    a, b = (leaves(out) for out in (found, expected))
    if not subject.exact_noise:
        a, b = ({n: x for n, x in out.items() if n in OF_THE_LAW} for out in (a, b))
    same_results(a, b, when)


def described(out: SampleResult, i: int, x: np.ndarray[Any, Any]) -> list[int]:
    """The kept ids that threshold and threshold_id describe, of edited logits x [V]."""
    tau = float(plain(out.threshold, "threshold")[i])
    last = int(plain(out.threshold_id, "threshold_id")[i])
    kept = (x > tau) | ((x == tau) & (np.arange(x.size) <= last))
    found: list[int] = np.flatnonzero(kept).tolist()
    return found


def held(values: Any, dtype: str) -> np.ndarray[Any, Any]:
    """Numbers as results for logits of this dtype hold them: what overflows fp32 is infinite."""
    with np.errstate(over="ignore"):
        return np.asarray(values, np.float64 if dtype == "float64" else np.float32).astype(np.float64)
