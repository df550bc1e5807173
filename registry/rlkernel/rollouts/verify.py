"""Whether every token of a record was drawn from the logits and the law that it states: each is drawn again.

Three things are asked, of tokens, of their number, and of what else the record states:

1. No token is `other` (`rlkernel.rollouts.redraw`), and every log-probability and kept mass is within its bounds.
2. Tokens that are `explained` are not more than numerics give. Errors of standard deviation `TYPICAL` X, independent
   from logit to logit, change token t with a chance of at most p_t, which follows from the scores. With m the sum of
   p_t, K or more changes have a chance of at most exp(K - m) (m / K)^K (Chernoff); it must not be below `ALPHA`.
3. Every sequence ends where its request says; and where it is known what was asked for, requests are the same.

Legend: T tokens of a sequence · V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernel.agree.drift import Drift
from rlkernel.rollouts.record import Record, Rollout
from rlkernel.rollouts.redraw import ALPHA, Verdict, judge
from rlkernel_core import checks
from rlkernel_core.errors import ArgumentError
from rlkernel_core.visible import visible

# Ids [T] and the first row that is wanted -> logits of the rows from it on, as blocks [n, V] in order.
Logits = Callable[[Tensor, int], Iterable[Tensor]]


class Complaint(NamedTuple):
    """What is wrong with a sequence, or at one of its tokens."""

    sequence: int  # its number in the record
    token: int | None  # number of the drawn token; None: the sequence as a whole
    kind: str  # "token", "logprob", "kept mass", "end" or "request"
    text: str  # what differs

    def __str__(self) -> str:
        return f"sequence {self.sequence}{'' if self.token is None else f' token {self.token}'}: {self.text}"


@dataclass(frozen=True)
class Verification:
    """What came of it."""

    tolerance: float  # X, logits
    tokens: int  # checked
    unchecked: int  # drawn with weights that were not asked about, or beside an id that the model has not
    same: int  # drawn again
    explained: int  # of another token, from logits within the tolerance
    wrong: tuple[Complaint, ...]  # everything that the tolerance does not explain, in order
    open: int  # tokens at which the tolerance admits another token than is drawn here
    counted: int  # explained tokens that a score decided, not the edge of a filter
    expected: float  # of those, at most, by errors of typical size
    chance: float  # of as many or more, at most
    drift: Drift | None  # log-probabilities here against those stated, nats; None where none is stated
    needed: float  # logits: the smallest tolerance under which no margin and no log-probability is too large

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong, and something was checked."""
        return not self.wrong and self.chance >= ALPHA and self.tokens > 0

    def complaints(self) -> list[str]:
        """Every reason why it is not ok, one line each."""
        said = [str(c) for c in self.wrong]
        if self.chance < ALPHA:
            said.append(
                f"{self.counted} other tokens, each within the tolerance, where typical errors give "
                f"{self.expected:.3g}: the chance is below {self.chance:.1g}"
            )
        if not self.tokens:
            said.append("no token was checked")
        return said

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        names = ("tolerance", "tokens", "unchecked", "same", "explained", "open", "counted", "expected", "chance")
        numbers = {name: getattr(self, name) for name in names}
        drift = self.drift.as_dict() if self.drift else None
        needed = self.needed if math.isfinite(self.needed) else None
        return {"ok": self.ok, **numbers, "needed": needed, "drift": drift, "wrong": [c._asdict() for c in self.wrong]}


def verify(
    record: Record,
    logits: Logits,
    *,
    tolerance: float = 0.0,
    weights: str | None = None,
    asked: Record | None = None,
    progress: Callable[[int], None] = lambda n: None,  # noqa: ARG005
) -> Verification:
    """Draw every token of a record again.

    Args:
        record: of the rollout.
        logits: of the model: ids [T] int64 and a row -> logits of that row and all behind it, as an iterable of blocks
            [n, V]; row t is of the token behind the ids 0 to t. Called once a sequence. Where it has an attribute
            `vocab`, ids from there on are no ids of the model, and a sequence that has one is not handed to it.
        tolerance: X, logits: most that a logit of the rollout may differ from the one here, after a shift of the row. 0
            where both have the same bits.
        weights: version of the weights that `logits` uses; tokens of others are not checked. None where the record has
            one.
        asked: requests that the rollout was to fill; prompts, seeds, first steps and params must be the same.
        progress: called after each sequence with the number of its tokens.

    Raises:
        ArgumentError: a negative tolerance, weights that drew nothing, several weights and none named, or logits of
            another shape.
    """
    checks.number("tolerance", tolerance, at_least=0.0)
    versions_asked(record, weights)
    wrong = list(_requests(record, asked)) if asked is not None else []
    found: list[tuple[Verdict, float | None]] = []
    for i, rollout in enumerate(record.rollouts):
        wrong += [Complaint(i, None, "end", text) for text in _ends(rollout)]
        if foreign := [n for n in (*rollout.prompt, *rollout.ids) if n >= getattr(logits, "vocab", n + 1)]:
            wrong.append(Complaint(i, None, "token", f"has id {foreign[0]}, which the model has not"))
            progress(len(rollout.ids))
            continue
        for t, verdict, said in _judged(rollout, logits, record.law, tolerance, weights):
            found.append((verdict, said))
            wrong += [Complaint(i, t, *what) for what in _faults(rollout, t, verdict)]
        progress(len(rollout.ids))
    return _summary(tolerance, record.tokens - len(found), found, wrong)


