"""Attacks on rms_norm@1."""

from __future__ import annotations

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
from rlkernel_core.definitions.rms_norm import rms_norm, rms_norm_gradients

WIDTHS = (1, 2, 3, 64, 100, 128, 1000, 1024, 1025, 2100)
OFFSETS = (0.0, 1.0, -0.5)
SIZES = {"normal": 1.0, "large": 300.0, "small": 2.0**-12}  # of the values of x


@dataclass(frozen=True)
class Norm:
    """Rows [N, D]."""

    N: int
    D: int
    seed: int
    dtype: str = "float32"
    weight: str = ""  # its dtype; "" is that of x
    residual: bool = False
    offset: float = 0.0
    eps: float = 1e-6
    size: str = "normal"

    def arguments(self, subject: Subject) -> dict[str, Any]:
        """The call, without what the subject does not claim."""
        shape, place = (self.N, self.D), subject.device
        x = draw.normal(shape, self.seed, place) * SIZES[self.size]
        weight = 1 + 0.25 * draw.normal((self.D,), self.seed + 1, place)
        dtype = getattr(torch, self.dtype)
        given: dict[str, Any] = {"x": x.to(dtype), "weight": weight.to(getattr(torch, self.weight or self.dtype))}
        given |= {"eps": self.eps, "offset": self.offset}
        if self.residual and "residual" in subject.claims:
            given["residual"] = (draw.normal(shape, self.seed + 2, place) * SIZES[self.size]).to(dtype)
        return given


def stored_sum(given: dict[str, Any]) -> Tensor:
    """What is normalized: x and the residual, added in fp32 and rounded once."""
    x, residual = given["x"], given.get("residual")
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x if residual is None else (x.detach().to(wide) + residual.detach().to(wide)).to(x.dtype)


def expected(given: dict[str, Any]) -> Any:
    """The definition's y, of the rows that are stored."""
    s, weight = plain(stored_sum(given), "s"), plain(given["weight"], "weight")
    y = rms_norm(s.reshape(-1, s.shape[-1]), weight, given["eps"], given["offset"])
    return y.reshape(s.shape)


def reach(size: Any, dtype: str) -> Any:
    """What a gradient's tolerance is relative to, beside fp16's least step of 2^-24."""
    return np.maximum(size, 2.0**-6) if dtype == "float16" else size


def cases(subject: Subject) -> st.SearchStrategy[Norm]:
    """Every claimed dtype, width and option."""
    return st.builds(
        Norm,
        N=st.integers(1, 3),
        D=st.sampled_from(WIDTHS),
        seed=st.integers(0, 2**20),
        dtype=st.sampled_from(subject.dtypes),
        weight=st.sampled_from(("", "float32")),
        residual=st.booleans(),
        offset=st.sampled_from(OFFSETS),
        eps=st.sampled_from((1e-6, 0.0, 0.5)),
        size=st.sampled_from(tuple(SIZES)),
    )


def plain_cases(subject: Subject) -> st.SearchStrategy[Norm]:
    """Narrow rows in the first claimed dtype: for laws that compare two calls."""
    return cases(subject).map(lambda c: replace(c, dtype=subject.dtypes[0], D=min(c.D, 130), size="normal"))


@attack("RN-01", cases, examples=(Norm(2, 2100, 5, "bfloat16", residual=True), Norm(1, 8193, 6)))
def the_definition_in_float64(subject: Subject, case: Norm) -> None:
    """On the rows that are stored."""
    if case.dtype not in subject.dtypes:
        return
    given = case.arguments(subject)
    out = subject(**given)
    close(subject, "y", out.y, expected(given), case.dtype)
    require(out.y.dtype == given["x"].dtype, f"y of {case.dtype} is {out.y.dtype}")
    require((out.residual is None) == ("residual" not in given), "the sum is there without a residual, or lacks")


@attack("RN-02", cases)
def one_rounding(subject: Subject, case: Norm) -> None:
    """In 16 bits each y is one of the two numbers that the ends of fp32's interval round to, or between them."""
    given = case.arguments(subject)
    y, want = plain(subject(**given).y, "y"), expected(given)
    _, rtol = subject.tolerance("y", "float64" if case.dtype == "float64" else "float32")
    ends = [plain(torch.from_numpy(np.asarray(want * (1 + way * rtol))).to(given["x"].dtype), "y") for way in (-1, 1)]
    low, high = np.minimum(*ends), np.maximum(*ends)
    outside = int(((y < low) | (y > high)).sum())
    require(outside == 0, f"{outside} of {y.size} results are rounded more than once")


@attack("RN-03", cases)
def the_residual_is_added_and_stored_first(subject: Subject, case: Norm) -> None:
    """The sum's bits, and those of y from the sum alone."""
    given = replace(case, residual=True).arguments(subject)
    out, s = subject(**given), stored_sum(given)
    same_bits("residual", out.residual, s, "beside an fp32 addition that is rounded once")
    alone = subject(**{**given, "x": s.clone(), "residual": None})
    same_bits("y", alone.y, out.y, "from the stored sum")


