"""Products with quantized weights by others: torch, bitsandbytes, Humming, Marlin, gemlite, TritonLLM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rlkernel_bench.peers import Peer
from rlkernel_bench.work import Call, Inputs, Outputs, Work
from rlkernel_core.quant import dequantize, unpack
from rlkernel_core.quant.nibbles import unpack_low_first


@dataclass(frozen=True)
class Product:
    """How others multiply: what they pack a weight into, once, and the call on it."""

    formats: tuple[str, ...]  # that they have, in the suite's words
    pack: Callable[[Inputs], Any]  # the suite's inputs -> their weight
    multiply: Callable[[Inputs, Any], torch.Tensor]  # (inputs, their weight) -> y
    own: bool = False  # they quantize the full weight themselves, and are held to that; else the suite's very codes

    def call(self, work: Work) -> Call:
        """The forward call of a workload; packs each set of inputs the first time it is met."""
        if work.options["format"] not in self.formats:
            raise NotImplementedError(f"takes {' and '.join(self.formats)} only")
        known: dict[int, tuple[Any, Any]] = {}  # by identity of the weight, which is kept taken

        def run(given: Inputs) -> Outputs:
            key = id(given["weight"])
            if key not in known:
                known[key] = given["weight"], self.pack(given)
            return {"y_own" if self.own else "y": self.multiply(given, known[key][1])}

        return run


def _codes(w: Any) -> torch.Tensor:
    """Codes 0..15 of a symmetric int4 weight, [N, K]; the value is scale times (code - 8)."""
    return unpack_low_first(unpack(w).parts["codes"], w.shape[1])


def _pack_int4(given: Inputs) -> Any:
    """As aten wants it: w = (q - 8) s + z, with z = 0."""
    codes = _codes(given["w"])
    scale = given["w"].parts["scale"].to(torch.bfloat16).t().contiguous()  # [K / group, N]
    weight = torch._convert_weight_to_int4pack(codes[:, ::2] << 4 | codes[:, 1::2], 8)  # noqa: SLF001 there is no public name
    return weight, given["w"].spec.group, torch.stack([scale, torch.zeros_like(scale)], -1)


def _multiply_int4(given: Inputs, packed: Any) -> torch.Tensor:
    return torch._weight_int4pack_mm(given["x"], *packed)  # noqa: SLF001


def _pack_bitsandbytes(given: Inputs) -> Any:
    from bitsandbytes import functional

    return functional.quantize_4bit(given["weight"], blocksize=64, quant_type="nf4")


def _multiply_bitsandbytes(given: Inputs, packed: Any) -> torch.Tensor:
    from bitsandbytes import matmul_4bit

    weight, state = packed
    return matmul_4bit(given["x"], weight.t(), quant_state=state)


def _pack_humming(given: Inputs) -> Any:
    """A layer; compiles each shape with NVRTC when first met."""
    from humming.layer import HummingLayer

    (n, k), dtype = given["weight"].shape, given["weight"].dtype
    config = {"dtype": "int4", "group_size": given["w"].spec.group}
    layer = HummingLayer(shape_n=n, shape_k=k, weight_config=config, torch_dtype=dtype).to(given["weight"].device)
    layer.load_from_unquantized(given["weight"])
    layer.transform()
    return layer


def _pack_marlin(given: Inputs) -> Any:
    """A layer of fp16, from what the suite's codes stand for: exact in fp16, so that its own rounding finds them."""
    from marlin import Layer

    n, k = given["weight"].shape
    dense = torch.nn.Linear(k, n, bias=False, dtype=torch.half, device=given["weight"].device)
    dense.weight.data.copy_(dequantize(given["w"], dtype=torch.float32))
    layer = Layer(k, n, groupsize=128).to(given["weight"].device)
    layer.pack(dense, given["w"].parts["scale"].half())
    return layer


def _multiply_marlin(given: Inputs, layer: Any) -> torch.Tensor:
    y: torch.Tensor = layer(given["x"].half())
    return y


def _pack_gemlite(given: Inputs) -> Any:
    """A layer on the suite's codes with 8 as their zero; searches a tile for each shape when first met."""
    from gemlite import DType, GemLiteLinear

    (n, k), group = given["weight"].shape, given["w"].spec.group
    kind = DType.BF16 if given["weight"].dtype == torch.bfloat16 else DType.FP16
    layer = GemLiteLinear(4, group_size=group, in_features=k, out_features=n, input_dtype=kind, output_dtype=kind)
    layer.pack(_codes(given["w"]), given["w"].parts["scale"].to(given["weight"].dtype), 8)
    return layer


