"""linear_logprob@1, the reference: extra memory is what it says, and constant in N."""

import gc

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from rlkernel_torch import logprob as logprob_module
from rlkernel_torch.direct import linear_logprob, logprob
from rlkernel_torch.linear_logprob_workspace import workspace
from tests.logprob_inputs import head, ragged

D, V = 16, 2000


def peak(run):
    """Most bytes allocated at a time while `run` runs, and what it returns."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        out = run()
    live = most = 0
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most, out


def extra(N, *, dtype=torch.bfloat16, **options):
    """Bytes at the peak of a forward and backward pass beyond results and gradients."""
    x = head(N, D, V, dtype=dtype)
    leaves = [t.requires_grad_() for t in x[:3]]
    if options.pop("supported", False):
        options["support"] = ragged([range(i % 7, V, 200) for i in range(N)])

    def both_ways():
        out = linear_logprob(leaves[0], leaves[1], x.ids, bias=leaves[2], softcap=30.0, entropy=True, **options)
        (out.logprob + out.entropy).sum().backward()
        return out

    most, out = peak(both_ways)
    results = sum(t.nbytes for t in (out.logprob, out.lse, out.entropy, out.invalid))
    return most - results - sum(t.grad.nbytes for t in leaves)


@pytest.mark.parametrize("supported", [False, True])
@pytest.mark.parametrize("backward", ["recompute", "save"])
@pytest.mark.parametrize("N", [1, 600])
def test_the_stated_workspace_is_kept(N, backward, supported):
    nnz = 10 * N if supported else 0
    stated = workspace(backward, N, D, V, 4, nnz)
    assert 0 < extra(N, backward=backward, supported=supported) <= stated
    assert extra(N, max_workspace_bytes=stated, backward=backward, supported=supported) <= stated


def test_auto_saves_where_that_fits():
    least, much = workspace("recompute", 512, D, V), workspace("save", 512, D, V)
    assert least < much
    saving = extra(512, backward="save")
    assert extra(512, max_workspace_bytes=much) == saving
    assert extra(512, max_workspace_bytes=much - 1) < saving / 2
    assert extra(512) < saving / 2


def test_a_forward_pass_without_gradients_saves_nothing():
    x = head(512, D, V)
    saved, _ = peak(lambda: linear_logprob(x.hidden, x.weight, x.ids, backward="save"))
    assert saved <= workspace("recompute", 512, D, V)
    assert saved < 4 * 512 * V


def test_a_shifted_batch_is_not_copied(monkeypatch):
    """`[:, :-1]` has no flat view: reshaping it would copy all of it."""
    monkeypatch.setattr(logprob_module, "_BLOCK", 1 << 14)
    wide, ids = torch.randn(8, 65, V), torch.zeros(8, 64, dtype=torch.int64)
    most, out = peak(lambda: logprob(wide[:, :-1], ids, entropy=True))
    assert most < wide.nbytes / 4
    assert torch.equal(out.logprob, logprob(wide[:, :-1].contiguous(), ids, entropy=True).logprob)
    hidden, weight = torch.randn(8, 65, 2048), torch.randn(4, 2048)
    most, out = peak(lambda: linear_logprob(hidden[:, :-1], weight, ids))
    assert most < hidden.nbytes / 2
    assert torch.equal(out.logprob, linear_logprob(hidden[:, :-1].contiguous(), weight, ids).logprob)
