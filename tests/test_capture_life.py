"""capture@1: what moves, pauses and is evicted, and how it is counted."""

from __future__ import annotations

import logging
import weakref

import pytest
import torch
from torch import nn

from rlkernel_common.graphs.eager import EagerRecorder, EagerRecording
from rlkernel_core.errors import CaptureError
from rlkernel_core.spec.graphed import CaptureGroup
from rlkernel_torch.direct import capture, qmatmul, quantize
from tests.recorders import ByGeneration, graphed


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 3, bias=False)

    @torch.no_grad()
    def forward(self, x):
        return self.head(x)


def test_derived_and_rebound_tensors_are_watched_through_callables():
    holder = {"w": torch.ones(2)}
    g = capture(lambda x: x * holder["w"], (torch.ones(2),), static=(lambda: holder["w"], {"scales": [torch.ones(1)]}))
    holder["w"] = torch.zeros(2)
    assert g.check_static() == ("static.0",)
    assert g(torch.ones(2)).tolist() == [0.0, 0.0]
    assert g.stats.recaptures == {"static tensors moved": 1}


def test_a_quantized_weight_is_static_and_requantized_in_place():
    first, second = torch.randn(8, 32), torch.randn(8, 32)
    w = quantize(first, "int8_channel")
    g = capture(qmatmul, (torch.ones(2, 32), w), static=(w,), verify="always")
    x = torch.randn(2, 32)
    assert torch.equal(g(x, w), qmatmul(x, w))
    for name, part in quantize(second, "int8_channel").parts.items():
        w.parts[name].copy_(part)
    assert g.check_static() == ()
    assert torch.equal(g(x, w), qmatmul(x, w))
    w.parts["scale"] = w.parts["scale"].clone()
    assert g.check_static() == ("static.0.parts.scale",)
    assert (g.stats.captures, g.stats.copied_bytes) == (1, 2 * x.nbytes)


def test_a_weight_update_reports_what_moved_and_allows_no_replay_inside():
    policy = Policy()
    g = capture(policy, (torch.ones(1, 3),))
    with g.weight_update() as update:
        policy.head.weight.data.fill_(1)
        with pytest.raises(CaptureError, match="paused"):
            g(torch.ones(1, 3))
    assert update.changed == ()
    with g.weight_update(canary=(torch.ones(1, 3),)) as update:
        policy.head.weight = nn.Parameter(torch.ones(3, 3))
    assert update.changed == ("fn.head.weight",)
    assert (g.stats.captures, g.stats.verified) == (2, 1)


def test_nothing_of_the_group_replays_while_weights_are_written():
    policy, group = Policy(), CaptureGroup("policy")
    g, h = (capture(policy, (torch.ones(1, 3),), group=group) for _ in range(2))
    elsewhere = capture(policy, (torch.ones(1, 3),), group=CaptureGroup("other"))
    with g.weight_update(), h.weight_update() as update:
        policy.head.weight = nn.Parameter(torch.ones(3, 3))
        g.resume()
        for act in (lambda: g(torch.ones(1, 3)), lambda: h(torch.ones(1, 3)), h.warm):
            with pytest.raises(CaptureError, match="paused while weights of their group are written"):
                act()
        assert elsewhere(torch.ones(1, 3)).tolist() == [[3.0, 3.0, 3.0]]
    assert update.changed == ("fn.head.weight",)
    assert g(torch.ones(1, 3)).tolist() == h(torch.ones(1, 3)).tolist() == [[3.0, 3.0, 3.0]]


def test_a_weight_update_that_fails_still_looks_at_the_weights():
    policy = Policy()
    g = capture(policy, (torch.ones(1, 3),), on_guard_fail="raise")
    with pytest.raises(KeyError), g.weight_update() as update:
        policy.head.weight = nn.Parameter(torch.ones(3, 3))
        raise KeyError
    assert update.changed == ("fn.head.weight",)
    assert g.stats.state == "guarded"


def test_a_canary_leaves_no_trace():
    count = torch.zeros(1)
    g = capture(lambda x: x + count.add_(1) + torch.rand(1), (torch.ones(1),), mutates=(count,))
    state = torch.get_rng_state()
    with g.weight_update(canary=(torch.ones(1),)):
        count.fill_(5)
    assert count.item() == 5
    assert torch.equal(state, torch.get_rng_state())


