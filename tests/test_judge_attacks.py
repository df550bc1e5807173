"""Hostile candidates: that each is what its file says, and some of them; `rlkernel judge attack` runs all."""

from __future__ import annotations

import threading

import pytest

from rlkernel_core.errors import ConfigError, UnknownNameError
from rlkernel_judge import attack_run
from rlkernel_judge.attack_run import Attempt, attacks, attempts, honest, judged
from rlkernel_judge.verdict import Task

ALL = attacks()


def test_there_are_at_least_sixty_attacks_each_of_its_own() -> None:
    assert len(ALL) >= 60
    assert len({a.text for a in ALL}) == len(ALL)


def test_an_unknown_attack_is_an_error_that_suggests_one() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'late_thread'"):
        attacks(only=("late_thred",))


def test_an_attack_without_its_device_is_skipped() -> None:
    (found,) = attempts(attacks(only=("other_stream",)), progress=lambda _: None)
    assert (found.skipped, found.succeeded) == ("needs a device of kind cuda", False)


def test_attacks_that_run_together_are_told_in_their_order(monkeypatch) -> None:
    together = threading.Barrier(2, timeout=30)

    def meets(text: str, _: Task) -> dict[str, object]:
        if text != honest("logprob").source:
            together.wait()
        return {"score": 1.0, "stage": text[-40:]}

    monkeypatch.setattr(attack_run, "judged", meets)
    chosen = [a for a in ALL if a.honest == "logprob" and a.device == "any"][:2]
    found = attempts(chosen, jobs=2, progress=lambda _: None)
    assert [(a.name, a.stage) for a in found] == [(a.name, a.text[-40:]) for a in chosen]


def test_where_an_honest_body_is_not_judged_no_attack_is_said_to_have_succeeded(monkeypatch) -> None:
    monkeypatch.setattr(attack_run, "judged", lambda *_: {"error": "cuda:7 cannot add numbers"})
    with pytest.raises(ConfigError, match=r"cannot judge an honest \w+ on cuda:7, .*: cuda:7 cannot add numbers"):
        list(attempts(ALL[:2], "cuda:7", progress=lambda _: None))


def test_an_attack_that_scores_more_than_its_honest_body_succeeded() -> None:
    named = {"name": "a", "area": "timing", "tries": "", "honest": "logprob", "stage": ""}
    assert "SUCCEEDED" in Attempt(**named, score=2.0, honest_score=0.5, succeeded=True).summary


@pytest.mark.parametrize(
    ("name", "stage", "fault"),
    [
        ("missing_field_at_timed_size", "timing", "wrong_result"),
        ("watching_thread", "probes", "background_work"),
        ("deep_attributes", "read", "rejected"),
    ],
)
def test_an_attack_is_stopped_where_it_was_stopped_before(name, stage, fault) -> None:
    (attack,) = attacks(only=(name,))
    task = Task(op=attack.honest, clauses=honest(attack.honest).clauses, strict=False, noise=1e9)
    found = judged(attack.text, task)
    assert (found["stage"], found["fault"], found["correct"]) == (stage, fault, False)
