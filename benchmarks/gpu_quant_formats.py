"""Formats of blocks and products of experts on one GPU: bits against the definition, bounds, then time.

    PYTHONPATH=.:registry:conformance:backends/triton OUT=. python benchmarks/gpu_quant_formats.py

Writes $OUT/gpu_quant_formats_SECTION_FORMAT.json as it goes and $OUT/gpu_quant_formats.json at the end. A task is a
section of one format in a process of its own, as many at a time as there are cores: they check, and compile what is
timed into Triton's cache on disk; then one process alone times. Times are medians of CUDA graph replays over copies of
a weight that together exceed 256 MB. Products of others, TritonLLM's among them, are beside ours in
gpu_quant_peers.py. One file, as it compares ways to cut a product of which one ships.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FORMATS = (
    *("mxfp4", "mxfp8", "nvfp4", "gguf_q4_k", "gguf_q5_k", "gguf_q6_k"),
    *("q4l", "gguf_q4_0", "gguf_q8_0", "hqq4", "hqq4_g32", "fp4", "fp4_g128"),
)
OTHERS = ("int4_g128", "nf4", "int8_channel", "fp8_channel", "int8_w8a8")  # timed beside them
N_TIMED, K_TIMED = 28672, 4096  # gate and up of Llama-3 8B
TOKENS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048)
WHOLE = ("mxfp4", "nvfp4", "int4_g128", "fp8_channel", "int8_channel")  # timed at every number of tokens
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


def bits(name: str) -> dict[str, Any]:
    """Dequantised, quantised, packed and unpacked weights of a format, against the definition on the CPU."""
    import torch
    from rlkernel_bench.direct import of_triton

    from rlkernel_core import quant

    verdict: dict[str, Any] = {}
    for rows, columns in ((7, 301), (64, 320)):
        w = filled(name, rows, columns)
        on = w.to("cuda")
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            want = quant.dequantize(w, dtype=dtype)
            verdict[f"{rows}x{columns} {str(dtype)[6:]}"] = same(of_triton.dequantize(on, dtype=dtype).cpu(), want)
        packed = of_triton.prepack(on)
        verdict[f"{rows}x{columns} {packed.layout}"] = of_triton.prepack(packed, layout="canonical").same_bits(on)
        full = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))
        full[1, 3], full[2], full[3] = torch.inf, 0, full[3] * 1e-38
        made, want = of_triton.quantize(full.cuda(), name).to("cpu"), quant.quantize(full, name)
        away = max(
            float((made.parts[n].view(torch.uint8) != t.view(torch.uint8)).double().mean())
            for n, t in want.parts.items()
            if n != "table" and t.dtype.itemsize == 1
        )
        verdict[f"{rows}x{columns} codes that differ"] = away
        verdict[f"{rows}x{columns} values"] = same(of_triton.dequantize(made.to("cuda")).cpu(), quant.dequantize(want))
        of_triton.quantize(full.cuda(), name, out=packed)
        verdict[f"{rows}x{columns} in place"] = same(of_triton.dequantize(packed).cpu(), quant.dequantize(want))
    return {"right": all(v is True or v == 0.0 for v in verdict.values()), **verdict}


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


def share_of_all(y: Any, x: Any, value: Any) -> float:
    """`share_of_bound` of every row of a weight, some at a time."""
    steps = range(0, value.shape[0], 4096)
    return max(share_of_bound(y[:, a : a + 4096], x, value[a : a + 4096], "any") for a in steps)


def products(name: str) -> dict[str, Any]:
    """Products of every shape, type and rounding: the largest share of the bound."""
    import torch
    from rlkernel_bench.direct import of_triton

    from rlkernel_core import quant

    half, short, full = torch.bfloat16, torch.float16, torch.float32
    calls = [(half, "any", 17), (half, "any", 100), (half, "dtype", 17), (short, "none", 17), (full, "any", 17)]
    shares = {}
    for rows, columns in ((66, 301), (192, 512)):
        w = quant.quantize(torch.randn(rows, columns, device="cuda"), name)
        value = quant.dequantize(w, dtype=torch.float32)
        packed = of_triton.prepack(w)
        for weight in (w,) if packed is w else (packed,):
            for dtype, rounding, M in calls:
                x = torch.randn(M, columns, device="cuda").to(dtype)
                y, again = (of_triton.qmatmul(x, weight, weight_rounding=rounding) for _ in range(2))
                share = share_of_bound(y, x, value, rounding) if torch.equal(y, again) else float("inf")
                shares[f"{rows}x{columns} {weight.layout} {str(dtype)[6:]} {rounding} {M}"] = share
    return worst_of(shares)


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


def experts(name: str) -> dict[str, Any]:
    """Products of ragged and empty experts, each against its own product in float64; a bias, a pair; gradients."""
    import torch
    from rlkernel_bench.direct import of_triton

    from rlkernel_core import quant
    from rlkernel_torch.direct import qmatmul as definition

    shares = {}
    for sizes in ((3, 0, 40, 5), (0, 0, 0, 200), (0, 0, 0, 0)):
        ends = torch.tensor(sizes, device="cuda").cumsum(0).int()
        M, rows, columns = sum(sizes) + 3, 192, 384
        w = quant.quantize(torch.randn(4 * rows, columns, device="cuda"), name)
        value = quant.dequantize(w, dtype=torch.float32).view(4, rows, columns)
        x = torch.randn(M, columns, device="cuda").bfloat16()
        weight = of_triton.prepack(w)
        for rounding in ("any", "none"):
            y = of_triton.qmatmul(x, weight, ends=ends, weight_rounding=rounding)
            bad = 0.0 if bool((y[sum(sizes) :] == 0).all()) else float("inf")
            start = 0
            for e, size in enumerate(sizes):
                part = slice(start, start + size)
                bad = max(bad, share_of_bound(y[part], x[part], value[e], rounding))
                start += size
            shares[f"{sizes} {rounding}"] = bad
        bias = torch.randn(4 * rows, device="cuda").bfloat16()
        results = []
        for f, v, dtype in ((of_triton.qmatmul, weight, torch.bfloat16), (definition, w, torch.float64)):
            leaves = [t.detach().to(dtype).requires_grad_() for t in (x, bias)]
            y = f(leaves[0], v, bias=leaves[1], activation="swiglu", ends=ends)
            torch.manual_seed(0)
            dy = torch.randn(y.shape, device="cuda").to(torch.bfloat16).to(dtype)
            results.append([y.detach(), *torch.autograd.grad(y, leaves, dy)])
        for what, mine, theirs in zip(("y", "dx", "dbias"), *results, strict=True):
            off = float((mine.double() - theirs).norm() / theirs.norm().clamp(min=1e-9))
            shares[f"{sizes} swiglu {what}"] = off / 0.012  # three roundings to bfloat16
    return worst_of(shares)


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


def tokens_of(name: str) -> tuple[int, ...]:
    """Numbers of tokens that a format is timed at."""
    return TOKENS if name in WHOLE else (1, 16, 64)


def cuts_of(name: str) -> Iterator[tuple[int, int, Any]]:
    """(tokens, parts of K, cut) beside the one that ships."""
    from rlkernel_triton.quant.block_products import Cut

    if name != "mxfp4":
        return
    yield from ((16, p, Cut(16, 64, 4, 4)) for p in (1, 2, 4))
    yield from ((32, p, Cut(32, 64, 4, 4)) for p in (1, 2))
    yield from ((M, 1, Cut(128, 64, 3, 4)) for M in (128, 256))
    yield 512, 1, Cut(128, 128, 3, 8)


def warm(name: str) -> dict[str, Any]:
    """Every call of the timing once, so that Triton's cache holds it; products against float64 on the way."""
    import torch
    from rlkernel_bench.direct import of_triton

    from rlkernel_core import quant
    from rlkernel_triton.quant.block_products import launch
    from rlkernel_triton.quant.product import After

    rows, columns = N_TIMED, K_TIMED
    full = torch.randn(rows, columns, device="cuda").bfloat16()
    plain = of_triton.quantize(full, name)
    packed = of_triton.prepack(plain)
    of_triton.quantize(full, plain.spec, out=packed)
    value = of_triton.dequantize(packed, dtype=torch.float32)
    want = quant.dequantize(quant.quantize(full[:512], name), dtype=torch.float32)
    shares = {"bits in place": 0.0 if same(value[:512], want) else 9.0}
    if name == "nvfp4":  # a scale of all
        shares.clear()
    for M in tokens_of(name):  # of every row: a race may spoil a few
        x = torch.randn(M, columns, device="cuda").bfloat16()
        y, again = of_triton.qmatmul(x, packed), of_triton.qmatmul(x, packed)
        if name != "int8_w8a8":  # tokens are rounded too
            shares[f"M={M}"] = share_of_all(y, x, value) if torch.equal(y, again) else float("inf")
    for M, parts, cut in cuts_of(name):
        x = torch.randn(M, columns, device="cuda").bfloat16()
        y = torch.empty(M, rows, device="cuda", dtype=torch.bfloat16)
        launch(x, packed, After(), "any", None, y, cut, parts)
        shares[f"M={M} cut {label(cut)}/{parts}"] = share_of_all(y, x, value)
    of_triton.dequantize(plain), of_triton.dequantize(packed)
    return worst_of(shares)


