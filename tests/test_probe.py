"""Self-tests: run once in a process of their own, remembered, and turned into reasons when they fail."""

from __future__ import annotations

import json

import pytest
import torch

import rlkernel as rlk
from rlkernel import probe as probing
from rlkernel.discover import Candidate
from rlkernel.probe import forget, probe
from rlkernel_core.errors import FallbackWarning
from tests.implementations import acme


def candidate(self_test: str | None) -> Candidate:
    return Candidate("acme", "rlkernel-acme", "1.0", acme(self_test=self_test))


def test_a_backend_without_a_self_test_passes(tmp_path) -> None:
    assert probe(candidate(None), "cpu", "subprocess", cache=tmp_path) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", ["subprocess", "inprocess"])
def test_a_self_test_that_fails_is_a_reason(tmp_path, how) -> None:
    reason = probe(candidate("fails"), "cpu", how, cache=tmp_path)
    assert (reason.slug, "wrong result on cpu" in reason.text) == ("probe/failed", True)


def test_a_self_test_that_kills_its_process_is_a_reason_whatever_it_printed(tmp_path) -> None:
    reason = probe(candidate("crashes"), "cpu", "subprocess", cache=tmp_path)
    assert (reason.slug, "status 0" in reason.text) == ("probe/crashed", True)


def test_a_self_test_that_hangs_is_ended(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(probing, "TIMEOUT_S", 1.0)
    reason = probe(candidate("hangs"), "cpu", "subprocess", cache=tmp_path)
    assert (reason.slug, "within 1 s" in reason.text) == ("probe/timeout", True)


def test_the_outcome_is_remembered_until_forgotten(tmp_path, monkeypatch) -> None:
    trace = tmp_path / "trace"
    monkeypatch.setenv("TRACE", str(trace))
    cache = tmp_path / "cache"
    for _ in range(2):
        assert probe(candidate("passes"), "cpu", "subprocess", cache=cache) is None
    assert trace.read_text() == "cpu\n"
    assert forget(cache) == 1
    probe(candidate("passes"), "cpu", "subprocess", cache=cache)
    assert trace.read_text() == "cpu\ncpu\n"


def test_a_damaged_memory_is_not_believed(tmp_path) -> None:
    probe(candidate("fails"), "cpu", "subprocess", cache=tmp_path)
    (file,) = tmp_path.iterdir()
    for damage in ("{", json.dumps({"ok": False, "code": "no-such-code"}), json.dumps([])):
        file.write_text(damage)
        assert probe(candidate("fails"), "cpu", "subprocess", cache=tmp_path).slug == "probe/failed"


def test_off_runs_nothing(tmp_path) -> None:
    assert probe(candidate("crashes"), "cpu", "off", cache=tmp_path) is None


def test_a_cache_that_cannot_be_written_costs_nothing_else(tmp_path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert probe(candidate("passes"), "cpu", "subprocess", cache=blocked / "cache") is None


def test_a_backend_whose_self_test_fails_is_passed_over(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    logits, ids = torch.zeros(2, 3), torch.tensor([0, 1])
    with rlk.registered(acme(self_test="crashes")), rlk.use("acme", "auto"):
        with pytest.warns(FallbackWarning, match="probe/crashed"):
            rlk.logprob(logits, ids)
        assert rlk.last_decision("logprob").backend == "torch"
    assert list((tmp_path / "rlkernel").iterdir()) != []
