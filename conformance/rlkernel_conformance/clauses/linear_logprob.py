"""Attacks on linear_logprob@1: values, options and gradients. Memory, ranks, layouts: linear_logprob_calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from rlkernel_conformance import draw
from rlkernel_conformance.attack import attack
from rlkernel_conformance.clauses import (
    linear_logprob_calls,
    linear_logprob_lora,
    listed_ids,
    quantized_heads,
    ragged_ids,
)
from rlkernel_conformance.clauses.linear_logprob_heads import (
    TEMPERATURES,
    Head,
    check_gradients,
    definition,
    gradients,
    heads,
    logits,
    operand_gradients,
    sizes,
    small,
    with_leaves,
)
from rlkernel_conformance.clauses.number_masks import PLACES, Masked, chosen, law_of, masked_rows, near
from rlkernel_conformance.compare import Violation, close, plain, require, same_bits
from rlkernel_conformance.subject import Subject
from rlkernel_core.spec.logprob import LogprobResult, Support

# whose attacks are registered with these
__all__ = ["linear_logprob_calls", "linear_logprob_lora", "listed_ids", "quantized_heads", "ragged_ids"]


def options(subject: Subject) -> dict[str, Any]:
    """What every call may ask for besides log-probabilities."""
    return {"entropy": True} if "entropy" in subject.claims else {}


def agree(subject: Subject, out: LogprobResult, want: Any, dtype: str) -> None:
    """Log-probability, lse and entropy are the definition's."""
    size = np.maximum(1, np.abs(want.lse) / 10)
    close(subject, "logprob", out.logprob, want.logprob, dtype, scale=size)
    if "lse" in subject.claims:
        close(subject, "lse", out.lse, want.lse, dtype, scale=size)
    if out.entropy is not None:
        close(subject, "entropy", out.entropy, want.entropy, dtype, scale=size)


def upstream(case: Head, names: tuple[str, ...], device: str) -> dict[str, torch.Tensor]:
    """A gradient for every result."""
    return {n: draw.normal((case.N,), case.seed + 20 + i, device) for i, n in enumerate(names)}


def back(subject: Subject, given: dict[str, Any], case: Head, frozen: tuple[str, ...] = (), **more: Any) -> Any:
    """Result, gradients of the operands, and the upstream gradients."""
    call, leaves = with_leaves(given, frozen)
    out = subject(**call, **options(subject), **more)
    results = {n: x for n, x in vars(out).items() if n in {"logprob", "lse", "entropy", "log_kept_mass"}}
    results = {n: x for n, x in results.items() if x is not None}
    g = upstream(case, tuple(results), subject.device)
    return out, gradients(results, g, leaves), {n: plain(x, n) for n, x in g.items()}


def size_of(given: dict[str, Any], g: dict[str, Any]) -> float:
    """A norm that a gradient has where probabilities are neither 0 nor 1; below it errors are those of rounding."""
    weight = plain(given["weight"], "weight")
    most = float(np.sqrt(sum(np.square(x) for x in g.values()).sum()))
    return 0.05 * most * float(np.linalg.norm(weight)) / len(weight) ** 0.5 / given["temperature"]


@attack("LL-01", heads)
def log_probabilities_match_float64(subject: Subject, case: Head) -> None:
    """Log-probability and lse against the definition, at every option."""
    given = case.given(subject)
    agree(subject, subject(**given), definition(given), case.dtype)


@attack("LL-02", lambda s: heads(s, D=64, plainly=True).map(lambda c: replace(c, temperature=1.0, V=max(c.V, 33))))
def logits_of_16_bits_are_not_rounded(subject: Subject, case: Head) -> None:
    """Operands of 16 bits: one rounding of a logit of 8 to bf16 errs by up to 3e-2, to fp16 by 4e-3.

    Beside hidden states of 32 bits, where dtypes may mix: nor are those.
    """
    for dtype in {"bfloat16", "float16"} & set(subject.dtypes):
        one = replace(case, dtype=dtype, N=8)
        given = one.given(subject)
        agree(subject, subject(**given), definition(given), dtype)
        if "mixed_dtypes" in subject.claims and "float32" in subject.dtypes:
            given["hidden"] = replace(one, dtype="float32").given(subject)["hidden"]
            agree(subject, subject(**given), definition(given), dtype)


