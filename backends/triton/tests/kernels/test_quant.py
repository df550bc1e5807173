"""Quantized weights on Triton: the bits of the reference's codecs, and products within the contract's bound.

In Triton's interpreter bfloat16 is widened as it is loaded, so there it shows what is multiplied and not how; on a GPU
the same tests multiply in bfloat16.
"""

import dataclasses

import pytest
import torch

import rlkernel as rlk
from rlkernel_core import quant as reference
from rlkernel_core.quant import QuantSpec
from rlkernel_core.quant.activations import quantize_activation
from rlkernel_core.spec.qmatmul import UNITS, LoRA, QmatmulCall, accumulation_bound
from rlkernel_torch.direct import qmatmul as definition
from rlkernel_triton.launchers import plain_launcher_for
from rlkernel_triton.quant import quantize as quantizing
from rlkernel_triton.quant.dequantize import dequantized
from rlkernel_triton.quant.epilogue import NO_EPILOGUE
from rlkernel_triton.quant.formats import W4, is_four_bits
from rlkernel_triton.quant.product import W4Product
from rlkernel_triton.quant.qmatmul import prepare
from rlkernel_triton.quant.tile_config import W4Config

named = QuantSpec.named
SPECS = [
    *(named(f"int4_{group}{kind}") for group in ("g128", "g64", "g32", "channel") for kind in ("", "_asym")),
    named("int4_g64", scale_rule="absmax/7"),
    named("int4_g32", scale_dtype="float16"),
    named("nf4"),
    named("nf4", double_quant=True),
    named("int8_channel"),
    named("fp8_tensor"),
    named("fp8_channel", element="e5m2"),
    named("fp8_channel", element="e4m3fnuz"),
    named("fp8_block128", scale_rule="absmax/max_pow2"),
]
ids = {"ids": str}


def weight(N, K, device, dtype=torch.float32):
    """Normal numbers with an inf, a NaN, zeros, subnormal numbers and ties."""
    w = torch.randn(N, K, generator=torch.Generator().manual_seed(N + K))
    w[0, 0], w[1, 3], w[2] = torch.inf, torch.nan, 0
    w[2, 1] = 1e-40
    if N > 40:
        w[20] = torch.randint(-15, 16, (K,), generator=torch.Generator().manual_seed(1)) / 2
        w[20, ::32] = 7.5
        w[33] *= 1e-38
    return w.to(dtype).to(device)


def same(a, b):
    """Equal, NaN where the other is."""
    return a.dtype == b.dtype and bool(((a == b) | (a.isnan() & b.isnan())).all())


def same_parts(a, b):
    return all(same(a.parts[n].float(), b.parts[n].float()) for n in a.parts)


@pytest.mark.parametrize("spec", [s for s in SPECS if is_four_bits(s)], **ids)
def test_tiles_lose_nothing_and_are_quantized_again_in_place(device, spec) -> None:
    first, second = weight(64, 256, device), 3 * weight(64, 256, device).flip(0)
    w = rlk.quantize(first, spec)
    assert same_parts(w, reference.quantize(first, spec))
    tiles = rlk.prepack(w)
    assert tiles.layout == W4
    assert rlk.prepack(tiles, layout="canonical").same_bits(w)
    assert same(rlk.dequantize(tiles), rlk.dequantize(w))
    assert same(dequantized(tiles, torch.float32, (32, 64)), rlk.dequantize(w, dtype=torch.float32)[32:])
    kept = {name: part.data_ptr() for name, part in tiles.parts.items()}
    assert rlk.quantize(second, spec, out=tiles) is tiles
    assert {name: part.data_ptr() for name, part in tiles.parts.items()} == kept
    assert same_parts(rlk.prepack(tiles, layout="canonical"), reference.quantize(second, spec))


def test_rows_whose_blocks_begin_in_the_row_before_have_the_bits_of_the_whole(device) -> None:
    w = rlk.quantize(weight(300, 33, device), named("nf4", double_quant=True))
    for first, last in ((0, 16), (7, 300), (299, 300)):
        assert same(dequantized(w, torch.float32, (first, last)), rlk.dequantize(w, dtype=torch.float32)[first:last])


