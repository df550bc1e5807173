"""What quantize and dequantize launch, and that a plan launches the same for every call of its shape."""

import pytest
import torch

from rlkernel_core.errors import ArgumentError
from rlkernel_core.quant import QuantSpec
from rlkernel_core.spec.qmatmul import LoRA, QmatmulCall
from rlkernel_core.spec.quantize import DequantizeCall, QuantizeCall
from rlkernel_triton.launchers import Recorder, planning_for, using
from rlkernel_triton.quant import dequantize, product, qmatmul, quantize
from rlkernel_triton.quant.tile_config import Machine

KERNELS = {
    "int8_channel": ["quantize_rows_kernel"],
    "fp8_tensor": ["absmax_kernel", "quantize_rows_kernel"],
    "int4_g128": ["quantize_groups_kernel"],
    "nf4": ["quantize_groups_kernel"],
    "mxfp4": ["quantize_mx_kernel"],
    "nvfp4": ["absmax_finite_kernel", "quantize_nvfp4_kernel"],
    "gguf_q4_k": ["quantize_kquants_kernel"],
}
OF_BLOCKS = ("mxfp4", "nvfp4", "gguf_q4_k")


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    for module in (product, quantize):
        monkeypatch.setattr(module, "machine", lambda _: Machine("sm90", 132, ptx=True, sync=False))


def weight(seed=0):
    return torch.randn(64, 256, generator=torch.Generator().manual_seed(seed))


def launched(recorder):
    return [launch.build.kernel.partition(":")[2] for launch in recorder.launches]


@pytest.mark.parametrize("name", KERNELS)
def test_a_plan_quantizes_with_the_same_launches_at_every_call(name):
    recorder = Recorder()
    with using(recorder):
        run = quantize.prepare(QuantizeCall(weight(), name))
        made = [run(QuantizeCall(weight(seed), name)) for seed in (0, 1)]
    assert launched(recorder) == KERNELS[name] * 2
    half = len(KERNELS[name])
    assert recorder.launches[:half] == recorder.launches[half:]
    assert made[0].parts["codes"].data_ptr() != made[1].parts["codes"].data_ptr()


@pytest.mark.parametrize("name", KERNELS)
def test_a_plan_dequantizes_in_one_launch(name):
    recorder = Recorder()
    with using(recorder):
        w = quantize.quantize(QuantizeCall(weight(), name))
        recorder.launches.clear()
        run = dequantize.prepare(DequantizeCall(w, dtype=torch.float16))
        out = [run(DequantizeCall(w)) for _ in range(2)]
    assert launched(recorder) == ["dequantize_blocks_kernel" if name in OF_BLOCKS else "dequantize_kernel"] * 2
    assert recorder.launches[0] == recorder.launches[1]
    assert [(x.shape, x.dtype) for x in out] == [((64, 256), torch.float16)] * 2


@pytest.mark.parametrize(
    ("options", "again"),
    [({}, ["dequantize_kernel"]), ({"activation": "silu"}, ["canonical_product_kernel", "dequantize_kernel"])],
)
def test_gradients_of_a_product_are_launched_as_they_were_bound(options, again):
    recorder, x = Recorder(), weight()[:3].bfloat16().requires_grad_()
    with using(recorder):
        w = quantize.quantize(QuantizeCall(weight(), "int4_g128"))
        recorder.launches.clear()
        run = qmatmul.prepare(QmatmulCall(x, w, **options))
        for _ in range(2):
            run(QmatmulCall(x, w, **options)).float().sum().backward()
    assert launched(recorder) == ["canonical_product_kernel", *again] * 2
    half = len(recorder.launches) // 2
    assert recorder.launches[:half] == recorder.launches[half:]
    assert x.grad.shape == x.shape


def test_a_plan_writes_into_the_weight_that_each_call_names():
    with using(Recorder()):
        first, second = (quantize.quantize(QuantizeCall(weight(), "int8_channel")) for _ in range(2))
        run = quantize.prepare(QuantizeCall(weight(), "int8_channel", out=first))
        assert run(QuantizeCall(weight(), "int8_channel", out=second)) is second


def test_a_weight_that_wants_a_gradient_is_refused_before_anything_is_bound():
    with using(Recorder()), pytest.raises(ArgumentError, match=r"weight.detach\(\)"):
        quantize.prepare(QuantizeCall(weight().requires_grad_(), "int8_channel"))


class Counting(Recorder):
    """A recorder that knows how often a kernel was bound."""

    bound = 0

    def launch_of(self, binding):
        self.bound += 1
        return super().launch_of(binding)


@pytest.mark.parametrize("experts", [False, True], ids=["one weight", "experts"])
@pytest.mark.parametrize("name", ["int4_g128", "int8_channel", "mxfp4", "nvfp4", "gguf_q4_k"])
def test_products_and_their_gradients_are_bound_once_a_shape(name, experts):
    recorder, x = Counting(), weight()[:6].bfloat16().requires_grad_()
    given = {"ends": torch.tensor([2, 6])} if experts else {"residual": torch.zeros(6, 64, dtype=torch.bfloat16)}
    with using(recorder):
        w = quantize.quantize(QuantizeCall(weight(), name))
        recorder.launches.clear()
        run = qmatmul.prepare(QmatmulCall(x, w, **given))
        bound = []
        for _ in range(2):
            run(QmatmulCall(x, w, **given)).float().sum().backward()
            bound.append(recorder.bound)
    assert bound[0] == bound[1]
    half = len(recorder.launches) // 2
    assert recorder.launches[:half] == recorder.launches[half:]


@pytest.mark.parametrize("experts", [False, True], ids=["adapters", "experts"])
@pytest.mark.parametrize("act", ["none", "nvfp4"])
def test_products_with_adapters_and_quantized_tokens_are_bound_once_a_shape(act, experts):
    recorder, x = Counting(), weight()[:6].bfloat16().requires_grad_()
    lora = LoRA(torch.zeros(2, 4, 256, requires_grad=True), torch.zeros(2, 32 if experts else 64, 4))
    given = {"lora": lora, "ends" if experts else "lora_ends": torch.tensor([2, 6], dtype=torch.int32)}
    with planning_for("sm_90"), using(recorder):
        w = quantize.quantize(QuantizeCall(weight(), QuantSpec.named("nvfp4", act=act)))
        recorder.launches.clear()
        run = qmatmul.prepare(QmatmulCall(x, w, activation="silu", **given))
        bound = []
        for _ in range(2):
            run(QmatmulCall(x, w, activation="silu", **given)).float().sum().backward()
            bound.append(recorder.bound)
    assert bound[0] == bound[1]
    half = len(recorder.launches) // 2
    assert recorder.launches[:half] == recorder.launches[half:]


def test_the_gradient_of_experts_may_arrive_at_any_address():
    recorder, x = Recorder(), weight()[:6].bfloat16().requires_grad_()
    with using(recorder):
        w = quantize.quantize(QuantizeCall(weight(), "int8_channel"))
        call = QmatmulCall(x, w, ends=torch.tensor([2, 6]))
        run = qmatmul.prepare(call)
        torch.autograd.grad(run(call), x, torch.ones(6 * 32 + 1, dtype=torch.bfloat16)[1:].view(6, 32))
        aligned = len(recorder.launches)
        torch.autograd.grad(run(call), x, torch.ones(6, 32, dtype=torch.bfloat16))
    assert recorder.launches[aligned - 1] != recorder.launches[-1]
