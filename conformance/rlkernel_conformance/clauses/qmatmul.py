"""Attacks on qmatmul@1: accuracy here, laws and side effects in qmatmul_laws, the rest apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from hypothesis import strategies as st

from rlkernel_conformance.attack import attack
from rlkernel_conformance.clauses import qmatmul_adapters, qmatmul_experts, qmatmul_gradients, qmatmul_laws
from rlkernel_conformance.compare import require, within
from rlkernel_conformance.qmatmul_calls import (
    EVERY,
    FEW,
    Product,
    activations,
    cases,
    expected,
    fitted,
    judged,
    pinned,
    small,
    tried,
)
from rlkernel_conformance.quantized_weights import MULTIPLIED, SPECS, claims
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions import quantize
from rlkernel_core.quant import error_bound
from rlkernel_core.spec.qmatmul import UNITS, LoRA, smallest_error

ELSEWHERE: Final = (
    qmatmul_adapters,
    qmatmul_experts,
    qmatmul_gradients,
    qmatmul_laws,
)  # modules that hold the other attacks


@attack("QM-01", cases, examples=EVERY)
def it_is_the_product_with_the_dequantized_weight(subject: Subject, case: Product) -> None:
    """Within accumulation_bound of float64 on w', x as the format quantizes it."""
    case = tried(subject, case)
    judged(subject, case, case.input(subject), case.w(subject))


@attack(
    "QM-02",
    lambda s: cases(s, x_as_it_is=True).map(lambda c: replace(c, x=("positive", "normal")[c.seed % 2])),
    examples=tuple(replace(c, x="positive") for c in FEW),
)
def it_is_near_the_product_with_the_full_weight(subject: Subject, case: Product) -> None:
    """The second level: what the format may lose, element by element, and no more."""
    case = tried(subject, case, x_as_it_is=True)
    x, w, weight = case.input(subject), case.w(subject), case.full(subject).cpu()
    lost = error_bound(w.to("cpu"), weight)
    want = expected(case, x, w)
    full = want.x @ weight.double().t()
    if lost.isfinite().all():
        allowed = want.bound() + want.x.abs() @ lost.t() + want.unit * (full - want.y).abs()
        within(subject, "y", subject(x, w), full.numpy(), allowed.numpy())


def odd(subject: Subject) -> st.SearchStrategy[Product]:
    """An odd number of outputs, where the subject takes any."""
    drawn = cases(subject, rows=17, outputs=150, inputs=300)
    return drawn.map(lambda c: fitted(subject, replace(c, N=max(1, c.N - 1))))


@attack("QM-03", odd)
def every_element_counts_once(subject: Subject, case: Product) -> None:
    """Odd sizes and leading dimensions; products of one sign, so that one too few shows."""
    case = replace(case, weight="one_sided", x="positive")
    x, w = case.input(subject), case.w(subject)
    y = judged(subject, case, x, w)
    many = subject(x.view(1, case.M, 1, case.K), w)
    require(many.shape == (1, case.M, 1, case.N), f"leading dimensions (1, {case.M}, 1) give {tuple(many.shape)}")
    one = subject(x[0], w)
    require(one.shape == (case.N,), f"a vector gives {tuple(one.shape)}")
    want = expected(case, x, w)
    within(subject, "y", many.view(y.shape), want.y.numpy(), want.bound().numpy())
    within(subject, "y", one, want.y[0].numpy(), want.bound()[0].numpy())


@attack("QM-04", lambda s: cases(s, outputs=20, inputs=140, x_as_it_is=True), examples=FEW)
def the_identity_gives_the_weight_back(subject: Subject, case: Product) -> None:
    """One column at a time: nothing of the others, not even their rounding."""
    case = tried(subject, case, x_as_it_is=True)
    one = torch.eye(case.K, dtype=getattr(torch, case.dtype), device=subject.device)
    judged(subject, case, one[:140], case.w(subject))


@attack("QM-05", lambda s: cases(s, outputs=80).map(lambda c: replace(c, x="normal")))
def an_unrounded_weight_is_not_rounded(subject: Subject, case: Product) -> None:
    """weight_rounding="none": c = 0 in the bound."""
    judged(subject, case, case.input(subject), case.w(subject), weight_rounding="none")


@attack("QM-06", lambda s: cases(s, outputs=80).map(lambda c: replace(c, x="normal")))
def a_rounded_weight_is_the_dequantized_one(subject: Subject, case: Product) -> None:
    """weight_rounding="dtype": c = 0 around the product with dequantize(w, x.dtype)."""
    judged(subject, case, case.input(subject), case.w(subject), weight_rounding="dtype")


def integer_cases(subject: Subject) -> st.SearchStrategy[Product]:
    """int8_w8a8, up to sums that fp32 does not hold."""
    return st.builds(
        Product,
        kind=st.just("int8_w8a8"),
        M=st.integers(2, 4),
        N=st.integers(1, 5),
        K=st.sampled_from((1, 5, 64, 100, 513, 4099)),
        seed=st.integers(0, 2**20),
        x=st.sampled_from(("normal", "positive")),
        weight=st.sampled_from(("normal", "one_sided")),
        dtype=st.sampled_from(subject.dtypes),
    )


