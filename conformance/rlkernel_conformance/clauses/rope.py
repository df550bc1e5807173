"""Attacks on rope@1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from rlkernel_conformance import draw
from rlkernel_conformance.attack import attack
from rlkernel_conformance.call_checks import leaves, same_results
from rlkernel_conformance.clauses.derived_attacks import derive
from rlkernel_conformance.compare import close, plain, require, same_bits
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions.rope import rope, rope_gradients

WIDTHS = ((2, 2), (4, 3), (6, 4), (64, 64), (128, 128), (128, 32), (100, 98), (1030, 1026))  # of a head, of the table
OFFSETS = (0.0, 1.0, -0.5)
SIZES = {"normal": 1.0, "large": 300.0, "small": 2.0**-12}  # of the values of q and k
POSITIONS = 40
TOKENS = ("q", "k", "positions")  # arguments with a row a token


@dataclass(frozen=True)
class Rope:
    """Tokens [N] of heads [heads of q, heads of k] of a width."""

    N: int
    D: int
    R: int
    seed: int
    heads: tuple[int, int] = (2, 1)
    dtype: str = "float32"
    weights: tuple[str, ...] = ()  # "q", "k": those whose heads are normalized
    weight: str = ""  # dtype of the weights; "" is that of q
    interleaved: bool = False
    offset: float = 0.0
    eps: float = 1e-6
    size: str = "normal"

    def arguments(self, subject: Subject) -> dict[str, Any]:
        """The call, without what the subject does not claim."""
        place, dtype, R = subject.device, getattr(torch, self.dtype), self.R - self.R % 2
        given: dict[str, Any] = {
            name: (draw.normal((self.N, heads, self.D), self.seed + i, place) * SIZES[self.size]).to(dtype)
            for i, (name, heads) in enumerate(zip("qk", self.heads, strict=True))
        }
        given["positions"] = draw.integers((self.N,), POSITIONS, self.seed, place)
        given["table"] = draw.normal((POSITIONS, R), self.seed + 3, place, "float32")  # of any numbers: it is data
        given["interleaved"] = self.interleaved and "interleaved" in subject.claims
        if self.weights and "norm" in subject.claims:
            kind = getattr(torch, self.weight or self.dtype)
            for i, name in enumerate(self.weights):
                weight = 1 + 0.25 * draw.normal((self.D,), self.seed + 4 + i, place)
                given[f"{name}_weight"] = weight.to(kind)
            given |= {"eps": self.eps, "offset": self.offset}
        return given


def expected(given: Mapping[str, Any], name: str) -> tuple[Any, Any]:
    """The definition's q or k of a call, and the sizes of the terms of each number."""
    x, positions, table = (plain(given[n], n) for n in (name, "positions", "table"))
    y, size = rope(x.reshape(-1, *x.shape[-2:]), positions.reshape(-1), table, *_options(given, name))
    return y.reshape(x.shape), size.reshape(x.shape)


def expected_gradients(given: Mapping[str, Any], name: str, g: Any) -> tuple[Any, Any, Any, Any]:
    """Those of q or k and of its weight, each with the sizes of its terms, for an upstream gradient."""
    x, positions, table = (plain(given[n], n) for n in (name, "positions", "table"))
    flat = (-1, *x.shape[-2:])
    d_x, size, d_w, size_w = rope_gradients(
        x.reshape(flat), positions.reshape(-1), table, *_options(given, name), np.asarray(g).reshape(flat)
    )
    return d_x.reshape(x.shape), size.reshape(x.shape), d_w, size_w


def _options(given: Mapping[str, Any], name: str) -> tuple[Any, ...]:
    weight = given.get(f"{name}_weight")
    weight = None if weight is None else plain(weight, "weight")
    return given.get("interleaved", False), weight, given.get("eps"), given.get("offset", 0.0)


