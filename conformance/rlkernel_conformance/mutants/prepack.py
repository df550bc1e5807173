"""Planted bugs in prepack@1."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Final

import torch

from rlkernel_conformance.mutants.bug import Bug, Run
from rlkernel_core.errors import ArgumentError, LayoutError
from rlkernel_core.quant import CANONICAL, QuantTensor
from rlkernel_core.spec.quantize import PrepackCall

_CALLS: Final = count(1)


def with_parts(w: QuantTensor, **parts: torch.Tensor) -> QuantTensor:
    """A weight with some of its parts replaced."""
    return replace(w, parts={**w.parts, **parts})


def permutation_undone_wrongly(right: Run, call: PrepackCall) -> QuantTensor:
    out = right(call)
    return out if out.layout == call.w.layout else with_parts(out, codes=out.parts["codes"].roll(1, 0))


def lowers_scales(right: Run, call: PrepackCall) -> QuantTensor:
    out = right(call)
    if out.layout == CANONICAL or "scale" not in out.parts:
        return out
    scale = out.parts["scale"]
    return with_parts(out, scale=scale.half().to(scale.dtype))


def another_layouts_name(right: Run, call: PrepackCall) -> QuantTensor:
    def flipped(w: QuantTensor) -> QuantTensor:
        return with_parts(w, codes=w.parts["codes"].flip(2).contiguous())

    if call.w.layout == CANONICAL:
        out = right(call)
        return out if out.layout == CANONICAL else flipped(out)
    unpacks = call.layout == CANONICAL and call.w.layout == "reference_tiled"
    return right(replace(call, w=flipped(call.w)) if unpacks else call)


def packs_nothing(right: Run, call: PrepackCall) -> QuantTensor:
    return call.w if call.w.layout == CANONICAL else right(call)


def drops_edge_tiles(right: Run, call: PrepackCall) -> QuantTensor:
    out = right(call)
    if out.layout != CANONICAL and call.w.shape[0] % 16:
        out.parts["codes"][-1:] = 0
    return out


def refuses_without_a_reason(right: Run, call: PrepackCall) -> QuantTensor:
    if call.w.shape[1] % 64:
        raise ArgumentError("input", call.w, "bad", "")
    return right(call)


def packs_in_place(right: Run, call: PrepackCall) -> QuantTensor:
    out, w = right(call), call.w
    if out.layout != w.layout and w.layout == CANONICAL and out.parts["codes"].nbytes == w.parts["codes"].nbytes:
        codes = w.parts["codes"].view(torch.uint8)
        codes.copy_(out.parts["codes"].view(codes.shape))
        return with_parts(out, codes=codes.view(out.parts["codes"].shape))
    return out


def any_name_will_do(right: Run, call: PrepackCall) -> QuantTensor:
    try:
        return right(call)
    except LayoutError:
        return right(replace(call, w=replace(call.w, layout=CANONICAL), layout=None))


def differs_from_call_to_call(right: Run, call: PrepackCall) -> QuantTensor:
    bare = replace(call.w, parts={n: x for n, x in call.w.parts.items() if n != "padding"})
    out = right(replace(call, w=bare))
    if out.layout == call.w.layout:
        return call.w
    if out.layout == CANONICAL:
        return out
    return with_parts(out, padding=torch.full((1,), next(_CALLS), device=call.w.device))


def forgets_the_dtype(right: Run, call: PrepackCall) -> QuantTensor:
    out = right(call)
    return out if out.layout == call.w.layout else replace(out, dtype=torch.float32)


def drops_the_end_of_long_rows(right: Run, call: PrepackCall) -> QuantTensor:
    out = right(call)
    codes = out.parts["codes"]
    if out.layout != CANONICAL or call.w.layout == CANONICAL or codes.dim() == 1 or out.shape[1] <= 8192:
        return out
    kept = codes.view(torch.uint8).clone()
    kept[:, -1] = 0
    return with_parts(out, codes=kept.view(codes.dtype))


BUGS: Final = {
    "permutation_undone_wrongly": Bug(
        "PP-01", "a permutation undone by itself instead of by its inverse", permutation_undone_wrongly
    ),
    "lowers_scales": Bug("PP-01", "scales cast to half in the packed weight", lowers_scales),
    "another_layouts_name": Bug("PP-02", "the layout id of another arrangement", another_layouts_name),
    "packs_nothing": Bug("PP-02", "a layout that is asked for by name, and not made", packs_nothing),
    "drops_edge_tiles": Bug("PP-03", "edge tiles left out", drops_edge_tiles),
    "refuses_without_a_reason": Bug("PP-03", "a shape refused without a reason", refuses_without_a_reason),
    "packs_in_place": Bug("PP-04", "codes moved in place", packs_in_place),
    "any_name_will_do": Bug("PP-05", "an unknown layout taken for the preferred one", any_name_will_do),
    "differs_from_call_to_call": Bug(
        "PP-06", "padding left as fresh storage held it, declared deterministic", differs_from_call_to_call
    ),
    "forgets_the_dtype": Bug("PP-97", "the dtype of a weight is that of the kernel afterwards", forgets_the_dtype),
    "drops_the_end_of_long_rows": Bug("PP-98", "a byte too few of a long row", drops_the_end_of_long_rows),
}
