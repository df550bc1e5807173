"""Formats of blocks and products of experts on one GPU: bits against the definition, bounds, then time.

    PYTHONPATH=.:registry:conformance:backends/triton OUT=. python benchmarks/gpu_quant_formats.py

Writes $OUT/gpu_quant_formats.json after every section, prints a line a finding. Every section is a process of its own;
those that check run side by side, those that time one after the other. Times are medians of CUDA graph replays over
copies of a weight that together exceed 256 MB. TritonLLM's and triton_kernels' MX products are no peers here: neither
is installed where this runs. One file, as it compares ways to cut a product of which one ships.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FORMATS = (
    *("mxfp4", "mxfp8", "nvfp4", "gguf_q4_k", "gguf_q5_k", "gguf_q6_k"),
    *("q4l", "gguf_q4_0", "gguf_q8_0", "hqq4", "hqq4_g32", "fp4", "fp4_g128"),
)
SHAPES = {"4096x28672": (28672, 4096), "4096x6144": (6144, 4096)}  # K x N, (N, K) here
EXPERTS, TOP, N, K = 32, 4, 5760, 2880  # of gpt-oss
COLD = 256 << 20


def filled(name: str, rows: int, columns: int) -> Any:
    """A weight whose codes are random bytes, and whose 8-bit scales are."""
    import torch

    from rlkernel_core.quant import quantize

    g = torch.Generator().manual_seed(rows)
    w = quantize(torch.randn(rows, columns, generator=g), name)
    for part, tensor in w.parts.items():
        if part != "nested_table" and tensor.dtype.itemsize == 1:
            raw = tensor.view(torch.uint8)
            raw.copy_(torch.randint(256, raw.shape, generator=g).to(torch.uint8))
    return w


def same(a: Any, b: Any) -> bool:
    """Equal bit for bit; one NaN is any other."""
    import torch

    nan = b.isnan()
    return torch.equal(a.isnan(), nan) and torch.equal(
        a.masked_fill(nan, 0).view(torch.uint8), b.masked_fill(nan, 0).view(torch.uint8)
    )


def bits() -> dict[str, Any]:
    """Dequantised, quantised, packed and unpacked weights of every format, against the definition on the CPU."""
    import torch

    from rlkernel_core import quant
    from rlkernel_triton.quant import codec

    found = {}
    for name in FORMATS:
        verdict = {}
        for rows, columns in ((7, 301), (128, 512), (64, 320)):
            w = filled(name, rows, columns)
            on = w.to("cuda")
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                want = quant.dequantize(w, dtype=dtype)
                verdict[f"{rows}x{columns} {str(dtype)[6:]}"] = same(codec.dequantize(on, dtype=dtype).cpu(), want)
            packed = codec.prepack(on)
            verdict[f"{rows}x{columns} {packed.layout}"] = codec.prepack(packed, layout="canonical").same_bits(on)
            full = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))
            made, want = codec.quantize(full.cuda(), name).to("cpu"), quant.quantize(full, name)
            away = max(
                float((made.parts[n].float() != t.float()).double().mean())
                for n, t in want.parts.items()
                if n != "table"
            )
            verdict[f"{rows}x{columns} codes that differ"] = away
            codec.quantize(full.cuda(), name, out=packed)
            fresh = codec.dequantize(made.to("cuda"))
            verdict[f"{rows}x{columns} in place"] = same(codec.dequantize(packed), fresh)
        found[name] = {"right": all(v is True or (isinstance(v, float) and v < 1e-4) for v in verdict.values())}
        if not found[name]["right"]:
            found[name] |= {k: v for k, v in verdict.items() if v is False or (isinstance(v, float) and v >= 1e-4)}
        print(f"bits {name}: {found[name]}", flush=True)
        note("bits", found)
    return found


def share_of_bound(y: Any, x: Any, w: Any, rounding: str, *, added: Any = 0.0) -> float:
    """The largest error over what the contract allows, of a plain product with (a slice of) a weight's values."""
    import torch

    from rlkernel_core.spec.qmatmul import UNITS, accumulation_bound

    value = (w.to(x.dtype) if rounding == "dtype" else w).double()
    want = x.double() @ value.t() + added
    bound = accumulation_bound(
        want,
        x.double().abs() @ value.abs().t(),
        unit=UNITS[str(x.dtype)[6:]],
        inner=x.shape[1],
        weight_rounding=rounding,
    )
    over = (y.double() - want).abs() / bound
    return float(over.nan_to_num(nan=torch.inf).max()) if y.numel() else 0.0