@attack("LL-03", lambda s: heads(s, plainly=True).map(small))
def confident_rows_keep_relative_precision(subject: Subject, case: Head) -> None:
    """The chosen id 12 to 40 nats above the rest. The head is the identity: the logits are exact."""
    x = draw.logits("normal", case.N, case.V, case.seed, "float32", subject.device)
    ids = draw.integers((case.N,), case.V, case.seed, subject.device)
    x = x.scatter(1, ids[:, None], x.amax(1, keepdim=True) + 12.0 + 28.0 * (case.seed % 11) / 10)
    dtype = "float32" if "float32" in subject.dtypes else "float64"
    if dtype not in subject.dtypes:
        x = x.to(getattr(torch, subject.dtypes[0]))
    given = {"hidden": x, "weight": torch.eye(case.V, device=x.device, dtype=x.dtype), "ids": ids}
    have = plain(subject(**given).logprob, "logprob")
    want = definition({**given, "temperature": 1.0, "logit_scale": 1.0}).logprob
    require(bool((have <= 0).all()), f"log p is positive: {have.max()!r}")
    error = np.abs(have - want) / np.maximum(np.abs(want), 1e-30)
    require(bool((error <= 1e-4).all()), f"log p of confident rows is {have.tolist()}, expected {want.tolist()}")


@attack("LL-04", lambda s: st.builds(Head, N=st.just(2), D=st.just(3), V=st.integers(1, 9000), seed=st.integers(0, 99)))
def every_column_counts_once(subject: Subject, case: Head) -> None:
    """Hidden states of zeros and a vocabulary of any size: log p is -log V, and lse log V."""
    given = replace(case, dtype=subject.dtypes[0]).given(subject)
    given["hidden"] = torch.zeros_like(given["hidden"])
    out = subject(**given)
    lse = plain(out.lse, "lse") if "lse" in subject.claims else -plain(out.logprob, "logprob")
    error = float(np.abs(np.exp(lse - np.log(case.V)) - 1).max()) * case.V
    require(error < 0.5, f"{case.V} columns count as {np.exp(lse).tolist()}")


@attack("LL-06", lambda s: heads(s, plainly=True, V=1031, N=70), scale=0.2)
def the_modes_agree(subject: Subject, case: Head) -> None:
    """Saved, computed again, and chosen: values and gradients."""
    modes = ["auto", *(m for m in ("save", "recompute") if f"backward:{m}" in subject.claims)]
    given = case.given(subject)
    found = [back(subject, given, case, backward=m) if "grad" in subject.claims else None for m in modes]
    if found[0] is None:
        return
    (first, want, g), dtype = found[0], case.dtype
    for out, grads, _ in found[1:]:
        close(subject, "logprob", out.logprob, plain(first.logprob, "logprob"), dtype)
        check_gradients(subject, grads, {n: plain(x, n) for n, x in want.items()}, dtype, size_of(given, g))


@attack("LL-08", lambda s: heads(s).map(small))
def it_is_logprob_of_the_same_logits(subject: Subject, case: Head) -> None:
    """Values and gradients of logprob's definition on hidden @ weight.T, mask included."""
    given = case.given(subject)
    want = definition(given)
    if "mask" in subject.claims:
        given["mask"] = torch.arange(case.N, device=subject.device) % 3 != 1
        mask = plain(given["mask"], "mask")
        for name in ("logprob", "lse", "entropy"):
            setattr(want, name, np.where(mask, getattr(want, name), 0.0))
    out = subject(**given, **options(subject))
    close(subject, "logprob", out.logprob, want.logprob, case.dtype, scale=np.maximum(1, np.abs(want.lse) / 10))
    if out.entropy is not None:
        close(subject, "entropy", out.entropy, want.entropy, case.dtype, scale=np.maximum(1, np.abs(want.lse) / 10))


@attack("LL-09", lambda s: heads(s, plainly=True).map(lambda c: replace(small(c), softcap=(1.5, 5.0)[c.seed % 2])))
def scale_and_bias_come_before_the_cap_and_the_cap_before_the_temperature(subject: Subject, case: Head) -> None:
    """A cap that bends, with everything around it."""
    case = replace(case, bias="bias" in subject.claims, logit_scale=2.0 if "logit_scale" in subject.claims else 1.0)
    given = case.given(subject)
    agree(subject, subject(**given, **options(subject)), definition(given), case.dtype)


