"""Attacks on quantize@1."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

import rlkernel
from rlkernel_conformance import draw, graphs
from rlkernel_conformance.attack import attack
from rlkernel_conformance.clauses.derived_attacks import derive
from rlkernel_conformance.compare import Violation, require, same_bits, within
from rlkernel_conformance.quantized_weights import (
    EVERY,
    SCALE_RULES,
    Weight,
    claims,
    is_nan_or_equal,
    packed,
    weights,
)
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions import quant, quantize
from rlkernel_core.errors import ArgumentError, ResolutionError
from rlkernel_core.quant import CANONICAL, FORMATS, QuantTensor, error_bound
from rlkernel_core.quant.float8 import FLOAT8

_FLOATING = {"scale", "absmax", "nested_absmax", "nested_offset", "global_scale", "d", "dmin"}


def cases(subject: Subject) -> st.SearchStrategy[Weight]:
    """Weights of any shape, format, dtype and distribution."""
    return weights(subject, SCALE_RULES, dtypes=subject.dtypes)


def whole_cases(subject: Subject) -> st.SearchStrategy[Weight]:
    """Weights without short groups: what is wrong here is not wrong at an edge."""
    return cases(subject).map(lambda c: replace(c, N=4, K=256))


def law_cases(subject: Subject) -> st.SearchStrategy[Weight]:
    """Small weights of one distribution: for laws that compare two calls."""
    return weights(subject, SCALE_RULES, rows=6, columns=140, dtypes=subject.dtypes).map(
        lambda c: replace(c, values="graded")
    )


def quantized(subject: Subject, case: Weight, weight: Tensor | None = None) -> QuantTensor:
    """The subject's answer, which must be canonical."""
    w = subject(case.full(subject) if weight is None else weight, case.spec)
    require(isinstance(w, QuantTensor), f"the result is a {type(w).__name__}, not a QuantTensor")
    require(w.layout == CANONICAL, f"a fresh weight has layout {w.layout!r}")
    require((w.spec, w.shape) == (case.spec, (case.N, case.K)), f"the result is {w!r}")
    w.validate()
    result: QuantTensor = w.to("cpu")
    return result


@attack("QZ-01", whole_cases, examples=EVERY)
def scales_have_the_bits_of_their_rule(subject: Subject, case: Weight) -> None:
    """Scales, zero-points, nested scales, the groups of columns; and the tables of nf4 and fp4."""
    if not claims(subject, case.spec, SCALE_RULES):
        return
    w = quantized(subject, case)
    for name, expected in quantize.scales(case.full(subject), case.spec).items():
        same = is_nan_or_equal(w.parts[name], expected)
        require(same, f"{name} is {w.parts[name].tolist()}, expected {expected.tolist()}")
    if case.spec.element in quant.TABLES:
        same_bits("table", w.parts["table"], quant.TABLES[case.spec.element], "compared with the published one")
    if case.spec.double_quant:
        found, want = w.parts["nested_table"].double().numpy(), quantize.dynamic_map()
        # An fp32 linspace rounds its edges: a few units of 2^-24 near 1.
        require(found.shape == want.shape and bool((np.abs(found - want) <= 2.0**-22).all()), "another dynamic map")


@attack("QZ-02", whole_cases, examples=EVERY)
def codes_are_nearest(subject: Subject, case: Weight) -> None:
    """Every code against w / s, with the scale that was stored."""
    if not claims(subject, case.spec, SCALE_RULES):
        return
    weight, w = case.full(subject), quantized(subject, case)
    right = quantize.codes_are_right(weight, w)
    if right.all():
        return
    i, j = np.argwhere(~right)[0]
    raise Violation(
        f"the code of [{i}, {j}] = {weight[i, j].item()!r} stands for {quant.decode(w)[i, j].item()!r}, "
        f"w / s is {quantize.divided(weight, w)[i, j]!r}"
    )


def bounded(subject: Subject, case: Weight) -> None:
    """The decoded weight is within error_bound of the full one; groups whose scale overflows are NaN."""
    weight, w = case.full(subject), quantized(subject, case)
    expected, found = weight.cpu().double(), quant.decode(w)
    lost = found.isnan() if case.spec.scale_dtype == "float16" else torch.zeros_like(found, dtype=torch.bool)
    allowed = error_bound(w, weight.cpu()).masked_fill(lost, 0) + 1e-300
    within(subject, "weight", found.masked_fill(lost, 0), expected.masked_fill(lost, 0).numpy(), allowed.numpy())


