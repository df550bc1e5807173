"""Counters of captured launches: given once, and never freed. A stand-in gives memory of the CPU."""

from __future__ import annotations

import threading
import weakref
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from rlkernel_triton.common.host import lasting
from rlkernel_triton.quant import splitk_counters

GPU = torch.device("cuda", 0)


class World:
    """Which stream is current, and whether it captures."""

    def __init__(self) -> None:
        self.capturing, self.cuda_stream = False, 7
        self.made: list[weakref.ref[torch.Tensor]] = []

    def synchronize(self) -> None:
        assert not self.capturing

    def lasting(self, count, device, dtype):
        assert not self.capturing
        made = torch.zeros(count, dtype=dtype)
        self.made.append(weakref.ref(made))
        return made


@pytest.fixture
def world(monkeypatch):
    here = World()
    monkeypatch.setattr(splitk_counters, "_POOL", 64)
    monkeypatch.setattr(splitk_counters, "_lasting", here.lasting)
    for name, empty in (
        ("_of_stream", {}),
        ("_partials", {}),
        ("_unused", {}),
        ("_running_out", set()),
        ("_pools", []),
    ):
        monkeypatch.setattr(splitk_counters, name, empty)
    monkeypatch.setattr(splitk_counters, "_stream", lambda index: here.cuda_stream)
    monkeypatch.setattr(splitk_counters, "_uninitialized", lambda size, device: torch.empty(size))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: here.capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: here)
    return here


def test_what_a_graph_was_given_is_neither_given_again_nor_freed(world) -> None:
    places = []
    for _ in range(4):
        world.capturing = False
        splitk_counters.splitk_counters(4, GPU)  # sets more aside
        world.capturing = True
        given = [splitk_counters.splitk_counters(20, GPU) for _ in range(3)]
        places += [(x.data_ptr(), x.data_ptr() + 4 * len(x)) for x in given]
        del given
    assert all(ref() is not None for ref in world.made)
    assert all(a[1] <= b[0] for a, b in pairwise(sorted(places)))


def test_launches_of_a_stream_share_counters_and_those_of_two_do_not(world) -> None:
    first, again = splitk_counters.splitk_counters(4, GPU), splitk_counters.splitk_counters(9, GPU)
    world.cuda_stream = 8
    other = splitk_counters.splitk_counters(4, GPU)
    assert (first.data_ptr() == again.data_ptr(), first.data_ptr() == other.data_ptr()) == (True, False)


def test_launches_of_a_stream_share_their_partial_sums_and_those_of_two_do_not(world) -> None:
    first, again, larger = (splitk_counters.splitk_workspace(4, size, GPU)[1] for size in (100, 128, 129))
    world.cuda_stream = 8
    other = splitk_counters.splitk_workspace(4, 129, GPU)[1]
    shared = [x.data_ptr() == first.data_ptr() for x in (again, larger, other)]
    assert (shared, len(larger), larger.data_ptr() == other.data_ptr()) == ([True, False, False], 256, False)


def test_a_captured_launch_and_one_of_many_partial_sums_keep_none(world, monkeypatch) -> None:
    monkeypatch.setattr(splitk_counters, "_MOST_PARTIALS", 128)
    splitk_counters.splitk_workspace(4, 100, GPU)
    kept = dict(splitk_counters._partials)
    taken = [splitk_counters.splitk_workspace(4, 129, GPU)[1]]
    world.capturing = True
    taken.append(splitk_counters.splitk_workspace(4, 100, GPU)[1])
    assert ([len(x) for x in taken], splitk_counters._partials) == ([129, 100], kept)


def test_counters_of_captured_launches_are_aligned(world) -> None:
    splitk_counters.splitk_counters(4, GPU)
    start = splitk_counters._unused[0].data_ptr()
    world.capturing = True
    assert [(splitk_counters.splitk_counters(n, GPU).data_ptr() - start) % 16 for n in (3, 5, 4)] == [0, 0, 0]


def test_what_lasts_is_allocated_by_another_thread_on_another_stream(monkeypatch) -> None:
    """torch.compile's graphs take what their own thread, or stream, allocates while they warm up."""
    waited, seen = [], []
    here = SimpleNamespace(wait_stream=waited.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: here)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: "aside")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(seen.append(stream)))
    made = lasting(threading.get_ident, GPU)
    assert (made == threading.get_ident(), seen, waited) == (False, ["aside"], ["aside"])
    assert lasting(threading.get_ident, torch.device("cpu")) == threading.get_ident()
