"""What the host of the cuda backend does once a shape, and what it passes at each call: no GPU, nothing is launched."""

import ctypes
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from rlkernel_core.errors import RLKernelError
from rlkernel_core.spec.linear_logprob import LinearLogprobCall
from rlkernel_core.spec.linear_policy_loss import LinearPolicyLossCall
from rlkernel_core.spec.qmatmul import QmatmulCall
from rlkernel_core.spec.sample import SampleCall
from rlkernel_cuda.common import driver
from rlkernel_cuda.linear_logprob import launch as linear_logprob
from rlkernel_cuda.linear_logprob import products
from rlkernel_cuda.linear_policy_loss import launch as linear_policy_loss
from rlkernel_cuda.qmatmul import launch as qmatmul
from rlkernel_cuda.qmatmul import pdl
from rlkernel_cuda.sample import launch as sampling
from rlkernel_cuda.sample.kernel import PARAMS
from rlkernel_triton.common.host import INTERPRETED
from rlkernel_triton.launchers import Recorder, using
from rlkernel_triton.launchers.specialization import specialization_of

pytestmark = pytest.mark.skipif(
    INTERPRETED, reason="launches are written down, which the interpreter's kernels cannot be"
)
N, D, V = 64, 64, 512


@pytest.fixture
def stub(stub_driver, monkeypatch):
    monkeypatch.setattr(products, "_by_cublas", lambda *_: None)
    return stub_driver


@contextmanager
def recorded():
    recorder = Recorder()
    names = []
    with using(recorder):
        yield names
    names.extend(launch.build.kernel.partition(":")[2] for launch in recorder.launches)


def head(**options) -> LinearLogprobCall:
    hidden, weight = torch.zeros(N, D, dtype=torch.bfloat16), torch.zeros(V, D, dtype=torch.bfloat16)
    return LinearLogprobCall(hidden, weight, torch.zeros(N, dtype=torch.long), **options)


def learning(call):
    for x in (call.hidden, call.weight):
        x.requires_grad_()
    return call


def loss(**options) -> LinearPolicyLossCall:
    of_head = head()
    given = (of_head.hidden, of_head.weight, of_head.ids, torch.zeros(N), torch.zeros(N))
    return LinearPolicyLossCall(*given, aggregate="token_mean", **options)


MASK = torch.arange(N) % 3 > 0


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["rows_kernel", "logits_kernel", "merge_tiles_kernel"]),
        ({"bias": torch.zeros(V), "softcap": 3.0}, ["rows_kernel", "logits_kernel", "merge_tiles_kernel"]),
        ({"mask": MASK}, ["rows_kernel", "gather_kernel", "logits_kernel", "merge_tiles_kernel", "results_kernel"]),
    ],
    ids=["plain", "bias and softcap", "mask"],
)
def test_a_call_without_gradients_launches_this_and_makes_no_node(stub, options, expected) -> None:
    call = head(**options)
    with recorded() as names:
        run = linear_logprob.prepare(call)
        results = [run(call), run(call)]
    assert names == expected * 2
    assert [r.logprob.grad_fn for r in results] == [None, None]
    assert stub.launches == []


@pytest.mark.parametrize("mode", ["recompute", "save"])
def test_a_gradient_takes_one_forward_pass_and_one_backward_pass(stub, mode) -> None:
    call = learning(head(backward=mode))
    forward = ["rows_kernel", "logits_kernel", "merge_tiles_kernel", "results_kernel"]
    backward = ["upstream_kernel", "coefficient_kernel", *["saved_kernel"] * (mode == "save"), "chosen_kernel"]
    with recorded() as names:
        run = linear_logprob.prepare(call)
        for _ in range(2):
            torch.autograd.grad(run(call).logprob.sum(), (call.hidden, call.weight))
    assert names == [*forward, *backward] * 2
    assert [name for name, _, _ in stub.launches] == ["head"] * (2 if mode == "recompute" else 0)


def test_a_shape_is_planned_and_its_kernels_are_loaded_once(stub, monkeypatch) -> None:
    call, asked = learning(head(mask=MASK)), []
    monkeypatch.setattr(
        linear_logprob.plan, "choose", lambda *a, f=linear_logprob.plan.choose, **k: asked.append(a) or f(*a, **k)
    )
    with recorded():
        run = linear_logprob.prepare(call)
        for _ in range(3):
            torch.autograd.grad(run(call).logprob.sum(), (call.hidden, call.weight))
    assert len(asked) == 1
    assert [name for name, _ in stub.loaded] == ["head", "product", "product"]
    assert [name for name, _, _ in stub.launches] == ["head", "product", "product"] * 3


