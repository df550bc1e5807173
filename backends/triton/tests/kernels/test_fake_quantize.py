"""fake_quantize on Triton: the bits of quantize and dequantize on Triton, and gradients of plain torch's bits."""

import pytest
import torch

import rlkernel as rlk
from rlkernel_core import quant as reference
from rlkernel_core.quant import QuantSpec
from rlkernel_triton.recorded import launched
from rlkernel_triton.workloads import Workload

named = QuantSpec.named
SPECS = [
    *(named(f"int4_{group}{kind}") for group, kind in (("g128", ""), ("g64", "_asym"), ("channel", "_asym"))),
    named("int4_g64", scale_rule="absmax/7"),
    named("int4_g32", scale_dtype="float16"),
    *(named(name) for name in ("hqq4_g32", "nf4", "fp4", "nvfp4", "int8_channel", "fp8_tensor", "mxfp4")),
    named("nf4", double_quant=True),
    *(named(f"gguf_q{kind}") for kind in ("4_0", "8_0", "4_k", "5_k", "6_k")),
    named("mxfp8", element="e5m2", scale_rule="rceil"),
    *(named(name, rounding="away") for name in ("mxfp4", "nvfp4")),
    named("fp8_channel", element="e4m3fnuz"),
    named("fp8_block128", scale_rule="absmax/max_pow2"),
]


def weight(N, K, device, dtype):
    """Groups of several scales, ties of integers, zeros, subnormal numbers, and what is not finite."""
    w = (
        torch.randn(N, K, generator=torch.Generator().manual_seed(N + K))
        * torch.exp2(torch.arange(N) % 9 - 4.0)[:, None]
    )
    w[0, 0], w[1, -1], w[2], w[3, ::7] = torch.inf, torch.nan, 0, -0.0
    w[4] = torch.randint(-15, 16, (K,), generator=torch.Generator().manual_seed(1)) / 2
    w[4, ::16], w[5], w[6, ::5] = 7.5, w[5] * 2.0**-130, 1e-40
    return w.to(dtype).to(device)


