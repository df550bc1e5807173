"""Attacks on route@1."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from rlkernel_conformance import draw
from rlkernel_conformance.attack import attack
from rlkernel_conformance.call_checks import leaves, same_results
from rlkernel_conformance.clauses.derived_attacks import derive
from rlkernel_conformance.compare import plain, require, same_bits, within
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions import route as definition
from rlkernel_core.spec.qmatmul import UNITS, smallest_error

EXPERTS: Final = (1, 2, 7, 8, 64, 130)
BATCHES: Final = (2, 15, 16, 17, 64, 65, 257)
SCALES: Final = {"normal": 1.0, "large": 30.0, "ties": 1.0, "equal": 0.0}
SPECIAL: Final = (torch.nan, torch.inf, -torch.inf)


@dataclass(frozen=True)
class Tokens:
    """Logits [T, E]; of `ties` each is one of three numbers."""

    T: int
    E: int
    k: int
    seed: int
    dtype: str = "float32"
    values: str = "normal"
    replayed: bool = False  # drawn ids, the same twice and no expert among them
    renormalize: bool = False

    def arguments(self, subject: Subject) -> dict[str, Any]:
        """The call, without what the subject does not claim."""
        x = draw.normal((self.T, self.E), self.seed, subject.device) * SCALES[self.values]
        x = x.round().clamp(-1, 1) if self.values == "ties" else x
        given: dict[str, Any] = {"logits": x.to(getattr(torch, self.dtype)), "top_k": min(self.k, self.E)}
        if self.replayed and "replay" in subject.claims:
            ids = draw.integers((self.T, given["top_k"]), self.E + 2, self.seed + 1, subject.device)
            given["replay"] = ids - 1
        if self.renormalize and "renormalize" in subject.claims:
            given["renormalize"] = True
        return given


def expected_gates(given: dict[str, Any], ids: Any) -> Any:
    """The definition's gates of these ids."""
    return definition.gates(plain(given["logits"], "logits"), ids, renormalize=given.get("renormalize", False))


def expected_gradient(given: dict[str, Any], ids: Any, g: Any) -> tuple[Any, Any]:
    """The definition's gradient, and the sizes of the terms of each token [T, 1]."""
    logits = plain(given["logits"], "logits")
    want, size = definition.gates_gradient(logits, ids, g, renormalize=given.get("renormalize", False))
    return want, size[:, None]


def allowed_gradient(subject: Subject, dtype: str, want: Any, size: Any) -> Any:
    """How far a gradient may be from the definition; near 0, what rounding to the dtype may change."""
    atol, rtol = subject.tolerance("grad", dtype)
    return atol * size + rtol * np.abs(want) + smallest_error(UNITS[dtype])


def judged(subject: Subject, given: dict[str, Any]) -> Any:
    """The result of a call, whose gates are within tolerance of the definition at the ids of the result."""
    out = subject(**given)
    want = expected_gates(given, plain(out.ids, "ids"))
    atol, rtol = subject.tolerance("gates", str(given["logits"].dtype).removeprefix("torch."))
    within(subject, "gates", out.gates, want, atol + rtol * np.abs(want))
    wide = torch.float64 if given["logits"].dtype == torch.float64 else torch.float32
    require(out.gates.dtype == wide, f"gates of {given['logits'].dtype} are {out.gates.dtype}")
    return out


def cases(subject: Subject) -> st.SearchStrategy[Tokens]:
    """Every claimed dtype, size and option."""
    return st.builds(
        Tokens,
        T=st.sampled_from((1, 2, 3, 17, 70)),
        E=st.sampled_from(EXPERTS),
        k=st.sampled_from((1, 2, 3, 8)),
        seed=st.integers(0, 2**20),
        dtype=st.sampled_from(subject.dtypes),
        values=st.sampled_from(tuple(SCALES)),
        replayed=st.booleans(),
        renormalize=st.booleans(),
    )


def plain_cases(subject: Subject) -> st.SearchStrategy[Tokens]:
    """A few tokens of the first claimed dtype, whose experts are chosen: for laws that compare two calls."""
    return cases(subject).map(
        lambda c: replace(c, dtype=subject.dtypes[0], T=max(2, min(c.T, 3)), replayed=False, values="normal")
    )


@attack("RT-01", cases, examples=(Tokens(3, 384, 8, 1, "bfloat16"), Tokens(2, 128, 8, 2, "float32", "large")))
def gates_match_float64(subject: Subject, case: Tokens) -> None:
    """At the ids of the result, chosen or replayed."""
    if case.dtype in subject.dtypes:
        judged(subject, case.arguments(subject))