def speed() -> dict[str, Any]:
    """Products of 4096 x 28672 by tokens, through the operator, beside cuBLAS on a bf16 weight; cuts; codecs."""
    import torch
    from rlkernel_bench.direct import of_triton

    from rlkernel_triton.quant.block_products import launch
    from rlkernel_triton.quant.product import After

    found = Table("speed")
    rows, columns = N_TIMED, K_TIMED
    dense = [torch.randn(rows, columns, device="cuda").bfloat16() for _ in range(2)]
    inputs = {M: torch.randn(M, columns, device="cuda").bfloat16() for M in TOKENS}
    beside = torch.empty_like(dense[0])
    took = timed([partial(beside.copy_, dense[0])] * 2)
    found["copy TB/s"] = round(2 * beside.nbytes / took / 1e6, 3)
    for M, x in inputs.items():
        found[f"bf16 M={M}"] = timed([partial(torch.mm, x, d.t()) for d in dense])
    for name in ("mxfp4", "nvfp4", "mxfp8", *OTHERS, *(f for f in FORMATS if f not in {"mxfp4", "nvfp4", "mxfp8"})):
        plain = of_triton.quantize(dense[0], name)
        made = copies(of_triton.prepack(plain))
        for M in tokens_of(name):
            found[f"{name} M={M}"] = timed([partial(of_triton.qmatmul, inputs[M], w) for w in made])
        for M, parts, cut in cuts_of(name):
            y = torch.empty(M, rows, device="cuda", dtype=torch.bfloat16)
            found[f"{name} M={M} cut {label(cut)}/{parts}"] = timed(
                [partial(launch, inputs[M], w, After(), "any", None, y, cut, parts) for w in made], 0.02
            )
        moved = made[0].nbytes + 2 * rows * columns
        for layout, w in {"": plain, " tiles": made[0]}.items():
            if layout and w.layout == "canonical":
                continue
            for what, call in {
                "quantise": partial(of_triton.quantize, dense[0], w.spec, out=w),
                "dequantise": partial(of_triton.dequantize, w),
            }.items():
                took = timed([call] * 2, 0.02)
                found[f"{what} TB/s {name}{layout}"] = round(moved / took / 1e6, 3) if isinstance(took, float) else took
        del made, plain
    packs = int4packs(of_triton.quantize(dense[0], "int4_g128"))
    for M in (1, 4, 16, 32, 64, 128):
        found[f"torch int4pack M={M}"] = timed([partial(int4pack, inputs[M], *pack) for pack in packs])
    return found


