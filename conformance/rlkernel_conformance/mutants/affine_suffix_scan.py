"""Planted bugs in affine_suffix_scan@1."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from rlkernel_conformance.mutants import plant
from rlkernel_conformance.mutants.bug import Bug, Run
from rlkernel_core.spec.affine_suffix_scan import AffineSuffixScanCall, ScanResult


def bf16_carry(right: Run, call: AffineSuffixScanCall) -> ScanResult:
    out = right(call)
    if call.b.dtype != torch.bfloat16 or call.b.dim() != 2:
        return out
    return replace(out, y=out.y.bfloat16().float(), carry=out.carry.bfloat16().float())


def moved_starts(starts: Tensor) -> Tensor:
    """Starts of packed sequences, but for the first, one later."""
    return torch.cat([starts[:1], (starts[1:-1] + 1).minimum(starts[-1]), starts[-1:]]) if len(starts) > 2 else starts


def masked_positions_are_steps(right: Run, call: AffineSuffixScanCall) -> ScanResult:
    mask, a = call.mask, call.a
    if mask is None:
        return right(call)
    factor = torch.where(mask, a, 0.5) if isinstance(a, Tensor) else a
    out = right(replace(call, b=torch.where(mask, call.b, 0.0), a=factor, mask=None))
    return out if call.masked_out == "carry" else replace(out, y=torch.where(mask, out.y, 0.0))


def shifted(y: Tensor, by: Tensor) -> Tensor:
    """Every y with something added, which may be one number a row."""
    return y + (by[:, None] if by.dim() == 1 and y.dim() == 2 else by)


def mask_multiplies(call: AffineSuffixScanCall, out: ScanResult) -> Tensor:
    return out.y if call.mask is None else shifted(out.y, (call.b * ~call.mask * 0.0).sum(-1))


def carry_of_a_masked_position(call: AffineSuffixScanCall, out: ScanResult) -> Tensor:
    mask = call.mask
    if mask is None or not mask.shape[-1] or mask.dim() == 1:
        return out.carry
    return torch.where(mask[:, 0], out.carry, 0.0)


def neighbors_times_zero(call: AffineSuffixScanCall, out: ScanResult) -> Tensor:
    kept = call.b if call.mask is None else torch.where(call.mask, call.b, 0.0)
    return shifted(out.y, 0.0 * kept.detach().nan_to_num(posinf=0.0, neginf=0.0, nan=torch.nan).sum())


def gradient_with_the_wrong_y(right: Run, call: AffineSuffixScanCall) -> ScanResult:
    a = call.a
    if not isinstance(a, Tensor) or not a.requires_grad:
        return right(call)
    out = right(replace(call, a=a.detach()))
    return replace(out, y=out.y + out.y.detach() * (a - a.detach()).nan_to_num())


def with_cut_init(call: AffineSuffixScanCall) -> AffineSuffixScanCall:
    return call if call.init is None or call.b.dim() != 2 else replace(call, init=call.init[: call.b.shape[0]])


BUGS: Final = {
    "bf16_carry": Bug("SC-01", "bf16 carry: the state has the dtype of the loads", bf16_carry),
    "boundary_off_by_one": Bug("SC-02", "group boundary off by one: start + 1", plant.maps(cu_seqlens=moved_starts)),
    "masked_positions_are_steps": Bug(
        "SC-03", "masked positions are steps without b (OpenRLHF, TRL, ROLL #447)", masked_positions_are_steps
    ),
    "mask_multiplies": Bug("SC-04", "masks that multiply: NaN * 0 is NaN", plant.returns(y=mask_multiplies)),
    "carry_of_a_masked_position": Bug(
        "SC-05", "carry through masks reset", plant.returns(carry=carry_of_a_masked_position)
    ),
    "no_zero_factor": Bug(
        "SC-06",
        "a scan by cumulated products, which divides by a: a is kept from 0",
        plant.maps(a=lambda a: torch.where(a == 0, 1e-4, a) if isinstance(a, Tensor) else a),
    ),
    "neighbors_times_zero": Bug(
        "SC-07", "neighbors multiplied by 0 at a boundary", plant.returns(y=neighbors_times_zero)
    ),
    "gradient_with_the_wrong_y": Bug(
        "SC-08", "gradient of a without the y of the next position: the one at hand is taken", gradient_with_the_wrong_y
    ),
    "init_is_a_constant": Bug("SC-08", "init detached, and grad claimed all the same", plant.maps(init=Tensor.detach)),
    "no_positions_fail": Bug("SC-09", "a launch of zero blocks", plant.fails_if(lambda c: c.b.numel() == 0)),
    "cuts_what_is_too_long": plant.lenient("SC-10", "sizes never looked at: what is too long is cut", with_cut_init),
    "zeroes_in_place": Bug(
        "SC-11",
        "masked positions zeroed in the caller's tensor",
        plant.writes(lambda c: None if c.mask is None or c.b.requires_grad else c.b.masked_fill_(~c.mask, 0.0)),
    ),
    "differs_from_call_to_call": plant.nondeterministic("SC-12", "y"),
    "depends_on_the_batch": plant.batch_dependent(
        "SC-13",
        "y",
        "a split over time that depends on how many rows fill the device",
        lambda c: c.b.dim() == 2 and c.b.shape[0] > 100,
    ),
    "asks_the_host": Bug(
        "SC-14",
        "a look at the mask on the host, to skip work",
        plant.reads_back(lambda c, o: None if c.mask is None else c.mask.all()),
    ),
}
