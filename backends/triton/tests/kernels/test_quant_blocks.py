"""Formats of blocks and products of experts on Triton: bits, layouts, the contract's bound, gradients."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

import rlkernel as rlk
from rlkernel_core import quant as reference
from rlkernel_core.quant import QuantSpec
from rlkernel_core.quant.activations import quantize_activation as reference_activation
from rlkernel_core.spec.qmatmul import UNITS, accumulation_bound
from rlkernel_triton.launchers import plain_launcher_for
from rlkernel_triton.quant import dequantize, layouts, product, quantize
from rlkernel_triton.quant.epilogue import NO_EPILOGUE
from rlkernel_triton.quant.formats import BLOCK_FORMATS, E2M1, W4, is_of_blocks
from rlkernel_triton.quant.tile_config import TileConfig

named = QuantSpec.named
BLOCKS = [*(named(f) for f in BLOCK_FORMATS), named("mxfp8", element="e5m2")]
OTHERS = [*(named(f) for f in ("q4l", "gguf_q4_0", "gguf_q8_0", "hqq4_g32", "fp4")), named("fp4", double_quant=True)]
ids = {"ids": str}


def stored(spec, N, K, device):
    """A weight whose codes and 8-bit scales are random bytes: every code, NaN and subnormal scales among them."""
    g = torch.Generator().manual_seed(N + K)
    w = reference.quantize(torch.randn(N, K, generator=g), spec)
    for name, part in w.parts.items():
        if name != "absmax" and part.dtype.itemsize == 1:
            raw = part.view(torch.uint8)
            raw.copy_(torch.randint(256, raw.shape, generator=g).to(torch.uint8))
    return w.to(device)


def same(a, b):
    """Equal bit for bit, NaN where the other is."""
    nan = b.isnan()
    bits = (x.masked_fill(nan, 0).view(torch.uint8) for x in (a, b))
    return torch.equal(a.isnan(), nan) and torch.equal(*bits)


@pytest.mark.parametrize("element", ["e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz"])
def test_every_byte_of_an_8_bit_float_keeps_its_sign(device, element) -> None:
    """Triton 3.6 negates by 0 - x, which made +0 of -0."""
    w = reference.quantize(torch.randn(2, 128), named("fp8_channel", element=element))
    w.parts["codes"].view(torch.uint8).copy_(torch.arange(256).view(2, 128))
    w = w.to(device)
    assert same(rlk.dequantize(w, dtype=torch.float32), reference.dequantize(w, dtype=torch.float32))


def edges(N, K):
    """Normal numbers; inf and NaN of both signs, zeros of both, subnormal and huge rows, ties of every format."""
    g = torch.Generator().manual_seed(N + K)
    w = torch.randn(N, K, generator=g)
    w[0, 0], w[1, 3], w[1, 70], w[2] = torch.inf, -torch.nan, -torch.inf, 0
    w[2, 1], w[2, 2], w[2, 5] = 1e-40, -0.0, -1e-42
    w[3], w[4] = w[3] * 1e-38, w[4] * 1e37
    w[5] = torch.randint(-12, 13, (K,), generator=g) / 2
    w[6] = torch.randint(-12, 13, (K,), generator=g) / 4
    w[5, ::16], w[6, ::32] = 6, -6
    return w


@pytest.mark.parametrize("spec", [named(f) for f in ("fp4", "nvfp4", "gguf_q4_k", "gguf_q6_k", "fp8_channel")], **ids)
def test_what_is_compiled_divides_exactly(device, spec, monkeypatch) -> None:
    """The interpreter, whose fma rounds twice, divides weight by weight; with another fma it takes the GPU's way."""
    if device != "cpu":
        pytest.skip("on a GPU every test takes it")

    def fma(_, x, y, z):
        a, b, c = (t.data.astype(np.longdouble) for t in (x, y, z))
        return interpreter.TensorHandle((a * b + c).astype(np.float32), z.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", fma)
    for module in (quantize, dequantize):
        monkeypatch.setattr(module, "INTERPRETED", False)
    w = edges(7, 301)
    want, found = reference.quantize(w, spec), rlk.quantize(w, spec)
    assert all(same(found.parts[n].float(), want.parts[n].float()) for n in want.parts)


@pytest.mark.parametrize(
    ("kind", "K"), [("mxfp4", 320), ("nvfp4", 320), ("q4l", 256), ("gguf_q4_0", 256), ("fp4", 256)]
)
def test_tiles_lose_nothing_and_are_quantized_again_in_place(device, kind, K) -> None:
    w = stored(named(kind), 64, K, device)
    tiles = rlk.prepack(w)
    assert tiles.layout == (E2M1 if is_of_blocks(w.spec) else W4)
    assert rlk.prepack(tiles, layout="canonical").same_bits(w)
    assert same(rlk.dequantize(tiles), rlk.dequantize(w))
    kept = {name: part.data_ptr() for name, part in tiles.parts.items()}
    second = torch.randn(64, K, generator=torch.Generator().manual_seed(1)).to(device)
    assert rlk.quantize(second, kind, out=tiles) is tiles
    assert {name: part.data_ptr() for name, part in tiles.parts.items()} == kept
    assert same(rlk.dequantize(tiles), reference.dequantize(reference.quantize(second, kind)))


def test_tiles_write_no_byte_behind_them(device) -> None:
    w = stored(named("mxfp4"), 64, 320, device)
    arena = torch.full((64 // 16 * 5 * 128 + 4096,), 7, dtype=torch.int32, device=device)
    tiles = layouts.packed(w, E2M1)
    layouts.move_codes(w, arena[:2560].view(4, 5, 128), to_tiles=True)
    assert torch.equal(arena[:2560].view(4, 5, 128), tiles.parts["codes"])
    assert bool((arena[2560:] == 7).all())


def test_a_weight_that_no_tile_fits_is_refused_by_name(device) -> None:
    w = rlk.quantize(torch.randn(70, 128, device=device), "mxfp4")
    assert rlk.prepack(w) is w
    for weight, layout in ((w, E2M1), (rlk.quantize(torch.randn(64, 128, device=device), "nvfp4"), W4)):
        with pytest.raises(rlk.ArgumentError, match="multiples of 64"):
            rlk.prepack(weight, layout=layout)


def test_tiles_of_an_earlier_build_are_refused_and_it_is_said_to_pack_again(device) -> None:
    w = replace(rlk.prepack(rlk.quantize(torch.randn(64, 128, device=device), "mxfp4")), layout="triton_f4")
    for call in (rlk.dequantize, rlk.prepack, partial(rlk.qmatmul, torch.ones(1, 128, device=device))):
        with pytest.raises(rlk.LayoutError, match=r"'triton_f4'.* pack that with prepack"):
            call(w)


def over(y, x, value, rounding, dtype=None):
    """The largest error over the contract's bound; `dtype` of a call whose x was quantized."""
    dtype = dtype or x.dtype
    exact = (value.to(dtype) if rounding == "dtype" else value).double()
    want, reach = x.double() @ exact.t(), x.double().abs() @ exact.abs().t()
    unit = UNITS[str(dtype).removeprefix("torch.")]
    return (
        (y.double() - want).abs()
        / accumulation_bound(want, reach, unit=unit, inner=x.shape[1], weight_rounding=rounding)
    ).max()


CASES = [(s, "any", torch.bfloat16) for s in [*BLOCKS[:6], *OTHERS[:5]]]
CASES += [
    (named(f), r, d) for f in ("mxfp4", "nvfp4") for r in ("none", "dtype") for d in (torch.float16, torch.float32)
]
CASES += [(named("hqq4_g32"), "none", torch.float16), (named("nvfp4"), "dtype", torch.bfloat16)]


@pytest.mark.parametrize(("spec", "rounding", "dtype"), CASES, **ids)
def test_products_are_within_the_bound(device, spec, rounding, dtype) -> None:
    g = torch.Generator().manual_seed(3)
    for rows, columns in ((64, 128), (34, 140)):
        w = reference.quantize(torch.randn(rows, columns, generator=g).to(device), spec)
        value, x = reference.dequantize(w, dtype=torch.float32), torch.randn(3, columns, generator=g).to(device, dtype)
        for weight in {id(v): v for v in (w, rlk.prepack(w))}.values():
            assert over(rlk.qmatmul(x, weight, weight_rounding=rounding), x, value, rounding) <= 1


TOKENS = [
    *(named("mxfp4", act="mxfp8", scale_rule=rule) for rule in ("floor", "rceil", "even")),
    *(named("mxfp8", act="mxfp8", element=element) for element in ("e4m3fn", "e5m2")),
    *(named("nvfp4", act="nvfp4", rounding=rounding) for rounding in ("even", "away")),
]


@pytest.mark.parametrize("spec", TOKENS, **ids)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], **ids)
def test_tokens_have_the_values_of_the_definition(device, spec, dtype) -> None:
    """Whole ones of MXFP8; those of NVFP4 less the scale of each token, which comes beside them."""
    x = edges(7, 301).to(dtype)
    want = reference_activation(x, spec)
    values, scale = quantize.quantize_in_blocks(x.to(device), spec, dtype)
    if spec.act == "nvfp4":
        assert same(scale.cpu(), want.global_scale[:, 0])
        want = replace(want, global_scale=torch.ones_like(want.global_scale))
    assert same(values.float().cpu(), want.value().to(dtype).float())


W4A4, MX_ON_BOTH = TOKENS[5], (TOKENS[0], TOKENS[3])
ON_BOTH = [(s, "any", torch.bfloat16) for s in (*MX_ON_BOTH, W4A4)]
ON_BOTH += [(W4A4, "dtype", torch.float16), (TOKENS[0], "dtype", torch.float16), (TOKENS[3], "none", torch.float16)]
ON_BOTH += [(W4A4, "none", torch.float32)]


@pytest.mark.parametrize(("spec", "rounding", "dtype"), ON_BOTH, **ids)
@pytest.mark.parametrize("experts", [False, True], ids=["one weight", "experts"])
def test_products_of_quantized_tokens_are_within_the_bound(device, spec, rounding, dtype, experts) -> None:
    """Canonical and in tiles; rows of one expert are those of one weight."""
    g = torch.Generator().manual_seed(3)
    w = reference.quantize(torch.randn(64, 128, generator=g).to(device), spec)
    x = torch.randn(5, 128, generator=g).to(device, dtype)
    tokens, value = reference_activation(x, spec).value(), reference.dequantize(w, dtype=torch.float32)
    ends = {"ends": torch.tensor([0, 5], dtype=torch.int32, device=device)} if experts else {}
    value = value[32:] if experts else value
    for weight in (w, rlk.prepack(w)):
        y = rlk.qmatmul(x, weight, weight_rounding=rounding, **ends)
        assert over(y, tokens, value, rounding, x.dtype) <= 1


@pytest.mark.parametrize("config", [TileConfig(16, 64, 2, 4), TileConfig(32, 32, 2, 4)], ids=str)
@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4", "int4_g128_asym"])
def test_parts_of_k_add_up(device, kind, config) -> None:
    w = reference.quantize(torch.randn(64, 512, generator=torch.Generator().manual_seed(5)).to(device), kind)
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(6)).to(device, torch.bfloat16)
    y = torch.full((5, 64), torch.nan, dtype=torch.bfloat16, device=device)
    packed = rlk.prepack(w)
    launcher = plain_launcher_for(x.device)
    product.TiledProduct(launcher, x, packed, NO_EPILOGUE, "any", None, y, config, 2)(x, packed, NO_EPILOGUE, None, y)
    assert over(y, x, reference.dequantize(w, dtype=torch.float32), "any") <= 1


