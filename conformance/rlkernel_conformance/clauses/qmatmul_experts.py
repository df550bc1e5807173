"""Attacks on the grouped product of qmatmul@1: rows of x by expert, each with the rows of its own.

The cases and the judge serve groups of rows in general: those of adapters as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from hypothesis import strategies as st
from torch import Tensor

from rlkernel_conformance.attack import attack
from rlkernel_conformance.compare import require, same_bits, within
from rlkernel_conformance.qmatmul_calls import Product, activations, pinned
from rlkernel_conformance.quantized_weights import MULTIPLIED, kinds
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions import qmatmul as oracle
from rlkernel_core.quant import QuantTensor
from rlkernel_core.spec.qmatmul import LoRA

# Rows of each expert, and of none after them.
SIZES: Final = ((3, 2), (0, 4, 1), (5, 0, 0, 2), (1, 1, 1, 1), (0, 0, 3), (2, 0), (7,), (0, 0))


@dataclass(frozen=True)
class Groups:
    """A product [M, K] of rows in groups, in order: of experts, or of adapters over one weight."""

    product: Product  # `product.N` rows of w meet each row of x
    sizes: tuple[int, ...]
    rest: int  # rows of no group
    experts: bool = True  # groups have rows of w of their own

    @property
    def count(self) -> int:
        """How many groups there are."""
        return len(self.sizes)

    @property
    def whole(self) -> Product:
        """With all rows of x and of w."""
        rows = self.product.N * (self.count if self.experts else 1)
        return replace(self.product, M=sum(self.sizes) + self.rest, N=rows)

    def ends(self, subject: Subject) -> Tensor:
        """Where the rows of each group end."""
        return torch.tensor(self.sizes, device=subject.device).cumsum(0).int()

    def named_ends(self, subject: Subject) -> dict[str, Tensor]:
        """The same by the name of the argument."""
        return {"ends" if self.experts else "lora_ends": self.ends(subject)}

    def spans(self) -> Iterator[tuple[int | None, slice, slice]]:
        """Groups that have rows, and None: the rows of x, and those of w that they meet."""
        start, N = 0, self.product.N
        for g, size in enumerate(self.sizes):
            if size:
                yield g, slice(start, start + size), slice(g * N, (g + 1) * N) if self.experts else slice(0, N)
            start += size
        if self.rest and not self.experts:
            yield None, slice(start, start + self.rest), slice(0, N)


def cases(subject: Subject) -> st.SearchStrategy[Groups]:
    """Every claimed format and dtype; a row of w has a scale that none beside it has."""
    products = st.builds(
        Product,
        kind=kinds(subject, MULTIPLIED),
        M=st.just(0),
        N=st.integers(1, 9).map(lambda n: 2 * n),
        K=st.integers(1, 140),
        seed=st.integers(0, 2**20),
        weight=st.just("graded"),
        dtype=st.sampled_from(subject.dtypes),
    )
    return st.builds(Groups, products, st.sampled_from(SIZES), st.integers(0, 3))


def each(
    case: Groups, x: Tensor, w: QuantTensor, lora: LoRA | None = None, **given: Any
) -> Iterator[tuple[int | None, slice, slice, oracle.Exact]]:
    """Groups, their rows of x and of w, and the call on these, in float64.

    `given` may hold bias, residual, activation, rounding.
    """
    cpu = {n: t.detach().cpu() if isinstance(t, Tensor) else t for n, t in given.items()}
    rounding, bias = cpu.pop("weight_rounding", "any"), cpu.pop("bias", None)
    whole = oracle.exact(x.detach().cpu(), w, rounding=rounding, bias=bias)
    for g, rows, of_w in case.spans():
        own = None if lora is None or g is None else (lora.A[g].detach().cpu(), lora.B[g].detach().cpu(), lora.scale)
        yield g, rows, of_w, oracle.part(whole, rows, of_w, lora=own, **cpu)


def judged(subject: Subject, case: Groups, x: Tensor, w: QuantTensor, **given: Any) -> None:
    """The rows of each group held to the first level of tolerance."""
    y: Tensor = subject(x, w, **case.named_ends(subject), **given)
    require(y.dtype == x.dtype, f"y is {y.dtype}, x is {x.dtype}")
    for _, rows, _, want in each(case, x, w, **given):
        require(y[rows].shape == want.y.shape, f"rows {rows} are {tuple(y[rows].shape)}, not {tuple(want.y.shape)}")
        within(subject, "y", y[rows], want.y.numpy(), want.bound().numpy())


@attack("QM-28", cases)
def a_row_meets_its_own_expert(subject: Subject, case: Groups) -> None:
    """Plain; then with a bias and a residual, and a pair, where those are claimed."""
    whole = case.whole
    x, w = whole.input(subject), whole.w(subject)
    judged(subject, case, x, w, **pinned(subject))
    given: dict[str, Any] = {"bias": whole.bias(subject)} if "bias" in subject.claims else {}
    for activation in [None, *activations(subject, pairs=False)[:1], *activations(subject, pairs=True)[:1]]:
        if "residual" in subject.claims:
            of_expert = replace(whole, N=case.product.N)
            given["residual"] = of_expert.residual(subject, activation)
        more = {} if activation is None else {"activation": activation}
        judged(subject, case, x, w, **given, **more, **pinned(subject))


@attack("QM-29", cases, scale=0.5)
def rows_of_no_expert_give_nothing(subject: Subject, case: Groups) -> None:
    """Rows behind the last end hold NaN: their result and gradient are 0, and no other row is another."""
    case = replace(case, rest=case.rest + 1)
    x, w = case.whole.input(subject), case.whole.w(subject)
    last = sum(case.sizes)
    want = subject(x, w, ends=case.ends(subject))
    x[last:] = (torch.nan, torch.inf)[case.product.seed % 2]
    grad = "grad" in subject.claims
    y = subject(x.requires_grad_(grad), w, ends=case.ends(subject))
    require(bool((y[last:] == 0).all()), f"rows of no expert give {y[last:].tolist()}")
    same_bits("y", y[:last].detach(), want[:last].detach(), "beside rows of no expert that hold NaN")
    if grad:
        dy = torch.full_like(y, torch.nan)
        dy[:last] = 1
        (dx,) = torch.autograd.grad(y, x, dy)
        require(bool((dx[last:] == 0).all()), f"rows of no expert have the gradient {dx[last:].tolist()}")
        require(bool(dx[:last].isfinite().all()), "a gradient is poisoned by rows of no expert")


@attack("QM-30", cases, scale=0.5)
def wild_ends_count_as_the_nearest_right_ones(subject: Subject, case: Groups) -> None:
    """Ends that fall, below 0 and far beyond M; written in place between two calls."""
    case = replace(case, rest=0)
    x, w, ends = case.whole.input(subject), case.whole.w(subject), case.ends(subject)
    plain = subject(x, w, ends=ends)
    wild = ends.clone()
    wild[-1] = 2**31 - 1
    for e, size in enumerate(case.sizes[:-1]):
        if size == 0:
            wild[e] = -(2**31) if e == 0 else int(ends[e]) - 1
    same_bits("y", subject(x, w, ends=wild), plain, "where ends fall or exceed M")
    ends.zero_()
    require(bool((subject(x, w, ends=ends) == 0).all()), "ends written in place are not seen")


@attack("QM-31", cases, scale=0.5)
def gradients_of_experts_match_float64(subject: Subject, case: Groups) -> None:
    """Of x, bias and residual, without an activation and with a pair."""
    whole = case.whole
    w, ends = whole.w(subject), case.ends(subject)
    claimed = [a for a in (*activations(subject, pairs=False), *activations(subject, pairs=True)) if a != "relu"]
    for activation in {None, claimed[case.product.seed % len(claimed)] if claimed else None}:
        leaves = {"x": whole.input(subject)}
        if "bias" in subject.claims:
            leaves["bias"] = whole.bias(subject)
        if "residual" in subject.claims:
            leaves["residual"] = replace(whole, N=case.product.N).residual(subject, activation)
        leaves = {name: t.requires_grad_() for name, t in leaves.items()}
        given = {**leaves, **({"activation": activation} if activation else {})}
        y = subject(given.pop("x"), w, ends=ends, **given)
        dy = whole.normal(subject, *y.shape, salt=5)
        found = dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), dy), strict=True))
        bias = torch.zeros(w.shape[0], dtype=torch.float64)
        allowed = torch.zeros_like(bias)
        for _, rows, of_w, of in each(case, leaves["x"], w, **given):
            bounds, exact = oracle.bounds_of_gradients(of, dy[rows].cpu()), exact_gradients(of, dy[rows].cpu())
            slack = bounds["x"] + of.unit * exact["x"].abs()
            within(subject, "grad_x", found["x"][rows], exact["x"].numpy(), slack.numpy())
            bias[of_w], allowed[of_w] = exact["bias"], bounds["bias"] + of.unit * exact["bias"].abs()
        if "bias" in leaves:
            within(subject, "grad_bias", found["bias"], bias.numpy(), allowed.numpy())
        if "residual" in leaves:
            kept = dy.clone()
            kept[sum(case.sizes) :] = 0
            same_bits("grad_residual", found["residual"], kept, "beside dy")


def exact_gradients(of: oracle.Exact, dy: Tensor) -> dict[str, Tensor]:
    """Float64 gradients of a group's rows of x, of its bias, and of its A and B."""
    h = of.h.detach().clone().requires_grad_()
    (dh,) = torch.autograd.grad(oracle.activated(h, of.activation), h, dy.double())
    found = {"x": dh @ of.w, "bias": dh.sum(0)}
    if of.lora is None:
        return found
    A, B, s = of.lora
    low = s * dh @ B
    return {"x": found["x"] + low @ A, "bias": found["bias"], "A": low.t() @ of.x, "B": s * dh.t() @ (of.x @ A.t())}
