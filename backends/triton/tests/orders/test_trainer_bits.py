"""A draw's log-probability has the order of sums of linear_logprob, derived from PTX."""

import numpy as np
import pytest
import torch

from rlkernel_core.spec.linear_logprob import LinearLogprobCall
from rlkernel_core.spec.lm_head_sample import LmHeadSampleCall
from rlkernel_triton.launchers import Scope, within
from rlkernel_triton.linear_logprob import launch as linear_logprob
from rlkernel_triton.lm_head_sample.trainer_head import TrainerHead
from rlkernel_triton.orders.expressions import leaf
from rlkernel_triton.orders.launcher import OrderLauncher


def named(target, **given):
    """A launcher that knows each element of these tensors by name."""
    launcher = OrderLauncher(target, "bits")
    for name, x in given.items():
        places = np.arange(x.numel(), dtype=np.uint64).reshape(x.shape)
        launcher.memory.name(x, leaf(name, places, x.element_size() // 2))
    return launcher


@pytest.mark.parametrize(
    ("target", "dtype", "V"),
    [("sm_90", torch.float32, 100), ("sm_90", torch.bfloat16, 300), ("sm_80", torch.bfloat16, 300)],
    ids=str,
)
def test_a_draw_adds_in_the_order_of_the_trainer(target, dtype, V) -> None:
    g, N = torch.Generator().manual_seed(0), 2
    hidden, weight = (torch.randn(n, 32, generator=g).to(dtype) for n in (N, V))
    ids = torch.tensor([3, V - 1])
    draws, trains = (named(target, hidden=hidden, weight=weight) for _ in range(2))
    with within(Scope(draws, draws.target)):
        call = LmHeadSampleCall(hidden, weight, seed=0, step=ids, temperature=0.7)
        head = TrainerHead(draws, call, V, law=True)
        of = head.of(call)
        head.logits(of, 0, V)
        head.sum_drawn_tiles(of, ids, torch.ones(N, dtype=torch.int32))
        drawn = head.logprob(of.sums[0], ids, 0.7, None)
    with within(Scope(trains, trains.target)):
        call = LinearLogprobCall(hidden, weight, ids, temperature=0.7)
        trained = linear_logprob.prepare(call)(call).logprob

    assert draws.memory.hashes(drawn).tolist() == trains.memory.hashes(trained).tolist()
