"""Planted bugs in route@1."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from rlkernel_conformance.mutants import plant
from rlkernel_conformance.mutants.bug import Bug, Run
from rlkernel_core.spec.route import RouteCall, RouteResult


def with_ids(right: Run, call: RouteCall, ids: Tensor) -> RouteResult:
    """The result of these ids in place of the best."""
    out: RouteResult = right(replace(call, replay=ids))
    return out


def sigmoid_gates(call: RouteCall, out: RouteResult) -> Tensor:
    at = out.ids.clamp(0, call.logits.shape[1] - 1)
    return torch.sigmoid(call.logits.to(out.gates.dtype)).gather(1, at)


def ties_to_the_larger(right: Run, call: RouteCall) -> RouteResult:
    if call.replay is not None:
        return right(call)
    E = call.logits.shape[1]
    turned = call.logits.detach().flip(1).sort(dim=1, descending=True, stable=True).indices[:, : call.top_k]
    return with_ids(right, call, E - 1 - turned)


def by_rounded_probabilities(right: Run, call: RouteCall) -> RouteResult:
    """Experts are chosen by probabilities, in which logits that differ may be equal."""
    if call.replay is not None:
        return right(call)
    p = call.logits.detach().float().softmax(1).bfloat16()
    return with_ids(right, call, p.sort(dim=1, descending=True, stable=True).indices[:, : call.top_k])


def divided_by_the_sum(right: Run, call: RouteCall) -> RouteResult:
    """Gates of all experts divided by the sum of the chosen, which may be 0."""
    if not call.renormalize:
        return right(call)
    out = right(replace(call, renormalize=False))
    return replace(out, gates=out.gates / out.gates.sum(1, keepdim=True).clamp_min(1e-20))


def gates_of_a_second_choice(right: Run, call: RouteCall) -> RouteResult:
    """Replayed ids, with the gates of the experts that the logits would choose."""
    out = right(call)
    return out if call.replay is None else replace(out, gates=right(replace(call, replay=None)).gates)


def gates_of_mistakes_are_zero(right: Run, call: RouteCall) -> RouteResult:
    out = right(call)
    if call.replay is None:
        return out
    beyond = (call.replay < -1) | (call.replay >= call.logits.shape[1])
    return replace(out, gates=torch.where(beyond, 0, out.gates))


def clamped(right: Run, call: RouteCall) -> RouteResult:
    """An id that is no expert is the nearest one."""
    if call.replay is None:
        return right(call)
    return right(replace(call, replay=call.replay.long().clamp(0, call.logits.shape[1] - 1)))


def unstable(call: RouteCall, out: RouteResult) -> Tensor:
    """Pairs of one expert in the order of falling numbers."""
    E, flat = call.logits.shape[1], out.ids.flatten().flip(0)
    key = torch.where((flat >= 0) & (flat < E), flat, E)
    return len(flat) - 1 - key.sort(stable=True).indices


def neighbors_times_zero(call: RouteCall, out: RouteResult) -> Tensor:
    return out.gates + 0.0 * call.logits.detach().nan_to_num(posinf=0.0, neginf=0.0, nan=torch.nan).sum().to(out.gates)


def without_the_maximum(right: Run, call: RouteCall) -> RouteResult:
    """exp(x) / sum exp(x), which overflows."""
    out = right(call)
    if call.replay is not None:
        return out
    e = call.logits.to(out.gates.dtype).exp()
    chosen = e.gather(1, out.ids)
    return replace(out, gates=chosen / (chosen if call.renormalize else e).sum(1, keepdim=True))


def straight_through(right: Run, call: RouteCall) -> RouteResult:
    """The gradient of the chosen probability alone: that through the sum is left out."""
    out = right(replace(call, logits=call.logits.detach()))
    at = out.ids.clamp(0, call.logits.shape[1] - 1)
    passed = (call.logits.gather(1, at) - call.logits.detach().gather(1, at)).nan_to_num().to(out.gates.dtype)
    return replace(out, gates=out.gates + out.gates.nan_to_num() * passed)


def lower_in_large_batches(call: RouteCall, out: RouteResult) -> Tensor:
    return plant.lower(out.gates, call.logits.shape[0] >= 64)


def cut_replay(call: RouteCall) -> RouteCall:
    ids = call.replay
    return call if ids is None or ids.dim() != 2 else replace(call, replay=ids[:, : call.top_k])


BUGS: Final = {
    "gates_are_sigmoids": Bug("RT-01", "another scoring function", plant.returns(gates=sigmoid_gates)),
    "ties_to_the_larger_id": Bug("RT-02", "ties go to the larger id", ties_to_the_larger),
    "by_rounded_probabilities": Bug(
        "RT-02", "experts chosen by probabilities of 16 bits, ties where there are none", by_rounded_probabilities
    ),
    "divided_by_the_sum": Bug("RT-03", "replayed experts of small probability: divided by about 0", divided_by_the_sum),
    "gates_of_a_second_choice": Bug("RT-04", "replayed ids beside gates of other experts", gates_of_a_second_choice),
    "a_mistake_is_padding": Bug(
        "RT-05", "an id beyond the last expert has the gate 0, as if it were padding", gates_of_mistakes_are_zero
    ),
    "clamped": Bug("RT-05", "an id that is no expert goes to the nearest one", clamped),
    "falling_pairs": Bug("RT-06", "an unstable sort", plant.returns(order=unstable)),
    "neighbors_times_zero": Bug("RT-07", "other rows multiplied by 0", plant.returns(gates=neighbors_times_zero)),
    "without_the_maximum": Bug("RT-08", "a softmax without the maximum subtracted", without_the_maximum),
    "straight_through": Bug("RT-09", "the gradient through the sum is left out", straight_through),
    "no_tokens_fail": Bug("RT-10", "a launch of zero blocks", plant.fails_if(lambda c: c.logits.shape[0] == 0)),
    "cuts_what_is_too_long": plant.lenient("RT-11", "sizes never looked at: more ids than top_k are cut", cut_replay),
    "masks_in_place": Bug(
        "RT-12", "ids are made good where they lie", plant.writes(lambda c: c.replay is None or c.replay.clamp_(min=0))
    ),
    "differs_from_call_to_call": plant.nondeterministic("RT-13", "gates"),
    "batch_dependent": Bug("RT-14", "another kernel for many tokens", plant.returns(gates=lower_in_large_batches)),
    "reads_ids_on_the_host": plant.reads_a_value("RT-15", lambda c: c.logits),
}
