"""Attacks on fake_quantize@1."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

import rlkernel
from rlkernel_conformance import draw
from rlkernel_conformance.attack import attack
from rlkernel_conformance.clauses.derived_attacks import derive
from rlkernel_conformance.compare import Violation, plain, require, same_bits
from rlkernel_conformance.quantized_weights import (
    EVERY,
    SCALE_RULES,
    STORED,
    Weight,
    claims,
    is_nan_or_equal,
    weights,
)
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions import fake_quantize as definition
from rlkernel_core.definitions import quant

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def cases(subject: Subject) -> st.SearchStrategy[Weight]:
    """Weights of any shape, format, dtype and distribution."""
    return weights(subject, SCALE_RULES, dtypes=subject.dtypes)


def plain_cases(subject: Subject) -> st.SearchStrategy[Weight]:
    """Small weights of one distribution: for laws that compare two calls."""
    return weights(subject, SCALE_RULES, rows=6, columns=140, dtypes=subject.dtypes).map(
        lambda c: replace(c, values="graded")
    )


def own_dtype(weight: Tensor) -> torch.dtype:
    """What a result has where no dtype is given."""
    return torch.float32 if weight.dtype == torch.float64 else weight.dtype


def gradient(subject: Subject, weight: Tensor, up: Tensor, case: Weight, **options: Any) -> Tensor:
    """Of the weight, for an upstream gradient."""
    leaf = weight.detach().requires_grad_()
    y = subject(leaf, case.spec, dtype=up.dtype, **options)
    (found,) = torch.autograd.grad(y, leaf, up)
    require(found.dtype == weight.dtype, f"the gradient of a weight of {weight.dtype} is {found.dtype}")
    return found


def upstream(case: Weight, like: Tensor, dtype: torch.dtype) -> Tensor:
    """A drawn upstream gradient."""
    return draw.normal((case.N, case.K), case.seed + 9, str(like.device)).to(dtype)


@attack("FQ-01", cases, examples=EVERY)
def the_bits_of_there_and_back(subject: Subject, case: Weight) -> None:
    """Those of quantize and then dequantize by this backend, which may have neither; in every dtype of a result."""
    options = {"fake_quantize": SCALE_RULES, "quantize": SCALE_RULES, "dequantize": STORED}
    if not all(claims(Subject(subject.backend, op, subject.device), case.spec, o) for op, o in options.items()):
        return
    weight, dtype = case.full(subject), DTYPES[case.seed % 3]
    with torch.no_grad():
        expected = rlkernel.dequantize(rlkernel.quantize(weight, case.spec), dtype=dtype)
    same_with_nan(subject(weight, case.spec, dtype=dtype), expected, "there and back")


def same_with_nan(found: Tensor, expected: Tensor, when: str) -> None:
    """Equal bit for bit; any NaN equals any other."""
    kinds = (tuple(found.shape), found.dtype), (tuple(expected.shape), expected.dtype)
    require(kinds[0] == kinds[1], f"the result is {kinds[0]}, expected {kinds[1]}")
    if not is_nan_or_equal(found.cpu(), expected.cpu()):
        same_bits("y", found.nan_to_num(7.0).cpu(), expected.nan_to_num(7.0).cpu(), when)
        raise Violation(f"NaN stands elsewhere {when}")


@attack("FQ-02", cases, examples=EVERY)
def values_are_those_of_the_nearest_codes(subject: Subject, case: Weight) -> None:
    """By the scales and codes of the definition, in fp32."""
    if not claims(subject, case.spec, SCALE_RULES):
        return
    weight = case.full(subject)
    y = plain(subject(weight, case.spec, dtype=torch.float32), "y")
    low, high = definition.fake_quantize(weight, case.spec)
    wrong = ~(((low <= y) & (y <= high)) | (np.isnan(y) & np.isnan(low)))
    if wrong.any():
        i, j = np.argwhere(wrong)[0]
        said = f"{low[i, j]!r}" if low[i, j] == high[i, j] else f"{low[i, j]!r} or {high[i, j]!r}"
        raise Violation(f"[{i}, {j}] = {weight[i, j].item()!r} becomes {y[i, j]!r}, expected {said}")


@attack("FQ-03", plain_cases)
def a_result_is_rounded_once_from_fp32(subject: Subject, case: Weight) -> None:
    """The dtype of the weight unless another is given."""
    weight = case.full(subject)
    wide = subject(weight, case.spec, dtype=torch.float32)
    same_with_nan(subject(weight, case.spec), wide.to(own_dtype(weight)), "without dtype")
    for dtype in DTYPES:
        same_with_nan(subject(weight, case.spec, dtype=dtype), wide.to(dtype), f"as {dtype}")


@attack("FQ-04", cases)
def the_gradient_is_the_upstream_one(subject: Subject, case: Weight) -> None:
    """In every dtype of the result, of weights whose groups saturate or are lost too."""
    weight = case.full(subject)
    for dtype in DTYPES:
        up = upstream(case, weight, dtype)
        same_bits("gradient", gradient(subject, weight, up, case), up.to(weight.dtype), "as it came")


@attack("FQ-05", cases, examples=tuple(replace(c, values="outliers") for c in EVERY))
def the_gradient_ends_where_codes_do(subject: Subject, case: Weight) -> None:
    """Zero beyond the ends of a group's codes, the upstream gradient elsewhere, a lost group among it."""
    if "grad" not in subject.claims or not claims(subject, case.spec, SCALE_RULES):
        return
    weight, dtype = case.full(subject), DTYPES[case.seed % 3]
    up = upstream(case, weight, dtype)
    found = plain(gradient(subject, weight, up, case, clipped=True), "gradient")
    passed = plain(up.to(weight.dtype), "gradient")
    surely, perhaps = definition.beyond(weight, case.spec)
    right = np.where(surely, found == 0, (found == passed) | (perhaps & (found == 0)))
    if not right.all():
        i, j = np.argwhere(~right)[0]
        where = "beyond" if surely[i, j] else "within"
        raise Violation(
            f"[{i}, {j}], {where} the ends of its group, has the gradient {found[i, j]!r} of {passed[i, j]!r}"
        )
    y, whole = (subject(weight, case.spec, clipped=clipped) for clipped in (True, False))
    same_with_nan(y, whole, "with clipped gradients")