def reach(size: Any, dtype: str) -> Any:
    """What a tolerance is relative to, beside fp16's least step of 2^-24."""
    return np.maximum(size, 2.0**-6) if dtype == "float16" else size


def cases(subject: Subject) -> st.SearchStrategy[Rope]:
    """Every claimed dtype, width and option."""
    return st.builds(
        lambda widths, **more: Rope(D=widths[0], R=widths[1], **more),
        widths=st.sampled_from(WIDTHS),
        N=st.integers(1, 3),
        heads=st.sampled_from(((2, 1), (1, 1), (3, 2), (1, 4))),
        seed=st.integers(0, 2**20),
        dtype=st.sampled_from(subject.dtypes),
        weights=st.sampled_from((("q", "k"), (), ("q",), ("k",))),
        weight=st.sampled_from(("", "float32")),
        interleaved=st.booleans(),
        offset=st.sampled_from(OFFSETS),
        eps=st.sampled_from((1e-6, 0.0, 0.5)),
        size=st.sampled_from(tuple(SIZES)),
    )


def plain_cases(subject: Subject) -> st.SearchStrategy[Rope]:
    """Narrow heads in the first claimed dtype: for laws that compare two calls."""
    narrow = cases(subject).filter(lambda c: c.D <= 128)
    return narrow.map(lambda c: replace(c, dtype=subject.dtypes[0], size="normal"))


@attack("RO-01", cases, examples=(Rope(2, 128, 128, 5, (4, 2), "bfloat16", ("q", "k")), Rope(1, 256, 64, 6)))
def the_definition_in_float64(subject: Subject, case: Rope) -> None:
    """Both results."""
    if case.dtype not in subject.dtypes:
        return
    given = case.arguments(subject)
    out = subject(**given)
    for name in "qk":
        y, (want, size) = getattr(out, name), expected(given, name)
        close(subject, "y", y, want, case.dtype, scale=reach(size, case.dtype), name=name)
        require(y.dtype == given["q"].dtype, f"{name} of {case.dtype} is {y.dtype}")


@attack("RO-02", cases)
def one_rounding(subject: Subject, case: Rope) -> None:
    """In 16 bits each number is one of the two that the ends of fp32's interval round to, or between them."""
    given = case.arguments(subject)
    out = subject(**given)
    atol, rtol = subject.tolerance("y", "float64" if case.dtype == "float64" else "float32")
    for name in "qk":
        y, (want, size) = plain(getattr(out, name), name), expected(given, name)
        room = atol * size + rtol * np.abs(want)
        ends = [plain(torch.from_numpy(want + way * room).to(given["q"].dtype), "y") for way in (-1, 1)]
        outside = int(((y < np.minimum(*ends)) | (y > np.maximum(*ends))).sum())
        require(outside == 0, f"{outside} of {y.size} numbers of {name} are rounded more than once")


@attack("RO-03", plain_cases)
def queries_and_keys_are_treated_alike(subject: Subject, case: Rope) -> None:
    """One for the other."""
    given = case.arguments(subject)
    other = {"q": "k", "k": "q", "q_weight": "k_weight", "k_weight": "q_weight"}
    out, swapped = subject(**given), subject(**{other.get(n, n): x for n, x in given.items()})
    same_bits("k", swapped.k, out.q, "in place of q")
    same_bits("q", swapped.q, out.k, "in place of k")


