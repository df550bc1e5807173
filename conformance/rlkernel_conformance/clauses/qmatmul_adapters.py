"""Attacks on several low-rank additions in one call of qmatmul@1: of experts, and of adapters over one weight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from rlkernel_conformance.attack import attack
from rlkernel_conformance.clauses.qmatmul_experts import SIZES
from rlkernel_conformance.compare import require, same_bits, within
from rlkernel_conformance.qmatmul_calls import Product, activations, fitted, pinned
from rlkernel_conformance.quantized_weights import MULTIPLIED, kinds
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions import qmatmul as oracle
from rlkernel_core.quant import QuantTensor
from rlkernel_core.spec.qmatmul import LoRA

# Ends, and what they count as with M = 9.
WILD = ((3, 1, 20), (3, 3, 9)), ((-5, 4, 4), (0, 4, 4)), ((2**31 - 1, -(2**31), 0), (9, 9, 9))


@dataclass(frozen=True)
class Adapters:
    """A product [M, K] with a low-rank addition for each group of rows, in order; `product.N` outputs of each row."""

    product: Product
    sizes: tuple[int, ...]
    rest: int  # rows of none
    experts: bool  # groups have rows of w of their own

    @property
    def groups(self) -> int:
        """How many low-rank additions there are."""
        return len(self.sizes)

    @property
    def whole(self) -> Product:
        """With all rows of x and of w."""
        rows = self.product.N * (self.groups if self.experts else 1)
        return replace(self.product, M=sum(self.sizes) + self.rest, N=rows)

    def lora(self, subject: Subject, r: int = 3, scale: float = 0.5) -> LoRA:
        """One of each group."""
        A = self.product.normal(subject, self.groups, r, self.product.K, salt=1)
        return LoRA(A, self.product.normal(subject, self.groups, self.product.N, r, salt=2), scale)

    def ends(self, subject: Subject) -> dict[str, Tensor]:
        """Where the rows of each group end, by the argument's name."""
        last = torch.tensor(self.sizes, device=subject.device).cumsum(0).int()
        return {"ends" if self.experts else "lora_ends": last}

    def spans(self) -> Iterator[tuple[int | None, slice, slice]]:
        """Groups that have rows, and None: the rows of x, and those of w that they meet."""
        start, N = 0, self.product.N
        for g, size in enumerate(self.sizes):
            if size:
                yield g, slice(start, start + size), slice(g * N, (g + 1) * N) if self.experts else slice(0, N)
            start += size
        if self.rest and not self.experts:
            yield None, slice(start, start + self.rest), slice(0, N)


def cases(subject: Subject) -> st.SearchStrategy[Adapters]:
    """Every claimed format and dtype, experts and adapters."""
    products = st.builds(
        Product,
        kind=kinds(subject, MULTIPLIED),
        M=st.just(1),
        N=st.integers(1, 9).map(lambda n: 2 * n),
        K=st.integers(1, 140),
        seed=st.integers(0, 2**20),
        weight=st.just("graded"),
        dtype=st.sampled_from(subject.dtypes),
    ).map(lambda product: fitted(subject, product))
    experts = st.booleans() if "grouped" in subject.claims else st.just(False)
    return st.builds(Adapters, products, st.sampled_from(SIZES), st.integers(0, 3), experts)


def each(
    case: Adapters, x: Tensor, w: QuantTensor, lora: LoRA, **given: Any
) -> Iterator[tuple[int | None, slice, oracle.Exact]]:
    """Groups, their rows and the call on these, in float64; `given` may hold bias, residual, activation, rounding."""
    cpu = {n: t.detach().cpu() if isinstance(t, Tensor) else t for n, t in given.items()}
    rounding, bias = cpu.pop("weight_rounding", "any"), cpu.pop("bias", None)
    whole = oracle.exact(x.detach().cpu(), w, rounding=rounding, bias=bias)
    A, B = lora.A.detach().cpu(), lora.B.detach().cpu()
    for g, rows, of_w in case.spans():
        yield g, rows, oracle.part(whole, rows, of_w, lora=None if g is None else (A[g], B[g], lora.scale), **cpu)


def judged(subject: Subject, case: Adapters, x: Tensor, w: QuantTensor, lora: LoRA, **given: Any) -> None:
    """The rows of each group held to the first level of tolerance."""
    y: Tensor = subject(x, w, lora=lora, **case.ends(subject), **given)
    require(y.dtype == x.dtype, f"y is {y.dtype}, x is {x.dtype}")
    for _, rows, want in each(case, x, w, lora, **given):
        require(y[rows].shape == want.y.shape, f"rows {rows} are {tuple(y[rows].shape)}, not {tuple(want.y.shape)}")
        within(subject, "y", y[rows], want.y.numpy(), want.bound().numpy())


@attack("QM-32", cases)
def a_row_gets_the_addition_of_its_group(subject: Subject, case: Adapters) -> None:
    """Plain, and of a rank of one; then with a bias, a residual, an activation and a pair, where those are claimed."""
    whole = case.whole
    x, w, lora = whole.input(subject), whole.w(subject), case.lora(subject)
    judged(subject, case, x, w, lora, **pinned(subject))
    judged(subject, case, x, w, case.lora(subject, r=1, scale=-2.0), **pinned(subject))
    given: dict[str, Any] = {"bias": whole.bias(subject)} if "bias" in subject.claims else {}
    for activation in [*activations(subject, pairs=False)[:1], *activations(subject, pairs=True)[:1]]:
        if "residual" in subject.claims:
            given["residual"] = replace(whole, N=case.product.N).residual(subject, activation)
        judged(subject, case, x, w, lora, activation=activation, **given, **pinned(subject))