def products() -> dict[str, Any]:
    """Products of every format, shape, type and rounding: the largest share of the bound."""
    import torch

    from rlkernel_core import quant
    from rlkernel_triton.quant.codec import prepack
    from rlkernel_triton.quant.qmatmul import qmatmul

    half, short, full = torch.bfloat16, torch.float16, torch.float32
    calls = [(half, "any", M) for M in (1, 17, 100)]
    calls += [(half, "none", 17), (half, "dtype", 17), (short, "any", 17), (short, "none", 17), (full, "any", 17)]
    found: dict[str, Any] = {}
    for name in FORMATS:
        shares = {}
        for rows, columns in ((66, 301), (128, 320), (192, 512)):
            w = quant.quantize(torch.randn(rows, columns, device="cuda"), name)
            value = quant.dequantize(w, dtype=torch.float32)
            packed = prepack(w)
            for weight in (w,) if packed is w else (w, packed):
                for dtype, rounding, M in calls:
                    x = torch.randn(M, columns, device="cuda").to(dtype)
                    y, again = (qmatmul(x, weight, weight_rounding=rounding) for _ in range(2))
                    share = share_of_bound(y, x, value, rounding) if torch.equal(y, again) else float("inf")
                    shares[f"{rows}x{columns} {weight.layout} {str(dtype)[6:]} {rounding} {M}"] = share
        found[name] = worst_of(shares)
        print(f"product {name}: {found[name]}", flush=True)
        note("products", found)
    return found


def worst_of(shares: dict[str, float]) -> dict[str, Any]:
    """The largest share, where it was, and how many exceed the bound."""
    at = max(shares, key=lambda k: shares[k])
    return {"share": round(shares[at], 4), "at": at, "beyond": sum(s > 1 for s in shares.values()), "of": len(shares)}


def sizes_of(M: int, seed: int = 0) -> Any:
    """Ends of experts that M tokens are sent to, four of 32 each, more to some than to others."""
    import torch

    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(EXPERTS, generator=g) + torch.empty(M, EXPERTS).exponential_(generator=g).log().neg()
    return torch.bincount(logits.topk(TOP, 1).indices.flatten(), minlength=EXPERTS).cumsum(0).int().cuda()


def experts() -> dict[str, Any]:
    """Products of ragged and empty experts, each against its own product in float64; a bias, a pair; gradients."""
    import torch

    from rlkernel_core import quant
    from rlkernel_core.reference.qmatmul import qmatmul as definition
    from rlkernel_triton.quant.codec import prepack
    from rlkernel_triton.quant.qmatmul import qmatmul

    found: dict[str, Any] = {}
    for name in (
        "mxfp4",
        "nvfp4",
        "int4_g128",
        "int4_g32_asym",
        "mxfp8",
        "gguf_q4_k",
        "int8_channel",
        "nf4",
        "fp8_channel",
    ):
        shares = {}
        for sizes in ((3, 0, 40, 5), (0, 0, 0, 200), (130, 1, 0, 0), (0, 0, 0, 0)):
            ends = torch.tensor(sizes, device="cuda").cumsum(0).int()
            M, rows, columns = sum(sizes) + 3, 192, 384
            w = quant.quantize(torch.randn(4 * rows, columns, device="cuda"), name)
            value = quant.dequantize(w, dtype=torch.float32).view(4, rows, columns)
            x = torch.randn(M, columns, device="cuda").bfloat16()
            for layout, weight in {"canonical": w, "packed": prepack(w)}.items():
                for rounding in ("any", "none", "dtype"):
                    y = qmatmul(x, weight, ends=ends, weight_rounding=rounding)
                    bad = 0.0 if bool((y[sum(sizes) :] == 0).all()) else float("inf")
                    start = 0
                    for e, size in enumerate(sizes):
                        part = slice(start, start + size)
                        bad = max(bad, share_of_bound(y[part], x[part], value[e], rounding))
                        start += size
                    shares[f"{sizes} {layout} {rounding}"] = bad
                bias = torch.randn(4 * rows, device="cuda").bfloat16()
                results = []
                for f, v, dtype in ((qmatmul, weight, torch.bfloat16), (definition, w, torch.float64)):
                    leaves = [t.detach().to(dtype).requires_grad_() for t in (x, bias)]
                    y = f(leaves[0], v, bias=leaves[1], activation="swiglu", ends=ends)
                    torch.manual_seed(0)
                    dy = torch.randn(y.shape, device="cuda").to(torch.bfloat16).to(dtype)
                    results.append([y.detach(), *torch.autograd.grad(y, leaves, dy)])
                for what, mine, theirs in zip(("y", "dx", "dbias"), *results, strict=True):
                    off = float((mine.double() - theirs).norm() / theirs.norm().clamp(min=1e-9))
                    shares[f"{sizes} {layout} swiglu {what}"] = off / 0.012  # three roundings to bfloat16
        found[name] = worst_of(shares)
        print(f"experts {name}: {found[name]}", flush=True)
        note("experts", found)
    return found