@attack("RO-04", plain_cases)
def columns_beyond_the_table_are_not_rotated(subject: Subject, case: Rope) -> None:
    """Beside a call whose angles are 0."""
    given = replace(case, D=max(case.D, case.R + 2)).arguments(subject)
    R = given["table"].shape[1]
    flat = torch.zeros_like(given["table"])
    flat[:, : R // 2] = 1
    out, still = subject(**given), subject(**{**given, "table": flat})
    for name in "qk":
        rest = getattr(out, name)[..., R:]
        same_bits(name, rest, getattr(still, name)[..., R:], "beyond the table's width, with angles of 0")
        if f"{name}_weight" not in given:
            same_bits(name, rest, given[name][..., R:], "beyond the table's width")


@attack("RO-05", plain_cases)
def pairs_are_halves_in_another_order(subject: Subject, case: Rope) -> None:
    """Without weights, whose sums over columns would have another order."""
    given = replace(case, weights=(), interleaved=False).arguments(subject)
    R, D = given["table"].shape[1], case.D
    order = [*range(0, R, 2), *range(1, R, 2), *range(R, D)]  # halves are made of pairs
    halves = subject(**{**given, **{n: given[n][..., order] for n in "qk"}})
    pairs = subject(**{**given, "interleaved": True})
    for name in "qk":
        same_bits(name, getattr(pairs, name)[..., order], getattr(halves, name), "as halves")


@attack("RO-06", plain_cases)
def the_offset_is_added_to_the_weight_in_fp32(subject: Subject, case: Rope) -> None:
    """An offset beside the same number in the weights."""
    wide = "float64" if case.dtype == "float64" else "float32"
    given = replace(case, weight=wide, weights=case.weights or ("q", "k"), offset=0.0).arguments(subject)
    for offset in (1.0, 0.3):
        whole = {n: x + offset if n.endswith("weight") else x for n, x in given.items()}
        same_results(subject(**{**given, "offset": offset}), subject(**whole), f"with offset = {offset}")


@attack("RO-07", plain_cases)
def a_position_beyond_the_table_is_nan(subject: Subject, case: Rope) -> None:
    """Just beyond, far beyond and before it; what other tokens get, and the gradients of weights, stays."""
    given = replace(case, N=3).arguments(subject)
    want = _with_gradients(subject, given)
    for beyond in (POSITIONS, -1, 2**31 + 1):
        bad = given["positions"].clone()
        bad[1] = beyond
        found = _with_gradients(subject, {**given, "positions": bad})
        for name in "qk":
            require(bool(found[name][1].isnan().all()), f"{name} at position {beyond} of {POSITIONS} is a number")
            same_bits(name, found[name][[0, 2]], want[name][[0, 2]], f"beside a position {beyond}")
            if f"d_{name}" in found:
                d = found[f"d_{name}"]
                require(not d[1].any(), f"the gradient of {name} at position {beyond} is not 0")
                same_bits(f"d_{name}", d[[0, 2]], want[f"d_{name}"][[0, 2]], f"beside a position {beyond}")
        for name in (n for n in found if n.endswith("weight")):
            g = torch.ones(given["q"].shape[0], dtype=torch.float64)[:, None, None]
            kept = {**given, "positions": bad}
            _, _, d_w, size = expected_gradients(kept, name[2], np.broadcast_to(g, given[name[2]].shape))
            kind = str(given[name[2:]].dtype).removeprefix("torch.")
            close(subject, "grad", found[name], d_w, kind, scale=reach(size, kind), name=f"gradient of {name[2:]}")


def _with_gradients(subject: Subject, given: Mapping[str, Any]) -> dict[str, Tensor]:
    """Results by name, and where claimed the gradients of their sum."""
    if "grad" not in subject.claims:
        return leaves(subject(**given))
    wanted = {n: given[n].clone().requires_grad_() for n in ("q", "k", "q_weight", "k_weight") if n in given}
    out = leaves(subject(**{**given, **wanted}))
    ones = [torch.ones_like(x) for x in out.values()]
    grads = torch.autograd.grad(list(out.values()), list(wanted.values()), ones)
    return {n: x.detach() for n, x in out.items()} | {f"d_{n}": g for n, g in zip(wanted, grads, strict=True)}


@attack("RO-08", plain_cases)
def heads_are_apart(subject: Subject, case: Rope) -> None:
    """A head of NaN, and one of infinities, among others."""
    given = replace(case, N=3, heads=(3, 2)).arguments(subject)
    want = leaves(subject(**given))
    bad = {n: given[n].clone() for n in "qk"}
    bad["q"][0, 1], bad["k"][2, 0] = torch.nan, torch.inf
    found = leaves(subject(**{**given, **bad}))
    for name, token, head in (("q", 0, 1), ("k", 2, 0)):
        mixed = found[name].clone()
        mixed[token, head] = want[name][token, head]
        same_bits(name, mixed, want[name], "beside a head that is not finite")


@attack("RO-09", lambda s: cases(s).map(lambda c: replace(c, size="normal")))
def gradients_match_float64(subject: Subject, case: Rope) -> None:
    """Of q, k and the weights."""
    given = case.arguments(subject)
    leaf = {n: given[n].requires_grad_() for n in ("q", "k", "q_weight", "k_weight") if n in given}
    out = leaves(subject(**given))
    up = {n: draw.normal(x.shape, case.seed + 9 + i, subject.device) for i, (n, x) in enumerate(out.items())}
    up = {n: g.to(given["q"].dtype) for n, g in up.items()}
    grads = torch.autograd.grad(list(out.values()), list(leaf.values()), [up[n] for n in out])
    found = dict(zip(leaf, grads, strict=True))
    for name in "qk":
        d_x, size, d_w, size_w = expected_gradients(given, name, plain(up[name], "g"))
        for of, want, terms in ((name, d_x, size), (f"{name}_weight", d_w, size_w)):
            if of in found:
                kind = str(given[of].dtype).removeprefix("torch.")
                close(subject, "grad", found[of], want, kind, scale=reach(terms, kind), name=f"gradient of {of}")
                require(found[of].dtype == given[of].dtype, f"the gradient of {of} is {found[of].dtype}")


@attack("RO-10", plain_cases, scale=0.2)
def no_tokens_give_empty_results(subject: Subject, case: Rope) -> None:
    """Also in more dimensions; the weights' gradients are 0."""
    for tokens in ((0,), (2, 0)):
        given = case.arguments(subject)
        given = {n: x[0].expand(*tokens, *x.shape[1:]) if n in TOKENS else x for n, x in given.items()}
        for name, x in _with_gradients(subject, given).items():
            like = given[name.removeprefix("d_")]
            require(x.shape == like.shape, f"{name} is {list(x.shape)}, not {list(like.shape)}")
            same_bits(name, x, torch.zeros_like(like), "without tokens")


@attack("RO-14", cases)
def a_head_is_the_same_in_any_batch(subject: Subject, case: Rope) -> None:
    """Alone, reversed, beside many others, without the other heads: the bits of it and of its gradient do not move."""
    given = replace(case, N=3).arguments(subject)

    def taken(tokens: list[int], heads: slice = slice(None)) -> dict[str, Tensor]:
        some = {n: x[tokens] if n in TOKENS else x for n, x in given.items()}
        found = _with_gradients(subject, {**some, "q": some["q"][:, heads]})
        return {n: x for n, x in found.items() if not n.endswith("weight")}

    want = taken([0, 1, 2])
    same_results({n: x.flip(0) for n, x in taken([2, 1, 0]).items()}, want, "in a reversed batch")
    same_results(taken([1]), {n: x[1:2] for n, x in want.items()}, "alone")
    same_results({n: x[-3:] for n, x in taken([0, 1, 2] * 40).items()}, want, "at the end of a large batch")
    last = {n: x[:, -1:] if n.endswith("q") else x for n, x in want.items()}
    same_results(taken([0, 1, 2], slice(-1, None)), last, "without the other heads")


derive(
    "rope",
    lambda s, c: c.arguments(s),
    inputs_untouched=plain_cases,
    determinism=lambda s: cases(s).map(lambda c: replace(c, N=35, D=min(c.D, 130), R=min(c.R, 130))),
    capture=plain_cases,
)
