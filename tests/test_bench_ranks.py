"""The suite `ranks`: worlds that cannot be are refused, rows that a world did not come to say how it ended."""

from __future__ import annotations

import pytest
from rlkernel_bench import suites
from rlkernel_bench.suites.ranks import WAYS, candidates, said_of


def test_a_world_without_a_gpu_for_each_rank_is_refused(monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    for work in suites.works(["ranks"], "full"):
        found = candidates(suites.problem(work, "cuda"), "cuda", ["triton"], None)
        assert [c.run is not None for c in found] == [work.sizes["W"] == 1] * len(WAYS[work.task])
        message = f"needs {work.sizes['W']} GPUs, there are 1" if work.sizes["W"] > 1 else ""
        assert {c.message for c in found} == {message}


def test_peers_that_were_not_asked_for_are_left_out() -> None:
    work = next(w for w in suites.works(["ranks"], "toy") if w.task == "split head forward")
    found = candidates(suites.problem(work, "cpu"), "cpu", ["reference"], [])
    assert [c.name for c in found] == ["reference", "reference:without a group"]


def test_a_row_that_a_world_did_not_come_to_says_how_the_world_ended() -> None:
    first, second, *_ = suites.works(["ranks"], "toy")
    ways = {"torch": {"milliseconds": 1.0, "error": 0.0, "over": 0.0}}
    lines = {first.name: ways, "ended": {"failed": "out of time after 180 s"}}
    assert said_of(first, lines) == ways
    with pytest.raises(RuntimeError, match="a world of 2 ranks: out of time after 180 s"):
        said_of(second, lines)