@attack("LL-10", lambda s: heads(s, plainly=True).map(small), scale=0.5)
def a_bias_shifts_logits_and_minus_infinity_forbids(subject: Subject, case: Head) -> None:
    """Some ids forbidden, with a cap too where that is claimed; the chosen ids are possible."""
    for softcap in (0.0, 5.0) if "softcap" in subject.claims else (0.0,):
        given = replace(case, bias=True, softcap=softcap).given(subject)
        agree(subject, subject(**given, **options(subject)), definition(given), case.dtype)
        open_ids = torch.arange(case.V, device=subject.device) % 3 == 0
        given["bias"] = torch.where(open_ids, given["bias"], -torch.inf)
        given["ids"] = given["ids"] // 3 * 3
        keep = [np.arange(0, case.V, 3).tolist()] * case.N
        without = {**given, "bias": given["bias"].nan_to_num(neginf=0.0)}
        want = definition(without, kept=keep)  # what is forbidden is what a support leaves out
        out = subject(**given, **options(subject))
        close(subject, "logprob", out.logprob, want.logprob, case.dtype, scale=2.0)
        require(not bool(out.logprob.isnan().any()), "a forbidden id gives NaN")
        if out.entropy is not None:
            require(bool(out.entropy.isfinite().all()), f"entropy {out.entropy.tolist()} with forbidden ids")
    given = replace(case, bias=True, V=1025, temperature=1.0).given(subject)  # tiles of which no id, or one, is left
    given["bias"][200:1024] = -torch.inf
    given["ids"] = torch.where(torch.arange(case.N, device=subject.device) % 2 == 0, 1024, given["ids"] % 200)
    for each in ({}, {"logit_scale": 2.5} if "logit_scale" in subject.claims else {}):
        call = {**given, **each}
        want = definition({**call, "bias": call["bias"].nan_to_num(neginf=0.0)}, kept=[[*range(200), 1024]] * case.N)
        close(subject, "logprob", subject(**call).logprob, want.logprob, case.dtype, scale=2.0)


@attack("LL-45", masked_rows, examples=(Masked(193, 0), Masked(1283, 8, temperature=0.5)), scale=0.3)
def a_number_masks_as_minus_infinity_does(subject: Subject, case: Masked) -> None:
    """By the bias."""
    if case.dtype not in subject.dtypes:
        return
    head = Head(4, 8, case.V, case.seed, case.dtype, case.temperature)
    for i, place in enumerate(PLACES):
        given, mask = head.given(subject), case.mask(place, i)
        bias = draw.normal((case.V,), case.seed + i, "cpu").masked_fill(mask, case.value(i)).to(given["hidden"].dtype)
        given |= {"bias": bias.to(subject.device), "ids": chosen(mask.expand(4, -1), case.seed).to(subject.device)}
        z, ids = logits(given), plain(given["ids"], "ids")
        if "grad" in subject.claims:
            out, found, g = back(subject, given, head)
            want = law_of(z, ids, case.temperature, g)
            expected = operand_gradients(given, want.grad)
            check_gradients(subject, found, expected, case.dtype, sizes(given, want.grad, size_of(given, g)))
        else:
            out, want = subject(**given, **options(subject)), law_of(z, ids, case.temperature)
        for name in ("logprob", *({"lse", "entropy"} & subject.claims)):
            near(subject, name, getattr(out, name), want, case.V, case.dtype)


@attack("LL-11", lambda s: heads(s, plainly=True).map(small), scale=0.5)
def a_scale_is_a_scaled_hidden_state(subject: Subject, case: Head) -> None:
    """Powers of two, which round nothing."""
    given = case.given(subject)
    for s in (0.5, 2.0):
        one = subject(**{**given, "logit_scale": s}).logprob
        two = subject(**{**given, "hidden": given["hidden"] * s}).logprob
        close(subject, "logprob", one, plain(two, "logprob"), case.dtype, scale=2.0)


@attack("LL-12", lambda s: heads(s, plainly=True).map(small))
def rows_have_their_own_temperature(subject: Subject, case: Head) -> None:
    """A tensor of temperatures against the definition row by row."""
    given = case.given(subject)
    T = [TEMPERATURES[(case.seed + i) % 4] for i in range(case.N)]
    given["temperature"] = torch.tensor(T, device=subject.device)
    agree(subject, subject(**given, **options(subject)), definition({**given, "temperature": np.array(T)}), case.dtype)


@attack("LL-13", lambda s: heads(s, plainly=True).map(small), scale=0.5)
def masked_rows_may_hold_anything(subject: Subject, case: Head) -> None:
    """NaN in hidden, ids far out of range, NaN upstream: results 0, dX 0, nothing in dW."""
    case = replace(case, N=case.N + 1)
    given = case.given(subject)
    mask = torch.arange(case.N, device=subject.device) % 2 == 0
    some = {n: x[mask] if n in {"hidden", "ids"} else x for n, x in given.items()}
    want = subject(**some).logprob
    given["hidden"] = torch.where(mask[:, None], given["hidden"], torch.nan)
    given["ids"] = torch.where(mask, given["ids"], 2**40)
    call, leaves = with_leaves(given) if "grad" in subject.claims else (given, {})
    out = subject(**call, mask=mask)
    require(bool((out.logprob[~mask] == 0).all()), f"masked rows give {out.logprob[~mask].tolist()}")
    close(subject, "logprob", out.logprob[mask], plain(want, "logprob"), case.dtype)
    if not leaves:
        return
    found = gradients({"logprob": out.logprob}, {"logprob": torch.where(mask, 1.0, torch.nan)}, leaves)
    require(bool((found["hidden"][~mask] == 0).all()), "a masked row has a gradient")
    g = {"logprob": np.ones(int(mask.sum()))}
    dz = definition(some, g).grad
    expected = operand_gradients(some, dz)
    found["hidden"] = found["hidden"][mask]
    check_gradients(subject, found, expected, case.dtype, sizes(some, dz, size_of(given, g)))