def test_a_weight_that_no_tile_fits_stays_canonical_and_is_refused_by_name(device) -> None:
    w = rlk.quantize(torch.randn(70, 256, device=device), "int4_g128")
    assert rlk.prepack(w) is w
    with pytest.raises(rlk.ArgumentError, match="multiples of 64"):
        rlk.prepack(w, layout=W4)
    with pytest.raises(rlk.LayoutError, match="reference_tiled"):
        rlk.dequantize(reference.pack(w))


def bound_of(x, w, want, rounding="any", more=0.0):
    """The contract's bound for a plain product."""
    exact = reference.dequantize(w, dtype=x.dtype if rounding == "dtype" else torch.float32).double()
    left = x.double() if w.spec.act == "none" else quantize_activation(x.float(), w.spec).value().double()
    unit = UNITS[str(x.dtype).removeprefix("torch.")]
    reach = left.abs() @ exact.abs().t() + more
    return accumulation_bound(want, reach, unit=unit, inner=x.shape[-1], weight_rounding=rounding)


def exactly(x, w, rounding="any"):
    """The plain product in float64."""
    exact = reference.dequantize(w, dtype=x.dtype if rounding == "dtype" else torch.float32).double()
    left = x.double() if w.spec.act == "none" else quantize_activation(x.float(), w.spec).value().double()
    return left @ exact.t()


PRODUCTS = [
    *(named(f) for f in ("int4_g128", "int4_g64_asym", "int4_channel_asym", "nf4")),
    named("int4_g32", scale_dtype="float16"),
    named("nf4", double_quant=True),
]


CASES = [(spec, rounding, torch.float16) for spec in PRODUCTS[:4] for rounding in ("none", "dtype")]
CASES += [(spec, "any", torch.bfloat16) for spec in PRODUCTS]


@pytest.mark.parametrize(("spec", "rounding", "dtype"), CASES, **ids)
def test_a_product_of_tiles_is_within_the_bound(device, spec, rounding, dtype) -> None:
    g = torch.Generator().manual_seed(3)
    w = reference.quantize(torch.randn(64, 256, generator=g).to(device), spec)
    x = torch.randn(5, 256, generator=g).to(device, dtype)
    y, want = rlk.qmatmul(x, rlk.prepack(w), weight_rounding=rounding), exactly(x, w, rounding)
    assert y.dtype == dtype
    assert bool(((y.double() - want).abs() <= bound_of(x, w, want, rounding)).all())


@pytest.mark.parametrize(
    "spec",
    [named("int8_w8a8"), named("fp8_channel", act="token_fp8", element="e5m2"), named("fp8_tensor", act="token_fp8")],
    **ids,
)
def test_tokens_are_coded_as_the_definition_says(device, spec) -> None:
    x = weight(7, 301, device, torch.bfloat16)
    want, found = quantize_activation(x.float(), spec), quantizing.quantize_activation(x, spec)
    assert same(found.codes.float(), want.codes.float())
    assert same(found.scale, want.scale)


@pytest.mark.parametrize("kind", ["token_int8", "token_fp8", "block128_fp8", "mxfp8"])
def test_inputs_are_quantized_by_the_kernels_of_weights(device, kind) -> None:
    x = weight(7, 301, device, torch.bfloat16)
    want = quantize_activation(x, kind)
    found = rlk.quantize_activation(x, kind)
    assert rlk.last_decision("quantize").backend.startswith("triton")
    assert same(found.codes.float(), want.codes.float())
    assert same(found.scale, want.scale)


BYTES = [*PRODUCTS, *(named(f) for f in ("int8_channel", "int8_w8a8", "fp8_tensor", "fp8_block128"))]
BYTES += [named("fp8_channel", element="e5m2", act="token_fp8"), named("fp8_block128", act="block128_fp8")]


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [*((spec, torch.float16) for spec in BYTES), *((spec, torch.float32) for spec in (BYTES[0], BYTES[3], BYTES[-1]))],
    **ids,
)
def test_a_product_of_any_shape_is_within_the_bound(device, spec, dtype) -> None:
    g = torch.Generator().manual_seed(4)
    w = reference.quantize(torch.randn(66, 301, generator=g).to(device), spec)
    x = torch.randn(3, 301, generator=g).to(device, dtype)
    want = exactly(x, w)
    assert bool(((rlk.qmatmul(x, w).double() - want).abs() <= bound_of(x, w, want)).all())


