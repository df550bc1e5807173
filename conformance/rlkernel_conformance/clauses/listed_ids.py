"""Attacks on several ids per row: of logprob@1 from logits, and of linear_logprob@1 from a head.

Legend: N rows · V vocabulary · K listed ids of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from rlkernel.discover import guarded
from rlkernel_conformance import draw
from rlkernel_conformance.attack import attack
from rlkernel_conformance.clauses.linear_logprob_heads import (
    Head,
    check_gradients,
    definition,
    gradients,
    heads,
    lists,
    of_shard,
    operand_gradients,
    sizes,
    small,
    with_leaves,
)
from rlkernel_conformance.compare import close, plain, require, same_bits
from rlkernel_conformance.ranks import on_ranks
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions import logprob as oracle
from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec.logprob import LogprobResult

LENGTHS: Final = (2, 1, 3, 5, 64, 65)
Given = dict[str, Any]


@dataclass(frozen=True)
class Lists:
    """Logits [N, V] and K ids of each row, the last of them the first once more."""

    N: int
    V: int
    K: int
    seed: int
    logits: str = "normal"
    dtype: str = "float32"
    temperature: float = 1.0

    def given(self, subject: Subject) -> Given:
        """Arguments of the operator."""
        x = draw.logits(self.logits, self.N, self.V, self.seed, self.dtype, subject.device)
        ids = lists(self.N, self.V, self.K, self.seed, subject.device)
        possible = x.float().isfinite()
        ids = torch.where(possible.gather(1, ids), ids, possible.int().argmax(1, keepdim=True))
        return {"logits": x, "ids": ids, "temperature": self.temperature}


def cases(subject: Subject) -> st.SearchStrategy[Lists]:
    """Rows of every claimed dtype and every distribution."""
    return st.builds(
        Lists,
        N=st.integers(1, 4),
        V=st.sampled_from((33, 1, 2, 127, 1000, 4099)),
        K=st.sampled_from(LENGTHS),
        seed=st.integers(0, 2**20),
        logits=st.sampled_from(sorted(draw.LOGITS)),
        dtype=st.sampled_from(subject.dtypes),
        temperature=st.sampled_from((1.0, 0.5, 1.7)),
    )


def plain_cases(subject: Subject) -> st.SearchStrategy[Lists]:
    """Rows without extremes, in the first claimed dtype."""
    return cases(subject).map(lambda c: replace(c, logits="normal", dtype=subject.dtypes[0], V=min(c.V, 127)))


def of_head(subject: Subject, case: Head) -> Given:
    """Arguments of linear_logprob with as many ids of each row as the case's seed says."""
    ids = lists(case.N, case.V, LENGTHS[case.seed % len(LENGTHS)], case.seed, subject.device)
    return case.given(subject, ids=ids)


def all_alike(subject: Subject, given: Given, out: LogprobResult) -> None:
    """Ids in other layouts and dtypes, a repeated id, and one id in a list give the bits of the plain call."""
    ids = given["ids"]
    for other, when in ((torch.stack((ids, ids + 1), -1)[..., 0], "of strided ids"), (ids.int(), "of ids in 32 bits")):
        same_bits("logprob", subject(**{**given, "ids": other}).logprob, out.logprob, when)
    same_bits("logprob", out.logprob[:, -1], out.logprob[:, 0], "of an id that is listed twice")
    one = subject(**{**given, "ids": ids[:, :1]})
    same_bits("logprob", one.logprob[:, 0], subject(**{**given, "ids": ids[:, 0]}).logprob, "of one id in a list")


def stay_precise(out: LogprobResult, want: Any) -> None:
    """Relative precision of log p where p is near 1."""
    have = plain(out.logprob, "logprob")
    require(bool((have <= 0).all()), f"log p is positive: {have.max()!r}")
    sure = want.logprob > np.log(0.9)
    error = np.abs(have - want.logprob)[sure] / np.maximum(np.abs(want.logprob[sure]), 1e-30)
    expected = want.logprob[sure].tolist()
    require(bool((error <= 1e-4).all()), f"log p of confident ids is {have[sure].tolist()}, expected {expected}")


