"""Planted bugs in prepack@1."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from rlkernel_conformance.mutants import mutant
from rlkernel_core.errors import ArgumentError, LayoutError
from rlkernel_core.quant import CANONICAL, QuantTensor


def _with_codes(w: QuantTensor, codes: torch.Tensor) -> QuantTensor:
    return replace(w, parts={**w.parts, "codes": codes})


@mutant("PP-01", "PP-02", "PP-03", origin="a permutation undone by itself instead of by its inverse")
def permutation_undone_wrongly(reference: Any, w: QuantTensor, *, layout: Any = None) -> Any:
    out = reference(w, layout=layout)
    return _with_codes(out, out.parts["codes"].roll(1, 0)) if out.layout != w.layout else out


@mutant("PP-01", "PP-03", origin="scales cast to half in the packed weight")
def lowers_scales(reference: Any, w: QuantTensor, *, layout: Any = None) -> Any:
    out = reference(w, layout=layout)
    if out.layout == CANONICAL or "scale" not in out.parts:
        return out
    scale = out.parts["scale"]
    return replace(out, parts={**out.parts, "scale": scale.half().to(scale.dtype)})


@mutant("PP-02", origin="the layout id of another arrangement")
def another_layout_s_name(reference: Any, w: QuantTensor, *, layout: Any = None) -> Any:
    if w.layout == CANONICAL:
        out = reference(w, layout=layout)
        return out if out.layout == CANONICAL else _with_codes(out, out.parts["codes"].flip(2).contiguous())
    back = (
        w
        if layout != CANONICAL or w.layout != "reference_tiled"
        else _with_codes(w, w.parts["codes"].flip(2).contiguous())
    )
    return reference(back, layout=layout)


@mutant("PP-03", origin="edge tiles left out")
def drops_edge_tiles(reference: Any, w: QuantTensor, *, layout: Any = None) -> Any:
    out = reference(w, layout=layout)
    if out.layout != CANONICAL and w.shape[0] % 16:
        out.parts["codes"][-1:] = 0
    return out


@mutant("PP-03", origin="a shape refused without a reason")
def refuses_without_a_reason(reference: Any, w: QuantTensor, *, layout: Any = None) -> Any:
    if w.shape[1] % 64:
        raise ArgumentError("input", w, "bad", "")
    return reference(w, layout=layout)


@mutant("PP-04", "PP-02", origin="codes moved in place")
def packs_in_place(reference: Any, w: QuantTensor, *, layout: Any = None) -> Any:
    out = reference(w, layout=layout)
    if out.layout != w.layout and w.layout == CANONICAL and out.parts["codes"].nbytes == w.parts["codes"].nbytes:
        codes = w.parts["codes"].view(torch.uint8)
        codes.copy_(out.parts["codes"].view(codes.shape))
        return _with_codes(out, codes.view(out.parts["codes"].shape))
    return out


@mutant("PP-05", origin="an unknown layout taken for the preferred one")
def any_name_will_do(reference: Any, w: QuantTensor, *, layout: Any = None) -> Any:
    try:
        return reference(w, layout=layout)
    except LayoutError:
        return reference(replace(w, layout=CANONICAL))


@mutant("PP-06", origin="padding left as fresh storage held it, declared deterministic")
def differs_from_call_to_call(reference: Any, w: QuantTensor, *, layout: Any = None) -> Any:
    if not isinstance(w, QuantTensor) or "padding" not in w.parts:
        out = reference(w, layout=layout)
    else:
        bare = replace(w, parts={n: x for n, x in w.parts.items() if n != "padding"})
        out = reference(bare, layout=layout)
        out = w if out.layout == w.layout else out
    if out.layout in {w.layout, CANONICAL}:
        return out
    differs_from_call_to_call.calls = getattr(differs_from_call_to_call, "calls", 0) + 1  # type: ignore[attr-defined]
    padding = torch.full((1,), differs_from_call_to_call.calls, device=w.device)  # type: ignore[attr-defined]
    return replace(out, parts={**out.parts, "padding": padding})