def test_experts_of_integers_round_no_weight(device) -> None:
    g = torch.Generator().manual_seed(3)
    w = reference.quantize(torch.randn(64, 300, generator=g).to(device), "int8_w8a8")
    x, ends = torch.randn(5, 300, generator=g).to(device, torch.float16), torch.tensor([0, 5], dtype=torch.int32)
    y = rlk.qmatmul(x, w, ends=ends.to(device), weight_rounding="dtype")
    tokens, value = reference_activation(x, w.spec).value(), reference.dequantize(w, dtype=torch.float32)[32:]
    assert over(y, tokens, value, "none", x.dtype) <= 1


@pytest.mark.parametrize("experts", [1, 2])
def test_the_gradient_of_an_expert_is_that_of_its_weight(device, experts) -> None:
    """One expert's weight turned around was a view, which the kernel read as if it were contiguous."""
    g = torch.Generator().manual_seed(3)
    w = reference.quantize(torch.randn(10 * experts, 64, generator=g), named("int4_g32"))
    x, dy = torch.randn(6, 64, generator=g), torch.randn(6, 10, generator=g)
    ends = torch.arange(1, experts + 1, dtype=torch.int32) * (6 // experts)
    leaf = x.to(device).requires_grad_()
    rlk.qmatmul(leaf, w.to(device), ends=ends.to(device)).backward(dy.to(device))
    dense = reference.dequantize(w, dtype=torch.float64).view(experts, 10, 64)
    want = torch.cat([rows.double() @ of for rows, of in zip(dy.chunk(experts), dense, strict=True)])
    torch.testing.assert_close(leaf.grad.cpu().double(), want, rtol=1e-5, atol=1e-5)
