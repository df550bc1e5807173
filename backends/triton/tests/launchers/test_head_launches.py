"""What the operators over an output head launch, for calls on a device that has no kernels."""

import pytest
import torch

from rlkernel_core.spec.linear_logprob import LinearLogprobCall
from rlkernel_core.spec.logprob import Support
from rlkernel_triton import head_calls, head_workspace, linear_logprob
from rlkernel_triton.launchers import Recorder, using

N, D, V = 64, 256, 1024


@pytest.fixture
def recorder(monkeypatch):
    monkeypatch.setattr(head_calls, "arch_of", lambda _: "sm90")
    recorder = Recorder()
    with using(recorder):
        yield recorder


def meta(*shape, dtype=torch.bfloat16, grad=False):
    return torch.empty(shape, dtype=dtype, device="meta").requires_grad_(grad)


def ids(*shape):
    return meta(*shape, dtype=torch.int64)


def flag(*shape):
    return meta(*shape, dtype=torch.bool)


def names(recorder):
    return [launch.build.kernel.partition(":")[2] for launch in recorder.launches]


def law(*shape, grad=False, **options):
    shape = shape or (N,)
    return LinearLogprobCall(meta(*shape, D, grad=grad), meta(V, D, grad=grad), ids(*shape), **options)


OPTIONS = {
    "plain": {},
    "entropy": {"entropy": True},
    "masked": {"mask": flag(N)},
    "temperatures": {"temperature": meta(N, dtype=torch.float32), "softcap": 30.0, "bias": meta(V)},
    "cut": {"max_workspace_bytes": 500_000},
}


def test_log_probabilities_are_three_launches(recorder):
    given = law(entropy=True)
    out = linear_logprob.prepare(given)(given)
    assert names(recorder) == ["head_sweep", "join", "law"]
    assert [launch.grid for launch in recorder.launches] == [(4, 1, 1), (2, 1, 1), (2, 1, 1)]
    assert dict(recorder.launches[0].build.constants)["MOMENT"] is True
    assert (out.logprob.shape, out.entropy.shape, out.invalid.dtype) == ((N,), (N,), torch.bool)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_plan_of_log_probabilities_launches_the_same_at_every_call(recorder, name):
    run = linear_logprob.prepare(law(**OPTIONS[name]))
    run(law(**OPTIONS[name]))
    first = list(recorder.launches)
    run(law(**OPTIONS[name]))
    assert first
    assert recorder.launches == [*first, *first]


def test_rows_that_lie_apart_are_copied_and_contiguous_ones_of_any_shape_are_not(recorder):
    for given, stride in ((law(4, 16), D), (LinearLogprobCall(meta(N, 2 * D)[:, :D], meta(V, D), ids(N)), 2 * D)):
        linear_logprob.prepare(given)(given)
        assert linear_logprob._Plan(given).head._fixed["x_stride"] == stride
    apart = LinearLogprobCall(meta(8, 10, D)[:, 1:9], meta(V, D), ids(8, 8))
    assert linear_logprob.prepare(apart)(apart).logprob.shape == (8, 8)


@pytest.mark.parametrize("grad", [False, True])
def test_log_probabilities_have_a_node_where_a_gradient_is_wanted_and_nowhere_else(recorder, grad):
    given = law(grad=grad, backward="save")
    out = linear_logprob.prepare(given)(given)
    assert (out.logprob.grad_fn is not None) == grad
    assert out.invalid.grad_fn is None
    assert dict(recorder.launches[0].build.constants)["SAVE"] is grad


def test_gradients_are_three_launches_for_each_block_of_columns(recorder, monkeypatch):
    monkeypatch.setattr(head_workspace, "BLOCKS", ((16384, 64),))
    given = law(grad=True, entropy=True)
    out = linear_logprob.prepare(given)(given)
    (out.logprob.sum() + out.entropy.sum()).backward()
    assert names(recorder)[3:] == ["head_gradient", "product", "product"] * (V // 64)
    constants = dict(recorder.launches[3].build.constants)
    assert [constants[n] for n in ("G", "G_LSE", "G_ENTROPY", "G_MASS")] == [True, False, True, False]
    assert (given.hidden.grad.shape, given.weight.grad.shape) == ((N, D), (V, D))


def test_a_frozen_head_saves_a_product(recorder):
    given = law(backward="recompute")
    given.hidden.requires_grad_()
    linear_logprob.prepare(given)(given).logprob.sum().backward()
    assert names(recorder)[3:] == ["head_gradient", "product"] * 16
    assert given.weight.grad is None


def test_a_support_of_a_masked_call_is_placed_before_the_sweep(recorder):
    support = Support(meta(400, dtype=torch.int64), meta(N + 1, dtype=torch.int64))
    given = law(support=support, mask=flag(N))
    assert linear_logprob.prepare(given)(given).log_kept_mass.shape == (N,)
    assert names(recorder) == ["place", "head_sweep", "join", "law"]


def test_no_rows_of_hidden_states_are_no_launches(recorder):
    given = law(0, grad=True)
    out = linear_logprob.prepare(given)(given)
    out.logprob.sum().backward()
    assert (recorder.launches, out.logprob.shape) == ([], (0,))
    assert given.weight.grad.shape == (V, D)
