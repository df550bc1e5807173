"""Attacks on lists of ids of any length: of logprob@1 from logits, and of linear_logprob@1 from a head.

Legend: N rows · V vocabulary · K the longest list · M listed ids of all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkernel.discover import guarded
from rlkernel_conformance import draw
from rlkernel_conformance.attack import attack
from rlkernel_conformance.clauses.linear_logprob_heads import (
    Head,
    check_gradients,
    gradients,
    heads,
    logits,
    of_shard,
    operand_gradients,
    sizes,
    small,
    with_leaves,
)
from rlkernel_conformance.clauses.listed_ids import (
    Given,
    Lists,
    cases,
    of_head,
    plain_dtype,
    stay_precise,
    upstream,
)
from rlkernel_conformance.compare import close, plain, require, same_bits
from rlkernel_conformance.ranks import on_ranks
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions import logprob as oracle
from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec.logprob import LogprobResult
from rlkernel_core.spec.sampling import TokenLists

TAIL = 2  # entries beyond the last offset


@dataclass(frozen=True)
class Cut:
    """Ids [N, K] cut to lists: the first `lengths[i]` of row i."""

    lists: TokenLists
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, ids: Tensor, V: int, seed: int) -> Cut:
        """Lengths from none to all of K; behind the last list stand an id out of range and one in it."""
        N, K = ids.shape
        lengths = tuple((seed + 3 * i) % (K + 1) if i % 3 else (K, 0)[i // 3 % 2] for i in range(N))
        each = [row[:n] for row, n in zip(ids, lengths, strict=True)]
        offsets = torch.tensor((0, *np.cumsum(lengths)), device=ids.device)
        return cls(TokenLists(torch.cat((*each, ids.new_tensor((V + 3, 0)))), offsets), lengths)

    @property
    def size(self) -> int:
        """Entries of all lists."""
        return sum(self.lengths)

    @property
    def rows(self) -> Any:
        """[M] row of each entry, without those beyond the last list."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    @property
    def each(self) -> list[Any]:
        """Ids row by row."""
        return np.split(plain(self.lists.ids, "ids")[: self.size], np.cumsum(self.lengths)[:-1])

    def with_ids(self, ids: Tensor) -> Cut:
        """The same lists of other ids."""
        return Cut(replace(self.lists, ids=ids), self.lengths)


def cut_of(given: Given, V: int, seed: int) -> tuple[Given, Cut]:
    """The call with its ids [N, K] cut to lists."""
    cut = Cut.of(given["ids"], V, seed)
    return {**given, "ids": cut.lists}, cut


def all_alike(subject: Subject, given: Given, cut: Cut, out: LogprobResult) -> None:
    """Shape, what lies beyond the lists, and the bits of other layouts, dtypes and of a list that stands alone."""
    size = cut.size + TAIL
    require(out.logprob.shape == (size,), f"{size} ids give {list(out.logprob.shape)}")
    beyond = out.logprob[cut.size :].tolist(), [] if out.invalid is None else out.invalid[cut.size :].tolist()
    require(not any(beyond[0] + beyond[1]), f"beyond the last offset stand {beyond}")
    ids, offsets = cut.lists.ids, cut.lists.offsets
    strided = TokenLists(*(torch.stack((x, x + 1), -1)[..., 0] for x in (ids, offsets)))
    for other, when in ((strided, "of strided lists"), (TokenLists(ids.int(), offsets.int()), "of lists in 32 bits")):
        same_bits("logprob", subject(**{**given, "ids": other}).logprob, out.logprob, when)
    if "many_ids" in subject.claims:
        row = [torch.cat((x, x.new_full((max(cut.lengths) + 1 - len(x),), -1))) for x in _pieces(ids, cut)]
        padded = subject(**{**given, "ids": torch.stack(row)}).logprob
        together = torch.cat([x[:n] for x, n in zip(padded, cut.lengths, strict=True)])
        same_bits("logprob", together, out.logprob[: cut.size], "of the same lists padded to one length")


def _pieces(ids: Tensor, cut: Cut) -> list[Tensor]:
    return list(ids[: cut.size].split(list(cut.lengths)))


