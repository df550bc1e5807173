"""Waivers: for a while, with an issue, and never the same as held."""

from __future__ import annotations

from datetime import date

import pytest

from rlkernel_conformance import documents, waivers
from rlkernel_conformance import report as reports
from rlkernel_conformance.harness import Outcome
from rlkernel_conformance.profiles import Profile
from rlkernel_conformance.subject import Subject
from rlkernel_conformance.waivers import Waiver
from rlkernel_core.errors import ConfigError, FileError, UnknownNameError

TODAY = date(2026, 11, 21)
GOOD = {"clause": '"GF-02"', "backend": '"acme"', "issue": '"#7"', "expires": "2026-11-21", "reason": '"slow divide"'}
SUBJECT = Subject("torch", "group_filter")
CLAIMS = tuple(sorted(SUBJECT.claims))
WAIVER = Waiver("GF-02", "acme", "#7", date(2027, 1, 1), "slow divide")


def written(tmp_path, *tables: dict[str, str], text: str = ""):
    path = tmp_path / "waivers.toml"
    parts = ["[[waiver]]\n" + "".join(f"{k} = {v}\n" for k, v in table.items()) for table in tables]
    path.write_text(text or "\n".join(parts))
    return path


def read(path) -> tuple[Waiver, ...]:
    return waivers.read(path, "acme", {"acme", "cuda", "torch"}, TODAY)


def report(*, status: str, waived: tuple[Waiver, ...] = (WAIVER,)) -> dict:
    fault = "wrong_result" if status == "violated" else None
    outcomes = [
        Outcome("group_filter", "GF-01", "t", "held", executed=1, features=CLAIMS),
        Outcome("group_filter", "GF-02", "t", status, fault, executed=1),
    ]
    return reports.report({SUBJECT: outcomes}, Profile("test", 1, 60), waivers=waived)


def test_a_waiver_counts_up_to_its_last_day_and_for_its_backend_alone(tmp_path) -> None:
    path = written(tmp_path, GOOD, {**GOOD, "clause": '"GF-03"', "backend": '"cuda"'})
    assert read(path) == (Waiver("GF-02", "acme", "#7", TODAY, "slow divide"),)


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"expires": "2026-11-20"}, ConfigError, "expired on 2026-11-20; see #7"),
        ({"expires": '"2027-01-01"'}, ConfigError, "expires of a waiver is a day"),
        ({"clause": '"GF-99"'}, UnknownNameError, "unknown clause 'GF-99'"),
        ({"clause": '"#7"'}, UnknownNameError, "unknown clause '#7'; choose from AD-01, AT-01, "),
        ({"backend": '"acne"'}, UnknownNameError, "did you mean 'acme'"),
        ({"backend": '"torch"'}, ConfigError, "keeps every clause"),
        ({"issue": '" "'}, ConfigError, "issue of a waiver is text"),
        ({"since": "2026-01-01"}, ConfigError, "a waiver has the keys"),
    ],
)
def test_a_waiver_that_says_too_little_or_too_much_is_an_error(tmp_path, changes, error, message) -> None:
    with pytest.raises(error, match=message):
        read(written(tmp_path, {**GOOD, **changes}))


@pytest.mark.parametrize("text", ["waiver = 3", "[waivers]\n", "[[waiver]\n"])
def test_a_file_of_something_else_is_an_error(tmp_path, text) -> None:
    with pytest.raises((ConfigError, FileError), match=r"waivers\.toml"):
        read(written(tmp_path, text=text))


def test_a_clause_is_waived_once(tmp_path) -> None:
    with pytest.raises(ConfigError, match="GF-02 for acme more than once"):
        read(written(tmp_path, GOOD, GOOD))


def test_a_waived_clause_stands_in_the_report_with_issue_and_expiry_and_never_as_held() -> None:
    content = report(status="violated")
    clause = content["operators"]["group_filter@1"]["clauses"][1]
    assert (content["verdict"], content["summary"]["held"], content["summary"]["waived"]) == ("waived", 1, 1)
    assert (clause["status"], clause["waiver"]["issue"], clause["waiver"]["expires"]) == ("waived", "#7", "2027-01-01")
    assert "Waived until 2027-01-01: slow divide (#7)" in documents.markdown(content)


def test_a_needless_waiver_is_a_failure() -> None:
    content = report(status="held")
    assert content["verdict"] == "fails"
    assert content["problems"] == [
        "the waiver of GF-02 for acme (#7) is needless: the clause is held; delete it",
    ]


@pytest.mark.parametrize("status", ["violated", "fault"])
def test_another_clause_that_fails_is_not_excused(status) -> None:
    other = Waiver("GF-03", "acme", "#8", date(2027, 1, 1), "another clause")
    assert report(status=status, waived=(other,))["verdict"] == "fails"


def test_what_was_not_run_makes_no_waiver_needless() -> None:
    assert report(status="not_run")["problems"] == []
