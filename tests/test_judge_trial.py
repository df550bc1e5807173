"""Whole trials: every planted candidate gets the verdict that was stated for it."""

from __future__ import annotations

import json

import pytest

from rlkernel_core.errors import ConfigError, UnknownNameError
from rlkernel_core.manifest import Impl, Requires
from rlkernel_judge.trial import judge
from rlkernel_judge.verdict import FAULTS, Task, Verdict
from tests.judged import (
    CHEATS,
    DIFFERENTIABLE,
    HARM,
    HEAD,
    LATER,
    OF_A_RECORD,
    RIGHT,
    SLOW,
    WRONG_TEMPERATURE,
)


def verdict(source: str, *clauses: str, **more) -> Verdict:
    asked = {
        "op": "logprob",
        "clauses": clauses,
        "timing": False,
        "strict": False,
        "limit_s": 60.0,
        "noise": 1e9,
        **more,
    }
    return judge(source.encode(), Task(**asked))


def test_a_right_candidate_holds_every_clause_of_what_it_claims_and_is_timed() -> None:
    found = verdict(DIFFERENTIABLE, timing=True, strict=True, limit_s=300.0)
    assert (found.compiled, found.correct, found.fault, found.pass_rate) == (True, True, None, 1.0)
    assert (found.held == found.attacked, found.attacked >= 18, found.claims) == (True, True, ("grad",))
    assert found.times is not None
    assert found.times.floor_s < found.times.candidate.median
    low, high = found.speedup_interval
    assert low <= found.speedup <= high
    assert found.score == pytest.approx(0.5 + min(max(low - 1, 0), 2))
    assert Verdict.model_validate_json(found.model_dump_json()) == found


def test_a_candidate_that_takes_a_record_is_held_to_the_same_clauses() -> None:
    found = verdict(OF_A_RECORD, "LP-01", "LP-08", "LP-24", strict=True)
    assert (found.correct, found.fault, found.held, found.attacked) == (True, None, 3, 3)


def test_a_wrong_candidate_is_told_its_clause_and_its_smallest_case() -> None:
    found = verdict(WRONG_TEMPERATURE, "LP-05", "LP-08")
    assert (found.compiled, found.correct, found.fault, found.pass_rate) == (True, False, "wrong_result", 0.5)
    assert found.counterexample.clause == "LP-08"
    assert found.counterexample.case.startswith("Rows(N=1, V=")
    assert "--clause LP-08" in found.counterexample.reproduce
    assert found.score == pytest.approx(0.1 + 0.1 * 0.5)


@pytest.mark.parametrize("fault", [f for f in HARM if f != "segfault"])  # that one in test_judge_server.py
def test_a_candidate_that_ends_its_process_is_reported_as_what_it_did(fault) -> None:
    found = verdict(HARM[fault], "LP-01", first_s=2.0)
    assert (found.fault, found.correct, found.pass_rate, found.score) == (fault, False, 0.0, 0.0)


LIES = f"""
import json, os, sys
{HEAD}
    line = json.dumps({{"correct": True, "score": 9, "result": {{}}, "number": 2}})
    print(line, flush=True)
    for descriptor in range(3, 4096):
        try:
            os.write(descriptor, line.encode() + b"\\n")
        except OSError:
            pass
    return {{"logprob": ids.float(), "lse": ids.float()}}
"""


def test_a_verdict_written_on_every_channel_is_not_believed() -> None:
    found = verdict(LIES, "LP-01")
    assert (found.correct, found.fault, found.score) == (False, "protocol_error", 0.0)


def test_cheating_is_worth_nothing_though_every_clause_holds() -> None:
    found = verdict(CHEATS["not cached by address"], "LP-19")
    assert (found.fault, found.pass_rate, found.correct, found.score) == ("cheating", 1.0, False, 0.0)
    assert "not cached by" in found.message


def test_a_stopped_clock_is_named_and_changes_no_time() -> None:
    found = verdict(CHEATS["nothing replaced"], "LP-19", timing=True)
    assert (found.fault, "time.perf_counter" in found.message, found.score) == ("tampering", True, 0.0)


def test_work_that_is_done_after_the_timer_is_found_in_the_timed_results() -> None:
    found = verdict(LATER, "LP-19", timing=True, limit_s=300.0)
    assert (found.fault, found.stage, found.speedup) == ("wrong_result", "timing", None)
    assert "in a timed call" in found.message


def test_a_machine_that_is_too_busy_says_nothing_against_a_candidate() -> None:
    found = verdict(RIGHT, "LP-19", timing=True, noise=1.0 + 1e-9, limit_s=300.0)
    assert (found.fault, found.correct, found.speedup, found.score) == ("not_measurable", True, None, 0.5)


def test_a_slow_candidate_is_slow_by_the_clock_outside() -> None:
    found = verdict(SLOW, "LP-19", timing=True, limit_s=300.0)
    assert (found.correct, found.speedup < 1, found.fast_p["1"], found.score) == (True, True, 0.0, 0.5)
    assert found.times.candidate.median >= 0.01


def test_a_source_that_reaches_out_is_refused_before_anything_runs() -> None:
    found = verdict("import subprocess\n" + RIGHT, strict=True)
    assert (found.fault, found.compiled, found.score, found.seconds < 5) == ("rejected", False, 0.0, True)
    assert "line 1: subprocess" in found.message


@pytest.mark.parametrize(
    ("more", "error", "words"),
    [
        ({"op": "capture"}, UnknownNameError, "operator that can be judged"),
        ({"op": "logprb"}, UnknownNameError, "did you mean 'logprob'"),
        ({"baseline": "acme"}, UnknownNameError, "unknown baseline 'acme'"),
        ({"score": "fast"}, UnknownNameError, "unknown score"),
        ({"sandbox": "bubblewrap", "device": "cpu", "baseline": "triton"}, (ConfigError, UnknownNameError), "triton"),
    ],
)
def test_a_task_that_cannot_be_is_an_error_that_names_it(more, error, words) -> None:
    with pytest.raises(error, match=words):
        verdict(RIGHT, **more)


BROKEN_BASELINE = """
def logprob(call):
    raise RuntimeError("not today")
"""


def test_a_baseline_that_fails_is_no_fault_of_the_candidate(monkeypatch, tmp_path) -> None:
    (tmp_path / "broken_baseline.py").write_text(BROKEN_BASELINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    impl = Impl(op="logprob@1", target="broken_baseline:logprob", requires=Requires(device="cpu"))
    monkeypatch.setattr("rlkernel_judge.trial.baseline_of", lambda _: ((impl,), False))
    found = verdict(RIGHT, "LP-19", timing=True, limit_s=300.0)
    assert (found.correct, found.fault, found.speedup, found.score) == (True, None, None, 0.5)
    assert "the baseline torch failed: RuntimeError: not today" in found.message


def test_a_task_with_nothing_to_attack_proves_nothing() -> None:
    found = verdict(RIGHT, "LP-26")
    assert (found.correct, found.fault, found.attacked) == (False, "not_run", 0)


def test_an_unknown_clause_is_an_error_before_time_is_spent() -> None:
    with pytest.raises(UnknownNameError, match="LP-99"):
        verdict(RIGHT, "LP-99")


def test_every_fault_has_its_meaning() -> None:
    assert json.dumps(FAULTS)
    assert [name for name, text in FAULTS.items() if not text] == []