def integer_rows(subject: Subject, case: Product, x: Any, w: Any, rows: slice) -> None:
    """These rows of a product, each against the formula on exact sums of its own."""
    kind = np.float64 if case.dtype == "float64" else np.float32
    found = subject(x, w)[rows]
    with np.errstate(invalid="ignore"):
        want, slack = quantize.integer_product(x[rows].cpu().double().numpy().astype(kind), w.to("cpu"))
    ulp = 2.0**-52 if case.dtype == "float64" else 2.0**-23
    rounding = UNITS[case.dtype] if case.dtype in {"bfloat16", "float16"} else 0.0
    within(
        subject,
        "y",
        found,
        want,
        (2 * ulp + rounding) * (np.abs(want) + slack) + slack + smallest_error(UNITS[case.dtype]),
    )


@attack("QM-07", integer_cases)
def integer_sums_are_exact(subject: Subject, case: Product) -> None:
    """Codes of x and w multiplied as integers, then the two scales."""
    integer_rows(subject, case, case.input(subject), case.w(subject), slice(None))


def quantized_inputs(subject: Subject) -> st.SearchStrategy[Product]:
    """Every claimed way to quantize x."""
    of_act = [kind for kind, spec in SPECS.items() if spec.act != "none" and claims(subject, spec, MULTIPLIED)]
    return st.builds(lambda case, kind: replace(case, kind=kind), integer_cases(subject), st.sampled_from(of_act)).map(
        lambda case: fitted(subject, case)
    )


@attack("QM-08", quantized_inputs)
def a_token_is_quantized_on_its_own(subject: Subject, case: Product) -> None:
    """The first token beside tokens that are huge, zero or NaN."""
    x, w = case.input(subject), case.w(subject)
    for neighbor in (1e4, 0.0, torch.nan):
        x[1:] = neighbor
        if case.spec.act == "token_int8":
            integer_rows(subject, case, x, w, slice(0, 1))
        else:
            want = expected(case, x[:1], w)
            within(subject, "y", subject(x, w)[:1], want.y.numpy(), want.bound().numpy())
    if case.seed % 2:
        x[1:] = 0
        require(bool((subject(x, w)[1:] == 0).all()), "a token of zeros does not give zeros")


@attack("QM-09", small, scale=0.5)
def lora_adds_its_product(subject: Subject, case: Product) -> None:
    """Scales 1/2 and -2, a rank of one; and a B of zeros."""
    x, w = case.input(subject), case.w(subject)
    for lora in (case.lora(subject), case.lora(subject, r=1, scale=-2.0)):
        judged(subject, case, x, w, lora=lora)
    nothing = case.lora(subject)
    judged(subject, case, x, w, lora=LoRA(nothing.A, torch.zeros_like(nothing.B), 0.5))


@attack("QM-11", small, scale=0.5)
def a_bias_comes_before_the_activation(subject: Subject, case: Product) -> None:
    """One per output."""
    x, w, bias = case.input(subject), case.w(subject), case.bias(subject)
    judged(subject, case, x, w, bias=bias, **pinned(subject))
    for activation in activations(subject, pairs=False)[:2]:
        judged(subject, case, x, w, bias=bias, activation=activation, **pinned(subject))


@attack("QM-12", lambda s: small(s).map(lambda c: replace(c, weight="normal", K=min(c.K, 20))), scale=0.5)
def activations_are_those_of_their_names(subject: Subject, case: Product) -> None:
    """Every claimed one, of an h that was not rounded."""
    x, w = case.input(subject), case.w(subject)
    for activation in activations(subject, pairs=False):
        judged(subject, case, x, w, activation=activation, **pinned(subject))


@attack("QM-13", small, scale=0.5)
def gate_rows_come_first(subject: Subject, case: Product) -> None:
    """Every claimed pair, with bias."""
    x, w, bias = case.input(subject), case.w(subject), case.bias(subject)
    for activation in activations(subject, pairs=True):
        y = judged(subject, case, x, w, bias=bias, activation=activation, **pinned(subject))
        require(y.shape == (case.M, case.N // 2), f"{activation} of {case.N} outputs gives {tuple(y.shape)}")


@attack("QM-14", lambda s: small(s, outputs=60), scale=0.5)
def a_residual_is_added_before_the_only_rounding(subject: Subject, case: Product) -> None:
    """A residual that cancels most of the product, and one after activations."""
    x, w = case.input(subject), case.w(subject)
    h = expected(case, x, w).y.to(x.dtype).to(x.device)
    judged(subject, case, x, w, residual=case.residual(subject) / 64 - h, **pinned(subject))
    for activation in [*activations(subject, pairs=False), *activations(subject, pairs=True)][::3]:
        residual = case.residual(subject, activation)
        judged(subject, case, x, w, residual=residual, activation=activation, **pinned(subject))
