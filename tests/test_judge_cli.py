"""`rlkernel judge` on the command line, and the page that documents it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlkernel_judge.score import FAST_P
from rlkernel_judge.verdict import Summary, Task, Verdict
from tests.command_line import answer
from tests.judged import RIGHT, WRONG_TEMPERATURE

PAGE = (Path(__file__).parents[1] / "docs" / "judge.md").read_text()


def test_several_files_are_one_answer_with_their_measures(cli) -> None:
    Path("right.py").write_text(RIGHT)
    Path("refused.py").write_text("import socket\n" + RIGHT)
    Path("broken.py").write_text("def logprob(:")
    found = answer(
        cli(
            "judge",
            "right.py",
            "refused.py",
            "broken.py",
            "--op",
            "logprob",
            "--clause",
            "LP-19",
            "--no-timing",
            "--json",
        )
    )
    assert Summary.model_validate(found).best == "right.py"
    assert [c["fault"] for c in found["candidates"]] == [None, "rejected", "syntax_error"]
    assert found["pass_at_k"]["1"] == pytest.approx(1 / 3)


def test_a_wrong_candidate_is_told_to_people_with_its_case(cli) -> None:
    Path("wrong.py").write_text(WRONG_TEMPERATURE)
    result = cli("judge", "wrong.py", "--op", "logprob", "--clause", "LP-08", "--no-timing")
    assert result.exit_code == 1
    for words in (
        "wrong.py: wrong_result, 0 of 1 clauses hold",
        "LP-08",
        "case     Rows(",
        "--clause LP-08",
        "sandbox",
    ):
        assert words in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("a.py",), "--op is missing"),
        (("nowhere.py", "--op", "logprob"), "nowhere.py: does not exist"),
        (("a.py", "--op", "logprb"), "did you mean 'logprob'"),
        (("a.py", "--op", "logprob", "--profile", "endless"), "profile: "),
        (("a.py", "--op", "logprob", "--limit", "0"), "limit_s: "),
        (("a.py", "--op", "logprob", "--score", "none"), "unknown score"),
        (("serve", "--host", "0.0.0.0"), "--token-file"),
        (("serve", "--memory", "3"), "--memory has no effect on rlkernel judge serve"),
        (("a.py", "--op", "logprob", "--token-file", "t"), "--token-file has no effect on a verdict on files"),
        (("attack", "--profile", "deep"), "--profile has no effect on rlkernel judge attack"),
        (("attack", "--honest", "1", "--area", "timing"), "--area has no effect on rlkernel judge attack --honest"),
    ],
)
def test_a_question_that_is_none_is_one_clean_message(cli, arguments, words) -> None:
    Path("a.py").write_text(RIGHT)
    result = cli("judge", *arguments)
    assert (result.exit_code, result.stdout, words in result.stderr) == (2, "", True), result.stderr


def test_the_page_names_every_field_of_a_verdict_and_of_a_task() -> None:
    names = {*Verdict.model_fields, *Task.model_fields}
    assert [name for name in sorted(names) if f"`{name}`" not in PAGE] == []


def test_the_page_names_every_threshold_of_fast_p() -> None:
    assert "p = " + ", ".join(f"{p:g}" for p in FAST_P) in PAGE
