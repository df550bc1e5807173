"""rlkernel bench on a GPU: events, graphs and memory of the device. Elsewhere these tests are skipped."""

from __future__ import annotations

import pytest
import torch
from rlkernel_bench import ceilings
from rlkernel_bench.measure import Effort
from rlkernel_bench.run import fails, run
from rlkernel_bench.suites import SUITES
from rlkernel_bench.timing import Stopwatch, replayed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")
PEERS = ("torch", "cublas", "cublas fp32", "bare graph", "launches")


@pytest.mark.filterwarnings("ignore::rlkernel_core.errors.FallbackWarning")  # plain torch on a GPU, as asked for
@pytest.mark.parametrize("suite", SUITES)
def test_the_reference_is_right_on_every_toy_workload_of_a_gpu(suite) -> None:
    content = run([suite], device="cuda", use=("reference",), against=PEERS, effort=Effort(0.001))
    assert fails(content) == []


def test_no_copy_is_faster_than_the_ceilings() -> None:
    known = ceilings.measure("cuda")
    x = torch.empty(1 << 28, device="cuda")
    y = torch.empty_like(x)
    watch = Stopwatch("cuda")
    for _ in range(3):
        watch.once(lambda: y.copy_(x))
    took = watch.once(lambda: y.copy_(x))
    assert took >= ceilings.SLACK * known.floor_us(2 * x.nbytes, 0, "float32")


def test_a_call_in_a_graph_takes_no_longer_than_one_by_itself() -> None:
    x = torch.ones(1 << 10, device="cuda")
    watch = Stopwatch("cuda")

    def call(_: int) -> torch.Tensor:
        return ((x + 1) * 2).sum()

    call(0)
    assert min(replayed(watch, call, 2, seconds=0.01)) <= min(watch.once(lambda: call(0)) for _ in range(5))