@pytest.mark.parametrize(
    "config", [W4Config(16, 64, 4, 2, 4), W4Config(16, 64, 2, 2, 4, True, 64), W4Config(8, 128, 1, 2, 4)], ids=str
)
def test_every_configuration_adds_up_the_same_product(device, config) -> None:
    """Parts of K, folded scales, half steps, and the order that `mma.sync` wants."""
    w = reference.quantize(torch.randn(128, 512, generator=torch.Generator().manual_seed(5)).to(device), "int4_g128")
    x = torch.randn(20, 512, generator=torch.Generator().manual_seed(6)).to(device, torch.float16)
    packed, launcher = rlk.prepack(w), plain_launcher_for(x.device)
    for permuted in (False, True):
        y = W4Product(launcher, x, packed, NO_EPILOGUE, config, permuted=permuted)(x, packed, NO_EPILOGUE, x.dtype)
        want = exactly(x, w)
        assert bool(((y.double() - want).abs() <= bound_of(x, w, want)).all())


def test_a_plan_multiplies_the_weight_of_each_call(device):
    g = torch.Generator().manual_seed(8)
    first, second = (
        rlk.prepack(reference.quantize(torch.randn(64, 256, generator=g).to(device), "int4_g128")) for _ in range(2)
    )
    x = torch.randn(3, 256, generator=g).to(device, torch.float16)
    run = prepare(QmatmulCall(x, first))
    run(QmatmulCall(x, first))
    spread = {name: torch.stack((part, part), -1)[..., 0] for name, part in second.parts.items()}
    apart = dataclasses.replace(second, parts=spread)  # parts that are not contiguous
    want = prepare(QmatmulCall(x, second))(QmatmulCall(x, second))
    found = run(QmatmulCall(x, second)), prepare(QmatmulCall(x, apart))(QmatmulCall(x, apart))
    assert [torch.equal(want, y) for y in found] == [True, True]


@pytest.mark.parametrize(
    ("M", "activation"), [(5, None), (5, "gelu"), (5, "swiglu"), (1030, "swiglu")]
)  # 1030: dequantized in pieces
def test_what_follows_the_product_and_its_gradients(device, M, activation) -> None:
    g = torch.Generator().manual_seed(7)

    def new(*size):
        return torch.randn(size, generator=g).to(device)

    w = reference.quantize(new(128, 256) / 16, "int4_g128", dtype=torch.float16)
    x, bias, a, b = new(M, 256), new(128), new(8, 256) / 16, new(128, 8)
    residual, dy = new(M, 64 if activation == "swiglu" else 128), new(M, 64 if activation == "swiglu" else 128)
    results = []
    for f, v, dtype in ((rlk.qmatmul, rlk.prepack(w), torch.float16), (definition, w, torch.float64)):
        leaves = [t.to(torch.float16).to(dtype).requires_grad_() for t in (x, bias, a, b, residual)]
        of = {"bias": leaves[1], "lora": LoRA(leaves[2], leaves[3], 0.5), "residual": leaves[4]}
        y = f(leaves[0], v, activation=activation, **of)
        grads = torch.autograd.grad(y, leaves, dy.to(torch.float16).to(dtype))
        results.append([y.detach(), *grads])
    for mine, theirs in zip(*results, strict=True):
        assert float((mine.double() - theirs).norm() / theirs.norm()) < 1.5e-3  # three roundings to float16


def test_strided_factors_of_a_lora_change_no_bit(device) -> None:
    g = torch.Generator().manual_seed(8)
    w = rlk.quantize(torch.randn(2, 6, generator=g).to(device), "int4_g128")
    x, a, b = (torch.randn(*size, generator=g).to(device) for size in ((1, 6), (4, 6), (2, 4)))
    want = rlk.qmatmul(x, w, lora=LoRA(a, b, 0.5))
    assert torch.equal(rlk.qmatmul(x, w, lora=LoRA(a.t().contiguous().t(), b.repeat(1, 2)[:, :4], 0.5)), want)
