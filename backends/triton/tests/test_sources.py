"""The fingerprint of an operator, which tells whether a report is of the present sources, covers what it launches."""

import pytest

from rlkernel.sources import reached
from rlkernel_conformance.manifests import targets_of
from rlkernel_core.spec import OPERATORS
from rlkernel_triton import backend
from rlkernel_triton.recorded import recorded
from rlkernel_triton.workloads import WORKLOADS


@pytest.mark.parametrize("op", WORKLOADS)
def test_every_kernel_that_an_operator_launches_is_among_its_sources(op) -> None:
    launched = {record.build.kernel for record in recorded(op, "sm_90")}
    impls = backend.of(OPERATORS[op].id)
    assert launched - {place for _, place in reached(t for i in impls for t in targets_of(i))} == set()