@attack("LP-37", cases)
def each_entry_of_a_list_matches_float64(subject: Subject, case: Lists) -> None:
    """Values of lists from none to K long, and of one entry of each that leads by 12 to 40 nats."""
    given, cut = cut_of(case.given(subject), case.V, case.seed)
    out, x = subject(**given), given["logits"]
    want = oracle.logprob(plain(x, "logits"), cut.each, temperature=case.temperature)
    size = np.maximum(1, np.abs(want.lse))
    close(subject, "logprob", out.logprob[: cut.size], want.logprob, case.dtype, scale=size[cut.rows])
    if "lse" in subject.claims:
        close(subject, "lse", out.lse, want.lse, case.dtype, scale=size)
    all_alike(subject, given, cut, out)
    x = draw.normal((case.N, case.V), case.seed, subject.device, "float32")
    first = torch.tensor([int(ids[-1]) if len(ids) else 0 for ids in cut.each], device=x.device)
    x = x.scatter(1, first[:, None], x.amax(1, keepdim=True) + 12.0 + 28.0 * (case.seed % 11) / 10)
    precise = subject(x, cut.lists).logprob[: cut.size]
    stay_precise(LogprobResult(precise), oracle.logprob(plain(x, "logits"), cut.each))


@attack("LP-38", lambda s: cases(s).map(lambda c: replace(c, V=min(c.V, 127))))
def gradients_of_a_list_add_up(subject: Subject, case: Lists) -> None:
    """Gradients of all entries, and of claimed lse and entropy, at once, each with its own upstream gradient."""
    given, cut = cut_of(case.given(subject), case.V, case.seed)
    leaf = given["logits"].clone().requires_grad_()
    more = {"entropy": True} if "entropy" in subject.claims else {}
    out = subject(**{**given, "logits": leaf}, **more)
    g, up = _upstream(subject, out, cut, case.seed)
    (grad,) = torch.autograd.grad([getattr(out, n) for n in up], leaf, list(up.values()))
    want = oracle.logprob(plain(leaf, "logits"), cut.each, temperature=case.temperature, g=g)
    most = sum(np.abs(v) for n, v in g.items() if n != "logprob") + np.bincount(
        cut.rows, np.abs(g["logprob"]), minlength=case.N
    )
    scale = (most / case.temperature * np.maximum(4, np.abs(want.lse)))[:, None]
    close(subject, "grad_logits", grad, want.grad, case.dtype, scale=scale)
    _absent_entries_are_left_out(subject, plainly(subject, case), "logits", case.V, case.seed, _of_logits(subject))


def _upstream(subject: Subject, out: LogprobResult, cut: Cut, seed: int) -> tuple[Given, dict[str, Tensor]]:
    """Gradients of all results, NaN beyond the lists: as the definition takes them, and as autograd does."""
    g, up = upstream(subject, out, seed)
    up["logprob"][cut.size :] = torch.nan
    return {**g, "logprob": g["logprob"][: cut.size]}, up


def plainly(subject: Subject, case: Lists) -> Given:
    """The call of the case's sizes, without extremes and with two rows more."""
    return replace(case, N=case.N + 2, logits="normal", dtype=subject.dtypes[0]).given(subject)


def _of_logits(subject: Subject) -> Callable[[Given, Tensor], Tensor]:
    def grad_of(call: Given, up: Tensor) -> Tensor:
        leaf = call["logits"].clone().requires_grad_()
        out = subject(**{**call, "logits": leaf}).logprob
        return torch.autograd.grad(out, leaf, up.to(out.dtype))[0]

    return grad_of


def _absent_entries_are_left_out(
    subject: Subject, given: Given, leaf: str, V: int, seed: int, grad_of: Callable[[Given, Tensor], Tensor]
) -> None:
    """Padding, ids out of range, masked rows and empty lists: values, flags, what is refused, and gradients."""
    given, cut = cut_of(given, V, seed)
    whole, rows = cut.lists.ids, torch.from_numpy(cut.rows).to(given[leaf].device)
    place = torch.arange(len(whole), device=whole.device)
    wrong = torch.tensor([-1, V, -1, -2, 2**40], device=whole.device)[place % 5]
    ids = torch.where(place % 2 == 1, wrong, whole)
    mask = torch.arange(len(cut.lengths), device=ids.device) % 3 != 2
    masked = {"mask": mask} if "mask" in subject.claims else {}
    within = torch.nn.functional.pad(mask[rows] if masked else torch.ones_like(rows, dtype=torch.bool), (0, TAIL))
    outside = (ids < 0) | (ids >= V)
    there, invalid = ~outside & within, outside & (ids != -1) & within
    call = {**given, "ids": cut.with_ids(ids).lists, **masked}
    out, every = subject(**call), subject(**given)
    found = out.invalid if out.invalid is not None else torch.zeros_like(invalid)
    require(torch.equal(found, invalid), f"lists {ids.tolist()} are flagged as {found.tolist()}")
    want = np.where(plain(there, "ids"), plain(every.logprob, "logprob"), 0.0)
    close(
        subject,
        "logprob",
        out.logprob,
        np.where(plain(invalid, "ids"), np.nan, want),
        plain_dtype(given[leaf]),
        scale=4.0,
    )
    if "validate" in subject.claims:
        _validated(subject, call, cut, torch.where(invalid, -1, ids), bad=bool(invalid.any()))
    if "grad" not in subject.claims:
        return
    up = torch.linspace(0.5, 1.5, ids.numel(), device=ids.device)
    grad, expected = grad_of(call, torch.where(there, up, torch.nan)), grad_of(given, torch.where(there, up, 0.0))
    require(bool(grad.isfinite().all()), "the upstream gradient of an absent or invalid entry is taken")
    gone = torch.ones_like(mask).index_fill(0, rows[there[: cut.size]], False)
    require(bool((grad.view(len(mask), -1)[gone] == 0).all()), "a row without an id has a gradient")
    error = float((grad.double() - expected.double()).norm()) / (float(expected.double().norm()) + 1.0)
    require(error < 5e-3, f"beside absent entries the gradient of {leaf} is off by {error:.2g}")