def test_a_weight_is_described_to_tma_once_and_what_moves_at_each_call(stub) -> None:
    call = learning(head())
    with recorded():
        run = linear_logprob.prepare(call)
        held = []
        for _ in range(3):
            call.hidden = torch.zeros(N, D, dtype=torch.bfloat16, requires_grad=True)
            held.append(call.hidden)
            torch.autograd.grad(run(call).logprob.sum(), (call.hidden, call.weight))
    seen = [address for address, _ in stub.described]
    assert seen.count(call.weight.data_ptr()) == 1
    assert [seen.count(x.data_ptr()) for x in held] == [1, 1, 1]


def test_the_gradient_s_kernel_is_passed_its_operands_and_the_numbers_of_the_shape(stub) -> None:
    call = learning(head(bias=torch.zeros(V), softcap=2.0))
    with recorded():
        run = linear_logprob.prepare(call)
        torch.autograd.grad(run(call).logprob.sum(), call.hidden)
    [(_, blocks, held)] = stub.launches
    first_row, *numbers = held[9:]
    assert blocks == stub.MULTIPROCESSORS
    assert (first_row, numbers[:4], numbers[6]) == (0, [N, V, 128, V], D // 64)
    assert numbers[4:6] == pytest.approx([2.0, 2.0 * 1.4426950408889634 / 2.0])
    assert held[2] != held[3]  # row scales stand where a head has no bias
    assert [sizes for _, sizes in stub.described] == [(D, N), (D, V)]


def in_blocks_of_32_rows(monkeypatch):
    monkeypatch.setattr(linear_policy_loss, "BLOCK", 32)
    monkeypatch.setattr(linear_policy_loss, "SAVED_LOGITS", 33 * (2 * V + 12 * 2))  # 33 rows and their partial sums


@pytest.mark.parametrize("blocks", [False, True], ids=["at once", "block by block"])
def test_a_policy_loss_is_planned_once_whichever_way_it_goes(stub, monkeypatch, blocks) -> None:
    if blocks:
        in_blocks_of_32_rows(monkeypatch)
    call, ways, way = learning(loss(mask=MASK, entropy=True)), [], linear_policy_loss._way
    monkeypatch.setattr(linear_policy_loss, "_way", lambda *given: ways.append(given) or way(*given))
    with recorded() as names:
        run = linear_policy_loss.prepare(call)
        for _ in range(2):
            torch.autograd.grad(run(call).loss, (call.hidden, call.weight))
    half = len(names) // 2
    assert names[:half] == names[half:]
    assert names.count("logits_kernel") == (4 if blocks else 2)
    assert names.count("scale_kernel") == 4
    assert len(stub.launches) == (8 if blocks else 4)
    assert len(ways) == 1


def test_without_gradients_a_policy_loss_makes_no_node(stub) -> None:
    call = loss()
    with recorded() as names:
        out = linear_policy_loss.prepare(call)(call)
    assert out.loss.grad_fn is None
    assert names[:3] == ["rows_kernel", "logits_kernel", "merge_tiles_kernel"]
    assert "scale_kernel" not in names


OPTIONS = [{}, {"mask": MASK}, {"bias": torch.zeros(V)}, {"entropy": True}, {"max_workspace_bytes": 1 << 22}]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(options) or "plain")
@pytest.mark.parametrize("kind", ["recompute", "save", "loss", "loss in blocks"])
def test_what_forward_saves_is_known_in_advance(stub, kind, options, monkeypatch) -> None:
    of_head = kind in {"recompute", "save"}
    call = learning(head(backward=kind, **options) if of_head else loss(**options))
    module = linear_logprob if of_head else linear_policy_loss
    if kind == "loss in blocks":
        in_blocks_of_32_rows(monkeypatch)
    with recorded():
        pair = module.prepare(call)
        result, saved = pair.forward(call)
    told = pair.saved_like(call, result, pair.wanted)
    of_call = (call.hidden, call.weight, call.bias)
    for have, said in zip(saved, told, strict=True):
        if have is None or any(have is x for x in of_call):
            assert said is have
        else:
            assert (have.shape, have.dtype, have.stride()) == (said.shape, said.dtype, said.stride())
            assert not any(said is x for x in of_call)


@pytest.fixture
def drawn(stub, monkeypatch):
    """Fields of params.cuh's Params, read back from each launch of the sampler."""
    monkeypatch.setattr(driver, "loaded", lambda code, name, shared: SimpleNamespace(name=name))
    monkeypatch.setattr("rlkernel_cuda.sample.kernel.loaded", lambda *_: SimpleNamespace(name="sample"))
    stub.structures["sample"] = PARAMS.size
    return lambda: [PARAMS.unpack(held) for _, _, held in stub.launches]


def law_of(fields, at):
    """(address, number, stride, whether 64 bits) of a sampling parameter."""
    return fields[6 + 4 * at : 10 + 4 * at]


