"""Checkpoints of other libraries: random tensors of each scheme read bit for bit, written back, refused when bad."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlkernel import checkpoints
from rlkernel.checkpoints import gguf_blocks
from rlkernel.checkpoints.schemes import SCHEMES
from rlkernel_core.errors import ArgumentError, FileError, UnknownNameError
from rlkernel_core.quant import QuantSpec, dequantize, quantize
from tests.oracles import checkpoints as oracle

N, K, G = 64, 256, 64
RNG = torch.Generator().manual_seed(0)


def words(*shape):
    return torch.randint(-(2**31), 2**31, shape, generator=RNG).to(torch.int32)


def raw(*shape):
    return torch.randint(256, shape, generator=RNG).to(torch.uint8)


def scales(*shape, dtype=torch.float16):
    return (torch.rand(shape, generator=RNG) + 0.5).to(dtype)


ORDER = torch.randperm(K, generator=RNG) % (K // G)
CODES = torch.randint(126, (N, K), generator=RNG).to(torch.uint8).view(torch.float8_e4m3fn)
GPTQ = {".qweight": words(K // 8, N), ".qzeros": words(K // G, N // 8), ".scales": scales(K // G, N)}
GPTQ[".g_idx"] = ORDER.to(torch.int32)
AWQ = {".qweight": words(K, N // 8), ".qzeros": words(K // G, N // 8), ".scales": scales(K // G, N)}
PACKED = {".weight_packed": words(N, K // 8), ".weight_scale": scales(N, K // G, dtype=torch.bfloat16)}
PACKED[".weight_shape"] = torch.tensor([N, K])
HQQ = {".W_q": raw(N * K // G // 2, G), ".scale": scales(N * K // G, 1), ".zero": scales(N * K // G, 1) * 7}
HQQ[".shape"] = torch.tensor([N, K])
MX = {"_blocks": raw(3, N, K // 32, 16), "_scales": raw(3, N, K // 32) % 100 + 77}
NVFP4 = {".weight": raw(N, K // 2), ".weight_scale": CODES[:, : K // 16].contiguous()}
NVFP4[".weight_scale_2"] = torch.tensor(0.0123)
BLOCKS = {".weight": CODES, ".weight_scale_inv": scales(1, 2, dtype=torch.float32)}

# scheme, tensors, what they stand for, config
READ = {
    "gptq": (
        *("gptq", GPTQ, {}),
        oracle.gptq(GPTQ[".qweight"], GPTQ[".qzeros"], GPTQ[".scales"], ORDER, v1=True),
    ),
    "gptq_v2": (
        *("gptq", GPTQ, {"checkpoint_format": "gptq_v2"}),
        oracle.gptq(GPTQ[".qweight"], GPTQ[".qzeros"], GPTQ[".scales"], ORDER, v1=False),
    ),
    "awq": ("awq", AWQ, {}, oracle.awq(AWQ[".qweight"], AWQ[".qzeros"], AWQ[".scales"], G)),
    "compressed-tensors": (
        *("compressed-tensors", PACKED, {}),
        oracle.compressed_tensors(PACKED[".weight_packed"], PACKED[".weight_scale"], (N, K), G),
    ),
    "compressed-tensors asymmetric": (
        *("compressed-tensors", {**PACKED, ".weight_zero_point": (zero := words(N // 8, K // G))}, {}),
        oracle.compressed_tensors(PACKED[".weight_packed"], PACKED[".weight_scale"], (N, K), G, zero),
    ),
    "hqq": ("hqq", HQQ, {}, oracle.hqq(HQQ[".W_q"], HQQ[".scale"], HQQ[".zero"], (N, K))),
    "gpt-oss": ("gpt-oss", MX, {}, oracle.mxfp4(MX["_blocks"], MX["_scales"]).flatten(0, 1)),
    "modelopt": ("modelopt", NVFP4, {}, oracle.nvfp4(NVFP4[".weight"], NVFP4[".weight_scale"], torch.tensor(0.0123))),
    "deepseek": ("deepseek", BLOCKS, {}, oracle.fp8_blocks(CODES, BLOCKS[".weight_scale_inv"])),
}


def bits(x):
    return x.reshape(-1).contiguous().view(torch.uint8)


@pytest.mark.parametrize("case", READ)
def test_a_weight_is_read_bit_for_bit(case) -> None:
    scheme, tensors, config, expected = READ[case]
    found = SCHEMES[scheme].read("x", tensors, config)
    assert torch.equal(bits(expected), bits(torch.cat([dequantize(w, dtype=torch.float32) for w in found])))


@pytest.mark.parametrize("case", READ)
def test_a_weight_is_found_in_a_file_by_its_tensors(case, tmp_path) -> None:
    scheme, tensors, _, _ = READ[case]
    save_file(
        {f"a.b{k}": v.contiguous() for k, v in tensors.items()} | {"norm": torch.ones(3)}, tmp_path / "x.safetensors"
    )
    with checkpoints.opened(tmp_path / "x.safetensors") as source:
        found = {(item.name, item.scheme) for item in checkpoints.items(source)}
    assert found == {("a.b", scheme), ("norm", "dense")}


WRITTEN = {case: (case if case == "gptq_v2" else row[0], *row[1:3]) for case, row in READ.items() if case != "gpt-oss"}


@pytest.mark.parametrize("case", WRITTEN)
def test_what_is_written_back_has_every_byte(case) -> None:
    scheme, tensors, config = WRITTEN[case]
    (w,) = SCHEMES[READ[case][0]].read("x", tensors, config)
    again = SCHEMES[scheme].write("x", w)
    assert {k: bits(v).tolist() for k, v in tensors.items()} == {k: bits(again[k]).tolist() for k in tensors}


@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4", "nf4_g128"])
def test_bitsandbytes_state_comes_back(kind, double_quant) -> None:
    w = quantize(torch.randn(N, K, generator=RNG), QuantSpec.named(kind, double_quant=double_quant))
    (found,) = SCHEMES["bitsandbytes"].read("x", SCHEMES["bitsandbytes"].write("x", w), {})
    assert w.same_bits(found)


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("gptq", {".g_idx": ORDER.to(torch.int32) + 1}, "g_idx: must be within"),
        ("gptq", {".g_idx": torch.zeros(K, dtype=torch.int32)}, "g_idx: every group must have 64"),
        ("gptq", {".g_idx": ORDER[:9].to(torch.int32)}, "g_idx: must be"),
        ("gptq", {".qzeros": words(K // G, 3)}, "qzeros: must be"),
        ("awq", {".scales": scales(5, N), ".qzeros": words(5, N // 8)}, "has 5 groups for K = 256"),
        ("awq", {".scales": AWQ[".scales"] * torch.inf}, "scale: must be finite"),
        ("awq", {".scales": AWQ[".scales"] * 0}, "scale: is 0 for"),
        ("compressed-tensors", {".weight_packed": words(N, 3)}, "weight_packed: must be"),
        ("hqq", {".axis": torch.tensor(0)}, "is read where it is 1"),
        ("hqq", {".shape": torch.tensor([N, K + 8])}, "is no 4-bit weight"),
        ("gpt-oss", {"_scales": MX["_scales"] * 0 + 255}, "a byte of 255"),
        ("gpt-oss", {"_scales": MX["_scales"][:2]}, "_scales: must be"),
        ("modelopt", {".weight_scale_2": torch.tensor(torch.nan)}, "global_scale: must be finite"),
        ("deepseek", {".weight_scale_inv": torch.ones(2, 2)}, "128 x 128"),
    ],
)
def test_a_damaged_weight_is_refused_by_name(case, change, message) -> None:
    scheme, tensors, config, _ = READ[case]
    with pytest.raises(ArgumentError, match=message):
        SCHEMES[scheme].read("x", {**tensors, **change}, config)


@pytest.mark.parametrize(
    ("scheme", "kind", "shape", "message"),
    [
        ("gptq", "int4_g64", (N, K + 1), "K = 257"),
        ("gptq", "int4_g64", (N + 1, K), "N = 65"),
        ("gptq", "nf4", (N, K), "GPTQ holds int4"),
        ("awq", "gguf_q4_0", (N, K), "AWQ holds int4"),
        ("bitsandbytes", "int4_g64", (N, K), "nf4 and fp4"),
        ("hqq", "int4_g64", (N, K), "HQQ"),
        ("modelopt", "mxfp4", (N, K), "nvfp4"),
        ("deepseek", "fp8_channel", (N, K), "fp8_block128"),
        ("scaled", "int4_g64", (N, K), "fp8_tensor"),
        ("compressed-mx", "mxfp4", (N, 40), "multiple of 32"),
    ],
)
def test_what_a_scheme_cannot_hold_is_refused(scheme, kind, shape, message) -> None:
    w = quantize(torch.randn(shape, generator=RNG), kind)
    with pytest.raises(ArgumentError, match=message):
        SCHEMES[scheme].write("x", w)


def test_zero_points_of_0_are_refused_by_the_first_gptq_format_alone() -> None:
    w = quantize(torch.rand(N, K, generator=RNG), "int4_g64_asym")  # nothing below 0
    with pytest.raises(ArgumentError, match="gptq holds 1..16"):
        SCHEMES["gptq"].write("x", w)
    assert SCHEMES["gptq_v2"].write("x", w)[".qzeros"].eq(0).all()


@pytest.fixture
def dense(tmp_path):
    path = tmp_path / "dense.safetensors"
    weights = {
        "a.weight": torch.randn(N, K, generator=RNG),
        "norm.weight": torch.ones(K),
        "lm_head.weight": scales(N, K),
    }
    save_file(weights, path)
    return path


def test_a_conversion_quantizes_what_no_pattern_skips_and_comes_back(dense, tmp_path) -> None:
    there = checkpoints.convert(dense, tmp_path / "q.safetensors", format="int4_g64", scheme="gptq_v2")
    assert (there.quantized, there.dense, there.kept) == (1, 2, 0)
    # The file says which of the two formats it is.
    back = checkpoints.convert(tmp_path / "q.safetensors", tmp_path / "d.safetensors", scheme="dense")
    assert (back.kept, back.dense) == (1, 2)
    spec = QuantSpec.named("int4_g64")
    expected = dequantize(quantize(load_file(dense)["a.weight"], spec)).bfloat16()
    assert torch.equal(expected, load_file(tmp_path / "d.safetensors")["a.weight"])


def test_quantizing_anew_starts_from_the_value_in_full_and_leaves_what_is_skipped(dense, tmp_path) -> None:
    first, second, kept = (tmp_path / f"{name}.safetensors" for name in ("first", "second", "kept"))
    checkpoints.convert(dense, first, format="fp8_channel", scheme="scaled")
    assert checkpoints.convert(first, second, format="nf4").quantized == 1
    assert checkpoints.convert(first, kept, format="nf4", skip=("a*",)).kept == 1
    value = dequantize(quantize(load_file(dense)["a.weight"], "fp8_channel"), dtype=torch.float32)
    with checkpoints.opened(second) as source:
        (found,) = next(item for item in checkpoints.items(source) if item.scheme == "rlkernel").read(source)
    assert quantize(value, "nf4", dtype=torch.bfloat16).same_bits(found)


def test_own_files_hold_any_format(dense, tmp_path) -> None:
    for name in ("gguf_q6_k", "mxfp8", "nf4"):
        path = tmp_path / f"{name}.safetensors"
        checkpoints.convert(dense, path, format=name)
        with checkpoints.opened(path) as source:
            (item,) = [item for item in checkpoints.items(source) if item.scheme == "rlkernel"]
            (found,) = item.read(source)
        assert quantize(load_file(dense)["a.weight"], name).same_bits(found)


def test_stacked_experts_come_apart_and_together(tmp_path) -> None:
    tensors = {f"m.gate_up_proj{k}": v for k, v in MX.items()}
    save_file(tensors, tmp_path / "x.safetensors")
    assert checkpoints.convert(tmp_path / "x.safetensors", tmp_path / "y.safetensors", scheme="gpt-oss").kept == 3
    assert {k: v.tolist() for k, v in tensors.items()} == {
        k: v.tolist() for k, v in load_file(tmp_path / "y.safetensors").items()
    }
    checkpoints.convert(tmp_path / "x.safetensors", tmp_path / "z.safetensors", scheme="dense")
    held = load_file(tmp_path / "z.safetensors")
    expected = oracle.mxfp4(MX["_blocks"], MX["_scales"]).bfloat16()
    assert torch.equal(expected, torch.stack([held[f"m.gate_up_proj.{i}.weight"] for i in range(3)]))


def test_gguf_files_are_written_and_read(dense, tmp_path) -> None:
    checkpoints.convert(dense, tmp_path / "m.gguf", format="gguf_q4_k", scheme="gguf")
    with checkpoints.opened(tmp_path / "m.gguf") as source:
        held = {item.name: (item.scheme, item.read(source)) for item in checkpoints.items(source)}
    assert {name: scheme for name, (scheme, _) in held.items()} == {
        "a.weight": "Q4_K",
        "norm.weight": "dense",
        "lm_head.weight": "dense",
    }
    assert torch.equal(load_file(dense)["lm_head.weight"], held["lm_head.weight"][1])
    fresh = quantize(load_file(dense)["a.weight"], "gguf_q4_k", dtype=torch.bfloat16)
    assert fresh.same_bits(held["a.weight"][1][0])


@pytest.mark.parametrize("suffix", ["safetensors", "gguf"])
def test_a_file_that_is_cut_off_is_refused_and_nothing_is_written(dense, tmp_path, suffix) -> None:
    whole = tmp_path / f"whole.{suffix}"
    scheme = "gguf" if suffix == "gguf" else "rlkernel"
    checkpoints.convert(dense, whole, format="gguf_q8_0", scheme=scheme)
    for part in (0.999, 0.5, 0.02):
        cut = tmp_path / f"cut.{suffix}"
        cut.write_bytes(whole.read_bytes()[: int(whole.stat().st_size * part)])
        with pytest.raises(FileError, match="cut off|ends within"):
            checkpoints.convert(cut, tmp_path / "out.safetensors")
    assert {p.name for p in tmp_path.iterdir()} == {dense.name, whole.name, cut.name}


def test_a_conversion_that_fails_leaves_the_old_target(dense, tmp_path) -> None:
    target = tmp_path / "t.safetensors"
    target.write_bytes(b"as it was")
    with pytest.raises(ArgumentError, match="GGUF holds"):
        checkpoints.convert(dense, target, format="nf4", scheme="gguf")
    with pytest.raises(UnknownNameError, match="did you mean 'gptq'"):
        checkpoints.convert(dense, target, scheme="gptqq")
    with pytest.raises(ArgumentError, match="is the source"):
        checkpoints.convert(dense, dense)
    assert target.read_bytes() == b"as it was"
    assert {p.name for p in tmp_path.iterdir()} == {dense.name, target.name}


def test_a_tensor_of_codes_that_belongs_to_no_weight_is_named(tmp_path) -> None:
    save_file({"a.qweight": words(4, 8), "a.scales": scales(1, 8)}, tmp_path / "x.safetensors")
    with (
        checkpoints.opened(tmp_path / "x.safetensors") as source,
        pytest.raises(ArgumentError, match=r"a\.qweight.*gptq"),
    ):
        list(checkpoints.items(source))


def test_the_command_inspects_and_converts(cli, dense, tmp_path) -> None:
    target = tmp_path / "q.safetensors"
    done = cli("quant", "convert", str(dense), str(target), "--format", "int4_g64", "--scheme", "awq", "--json")
    assert "AWQ has no" not in done.output
    assert json.loads(done.stdout)["quantized"] == 1
    said = json.loads(cli("quant", "inspect", str(target), "--check", "--json").stdout)["weights"]
    (row,) = [row for row in said if row["scheme"] == "awq"]
    assert (row["weight"], row["shape"]) == ("a", [N, K])
    assert row["format"].startswith("int4_g64_asym")
    assert "1 awq" in cli("quant", "inspect", str(target)).stdout
    assert cli("quant", "convert", str(dense)).exit_code == 2
    assert "does not exist" in cli("quant", "inspect", "nowhere.gguf").output
    assert "did you mean 'inspect'" in cli("quant", "inspec", str(dense)).output


# Packages that write these files. gguf comes with the dev extra; the others are compared where they are installed.
@pytest.mark.parametrize("kind", gguf_blocks.BLOCKS)
def test_random_blocks_mean_what_gguf_says(kind) -> None:
    quants = pytest.importorskip("gguf.quants")
    block = gguf_blocks.BLOCKS[kind]
    found = raw(8, 2 * 256 // block.columns, block.bytes)
    for at in {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}.get(kind, (0,)):  # halves that are numbers
        found[..., at : at + 2] = scales(8, found.shape[1], 1).view(torch.uint8)
    w = gguf_blocks.read_blocks("x", found.flatten(1), kind, 512)
    expected = quants.dequantize(found.flatten(1).numpy(), quants.GGMLQuantizationType[kind])
    assert torch.equal(bits(torch.from_numpy(expected)), bits(dequantize(w, dtype=torch.float32)))
    assert torch.equal(found.flatten(1), gguf_blocks.write_blocks("x", w)[1])


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_the_bytes_that_are_written_are_those_of_gguf(kind) -> None:
    quants = pytest.importorskip("gguf.quants")
    weight = torch.randn(32, 512, generator=RNG)
    weight[3] = 0
    expected = quants.quantize(weight.numpy(), quants.GGMLQuantizationType[kind])
    w = quantize(weight, gguf_blocks.BLOCKS[kind].format)
    assert torch.equal(torch.from_numpy(expected), gguf_blocks.write_blocks("x", w)[1])


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_states_of_bitsandbytes_are_read_bit_for_bit(kind, nested) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(N, K, generator=RNG)
    packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type=kind, compress_statistics=nested)
    tensors = {".weight": packed} | {f".weight.{k}": v for k, v in state.as_dict(packed=True).items()}
    (w,) = SCHEMES["bitsandbytes"].read("x", tensors, {})
    absmax = functional.dequantize_blockwise(state.absmax, state.state2) + state.offset if nested else state.absmax
    codes = torch.stack((packed >> 4, packed & 15), 1).flatten().long()
    expected = (state.code[codes].view(-1, 64) * absmax.unsqueeze(1)).view(N, K)
    assert torch.equal(bits(expected), bits(dequantize(w, dtype=torch.float32)))
    again = SCHEMES["bitsandbytes"].write("x", w)
    assert all(torch.equal(bits(v), bits(again[k])) for k, v in tensors.items() if "quant_state" not in k)


@pytest.mark.parametrize("rule", ["floor", "rceil", "even"])
@pytest.mark.parametrize("kind", ["mxfp4", "mxfp8"])
def test_mx_scales_and_codes_are_those_of_torchao(kind, rule) -> None:
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    weight = torch.randn(N, K, generator=RNG) * torch.exp2(torch.arange(N) - 30.0).unsqueeze(1)
    element = torch.float4_e2m1fn_x2 if kind == "mxfp4" else torch.float8_e4m3fn
    scale, codes = mx.to_mx(weight, element, 32, mx.ScaleCalculationMode[rule.upper()])
    w = quantize(weight, QuantSpec.named(kind, scale_rule=rule))
    assert torch.equal(scale.view(torch.uint8).reshape(N, -1), w.parts["scale"])
    assert torch.equal(codes.view(torch.uint8).reshape(N, -1), w.parts["codes"].view(torch.uint8))


@pytest.mark.parametrize("kind", ["int4_g128", "int4_g32", "int4_g32_asym"])
def test_weights_of_compressed_tensors_mean_what_it_says(kind) -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    args = pytest.importorskip("compressed_tensors.quantization").QuantizationArgs
    w = quantize(torch.randn(N, K, generator=RNG), kind)
    tensors = SCHEMES["compressed-tensors"].write("x", w)
    codes = helpers.unpack_from_int32(tensors[".weight_packed"], 4, torch.Size((N, K)))
    assert torch.equal(tensors[".weight_packed"], helpers.pack_to_int32(codes, 4))
    zero = tensors.get(".weight_zero_point")
    if zero is not None:
        zero = helpers.unpack_from_int32(zero, 4, torch.Size((N, K // w.spec.group)), packed_dim=0)
    how = args(num_bits=4, strategy="group", group_size=w.spec.group, symmetric=zero is None)
    scale = tensors[".weight_scale"].float()  # it multiplies in the dtype of the scale
    found = forward.dequantize(codes, scale, zero, args=how, dtype=torch.float32)
    assert torch.equal(bits(found), bits(dequantize(w, dtype=torch.float32)))


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_the_config_of_transformers_says_which_gptq_it_is(version, tmp_path) -> None:
    configs = pytest.importorskip("transformers.utils.quantization_config")
    said = configs.GPTQConfig(bits=4, group_size=G, checkpoint_format=version).to_dict()
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": said}, default=str))
    _, tensors, _, expected = READ[version]
    save_file({f"x{name}": t.contiguous() for name, t in tensors.items()}, tmp_path / "x.safetensors")
    with checkpoints.opened(tmp_path / "x.safetensors") as source:
        (item,) = checkpoints.items(source)
        (w,) = item.read(source)
    assert torch.equal(bits(expected), bits(dequantize(w, dtype=torch.float32)))