@attack("QZ-03", whole_cases, examples=tuple(c for c in EVERY if c.kind in {"int8_channel", "nvfp4", "gguf_q6_k"}))
def no_value_is_further_away_than_the_bound(subject: Subject, case: Weight) -> None:
    """|w - w'| against the codec's error_bound."""
    if claims(subject, case.spec, SCALE_RULES):
        bounded(subject, case)


@attack("QZ-04", law_cases)
def powers_of_two_scale_scales_alone(subject: Subject, case: Weight) -> None:
    """2^1 to 2^5 times the weight: the same codes, the scales times that."""
    weight, factor = case.full(subject), 2.0 ** (1 + case.seed % 5)
    once, more = quantized(subject, case, weight), quantized(subject, case, weight * factor)
    for name, part in once.parts.items():
        scale = part.dtype in {torch.float32, torch.bfloat16, torch.float16} and name in _FLOATING
        if scale and part.dtype == torch.float16 and bool((part.abs() < 2.0**-14).any()):
            return  # the scale is subnormal, and rounded otherwise
        expected = (part.double() * factor).to(part.dtype) if scale else part
        if case.spec.scale_dtype == "e8m0" and name == "scale":
            expected = part + (1 + case.seed % 5)
        same_bits(name, more.parts[name], expected, f"for the weight times {factor}")


@attack("QZ-05", cases)
def every_element_of_any_shape_counts(subject: Subject, case: Weight) -> None:
    """Short groups, half bytes, single rows and columns: each element within its bound."""
    bounded(subject, replace(case, values=("graded", "offset", "outliers")[case.seed % 3]))


