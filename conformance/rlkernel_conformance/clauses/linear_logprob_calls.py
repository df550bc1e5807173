"""Attacks on linear_logprob@1: memory, ranks, batches, layouts, and what every operator owes its caller."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from rlkernel_conformance import draw
from rlkernel_conformance.attack import attack
from rlkernel_conformance.call_checks import same_results
from rlkernel_conformance.clauses.derived_attacks import derive
from rlkernel_conformance.clauses.linear_logprob_heads import (
    Head,
    check_gradients,
    definition,
    gradients,
    heads,
    lists,
    of_shard,
    operand_gradients,
    small,
    with_leaves,
)
from rlkernel_conformance.compare import close, plain, require, same_bits
from rlkernel_conformance.memory import does_not_grow, least_workspace, peak
from rlkernel_conformance.ranks import on_ranks
from rlkernel_conformance.subject import Subject
from rlkernel_core.spec.logprob import Support

WIDE = 1024  # a row of logits in fp32 is 4096 bytes: one that is kept per row of hidden shows


def listed(subject: Subject, case: Head, **more: Any) -> list[dict[str, Any]]:
    """A call; one with three ids of each row, and one with LoRA, where these are claimed."""
    given = case.given(subject, **more)
    found = [given]
    if "many_ids" in subject.claims:
        found.append({**given, "ids": lists(case.N, case.V, 3, case.seed, subject.device)})
    if "lora" in subject.claims:
        found.append({**given, "lora": replace(case, rank=3).lora(subject)})
    return found


def extra(subject: Subject, given: dict[str, Any], **more: Any) -> int:
    """Bytes at the peak of a call beyond its results, and of its backward pass beyond the gradients too."""
    call, leaves = with_leaves(given) if "grad" in subject.claims else (given, {})

    def run() -> Any:
        out = subject(**call, **more)
        if leaves:
            out.logprob.sum().backward()
        return out

    run()  # what first calls load and keep is not their workspace
    for x in leaves.values():
        x.grad = None
    most, out = peak(subject, run)
    results = sum(x.nbytes for x in vars(out).values() if isinstance(x, torch.Tensor))
    return most - results - sum(x.grad.nbytes for x in leaves.values() if x.grad is not None)


def a_case(subject: Subject, case: Head, rows: int) -> Head:
    """The case with a wide vocabulary and that many rows."""
    return replace(case, N=rows, D=8, V=WIDE, dtype=subject.dtypes[0])


@attack("LL-05", lambda s: heads(s, plainly=True), scale=0.05)
def memory_does_not_grow_with_rows(subject: Subject, case: Head) -> None:
    """Twice or three times the rows: a few numbers more per row, a tenth of a row of logits at most."""
    for which in range(len(listed(subject, case))):

        def at(rows: int, which: int = which) -> int:
            return extra(subject, listed(subject, a_case(subject, case, rows))[which], backward="recompute")

        does_not_grow(at, most=WIDE * 4 / 10)


@attack("LL-07", lambda s: heads(s, plainly=True), scale=0.05)
def the_limit_is_kept_and_the_minimum_named(subject: Subject, case: Head) -> None:
    """A limit of one byte is refused with the least that is accepted; within that the call stays."""
    case = a_case(subject, case, 128)
    for given in listed(subject, case):
        limit = least_workspace(
            lambda n, given=given: subject(**given, max_workspace_bytes=n),
            lambda n, given=given: extra(subject, given, max_workspace_bytes=n),
        )
        out, want = subject(**given, max_workspace_bytes=limit), subject(**given)
        close(subject, "logprob", out.logprob, plain(want.logprob, "logprob"), case.dtype)


def sharded(subject: Subject, case: Head, cuts: list[int]) -> list[Any]:
    """Result and gradients on every rank, the vocabulary cut at `cuts`."""
    given = case.given(subject)

    def on_rank(rank: int, group: Any) -> Any:
        mine = of_shard(given, slice(cuts[rank], cuts[rank + 1]))
        if "grad" not in subject.claims:
            return subject(**mine, group=group), {}
        call, leaves = with_leaves(mine)
        out = subject(**call, group=group, entropy="entropy" in subject.claims)
        return out, gradients({"logprob": out.logprob}, {"logprob": torch.ones_like(out.logprob)}, leaves)

    return on_ranks(subject, len(cuts) - 1, on_rank)


@attack("LL-20", lambda s: heads(s, plainly=True, N=4), scale=0.2)
def shards_equal_the_whole(subject: Subject, case: Head) -> None:
    """Two ranks with shards of different sizes; ids lie on either."""
    case = replace(case, V=max(case.V, 7), bias="bias" in subject.claims, rank=3 if "lora" in subject.claims else 0)
    given = case.given(subject)
    ranks = sharded(subject, case, [0, case.V // 3, case.V])
    want = definition(given)
    for out, _ in ranks:
        close(subject, "logprob", out.logprob, want.logprob, case.dtype, scale=2.0)
        if "lse" in subject.claims:
            close(subject, "lse", out.lse, want.lse, case.dtype, scale=2.0)
    if not ranks[0][1]:
        return
    call, leaves = with_leaves(given)
    out = subject(**call)
    whole = gradients({"logprob": out.logprob}, {"logprob": torch.ones_like(out.logprob)}, leaves)
    everywhere = {"hidden", "lora.A"} & set(whole)
    joined = {n: torch.cat([grads[n] for _, grads in ranks]) for n in whole if n not in everywhere}
    size = float(whole["weight"].double().norm())
    for found in (*({n: grads[n] for n in everywhere} for _, grads in ranks), joined):
        check_gradients(subject, found, {n: plain(whole[n], n) for n in found}, case.dtype, size)


@attack("LL-44", lambda s: heads(s, plainly=True, N=4), scale=0.2)
def parts_of_a_gradient_are_left_to_be_added(subject: Subject, case: Head) -> None:
    """Two ranks with shards of different sizes: each part is that of its columns; all else is as without parts."""
    case = replace(case, V=max(case.V, 7), bias="bias" in subject.claims, rank=3 if "lora" in subject.claims else 0)
    given, cuts = case.given(subject), [0, case.V // 3, case.V]

    def on_rank(rank: int, group: Any) -> Any:
        mine, found = of_shard(given, slice(*cuts[rank : rank + 2])), []
        for partial in (False, True):
            call, leaves = with_leaves(mine)
            out = subject(**call, group=group, partial_grad=partial)
            found.append((out, gradients({"logprob": out.logprob}, {"logprob": torch.ones_like(out.logprob)}, leaves)))
        return found

    dz = definition(given, {"logprob": np.ones(case.N)}).grad
    size = float(np.linalg.norm(operand_gradients(given, dz)["weight"]))
    for rank, ((out, whole), (parted, part)) in enumerate(on_ranks(subject, 2, on_rank)):
        same_results(parted, out, "where a gradient is left a part")
        columns = slice(*cuts[rank : rank + 2])
        want = operand_gradients(of_shard(given, columns), dz[:, columns])["hidden"]
        check_gradients(subject, part, {"hidden": want}, case.dtype, size)
        for name in set(whole) - {"hidden", "lora.A"}:
            same_bits(f"d{name}", part[name], whole[name], "where that of hidden is left a part")
        if "lora.A" in whole:
            check_gradients(subject, part, {"lora.A": plain(whole["lora.A"], "lora.A")}, case.dtype, size)


@attack("LL-21", lambda s: heads(s, plainly=True), scale=0.3)
def a_group_of_one_gives_the_bits_of_none(subject: Subject, case: Head) -> None:
    """Results and gradients with a group of one rank."""
    given = case.given(subject)
    [found] = on_ranks(subject, 1, lambda _, group: subject(**given, group=group))
    same_results(found, subject(**given), "in a group of one")
    if "grad" not in subject.claims:
        return

    def back(group: Any = None) -> dict[str, Any]:
        call, leaves = with_leaves(given)
        out = subject(**call, group=group)
        return gradients({"logprob": out.logprob}, {"logprob": torch.ones_like(out.logprob)}, leaves)

    [grads] = on_ranks(subject, 1, lambda _, group: back(group))
    for name, x in back().items():
        same_bits(f"d{name}", grads[name], x, "in a group of one")


@attack("LL-22", lambda s: heads(s, plainly=True, N=4), scale=0.3)
def ranks_agree_bit_by_bit(subject: Subject, case: Head) -> None:
    """Results, dX and dA of three ranks."""
    case = replace(case, V=max(case.V, 7), rank=3 * (case.seed % 2) if "lora" in subject.claims else 0)
    (first, grads), *others = sharded(subject, case, [0, 2, case.V // 2 + 1, case.V])
    for out, more in others:
        same_results(out, first, "on another rank")
        for name in {"hidden", "lora.A"} & set(more):
            same_bits(f"d_{name}", more[name], grads[name], "on another rank")


@attack("LL-32", lambda s: heads(s, N=3).map(long), scale=0.3)
def any_number_of_ranks_gives_the_same_bits(subject: Subject, case: Head) -> None:
    """One without a group, and groups of 1, 2, 4 and 8; with what is claimed of entropy and support."""
    calls = listed(subject, case, **({"entropy": True} if "entropy" in subject.claims else {}))
    given = calls[case.seed % len(calls)]
    if given is calls[0] and "support" in subject.claims:
        every = [
            torch.cat([chosen[None], torch.arange(i, case.V, 97, device=chosen.device)])
            for i, chosen in enumerate(given["ids"])
        ]
        lengths = torch.tensor([0, *map(len, every)], device=given["ids"].device)
        given["support"] = Support(torch.cat(every), lengths.cumsum(0))
    want = subject(**given)
    for ranks in (1, 2, 4, 8):
        share = case.V // ranks

        def on_rank(rank: int, group: Any, share: int = share) -> Any:
            return subject(**of_shard(given, slice(rank * share, (rank + 1) * share)), group=group)

        same_results(on_ranks(subject, ranks, on_rank)[-1], want, f"on {ranks} ranks")


def long(case: Head) -> Head:
    """The same with a vocabulary that 8 ranks can share: eight pieces of whole tiles, or with some ids more."""
    return replace(case, V=(8192, 8200, 12296)[case.V % 3])


@attack("LL-23", lambda s: heads(s, plainly=True).map(small), scale=0.5)
def an_id_out_of_range_is_flagged_and_never_zero(subject: Subject, case: Head) -> None:
    """Below, above and far above; its gradient is 0, and other rows keep their bits."""
    given = case.given(subject)
    want = subject(**(with_leaves(given)[0] if "grad" in subject.claims else given))
    for bad in (-1, case.V, 2**40):
        wrong = given["ids"].clone()
        wrong[0] = bad
        call, leaves = with_leaves({**given, "ids": wrong}) if "grad" in subject.claims else (given, {})
        out = subject(**{**call, "ids": wrong})
        require(bool(out.logprob[0].isnan()), f"id {bad} gives {out.logprob[0].item()!r}, not NaN")
        flags = None if out.invalid is None else out.invalid.tolist()
        require(flags == [True] + [False] * (case.N - 1), f"id {bad} is flagged as {flags}")
        same_bits("logprob", out.logprob[1:], want.logprob[1:], "beside a row with a bad id")
        if leaves:
            found = gradients({"logprob": out.logprob}, {"logprob": torch.ones_like(out.logprob)}, leaves)
            require(bool((found["hidden"][0] == 0).all()), f"id {bad} has a gradient")
            require(bool(found["weight"].isfinite().all()), f"id {bad} spoils the gradient of the head")


@attack("LL-24", heads, scale=0.5)
def layout_changes_nothing(subject: Subject, case: Head) -> None:
    """Padded rows and transposed storage of hidden and weight; rows in two dimensions."""
    given = case.given(subject)
    want = subject(**given)
    for name in ("hidden", "weight"):
        for view in (draw.strided(given[name]), given[name].t().contiguous().t()):
            found = subject(**{**given, name: view})
            if "batch_invariant" in subject.claims:
                same_results(found, want, f"with a strided {name}")
            close(subject, "logprob", found.logprob, plain(want.logprob, "logprob"), case.dtype, scale=2.0)
    shaped = subject(**{**given, "hidden": given["hidden"][None], "ids": given["ids"][None]})
    if "batch_invariant" in subject.claims:
        same_bits("logprob", shaped.logprob[0], want.logprob, "in two dimensions")
    close(subject, "logprob", shaped.logprob[0], plain(want.logprob, "logprob"), case.dtype, scale=2.0)


@attack("LL-25", lambda s: heads(s, plainly=True).map(small), scale=0.3)
def no_rows_give_empty_results_and_zero_gradients(subject: Subject, case: Head) -> None:
    """N = 0, and all rows masked."""
    given = case.given(subject)
    calls = [{**given, "hidden": given["hidden"][:0], "ids": given["ids"][:0]}]
    if "mask" in subject.claims:
        calls.append({**given, "mask": torch.zeros(case.N, dtype=torch.bool, device=subject.device)})
    for call in calls:
        rows = call["hidden"].shape[0]
        one, leaves = with_leaves(call) if "grad" in subject.claims else (call, {})
        out = subject(**one)
        require(out.logprob.tolist() == [0.0] * rows, f"no rows give {out.logprob.tolist()}")
        if leaves:
            found = gradients({"logprob": out.logprob}, {"logprob": torch.ones_like(out.logprob)}, leaves)
            for name, x in found.items():
                require(x.shape == call[name].shape, f"no rows have d_{name} of {list(x.shape)}")
                require(bool((x == 0).all()), f"no rows have d_{name} {x.tolist()}")


def batches(subject: Subject) -> st.SearchStrategy[Head]:
    """Rows and ids enough for an order of sums to show; libraries take other paths for odd widths."""
    return heads(subject, N=5).map(lambda c: replace(c, D=(5, 33, 16, 1)[c.D % 4], V=c.V if c.V > 2 else 33))


@attack("LL-27", batches, scale=0.5)
def a_row_is_the_same_in_any_batch(subject: Subject, case: Head) -> None:
    """Alone, reversed, at the end of a large batch: neither values nor dX move; in float64 too, where it is claimed."""
    for dtype in sorted({case.dtype, "float64"} & set(subject.dtypes)):
        _the_same_in_any_batch(subject, replace(case, dtype=dtype))


def _the_same_in_any_batch(subject: Subject, case: Head) -> None:
    for given in listed(subject, case):
        _parts_are_the_same(subject, case, given)


def _parts_are_the_same(subject: Subject, case: Head, given: dict[str, Any]) -> None:
    def part(index: Any) -> Any:
        call, leaves = with_leaves({**given, "hidden": given["hidden"][index], "ids": given["ids"][index]}, ("weight",))
        out = subject(**call)
        if "grad" not in subject.claims:
            return out.logprob.detach(), out.logprob.detach()
        found = gradients({"logprob": out.logprob}, {"logprob": torch.ones_like(out.logprob)}, leaves)
        return out.logprob.detach(), found["hidden"]

    every = torch.arange(case.N, device=subject.device)
    values, whole_dx = part(every)
    alone = [part(every[i : i + 1]) for i in range(case.N)]
    others = {
        "in a reversed batch": [x.flip(0) for x in part(every.flip(0))],
        "one row at a time": [torch.cat(x) for x in zip(*alone, strict=True)],
        "at the end of a large batch": [x[-case.N :] for x in part(every.repeat(40))],
    }
    for when, (value, dx) in others.items():
        same_bits("logprob", value, values, when)
        same_bits("dX", dx, whole_dx, when)


@attack("LL-31", lambda s: heads(s, plainly=True).map(small), scale=0.5)
def one_bad_row_spoils_one_row(subject: Subject, case: Head) -> None:
    """NaN and inf in a row of hidden; values and dX of the others keep their bits."""
    case = replace(case, N=case.N + 1)
    given = case.given(subject)

    def outcome(hidden: Any) -> Any:
        if "grad" not in subject.claims:
            value = subject(**{**given, "hidden": hidden}).logprob
            return value, value
        call, leaves = with_leaves({**given, "hidden": hidden}, ("weight",))
        out = subject(**call)
        g = {"logprob": torch.ones_like(out.logprob)}
        return out.logprob.detach(), gradients({"logprob": out.logprob}, g, leaves)["hidden"]

    values, whole_dx = outcome(given["hidden"])
    for poison in (np.nan, np.inf):
        hidden = given["hidden"].clone()
        hidden[0] = poison
        value, dx = outcome(hidden)
        require(bool(value[0].isnan()), f"a row of {poison} gives {value[0].item()!r}, not NaN")
        same_bits("logprob", value[1:], values[1:], f"beside a row of {poison}")
        same_bits("dX", dx[1:], whole_dx[1:], f"beside a row of {poison}")


def with_mask(subject: Subject, case: Head) -> dict[str, Any]:
    """The call with a mask, with entropies, and with several ids per row or LoRA, where these are claimed.

    Two cases that differ in their seeds alone have the same shapes.
    """
    calls = listed(subject, case)
    given = calls[case.D % len(calls)]
    if "mask" in subject.claims:
        given["mask"] = torch.arange(case.N, device=subject.device) % 2 == case.seed % 2
    return given | ({"entropy": True} if "entropy" in subject.claims else {})


derive("linear_logprob", lambda s, c: c.given(s), inputs_untouched=heads, determinism=heads, scale=0.5)
derive("linear_logprob", with_mask, capture=lambda s: heads(s).map(small))
