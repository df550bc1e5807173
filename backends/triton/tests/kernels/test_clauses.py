"""A part of the conformance clauses of the training operators, attacked in Triton's interpreter at toy sizes.

The whole set: `rlkernel conformance run` on a machine with a GPU, or `TRITON_INTERPRET=1` and an hour.
"""

import os

import pytest

from rlkernel_conformance.harness import carry_out, clauses_of
from rlkernel_conformance.profiles import Profile
from rlkernel_conformance.subject import Subject
from rlkernel_triton.interpreted import backend

# Those that the direct tests beside this file do not repeat: side effects, refusals, odd layouts, bits.
CLAUSES = {
    "affine_suffix_scan": ("SC-03", "SC-05", "SC-06", "SC-07", "SC-09", "SC-10", "SC-11"),
    "advantage": ("AD-02", "AD-05", "AD-07", "AD-15", "AD-18", "AD-19", "AD-20", "AD-21", "AD-22", "AD-24"),
    "whiten": ("WH-01", "WH-02"),
    "policy_loss": ("PL-05", "PL-08", "PL-11", "PL-15", "PL-27", "PL-29", "PL-30", "PL-31"),
    "linear_policy_loss": ("LPL-08", "LPL-13", "LPL-14", "LPL-15"),
}
EFFORT = Profile("toy", 2, 60)
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="on a GPU all clauses are attacked")


@pytest.mark.parametrize("op", CLAUSES)
def test_clauses_hold_in_the_interpreter(op) -> None:
    subject = Subject(backend.name, op)
    due = {a.clause.id: a for a in clauses_of(subject)[0]}
    with subject.chosen():
        outcomes = [carry_out(subject, due[clause], EFFORT, shrink=False) for clause in CLAUSES[op]]
    assert {o.clause: o.message for o in outcomes if o.status != "held"} == {}
