"""Every optional argument does something: in some call another value of it shows, or it says what it is a hint for."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import rlkernel as rlk
from rlkernel_conformance.example_calls import B, T, base, tokens
from rlkernel_core.spec import OPERATORS
from tests.argument_changes import CHANGES
from tests.observed import observed

# Arguments that change no result of a call in one process, and what shows them.
HINTS = {
    ("logprob", "group"): "collectives: test_a_group_talks; shards: LP-31 to LP-34",
    ("linear_logprob", "backward"): "memory: test_saved_logits_are_kept_for_the_backward_pass",
    ("linear_logprob", "group"): "collectives: test_a_group_talks; shards: LL-20 to LL-22",
    ("linear_logprob", "partial_grad"): "a part of a gradient: LL-44",
    ("linear_policy_loss", "partial_grad"): "a part of a gradient: LPL-22",
    ("linear_divergence", "backward"): "memory: test_saved_logits_are_kept_for_the_backward_pass",
    ("linear_policy_loss", "group"): "collectives: test_a_group_talks; shards: LPL-12",
    ("linear_policy_loss", "process_group"): "collectives: test_a_group_talks; ranks: LPL-19",
    ("policy_loss", "process_group"): "collectives: test_a_group_talks; ranks: PL-35",
    ("linear", "group"): "collectives: test_a_group_talks; shares: LN-15, LN-16",
    ("advantage", "process_group"): "collectives: test_a_group_talks; ranks: AD-18",
    ("whiten", "process_group"): "collectives: test_a_group_talks; ranks: WH-07",
    ("shape_rewards", "process_group"): "collectives: test_a_group_talks; ranks: SR-13",
    ("quantize", "out"): "where the result is: test_a_weight_is_quantized_in_place",
    ("capture", "group"): "its lock: test_a_capture_group_is_entered",
}
SHOWN = [(operator, name) for operator in OPERATORS for name in CHANGES[operator]() if (operator, name) not in HINTS]


@pytest.mark.parametrize("operator, name", SHOWN)
def test_another_value_of_an_argument_shows(operator, name, alone) -> None:
    change = CHANGES[operator]()[name]
    given = base(operator) | dict(change.given)
    assert observed(operator, given) != observed(operator, {**given, name: change.value})


@pytest.mark.parametrize("operator, name", [key for key in HINTS if "collectives" in HINTS[key]])
def test_a_group_talks(operator, name, alone, monkeypatch) -> None:
    given = base(operator) | dict(CHANGES[operator]()[name].given)
    without = observed(operator, given)
    calls = []
    for collective in ("all_gather", "all_reduce"):
        original = getattr(dist, collective)
        monkeypatch.setattr(dist, collective, lambda *a, f=original, **k: calls.append(f) or f(*a, **k))
    assert observed(operator, {**given, name: alone}) == without  # one rank has it all
    assert len(calls) > 0


@pytest.mark.parametrize("operator", ["linear_logprob", "linear_divergence"])
def test_saved_logits_are_kept_for_the_backward_pass(operator) -> None:
    def kept(backward):
        given = base(operator)
        logits = torch.Size((len(given["hidden"]), len(given["weight"])))
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.shape) or t, lambda t: t):
            getattr(rlk, operator)(**{**given, "hidden": given["hidden"].requires_grad_(), "backward": backward})
        return sizes.count(logits)

    assert kept("save") == kept("recompute") + 1


@pytest.mark.parametrize("operator", ["linear_logprob", "linear_policy_loss"])
def test_room_to_spare_changes_no_bit(operator) -> None:
    given = base(operator)
    assert observed(operator, given) == observed(operator, {**given, "max_workspace_bytes": 2**34})


def test_a_weight_is_quantized_in_place() -> None:
    given, out = base("quantize"), CHANGES["quantize"]()["out"].value
    assert rlk.quantize(**given, out=out) is out
    assert out.same_bits(rlk.quantize(**given))


def test_a_capture_group_is_entered() -> None:
    class Lock:
        entered = 0

        def __enter__(self):
            Lock.entered += 1

        def __exit__(self, *error):
            pass

    group = rlk.CaptureGroup("decode")
    group.lock = Lock()
    graphed = rlk.capture(torch.neg, (torch.ones(B, T),), group=group)
    before = Lock.entered
    graphed(tokens().float())
    assert Lock.entered > before > 0