def test_a_draw_reads_seeds_and_steps_of_the_call_and_all_else_of_the_plan(drawn) -> None:
    logits, seed = torch.zeros(3, 40, dtype=torch.bfloat16), torch.arange(3)
    other = seed + 5
    run = sampling.prepare(SampleCall(logits, seed=seed, step=0, temperature=0.5, top_k=7))
    first, second = (
        run(SampleCall(logits, seed=x, step=step, temperature=0.5, top_k=7)) for x, step in ((seed, 1), (other, 2**40))
    )
    found = drawn()
    assert [law_of(f, 5) for f in found] == [(0, 1, -1, 1), (0, 2**40, -1, 1)]
    assert [law_of(f, 4) for f in found] == [(x.data_ptr(), 0, 1, 1) for x in (seed, other)]
    assert [law_of(f, 1) for f in found] == [(0, 7, -1, 1)] * 2
    assert [law_of(f, 0) for f in found] == [(0, 0x3F000000, -1, 0)] * 2  # the bits of 0.5
    assert [f[-8:-6] for f in found] == [(r.token.data_ptr(), r.threshold_id.data_ptr()) for r in (first, second)]


def test_parameters_that_the_kernel_cannot_read_are_converted_at_each_call(drawn) -> None:
    logits, temperature = torch.zeros(3, 40), torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    call = SampleCall(logits, seed=0, step=0, temperature=temperature)
    sampling.prepare(call)(call)
    [fields] = drawn()
    address, number, stride, wide = law_of(fields, 0)
    assert (address not in {0, temperature.data_ptr()}, number, stride, wide) == (True, 0, 1, 0)


@pytest.mark.parametrize(("M", "kernel"), [(1, "w4a16_small_m"), (256, "w4a16_wgmma")])
def test_a_product_with_a_quantized_weight_is_cut_once(stub, monkeypatch, M, kernel) -> None:
    from rlkernel_core.quant import QuantSpec

    parts = {"codes": torch.zeros(4096 * 512, dtype=torch.int32), "scale": torch.zeros(4096, 32, dtype=torch.bfloat16)}
    weight = SimpleNamespace(shape=(4096, 4096), spec=QuantSpec.named("int4_g128"), layout="triton_w4", parts=parts)
    asked, cut = [], qmatmul.choice.cut
    monkeypatch.setattr(qmatmul.choice, "cut", lambda *given: asked.append(given) or cut(*given))
    calls = [QmatmulCall(torch.zeros(M, 4096, dtype=torch.bfloat16), weight) for _ in range(2)]
    run = qmatmul.prepare(calls[0])
    results = [run(call) for call in calls]
    assert len(asked) == len(stub.loaded) == 1
    assert [y.shape for y in results] == [(M, 4096)] * 2
    assert [name for name, _, _ in stub.launches] == [kernel] * 2
    for (_, _, held), y in zip(stub.launches, results, strict=True):
        assert held[-3:] == [M, 4096, 4096]
        assert y.data_ptr() in held[:5]
        assert parts["scale"].data_ptr() in held[:5]


@pytest.mark.parametrize("launch", [driver.Launch, pdl.OverlappedLaunch])
@pytest.mark.parametrize("answer", [0, 500])
def test_a_launch_hands_over_descriptions_words_and_numbers_and_tells_what_the_driver_says(
    stub_driver, launch, answer
) -> None:
    stub_driver.answer, stub_driver.forms = answer, {"some": (1, 2, [ctypes.c_int, ctypes.c_float])}
    numbers = [ctypes.c_int(7), ctypes.c_float(0.5)]
    bound = launch(SimpleNamespace(name="some"), driver.Blocks(3, 32, 0), 0, numbers)
    description = ctypes.c_int(11)
    arguments = [(description, ctypes.addressof(description))], (2**40, 9)
    if answer:
        with pytest.raises(RLKernelError, match="CUDA error 500, no such thing"):
            bound(*arguments)
    else:
        bound(*arguments)
    assert stub_driver.launches == [("some", 3, [2**40, 9, 7, 0.5])]
    assert stub_driver.streams == [5]


def test_a_descriptor_of_tma_is_specialized_by_its_type_and_box() -> None:
    from rlkernel_cuda.linear_logprob.logits import Descriptor

    descriptor = Descriptor(128, 64)
    first, second = (torch.zeros(200, 72, dtype=torch.bfloat16) for _ in range(2))
    made = [descriptor.of(x) for x in (first, second)]
    assert [d.base is x for d, x in zip(made, (first, second), strict=True)] == [True, True]
    assert made[0].strides == made[1].strides
    assert [specialization_of(d).type for d in made] == ["tensordesc<bf16[128, 64]>"] * 2
