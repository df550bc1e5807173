"""From times to a speedup: intervals hold the ratio, nothing is faster than memory or a matmul."""

from __future__ import annotations

import statistics
import time
from contextlib import closing
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkernel_core.spec import OPERATORS
from rlkernel_judge import replies
from rlkernel_judge.arena import Arena
from rlkernel_judge.machine import Machine, copy_bandwidth
from rlkernel_judge.timing import bootstrap_interval, measure, shared_memory
from rlkernel_judge.workloads import ON_CPU, ON_GPU, defaults, draw, flops, leaves, nbytes, needs, small

TIMES = st.lists(st.floats(1e-6, 1e-2), min_size=5, max_size=20)


def test_the_machine_is_quiet_where_its_own_work_takes_as_long_as_ever() -> None:
    machine = Machine("cpu", 1.6)
    found = []
    for last in ([1.0, 1.5], [1.0, 1.7], [9.0, 1.0]):
        machine.least, machine.last = 1.0, last
        found.append(machine.quiet())
    assert found == [True, False, False]


@settings(deadline=None, derandomize=True)
@given(TIMES)
def test_the_interval_of_two_equal_sides_holds_one(times) -> None:
    low, high = bootstrap_interval(times, times)
    assert low <= 1 + 1e-9
    assert high >= 1 - 1e-9


@settings(deadline=None, derandomize=True)
@given(st.floats(1e-6, 1e-2), st.floats(1.1, 50))
def test_steady_times_have_a_narrow_interval(time, ratio) -> None:
    assert bootstrap_interval([time] * 12, [time * ratio] * 12) == (pytest.approx(ratio), pytest.approx(ratio))


def test_the_interval_is_the_same_for_the_same_times() -> None:
    slow, quick = [1.0, 1.2, 0.9, 1.1, 1.3], [0.5, 0.7, 0.4, 0.6, 0.5]
    low, high = bootstrap_interval(quick, slow)
    assert (low, high) == bootstrap_interval(quick, slow)
    assert low < statistics.median(slow) / statistics.median(quick) < high


def test_the_bandwidth_of_a_copy_is_a_number_of_this_world() -> None:
    assert 1e7 < copy_bandwidth("cpu", 1 << 20) < 1e14


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0, "1"])
def test_a_time_that_is_none_is_no_answer(seconds) -> None:
    with pytest.raises(ValueError, match="seconds"):
        replies.read("burst", {"number": 1, "seconds": [seconds]})


@pytest.mark.parametrize("op", ON_CPU)
def test_a_workload_is_a_call_that_the_operator_takes_and_draws_repeat(op) -> None:
    spec, work = OPERATORS[op], small(op, "float32")
    given, again, other = (draw(work, seed, "cpu") for seed in (1, 1, 2))
    if spec.check is not None:
        spec.check(spec.call(**given))
    assert all(a.equal(b) for a, b in zip(leaves(given), leaves(again), strict=True))
    assert not all(a.equal(b) for a, b in zip(leaves(given), leaves(other), strict=True))
    assert needs(op) <= spec.feature_names
    assert set(given) >= spec.parameters.keys() - defaults(op).keys()


def test_operations_are_those_of_the_product_of_matrices() -> None:
    assert (flops(ON_GPU["linear_logprob"]), flops(ON_GPU["whiten"])) == (2 * 4096 * 4096 * 128256, 0)


def test_the_shared_memory_holds_arguments_and_results() -> None:
    given = draw(ON_CPU["logprob"], 0, "cpu")
    assert shared_memory(ON_CPU["logprob"], "cpu") > nbytes(given)
    assert shared_memory(ON_GPU["logprob"], "cuda:0") == 0


def test_a_worker_has_the_time_of_a_call_to_attach_whatever_earlier_stages_left_it() -> None:
    work, asked = ON_CPU["logprob"], []

    class EndedError(Exception):
        pass

    def ask(what: str, **_: object) -> None:
        asked.append((what, worker.deadline - time.monotonic()))
        raise EndedError

    tree = SimpleNamespace(freeze=lambda: None, thaw=lambda: None, cpu_s=lambda: 0.0)
    with closing(Arena.new(shared_memory(work, "cpu"))) as arena:
        worker = SimpleNamespace(arena=arena, device="cpu", tree=tree, ask=ask, deadline=0.0)
        with pytest.raises(EndedError):
            measure(worker, worker, work, until=time.monotonic() + 300, call_s=60, noise=1.6)
    ((what, left),) = asked
    assert (what, 59 < left <= 60) == ("attach", True)
