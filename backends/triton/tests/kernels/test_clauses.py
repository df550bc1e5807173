"""The conformance clauses of the operators that the kernels serve, attacked in Triton's interpreter at toy sizes.

At length: `rlkernel conformance run` on a machine with a GPU, or with `TRITON_INTERPRET=1` and an hour.
"""

import os

import pytest

import rlkernel as rlk
from rlkernel_conformance.harness import carry_out, clauses_of
from rlkernel_conformance.profiles import Profile
from rlkernel_conformance.subject import Subject
from rlkernel_triton.interpreted import backend

# Operator -> clauses that are left to GPUs, besides those that every operator has: many draws, rows
# or options, bytes that are counted, and graphs take minutes here; and NumPy sums a row of a product by its place, at
# odd widths too, so that the bits of a batch (LN-13, GN-15, GN-16, LL-27) say nothing here.
LEFT = {
    "affine_suffix_scan": ("SC-13", "SC-14"),
    "advantage": ("AD-24", "AD-26"),
    "whiten": ("WH-03", "WH-13"),
    "linear": ("LN-13", "LN-14"),
    "grouped_linear": ("GN-15", "GN-16", "GN-17"),
    "rms_norm": ("RN-12",),
    "rope": ("RO-14", "RO-15"),
    "attention": ("AT-16", "AT-17"),
    "glu": ("GL-10", "GL-11"),
    "policy_loss": ("PL-09", "PL-26", "PL-33"),
    "linear_policy_loss": ("LPL-02", "LPL-03", "LPL-04", "LPL-05", "LPL-17"),
    "logprob": ("LP-23",),
    "divergence": ("DV-23",),
    "linear_divergence": ("LD-04", "LD-09", "LD-18"),
    "linear_logprob": ("LL-05", "LL-07", "LL-17", "LL-27", "LL-29"),
    "lm_head_sample": ("LH-03", "LH-04", "LH-13", "LH-14", "LH-16", "LH-17", "LH-19", "LH-20"),
    "quantize": ("QZ-08", "QZ-13", "QZ-16"),
    "dequantize": ("DQ-09",),
    "prepack": (),
    "qmatmul": ("QM-26",),
}
# Long here, and in part what cheaper ones attack: log-probabilities are compared in LH-01, edits of rows in LH-08,
# whitened advantages in test_group_advantage.py, bits that a draw states in test_lm_head_sample.py.
SLOW = {"LH-02", "LH-25", "AD-17"}
EFFORT = Profile("toy", 2, 120)
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="on a GPU all clauses are attacked")


def due():
    """The attacks on each operator."""
    for op, left in LEFT.items():
        attacks = clauses_of(Subject(backend.name, op))[0]
        common = {f"{a.clause.id[:-2]}{n}" for a in attacks for n in range(91, 99)}
        for a in (a for a in attacks if a.clause.id not in {*left, *common}):
            yield pytest.param(op, a, id=a.clause.id, marks=[pytest.mark.slow] if a.clause.id in SLOW else [])


with rlk.registered(backend):
    DUE = list(due())


@pytest.mark.parametrize("op, attack", DUE)
def test_a_clause_holds_in_the_interpreter(op, attack) -> None:
    subject = Subject(backend.name, op)
    with subject.chosen():
        outcome = carry_out(subject, attack, EFFORT, shrink=False)
    assert not outcome.failed, outcome.message
