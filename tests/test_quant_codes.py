"""Quantized codes beside their clauses: readers of other libraries, published tables, ranges of rows, spec names."""

from __future__ import annotations

import pytest
import torch

import rlkernel as rlk
from rlkernel_conformance.clauses import dequantize as clause
from rlkernel_conformance.compare import Violation
from rlkernel_conformance.mutants import mutants_of
from rlkernel_conformance.quantized_weights import SPECS, is_nan_or_equal
from rlkernel_core.definitions import quant as oracle
from rlkernel_core.errors import ArgumentError, ArgumentTypeError, UnknownNameError
from rlkernel_core.quant import FORMATS, QuantSpec, QuantTensor, convert, dequantize, quantize
from rlkernel_core.quant.convert import decode_rows
from rlkernel_core.quant.nf4 import TABLE, _nearest_by_cell, dynamic_map, nearest
from rlkernel_torch.direct import prepack

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# subnormal, smallest normal, small, one, odd, large, largest; 0 and values that are not finite
SCALES = [0.0, 1e-45, 1.1754944e-38, 6e-8, 1 / 3, 1.0, 0.0123, 771.5, 3e38, float("inf"), float("nan")]


def weight_of(name, shape, parts, dtype, **options):
    w = QuantTensor(QuantSpec.named(name, **options), shape, dtype, parts)
    w.validate()
    return w


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale_dtype", ["bfloat16", "float16", "float32"])
def test_int4_reads_every_byte_at_every_scale_as_compressed_tensors_does(dtype, scale_dtype) -> None:
    rows = len(SCALES)
    scale = torch.tensor(SCALES).to(getattr(torch, scale_dtype)).unsqueeze(1).expand(-1, 4).contiguous()
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).expand(rows, 256).contiguous()
    w = weight_of("int4_g128", (rows, 512), {"codes": codes, "scale": scale}, dtype, scale_dtype=scale_dtype)
    expected = oracle.compressed_tensors(codes.view(torch.int32), scale, (rows, 512), 128).to(dtype)
    assert is_nan_or_equal(dequantize(w), expected)


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
    assert is_nan_or_equal(dequantize(w), expected.to(dtype))
    # GPTQ's first checkpoint format stores z - 1; reading those as they are is off by one scale everywhere.
    off_by_one = oracle.awq(oracle.to_awq(q.t()), oracle.to_awq((z - 1).clamp(min=0).t()), scale.t(), g)
    assert not torch.equal(off_by_one.to(dtype), dequantize(w))


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_default_device_without_memory_changes_no_weight(name) -> None:
    nested = {"double_quant": True} if name in {"nf4", "fp4"} else {}
    spec, weight = QuantSpec.named(name, **nested), torch.randn(128, 256, generator=torch.Generator().manual_seed(0))
    expected = dequantize(quantize(weight, spec))
    with torch.device("meta"):
        found = dequantize(quantize(weight, spec))
    assert torch.equal(found, expected)


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


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_any_range_of_rows_decodes_to_the_bits_of_the_whole(name) -> None:
    w = quantize(torch.randn(300, 77), name)
    whole = dequantize(w)
    for start, stop in ((0, 300), (1, 2), (127, 129), (128, 256), (255, 300)):
        assert is_nan_or_equal(decode_rows(w, start, stop), whole[start:stop])


def test_the_suite_names_the_value_whose_sign_of_zero_was_lost() -> None:
    """It looked for a value that differs, of which there is none, and died of that."""
    [mutant] = [m for m in mutants_of("dequantize") if m.name == "loses_the_sign_of_zero"]
    case = clause.Codes("fp8_channel[element=e5m2]", 300, 64, 3, "exponents")
    with rlk.registered(mutant.manifest), (subject := mutant.subject).chosen():
        with pytest.raises(Violation, match=r"is 0\.0, expected -0\.0"):
            clause.check(subject, case)


@pytest.mark.parametrize("spec", SPECS.values(), ids=str)
def test_no_scale_is_a_negative_zero(spec) -> None:
    for zeros in ((0.0, 0.0), (-0.0, -0.0), (0.0, -0.0), (-0.0, 0.0)):
        w = quantize(torch.tensor(zeros).repeat(3, 64), spec)
        for name in ("scale", "absmax", "nested_absmax", "nested_offset"):
            negative = w.parts.get(name, torch.zeros(1)).float().signbit().any()
            assert not negative or w.format == "gguf_q4_0", name  # llama.cpp's is 0 / -8


@pytest.mark.parametrize("spec", SPECS.values(), ids=str)
def test_other_dtypes_are_quantized_as_their_fp32_value(spec) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        weight = torch.randn(40, 70, generator=torch.Generator().manual_seed(0)).to(dtype)
        w = quantize(weight, spec)
        assert w.dtype == (torch.float32 if dtype == torch.float64 else dtype)
        assert quantize(weight.float(), spec, dtype=w.dtype).same_bits(w)


def test_the_search_by_cells_is_the_search() -> None:
    table = torch.tensor(TABLE)
    middle = (table[:-1] + table[1:]) / 2
    edges = torch.arange(-16, 17) / 16
    x = torch.cat(
        [
            torch.linspace(-1, 1, 100_001),
            *(torch.nextafter(v, v + s) for v in (middle, edges[1:-1], table[1:-1]) for s in (-1, 0, 1)),
            torch.tensor([-1.0, 1.0, -0.0, 1e-45, -1e-45]),
        ]
    )
    assert torch.equal(nearest(x, table), _nearest_by_cell(x, table))


def test_shapes_are_known_without_values() -> None:
    of_codec = {row.codec: name for name, row in FORMATS.items()}
    for spec in (*of_codec.values(), QuantSpec.named("int4_g32", act_order=True)):
        w = quantize(torch.empty(200, 130, device="meta"), spec)
        assert isinstance(w, QuantTensor)
        assert dequantize(prepack(w)).shape == (200, 130)


@pytest.mark.parametrize(
    ("format", "options", "error", "message"),
    [
        ("nf5", {}, UnknownNameError, "did you mean 'nf4'"),
        ("mxfp6", {}, UnknownNameError, "unknown format 'mxfp6'"),
        (4, {}, ArgumentTypeError, "must be the name of a format"),
        ("nf4", {"doublequant": True}, UnknownNameError, "did you mean 'double_quant'"),
        ("nf4", {"double_quant": 2}, ArgumentError, "choose from|Choose from False, True"),
        ("int4_g128", {"scale_dtype": "float64"}, ArgumentError, "Choose from 'bfloat16'"),
        ("fp8_tensor", {"act": "block128_fp8"}, ArgumentError, "Choose from 'none', 'token_fp8'"),
    ],
)
def test_unknown_formats_and_options_get_suggestions(format, options, error, message) -> None:  # noqa: A002
    with pytest.raises(error, match=message):
        rlk.quantize(torch.randn(2, 2), QuantSpec.named(format, **options) if options else format)


def test_autocast_changes_no_code_of_a_short_group() -> None:
    weight = torch.randn(4, 33, generator=torch.Generator().manual_seed(0)).half()
    expected = quantize(weight, "int4_g32")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert expected.same_bits(quantize(weight, "int4_g32"))


def test_tables_lie_beside_the_weight_whatever_the_default_device(monkeypatch) -> None:
    monkeypatch.setattr(convert, "_CONSTANTS", {})
    with torch.device("meta"):
        w = quantize(torch.ones(2, 64, device="cpu"), QuantSpec.named("nf4", double_quant=True))
    assert torch.equal(torch.tensor(TABLE), w.parts["table"])
    assert torch.equal(torch.ones(2, 64), dequantize(w))