def same(found, expected):
    """The same bits, or NaN where the other is."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    nan = expected.isnan()
    kind = torch.int32 if found.element_size() == 4 else torch.int16
    assert torch.equal(found.isnan(), nan)
    assert torch.equal(found.masked_fill(nan, 0).view(kind), expected.masked_fill(nan, 0).view(kind))


def gradient(w, spec, up):
    leaf = w.clone().requires_grad_()
    (found,) = torch.autograd.grad(rlk.fake_quantize(leaf, spec, dtype=up.dtype, clipped=True), leaf, up)
    return found


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("sizes", [(16, 512), (9, 301)], ids=str)
def test_values_and_clipped_gradients_have_the_bits_of_plain_torch(device, spec, sizes) -> None:
    dtype = torch.bfloat16 if sizes[0] == 16 else torch.float32
    w, up = weight(*sizes, device, dtype), torch.randn(sizes, generator=torch.Generator().manual_seed(2)).to(device)
    y, d_w = rlk.fake_quantize(w, spec, dtype=torch.float32), gradient(w, spec, up)
    same(y, rlk.dequantize(rlk.quantize(w, spec), dtype=torch.float32))
    same(y, reference.dequantize(reference.quantize(w, spec), dtype=torch.float32))
    with rlk.use("torch"):
        same(d_w, gradient(w, spec, up))


TILES = [(7, 4096), (8, 2048), (8, 1024), (7, 1024)]
OF_BLOCKS = [(144, 256), (137, 130)]  # a last block of fewer rows, and of fewer columns


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        *((name, sizes) for name in ("int8_channel", "nf4", "mxfp4") for sizes in TILES),
        *(("fp8_block128", sizes) for sizes in OF_BLOCKS),
    ],
    ids=str,
)
def test_the_tile_of_a_weight_changes_no_bit(device, name, sizes) -> None:
    w = weight(*sizes, device, torch.float32)
    same(rlk.fake_quantize(w, name), reference.dequantize(reference.quantize(w, named(name)), dtype=torch.float32))


@pytest.mark.parametrize(
    "options", [{}, {"scale_rule": "absmax/max_pow2"}, {"element": "e4m3fnuz"}, {"element": "e5m2"}], ids=str
)
@pytest.mark.parametrize(
    "layout", ["whole", "of a wider weight", "rows of odd length", "every second column", "ragged"]
)
def test_a_block_of_bf16_has_the_same_bits_whether_it_is_read_as_words_or_not(device, layout, options) -> None:
    wide = torch.stack([*weight(128, 774, device, torch.float32).split(258, 1)]).flatten(0, 1).bfloat16()  # [384, 258]
    wide[128:256, :128] *= 2.0**-140  # subnormal: its scale is 0
    wide[200, 200], wide[300, 100] = torch.inf, -torch.nan
    wide[60, 200:202], wide[310, 200:202] = torch.tensor([0.7, 300]), torch.tensor([300, 0.7])  # the larger of a word
    w = {
        "whole": wide[:, :256].contiguous(),
        "of a wider weight": wide[:256, 2:],
        "rows of odd length": wide[:, :257].contiguous()[:, :256],
        "every second column": wide[:256, :256].repeat_interleave(2, dim=1)[:, ::2],
        "ragged": wide[:300, :200],
    }[layout]
    spec = named("fp8_block128", **options)
    for dtype in (torch.bfloat16, torch.float32):
        expected = reference.dequantize(reference.quantize(w, spec), dtype=dtype)
        same(rlk.fake_quantize(w, spec, dtype=dtype), expected)


@pytest.mark.parametrize(("first", "kernel"), [(0, "fake_words_kernel"), (1, "fake_rows_kernel")])
def test_a_weight_that_begins_within_a_word_is_not_read_as_words(first, kernel) -> None:
    w = torch.zeros(256, 258, dtype=torch.bfloat16, device="meta")[:, first : first + 256]
    builds = launched("fake_quantize", Workload({"weight": w, "format": "fp8_block128"}), "sm_90")
    assert [kernel] == [build.kernel.partition(":")[2] for build in builds]


@pytest.mark.parametrize("name", ["fp8_channel", "int8_channel", "fp8_block128", "mxfp8"])
def test_weights_too_small_for_a_scale_become_zeros_of_the_sign_of_plain_torch(device, name) -> None:
    w = torch.full((16, 256), 2.0**-149)
    w[:, ::2] *= -1
    found = rlk.fake_quantize(w.to(device), name)
    same(found, reference.dequantize(reference.quantize(w.to(device), named(name)), dtype=torch.float32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_strides_and_a_rounding_to_16_bits_change_nothing(device, dtype) -> None:
    w = weight(48, 256, device, torch.float32).t().contiguous().t()
    same(rlk.fake_quantize(w, "int4_g64", dtype=dtype), rlk.fake_quantize(w.contiguous(), "int4_g64").to(dtype))


def test_a_straight_through_gradient_is_the_upstream_one_and_no_launch(device) -> None:
    leaf = weight(16, 64, device, torch.bfloat16).requires_grad_()
    up = torch.randn(16, 64, generator=torch.Generator().manual_seed(2)).to(device)
    (found,) = torch.autograd.grad(rlk.fake_quantize(leaf, "nvfp4", dtype=torch.float32), leaf, up)
    assert torch.equal(found, up.bfloat16())


@pytest.mark.parametrize("name", ["fp4", "nf4"])
def test_tables_that_are_first_made_under_a_default_device_without_memory_are_right(device, name, monkeypatch) -> None:
    from rlkernel_triton.quant import fake_quantize, quantize

    spec, w = named(name, double_quant=True), weight(16, 256, device, torch.float32)
    up = torch.ones(16, 256, device=device)
    expected = rlk.fake_quantize(w, spec), gradient(w, named(name), up)
    monkeypatch.setattr(quantize, "_CONSTANTS", {})
    monkeypatch.setattr(fake_quantize, "_CELLS", {})
    with torch.device("meta"):
        same(rlk.fake_quantize(w, spec), expected[0])
        same(gradient(w, named(name), up), expected[1])