def test_a_discarded_function_keeps_no_static_tensor_alive():
    layer = {"packed": torch.ones(2)}
    g = capture(lambda x, w: w.add_(x), (torch.ones(2), layer["packed"]), mutates=(lambda: layer["packed"],))
    gone = weakref.ref(layer.pop("packed"))
    g.pause("discard")
    assert gone() is None
    layer["packed"] = torch.zeros(2)
    g.resume()
    assert g.warm() == 1  # the example's, with the tensor that is static now
    g(torch.ones(2), layer["packed"])
    assert layer["packed"].tolist() == [1.0, 1.0]
    assert (g.stats.captures, g.stats.recaptures) == (2, {"discarded": 1})
    g.close()
    gone = weakref.ref(layer.pop("packed"))
    assert gone() is None


def test_resume_looks_at_weights_that_moved_while_asleep():
    policy = Policy()
    g = capture(policy, (torch.ones(1, 3),), on_guard_fail="raise")
    g.pause()
    policy.head.weight.data = torch.ones(3, 3)
    with pytest.raises(CaptureError, match="moved"):
        g.resume()
    g.invalidate()
    assert g(torch.ones(1, 3)).tolist() == [[3.0, 3.0, 3.0]]


def test_close_is_for_good_and_harmless_when_repeated():
    g = capture(lambda x: x, (torch.ones(1),))
    g.close()
    g.close()
    assert (g.stats.state, g.stats.graphs, g.explain()) == ("closed", 0, "refused: closed")
    for act in (lambda: g(torch.ones(1)), g.warm, g.resume, g.pause, g.invalidate, g.check_static):
        with pytest.raises(CaptureError, match="closed"):
            act()


def test_graphs_are_bounded_and_the_least_recently_used_goes(caplog):
    g = capture(lambda x, t: x * t, (torch.ones(1), 0.0), max_graphs=2)
    for t in (1.0, 0.0, 2.0):  # evicts 0.0? no: 1.0, since 0.0 was used after it
        g(torch.ones(1), t)
    assert (g.stats.graphs, g.stats.evictions) == (2, 1)
    assert g.explain(torch.ones(1), 0.0).startswith("replay")
    assert "evicted" in g.explain(torch.ones(1), 1.0)
    with caplog.at_level(logging.WARNING, logger="rlkernel"):
        capture(lambda x, t: x * t, (torch.ones(1), 0.0), max_graphs=1)(torch.ones(1), 1.0)
    assert "t varies; pass it as a tensor" in caplog.text
    assert g(torch.ones(1), 1.0).item() == 1
    assert g.stats.recaptures == {"evicted": 1}


def test_a_recorder_may_evict_a_whole_generation():
    g = graphed(lambda x: x @ x, (torch.ones(2, 2),), ByGeneration(), max_graphs=3)
    for n in (3, 4, 5):
        assert torch.equal(g(torch.eye(n)), torch.eye(n))
    assert (g.stats.graphs, g.stats.evictions) == (1, 3)


def test_explain_names_what_is_new():
    g = capture(lambda x, t=1.0: x * t, (torch.ones(2, 3), 1.0))
    assert g.explain(torch.ones(2, 3), 1.0) == "replay: graph 1 of 1"
    assert "dtype of x is torch.float64, was torch.float32" in g.explain(torch.ones(2, 3).double(), 1.0)
    assert "shape of x is (4, 3), was (2, 3)" in g.explain(torch.ones(4, 3), 1.0)
    assert g.explain(torch.ones(2, 3), 2.5) == "capture: new key because t is 2.5, was 1.0"
    assert g.explain(torch.ones(2, 3), 1) == "capture: new key because t is 1, was 1.0"
    assert g.explain(torch.ones(2, 3)) == "capture: no graph has this structure"
    with torch.no_grad():
        assert "grad mode is False, was True" in g.explain(torch.ones(2, 3), 1.0)
    assert g.stats.captures == 1


def test_groups_are_one_per_device_unless_named():
    g, h = (capture(lambda x: x, (torch.ones(1),)) for _ in range(2))
    assert g.group is h.group
    own = CaptureGroup("mine")
    assert capture(lambda x: x, (torch.ones(1),), group=own).group is own


def test_a_closed_recording_does_not_replay():
    recorder = EagerRecorder()
    g = graphed(lambda x: x, (torch.ones(1),), recorder)
    recording = next(iter(g._table._graphs.values())).recording
    assert isinstance(recording, EagerRecording)
    g.close()
    with pytest.raises(CaptureError, match="was closed"):
        recording.replay()
