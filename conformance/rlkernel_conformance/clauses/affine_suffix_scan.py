"""Attacks on affine_suffix_scan@1."""

from __future__ import annotations

from collections.abc import Callable
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
from rlkernel_core.definitions.scan import adjoint_row, scan_row

LENGTHS = (1, 2, 3, 31, 32, 33, 64, 129, 300)
FACTORS = (1.0, 0.5, -0.75, 0.984375, 0.0)  # numbers that every dtype holds


@dataclass(frozen=True)
class Scan:
    """Maps [B, T]."""

    B: int
    T: int
    seed: int
    dtype: str = "float32"
    factor: float | None = None  # `a` as a number; None: a tensor of values within +-1
    keep: float = 0.7  # share of valid positions
    init: bool = False
    exclusive: bool = False
    carry: bool = False  # masked_out="carry"

    def arguments(self, subject: Subject) -> dict[str, Any]:
        """The call, without what the subject does not claim."""
        has, shape = subject.claims, (self.B, self.T)
        given: dict[str, Any] = {"b": draw.normal(shape, self.seed, subject.device, self.dtype)}
        given["a"] = self.factor
        if self.factor is None:
            a = draw.normal(shape, self.seed + 1, subject.device).tanh().to(given["b"].dtype)
            given["a"] = a if "a_tensor" in has else 0.9375
        if "mask" in has:
            given["mask"] = draw.integers(shape, 1000, self.seed, subject.device) < 1000 * self.keep
            if self.carry and "carry" in has:
                given["masked_out"] = "carry"
        if self.init and "init" in has:
            given["init"] = draw.normal((self.B,), self.seed + 2, subject.device, self.dtype)
        if self.exclusive and "exclusive" in has:
            given["exclusive"] = True
        return given


def expected(given: dict[str, Any], row: Callable[..., Any] = scan_row, **more: Any) -> tuple[Any, Any]:
    """The definition's y and carry for padded arguments."""
    b = plain(given["b"], "b")
    a = plain(given["a"], "a") if isinstance(given["a"], Tensor) else np.full(b.shape, given["a"])
    m = plain(given["mask"], "mask") if "mask" in given else np.ones(b.shape, bool)
    init = plain(given["init"], "init") if "init" in given else np.zeros(len(b))
    more = {"exclusive": given.get("exclusive", False), "carry": given.get("masked_out") == "carry", **more}
    rows = [row(a[i], b[i], m[i], init[i], **more) for i in range(len(b))]
    return np.array([y for y, _ in rows]).reshape(b.shape), np.array([c for _, c in rows])


def cases(subject: Subject) -> st.SearchStrategy[Scan]:
    """Every claimed dtype, length and option."""
    return st.builds(
        Scan,
        B=st.integers(1, 3),
        T=st.sampled_from(LENGTHS),
        seed=st.integers(0, 2**20),
        dtype=st.sampled_from(subject.dtypes),
        factor=st.sampled_from((None, *FACTORS)),
        keep=st.sampled_from((0.7, 1.0, 0.0)),
        init=st.booleans(),
        exclusive=st.booleans(),
        carry=st.booleans(),
    )


def plain_cases(subject: Subject) -> st.SearchStrategy[Scan]:
    """Short rows in the first claimed dtype: for laws that compare two calls."""
    return cases(subject).map(lambda c: replace(c, dtype=subject.dtypes[0], T=min(c.T, 33), keep=0.7, exclusive=False))


def size(y: Any) -> Any:
    """What the tolerance of a row is relative to: its largest value, at least 1."""
    return np.maximum(1.0, np.abs(y).max(-1, keepdims=True, initial=0.0))


def agree(subject: Subject, given: dict[str, Any], y: Tensor, want: Any, dtype: str) -> None:
    """`y` is within tolerance of `want`."""
    scale = size(np.concatenate([want, plain(given["init"], "init")[:, None]], 1)) if "init" in given else size(want)
    close(subject, "y", y, want, dtype, scale=scale)


@attack("SC-01", cases, examples=(Scan(2, 300, 5, "bfloat16", factor=1.0, keep=1.0), Scan(1, 4097, 6, factor=1.0)))
def the_recurrence_in_float64(subject: Subject, case: Scan) -> None:
    """Also the carry; bf16 may be what is loaded, never what is carried."""
    if case.dtype not in subject.dtypes:
        return
    given = case.arguments(subject)
    out, (y, carry) = subject(**given), expected(given)
    agree(subject, given, out.y, y, case.dtype)
    close(subject, "y", out.carry, carry, case.dtype, scale=size(np.c_[y, carry])[:, 0])
    wide = torch.float64 if case.dtype == "float64" else torch.float32
    require(out.y.dtype == wide, f"y of {case.dtype} is {out.y.dtype}")