def int4packs(w: Any) -> list[Any]:
    """The codes of a weight as torch's own int4 product reads them, with scales, in copies that exceed the cache."""
    import torch

    from rlkernel_core.quant.nibbles import unpack_low_first

    codes = unpack_low_first(w.parts["codes"], w.shape[1])
    scale = w.parts["scale"].t().contiguous()  # [K / group, N]
    first = torch._convert_weight_to_int4pack(codes[:, ::2] << 4 | codes[:, 1::2], 8)
    scales = torch.stack([scale, torch.zeros_like(scale)], -1)
    return [(first.clone(), w.spec.group, scales.clone()) for _ in range(1 + COLD // first.nbytes)]


def int4pack(x: Any, weight: Any, group: int, scales: Any) -> Any:
    """Torch's own int4 product."""
    import torch

    return torch._weight_int4pack_mm(x, weight, group, scales)


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
    from rlkernel_bench.direct import of_triton
    from torch.nn import functional

    from rlkernel_triton.quant.block_products import Cut, launch
    from rlkernel_triton.quant.product import After

    found = Table("moe")
    dense = torch.randn(EXPERTS, N, K, device="cuda", dtype=torch.bfloat16)
    packed: dict[str, Any] = {}
    cuts = (Cut(16, 64, 4, 4), Cut(16, 128, 4, 8), Cut(32, 128, 4, 8), Cut(64, 64, 3, 4), Cut(128, 128, 3, 8))
    for name in ("mxfp4", "nvfp4"):
        packed[name] = w = of_triton.prepack(of_triton.quantize(dense.view(-1, K), name))
        for tokens in (1, 4, 16, 64, 256, 1024, 4096) if name == "mxfp4" else (4, 64, 1024):
            ends = sizes_of(tokens)
            M, used = tokens * TOP, int((ends.diff(prepend=ends.new_zeros(1)) > 0).sum())
            x, y = (torch.randn(M, n, device="cuda").bfloat16() for n in (K, N))
            found[f"{name} {tokens} tokens"] = timed([partial(of_triton.qmatmul, x, w, ends=ends)] * 3)
            if name != "mxfp4":
                continue
            turned = dense.transpose(1, 2)
            found[f"grouped_mm {tokens} tokens"] = timed([partial(functional.grouped_mm, x, turned, offs=ends)] * 3)
            bounds = [0, *ends.tolist()]
            found[f"cublas an expert {tokens} tokens"] = timed([partial(each_expert, x, dense, bounds, y)] * 3)
            floor = max((used * N * K * 4.25 / 8 + 2 * M * (N + K)) / 4.3e6, 2 * M * N * K / 790e6)
            found[f"floor {tokens} tokens, {used} experts"] = round(floor, 2)
            for cut in cuts if tokens in {1, 16, 256, 4096} else ():
                found[f"{tokens} tokens cut {label(cut)}"] = timed(
                    [partial(launch, x, w, After(), "any", ends, y, cut)] * 3, 0.02
                )
    return found


CHECKS: dict[str, Callable[[str], dict[str, Any]]] = {
    "warm": warm, "bits": bits, "products": products, "experts": experts,
}  # fmt: skip
TIMED: dict[str, Callable[[], dict[str, Any]]] = {"speed": speed, "moe": moe}
OF_EXPERTS = ("mxfp4", "nvfp4", "int4_g128", "mxfp8", "gguf_q4_k", "int8_channel", "nf4", "fp8_channel")


def tasks(wanted: list[str]) -> list[tuple[str, str]]:
    """(section, format) of every check, what timing waits for first."""
    found = [("warm", f) for f in (*FORMATS, *OTHERS)] if "speed" in wanted else []
    found += [("products", f) for f in FORMATS] if "products" in wanted else []
    found += [("experts", f) for f in OF_EXPERTS] if "experts" in wanted else []
    return found + ([("bits", f) for f in FORMATS] if "bits" in wanted else [])


def folder() -> Path:
    """Where results go."""
    return Path(os.environ.get("OUT", "."))


def note(section: str, found: dict[str, Any]) -> None:
    """Keep what a section has so far."""
    (folder() / f"gpu_quant_formats_{section}.json").write_text(json.dumps(found, indent=1))


def child(section: str, name: str) -> None:
    """One section in this process."""
    file = f"{section}_{name}" if name else section
    try:
        found = CHECKS[section](name) if name else TIMED[section]()
    except Exception:
        found = {"error": traceback.format_exc()[-2000:]}
    note(file, found)
    print(f"{file}: {found}"[:400] if name or "error" in found else f"{section}: done", flush=True)


def checked(waiting: list[tuple[str, str]], until: float) -> None:
    """Every task, as many at a time as there are cores."""
    running: list[subprocess.Popen[bytes]] = []
    while (waiting or running) and time.monotonic() < until:
        running = [p for p in running if p.poll() is None]
        while waiting and len(running) < len(os.sched_getaffinity(0)):
            running.append(subprocess.Popen([sys.executable, __file__, "--task", *waiting.pop(0)], cwd=ROOT))
        time.sleep(0.05)
    for process in running:
        process.kill()
        print(f"{process.args}: out of time", flush=True)
    if waiting:
        print(f"never begun: {waiting}", flush=True)


def main() -> None:
    """All sections within the time, and one file of their results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", nargs="*")
    parser.add_argument("--only", help="sections by comma", default="speed,products,experts,bits")
    parser.add_argument("--seconds", type=float, default=75.0)
    given = parser.parse_args()
    if given.task:
        child(given.task[0], "".join(given.task[1:]))
        return
    begun, wanted = time.monotonic(), given.only.split(",")
    timing = [s for s in TIMED if s in wanted]
    os.environ.setdefault("TRITON_CACHE_DIR", tempfile.mkdtemp())
    checked(tasks(wanted), begun + given.seconds * (0.6 if timing else 0.95))
    for section in timing:
        process = subprocess.Popen([sys.executable, __file__, "--task", section], cwd=ROOT)
        try:
            process.wait(max(0.5, begun + given.seconds - 2 - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            print(f"{section}: out of time", flush=True)
    import torch

    results: dict[str, Any] = {"environment": {"torch": torch.__version__}}
    if torch.cuda.is_available():
        results["environment"]["device"] = torch.cuda.get_device_name()
    for path in sorted(folder().glob("gpu_quant_formats_*.json")):
        results[path.stem.removeprefix("gpu_quant_formats_")] = json.loads(path.read_text())
    (folder() / "gpu_quant_formats.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