@attack("LL-14", heads)
def entropy_matches_float64(subject: Subject, case: Head) -> None:
    """Entropy against the definition, within [0, log V]."""
    given = case.given(subject)
    out = subject(**given, entropy=True)
    if out.entropy is None:
        raise Violation("entropy was asked for and is None")
    agree(subject, out, definition(given), case.dtype)
    have = plain(out.entropy, "entropy")
    require(bool((have >= -1e-4).all() and (have <= np.log(case.V) + 1e-3).all()), f"entropy {have} of {case.V} tokens")


@attack("LL-15", lambda s: heads(s, plainly=True).map(small), scale=0.5)
def the_truncated_law_is_renormalized_over_the_kept(subject: Subject, case: Head) -> None:
    """Ragged kept ids; log p + log_kept_mass is the tempered log p."""
    given = case.given(subject)
    rng = np.random.default_rng(case.seed)
    kept = [sorted(rng.choice(case.V, size=rng.integers(1, case.V + 1), replace=False)) for _ in range(case.N)]
    offsets = torch.tensor([0, *np.cumsum([len(k) for k in kept])], device=subject.device)
    support = Support(torch.tensor(np.concatenate(kept), device=subject.device), offsets)
    out, want = subject(**given, support=support), definition(given, kept=kept)
    close(subject, "logprob", out.logprob, want.logprob, case.dtype, scale=2.0)
    if out.log_kept_mass is None:
        raise Violation("support was given and log_kept_mass is None")
    close(subject, "logprob", out.log_kept_mass, want.log_kept_mass, case.dtype, scale=2.0)
    tempered = plain(subject(**given).logprob, "logprob")
    close(subject, "logprob", out.logprob + out.log_kept_mass, tempered, case.dtype, scale=4.0)


@attack("LL-16", lambda s: heads(s).map(small))
def gradients_match_float64(subject: Subject, case: Head) -> None:
    """DX, dW and dbias, all results at once, each with its own upstream gradient."""
    given = case.given(subject)
    _, found, g = back(subject, given, case)
    dz = definition(given, g).grad
    check_gradients(subject, found, operand_gradients(given, dz), case.dtype, sizes(given, dz, size_of(given, g)))


@attack("LL-17", lambda s: heads(s, plainly=True, N=600, D=16, V=2100), scale=0.05)
def errors_do_not_grow_with_tiles_or_blocks(subject: Subject, case: Head) -> None:
    """Many rows and tiles; operands of 16 bits, where an accumulator of 16 bits would show."""
    for dtype in [d for d in ("bfloat16", "float16") if d in subject.dtypes] or subject.dtypes[:1]:
        one = replace(case, dtype=dtype, temperature=1.0)
        given = one.given(subject)
        call, leaves = with_leaves(given)
        g = draw.normal((one.N,), one.seed + 20, subject.device, "float32")
        found = gradients({"logprob": subject(**call).logprob}, {"logprob": g}, leaves)
        exact = {n: given[n].double() for n in ("hidden", "weight")}
        dz = -torch.softmax(exact["hidden"] @ exact["weight"].T, -1)
        dz[torch.arange(one.N, device=dz.device), given["ids"]] += 1
        want = operand_gradients(given, plain(dz * g[:, None].double(), "dz"))
        check_gradients(subject, found, want, dtype, 0.0)


@attack("LL-18", lambda s: heads(s, plainly=True, bias="bias" in s.claims).map(small), scale=0.3)
def frozen_operands_get_nothing_and_change_nothing(subject: Subject, case: Head) -> None:
    """Each operand alone, and all but one, against all."""
    given = case.given(subject)
    _, every, _ = back(subject, given, case)
    names = tuple(every)
    for frozen in [(n,) for n in names] + [tuple(m for m in names if m != n) for n in names]:
        if len(frozen) == len(names):
            continue
        _, some, g = back(subject, given, case, frozen)
        want = {n: plain(every[n], n) for n in some}
        check_gradients(subject, some, want, case.dtype, size_of(given, g))


@attack("LL-19", heads, scale=0.5)
def gradients_on_and_off_agree(subject: Subject, case: Head) -> None:
    """The same bits with and without a gradient wanted, and with one operand frozen."""
    given = case.given(subject)
    with torch.no_grad():
        off = subject(**given).logprob
    for frozen in ((), ("weight",), ("hidden",)):
        same_bits("logprob", subject(**with_leaves(given, frozen)[0]).logprob, off, "with gradients on")
