"""Dequantising gives the bits that the formats define: all codes, many scales, every packing."""

from __future__ import annotations

import pytest
import torch

import rlkernel as rlk
from rlkernel_conformance.clauses import dequantize as clause
from rlkernel_conformance.compare import Violation
from rlkernel_conformance.mutants import mutants_of
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions import quant as oracle
from rlkernel_core.quant import FORMATS, QuantSpec, QuantTensor, dequantize, quantize
from rlkernel_core.quant.codec import decode_rows
from rlkernel_core.quant.nf4 import TABLE, dynamic_map

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# subnormal, smallest normal, small, one, odd, large, largest; 0 and values that are not finite
SCALES = [0.0, 1e-45, 1.1754944e-38, 6e-8, 1 / 3, 1.0, 0.0123, 771.5, 3e38, float("inf"), float("nan")]


def bits(x):
    return x.contiguous().view(torch.uint8)


def assert_same_bits(expected, actual) -> None:
    """Equal bit for bit; any NaN equals any other, since its payload is no part of a value."""
    assert (expected.shape, expected.dtype) == (actual.shape, actual.dtype)
    nan = torch.isnan(expected)
    assert torch.equal(nan, torch.isnan(actual))
    assert torch.equal(bits(expected.masked_fill(nan, 0)), bits(actual.masked_fill(nan, 0)))


def weight_of(name, shape, parts, dtype=torch.float32, **options):
    w = QuantTensor(QuantSpec.named(name, **options), shape, dtype, parts)
    w.validate()
    return w


def all_bytes(rows):
    return torch.arange(256, dtype=torch.int32).to(torch.uint8).expand(rows, 256).contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale_dtype", ["bfloat16", "float16", "float32"])
def test_int4_reads_every_byte_at_every_scale_as_compressed_tensors_does(dtype, scale_dtype) -> None:
    scale = torch.tensor(SCALES).to(getattr(torch, scale_dtype)).unsqueeze(1).expand(-1, 4).contiguous()
    codes = all_bytes(len(SCALES))
    w = weight_of("int4_g128", (len(SCALES), 512), {"codes": codes, "scale": scale}, dtype, scale_dtype=scale_dtype)
    expected = oracle.compressed_tensors(codes.view(torch.int32), scale, (len(SCALES), 512), 128).to(dtype)
    assert_same_bits(expected, dequantize(w))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("g", [32, 64, 128])
