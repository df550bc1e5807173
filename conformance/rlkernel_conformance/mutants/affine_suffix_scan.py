"""Planted bugs in affine_suffix_scan@1."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlkernel_conformance.mutants import mutant


@mutant("SC-01", "SC-08", origin="bf16 carry: the state has the dtype of the loads")
def bf16_carry(reference: Any, b: Tensor, a: Any, **rest: Any) -> Any:
    if b.dtype != torch.bfloat16 or b.dim() != 2:
        return reference(b, a, **rest)
    out = reference(b, a, **rest)
    return replace(out, y=out.y.bfloat16().float(), carry=out.carry.bfloat16().float())


@mutant("SC-02", "SC-07", origin="group boundary off by one: start + 1")
def boundary_off_by_one(reference: Any, b: Tensor, a: Any, **rest: Any) -> Any:
    bounds = rest.get("cu_seqlens")
    if bounds is None or bounds.shape[0] < 3:
        return reference(b, a, **rest)
    moved = torch.cat([bounds[:1], (bounds[1:-1] + 1).clamp(max=b.shape[0]), bounds[-1:]])
    return reference(b, a, **{**rest, "cu_seqlens": moved})


@mutant(
    "SC-03",
    "SC-01",
    "SC-02",
    "SC-08",
    "SC-10",
    origin="masked positions are steps without b (OpenRLHF, TRL, ROLL #447)",
)
def masked_positions_are_steps(reference: Any, b: Tensor, a: Any, **rest: Any) -> Any:
    mask = rest.pop("mask", None)
    if mask is None:
        return reference(b, a, **rest)
    out = reference(torch.where(mask, b, 0.0), a if not isinstance(a, Tensor) else torch.where(mask, a, 0.5), **rest)
    return replace(out, y=out.y if rest.get("masked_out") == "carry" else torch.where(mask, out.y, 0.0))


@mutant("SC-04", origin="masks that multiply: NaN * 0 is NaN")
def mask_multiplies(reference: Any, b: Tensor, a: Any, **rest: Any) -> Any:
    mask = rest.get("mask")
    return reference(b, a, **rest) if mask is None else shifted(reference(b, a, **rest), (b * ~mask * 0.0).sum(-1))


@mutant("SC-05", "SC-01", "SC-02", "SC-08", origin="carry through masks reset")
def carry_of_a_masked_position(reference: Any, b: Tensor, a: Any, **rest: Any) -> Any:
    out = reference(b, a, **rest)
    mask = rest.get("mask")
    if mask is None or not mask.shape[-1] or mask.dim() == 1:
        return out
    return replace(out, carry=torch.where(mask[:, 0], out.carry, 0.0))


@mutant("SC-06", origin="a scan by cumulated products, which divides by a: a is kept from 0")
def no_zero_factor(reference: Any, b: Tensor, a: Any, **rest: Any) -> Any:
    return reference(b, torch.where(a == 0, 1e-4, a) if isinstance(a, Tensor) else a, **rest)


@mutant("SC-07", origin="neighbours multiplied by 0 at a boundary")
def neighbours_times_zero(reference: Any, b: Tensor, a: Any, **rest: Any) -> Any:
    out = reference(b, a, **rest)
    mask = rest.get("mask")
    kept = b if mask is None else torch.where(mask, b, 0.0)
    return shifted(out, 0.0 * kept.detach().nan_to_num(posinf=0.0, neginf=0.0, nan=torch.nan).sum())


@mutant("SC-08", origin="gradient of a without the y of the next position: the one at hand is taken")
def gradient_with_the_wrong_y(reference: Any, b: Tensor, a: Any, **rest: Any) -> Any:
    out = reference(b, a, **rest)
    if not isinstance(a, Tensor) or not a.requires_grad:
        return out
    y = out.y.detach() * (a - a.detach()).nan_to_num()
    return replace(reference(b, a.detach(), **rest), y=reference(b, a.detach(), **rest).y + y)


@mutant("SC-08", origin="init detached, and grad claimed all the same")
def init_is_a_constant(reference: Any, b: Tensor, a: Any, **rest: Any) -> Any:
    init = rest.get("init")
    return reference(b, a, **{**rest, "init": None if init is None else init.detach()})


@mutant("SC-09", "SC-02", "SC-03", "SC-05", origin="a launch of zero blocks")
def no_positions_fail(reference: Any, b: Tensor, a: Any, **rest: Any) -> Any:
    if b.numel() == 0:
        raise RuntimeError("CUDA error: invalid configuration argument")
    return reference(b, a, **rest)


@mutant("SC-10", origin="sizes never looked at: what is too long is cut", unchecked=True)
def cuts_what_is_too_long(reference: Any, b: Tensor, a: Any, **rest: Any) -> Any:
    init = rest.get("init")
    return reference(b, a, **{**rest, "init": init if init is None or b.dim() != 2 else init[: b.shape[0]]})


@mutant("SC-11", origin="masked positions zeroed in the caller's tensor")
def zeroes_in_place(reference: Any, b: Tensor, a: Any, **rest: Any) -> Any:
    out = reference(b, a, **rest)
    if rest.get("mask") is not None and not b.requires_grad:
        b.masked_fill_(~rest["mask"], 0.0)
    return out


@mutant("SC-12", "SC-01", "SC-08", "SC-13", "SC-14", origin="floating atomics, declared deterministic")
def differs_from_call_to_call(reference: Any, b: Tensor, a: Any, **rest: Any) -> Any:
    differs_from_call_to_call.calls = getattr(differs_from_call_to_call, "calls", 0) + 1  # type: ignore[attr-defined]
    out = reference(b, a, **rest)
    return replace(out, y=out.y * (1.0 + 2**-22 * (differs_from_call_to_call.calls % 2)))  # type: ignore[attr-defined]


@mutant("SC-13", origin="a split over time that depends on how many rows fill the device")
def depends_on_the_batch(reference: Any, b: Tensor, a: Any, **rest: Any) -> Any:
    out = reference(b, a, **rest)
    return replace(out, y=out.y * (1.0 + 2**-22 * (b.dim() == 2 and b.shape[0] > 100)))


@mutant("SC-14", "SC-10", origin="a look at the mask on the host, to skip work")
def asks_the_host(reference: Any, b: Tensor, a: Any, **rest: Any) -> Any:
    if rest.get("mask") is not None and bool(rest["mask"].all()):
        rest["mask"] = None
    return reference(b, a, **rest)


def shifted(out: Any, by: Tensor) -> Any:
    """The result with something added to every y."""
    return replace(out, y=out.y + (by[:, None] if by.dim() == 1 and out.y.dim() == 2 else by))
