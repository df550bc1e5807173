"""What logprob launches, for calls on a device that has no kernels."""

from contextlib import contextmanager

import pytest
import torch

from rlkernel_core.errors import RLKernelError
from rlkernel_core.spec.logprob import LogprobCall, Support
from rlkernel_triton.common.row_layout import layout_of, rows_of
from rlkernel_triton.common.softmax_rows import planes
from rlkernel_triton.launchers import Recorder, launcher_for, plain_launcher_for, using
from rlkernel_triton.logprob.launch import prepare

V = 70_000  # three parts


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


@contextmanager
def recorded():
    recorder = Recorder()
    with using(recorder):
        yield recorder


def names(recorder):
    return [launch.build.kernel.partition(":")[2] for launch in recorder.launches]


def call(N=8, *, grad=False, dtype=torch.bfloat16, **options):
    logits = meta(N, V, dtype=dtype).requires_grad_(grad)
    return LogprobCall(logits, meta(N, dtype=torch.int64), **options)


def test_a_forward_is_two_launches():
    with recorded() as recorder:
        prepare(call())(call())
    assert names(recorder) == ["partial_softmax", "merge_softmax"]
    partial, merge = recorder.launches
    assert (partial.grid, merge.grid) == ((8, 3, 1), (1, 1, 1))
    assert dict(partial.build.constants)["MOMENT"] is False
    assert dict(partial.build.types)["logits"] == "*bf16"


def test_a_backward_is_one_launch_for_the_results_that_gradients_arrive_at():
    with recorded() as recorder:
        given = call(grad=True, entropy=True)
        out = prepare(given)(given)
        (out.logprob.sum() + out.entropy.sum()).backward()
        assert given.logits.grad.shape == given.logits.shape
    assert names(recorder) == ["partial_softmax", "merge_softmax", "softmax_backward"]
    constants = dict(recorder.launches[-1].build.constants)
    assert [constants[n] for n in ("G", "G_LSE", "G_ENTROPY", "G_MASS")] == [True, False, True, False]


@pytest.mark.parametrize("grad", [False, True])
def test_a_node_is_made_where_a_gradient_is_wanted_and_nowhere_else(grad):
    with recorded():
        given = call(grad=grad)
        out = prepare(given)(given)
    assert (out.logprob.grad_fn is not None) == grad
    assert out.invalid.grad_fn is None


def test_without_grad_mode_there_is_no_node():
    with recorded(), torch.no_grad():
        given = call(grad=True)
        assert prepare(given)(given).logprob.grad_fn is None


def test_every_option_is_recorded():
    support = Support(meta(40, dtype=torch.int64), meta(9, dtype=torch.int64))
    options = {"entropy": True, "temperature": meta(8), "softcap": 30.0, "mask": meta(8, dtype=torch.bool)}
    with recorded() as recorder:
        given = call(support=support, top_logprobs=4, **options)
        prepare(given)(given)
    assert names(recorder) == [
        *["set_bits", "partial_softmax", "merge_softmax", "sort_keys", "partial_softmax", "merge_softmax"],
        "top_logprobs",
    ]
    assert dict(recorder.launches[1].build.types)["T"] == "*fp32"


def test_a_plan_runs_every_call_of_its_shape():
    with recorded() as recorder:
        run = prepare(call())
        for _ in range(3):
            run(call())
    assert (len(recorder.launches), len(recorder.builds)) == (6, 2)


def test_no_rows_are_no_launches():
    with recorded() as recorder:
        out = prepare(call(0, entropy=True))(call(0, entropy=True))
    assert (recorder.launches, out.logprob.shape, out.entropy.shape) == ([], (0,), (0,))


@pytest.mark.parametrize("shape", [(), (1,), (4,), (7,), (2, 6), (3, 5), (0,), (0, 3), (2, 3, 4)])
def test_planes_are_aligned_apart_and_no_views(shape):
    made = planes((1, 1, 6), torch.Size(shape), torch.device("cpu"))()
    assert [x.shape for x in made[:2]] == [torch.Size(shape)] * 2
    assert made[2].numel() == 6 * made[0].numel()
    assert all(x.is_contiguous() and not x._is_view() and x.data_ptr() % 16 == 0 for x in made)
    for i, x in enumerate(made):
        x.fill_(i)
    assert [set(x.flatten().tolist()) for x in made] == [{float(i)} if made[0].numel() else set() for i in range(3)]
    assert [x._version for x in made] == [1, 1, 1]  # each has its own


@pytest.mark.parametrize(
    "x,copied",
    [
        (torch.zeros(3, 6, 5), False),
        (torch.zeros(3, 7, 5)[:, 1:], False),
        (torch.zeros(6, 3, 5).transpose(0, 1), False),
        (torch.zeros(2, 9, 8, 5)[:, ::2, ::3], True),
        (torch.zeros(4, 10)[:, ::2], False),
    ],
)
def test_layouts_are_those_of_the_rows_and_tell_a_copy(x, copied):
    assert layout_of(x) == (rows_of(x).layout, copied)
    assert (rows_of(x).data is not x) == copied


def test_a_device_without_kernels_is_refused_with_the_remedy():
    for find in (launcher_for, plain_launcher_for):
        with pytest.raises(RLKernelError, match="Triton cannot launch kernels on meta. Set TRITON_INTERPRET=1"):
            find(torch.device("meta"))


def test_the_launcher_in_use_is_that_of_the_innermost_scope():
    outer, inner, device = Recorder(), Recorder(), torch.device("cpu")
    with using(outer):
        with using(inner):
            assert launcher_for(device) is inner
            assert plain_launcher_for(device) is inner
        assert launcher_for(device) is outer


@pytest.mark.parametrize("shape", [(1, 300), (300,), (1, 1, 300)])
def test_one_row_steps_as_rows_of_its_length_do(shape) -> None:
    assert rows_of(torch.empty(shape)).layout == (1, 300, 300, 1)
