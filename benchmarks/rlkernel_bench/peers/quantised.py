"""Products with four-bit weights by others: torch's own int4 kernel, bitsandbytes, Humming, Marlin.

Each quantises or packs a weight once; the packed weights are kept by the identity of the suite's weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rlkernel_bench.peers import Peer
from rlkernel_bench.work import Call, Inputs, Outputs, Work
from rlkernel_core.quant import unpack
from rlkernel_core.quant.nibbles import unpack_low_first


def once(pack: Callable[[Inputs], Any]) -> Callable[[Inputs], Any]:
    """Pack each set of inputs the first time it is met."""
    known: dict[int, tuple[Any, Any]] = {}

    def packed(given: Inputs) -> Any:
        key = id(given["weight"])
        if key not in known:
            known[key] = given["weight"], pack(given)
        return known[key][1]

    return packed


def only(work: Work, *formats: str) -> None:
    """Refuse a format that is none of these."""
    if work.options["format"] not in formats:
        raise NotImplementedError(f"takes {' and '.join(formats)} only")


def int4pack(work: Work) -> Call:
    """aten::_weight_int4pack_mm on the very codes of the suite: w = (q - 8) s + z, with z = 0."""
    only(work, "int4_g128", "int4_g64", "int4_g32")
    group = int(work.options["format"].removeprefix("int4_g"))

    def pack(given: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        codes = _codes(given["w"])  # [N, K] of 0..15
        pairs = codes[:, ::2] << 4 | codes[:, 1::2]
        scale = given["w"].parts["scale"].to(torch.bfloat16).t().contiguous()  # [K / group, N]
        weight = torch._convert_weight_to_int4pack(pairs, 8)  # noqa: SLF001 there is no public name
        return weight, torch.stack([scale, torch.zeros_like(scale)], -1)

    packed = once(pack)

    def run(given: Inputs) -> Outputs:
        weight, scales = packed(given)
        return {"y": torch._weight_int4pack_mm(given["x"], weight, group, scales)}  # noqa: SLF001

    return run


def _codes(w: Any) -> torch.Tensor:
    """Codes 0..15 of a symmetric int4 weight, [N, K]; the value is scale times (code - 8)."""
    return unpack_low_first(unpack(w).parts["codes"], w.shape[1])


def bitsandbytes(work: Work) -> Call:
    """NF4, blocks of 64, quantised by itself."""
    only(work, "nf4")
    from bitsandbytes import functional, matmul_4bit

    packed = once(lambda given: functional.quantize_4bit(given["weight"], blocksize=64, quant_type="nf4"))

    def run(given: Inputs) -> Outputs:
        weight, state = packed(given)
        return {"y_own": matmul_4bit(given["x"], weight.t(), quant_state=state)}

    return run


def bitsandbytes_quantize(work: Work) -> Call:
    """NF4, blocks of 64."""
    only(work, "nf4")
    from bitsandbytes import functional

    def run(given: Inputs) -> Outputs:
        codes, state = functional.quantize_4bit(given["weight"], blocksize=64, quant_type="nf4")
        return {"absmax": state.absmax, "codes": codes}

    return run


def humming(work: Work) -> Call:
    """HummingLayer, quantised by itself; compiles each shape with NVRTC when first met."""
    only(work, "int4_g128", "int4_g64")
    from humming.layer import HummingLayer

    group = int(work.options["format"].removeprefix("int4_g"))

    def pack(given: Inputs) -> Any:
        n, k = given["weight"].shape
        config = {"dtype": "int4", "group_size": group}
        layer = HummingLayer(shape_n=n, shape_k=k, weight_config=config, torch_dtype=given["weight"].dtype).cuda()
        layer.load_from_unquantized(given["weight"])
        layer.transform()
        return layer

    packed = once(pack)
    return lambda given: {"y_own": packed(given)(given["x"])}


def marlin(work: Work) -> Call:
    """IST Marlin: fp16, symmetric, groups of 128, quantised by rounding to the scales of the suite."""
    only(work, "int4_g128")
    from marlin import Layer

    def pack(given: Inputs) -> Any:
        n, k = given["weight"].shape
        dense = torch.nn.Linear(k, n, bias=False, dtype=torch.half, device=given["weight"].device)
        dense.weight.data.copy_(given["weight"])
        layer = Layer(k, n, groupsize=128).to(given["weight"].device)
        layer.pack(dense, given["w"].parts["scale"].half())
        return layer

    packed = once(pack)
    return lambda given: {"y_own": packed(given)(given["x"].half()).to(given["x"].dtype)}


def fp8(work: Work) -> Call:
    """torch._scaled_mm with rows of scales: fp8 on both sides, the activation quantised in the call."""
    only(work, "fp8_channel")

    def pack(given: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        return _rowwise(given["weight"])

    packed = once(pack)

    def run(given: Inputs) -> Outputs:
        w, ws = packed(given)
        x, xs = _rowwise(given["x"])
        return {"y_own": torch._scaled_mm(x, w.t(), xs, ws.t(), out_dtype=given["x"].dtype)}  # noqa: SLF001

    return run


def _rowwise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = x.abs().amax(-1, keepdim=True).float().clamp_min(1e-12) / 448.0
    return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


PEERS = (
    Peer("int4pack", "torch", ("torch",), {"qmatmul": int4pack}, "torch._weight_int4pack_mm"),
    Peer("scaled_mm", "torch", ("torch",), {"qmatmul": fp8}, "torch._scaled_mm"),
    Peer(
        "bitsandbytes",
        "bitsandbytes",
        ("bitsandbytes",),
        {"qmatmul": bitsandbytes, "quantize": bitsandbytes_quantize},
        "bitsandbytes 0.50.2, functional.py",
    ),
    Peer("humming", "humming-kernels", ("humming",), {"qmatmul": humming}, "humming-kernels 0.1.19, layer.py"),
    Peer(
        "marlin",
        "marlin",
        ("marlin", "marlin_cuda"),
        {"qmatmul": marlin},
        "IST-DASLab/marlin at 0f102e1",
        install="pip install git+https://github.com/IST-DASLab/marlin",  # PyPI's package of that name is another
    ),
)
