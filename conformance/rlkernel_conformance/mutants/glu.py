"""Planted bugs in glu@1."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from rlkernel_conformance.mutants import plant
from rlkernel_conformance.mutants.bug import Bug, How, Run
from rlkernel_core.spec.glu import GluCall


def up_first(right: Run, call: GluCall) -> Tensor:
    return right(replace(call, x=torch.cat(call.x.chunk(2, -1)[::-1], -1)))


def tanh_for_erf(right: Run, call: GluCall) -> Tensor:
    return right(replace(call, activation="silu" if call.activation == "gelu" else call.activation))


def rounded_before_up(right: Run, call: GluCall) -> Tensor:
    gate, up = call.x.chunk(2, -1)
    return right(replace(call, x=torch.cat([gate, torch.ones_like(up)], -1))) * up


def up_is_clamped(right: Run, call: GluCall) -> Tensor:
    gate, up = call.x.chunk(2, -1)
    return right(replace(call, x=torch.cat([gate, up.clamp(-1.5, 1.5)], -1)))


def neighbors_times_zero(right: Run, call: GluCall) -> Tensor:
    return right(call) + 0.0 * call.x.detach().nan_to_num(posinf=0.0, neginf=0.0, nan=torch.nan).sum()


def gate_is_a_constant(right: Run, call: GluCall) -> Tensor:
    gate, up = call.x.chunk(2, -1)
    return right(replace(call, x=torch.cat([gate.detach(), up], -1)))


def drops_an_odd_column(call: GluCall) -> GluCall:
    x = call.x
    return replace(call, x=x[..., : x.shape[-1] // 2 * 2]) if x.dim() and x.shape[-1] > 1 else call


def adds_in_place(call: GluCall) -> None:
    if not call.x.requires_grad:
        call.x[..., : call.x.shape[-1] // 2].mul_(2)


def lower_in(wanted: plant.Change) -> How:
    return lambda right, call: plant.lower(right(call), wanted(call))


BUGS: Final = {
    "up_first": Bug("GL-01", "halves taken the other way round", up_first),
    "another_activation": Bug("GL-01", "one activation for another", tanh_for_erf),
    "rounded_before_up": Bug("GL-02", "one rounding more, of the activation (transformers)", rounded_before_up),
    "up_is_clamped": Bug("GL-03", "up is clamped, as in gpt-oss", up_is_clamped),
    "neighbors_times_zero": Bug("GL-04", "columns beyond the end multiplied by 0", neighbors_times_zero),
    "gate_is_a_constant": Bug("GL-05", "the gradient leaves the gate out", gate_is_a_constant),
    "no_rows_fail": Bug("GL-06", "a launch of zero blocks", plant.fails_if(lambda c: c.x.numel() == 0)),
    "drops_an_odd_column": plant.lenient("GL-07", "sizes never looked at: an odd column is cut", drops_an_odd_column),
    "activates_in_place": Bug("GL-08", "the gate is overwritten", plant.writes(adds_in_place)),
    "differs_from_call_to_call": Bug(
        "GL-09", "another digit at every second call", plant.alternates(lower_in(lambda _: True))
    ),
    "depends_on_the_batch": Bug(
        "GL-10",
        "vector code in the middle of a tensor and scalar code at its end (torch's own silu on CPUs)",
        lower_in(lambda c: c.x.numel() < 3 * c.x.shape[-1]),
    ),
    "asks_the_host": Bug("GL-11", "the host looks at a value", plant.reads_back(lambda c, _: c.x.reshape(-1)[0])),
}