@attack("LP-28", cases)
def each_listed_id_matches_float64(subject: Subject, case: Lists) -> None:
    """Values of all K, and of one that leads by 12 to 40 nats."""
    given = case.given(subject)
    out, x, ids = subject(**given), given["logits"], given["ids"]
    want = oracle.logprob(plain(x, "logits"), plain(ids, "ids"), temperature=case.temperature)
    require(out.logprob.shape == ids.shape, f"ids {list(ids.shape)} give {list(out.logprob.shape)}")
    close(subject, "logprob", out.logprob, want.logprob, case.dtype, scale=np.maximum(1, np.abs(want.lse))[:, None])
    if "lse" in subject.claims:
        close(subject, "lse", out.lse, want.lse, case.dtype, scale=np.maximum(1, np.abs(want.lse)))
    all_alike(subject, given, out)
    x = draw.normal((case.N, case.V), case.seed, subject.device, "float32")
    lead = x.amax(1, keepdim=True) + 12.0 + 28.0 * (case.seed % 11) / 10
    x = x.scatter(1, ids[:, case.K // 2, None], lead)
    stay_precise(subject(x, ids), oracle.logprob(plain(x, "logits"), plain(ids, "ids")))


@attack("LP-29", lambda s: cases(s).map(lambda c: replace(c, V=min(c.V, 127))))
def gradients_of_listed_ids_add_up(subject: Subject, case: Lists) -> None:
    """Gradients of all K, and of claimed lse and entropy, at once, each with its own upstream gradient."""
    given = case.given(subject)
    leaf = given["logits"].clone().requires_grad_()
    more = {"entropy": True} if "entropy" in subject.claims else {}
    out = subject(**{**given, "logits": leaf}, **more)
    g, up = upstream(subject, out, case.seed)
    (grad,) = torch.autograd.grad([getattr(out, n) for n in up], leaf, list(up.values()))
    x, ids = plain(leaf, "logits"), plain(given["ids"], "ids")
    want = oracle.logprob(x, ids, temperature=case.temperature, g=g)
    most = sum(np.abs(v).reshape(case.N, -1).sum(1) for v in g.values())[:, None] / case.temperature
    close(
        subject, "grad_logits", grad, want.grad, case.dtype, scale=most * np.maximum(4, np.abs(want.lse))[:, None]
    )  # fmt: skip


def upstream(subject: Subject, out: LogprobResult, seed: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Gradients of all results that there are: as the definition takes them, and as autograd does."""
    names = ("logprob", *(n for n in ("lse", "entropy") if n in subject.claims))
    up = {n: draw.normal(tuple(getattr(out, n).shape), seed + 20 + i, subject.device) for i, n in enumerate(names)}
    up = {n: x.to(getattr(out, n).dtype) for n, x in up.items()}
    return {n: plain(x, n) for n, x in up.items()}, up


def with_holes(ids: Tensor, V: int) -> Tensor:
    """Ids of which some are padding, and some out of range."""
    K = ids.shape[1]
    place = torch.arange(ids.numel(), device=ids.device).view(ids.shape)
    wrong = torch.tensor([-1, V, -1, -2, 2**40], device=ids.device)[place % 5]
    return torch.where((place % 2 == 1) | (K == 1), wrong, ids)


def absent_ids_are_left_out(
    subject: Subject, given: Given, V: int, leaf: str, grads_of: Callable[[Given, Tensor], Any]
) -> None:
    """Padding, ids out of range and masked rows beside others: values, flags, what is refused, and gradients.

    Args:
        subject: under test.
        given: arguments with K ids of each row.
        V: size of the vocabulary.
        leaf: argument whose gradient belongs to rows.
        grads_of: (arguments, upstream gradient of logprob) -> (log-probabilities, gradient of the leaf).
    """
    whole = given["ids"]
    ids = with_holes(whole, V)
    mask = torch.arange(len(ids), device=ids.device) % 3 != 2
    masked = {"mask": mask} if "mask" in subject.claims else {}
    counted = mask[:, None] if masked else torch.ones_like(mask)[:, None]
    there, invalid = (ids >= 0) & (ids < V) & counted, (ids != -1) & ((ids < 0) | (ids >= V)) & counted
    out, every = subject(**{**given, "ids": ids}, **masked), subject(**given)
    found = out.invalid if out.invalid is not None else torch.zeros_like(invalid)
    require(torch.equal(found, invalid), f"ids {ids.tolist()} are flagged as {found.tolist()}")
    if "validate" in subject.claims:
        for listed, bad in ((ids, bool(invalid.any())), (torch.where(invalid, -1, ids), False)):
            _, error = guarded(partial(subject, **{**given, "ids": listed}, **masked, validate=True))
            refused = isinstance(error, ArgumentError)
            require(
                refused == bad, f"validate=True {'refuses' if refused else 'takes'} ids {listed.tolist()}: {error!r}"
            )
    want = np.where(plain(there, "ids"), plain(every.logprob, "logprob"), 0.0)
    want = np.where(plain(invalid, "ids"), np.nan, want)
    close(subject, "logprob", out.logprob, want, plain_dtype(given[leaf]), scale=4.0)
    if "grad" not in subject.claims:
        return
    up = torch.linspace(0.5, 1.5, ids.numel(), device=ids.device).view(ids.shape)
    _, grad = grads_of({**given, "ids": ids, **masked}, torch.where(there, up, torch.nan))
    _, expected = grads_of(given, torch.where(there, up, 0.0))
    require(bool(grad.isfinite().all()), "the upstream gradient of an absent or invalid id is taken")
    gone = ~there.any(1)
    require(bool((grad.view(len(ids), -1)[gone] == 0).all()), "a row without an id has a gradient")
    size = float(expected.double().norm()) + 1.0
    error = float((grad.double() - expected.double()).norm()) / size
    require(error < 5e-3, f"beside absent ids the gradient of {leaf} is off by {error:.2g}")


def plain_dtype(x: Tensor) -> str:
    """Name of a dtype, as tolerances have it."""
    return str(x.dtype).removeprefix("torch.")


@attack("LP-30", plain_cases)
def absent_ids_of_logits_are_left_out(subject: Subject, case: Lists) -> None:
    """Every second id padding or out of range, and every third row masked."""

    def grads_of(call: Given, up: Tensor) -> Any:
        leaf = call["logits"].clone().requires_grad_()
        out = subject(**{**call, "logits": leaf}).logprob
        return out, torch.autograd.grad(out, leaf, up.to(out.dtype))[0]

    absent_ids_are_left_out(subject, replace(case, N=case.N + 2).given(subject), case.V, "logits", grads_of)


@attack("LL-33", heads)
def each_listed_id_of_a_head_matches_float64(subject: Subject, case: Head) -> None:
    """Values of all K; of one that leads, where the head is the identity and logits are exact; of two shards."""
    given = of_head(subject, case)
    out, want = subject(**given), definition(given)
    size = np.maximum(1, np.abs(want.lse) / 10)
    close(subject, "logprob", out.logprob, want.logprob, case.dtype, scale=size[:, None])
    if "lse" in subject.claims:
        close(subject, "lse", out.lse, want.lse, case.dtype, scale=size)
    all_alike(subject, given, out)
    V, ids = min(case.V, 127), given["ids"] % min(case.V, 127)
    x = draw.normal((case.N, V), case.seed, subject.device, "float32")
    x = x.scatter(1, ids[:, ids.shape[1] // 2, None], x.amax(1, keepdim=True) + 12.0 + 28.0 * (case.seed % 11) / 10)
    x = x if "float32" in subject.dtypes else x.to(getattr(torch, subject.dtypes[0]))
    sure: Mapping[str, Any] = {"hidden": x, "weight": torch.eye(V, device=x.device, dtype=x.dtype), "ids": ids}
    stay_precise(subject(**sure), definition({**sure, "temperature": 1.0, "logit_scale": 1.0}))
    if "group" in subject.claims and case.V > 1:
        cuts = (0, (case.V + 2) // 3, case.V)

        def on_rank(rank: int, group: Any) -> Any:
            mine = of_shard(given, slice(cuts[rank], cuts[rank + 1]))
            return subject(**mine, group=group)

        for each in on_ranks(subject, 2, on_rank):
            close(subject, "logprob", each.logprob, want.logprob, case.dtype, scale=2 * size[:, None])


@attack("LL-34", lambda s: heads(s).map(small), scale=0.5)
def gradients_of_listed_ids_reach_the_operands(subject: Subject, case: Head) -> None:
    """DX, dW and dbias of all results at once, in every mode that is claimed."""
    given = of_head(subject, case)
    more: Given = {"entropy": True} if "entropy" in subject.claims else {}
    for mode in ("auto", *(m for m in ("save", "recompute") if f"backward:{m}" in subject.claims)):
        call, leaves = with_leaves(given)
        out = subject(**call, **more, backward=mode)
        g, up = upstream(subject, out, case.seed)
        found = gradients({n: getattr(out, n) for n in up}, up, leaves)
        dz = definition(given, g).grad
        weight = plain(given["weight"], "weight")
        most = float(np.sqrt(sum(np.square(x).sum() for x in g.values())))
        least = 0.05 * most * float(np.linalg.norm(weight)) / len(weight) ** 0.5 / given["temperature"]
        check_gradients(subject, found, operand_gradients(given, dz), case.dtype, sizes(given, dz, least))


@attack("LL-35", lambda s: heads(s, plainly=True).map(small), scale=0.5)
def absent_ids_of_a_head_are_left_out(subject: Subject, case: Head) -> None:
    """Every second id padding or out of range, and every third row masked."""

    def grads_of(call: Given, up: Tensor) -> Any:
        call, leaves = with_leaves(call, ("weight", "bias"))
        out = subject(**call).logprob
        return out, torch.autograd.grad(out, leaves["hidden"], up.to(out.dtype))[0]

    absent_ids_are_left_out(subject, of_head(subject, replace(case, N=case.N + 2)), case.V, "hidden", grads_of)
