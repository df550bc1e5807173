"""Attacks on attention@1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from rlkernel_conformance import draw
from rlkernel_conformance.attack import attack
from rlkernel_conformance.attention_calls import (
    GRADED,
    Attend,
    cases,
    expected,
    expected_gradients,
    in_pages,
    in_rows,
    offsets,
    small,
    taken_pages,
)
from rlkernel_conformance.call_checks import same_results
from rlkernel_conformance.clauses.derived_attacks import derive
from rlkernel_conformance.compare import plain, require, same_bits, within
from rlkernel_conformance.subject import Subject


def judged(subject: Subject, given: Mapping[str, Any]) -> Any:
    """The result of a call, which is within the bound of the definition."""
    made = subject(**given)
    wide = torch.float64 if given["q"].dtype == torch.float64 else torch.float32
    for name, dtype in (("out", given["q"].dtype), ("lse", wide)):
        x = getattr(made, name)
        within(subject, "out", x, *expected(subject, given)[name], name=name)
        require(x.dtype == dtype, f"{name} of {given['q'].dtype} is {x.dtype}")
    return made


@attack(
    "AT-01",
    cases,
    examples=(
        Attend(((40, 1100), (1, 1025)), (2, 1), 16, 1, page=16),  # more than one chunk of keys
        Attend(((1, 700), (2, 64)), (8, 2), 128, 2, "bfloat16", page=16, window=130),
        Attend(((100, 100), (30, 30)), (4, 1), 64, 3, "float16", softcap=50.0, sinks=True),
        Attend(((9, 9),), (2, 2), 256, 4, "bfloat16"),
        Attend(((40, 300), (1, 129)), (4, 1), 128, 5, "bfloat16", page=128),  # of whole tiles
        Attend(((40, 300),), (2, 1), 64, 6, "bfloat16", page=384, causal=False),
    ),
)
def the_definition_in_float64(subject: Subject, case: Attend) -> None:
    """Both results."""
    if case.dtype in subject.dtypes:
        judged(subject, case.arguments(subject))


@attack("AT-02", small)
def one_key_gives_its_value(subject: Subject, case: Attend) -> None:
    """The first query of a prompt, and a cache of one key."""
    given = replace(case, lengths=((3, 3), (1, 1)), sinks=False, causal=True).arguments(subject)
    made = judged(subject, given)
    each = case.heads[0] // case.heads[1]
    same_bits("out", made.out[[0, 3]], given["v"][[0, 3]].repeat_interleave(each, 1), "beside the only value")


@attack("AT-03", small)
def no_key_gives_nothing(subject: Subject, case: Attend) -> None:
    """No keys at all, queries before the first key, rows of no sequence: 0, and gradients of 0."""
    given = replace(case, lengths=((2, 0), (4, 2)), causal=True, spare=3).arguments(subject)
    if "grad" in subject.claims:
        given["q"].requires_grad_()
    made, lonely = subject(**given), [0, 1, 2, 3, 6, 7, 8]
    empty = torch.full_like(made.lse[lonely], -torch.inf)
    lse = given["sinks"].to(empty.dtype).expand_as(empty) if "sinks" in given else empty
    same_bits("out", made.out[lonely].detach(), torch.zeros_like(made.out[lonely]), "of queries without keys")
    within(subject, "out", made.lse[lonely], plain(lse, "lse"), 1e-5 * plain(lse.abs(), "lse"), name="lse")
    if "grad" in subject.claims:
        (grad,) = torch.autograd.grad(made.out.sum(), given["q"])
        same_bits("gradient of q", grad[lonely], torch.zeros_like(grad[lonely]), "of queries without keys")


def neighbors(subject: Subject) -> st.SearchStrategy[Attend]:
    """Three sequences in the first claimed dtype."""
    lengths, dtype = ((3, 5), (2, 70), (4, 4)), subject.dtypes[0]
    return cases(subject).map(lambda c: replace(c, lengths=lengths, dtype=dtype, sinks=False))


@attack("AT-04", neighbors)
def sequences_are_apart(subject: Subject, case: Attend) -> None:
    """Beside the largest numbers."""
    _stay_beside(subject, case, torch.finfo(getattr(torch, case.dtype)).max)


@attack("AT-19", neighbors)
def sequences_are_isolated(subject: Subject, case: Attend) -> None:
    """Beside NaN and infinities."""
    _stay_beside(subject, case, torch.nan, torch.inf)


def _stay_beside(subject: Subject, case: Attend, *values: float) -> None:
    """Queries of the others, with a value in all of the second sequence; in pages, behind the last keys of each too."""
    rows = replace(case, page=0).arguments(subject)
    poisoned = {n: rows[n].clone() for n in ("q", "k", "v")}
    for value in values:
        poisoned["q"][3:5] = poisoned["k"][5:75] = poisoned["v"][5:75] = value
        others = [0, 1, 2, 5, 6, 7, 8]
        for page in {0, case.page if "paged" in subject.claims else 0}:
            pair = [{**rows}, {**rows, **poisoned}]
            if page:
                pair = [in_pages(x, page, case.seed, fill) for x, fill in zip(pair, (0.0, value), strict=True)]
            want, made = (subject(**x) for x in pair)
            for name in ("out", "lse"):
                found = getattr(made, name)
                same_bits(name, found[others], getattr(want, name)[others], f"beside a sequence of {value}")


@attack("AT-05", lambda s: in_rows(s).map(lambda c: replace(c, causal=True)))
def later_keys_change_nothing(subject: Subject, case: Attend) -> None:
    """Those after a position, of other and of huge values; in a prompt and behind a cache."""
    given = replace(case, lengths=((70, 70), (5, 40))).arguments(subject)
    want = subject(**given)
    for rows, keys in (((0, 4), (4, 70)), ((0, 64), (64, 70)), ((0, 65), (65, 70)), ((70, 73), (108, 110))):
        changed = {n: given[n].clone() for n in "kv"}
        changed["k"][slice(*keys)] *= 100
        changed["v"][slice(*keys)] = 1000
        made = subject(**{**given, **changed})
        for name in ("out", "lse"):
            found, before = (getattr(x, name)[slice(*rows)] for x in (made, want))
            same_bits(name, found, before, f"with other keys behind row {rows[1] - 1}")


@attack("AT-06", in_rows)
def pages_are_rows_in_another_place(subject: Subject, case: Attend) -> None:
    """Pages of one key, of a few, of more than there are, or of whole tiles; int64 tables."""
    given = case.arguments(subject)
    want = subject(**given)
    for page in taken_pages(subject, given, (1, 4, 16, 100), (128, 384)):
        paged = in_pages(given, page, case.seed)
        for kind in (torch.int32, torch.int64):
            paged |= {n: paged[n].to(kind) for n in ("page_table", "seqused_k", "cu_q")}
            made = judged(subject, paged)
            if "batch_invariant" in subject.claims:
                same_results(made, want, f"in pages of {page}")


@attack("AT-07", small)
def a_page_that_is_none_is_nan(subject: Subject, case: Attend) -> None:
    """Beyond the pages, and negative; queries that do not see it stay."""
    case = replace(case, causal=True, window=None)
    (G,) = taken_pages(subject, replace(case, lengths=((1, 1),)).arguments(subject), (2,), (256,))
    given = replace(case, lengths=((5, G + 3), (2, 2 * G))).arguments(subject)
    paged = in_pages(given, G, case.seed)
    want = subject(**paged)
    for page in (paged["k"].shape[0], -1, 2**30):
        table = paged["page_table"].clone()
        table[0, 1] = page  # keys from G on of the first sequence
        made = subject(**{**paged, "page_table": table})
        seen, others = [2, 3, 4], [0, 1, 5, 6]
        require(bool(made.out[seen].isnan().all()), f"queries that see page {page} get numbers")
        for name in ("out", "lse"):
            same_bits(name, getattr(made, name)[others], getattr(want, name)[others], f"beside a page {page}")


@attack("AT-08", in_rows)
def the_window_ends_at_the_query(subject: Subject, case: Attend) -> None:
    """As long as the sequences; longer; of one key."""
    only = replace(case, lengths=((70, 70), (3, 70)), causal=True, window=None, sinks=False, spare=0)
    given = only.arguments(subject)
    want = subject(**given)
    for window in (70, 2**31):
        same_results(subject(**given, window=window), want, f"with a window of {window}")
    own = torch.cat([given["v"][:70], given["v"][137:]]).repeat_interleave(case.heads[0] // case.heads[1], 1)
    same_bits("out", judged(subject, {**given, "window": 1}).out, own, "with a window of 1")


@attack("AT-09", in_rows)
def the_softcap_bounds_scores(subject: Subject, case: Attend) -> None:
    """Of scores that are far beyond it."""
    given = replace(case, size="large", sinks=False, scale=5.0).arguments(subject)
    for cap in (1.0, 30.0):
        made = judged(subject, {**given, "softcap": cap})
        most = cap + np.log(max(n for _, n in case.lengths) or 1)
        require(bool((made.lse <= most * 1.0001).all()), f"lse is above {most}, with a softcap of {cap}")


@attack("AT-10", in_rows)
def the_sink_takes_its_share(subject: Subject, case: Attend) -> None:
    """Of minus infinity: the bits without. A huge one takes all."""
    given = replace(case, sinks=False).arguments(subject)
    want, flat = subject(**given), torch.zeros(case.heads[0], device=given["q"].device)
    same_results(subject(**given, sinks=flat - torch.inf), want, "with a sink of -inf")
    made = subject(**given, sinks=flat + 30000.0)
    require(not made.out.any(), "keys have a share beside a huge sink")
    require(bool((made.lse == 30000).all()), "lse is not the huge sink")


@attack(
    "AT-11",
    lambda s: cases(s).map(lambda c: replace(c, page=0)),
    examples=(Attend(((130, 130), (65, 200)), (4, 2), 64, 5, "bfloat16", sinks=True),),
)
def gradients_match_float64(subject: Subject, case: Attend) -> None:
    """From out alone, from lse alone, from both."""
    if case.dtype not in subject.dtypes:
        return
    given = case.arguments(subject)
    leaf = {n: given[n].requires_grad_() for n in GRADED if n in given}
    made = subject(**given)
    up = {n: draw.normal(x.shape, case.seed + 9 + len(n), subject.device).to(x.dtype) for n, x in _results(made)}
    up["lse"] = torch.where(made.lse.isneginf(), 0.0, up["lse"])
    for some in (("out",), ("lse",), ("out", "lse")):
        grads = torch.autograd.grad(
            [getattr(made, n) for n in some], list(leaf.values()), [up[n] for n in some], retain_graph=True
        )
        want = expected_gradients(subject, given, {n: plain(up[n], n) for n in some})
        for (name, x), grad in zip(leaf.items(), grads, strict=True):
            within(subject, "grad", grad, *want[name], name=f"gradient of {name} from {' and '.join(some)}")
            require(grad.dtype == x.dtype, f"the gradient of {name} is {grad.dtype}")


def _results(made: Any) -> list[tuple[str, Tensor]]:
    return [("out", made.out), ("lse", made.lse)]


@attack("AT-12", small, scale=0.2)
def no_queries_give_empty_results(subject: Subject, case: Attend) -> None:
    """No sequence, and one that asks nothing of its keys."""
    for lengths in ((), ((0, 3),), ((0, 0), (0, 0))):
        given = replace(case, lengths=lengths, spare=0).arguments(subject)
        keys = {n: given[n].requires_grad_("grad" in subject.claims) for n in "kv"}
        made = subject(**given)
        require(made.out.shape == given["q"].shape, f"out is {list(made.out.shape)}, not {list(given['q'].shape)}")
        require(made.lse.shape == given["q"].shape[:2], f"lse is {list(made.lse.shape)}")
        if made.out.requires_grad:
            for name, grad in zip("kv", torch.autograd.grad(made.out.sum(), list(keys.values())), strict=True):
                same_bits(f"gradient of {name}", grad, torch.zeros_like(keys[name]), "that no query sees")


@attack(
    "AT-16",
    lambda s: cases(s).map(lambda c: replace(c, causal=True, size="normal", D=min(c.D, 64))),
    examples=(
        Attend(((80, 1080),), (2, 1), 16, 1, page=16),
        Attend(((130, 130),), (8, 2), 128, 2, "bfloat16", page=16),
        Attend(((129, 129),), (2, 2), 64, 3, "float16", window=70, sinks=True),
        Attend(((70, 300),), (8, 2), 128, 4, "bfloat16", page=128),
        Attend(((70, 260),), (7, 1), 64, 5, "bfloat16", page=256),
    ),
)
def a_query_is_the_same_everywhere(subject: Subject, case: Attend) -> None:
    """One sequence: as a prompt, in parts, token by token, all tokens side by side, in pages, among others."""
    if case.dtype not in subject.dtypes:
        return
    m, n = case.lengths[0] if len(case.lengths) == 1 else (70, 70)
    whole = replace(case, lengths=((m, n),), spare=0, page=0).arguments(subject)
    want = subject(**whole)

    def part(first: int, last: int) -> dict[str, Any]:
        """Queries of a sequence that has the keys up to the last of them."""
        known, place = n - m + last, whole["q"].device
        some = {"q": whole["q"][first:last], "k": whole["k"][:known], "v": whole["v"][:known]}
        return {**whole, **some, "cu_q": offsets([last - first], place), "cu_k": offsets([known], place)}

    def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
        tensors = {n: torch.cat([p[n] for p in parts]) for n in ("q", "k", "v")}
        counts = {n: torch.cat([p[n].diff() for p in parts]).tolist() for n in ("cu_q", "cu_k")}
        return {**whole, **tensors, **{n: offsets(c, whole["q"].device) for n, c in counts.items()}}

    def compare(given: dict[str, Any], places: list[slice], rows: list[slice], when: str) -> None:
        ways = [given]
        if case.page and "paged" in subject.claims:
            ways.append(in_pages(given, case.page, case.seed))
        for way in ways:
            made = subject(**way)
            for at, mine in zip(places, rows, strict=True):
                for name in ("out", "lse"):
                    same_bits(name, getattr(made, name)[at], getattr(want, name)[mine], when)

    everything = slice(0, m)
    compare(whole, [everything], [everything], "in pages")
    for cut in sorted({1, m // 3, min(m - 1, 64), m - 1} - {0}):
        for first, last in ((0, cut), (cut, m)):
            compare(part(first, last), [everything], [slice(first, last)], f"in parts cut at {cut}")
    borders = {at - (n - m) for at in (0, 1, 63, 64, 1023, 1024)} | {0, m // 2, m - 1}
    tokens = sorted(t for t in borders if 0 <= t < m)
    for t in tokens[1:3]:
        compare(part(t, t + 1), [everything], [slice(t, t + 1)], "alone behind its cache")
    each = joined([part(t, t + 1) for t in tokens])
    places = [slice(i, i + 1) for i in range(len(tokens))]
    compare(each, places, [slice(t, t + 1) for t in tokens], "side by side behind their caches")
    filler = replace(case, lengths=((7, 40), (3, 3), (0, 2)), seed=case.seed + 50, spare=0, page=0).arguments(subject)
    crowd = joined([filler, whole, filler])
    compare(crowd, [slice(10, 10 + m)], [everything], "among other sequences")
    if "grad" in subject.claims:
        alone = _gradients(subject, whole, everything, slice(0, n), case.seed)
        among = _gradients(subject, crowd, slice(10, 10 + m), slice(45, 45 + n), case.seed)
        same_results(among, alone, "among other sequences")


@attack("AT-18", in_rows)
def the_bound_on_keys(subject: Subject, case: Attend) -> None:
    """As many as the longest sequence has, more than there are, and fewer than one has; gradients of others stay."""
    for page in {0, case.page}:
        given = replace(case, page=page, lengths=((5, 5), (1, 70), (2, 3))).arguments(subject)
        want = subject(**given)
        for bound in (70, 100, 2**31):
            same_results(subject(**given, max_k=bound), want, f"with max_k = {bound}")
        made, others = subject(**given, max_k=69), [0, 1, 2, 3, 4, 6, 7]
        require(bool(made.out[5].isnan().all() & made.lse[5].isnan().all()), "70 keys give numbers with max_k = 69")
        for name in ("out", "lse"):
            same_bits(name, getattr(made, name)[others], getattr(want, name)[others], "beside a sequence of more keys")


def _gradients(subject: Subject, given: Mapping[str, Any], rows: slice, keys: slice, seed: int) -> dict[str, Tensor]:
    """Of one sequence's q, k and v, upstream gradients drawn for it and 1 for the others."""
    leaf = {n: given[n].detach().clone().requires_grad_() for n in ("q", "k", "v")}
    made = subject(**{**given, **leaf})
    up = torch.ones_like(made.out)
    up[rows] = draw.normal(made.out[rows].shape, seed + 9, subject.device).to(up.dtype)
    d_q, d_k, d_v = torch.autograd.grad(made.out, list(leaf.values()), up)
    return {"d_q": d_q[rows], "d_k": d_k[keys], "d_v": d_v[keys]}


derive(
    "attention",
    lambda s, c: c.arguments(s),
    inputs_untouched=small,
    determinism=in_rows,
    capture=small,
)