@attack("RT-02", lambda s: cases(s).map(lambda c: replace(c, replayed=False)))
def the_best_are_chosen(subject: Subject, case: Tokens) -> None:
    """Of logits that tie, too, and that differ by less than their probabilities show."""
    given = case.arguments(subject)
    logits = given["logits"]
    near = torch.nextafter(logits, torch.full_like(logits, torch.inf))
    close = torch.where(torch.arange(case.E, device=logits.device) % 2 == 0, logits[:, :1], near[:, :1]) - 60 * (
        torch.arange(case.E, device=logits.device) == case.E - 1
    ).to(logits.dtype)
    for x in (logits, close):
        out = subject(**given | {"logits": x})
        want = definition.best(plain(x, "logits"), given["top_k"])
        require(out.ids.dtype == torch.int64, f"ids are {out.ids.dtype}")
        require(np.array_equal(plain(out.ids, "ids"), want), f"ids are {out.ids.tolist()}, expected {want.tolist()}")


@attack("RT-03", lambda s: plain_cases(s).map(lambda c: replace(c, renormalize=True)))
def renormalized_gates_are_of_the_chosen(subject: Subject, case: Tokens) -> None:
    """They sum to 1; other logits, and what a softmax over all would make 0, do not matter."""
    given = case.arguments(subject)
    out = judged(subject, given)
    off = (out.gates.sum(1) - 1).abs().max()
    require(bool(off < 1e-5), f"gates of a token sum to 1 but for {float(off)}")
    chosen = torch.zeros_like(given["logits"], dtype=torch.bool).scatter_(1, out.ids, True)
    lower = torch.where(chosen, given["logits"], given["logits"].amin() - 1)
    same_results(subject(**given | {"logits": lower}), out, "where other logits are lower")
    if "replay" in subject.claims and given["top_k"] < case.E:
        far = torch.where(chosen, given["logits"] - 300, given["logits"])
        judged(subject, given | {"logits": far, "replay": out.ids})


@attack("RT-04", lambda s: cases(s).map(lambda c: replace(c, replayed=False)))
def replay_gives_the_bits_of_the_call(subject: Subject, case: Tokens) -> None:
    """Its own ids; other logits with the same ids; ids in another order, of another dtype, and twice the same."""
    given = case.arguments(subject)
    out = subject(**given)
    same_results(subject(**given, replay=out.ids), out, "with its own ids")
    other = given | {"logits": given["logits"].flip(0), "replay": out.ids.int()}
    same_bits("ids", judged(subject, other).ids, out.ids, "beside those replayed")
    turned = subject(**given, replay=out.ids.flip(1))
    same_bits("ids", turned.ids, out.ids.flip(1), "beside those replayed")
    judged(subject, given | {"replay": out.ids[:, :1].expand_as(out.ids)})


@attack("RT-05", lambda s: cases(s).map(lambda c: replace(c, replayed=False)))
def an_id_that_is_no_expert_counts_for_nothing(subject: Subject, case: Tokens) -> None:
    """One of a token, and all of one; -1 gives 0, other ids show by NaN."""
    given = case.arguments(subject)
    ids = subject(**given).ids.clone()
    for bad in (-1, case.E, -(2**40), 2**40):
        replayed = ids.clone()
        replayed[0] = bad
        replayed[-1, -1] = bad
        logits = given["logits"].clone()
        logits[0] = torch.nan if case.T > 1 else logits[0]
        leaf = logits.requires_grad_("grad" in subject.claims)
        out = subject(**given | {"logits": leaf, "replay": replayed})
        none = replayed == bad
        shown = out.gates[none] == 0 if bad == -1 else out.gates[none].isnan()
        require(bool(shown.all()), f"ids of {bad} have gates of {out.gates[none].tolist()}")
        kept = {"logits": given["logits"], **{n: x for n, x in given.items() if n not in {"logits", "replay"}}}
        want = expected_gates(kept, plain(replayed, "ids"))
        atol, rtol = subject.tolerance("gates", case.dtype)
        within(subject, "gates", out.gates[1:].detach(), want[1:], atol + rtol * np.abs(want[1:]))
        count = int((~none).sum())
        require(int(out.ends[-1]) == count, f"{count} pairs of experts end at {int(out.ends[-1])}")
        require(bool(none.flatten()[out.order[count:]].all()), "a pair of an expert stands behind the last end")
        if out.gates.requires_grad:
            (grad,) = torch.autograd.grad(out.gates.nansum(), leaf)
            require(bool((grad[0] == 0).all()), f"a token of no expert has the gradient {grad[0].tolist()}")
            require(bool(grad.isfinite().all()), "a gradient is poisoned by a token of no expert")


@attack("RT-06", cases)
def the_order_has_each_pair_once(subject: Subject, case: Tokens) -> None:
    """By expert, then by number."""
    out = subject(**case.arguments(subject))
    want, ends = definition.order(plain(out.ids, "ids"), case.E)
    require((out.order.dtype, out.ends.dtype) == (torch.int64, torch.int32), "order is int64, and ends are int32")
    require(np.array_equal(plain(out.order, "order"), want), f"order is {out.order.tolist()}, not {want.tolist()}")
    require(np.array_equal(plain(out.ends, "ends"), ends), f"ends are {out.ends.tolist()}, not {ends.tolist()}")