@attack("RN-04", plain_cases)
def the_offset_is_added_to_the_weight_in_fp32(subject: Subject, case: Norm) -> None:
    """An offset beside the same number in the weight."""
    wide = "float64" if case.dtype == "float64" else "float32"
    given = replace(case, weight=wide).arguments(subject)
    for offset in (1.0, 0.3):
        whole = subject(**{**given, "weight": given["weight"] + offset, "offset": 0.0})
        same_bits("y", subject(**{**given, "offset": offset}).y, whole.y, f"with offset = {offset}")


@attack("RN-05", plain_cases)
def rows_are_apart(subject: Subject, case: Norm) -> None:
    """A row of NaN, and one of infinities, between others."""
    given = replace(case, N=4).arguments(subject)
    want = plain(subject(**given).y, "y")
    bad = given["x"].clone()
    bad[1], bad[2] = torch.nan, torch.inf
    close(subject, "y", subject(**{**given, "x": bad}).y[[0, 3]], want[[0, 3]], case.dtype)


@attack("RN-06", lambda s: cases(s).map(lambda c: replace(c, size="normal")))
def gradients_match_float64(subject: Subject, case: Norm) -> None:
    """Of x, weight and residual, for upstream gradients of y and of the sum."""
    given = case.arguments(subject)
    leaf = {n: x.requires_grad_() for n, x in given.items() if isinstance(x, Tensor)}
    out = subject(**given)
    results = {n: x for n in ("y", "residual") if (x := getattr(out, n)) is not None}
    up = {n: draw.normal((case.N, case.D), case.seed + 9 + i, subject.device) for i, n in enumerate(results)}
    up = {n: g.to(given["x"].dtype) for n, g in up.items()}
    grads = torch.autograd.grad(list(results.values()), list(leaf.values()), list(up.values()))
    s, weight = plain(stored_sum(given), "s"), plain(given["weight"], "weight")
    d_s, size_s, d_w, size_w = rms_norm_gradients(s, weight, case.eps, case.offset, plain(up["y"], "y"))
    if "residual" in up:
        d_s, size_s = d_s + plain(up["residual"], "g"), size_s + np.abs(plain(up["residual"], "g"))
    for name, grad in zip(leaf, grads, strict=True):
        want, size = (d_w, size_w) if name == "weight" else (d_s, size_s)
        kind = str(given[name].dtype).removeprefix("torch.")
        close(subject, "grad", grad, want, kind, scale=reach(size, kind), name=f"gradient of {name}")
        require(grad.dtype == given[name].dtype, f"the gradient of {name} is {grad.dtype}")


@attack("RN-07", plain_cases, scale=0.2)
def no_rows_give_empty_results(subject: Subject, case: Norm) -> None:
    """Also in more dimensions; the weight's gradient is 0."""
    for rows in ((0,), (2, 0)):
        given = case.arguments(subject)
        given = {n: x[0].expand(*rows, case.D) if n in {"x", "residual"} else x for n, x in given.items()}
        weight = given["weight"].requires_grad_("grad" in subject.claims)
        y = subject(**given).y
        require(y.shape == given["x"].shape, f"x of {list(given['x'].shape)} gives y of {list(y.shape)}")
        if y.requires_grad:
            (grad,) = torch.autograd.grad(y.sum(), weight)
            same_bits("gradient of weight", grad, torch.zeros_like(weight), "without rows")


@attack("RN-11", cases)
def a_row_is_the_same_in_any_batch(subject: Subject, case: Norm) -> None:
    """Alone, reversed, beside many others: the bits of a row and of its gradient do not move."""
    given = replace(case, N=3).arguments(subject)

    def taken(rows: list[int]) -> dict[str, Tensor]:
        some = {n: x[rows] if n in {"x", "residual"} else x for n, x in given.items()}
        if "grad" not in subject.claims:
            return leaves(subject(**some))
        x = some["x"].clone().requires_grad_()
        out = subject(**{**some, "x": x})
        (grad,) = torch.autograd.grad(out.y, x, torch.ones_like(out.y))
        return {n: r.detach() for n, r in leaves(out).items()} | {"d_x": grad}

    want = taken([0, 1, 2])
    same_results({n: x.flip(0) for n, x in taken([2, 1, 0]).items()}, want, "in a reversed batch")
    same_results(taken([1]), {n: x[1:2] for n, x in want.items()}, "alone")
    same_results({n: x[-3:] for n, x in taken([0, 1, 2] * 40).items()}, want, "at the end of a large batch")


derive(
    "rms_norm",
    lambda s, c: c.arguments(s),
    inputs_untouched=plain_cases,
    determinism=lambda s: cases(s).map(lambda c: replace(c, N=70, D=min(c.D, 130))),
    capture=plain_cases,
)
