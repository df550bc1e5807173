"""The fingerprint of an attack: what changes it, and what does not."""

from __future__ import annotations

import sys

import pytest

from rlkernel.sources import Scope, fingerprint, reached
from rlkernel_conformance.attack import Attack, Table
from rlkernel_conformance.attack_sources import attack_sources, scope_of, targets
from rlkernel_conformance.harness import carry_out
from rlkernel_conformance.leak_check import attacks_with_leak_check
from rlkernel_conformance.profiles import Profile
from rlkernel_conformance.subject import Subject
from rlkernel_core.spec import OPERATORS

SUITE = {
    "harness.py": "def call(subject):\n    return subject()\n",
    "tables.py": "BAD = {'scan': [1], 'sum': [2], 'sum.x': [3], 'mean': [4]}\nONE = {'sum': 4}\n",
    "clauses.py": '''
from suite.harness import call
from suite.tables import BAD, ONE

SIZES = [1, 2]
OTHER = [3]

def cases(subject):
    return SIZES

def holds(subject, case):
    """A law."""
    return call(subject) == case + len(BAD["scan"]) + ONE["sum"]  # exactly

def other(subject, case):
    return OTHER

register(holds, other)
''',
}
SCOPE = Scope("no_other_package", frozenset(["suite.harness"]), bare_calls=False, others=frozenset(["sum", "mean"]))


@pytest.fixture
def hashed(tmp_path, monkeypatch):
    """The fingerprint of an attack of a suite of which one file reads otherwise."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "suite").mkdir()
    (tmp_path / "suite" / "__init__.py").touch()

    def one(file="clauses.py", old="", new=""):
        assert old in SUITE[file]
        for name, text in SUITE.items():
            (tmp_path / "suite" / name).write_text(text.replace(old, new) if name == file else text)
        return fingerprint(["suite.clauses:holds", "suite.clauses:cases"], scope=SCOPE)

    return one


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("clauses.py", "A law.", "Another word for it."),
        ("clauses.py", "# exactly", "# bit by bit"),
        ("clauses.py", "call(subject) == case", "call(\n        subject\n    ) == case"),
        ("clauses.py", "OTHER = [3]", "OTHER = [4]"),
        ("clauses.py", "register(holds, other)", "register(other)"),
        ("harness.py", "subject()", "subject(again=True)"),
        ("tables.py", "'sum': [2]", "'sum': [5]"),
        ("tables.py", "'sum.x': [3]", "'sum.x': []"),
    ],
)
def test_words_other_clauses_other_operators_rows_and_the_harness_leave_a_fingerprint(hashed, file, old, new) -> None:
    assert hashed(file, old, new) == hashed()


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("clauses.py", "== case", ">= case"),
        ("clauses.py", "SIZES = [1, 2]", "SIZES = [1]"),
        ("tables.py", "'scan': [1]", "'scan': [1, 1]"),
        ("tables.py", "'sum': 4", "'sum': 5"),  # no table of operators: a word that is also the name of one
    ],
)
def test_a_property_its_cases_and_what_they_use_change_a_fingerprint(hashed, file, old, new) -> None:
    assert hashed(file, old, new) != hashed()


def law(subject, case) -> None:
    """A property."""


def around(inner):
    """A property around another one."""

    def outer(subject, case) -> None:
        inner(subject, case)

    return outer


TABLE = Table(lambda subject: [around(law) for _ in subject], lambda *_: iter(()), law)


def test_targets_are_the_functions_that_closures_lambdas_and_tables_hold() -> None:
    clause = OPERATORS["whiten"].clauses[0]
    here = {f"{__name__}:{name}" for name in ("law", "around", "iter")}
    space = {"rlkernel_conformance.spaces.whiten:SPACE"}
    assert targets(Attack("whiten", clause, TABLE, around(law))) == here | space


@pytest.mark.parametrize("clause", attacks_with_leak_check("group_filter"))
def test_every_function_that_an_attack_runs_is_among_its_sources(clause) -> None:
    op, ran = "group_filter", set()
    attack, subject = attacks_with_leak_check(op)[clause], Subject("torch", op)
    modules = ("clauses", "spaces", "compare", "call_checks", "graphs", "draw")
    judging = tuple(f"rlkernel_conformance.{m}" for m in modules)

    def profile(frame, event, arg):
        module, code = frame.f_globals.get("__name__", ""), frame.f_code
        written = code.co_filename.endswith(".py")
        if event == "call" and written and module.startswith(judging) and "<" not in code.co_qualname.partition(".")[0]:
            ran.add(f"{module}:{code.co_qualname.partition('.')[0]}")

    with subject.chosen():
        sys.setprofile(profile)
        try:
            carry_out(subject, attack, Profile("test", 1, 60))
        finally:
            sys.setprofile(None)
    known = {place for _, place in reached(targets(attack), scope=scope_of(op))}
    lookups = {"rlkernel_conformance.clauses:attacks_on", "rlkernel_conformance.clauses:module_of"}
    assert ran
    assert ran - known - lookups == set()


def test_clauses_of_other_attacks_have_other_fingerprints() -> None:
    found = attack_sources("logprob")
    alike = {"LP-97", "LP-98"}  # one property and one space of calls, of which they take different tables
    assert len({made for clause, made in found.items() if clause not in alike}) == len(found) - len(alike & {*found})


def test_an_operator_without_attacks_has_no_fingerprints() -> None:
    assert attack_sources("no_such_operator") == {}
