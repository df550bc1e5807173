"""capture@1: a failed capture leaves nothing behind and is recorded; illegal work and wrong replays are caught."""

from __future__ import annotations

import pytest
import torch

from rlkernel_core.errors import CaptureError, FallbackWarning
from rlkernel_torch.direct import capture
from tests.recorders import Frozen, Unlucky, graphed


def test_a_failed_recording_raises_and_restores():
    count = torch.zeros(1)

    def fn(x):
        return x + torch.rand(1) + count.add_(1)

    state = torch.get_rng_state()
    with pytest.raises(CaptureError, match="operation not permitted") as caught:
        graphed(fn, (torch.ones(1),), Unlucky(), mutates=(count,))
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert torch.equal(state, torch.get_rng_state())
    assert count.item() == 0
    assert torch.is_grad_enabled()
    assert capture(fn, (torch.ones(1),), mutates=(count,))(torch.ones(1)).item() >= 2


def test_a_failed_recording_runs_eagerly_once_warned_and_always_counted():
    with pytest.warns(FallbackWarning, match="operation not permitted") as caught:
        g = graphed(lambda x: x * 2, (torch.ones(1),), Unlucky(), on_capture_error="eager")
    assert len(caught) == 1
    assert [g(torch.full((1,), float(i))).item() for i in range(3)] == [0, 2, 4]
    stats = g.stats
    assert (stats.eager_calls, stats.replays, stats.captures) == ({"capture failed": 3}, 0, 0)
    assert stats.last_error == "operation not permitted when stream is capturing"
    assert g.explain(torch.ones(1)) == "eager: capture failed: operation not permitted when stream is capturing"
    g.invalidate()
    with pytest.warns(FallbackWarning):
        g(torch.ones(1))


@pytest.mark.parametrize(
    "fn, why",
    [
        (lambda x: torch.from_numpy(x.numpy()), "Tensor.numpy"),
        (lambda x: x[x > 0], "bool index has a result whose shape"),
        (lambda x: torch.where(x > 0), "nonzero"),
        (lambda x: x.repeat_interleave(x.long()), "repeat_interleave"),
        (lambda x: x * torch.equal(x, x), "equal"),
        (lambda x: x + torch.rand(2, generator=torch.Generator()), "generator that is not declared"),
    ],
)
def test_work_that_a_graph_cannot_record_is_refused_without_a_gpu(fn, why):
    with pytest.raises(CaptureError, match=why):
        capture(fn, (torch.ones(2),))
    with pytest.warns(FallbackWarning):
        g = capture(fn, (torch.ones(2),), on_capture_error="eager")
    g(torch.ones(2))
    assert g.stats.eager_calls == {"capture failed": 1}


def test_a_shape_that_changes_between_replays_is_an_error():
    sizes = iter([2, 2, 2, 2, 3])
    g = capture(lambda x: x.new_zeros(next(sizes)), (torch.ones(1),), warmup=2)
    g(torch.ones(1))
    with pytest.raises(CaptureError, match="shapes are frozen"):
        [g(torch.ones(1)) for _ in range(2)]


def test_verification_catches_a_replay_that_is_not_what_fn_returns():
    with pytest.raises(CaptureError, match="output y differs by up to 1"):
        graphed(lambda x: {"y": x * 1}, (torch.ones(1),), Frozen())(torch.full((1,), 2.0))
    g = graphed(lambda x: x * 1, (torch.ones(1),), Frozen(), on_capture_error="eager")
    with pytest.warns(FallbackWarning, match="not what fn returns"):
        assert g(torch.full((1,), 2.0)).item() == 2
    assert (g.stats.graphs, g.stats.eager_calls) == (0, {"capture failed": 1})
    g = graphed(lambda x: x * 1, (torch.ones(1),), Frozen(), verify="never")
    assert g(torch.full((1,), 2.0)).item() == 1


def test_verification_catches_frozen_randomness_and_frozen_state():
    with pytest.raises(CaptureError, match="left generators different"):
        graphed(torch.rand_like, (torch.ones(3),), Frozen())(torch.ones(3))
    count = torch.zeros(1)

    def step(x):
        count.add_(1)
        return x

    with pytest.raises(CaptureError, match="left mutated tensors different"):
        graphed(step, (torch.ones(1),), Frozen(), mutates=(count,))(torch.ones(1))
