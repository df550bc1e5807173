"""capture over a stand-in for CUDA graphs: replays, draws, pools, streams, and captures that break off.

The same engine over real graphs is held to the clauses of capture@1 on a GPU.
"""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from rlkernel_core.errors import ArgumentError, CaptureError, FallbackWarning
from rlkernel_core.spec import OPERATORS
from rlkernel_core.spec.graphed import Bucket, CaptureGroup
from rlkernel_triton.capture import cuda_capture
from rlkernel_triton.capture.launch import capture as on_device


@pytest.fixture
def group():
    return CaptureGroup("test")


@pytest.fixture
def capture(cuda, group):
    run = OPERATORS["capture"].taking_arguments(on_device)
    return lambda fn, example, **options: run(fn, example, **({"group": group, "warmup": 1} | options))


def test_a_replay_computes_anew_and_runs_no_python(capture) -> None:
    runs = []

    def fn(x):
        runs.append(1)
        return {"y": (x * 2 + 1).cumsum(0), "n": x.shape[0]}

    g = capture(fn, (torch.zeros(2, 3),), buckets=(Bucket({"x": 0}, (2, 4), out={"y": 0}),))
    g(torch.ones(3, 3))
    before = len(runs)
    for n in (1, 3, 2, 4):
        x = torch.randn(n, 3)
        assert torch.equal(fn(x)["y"], g(x)["y"])
    assert len(runs) == before + 4


@pytest.mark.parametrize("outputs", ["clone", "view"])
def test_outputs_belong_to_the_caller_or_to_the_graph(capture, outputs) -> None:
    g = capture(lambda x: (x * 2, x), (torch.zeros(2),), outputs=outputs)
    first = g(torch.ones(2))
    g(torch.full((2,), 5.0))
    assert [x.tolist() for x in first] == ([[2, 2], [1, 1]] if outputs == "clone" else [[10, 10], [5, 5]])


def test_draws_are_those_of_plain_runs(capture) -> None:
    own = torch.Generator()
    g = capture(lambda x: x + torch.rand(3) + torch.rand(3, generator=own), (torch.zeros(3),), generators=(own,))
    results = []
    for fn in (g, lambda x: x + torch.rand(3) + torch.rand(3, generator=own)):
        torch.manual_seed(4)
        own.manual_seed(9)
        results.append([fn(torch.zeros(3)) for _ in range(3)])
    assert torch.equal(torch.stack(results[0]), torch.stack(results[1]))
    assert not torch.equal(results[0][0], results[0][1])


def test_a_generator_of_a_device_without_an_index_follows_its_graph(cuda) -> None:
    """As torch.Generator("cuda") makes one."""

    class Bare(torch.Generator):
        device = torch.device("cuda")

    own, of_the_host = Bare(), torch.Generator()
    graph = cuda_capture._new_graph(torch.device("cuda", 0), (own, of_the_host))
    assert graph.generators == [own]


@pytest.mark.parametrize("warmup", [0, 1])
def test_drawing_can_be_forbidden(capture, warmup) -> None:
    with pytest.raises(CaptureError, match="draws random numbers"):
        capture(torch.rand_like, (torch.zeros(3),), rng="forbid", warmup=warmup)


def test_what_recording_writes_is_written_at_replays_only(capture) -> None:
    count = torch.zeros(())
    g = capture(lambda x: x * count.add_(1), (torch.ones(2),), mutates=(count,))
    assert count.item() == 0
    assert [g(torch.ones(2))[0].item() for _ in range(3)] == [1, 2, 3]


def test_a_capture_that_breaks_off_is_mended(capture, cuda) -> None:
    old = capture(lambda x: x * 3, (torch.ones(2),))

    def synchronizes(x):
        y = x + torch.rand(2)
        cuda.synchronize()
        return y

    torch.manual_seed(0)
    state = torch.get_rng_state()
    with pytest.raises(CaptureError, match=r"host synchronization.*operation not permitted") as caught:
        capture(synchronizes, (torch.ones(2),))
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert (cuda.open_pools, cuda.stuck_generators, cuda.capturing, cuda.current.number) == ([], False, None, 0)
    assert torch.equal(state, torch.get_rng_state())
    assert old(torch.full((2,), 2.0)).tolist() == [6, 6]
    assert capture(lambda x: x + 1, (torch.ones(2),))(torch.ones(2)).tolist() == [2, 2]


def test_a_capture_that_breaks_off_may_run_without_a_graph(capture, cuda) -> None:
    def synchronizes(x):
        cuda.synchronize()
        return x * 2

    with pytest.warns(FallbackWarning, match="runs without a graph"):
        g = capture(synchronizes, (torch.ones(2),), on_capture_error="eager")
    assert g(torch.full((2,), 4.0)).tolist() == [8, 8]
    assert g.stats.eager_calls == {"capture failed": 1}


def test_what_python_can_see_never_reaches_the_driver(capture, cuda) -> None:
    with pytest.raises(CaptureError, match="reads a value"):
        capture(lambda x: x * x.sum().item(), (torch.ones(2),))
    with pytest.raises(CaptureError, match="generator that is not declared"):
        capture(lambda x: x + torch.rand(2, generator=torch.Generator()), (torch.ones(2),))
    assert cuda.users == {}