def test_asymmetric_int4_reads_as_awq_with_zeros_as_they_are(dtype, g) -> None:
    n, k = 16, 256
    generator = torch.Generator().manual_seed(g)
    q = torch.randint(0, 16, (n, k), generator=generator)
    z = torch.randint(0, 16, (n, k // g), generator=generator)
    scale = (torch.rand(n, k // g, generator=generator) * 1e-2).half()
    codes = (q[:, 0::2] | q[:, 1::2] << 4).to(torch.uint8)
    parts = {"codes": codes, "scale": scale, "zero": z.to(torch.uint8)}
    w = weight_of(f"int4_g{g}_asym", (n, k), parts, dtype, scale_dtype="float16")
    expected = oracle.awq(oracle.to_awq(q.t()), oracle.to_awq(z.t()), scale.t(), g).contiguous()
    assert_same_bits(expected.to(dtype), dequantize(w))
    # GPTQ's first checkpoint format stores z - 1; reading those as they are is off by one scale everywhere.
    off_by_one = oracle.awq(oracle.to_awq(q.t()), oracle.to_awq((z - 1).clamp(min=0).t()), scale.t(), g)
    assert not torch.equal(off_by_one.to(dtype), dequantize(w))


def test_a_zero_point_of_16_is_not_masked() -> None:
    parts = {
        "codes": all_bytes(1),
        "scale": torch.ones(1, 16, dtype=torch.bfloat16),
        "zero": torch.full((1, 16), 16, dtype=torch.uint8),
    }
    w = weight_of("int4_g32_asym", (1, 512), parts)
    assert dequantize(w)[0, :4].tolist() == [-16.0, -16.0, -15.0, -16.0]


def test_the_low_nibble_is_the_even_column_and_an_odd_row_leaves_a_zero_nibble() -> None:
    w = quantize(torch.tensor([[7.0, -7.5, 3.0]]), "int4_channel")
    assert w.parts["codes"].tolist() == [[15 | 0 << 4, 11]]
    assert dequantize(w).tolist() == [[7.0, -8.0, 3.0]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_nf4_reads_every_byte_at_every_scale_as_bitsandbytes_does(dtype) -> None:
    scales = torch.tensor(SCALES).repeat_interleave(8)  # 256 bytes are 512 codes are 8 blocks
    codes = all_bytes(len(SCALES)).flatten()
    shape = (len(SCALES), 512)
    w = weight_of("nf4", shape, {"codes": codes, "absmax": scales, "table": torch.tensor(TABLE)}, dtype)
    assert_same_bits(oracle.bitsandbytes(codes, scales, shape).to(dtype), dequantize(w))


@pytest.mark.parametrize("dtype", DTYPES)
def test_double_quantised_scales_multiply_and_then_add(dtype) -> None:
    shape, blocks = (520, 129), 1049  # a last block of 8 elements, five nested blocks
    generator = torch.Generator().manual_seed(0)
    parts = {
        "codes": torch.randint(0, 256, (shape[0] * shape[1] // 2,), dtype=torch.uint8, generator=generator),
        "absmax": torch.arange(blocks).remainder(256).to(torch.uint8),
        "nested_absmax": torch.rand(5, generator=generator),
        "nested_offset": torch.rand(1, generator=generator),
        "nested_table": dynamic_map(),
        "table": torch.tensor(TABLE),
    }
    w = weight_of("nf4", shape, parts, dtype, double_quant=True)
    nested = (parts["nested_table"], parts["nested_absmax"], parts["nested_offset"])
    expected = oracle.bitsandbytes(parts["codes"], parts["absmax"], shape, nested)
    assert_same_bits(expected.to(dtype), dequantize(w))
    assert_same_bits(expected[200:333], decode_rows(w, 200, 333))


def test_the_nf4_table_is_the_published_one() -> None:
    assert torch.equal(oracle.NF4, torch.tensor(TABLE))


def test_the_dynamic_map_has_its_published_structure() -> None:
    found = dynamic_map()
    assert found.shape == (256,)
    assert torch.equal(found, found.sort().values)
    assert {0.0, 1.0} <= set(found.tolist())
    positive = found[(found > 0) & (found < 1)]
    assert torch.equal(positive, -found[found < 0].flip(0))
    per_decade = [int(((positive > 10.0 ** (i - 7)) & (positive < 10.0 ** (i - 6))).sum()) for i in range(7)]
    assert per_decade == [1, 2, 4, 8, 16, 32, 64]
    # Values that an fp32 linspace of the edges rounds differently from the plain formula (bitsandbytes 0.50).
    assert found[-2].item() == 0.992968738079071
    assert found[-3].item() == 0.9789062738418579


@pytest.mark.parametrize(
    ("element", "exponent_bits", "bias", "fnuz"),
    [("e4m3fn", 4, 7, False), ("e5m2", 5, 15, False), ("e4m3fnuz", 4, 8, True), ("e5m2fnuz", 5, 16, True)],
)
def test_fp8_reads_every_byte_at_every_scale(element, exponent_bits, bias, fnuz) -> None:
    w = quantize(torch.randn(len(SCALES), 256), QuantSpec.named("fp8_channel", element=element))
    w.parts["codes"].view(torch.uint8).copy_(all_bytes(len(SCALES)))
    w.parts["scale"].copy_(torch.tensor(SCALES).unsqueeze(1))
    values = torch.tensor([oracle.float8(b, exponent_bits, bias, fnuz=fnuz) for b in range(256)])
    expected = values.expand(len(SCALES), 256) * torch.tensor(SCALES).unsqueeze(1)
    assert_same_bits(expected, dequantize(w))


@pytest.mark.parametrize(("fn", "fnuz"), [("e4m3fn", "e4m3fnuz"), ("e5m2", "e5m2fnuz")])
def test_the_bytes_of_fnuz_read_as_fn_are_twice_as_large(fn, fnuz) -> None:
    # The largest one stands first: its byte, and a few below it, are no numbers in fn.
    weight = torch.cat((torch.tensor([4.0]), torch.linspace(-1, 1, 255))).view(4, 64)
    w = quantize(weight, QuantSpec.named("fp8_tensor", element=fnuz))
    codes = w.parts["codes"].view(torch.uint8).view(getattr(torch, f"float8_{fn}"))
    misread = weight_of("fp8_tensor", (4, 64), {**w.parts, "codes": codes}, element=fn)
    assert torch.equal(2 * dequantize(w).flatten()[1:], dequantize(misread).flatten()[1:])


@pytest.mark.parametrize("shape", [(128, 128), (300, 200), (1, 1), (129, 257)])
def test_fp8_blocks_scale_128_by_128(shape) -> None:
    w = quantize(torch.randn(shape), "fp8_block128")
    expected = oracle.scaled_blocks(w.parts["codes"].float(), w.parts["scale"], 128, 128)
    assert_same_bits(expected, dequantize(w))


@pytest.mark.parametrize("name", ["int8_channel", "int8_w8a8"])
def test_int8_reads_every_code(name) -> None:
    codes = torch.arange(-128, 128).to(torch.int8).expand(len(SCALES), 256).contiguous()
    scale = torch.tensor(SCALES).unsqueeze(1)
    w = weight_of(name, (len(SCALES), 256), {"codes": codes, "scale": scale})
    assert_same_bits(codes.float() * scale, dequantize(w))


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_any_range_of_rows_decodes_to_the_bits_of_the_whole(name) -> None:
    w = quantize(torch.randn(300, 77), name)
    whole = dequantize(w)
    for start, stop in ((0, 300), (1, 2), (127, 129), (128, 256), (255, 300)):
        assert_same_bits(whole[start:stop], decode_rows(w, start, stop))


def test_fp16_overflows_to_inf() -> None:
    w = quantize(torch.full((1, 4), 1e6), "int8_channel")
    assert torch.equal(dequantize(w, dtype=torch.float16), torch.full((1, 4), torch.inf, dtype=torch.float16))


def test_the_suite_names_the_value_whose_sign_of_zero_was_lost() -> None:
    """It looked for a value that differs, of which there is none, and died of that."""
    [mutant] = [m for m in mutants_of("dequantize") if m.name == "loses_the_sign_of_zero"]
    case = clause.Codes("fp8_channel[element=e5m2]", 300, 64, 3, "exponents")
    with rlk.registered(mutant.manifest), (subject := Subject(mutant.manifest.name, "dequantize")).chosen():
        with pytest.raises(Violation, match=r"is 0\.0, expected -0\.0"):
            clause.check(subject, case)