@attack("FQ-06", plain_cases)
def what_is_not_finite_stays_in_its_group(subject: Subject, case: Weight) -> None:
    """An inf or NaN in one place: its own group is NaN, every other keeps its bits."""
    spec = case.spec
    N, K = (3, 300) if case.seed % 2 else (130, 150)
    sized = replace(case, N=N, K=K)
    weight = sized.full(subject)
    clean = subject(weight.clone(), spec)
    i, j = case.seed % N, case.seed % K
    weight[i, j] = (torch.nan, torch.inf, -torch.inf)[case.seed % 3]
    found = subject(weight, spec)
    if spec.act_order:
        return  # which columns share a group is quantize's own
    group = torch.zeros(N, K, dtype=torch.bool, device=found.device)
    if spec.element in quant.TABLES:
        size = spec.group * (256 if spec.double_quant else 1)
        start = (i * K + j) // size * size
        group.view(-1)[start : start + size] = True
    else:
        rows, columns = spec.rows or N, spec.group or K
        group[i // rows * rows : (i // rows + 1) * rows, j // columns * columns : (j // columns + 1) * columns] = True
    require(bool(found[group].isnan().all()), f"the group of {weight[i, j].item()} is not all NaN")
    require(not bool(found[~group].isnan().any()), f"{weight[i, j].item()} reaches another group")
    # A mean or a maximum of all scales is moved by a missing block.
    if not (spec.double_quant or spec.format == "nvfp4"):
        same_bits("y", found[~group], clean[~group], "beside a group that is not finite")


@attack("FQ-07", plain_cases)
def strides_change_no_bit(subject: Subject, case: Weight) -> None:
    """Padded rows, transposed storage, every second row, one row repeated; gradients likewise."""
    weight = case.full(subject)
    want = subject(weight, case.spec)
    for view in (draw.strided(weight), weight.t().contiguous().t(), weight.repeat_interleave(2, 0)[::2]):
        same_with_nan(subject(view, case.spec), want, f"for strides {view.stride()}")
    row = weight[:1].expand(case.N, -1)
    same_with_nan(subject(row, case.spec), subject(row.contiguous(), case.spec), "for an expanded row")
    if "grad" not in subject.claims:
        return
    for options in ({}, *([{"clipped": True}] if "clipped" in subject.claims else [])):
        up = upstream(case, weight, own_dtype(weight))
        whole = gradient(subject, weight, up, case, **options)
        for view in (draw.strided(up), up.t().contiguous().t()):
            found = gradient(subject, draw.strided(weight), view, case, **options)
            same_bits("gradient", found, whole, f"for an upstream gradient with strides {view.stride()}")


def given_of(subject: Subject, case: Weight) -> dict[str, Any]:
    """The arguments of a weight."""
    given: dict[str, Any] = {"weight": case.full(subject), "format": case.spec}
    return given | ({"clipped": True} if case.seed % 2 and "clipped" in subject.claims else {})


derive(
    "fake_quantize",
    given_of,
    inputs_untouched=plain_cases,
    determinism=cases,
    capture=plain_cases,
    another=lambda case: replace(case, seed=case.seed + 78),  # of the same options
)
