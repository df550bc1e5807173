"""Attacks on several low-rank additions in one call of qmatmul@1: of experts, and of adapters over one weight."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from rlkernel_conformance.attack import attack
from rlkernel_conformance.clauses.qmatmul_experts import SIZES, Groups, each, exact_gradients, judged
from rlkernel_conformance.compare import require, same_bits, within
from rlkernel_conformance.qmatmul_calls import Product, activations, fitted, pinned
from rlkernel_conformance.quantized_weights import MULTIPLIED, kinds
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions import qmatmul as oracle
from rlkernel_core.spec.qmatmul import LoRA

# Ends, and what they count as with M = 9.
WILD = ((3, 1, 20), (3, 3, 9)), ((-5, 4, 4), (0, 4, 4)), ((2**31 - 1, -(2**31), 0), (9, 9, 9))


def low_rank(subject: Subject, case: Groups, r: int = 3, scale: float = 0.5) -> LoRA:
    """One of each group."""
    A = case.product.normal(subject, case.count, r, case.product.K, salt=1)
    return LoRA(A, case.product.normal(subject, case.count, case.product.N, r, salt=2), scale)


def cases(subject: Subject) -> st.SearchStrategy[Groups]:
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
    return st.builds(Groups, products, st.sampled_from(SIZES), st.integers(0, 3), experts)


@attack("QM-32", cases)
def a_row_gets_the_addition_of_its_group(subject: Subject, case: Groups) -> None:
    """Plain, and of a rank of one; then with a bias, a residual, an activation and a pair, where those are claimed."""
    whole = case.whole
    x, w, lora = whole.input(subject), whole.w(subject), low_rank(subject, case)
    judged(subject, case, x, w, lora=lora, **pinned(subject))
    judged(subject, case, x, w, lora=low_rank(subject, case, r=1, scale=-2.0), **pinned(subject))
    given: dict[str, Any] = {"bias": whole.bias(subject)} if "bias" in subject.claims else {}
    for activation in [*activations(subject, pairs=False)[:1], *activations(subject, pairs=True)[:1]]:
        if "residual" in subject.claims:
            given["residual"] = replace(whole, N=case.product.N).residual(subject, activation)
        judged(subject, case, x, w, lora=lora, activation=activation, **given, **pinned(subject))


@attack("QM-33", cases, scale=0.5)
def rows_of_others_keep_their_bits(subject: Subject, case: Groups) -> None:
    """One adapter after the other is made large, then NaN; gradients of the rows and adapters beside it keep theirs."""
    for some in dict.fromkeys((case, replace(case, rest=case.rest or 2, experts=False))):  # rows of none, each time
        _rows_kept(subject, some)


def _rows_kept(subject: Subject, case: Groups) -> None:
    whole, lora, ends = case.whole, low_rank(subject, case), case.named_ends(subject)
    x, w = whole.input(subject), whole.w(subject)
    grad = "grad" in subject.claims

    def run(lora: LoRA) -> tuple[Tensor, ...]:
        leaves = [t.clone().requires_grad_(grad) for t in (x, lora.A, lora.B)]
        y = subject(leaves[0], w, lora=LoRA(leaves[1], leaves[2], lora.scale), **ends)
        more = torch.autograd.grad(y, leaves, whole.normal(subject, *y.shape, salt=5)) if grad else ()
        return y.detach(), *more

    want = run(lora)
    for g, rows, _ in case.spans():
        if g is None:
            plain = subject(x, w)
            same_bits("y", want[0][rows], plain[rows], "in rows without an adapter, beside the plain product")
            continue
        others = torch.arange(case.count, device=x.device) != g
        apart = torch.ones(x.shape[0], dtype=torch.bool, device=x.device)
        apart[rows] = False
        for value in (1e3, torch.nan):
            changed = LoRA(lora.A.clone(), lora.B.clone(), lora.scale)
            changed.A[g], changed.B[g] = value, value
            kept = (apart, apart, others, others)
            for name, a, b, same in zip(("y", "grad_x", "grad_lora", "grad_lora"), run(changed), want, kept):  # noqa: B905
                same_bits(name, a[same], b[same], f"beside an adapter of {value}")


@attack("QM-34", lambda s: cases(s).map(lambda c: replace(c, sizes=(3, 3, 3), rest=0, experts=False)), scale=0.5)
def wild_lora_ends_count_as_the_nearest_right_ones(subject: Subject, case: Groups) -> None:
    """Ends that fall, below 0 and far beyond M; written in place between two calls."""
    x, w, lora = case.whole.input(subject), case.whole.w(subject), low_rank(subject, case)
    ends = case.ends(subject)
    subject(x, w, lora=lora, lora_ends=ends)
    for wild, right in WILD:
        want = subject(x, w, lora=lora, lora_ends=torch.tensor(right, dtype=torch.int32, device=ends.device))
        ends.copy_(torch.tensor(wild))
        same_bits("y", subject(x, w, lora=lora, lora_ends=ends), want, f"with lora_ends {wild}, as with {right}")


@attack("QM-35", cases, scale=0.5)
def gradients_of_several_match_float64(subject: Subject, case: Groups) -> None:
    """Of x, A and B, without an activation and with one."""
    if "grad" not in subject.claims:
        return
    whole = case.whole
    w, ends = whole.w(subject), case.named_ends(subject)
    claimed = [a for a in (*activations(subject, pairs=False), *activations(subject, pairs=True)) if a != "relu"]
    for activation in {None, claimed[case.product.seed % len(claimed)] if claimed else None}:
        lora, more = low_rank(subject, case), {"activation": activation} if activation else {}
        leaves = [t.requires_grad_() for t in (whole.input(subject), lora.A, lora.B)]
        y = subject(leaves[0], w, lora=lora, **ends, **more)
        dy = whole.normal(subject, *y.shape, salt=5)
        of_x, *of_lora = torch.autograd.grad(y, leaves, dy)
        seen = set()
        for g, rows, _, of in each(case, leaves[0], w, lora, **more):
            bounds, exact = oracle.bounds_of_gradients(of, dy[rows].cpu()), exact_gradients(of, dy[rows].cpu())
            allowed = {name: bounds[name] + of.unit * t.abs() for name, t in exact.items()}
            within(subject, "grad_x", of_x[rows], exact["x"].numpy(), allowed["x"].numpy())
            for name, t in zip("AB", of_lora, strict=True) if g is not None else ():
                within(subject, "grad_lora", t[g], exact[name].numpy(), allowed[name].numpy())
            seen.add(g)
        for g in set(range(case.count)) - seen:
            require(not any(t[g].any() for t in of_lora), f"adapter {g} has no rows, and a gradient")