# ------------------------------------------------------------------------------------------------------------- timing


def replayed(calls: list[Callable[[], Any]], seconds: float = 0.05) -> float:
    """Microseconds of one call in a CUDA graph of all of them."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    graph.replay()
    torch.cuda.synchronize()
    times, until = [], time.monotonic() + seconds
    while len(times) < 5 or (time.monotonic() < until and len(times) < 100):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        graph.replay()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b) * 1e3 / len(calls))
    del kept, graph
    return round(statistics.median(times), 2)


def timed(calls: list[Callable[[], Any]], seconds: float = 0.03) -> Any:
    """`replayed`, or the error in words."""
    try:
        return replayed(calls, seconds)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:160]}"


def copies(w: Any) -> list[Any]:
    """The weight and copies that exceed the cache together."""
    made = [w]
    while sum(c.nbytes for c in made) < COLD:
        made.append(type(w)(w.spec, w.shape, w.dtype, {n: t.clone() for n, t in w.parts.items()}, w.layout))
    return made


class Table(dict[str, Any]):
    """Results that are printed and kept as they come."""

    def __init__(self, section: str) -> None:
        super().__init__()
        self.section = section

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        print(f"{self.section} {key}: {value}", flush=True)
        note(self.section, self)


def speed() -> dict[str, Any]:
    """Products of 4096 x 28672 and 4096 x 6144 by M, through the operator, beside cuBLAS on a bf16 weight; and cuts."""
    import torch

    from rlkernel_core import quant
    from rlkernel_triton.quant.block_products import Cut, launch
    from rlkernel_triton.quant.codec import dequantize, prepack, quantize
    from rlkernel_triton.quant.product import After
    from rlkernel_triton.quant.qmatmul import qmatmul

    found = Table("speed")
    for shape, (rows, columns) in SHAPES.items():
        dense = [torch.randn(rows, columns, device="cuda").bfloat16() for _ in range(-(-COLD // (2 * rows * columns)))]
        inputs = {M: torch.randn(M, columns, device="cuda").bfloat16() for M in (1, 16, 64, 256, 1024)}
        for M, x in inputs.items():
            found[f"{shape} bf16 M={M}"] = timed([partial(torch.mm, x, d.t()) for d in dense])
        for name in FORMATS if rows > 10000 else ("mxfp4", "nvfp4"):
            made = copies(prepack(quant.quantize(dense[0], name)))
            for M in inputs if name == "mxfp4" else (1, 16, 64):
                found[f"{shape} {name} M={M}"] = timed([partial(qmatmul, inputs[M], w) for w in made])
            if name in {"mxfp4", "nvfp4"}:
                for M, parts, cut in (
                    *((16, p, Cut(16, 64, s, 4)) for p in (1, 2, 4) for s in (3, 5)),
                    *((16, p, Cut(16, 128, 4, 8)) for p in (1, 2)),
                    *((64, p, Cut(64, n, 3, w)) for p in (1, 2) for n, w in ((64, 4), (128, 8))),
                    (256, 1, Cut(128, 128, 3, 8)),
                ):
                    y = torch.empty(M, rows, device="cuda", dtype=torch.bfloat16)
                    found[f"{shape} {name} M={M} cut {label(cut)}/{parts}"] = timed(
                        [partial(launch, inputs[M], w, After(), "any", None, y, cut, parts) for w in made], 0.02
                    )
            if rows > 10000:
                bytes_moved, w = made[0].nbytes + 2 * rows * columns, made[0]
                for what, call in {
                    "dequantise": partial(dequantize, w),
                    "quantise": partial(quantize, dense[0], w.spec, out=w),
                }.items():
                    took = timed([call] * 2)
                    found[f"{what} TB/s {name}"] = (
                        round(bytes_moved / took / 1e6, 3) if isinstance(took, float) else took
                    )
            del made
        del dense
    return found


def label(cut: Any) -> str:
    """A cut in a few characters."""
    return f"{cut.BM}x{cut.BN} s{cut.stages} w{cut.warps}"


def each_expert(x: Any, dense: Any, bounds: list[int], y: Any) -> None:
    """One cuBLAS product for every expert that has rows, which the host has to know."""
    import torch

    for e, (a, b) in enumerate(pairwise(bounds)):
        if b > a:
            torch.mm(x[a:b], dense[e].t(), out=y[a:b])


def moe() -> dict[str, Any]:
    """A gpt-oss layer: 32 experts of 5760 x 2880, four a token; beside torch's grouped product and cuBLAS."""
    import torch
    from torch.nn import functional

    from rlkernel_core import quant
    from rlkernel_triton.quant.block_products import Cut, launch
    from rlkernel_triton.quant.codec import prepack
    from rlkernel_triton.quant.product import After
    from rlkernel_triton.quant.qmatmul import qmatmul

    found = Table("moe")
    dense = torch.randn(EXPERTS, N, K, device="cuda", dtype=torch.bfloat16)
    packed: dict[str, Any] = {}
    cuts = (
        *(Cut(16, n, s, w) for n, w in ((64, 4), (128, 8)) for s in (3, 4)),
        *(Cut(32, 64, 4, 4), Cut(32, 128, 4, 8), Cut(64, 64, 3, 4), Cut(64, 128, 3, 8)),
        *(Cut(128, 128, 3, 8), Cut(128, 64, 3, 4), Cut(256, 128, 3, 8)),
    )
    for name in ("mxfp4", "nvfp4", "int4_g64", "gguf_q4_k"):
        packed[name] = w = prepack(quant.quantize(dense.view(-1, K), name))
        for tokens in (1, 4, 16, 64, 256, 1024, 4096) if name == "mxfp4" else (4, 64, 1024):
            ends = sizes_of(tokens)
            M, used = tokens * TOP, int((ends.diff(prepend=ends.new_zeros(1)) > 0).sum())
            x, y = (torch.randn(M, n, device="cuda").bfloat16() for n in (K, N))
            found[f"{name} {tokens} tokens"] = timed([partial(qmatmul, x, w, ends=ends)] * 3)
            if name != "mxfp4":
                continue
            turned = dense.transpose(1, 2)
            found[f"grouped_mm {tokens} tokens"] = timed([partial(functional.grouped_mm, x, turned, offs=ends)] * 3)
            bounds = [0, *ends.tolist()]
            found[f"cublas an expert {tokens} tokens"] = timed([partial(each_expert, x, dense, bounds, y)] * 3)
            floor = max((used * N * K * 4.25 / 8 + 2 * M * (N + K)) / 4.3e6, 2 * M * N * K / 790e6)
            found[f"floor {tokens} tokens, {used} experts"] = round(floor, 2)
            for cut in cuts if tokens in {4, 64, 1024} else ():
                found[f"{tokens} tokens cut {label(cut)}"] = timed(
                    [partial(launch, x, w, After(), "any", ends, y, cut)] * 3, 0.02
                )
    return found


SECTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "bits": bits, "products": products, "experts": experts, "moe": moe, "speed": speed,
}  # fmt: skip
TIMED = ("moe", "speed")


def folder() -> Path:
    """Where results go."""
    return Path(os.environ.get("OUT", "."))


def note(section: str, found: dict[str, Any]) -> None:
    """Keep what a section has so far."""
    (folder() / f"gpu_quant_formats_{section}.json").write_text(json.dumps(found, indent=1))


def child(section: str) -> None:
    """One section in this process."""
    try:
        note(section, SECTIONS[section]())
    except Exception:
        note(section, {"error": traceback.format_exc()[-3000:]})
        traceback.print_exc()


def main() -> None:
    """All sections within the time, and one file of their results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--section", choices=SECTIONS)
    parser.add_argument("--only", help="sections by comma", default=",".join(SECTIONS))
    parser.add_argument("--seconds", type=float, default=75.0)
    given = parser.parse_args()
    if given.section:
        child(given.section)
        return
    until = time.monotonic() + given.seconds - 3
    wanted = [s for s in SECTIONS if s in given.only.split(",")]
    command = [sys.executable, __file__, "--section"]
    checks = {s: subprocess.Popen([*command, s], cwd=ROOT) for s in wanted if s not in TIMED}
    share = given.seconds * (0.4 if any(s in TIMED for s in wanted) else 1.0)
    checked = min(until, time.monotonic() + share)
    for process in checks.values():
        finish(process, checked)
    for section in (s for s in wanted if s in TIMED):
        finish(subprocess.Popen([*command, section], cwd=ROOT), until)
    import torch

    environment = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
    }
    results: dict[str, Any] = {"environment": environment}
    for section in wanted:
        path = folder() / f"gpu_quant_formats_{section}.json"
        results[section] = json.loads(path.read_text()) if path.exists() else {"error": "nothing was written"}
    (folder() / "gpu_quant_formats.json").write_text(json.dumps(results, indent=1))


def finish(process: subprocess.Popen[bytes], until: float) -> None:
    """Wait, or end it."""
    try:
        process.wait(max(0.5, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        print(f"{process.args}: out of time", flush=True)


if __name__ == "__main__":
    main()