@attack("QZ-06", law_cases)
def groups_of_zeros_are_zeros(subject: Subject, case: Weight) -> None:
    """A row of zeros and one of the smallest subnormals, among others; then nothing but zeros."""
    K = -(-case.K // 64) * 64  # nf4 blocks end with rows
    weight = case.full(subject).new_ones(3, K)
    weight[0], weight[2] = 0, torch.finfo(weight.dtype).smallest_normal * torch.finfo(weight.dtype).eps
    # The scale of another row is none of theirs.
    alone = case.spec.rows == 1 and not case.spec.double_quant and case.spec.format != "nvfp4"
    w = quantized(subject, replace(case, N=3, K=K), weight)
    value = quant.decode(w)
    require(bool((value[0] == 0).all()), f"a row of zeros gives {value[0].tolist()}")
    if alone:
        stored = quantize.scales(weight[2:], case.spec)
        scale = stored.get("absmax", stored.get("d", stored.get("scale"))).double()
        power = case.spec.scale_dtype == "e8m0"  # the least power of two is a scale as good as another
        least = weight[2, 0].item() * (power or (scale != 0).any().item())
        require(bool((value[2].double().abs() <= 2 * least).all()), f"a row that underflows gives {value[2].tolist()}")
    nothing = quantized(subject, replace(case, N=3, K=K), torch.zeros_like(weight))
    require(bool((quant.decode(nothing) == 0).all()), "a weight of zeros does not give zeros")


@attack("QZ-07", law_cases)
def what_is_not_finite_stays_in_its_group(subject: Subject, case: Weight) -> None:
    """An inf or NaN in one place: its own group is NaN, every other keeps its bits."""
    spec = case.spec
    N, K = (3, 300) if case.seed % 2 else (130, 150)
    sized = replace(case, N=N, K=K)
    weight = sized.full(subject)
    i, j = case.seed % N, case.seed % K
    clean = quant.decode(quantized(subject, sized, weight.clone()))
    weight[i, j] = (torch.nan, torch.inf, -torch.inf)[case.seed % 3]
    w = quantized(subject, sized, weight)
    found = quant.decode(w)
    group = torch.zeros(N, K, dtype=torch.bool)
    if spec.act_order:
        group[i] = w.parts["g_idx"] == w.parts["g_idx"][j]
    elif spec.element in quant.TABLES:
        size = spec.group * (256 if spec.double_quant else 1)
        start = (i * K + j) // size * size
        group.view(-1)[start : start + size] = True
    else:
        rows, columns = spec.rows or N, spec.group or K
        group[i // rows * rows : (i // rows + 1) * rows, j // columns * columns : (j // columns + 1) * columns] = True
    require(bool(found[group].isnan().all()), f"the group of {weight[i, j].item()} is not all NaN")
    require(bool(found[~group].isfinite().all()), f"{weight[i, j].item()} reaches another group")
    # A mean or a maximum of all scales is moved by a missing block, and an order of columns by a missing value.
    if not (spec.double_quant or spec.act_order or "global_scale" in w.parts):
        same_bits("weight", found[~group], clean[~group], "beside a group that is not finite")


@attack(
    "QZ-08",
    lambda s: weights(s, SCALE_RULES, where=lambda f: f.element in FLOAT8) if _has_fp8(s) else st.none(),
    examples=tuple(Weight("fp8_channel", 300, 3, seed) for seed in (0, 1)),
)
def eight_bit_floats_saturate(subject: Subject, case: Weight | None) -> None:
    """300 rows whose largest ratio rounds to either side of the format's largest, up to 2^120."""
    if case is None or not claims(subject, case.spec, SCALE_RULES):
        return
    case = replace(case, N=300, K=3, values="normal")
    weight = case.full(subject) * 2.0 ** (120 * (case.seed % 2))
    found = quant.decode(quantized(subject, case, weight))
    require(bool(found.isfinite().all()), f"{int((~found.isfinite()).sum())} finite elements became NaN or inf")


def _has_fp8(subject: Subject) -> bool:
    return any(f"format:{name}" in subject.claims for name, row in FORMATS.items() if row.spec.element in FLOAT8)


@attack("QZ-09", law_cases)
def strides_change_no_bit(subject: Subject, case: Weight) -> None:
    """Padded rows, transposed storage, every second row, one row repeated."""
    weight = case.full(subject)
    views = (draw.strided(weight), weight.t().contiguous().t(), weight.repeat_interleave(2, 0)[::2])
    want = quantized(subject, case, weight)
    for view in views:
        require(
            want.same_bits(quantized(subject, case, view)), f"a view with strides {view.stride()} is another weight"
        )
    same = weight[:1].expand(case.N, -1)
    require(quantized(subject, case, same.contiguous()).same_bits(quantized(subject, case, same)), "an expanded row")


@attack("QZ-10", law_cases)
def an_update_keeps_addresses_and_has_the_bits_of_a_fresh_weight(subject: Subject, case: Weight) -> None:
    """out=w in the canonical layout, and in that of the backend's own prepack."""
    first, second = case.full(subject), replace(case, seed=case.seed + 1).full(subject) * 3
    fresh = subject(second, case.spec)
    for w in (subject(first, case.spec), *packed(subject, subject(first, case.spec))):
        before = {name: part.data_ptr() for name, part in w.parts.items()}
        given = subject(second, case.spec, out=w)
        require(given is w, "out is not what is returned")
        require({n: p.data_ptr() for n, p in w.parts.items()} == before, f"an update moves a part of {w!r}")
        have = w if w.layout == CANONICAL else _canonical(w)
        for name, part in fresh.parts.items():
            same_bits(name, have.parts[name], part, f"of an update in layout {w.layout}")


def _canonical(w: QuantTensor) -> QuantTensor:
    found: QuantTensor = rlkernel.prepack(w, layout=CANONICAL)
    return found


@attack("QZ-13", law_cases, scale=0.25)
def an_update_can_be_captured(subject: Subject, case: Weight) -> None:
    """A recorded update, replayed on another weight."""
    if "capturable" not in subject.claims:
        return
    first, second = case.full(subject), replace(case, seed=case.seed + 1).full(subject) * 3
    w = subject(first, case.spec)

    def update(weight: Tensor) -> dict[str, Tensor]:
        subject(weight, case.spec, out=w)
        return {name: part.clone() for name, part in w.parts.items()}

    fresh = [{name: p.clone() for name, p in subject(x, case.spec).parts.items()} for x in (first, second)]
    graphs.replays(subject, {"weight": first}, {"weight": second}, update)
    update(second)
    for name, part in fresh[1].items():
        same_bits(name, w.parts[name], part, "after updates in a graph")


@attack("QZ-15", law_cases, scale=0.2)
def a_weight_that_requires_grad_is_not_detached_silently(subject: Subject, case: Weight) -> None:
    """Refused with gradients on; the plain result under no_grad."""
    weight = case.full(subject)
    leaf = weight.clone().requires_grad_()
    with torch.no_grad():
        off = subject(leaf, case.spec)
    require(off.same_bits(subject(weight, case.spec)), "under no_grad a parameter is another weight")
    try:
        subject(leaf, case.spec)
    except (ArgumentError, ResolutionError):  # by the implementation, or before one is chosen
        return
    raise Violation("a weight that requires grad loses its gradient silently")


def given_of(subject: Subject, case: Weight) -> dict[str, Any]:
    """The arguments of a weight."""
    return {"weight": case.full(subject), "format": case.spec}


derive("quantize", given_of, inputs_untouched=law_cases, determinism=cases)
