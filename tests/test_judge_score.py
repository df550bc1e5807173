"""From findings to one number, and measures over several candidates."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkernel_core.errors import UnknownNameError
from rlkernel_judge.score import FAST_P, SCORES, fast_p_of, geometric_mean, pass_at_k, summary, terms, weights
from rlkernel_judge.verdict import Verdict

FACTS = {"compiled": True, "correct": True, "pass_rate": 1.0, "fault": None, "speedup": 2.0, "low": 1.5}


def scored(name: str = "rlkernel", **facts) -> float:
    return sum(terms(SCORES[name], **{**FACTS, **facts}).values())


def test_the_score_is_the_sum_of_its_terms() -> None:
    assert terms(SCORES["rlkernel"], **FACTS) == {"compiled": 0.1, "partial": 0.1, "correct": 0.3, "speed": 0.5}


def test_tritonforge_counts_the_median_and_no_part() -> None:
    assert scored("tritonforge") == pytest.approx(0.1 + 0.3 + 1.0)


@pytest.mark.parametrize(
    "facts", [{"compiled": False}, {"fault": "cheating"}, {"fault": "rejected"}, {"fault": "too_fast"}]
)
def test_what_does_not_compile_or_cheats_is_worth_nothing(facts) -> None:
    assert scored(**facts) == 0


def test_speed_counts_for_correct_candidates_alone() -> None:
    assert scored(correct=False, fault="wrong_result", pass_rate=0.5, speedup=9.0, low=9.0) == pytest.approx(0.15)


@settings(deadline=None, derandomize=True)
@given(st.floats(0, 100), st.floats(0, 100))
def test_speed_has_a_bound_and_is_never_below_nothing(speedup, low) -> None:
    assert 0.5 - 1e-9 <= scored(speedup=speedup, low=low) <= 2.5 + 1e-9


def test_an_unknown_row_is_an_error_that_suggests_one() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'tritonforge'"):
        weights("tritonforg")


@settings(deadline=None, derandomize=True)
@given(st.integers(1, 8), st.data())
def test_pass_at_k_is_the_share_of_draws_with_a_correct_one(n, data) -> None:
    correct, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    draws = list(combinations(range(n), k))
    assert pass_at_k(n, correct, k) == pytest.approx(sum(any(i < correct for i in d) for d in draws) / len(draws))


def test_the_geometric_mean_of_a_speedup_and_its_inverse_is_one() -> None:
    assert (geometric_mean([4.0, 0.25]), geometric_mean([])) == (pytest.approx(1.0), None)


def test_fast_0_asks_for_correctness_and_the_others_for_speed() -> None:
    assert fast_p_of(correct=True, speedup=1.2) == {"0": 1, "0.5": 1, "0.8": 1, "1": 1, "1.5": 0, "2": 0}
    assert set(fast_p_of(correct=False, speedup=9.0).values()) == {0.0}
    assert list(fast_p_of(correct=True, speedup=None).values()) == [1.0] + [0.0] * (len(FAST_P) - 1)


def verdict(file: str, *, correct: bool, speedup: float | None, score: float) -> Verdict:
    given = {
        "op": "logprob",
        "source_hash": "",
        "device": "cpu",
        "profile": "quick",
        "compiled": True,
        "pass_rate": 1.0,
    }
    return Verdict(
        file=file,
        correct=correct,
        speedup=speedup,
        score=score,
        fast_p=fast_p_of(correct=correct, speedup=speedup),
        **given,
    )


def test_several_candidates_are_one_summary() -> None:
    verdicts = [
        verdict("a", correct=True, speedup=2.0, score=1.5),
        verdict("b", correct=True, speedup=0.5, score=0.5),
        verdict("c", correct=False, speedup=None, score=0.1),
    ]
    found = summary(verdicts)
    assert (found.n, found.correct, found.best) == (3, 2, "a")
    assert found.pass_at_k == {"1": pytest.approx(2 / 3), "2": pytest.approx(1.0), "3": pytest.approx(1.0)}
    assert found.fast_p["1"] == pytest.approx(1 / 3)
    assert found.geometric_mean == {"correct": pytest.approx(1.0), "faster": 2.0, "all": pytest.approx(1.0)}


def test_of_worthless_candidates_none_is_best() -> None:
    assert summary([verdict("a", correct=False, speedup=None, score=0.0)]).best is None