def test_no_garbage_is_collected_while_recording(capture, cuda) -> None:
    """What a collection destroys (events, modules, other graphs) may fail a capture."""
    collecting = {}

    def fn(x):
        collecting[cuda.capturing is not None] = gc.isenabled()
        return x * 2

    capture(fn, (torch.ones(2),))
    assert (collecting, gc.isenabled()) == ({False: True, True: False}, True)


def test_an_error_of_the_function_ends_the_capture_and_stays_itself(capture, cuda) -> None:
    def fn(x):
        if cuda.capturing is not None:
            raise KeyError("mine")
        return x

    with pytest.raises(KeyError, match="mine"):
        capture(fn, (torch.ones(2),))
    assert (cuda.open_pools, cuda.stuck_generators, cuda.capturing) == ([], False, None)
    assert set(cuda.users.values()) == {0}


def test_graphs_of_a_group_share_a_pool_that_ends_with_them(capture, cuda, group) -> None:
    a, b = (capture(lambda x: x * 2, (torch.ones(n),)) for n in (2, 3))
    assert cuda.users == {(0, 1): 3}  # and the one that keeps the pool
    a.close()
    b.pause("discard")
    assert cuda.users == {(0, 1): 0}
    b.resume()
    assert b(torch.ones(3)).tolist() == [2, 2, 2]
    assert cuda.users == {(0, 1): 0, (0, 2): 2}


def test_a_forgotten_graph_does_not_end_the_pool_of_the_next(capture, cuda) -> None:
    """A graph that nobody closed goes with its owner, and its share of the pool with it."""
    g = capture(lambda x: x * 2, (torch.ones(2),))
    next(iter(g._table._graphs.values())).recording._graph.reset()
    assert capture(lambda x: x * 3, (torch.ones(2),))(torch.ones(2)).tolist() == [3, 3]


def test_evictions_take_all_graphs_of_a_callable_and_leave_the_pool(capture, cuda) -> None:
    g = capture(lambda x, t: x * t, (torch.ones(2), 0.0), max_graphs=3)
    for t in (1.0, 2.0, 3.0, 4.0, 1.0):
        assert g(torch.ones(2), t).tolist() == [t, t]
    assert (g.stats.graphs, g.stats.evictions) == (3, 3)
    assert cuda.users == {(0, 1): 4}


def test_a_call_on_another_stream_waits_for_the_one_before(capture, cuda) -> None:
    g = capture(lambda x: x * 2, (torch.ones(2),))
    other = cuda.Stream(torch.device("cpu"))
    with cuda.stream(other):
        g(torch.ones(2))
        g(torch.ones(2))
    g(torch.ones(2))
    assert cuda.replays == [other.number, other.number, 0]
    assert other.waited_for == [0]
    assert cuda.streams[0].waited_for[-1] == other.number


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0, 3.0, 4.0]))
        self.unused = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return (x * self.weight).square(), x.detach() + 1


def test_gradients_are_replayed(capture, cuda) -> None:
    model = Scaled()
    g = capture(model, (torch.ones(2, 3, requires_grad=True),), autograd=True)
    for seed in range(2):
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(seed), requires_grad=True)
        above = torch.randn(2, 3)
        wanted = torch.autograd.grad(model(x)[0], [x, model.weight], above)
        y, plain = g(x)
        assert (y.requires_grad, plain.requires_grad) == (True, False)
        found = torch.autograd.grad(y, [x, model.weight, model.unused], above, allow_unused=True)
        assert [torch.equal(a, b) for a, b in zip(wanted, found, strict=False)] == [True, True]
        assert found[2] is None
    late = g(x)[0]
    g(x)
    with pytest.raises(CaptureError, match="Backward came after"):
        late.sum().backward()


def test_a_backward_has_memory_of_its_own(capture, cuda) -> None:
    """What the forward pass saves must survive other graphs of the group until the backward pass."""
    capture(lambda x: x * 2, (torch.ones(2),))
    capture(Scaled(), (torch.ones(2, 3, requires_grad=True),), autograd=True)
    assert cuda.users == {(0, 1): 2, (0, 2): 2}


def test_an_allocator_whose_allocations_are_nodes_is_refused_with_its_setting(capture, cuda) -> None:
    cuda.allocator = "cudaMallocAsync"
    with pytest.raises(CaptureError, match=r"Take backend:cudaMallocAsync out of PYTORCH_CUDA_ALLOC_CONF"):
        capture(lambda x: x, (torch.ones(2),))


def test_an_output_of_another_device_is_refused(capture) -> None:
    with pytest.raises(CaptureError, match="output cold is on meta"):
        capture(lambda x: {"warm": x, "cold": torch.empty(2, device="meta")}, (torch.ones(2),))


def test_hip_graphs_are_verified_first(capture, monkeypatch) -> None:
    assert capture(lambda x: x, (torch.ones(2),))._verify == "never"
    monkeypatch.setattr(torch.version, "hip", "7.0")
    g = capture(lambda x: x * 2, (torch.ones(2),))
    g(torch.ones(2))
    g(torch.ones(2))
    assert g.stats.verified == 1


def test_an_example_without_a_tensor_names_the_remedy(capture) -> None:
    with pytest.raises(ArgumentError, match="which device"):
        capture(torch.ones, (3,))


def test_empty_arguments_are_checked_before_they_mean_none(capture) -> None:
    with pytest.raises(ArgumentError, match="buckets"):
        capture(torch.neg, (torch.ones(2),), buckets=0)
