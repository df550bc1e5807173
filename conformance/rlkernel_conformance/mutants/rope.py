"""Planted bugs in rope@1."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from rlkernel_conformance.mutants import plant
from rlkernel_conformance.mutants.bug import Bug, Run
from rlkernel_core.spec.rope import RopeCall, RopeResult


def rounded_norm(right: Run, call: RopeCall) -> RopeResult:
    """The norm is a call of its own, at angles of 0, and its result is stored."""
    if call.eps is None:
        return right(call)
    still = torch.zeros_like(call.table)
    still[:, : still.shape[1] // 2] = 1
    normed = right(replace(call, table=still))
    return right(replace(call, q=normed.q, k=normed.k, q_weight=None, k_weight=None, eps=None, offset=0.0))


def one_weight_for_both(right: Run, call: RopeCall) -> RopeResult:
    either = call.k_weight if call.q_weight is None else call.q_weight
    return right(replace(call, q_weight=either, k_weight=either))


def the_rest_is_rotated(right: Run, call: RopeCall) -> RopeResult:
    """Halves of the head in place of halves of the table's width; an odd column stays."""
    R, D = call.table.shape[1], call.q.shape[-1] // 2 * 2
    half = call.table[:, : R // 2], call.table[:, R // 2 :]
    more = (D - R) // 2
    wide = torch.cat([half[0], half[0][:, :1].expand(-1, more), half[1], half[1][:, :1].expand(-1, more)], 1)
    return right(replace(call, table=wide))


def root_is_a_constant(right: Run, call: RopeCall) -> RopeResult:
    def scaled(x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None or call.eps is None:
            return x
        r = (x.float().square().mean(-1, keepdim=True) + call.eps).rsqrt().detach()
        return (x * r * (weight.float() + call.offset)).to(x.dtype)

    q, k = scaled(call.q, call.q_weight), scaled(call.k, call.k_weight)
    out, plain = right(call), right(replace(call, q=q, k=k, q_weight=None, k_weight=None, eps=None, offset=0.0))
    return RopeResult(*(y.detach() + (z - z.detach()) for y, z in ((out.q, plain.q), (out.k, plain.k))))


def rotated_forward_again(right: Run, call: RopeCall) -> RopeResult:
    R = call.table.shape[1]
    back = torch.cat([call.table[:, : R // 2], -call.table[:, R // 2 :]], 1)
    out, other = right(call), right(replace(call, table=back))
    return RopeResult(*(y.detach() + (z - z.detach()) for y, z in ((out.q, other.q), (out.k, other.k))))


def from_the_end(call: RopeCall) -> Tensor:
    at = call.positions.long()
    return torch.where(at < 0, at + call.table.shape[0], at)


def neighbors_times_zero(call: RopeCall, out: RopeResult) -> Tensor:
    return out.q + 0.0 * call.q.detach().nan_to_num(posinf=0.0, neginf=0.0, nan=torch.nan).sum()


def with_cut_heads(call: RopeCall) -> RopeCall:
    whole = call.k.dim() == call.q.dim() and call.k.shape[-1] > call.q.shape[-1]
    return replace(call, k=call.k[..., : call.q.shape[-1]]) if whole else call


def rotates_in_place(call: RopeCall) -> None:
    if not (call.q.requires_grad or call.k.requires_grad):
        call.q.mul_(0.5)


BUGS: Final = {
    "positions_from_one": Bug(
        "RO-01",
        "positions are counted from 1",
        plant.given(table=lambda c: c.table.roll(-1, 0)),
    ),
    "sines_before_cosines": Bug(
        "RO-01",
        "the table's halves taken for one another",
        plant.given(table=lambda c: c.table.roll(c.table.shape[1] // 2, 1)),
    ),
    "eps_behind_the_root": Bug(
        "RO-01", "eps is added to the root", plant.where(lambda c: c.eps, plant.given(eps=lambda c: c.eps * c.eps))
    ),
    "rounded_before_the_rotation": Bug("RO-02", "one rounding more, of the norm (transformers' Qwen3)", rounded_norm),
    "table_in_16_bits": Bug(
        "RO-02",
        "cosines rounded to the dtype of q (vLLM's cache, transformers)",
        plant.given(table=lambda c: c.table.to(c.q.dtype).float()),
    ),
    "one_weight_for_both": Bug("RO-03", "keys are multiplied with the queries' weight", one_weight_for_both),
    "the_rest_is_rotated": Bug("RO-04", "a partial width is taken for a whole one", the_rest_is_rotated),
    "interleaved_is_ignored": Bug("RO-05", "GPT-J's pairs taken for GPT-NeoX's", plant.ignores("interleaved")),
    "offset_is_ignored": Bug("RO-06", "Gemma's weights taken for Qwen's", plant.ignores("offset")),
    "last_row_beyond_the_table": Bug(
        "RO-07",
        "positions are clamped into the table",
        plant.given(positions=lambda c: c.positions.long().clamp(0, c.table.shape[0] - 1)),
    ),
    "counted_from_the_end": Bug(
        "RO-07",
        "negative positions are indices from the end, as in Python",
        plant.given(positions=from_the_end),
    ),
    "neighbors_times_zero": Bug("RO-08", "heads beyond the end multiplied by 0", plant.returns(q=neighbors_times_zero)),
    "root_is_a_constant": Bug("RO-09", "the gradient goes past the root", root_is_a_constant),
    "rotated_forward_again": Bug("RO-09", "gradients rotated forward, not back", rotated_forward_again),
    "weight_is_a_constant": Bug(
        "RO-09", "a weight detached, and grad claimed all the same", plant.maps(k_weight=Tensor.detach)
    ),
    "no_tokens_fail": Bug("RO-10", "a launch of zero blocks", plant.fails_if(lambda c: c.q.numel() == 0)),
    "cuts_what_is_too_long": plant.lenient("RO-11", "sizes never looked at: wide keys are cut", with_cut_heads),
    "rotates_in_place": Bug("RO-12", "written over q, as vLLM's kernel does", plant.writes(rotates_in_place)),
    "differs_from_call_to_call": plant.nondeterministic("RO-13", "q"),
    "depends_on_the_batch": plant.batch_dependent(
        "RO-14",
        "k",
        "a head is split over programs where few would leave the device idle",
        lambda c: c.k.numel() < 3 * c.k.shape[-1],
    ),
    "asks_the_host": plant.reads_a_value("RO-15", lambda c: c.positions),
}