@attack("RT-07", plain_cases)
def rows_are_apart(subject: Subject, case: Tokens) -> None:
    """A row of NaN, of infinities, and single ones: gates of NaN there, and distinct experts."""
    given = case.arguments(subject)
    want, others = subject(**given), [0, *range(2, case.T)]
    for value in SPECIAL:
        for columns in (slice(None), case.seed % case.E):
            x = given["logits"].clone()
            x[1, columns] = value
            out = subject(**given | {"logits": x})
            for name in ("ids", "gates"):
                same_bits(name, getattr(out, name)[others], getattr(want, name)[others], f"beside a row with {value}")
            ids = out.ids[1].tolist()
            require(len({*ids} & {*range(case.E)}) == len(ids), f"a row with {value} has the ids {ids}")
            poisoned = bool(x[1].isneginf().all()) or bool((x[1].isnan() | x[1].isposinf()).any())
            if poisoned and not case.renormalize:
                require(bool(out.gates[1].isnan().all()), f"a row with {value} has the gates {out.gates[1].tolist()}")


@attack("RT-08", plain_cases)
def extreme_logits_give_finite_gates(subject: Subject, case: Tokens) -> None:
    """The largest numbers of the dtype, of either sign; -inf in all but one place."""
    given = case.arguments(subject)
    largest = torch.finfo(given["logits"].dtype).max / 2
    for x in (given["logits"].sign() * largest, given["logits"] * 0 - largest, given["logits"] * 1e3):
        leaf = x.detach().requires_grad_("grad" in subject.claims)
        out = judged(subject, given | {"logits": leaf})
        if out.gates.requires_grad:
            (grad,) = torch.autograd.grad(out.gates[:, 0].sum(), leaf)
            require(bool(grad.isfinite().all()), "a gradient of finite logits is not finite")
    alone = torch.full_like(given["logits"], -torch.inf)
    alone[:, case.seed % case.E] = 1.0
    out = subject(**given | {"logits": alone})
    want = torch.zeros_like(out.gates)
    want[:, 0] = 1.0
    same_bits("gates", out.gates, want, "where one logit is finite")
    require(bool((out.ids[:, 0] == case.seed % case.E).all()), "the only finite logit is not the best")


@attack("RT-09", cases)
def the_gradient_matches_float64(subject: Subject, case: Tokens) -> None:
    """Of logits, through both softmaxes, also where an id stands twice."""
    given = case.arguments(subject)
    leaf = given["logits"].requires_grad_()
    out = subject(**given)
    g = draw.normal(tuple(out.gates.shape), case.seed + 9, subject.device).to(out.gates.dtype)
    (found,) = torch.autograd.grad(out.gates, leaf, g)
    want, size = expected_gradient(given, plain(out.ids, "ids"), plain(g, "g"))
    within(subject, "grad", found, want, allowed_gradient(subject, case.dtype, want, size))
    require(found.dtype == leaf.dtype, f"the gradient of {leaf.dtype} is {found.dtype}")


@attack("RT-10", plain_cases, scale=0.2)
def no_tokens_give_empty_results(subject: Subject, case: Tokens) -> None:
    """Ends of 0."""
    given = replace(case, T=0).arguments(subject)
    out = subject(**given)
    shapes = tuple(out.ids.shape), tuple(out.gates.shape), tuple(out.order.shape)
    require(shapes == ((0, given["top_k"]), (0, given["top_k"]), (0,)), f"no tokens give results of {shapes}")
    same_bits("ends", out.ends, torch.zeros(case.E, dtype=torch.int32, device=out.ends.device), "without tokens")


@attack("RT-14", cases)
def a_token_is_the_same_in_any_batch(subject: Subject, case: Tokens) -> None:
    """Alone, reversed and among others: ids, gates and gradient of a row stay."""
    given = replace(case, T=3).arguments(subject)
    up = draw.normal((3, given["top_k"]), case.seed + 9, subject.device)

    def taken(rows: list[int]) -> dict[str, Tensor]:
        some = {n: x[rows] if isinstance(x, Tensor) else x for n, x in given.items()}
        leaf = some["logits"].clone().requires_grad_("grad" in subject.claims)
        out = subject(**{**some, "logits": leaf})
        found = {n: x.detach() for n, x in leaves(out).items() if n in {"ids", "gates"}}
        if out.gates.requires_grad:
            found["d_logits"] = torch.autograd.grad(out.gates, leaf, up[rows].to(out.gates.dtype))[0]
        return found

    want = taken([0, 1, 2])
    same_results({n: x.flip(0) for n, x in taken([2, 1, 0]).items()}, want, "in a reversed batch")
    for row in range(3):
        same_results(taken([row]), {n: x[row : row + 1] for n, x in want.items()}, "alone")
    for M in BATCHES:
        rows = [i % 3 for i in range(M)]
        same_results(taken(rows), {n: x[rows] for n, x in want.items()}, f"in a batch of {M}")


derive(
    "route",
    lambda s, c: c.arguments(s),
    inputs_untouched=cases,
    determinism=cases,
    capture=plain_cases,
)
