"""Attacks on prepack@1."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import strategies as st

import rlkernel
from rlkernel import policy
from rlkernel_conformance.attack import attack
from rlkernel_conformance.call_checks import leaves, untouched
from rlkernel_conformance.clauses.derived_attacks import derive
from rlkernel_conformance.compare import Violation, plain, require, same_bits
from rlkernel_conformance.quantized_weights import (
    EVERY,
    STORED,
    Weight,
    claims,
    of_other_layout,
    refuses_layout,
    weights,
)
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions import quant
from rlkernel_core.errors import ArgumentError, LayoutError, ResolutionError
from rlkernel_core.quant import CANONICAL, QuantTensor
from rlkernel_core.quant.layouts import KNOWN


def cases(subject: Subject) -> st.SearchStrategy[Weight]:
    """Weights of every claimed format, in shapes that a layout may want: multiples of 128."""
    return weights(subject, STORED).map(lambda c: replace(c, N=128 * (1 + c.N % 2), K=128 * (1 + c.K % 3)))


def returned(subject: Subject, w: QuantTensor, layout: str | None = None) -> None:
    """A packed weight, put back into the canonical layout, has every bit of the one it was made from."""
    before = {name: x.clone() for name, x in w.parts.items()}
    there = subject(w, layout=layout)
    require(
        (there.spec, there.shape, there.dtype, there.device) == (w.spec, w.shape, w.dtype, w.device),
        f"{w!r} becomes {there!r}",
    )
    back = subject(there, layout=CANONICAL)
    require(back.layout == CANONICAL, f"layout='canonical' gives {back.layout!r}")
    back.validate()
    require(back.parts.keys() == before.keys(), f"parts {sorted(back.parts)} instead of {sorted(before)}")
    for name, part in before.items():
        same_bits(name, back.parts[name], part, "after prepack and back")


@attack("PP-01", cases, examples=tuple(replace(c, N=16, K=128) for c in EVERY))
def packing_loses_nothing(subject: Subject, case: Weight) -> None:
    """There and back, from canonical, from packed, and by name."""
    if not claims(subject, case.spec, STORED):
        return
    w = case.stored(subject)
    returned(subject, w)
    packed = subject(w)
    returned(subject, w, packed.layout)
    again = subject(packed)
    require(again.layout == packed.layout, f"packed twice, {packed.layout!r} becomes {again.layout!r}")
    for name, part in leaves(packed).items():
        same_bits(name, leaves(again)[name], part, "when packed twice")


@attack("PP-02", cases)
def a_packed_weight_is_read_right_or_refused(subject: Subject, case: Weight) -> None:
    """By every backend here, the definition's among them, that has a qmatmul; it has the layout that was asked for."""
    w = case.stored(subject)
    packed = subject(w)
    require(isinstance(packed.layout, str) and packed.layout != "", f"the layout is {packed.layout!r}")
    if packed.layout == CANONICAL:
        require(packed.same_bits(w), "a weight in layout 'canonical' is arranged otherwise")
    for layout in (*KNOWN, packed.layout):
        try:
            there = subject(w, layout=layout)
        except (ArgumentError, LayoutError):  # of another implementation
            continue
        require(there.layout == layout, f"layout={layout!r} gives {there.layout!r}")
    x = torch.eye(case.K, device=w.device)[: case.K : 37].contiguous()
    want = quant.decode(w).double().numpy().T[: case.K : 37]
    for backend in policy.installed():
        if not Subject(backend, "qmatmul", subject.device).impls:
            continue
        with rlkernel.use(backend, fallback="error"):
            try:
                y = plain(rlkernel.qmatmul(x, packed), "y")
            except (LayoutError, ResolutionError):
                continue
        off = abs(y - want) > 2.0**-10 * abs(want)
        if case.spec.act == "none" and off.any():
            raise Violation(f"{backend} reads layout {packed.layout!r} as another weight, and does not refuse it")


@attack("PP-03", lambda s: weights(s, STORED, rows=40))
def any_shape_is_packed_or_refused_with_a_reason(subject: Subject, case: Weight) -> None:
    """Shapes no multiple of a tile; a refusal names the argument."""
    w = case.stored(subject)
    try:
        subject(w)
    except ArgumentError as error:
        require(error.argument in {"w", "layout"}, f"a shape is blamed on {error.argument}")
        require(len(error.problem) > 10, f"a shape is refused without a reason: {error}")
        return
    returned(subject, w)


@attack("PP-04", cases)
def the_weight_stays_and_shares_no_codes(subject: Subject, case: Weight) -> None:
    """Inputs and global state; codes in a new layout are new memory."""
    w = case.stored(subject)
    packed = untouched({"w": w}, lambda: subject(w))
    if packed.layout != w.layout:
        codes = w.parts["codes"].untyped_storage().data_ptr()
        shared = [name for name, x in packed.parts.items() if x.untyped_storage().data_ptr() == codes]
        require(not shared, f"{shared} in layout {packed.layout!r} are the codes of the weight it was made from")
    back = subject(packed, layout=CANONICAL)
    if packed.layout != CANONICAL:
        same = back.parts["codes"].untyped_storage().data_ptr() == packed.parts["codes"].untyped_storage().data_ptr()
        require(not same, "canonical codes are memory of the packed ones")


@attack("PP-05", cases, scale=0.2)
def an_unknown_layout_is_refused(subject: Subject, case: Weight) -> None:
    """To pack into, and to pack from."""
    w = case.stored(subject)
    subject(w)
    refuses_layout(subject, w, layout="tiles_of_nobody")
    refuses_layout(subject, of_other_layout(w))
    refuses_layout(subject, of_other_layout(w), layout=CANONICAL)


derive("prepack", lambda s, c: {"w": c.stored(s)}, determinism=cases, scale=0.5)
