"""qmatmul on a Hopper GPU: within the contract's bound, the same bits again and in any batch of a class, capture."""

import pytest
import torch

from rlkernel_core import quant as reference
from rlkernel_core.spec.qmatmul import UNITS, QmatmulCall, accumulation_bound
from rlkernel_core.spec.quantize import PrepackCall, QuantizeCall

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")
FORMATS = ("int4_g128", "int4_g64_asym", "int4_g32", "int4_channel_asym")
FORMATS8 = ("int8_channel", "fp8_channel", "fp8_tensor", "fp8_block128")


def packed(kind, dtype, N=640, K=1024):
    options = {"scale_dtype": "float16"} if dtype == torch.float16 and kind.startswith("int4") else {}
    g = torch.Generator("cuda").manual_seed(N)
    full = torch.randn(N, K, device="cuda", generator=g, dtype=dtype)
    return prepack(reference.quantize(full, reference.QuantSpec.named(kind, **options)))


def prepack(w, layout=None):
    from rlkernel_triton.quant.layouts import prepack

    return prepack(PrepackCall(w, layout=layout))


def write(full, w):
    """Quantize a weight into the storage of another."""
    from rlkernel_triton.quant.quantize import quantize

    quantize(QuantizeCall(full, w.spec, out=w))


def qmatmul(x, w, **more):
    from rlkernel_cuda.qmatmul import launch as module

    return module.qmatmul(QmatmulCall(x, w, **more))


def inputs(M, K, dtype):
    return torch.randn(M, K, device="cuda", generator=torch.Generator("cuda").manual_seed(M)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("kind", "M"),
    [
        *((f, M) for f in FORMATS for M in (100, 300)),
        *((f, M) for f in FORMATS for M in (1, 13) if f != "int4_g32"),
        *((f, 13) for f in FORMATS8),
    ],
)
def test_a_product_and_a_bias_are_within_the_bound(kind, M, dtype) -> None:
    from rlkernel_cuda.qmatmul.launch import fits

    w, x = packed(kind, dtype), inputs(M, 1024, dtype)
    bias = inputs(1, 640, dtype)[0]
    assert fits(QmatmulCall(x, w, bias=bias)) is None
    exact = reference.dequantize(
        w if w.layout == "canonical" else prepack(w, "canonical"), dtype=torch.float32
    ).double()
    want = x.double() @ exact.t() + bias.double()
    reach = x.double().abs() @ exact.abs().t() + bias.double().abs()
    bound = accumulation_bound(want, reach, unit=UNITS[str(dtype)[6:]], inner=1024)
    assert bool(((qmatmul(x, w, bias=bias).double() - want).abs() <= bound).all())


@pytest.mark.parametrize(
    ("M", "shape"),
    [(8, (1024, 2048)), (16, (1024, 2048)), (64, (12288, 4096)), (64, (28672, 4096)), (128, (1024, 2048))],
)
def test_rows_of_a_class_have_the_bits_that_they_have_alone_and_again(M, shape) -> None:
    from rlkernel_cuda.qmatmul import choice

    w, x = packed("int4_g128", torch.bfloat16, *shape), inputs(M, shape[1], torch.bfloat16)
    least = next(m for m in range(1, M + 1) if choice.cut(m, w) == choice.cut(M, w))
    whole = qmatmul(x, w)
    assert torch.equal(whole, qmatmul(x, w))
    assert torch.equal(whole[:least], qmatmul(x[:least], w))


def test_a_code_that_is_nan_reaches_its_row_alone() -> None:
    w = packed("fp8_channel", torch.bfloat16)
    w.parts["codes"].view(torch.uint8)[77, 500] = 0xFF
    found = qmatmul(inputs(3, 1024, torch.bfloat16), w).isnan()
    assert found.any(0).nonzero().flatten().tolist() == [77]
    assert bool(found[:, 77].all())


@pytest.mark.parametrize("M", [4, 200])
def test_replays_see_new_inputs_and_weights(M) -> None:
    w, x = packed("int4_g128", torch.bfloat16), inputs(M, 1024, torch.bfloat16)
    qmatmul(x, w)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = qmatmul(x, w)
    x.copy_(inputs(M, 1024, torch.bfloat16) * 2)
    write(torch.randn(640, 1024, device="cuda").bfloat16(), w)
    graph.replay()
    assert torch.equal(y, qmatmul(x, w))


@pytest.mark.parametrize("M", [4, 16, 100, 200])
def test_a_product_waits_for_the_kernels_before_it_in_a_graph(M) -> None:
    w, x = packed("int4_g128", torch.bfloat16, 4096, 4096), inputs(M, 4096, torch.bfloat16)
    xs = [inputs(M, 4096, torch.bfloat16) * i for i in range(1, 5)]
    weights = [torch.randn(4096, 4096, device="cuda").bfloat16() for _ in xs]

    def each():
        for x_i, full in zip(xs, weights, strict=True):
            write(full, w)
            torch.mul(x_i, 1, out=x)
            yield qmatmul(x, w)
            yield qmatmul(x.neg_(), w)

    want = list(each())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = list(each())
    for _ in range(3):
        graph.replay()
        assert [torch.equal(a, b) for a, b in zip(found, want, strict=True)] == [True] * 8