@attack("SC-02", plain_cases)
def mask_lengths_and_packed_agree(subject: Subject, case: Scan) -> None:
    """The same ragged sequences in every claimed layout, one of them empty now and then."""
    given = {k: v for k, v in case.arguments(subject).items() if k not in {"mask", "masked_out"}}
    lengths = draw.integers((case.B,), case.T + 1, case.seed, subject.device)
    keep = torch.arange(case.T, device=lengths.device) < lengths[:, None]
    want, carry = expected({**given, "mask": keep})
    found = {}
    if "mask" in subject.claims:
        found["mask"] = subject(**given, mask=keep)
    if "lengths" in subject.claims:
        found["lengths"] = subject(**given, lengths=lengths)
    for layout, out in found.items():
        require(bool((out.y[~keep] == 0).all()), f"a padded position is not 0 by {layout}")
        agree(subject, given, out.y, want, case.dtype)
        close(subject, "y", out.carry, carry, case.dtype, scale=size(np.c_[want, carry])[:, 0])
    if "packed" in subject.claims:
        bounds = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        flat = {k: v[keep] if isinstance(v, Tensor) and v.dim() == 2 else v for k, v in given.items()}
        out = subject(**flat, cu_seqlens=bounds)
        scale = np.broadcast_to(size(np.c_[want, carry]), want.shape)[plain(keep, "keep")]
        close(subject, "y", out.y, want[plain(keep, "keep")], case.dtype, scale=scale)
        close(subject, "y", out.carry, carry, case.dtype, scale=size(np.c_[want, carry])[:, 0])


@attack("SC-03", plain_cases)
def dropping_masked_positions_changes_nothing(subject: Subject, case: Scan) -> None:
    """One row with holes against the row of what is left."""
    given = replace(case, B=1, carry=False).arguments(subject)
    m = given.pop("mask")[0]
    out = subject(**given, mask=m[None])
    short = {k: v[:, m] if isinstance(v, Tensor) and v.dim() == 2 else v for k, v in given.items()}
    dense = plain(subject(**short).y, "y")
    close(subject, "y", out.y[:, m], dense, case.dtype, scale=size(dense))


@attack("SC-04", plain_cases)
def masked_positions_may_hold_anything(subject: Subject, case: Scan) -> None:
    """NaN, infinities and large numbers under the mask, in a and b."""
    given = case.arguments(subject)
    mask = given["mask"]
    want = subject(**given)
    for poison in (torch.nan, torch.inf, -1e30):
        bad = {k: torch.where(mask, given[k], poison) for k in ("a", "b") if isinstance(given[k], Tensor)}
        out = subject(**{**given, **bad})
        agree(subject, given, out.y, plain(want.y, "y"), case.dtype)
        if not case.carry:
            require(bool((out.y[~mask] == 0).all()), f"a masked position of {poison} is not 0")


@attack("SC-05", plain_cases)
def a_scan_may_be_split(subject: Subject, case: Scan) -> None:
    """Right part first, its carry as the init of the left part, at a drawn position."""
    given = case.arguments(subject)
    cut = case.seed % (case.T + 1)
    whole = subject(**given)
    parts: list[Tensor] = []
    carry = given.get("init", torch.zeros(case.B, dtype=given["b"].dtype, device=subject.device))
    for part in (slice(cut, None), slice(0, cut)):
        cut_out = {k: v[:, part] if isinstance(v, Tensor) and v.dim() == 2 else v for k, v in given.items()}
        out = subject(**{**cut_out, "init": carry})
        parts.insert(0, out.y)
        carry = out.carry
    agree(subject, given, torch.cat(parts, 1), plain(whole.y, "y"), case.dtype)
    close(subject, "y", carry, plain(whole.carry, "carry"), case.dtype, scale=size(plain(whole.y, "y"))[:, 0] + 4)


@attack("SC-06", plain_cases)
def nothing_passes_a_zero(subject: Subject, case: Scan) -> None:
    """Huge numbers right of a = 0 leave what is left of it as it was."""
    given = replace(case, factor=None, carry=False).arguments(subject)
    given.pop("mask", None)
    at = case.seed % case.T
    given["a"] = given["a"].clone()
    given["a"][:, at] = 0
    want = subject(**given).y
    moved = given["b"].clone()
    moved[:, at + 1 :] = 1e4 * (1 + moved[:, at + 1 :].abs())
    y = subject(**{**given, "b": moved}).y
    close(subject, "y", y[:, : at + 1], plain(want[:, : at + 1], "y"), case.dtype)