def versions_asked(record: Record, weights: str | None) -> None:
    """Whether one version of the weights is meant.

    Raises:
        ArgumentError: several drew and none is named, or the one that is named drew nothing.
    """
    known = record.versions
    one = f"Pass one of {', '.join(visible(name, 80) for name in known[:8])}."
    if weights is None and len(known) > 1:
        raise ArgumentError("weights", f"{len(known)} versions", "must be named", one)
    if weights is not None and weights not in known:
        raise ArgumentError("weights", repr(weights), "drew no token", one if known else "The record has none.")


def _judged(
    rollout: Rollout, logits: Logits, law: str, tolerance: float, weights: str | None
) -> Iterator[tuple[int, Verdict, float | None]]:
    """Number, verdict and stated log-probability of each token that is checked."""
    which = [version for version, n in rollout.weights for _ in range(n)]
    wanted = [t for t in range(len(rollout.ids)) if weights in {None, which[t]}]
    if not wanted:
        return
    ids = torch.tensor((*rollout.prompt, *rollout.ids[: wanted[-1]]), dtype=torch.int64)
    rows = _rows(logits, ids, len(rollout.prompt) - 1 + wanted[0])
    for t in range(wanted[0], wanted[-1] + 1):
        row = next(rows, None)
        if row is None:
            fix = "Yield every row from the one that is asked for."
            raise ArgumentError("logits", f"{t - wanted[0]} rows", f"must be {len(ids)} from that row on", fix)
        if weights not in {None, which[t]}:
            continue
        said = None if rollout.logprob is None else rollout.logprob[t]
        mass = None if rollout.log_kept_mass is None else rollout.log_kept_mass[t]
        step = (rollout.step + t) % 2**64
        more: dict[str, Any] = {"tolerance": tolerance, "law": law, "logprob": said, "mass": mass}
        yield t, judge(row, rollout.ids[t], rollout.params, rollout.seed, step, **more), said


@torch.no_grad()
def _rows(logits: Logits, ids: Tensor, first: int) -> Iterator[Any]:
    """Rows [V] in fp32 of numpy, one by one."""
    for block in logits(ids, first):
        checks.tensor("logits", block, ndim=2, kind="floating")
        yield from block.detach().float().cpu().numpy()


def _faults(rollout: Rollout, t: int, verdict: Verdict) -> Iterator[tuple[str, str]]:
    """What is wrong at a token: kind and text."""
    if verdict.kind == "other":
        far = f"{verdict.margin:.3g} logits behind" if math.isfinite(verdict.margin) else "which the law cannot draw"
        yield "token", f"{verdict.token} is drawn here, not {rollout.ids[t]}, {far}"
    if not verdict.logprob and rollout.logprob is not None:
        yield "logprob", f"the log-probability is {verdict.expected:.6g} here, not {rollout.logprob[t]:.6g}"
    if not verdict.mass and rollout.log_kept_mass is not None:
        yield "kept mass", f"log_kept_mass is stated as {rollout.log_kept_mass[t]:.6g}, beyond its bounds here"


def _ends(rollout: Rollout) -> Iterator[str]:
    """What is wrong with the place where a sequence ends."""
    ids, params = rollout.ids, rollout.params
    stops = [t for t, i in enumerate(ids) if i in params.stop_ids]
    if stops and stops[0] < len(ids) - 1:
        yield f"goes on behind the stop id at token {stops[0]}"
    elif params.max_new_tokens is not None and len(ids) > params.max_new_tokens:
        yield f"has {len(ids)} tokens, and {params.max_new_tokens} were asked for"
    elif not stops and (params.stop_ids or params.max_new_tokens) and len(ids) != params.max_new_tokens:
        asked = f", and {params.max_new_tokens} were asked for" if params.max_new_tokens else ""
        yield f"ends after {len(ids)} tokens without a stop id{asked}"


def _requests(record: Record, asked: Record) -> Iterator[Complaint]:
    """Where a record is not of the requests that were asked for."""
    have, want = record.rollouts, asked.rollouts
    if len(have) != len(want):
        text = f"{len(have)} sequences, and {len(want)} were asked for"
        yield Complaint(min(len(have), len(want)), None, "request", text)
    for i, (mine, theirs) in enumerate(zip(have, want, strict=False)):
        names = [n for n in ("prompt", "seed", "step", "params") if getattr(mine, n) != getattr(theirs, n)]
        if names:
            yield Complaint(i, None, "request", f"{', '.join(names)}: not as asked for")


def _summary(
    tolerance: float, unchecked: int, found: list[tuple[Verdict, float | None]], wrong: list[Complaint]
) -> Verification:
    verdicts = [v for v, _ in found]
    kinds = [v.kind for v in verdicts]
    counted = sum(v.kind == "explained" for v in verdicts if v.chance is not None)
    expected = math.fsum(v.chance for v in verdicts if v.chance is not None)
    stated = [(v.expected, said) for v, said in found if said is not None and math.isfinite(v.expected + said)]
    return Verification(
        tolerance,
        len(found),
        unchecked,
        kinds.count("same"),
        kinds.count("explained"),
        tuple(sorted(wrong, key=lambda c: (c.sequence, -1 if c.token is None else c.token))),
        sum(v.open for v in verdicts),
        counted,
        expected,
        chernoff(counted, expected),
        Drift.between(*torch.tensor(stated, dtype=torch.float32).unbind(1)) if stated else None,
        max((v.needed for v in verdicts), default=0.0),
    )


def chernoff(count: int, expected: float) -> float:
    """Chance, at most, of `count` or more events that are independent and so many in the mean."""
    if count <= expected:
        return 1.0
    return math.exp(count - expected - count * math.log(count / expected)) if expected > 0 else 0.0