def _validated(subject: Subject, call: Given, cut: Cut, right: Tensor, *, bad: bool) -> None:
    """validate=True refuses ids out of range and offsets that descend or pass the end, and nothing else."""
    offsets = cut.lists.offsets
    past = torch.cat((offsets[:-1], offsets[-1:] + TAIL + 1))
    down = torch.cat((offsets[:1] + 1, offsets[1:]))
    for lists, refused, what in (
        (call["ids"], bad, "ids"),
        (TokenLists(right, offsets), False, "ids"),
        (TokenLists(right, past), True, "offsets"),
        (TokenLists(right, down), True, "offsets"),
    ):
        _, error = guarded(partial(subject, **{**call, "ids": lists}, validate=True))
        require(
            isinstance(error, ArgumentError) == refused,
            f"validate=True {'takes' if refused else 'refuses'} {what} {getattr(lists, what).tolist()}: {error!r}",
        )


def of_lists(given: Given, cut: Cut, g: Any = None) -> oracle.Row:
    """What the definition gives for a head with lists."""
    softcap = given.get("softcap")
    return oracle.logprob(logits(given), cut.each, temperature=given["temperature"], softcap=softcap, g=g)


@attack("LL-42", heads)
def each_entry_of_a_list_of_a_head_matches_float64(subject: Subject, case: Head) -> None:
    """Values of lists from none to K long, and of two shards."""
    given, cut = cut_of(of_head(subject, case), case.V, case.seed)
    out, want = subject(**given), of_lists(given, cut)
    size = np.maximum(1, np.abs(want.lse) / 10)
    close(subject, "logprob", out.logprob[: cut.size], want.logprob, case.dtype, scale=size[cut.rows])
    if "lse" in subject.claims:
        close(subject, "lse", out.lse, want.lse, case.dtype, scale=size)
    all_alike(subject, given, cut, out)
    if "group" in subject.claims and case.V > 1:
        cuts = (0, (case.V + 2) // 3, case.V)

        def on_rank(rank: int, group: Any) -> Any:
            return subject(**of_shard(given, slice(cuts[rank], cuts[rank + 1])), group=group)

        for each in on_ranks(subject, 2, on_rank):
            have = each.logprob[: cut.size]
            close(subject, "logprob", have, want.logprob, case.dtype, scale=2 * size[cut.rows])


@attack("LL-43", lambda s: heads(s).map(small), scale=0.5)
def gradients_of_a_list_reach_the_operands(subject: Subject, case: Head) -> None:
    """DX, dW and dbias of all results at once, in every mode that is claimed; and beside absent entries."""
    given, cut = cut_of(of_head(subject, case), case.V, case.seed)
    more: Given = {"entropy": True} if "entropy" in subject.claims else {}
    for mode in ("auto", *(m for m in ("save", "recompute") if f"backward:{m}" in subject.claims)):
        call, leaves = with_leaves(given)
        out = subject(**call, **more, backward=mode)
        g, up = _upstream(subject, out, cut, case.seed)
        found = gradients({n: getattr(out, n) for n in up}, up, leaves)
        dz = of_lists(given, cut, g).grad
        weight = plain(given["weight"], "weight")
        most = float(np.sqrt(sum(np.square(x).sum() for x in g.values())))
        least = 0.05 * most * float(np.linalg.norm(weight)) / len(weight) ** 0.5 / given["temperature"]
        check_gradients(subject, found, operand_gradients(given, dz), case.dtype, sizes(given, dz, least))

    def grad_of(call: Given, up: Tensor) -> Tensor:
        call, leaves = with_leaves(call, ("weight", "bias", "lora.A", "lora.B"))
        out = subject(**call).logprob
        return torch.autograd.grad(out, leaves["hidden"], up.to(out.dtype))[0]

    simple = replace(case, N=case.N + 2, dtype=subject.dtypes[0], softcap=0.0, rank=0)
    _absent_entries_are_left_out(subject, of_head(subject, simple), "hidden", case.V, case.seed, grad_of)