@attack("QM-33", cases, scale=0.5)
def rows_of_others_keep_their_bits(subject: Subject, case: Adapters) -> None:
    """One adapter after the other is made large, then NaN; gradients of the rows and adapters beside it keep theirs."""
    for some in dict.fromkeys((case, replace(case, rest=case.rest or 2, experts=False))):  # rows of none, each time
        _rows_kept(subject, some)


def _rows_kept(subject: Subject, case: Adapters) -> None:
    x, w, lora, ends = case.whole.input(subject), case.whole.w(subject), case.lora(subject), case.ends(subject)
    grad = "grad" in subject.claims

    def run(lora: LoRA) -> tuple[Tensor, ...]:
        leaves = [t.clone().requires_grad_(grad) for t in (x, lora.A, lora.B)]
        y = subject(leaves[0], w, lora=LoRA(leaves[1], leaves[2], lora.scale), **ends)
        more = torch.autograd.grad(y, leaves, case.whole.normal(subject, *y.shape, salt=5)) if grad else ()
        return y.detach(), *more

    want = run(lora)
    for g, rows, _ in case.spans():
        if g is None:
            plain = subject(x, w)
            same_bits("y", want[0][rows], plain[rows], "in rows without an adapter, beside the plain product")
            continue
        others = [torch.arange(n, device=x.device) != g for n in (case.groups, case.groups)]
        apart = torch.ones(x.shape[0], dtype=torch.bool, device=x.device)
        apart[rows] = False
        for value in (1e3, torch.nan):
            changed = LoRA(lora.A.clone(), lora.B.clone(), lora.scale)
            changed.A[g], changed.B[g] = value, value
            kept = (apart, apart, *others)
            for name, a, b, same in zip(("y", "grad_x", "grad_lora", "grad_lora"), run(changed), want, kept):  # noqa: B905
                same_bits(name, a[same], b[same], f"beside an adapter of {value}")


@attack("QM-34", lambda s: cases(s).map(lambda c: replace(c, sizes=(3, 3, 3), rest=0, experts=False)), scale=0.5)
def wild_lora_ends_count_as_the_nearest_right_ones(subject: Subject, case: Adapters) -> None:
    """Ends that fall, below 0 and far beyond M; written in place between two calls."""
    x, w, lora = case.whole.input(subject), case.whole.w(subject), case.lora(subject)
    ends = case.ends(subject)["lora_ends"]
    subject(x, w, lora=lora, lora_ends=ends)
    for wild, right in WILD:
        want = subject(x, w, lora=lora, lora_ends=torch.tensor(right, dtype=torch.int32, device=ends.device))
        ends.copy_(torch.tensor(wild))
        same_bits("y", subject(x, w, lora=lora, lora_ends=ends), want, f"with lora_ends {wild}, as with {right}")


@attack("QM-35", cases, scale=0.5)
def gradients_of_several_match_float64(subject: Subject, case: Adapters) -> None:
    """Of x, A and B, without an activation and with one."""
    if "grad" not in subject.claims:
        return
    whole = case.whole
    w, ends = whole.w(subject), case.ends(subject)
    claimed = [a for a in (*activations(subject, pairs=False), *activations(subject, pairs=True)) if a != "relu"]
    for activation in {None, claimed[case.product.seed % len(claimed)] if claimed else None}:
        lora, more = case.lora(subject), {"activation": activation} if activation else {}
        leaves = [t.requires_grad_() for t in (whole.input(subject), lora.A, lora.B)]
        y = subject(leaves[0], w, lora=lora, **ends, **more)
        dy = whole.normal(subject, *y.shape, salt=5)
        of_x, *of_lora = torch.autograd.grad(y, leaves, dy)
        seen = set()
        for g, rows, of in each(case, leaves[0], w, lora, **more):
            bounds, exact = oracle.bounds_of_gradients(of, dy[rows].cpu()), _gradients(of, dy[rows].cpu())
            allowed = {name: bounds[name] + of.unit * t.abs() for name, t in exact.items()}
            within(subject, "grad_x", of_x[rows], exact["x"].numpy(), allowed["x"].numpy())
            for name, t in zip("AB", of_lora, strict=True) if g is not None else ():
                within(subject, "grad_lora", t[g], exact[name].numpy(), allowed[name].numpy())
            seen.add(g)
        for g in set(range(case.groups)) - seen:
            require(not any(t[g].any() for t in of_lora), f"adapter {g} has no rows, and a gradient")


def _gradients(of: oracle.Exact, dy: Tensor) -> dict[str, Tensor]:
    """Float64 gradients of the rows of x of a group, and of its A and B."""
    h = of.h.detach().clone().requires_grad_()
    (dh,) = torch.autograd.grad(oracle.activated(h, of.activation), h, dy.double())
    if of.lora is None:
        return {"x": dh @ of.w}
    A, B, s = of.lora
    return {"x": dh @ of.w + s * (dh @ B) @ A, "A": s * (dh @ B).t() @ of.x, "B": s * dh.t() @ (of.x @ A.t())}