@attack("SC-07", plain_cases)
def sequences_are_apart(subject: Subject, case: Scan) -> None:
    """A row of NaN beside others, padded and packed; and NaN outside all packed sequences."""
    given = replace(case, B=3, carry=False).arguments(subject)
    given.pop("mask", None)
    want = plain(subject(**given).y, "y")
    bad = {**given, "b": given["b"].clone()}
    bad["b"][1] = torch.nan
    rows = [0, 2]
    close(subject, "y", subject(**bad).y[rows], want[rows], case.dtype, scale=size(want[rows]))
    if "packed" in subject.claims:
        pad = torch.full((2,), torch.nan, dtype=given["b"].dtype, device=subject.device)
        flat = {
            k: torch.cat([pad, v.reshape(-1), pad]) if isinstance(v, Tensor) and v.dim() == 2 else v
            for k, v in bad.items()
        }
        bounds = 2 + case.T * torch.arange(4, device=subject.device)
        y = subject(**flat, cu_seqlens=bounds).y
        require(bool((y[:2] == 0).all() and (y[-2:] == 0).all()), "a position outside all sequences is not 0")
        close(subject, "y", y[2:-2].view(3, -1)[rows], want[rows], case.dtype, scale=size(want[rows]))


@attack("SC-08", lambda s: cases(s).map(lambda c: replace(c, T=min(c.T, 64), exclusive=False, carry=False)))
def gradients_are_the_adjoint_scan(subject: Subject, case: Scan) -> None:
    """Gradients of b, a and init for upstream gradients of y and carry; none under the mask, though it hides NaN."""
    given = case.arguments(subject)
    mask = given.get("mask")
    leaf = {k: x.clone().requires_grad_() for k, x in given.items() if isinstance(x, Tensor) and k != "mask"}
    if mask is not None:
        leaf = {
            k: torch.where(mask, x, torch.nan).detach().requires_grad_() if x.dim() == 2 else x for k, x in leaf.items()
        }
    out = subject(**{**given, **leaf})
    up = {n: draw.normal(tuple(getattr(out, n).shape), case.seed + 9, subject.device) for n in ("y", "carry")}
    up = {n: g.to(out.y.dtype) for n, g in up.items()}
    grads = torch.autograd.grad([out.y, out.carry], list(leaf.values()), [up["y"], up["carry"]], allow_unused=True)
    b = plain(given["b"], "b")
    a = plain(given["a"], "a") if isinstance(given["a"], Tensor) else np.full(b.shape, given["a"])
    m = plain(mask, "mask") if mask is not None else np.ones(b.shape, bool)
    init = plain(given["init"], "init") if "init" in given else np.zeros(case.B)
    g = {n: plain(x, n) for n, x in up.items()}
    rows = [adjoint_row(a[i], b[i], m[i], init[i], g["y"][i], g["carry"][i]) for i in range(case.B)]
    want = {n: np.array([r[k] for r in rows]) for k, n in enumerate(("b", "a", "init"))}
    for name, grad in zip(leaf, grads, strict=True):
        have = torch.zeros_like(leaf[name]) if grad is None else grad  # autograd's None: it has no influence
        most = size(want[name]) if want[name].ndim == 2 else size(np.c_[want["b"], want["init"]])[:, 0]
        close(subject, "grad", have, want[name], case.dtype, scale=most)


@attack("SC-09", plain_cases, scale=0.2)
def no_positions_give_empty_results(subject: Subject, case: Scan) -> None:
    """B = 0 and T = 0; carry is init."""
    given = case.arguments(subject)
    for part in ((slice(0, 0), slice(None)), (slice(None), slice(0, 0))):
        cut = {k: v[part[: v.dim()]] if isinstance(v, Tensor) else v for k, v in given.items()}
        out = subject(**cut)
        require(out.y.shape == cut["b"].shape, f"b of {list(cut['b'].shape)} gives y of {list(out.y.shape)}")
        init = cut.get("init", torch.zeros(cut["b"].shape[0], device=subject.device))
        same_bits("carry", out.carry, init.to(out.carry.dtype), "without positions")
    if "packed" in subject.claims:
        none = subject(given["b"][0, :0], 0.5, cu_seqlens=torch.zeros(3, dtype=torch.int64, device=subject.device))
        require(none.y.shape == (0,) and none.carry.tolist() == [0.0, 0.0], "empty packed sequences have a carry")


@attack("SC-13", plain_cases)
def a_sequence_is_the_same_in_any_batch(subject: Subject, case: Scan) -> None:
    """Alone, reversed, beside many others: the bits of a row do not move."""
    given = replace(case, B=3).arguments(subject)
    want = subject(**given)

    def taken(rows: Any) -> Any:
        return subject(**{k: v[rows] if isinstance(v, Tensor) else v for k, v in given.items()})

    back = taken([2, 1, 0])
    same_results({k: x.flip(0) for k, x in leaves(back).items()}, leaves(want), "in a reversed batch")
    alone = taken([1])
    same_results(leaves(alone), {k: x[1:2] for k, x in leaves(want).items()}, "alone")
    many = taken([0, 1, 2] * 40)
    same_results({k: x[-3:] for k, x in leaves(many).items()}, leaves(want), "at the end of a large batch")


derive("affine_suffix_scan", lambda s, c: c.arguments(s), inputs_untouched=plain_cases, determinism=cases)
derive("affine_suffix_scan", lambda s, c: replace(c, factor=None, keep=0.7).arguments(s), capture=plain_cases)