def _pack_tritonllm(given: Inputs) -> Any:
    """The suite's codes of each expert in TritonLLM's tiles for Hopper."""
    import tritonllm  # noqa: F401 it gives its triton_kernels that name
    from triton_kernels.tensor import FP4, convert_layout, wrap_torch_tensor
    from triton_kernels.tensor_details import layout

    experts, n, k = given["weight"].shape
    parts = unpack(given["w"]).parts
    codes = parts["codes"].view(experts, n, k // 2).transpose(1, 2)
    scale = parts["scale"].view(torch.uint8).view(experts, n, k // 32).transpose(1, 2)
    tiles, options = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
    return (
        convert_layout(wrap_torch_tensor(codes, dtype=FP4), tiles, **options),
        convert_layout(wrap_torch_tensor(scale), layout.StridedLayout),
        {},
    )


def _multiply_tritonllm(given: Inputs, packed: Any) -> torch.Tensor:
    """matmul_ogs on sorted rows; the tables of its routing are made once for the ends of a call."""
    from triton_kernels.matmul_ogs import PrecisionConfig, matmul_ogs
    from triton_kernels.routing import RoutingData, compute_expt_data

    weight, scale, tables = packed
    ends = given["ends"]
    key = id(ends)
    if key not in tables:
        counts = ends.diff(prepend=ends.new_zeros(1)).int()
        data = compute_expt_data(counts, len(ends), len(given["x"]))
        tables[key] = ends, RoutingData(None, counts, len(ends), 1, data)
    y: torch.Tensor = matmul_ogs(
        given["x"], weight, None, tables[key][1], precision_config=PrecisionConfig(weight_scale=scale)
    )
    return y


def _pack_fp8(given: Inputs) -> Any:
    return _rowwise(given["weight"])


def _multiply_fp8(given: Inputs, packed: Any) -> torch.Tensor:
    """torch._scaled_mm with rows of scales: fp8 on both sides, the activation quantized in the call."""
    w, ws = packed
    x, xs = _rowwise(given["x"])
    return torch._scaled_mm(x, w.t(), xs, ws.t(), out_dtype=given["x"].dtype)  # noqa: SLF001


def _rowwise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = x.abs().amax(-1, keepdim=True).float().clamp_min(1e-12) / 448.0
    return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def _pack_blocks(given: Inputs) -> Any:
    parts = unpack(given["w"]).parts
    return parts["codes"], parts["scale"]


def _multiply_flashinfer(given: Inputs, packed: Any) -> torch.Tensor:
    """DeepGEMM as FlashInfer carries it: bf16 tokens, which it quantizes itself, 128 columns at a time."""
    from flashinfer.gemm import fp8_blockscale_gemm_sm90

    y: torch.Tensor = fp8_blockscale_gemm_sm90(given["x"], packed[0], None, packed[1])
    return y


def _layer(given: Inputs, layer: Any) -> torch.Tensor:
    y: torch.Tensor = layer(given["x"])
    return y


_GROUPS = ("int4_g128", "int4_g64", "int4_g32")
PRODUCTS = {
    "int4pack": Product(_GROUPS, _pack_int4, _multiply_int4),
    "scaled_mm": Product(("fp8_channel",), _pack_fp8, _multiply_fp8, own=True),
    "bitsandbytes": Product(("nf4",), _pack_bitsandbytes, _multiply_bitsandbytes, own=True),
    "humming": Product(_GROUPS[:2], _pack_humming, _layer, own=True),
    "marlin": Product(_GROUPS[:1], _pack_marlin, _multiply_marlin),
    "gemlite": Product(_GROUPS, _pack_gemlite, _layer),
    "flashinfer fp8": Product(("fp8_block128",), _pack_blocks, _multiply_flashinfer),
    "tritonllm": Product(("mxfp4",), _pack_tritonllm, _multiply_tritonllm),
}


def bitsandbytes_quantize(work: Work) -> Call:
    """NF4, blocks of 64."""
    if work.options["format"] != "nf4":
        raise NotImplementedError("takes nf4 only")
    from bitsandbytes import functional

    def run(given: Inputs) -> Outputs:
        codes, state = functional.quantize_4bit(given["weight"], blocksize=64, quant_type="nf4")
        return {"absmax": state.absmax, "codes": codes}

    return run


_H200 = "H200, torch 2.11 (benchmarks/notes/quant-peers.md)"

PEERS = (
    Peer(
        "int4pack", "torch", ("torch",), {"qmatmul": PRODUCTS["int4pack"].call}, "torch._weight_int4pack_mm", ran=_H200
    ),
    Peer("scaled_mm", "torch", ("torch",), {"qmatmul": PRODUCTS["scaled_mm"].call}, "torch._scaled_mm", ran=_H200),
    Peer(
        "flashinfer fp8",
        "flashinfer-python",
        ("flashinfer",),
        {"qmatmul": PRODUCTS["flashinfer fp8"].call},
        "flashinfer-python 0.7.2.post1, gemm",
        ran=_H200,
    ),
    Peer(
        "bitsandbytes",
        "bitsandbytes",
        ("bitsandbytes",),
        {"qmatmul": PRODUCTS["bitsandbytes"].call, "quantize": bitsandbytes_quantize},
        "bitsandbytes 0.50.2, functional.py",
        ran=_H200,
    ),
    Peer(
        "humming",
        "humming-kernels",
        ("humming",),
        {"qmatmul": PRODUCTS["humming"].call},
        "humming-kernels 0.1.19, layer.py",
        ran=_H200,
    ),
    Peer(
        "marlin",
        "marlin",
        ("marlin", "marlin_cuda"),
        {"qmatmul": PRODUCTS["marlin"].call},
        "IST-DASLab/marlin at 2f6d7c1",
        ran=f"{_H200}, patched",
        install="pip install git+https://github.com/IST-DASLab/marlin",  # PyPI's package of that name is another
    ),
    Peer(
        "gemlite",
        "gemlite",
        ("gemlite",),
        {"qmatmul": PRODUCTS["gemlite"].call},
        "gemlite 0.6.0.post2, core.py",
        ran=_H200,
    ),
    Peer(
        "tritonllm",
        "tritonllm",
        ("tritonllm",),
        {"experts": PRODUCTS["tritonllm"].call},
        "toyaix/TritonLLM at 9ecc490, triton_kernels/matmul_ogs.py",
        ran=_H200,
        install="pip install git+https://github.com/toyaix/TritonLLM",  # triton_kernels on PyPI is another
    ),
)
