"""What quantize and dequantize launch, and that a plan launches the same for every call of its shape."""

import pytest
import torch

from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec.quantize import DequantizeCall, QuantizeCall
from rlkernel_triton.launchers import Recorder, using
from rlkernel_triton.quant import codec, product

KERNELS = {
    "int8_channel": ["encode_rows"],
    "fp8_tensor": ["largest_bits", "encode_rows"],
    "int4_g128": ["encode_groups"],
    "nf4": ["encode_groups"],
    "mxfp4": ["encode_powers"],
    "nvfp4": ["largest_finite", "encode_scaled"],
    "gguf_q4_k": ["encode_supers"],
}
OF_BLOCKS = ("mxfp4", "nvfp4", "gguf_q4_k")


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    monkeypatch.setattr(product, "machine", lambda _: product.Machine("sm90", 132, ptx=True, sync=False))


def weight(seed=0):
    return torch.randn(64, 256, generator=torch.Generator().manual_seed(seed))


def launched(recorder):
    return [launch.build.kernel.partition(":")[2] for launch in recorder.launches]


@pytest.mark.parametrize("name", KERNELS)
def test_a_plan_quantises_with_the_same_launches_at_every_call(name):
    recorder = Recorder()
    with using(recorder):
        run = codec.prepare_quantize(QuantizeCall(weight(), name))
        made = [run(QuantizeCall(weight(seed), name)) for seed in (0, 1)]
    assert launched(recorder) == KERNELS[name] * 2
    half = len(KERNELS[name])
    assert recorder.launches[:half] == recorder.launches[half:]
    assert made[0].parts["codes"].data_ptr() != made[1].parts["codes"].data_ptr()


@pytest.mark.parametrize("name", KERNELS)
def test_a_plan_dequantises_in_one_launch(name):
    recorder = Recorder()
    with using(recorder):
        w = codec.quantize(QuantizeCall(weight(), name))
        recorder.launches.clear()
        run = codec.prepare_dequantize(DequantizeCall(w, dtype=torch.float16))
        out = [run(DequantizeCall(w)) for _ in range(2)]
    assert launched(recorder) == ["dequantise_blocks" if name in OF_BLOCKS else "dequantise"] * 2
    assert recorder.launches[0] == recorder.launches[1]
    assert [(x.shape, x.dtype) for x in out] == [((64, 256), torch.float16)] * 2


def test_a_plan_writes_into_the_weight_that_each_call_names():
    with using(Recorder()):
        first, second = (codec.quantize(QuantizeCall(weight(), "int8_channel")) for _ in range(2))
        run = codec.prepare_quantize(QuantizeCall(weight(), "int8_channel", out=first))
        assert run(QuantizeCall(weight(), "int8_channel", out=second)) is second


def test_a_weight_that_wants_a_gradient_is_refused_before_anything_is_bound():
    with using(Recorder()), pytest.raises(ArgumentError, match=r"weight.detach\(\)"):
        codec.prepare_quantize(QuantizeCall(weight().requires_grad_(), "int8_channel"))
